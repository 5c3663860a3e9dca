"""What goes between TPU slices and inside them is what hand-written code sends.

Covers: benchmarks.
"""

import pytest

from benchmarks import between_slices
from benchmarks.between_slices import BOTH, ONE, OURS, PLANNED
from tests.helpers.compiled import BY_TPU_COMPILER

pytestmark = [
    pytest.mark.slow,
    BY_TPU_COMPILER,
]


@pytest.fixture(scope="module")
def rows():
    rows = between_slices.measure((2,))
    return {(row["task"], row["implementation"]): row for row in rows}


@pytest.mark.parametrize("name", [OURS, PLANNED])
@pytest.mark.parametrize("task", between_slices.tasks(2))
def test_no_more_than_the_best_hand_written_code(rows, task, name):
    row, best = rows[task, name], rows[task, BOTH]
    assert row["between"] <= 1.01 * best["between"]
    assert row["inside"] <= 1.05 * best["inside"]
    assert row["temp"] <= 1.05 * best["temp"]
    assert row["between"] < 0.3 * rows[task, ONE]["between"]


def test_the_table(rows):
    table = between_slices.markdown([*rows.values()])
    assert table.count("\n") == 4 + len(rows)
