"""Programs that choose groups: no more work than hand-written loops.

Covers: benchmarks, drjax.backends.xla.idle_chunks.
"""

import jax
import pytest

from benchmarks import chosen
from benchmarks.chosen import OURS, WRITTEN

N = 16
# Slices that ours holds more: `benchmarks.refused` has why. Older XLA copies another.
OLDER = jax.__version_info__ < (0, 12)
KEPT = {"the slices of two groups": 1.76 if OLDER else 0.76}


@pytest.fixture(scope="module")
def rows():
    rows = chosen.measure((N,), 1, show_progress=False)
    return {(row["task"], row["how"]): row for row in rows}


@pytest.mark.parametrize("task", chosen.TASKS)
def test_no_more_work(rows, task):
    ours, written = rows[task, OURS], rows[task, WRITTEN]
    assert ours["passes"] == pytest.approx(written["passes"])
    slices = 4 * chosen.BATCH * chosen.WIDTH
    assert ours["temp"] <= 1.005 * written["temp"] + KEPT.get(task, 0) * slices


def test_the_table(rows):
    assert chosen.markdown([*rows.values()]).count("\n") == 4 + 2 * len(chosen.TASKS)
