"""What the benchmarks of moves promise about bytes and memory, never about times.

Covers: benchmarks.
"""

import jax
import pytest

from benchmarks import moves
from benchmarks.moves import BASELINE, DEVICES, OURS, PLANNED

pytestmark = pytest.mark.slow

N = 512
# An index is a constant of the program that is cut, clamped and sorted.
SLACK = 4 * 4 * N + 64


@pytest.fixture(scope="module")
def rows():
    assert jax.device_count() >= DEVICES
    # What JAX keeps of a gather in a shard_map is in a cycle until it is collected.
    with jax.check_tracer_leaks(False):
        rows = [*moves.measure((N,), turns=1)]
    return {(row["task"], row["implementation"]): row for row in rows}


@pytest.mark.parametrize("name", [OURS, PLANNED])
@pytest.mark.parametrize("task", [*moves.tasks(N, False)])
def test_no_more_bytes_or_memory_than_hand_written_code(rows, task, name):
    row, baseline = rows[task, name], rows[task, BASELINE]
    total = lambda row: sum(row["bytes"].values())
    assert total(row) <= 1.05 * total(baseline)
    assert row["temp"] <= 1.05 * baseline["temp"] + SLACK


def test_the_table(rows):
    table = moves.markdown([*rows.values()], "CPU")
    assert table.count("\n") == 4 + len(rows)
    assert "| random permutation | 512 | drjax | all-to-all" in table
