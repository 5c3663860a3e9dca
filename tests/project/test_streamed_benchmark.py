"""What the benchmark of loops over groups promises about counts, never about times.

Covers: benchmarks.
"""

import jax
import pytest

from benchmarks import streamed
from benchmarks.streamed import OURS, WRITTEN

# Places and counters of loops.
SLACK = 1024


@pytest.fixture(scope="module")
def rows():
    # What JAX keeps of a gather in a shard_map is in a cycle until it is collected.
    with jax.check_tracer_leaks(False):
        rows = streamed.measure((64,), 1, show_progress=False)
    return {
        (row["task"].removesuffix(", all"), row["implementation"]): row for row in rows
    }


@pytest.mark.slow
@pytest.mark.parametrize("task", streamed.TASKS)
def test_no_more_work_bytes_or_memory_than_hand_written_code(rows, task):
    ours, written = rows[task, OURS], rows[task, WRITTEN]
    assert ours["operations"] <= written["operations"]
    assert ours["bytes"] <= written["bytes"]
    assert ours["temp"] <= 1.05 * written["temp"] + SLACK


@pytest.mark.slow
def test_the_table(rows):
    table = streamed.markdown([*rows.values()], "CPU")
    assert table.count("| states of groups, donated | 64 | drjax.jit |") == 2
