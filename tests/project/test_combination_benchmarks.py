"""What the benchmarks of ways to combine groups promise about bytes, never about times.

Covers: benchmarks.
"""

import jax
import pytest

from benchmarks import combinations
from benchmarks.combinations import BASELINE, OURS, PLANNED

pytestmark = pytest.mark.slow

# A fold by any function holds parts of the states of m devices, and for a gradient two
# states for each group.
MORE_MEMORY = {"logsumexp", "gradient of a product"}
# The slice of a device, and a few scalars.
SLACK = 4 * 512 * combinations.N // combinations.DEVICES + 64


@pytest.fixture(scope="module")
def rows():
    # jnp.median leaves tracers in a cycle until they are collected.
    with jax.check_tracer_leaks(False):
        rows = combinations.measure(512, 1, show_progress=False)
    return {(row["task"], row["implementation"]): row for row in rows}


@pytest.mark.parametrize("name", [OURS, PLANNED])
@pytest.mark.parametrize("task", [*combinations.TASKS, *combinations.LEVELS])
def test_no_more_bytes_or_memory_than_hand_written_code(rows, task, name):
    row, baseline = rows[task, name], rows[task, BASELINE]
    total = lambda row: sum(row["bytes"].values())
    # The planner may send the cotangent of a coordinate with its numbers.
    assert total(row) <= 1.15 * total(baseline)
    if task not in MORE_MEMORY:
        assert row["temp"] <= baseline["temp"] + SLACK


def test_the_table(rows):
    table = combinations.markdown([*rows.values()], 512)
    assert table.count("\n") == 4 + len(rows) and "| median | drjax |" in table
