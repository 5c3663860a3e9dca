"""Programs that choose groups: no more work than hand-written loops, but for rounds.

Covers: benchmarks, drjax.backends.xla.idle_chunks.
"""

import jax
import pytest

from benchmarks import chosen
from benchmarks.chosen import OURS, WRITTEN

N = 16
# Slices that ours holds more, one for each that is chosen; older XLA copies another.
KEPT = 2.5 if jax.__version_info__ >= (0, 12) else 3.5
# A forward pass of the chosen groups, where the server comes between it and the
# backward pass.
AGAIN = {
    "the slices of the best group": 1,
    "the slices of one group": 1,
    "those of a batch of two": 2,
}


@pytest.fixture(scope="module")
def rows():
    rows = chosen.measure((N,), 1, show_progress=False)
    return {(row["task"], row["how"]): row for row in rows}


@pytest.mark.parametrize("task", chosen.TASKS)
def test_no_more_work(rows, task):
    ours, written = rows[task, OURS], rows[task, WRITTEN]
    assert ours["passes"] == pytest.approx(written["passes"] + AGAIN.get(task, 0) / N)
    model, slices = 4 * chosen.WIDTH**2, 4 * chosen.BATCH * chosen.WIDTH
    assert ours["temp"] <= written["temp"] + 2 * model + KEPT * slices


def test_the_table(rows):
    assert chosen.markdown([*rows.values()]).count("\n") == 4 + 2 * len(chosen.TASKS)
