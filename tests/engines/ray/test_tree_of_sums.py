"""Workers add up partial reductions, so that the driver gets one.

Covers: drjax.engines.ray.tree_of_sums.
"""

import pytest

from drjax.engines.ray.tree_of_sums import MOST, TreeOfSums


@pytest.mark.parametrize("count", [0, 1, 2, 4, 5, 15, 16, 17, 100])
def test_each_is_added_once_and_in_order(count):
    sizes = []

    def add(references):
        sizes.append(len(references))
        return sum(references, ())

    tree = TreeOfSums(add)
    for i in range(count):
        tree.append((i,))
    assert tree.total() == (tuple(range(count)) if count else None)
    assert all(1 < size <= MOST for size in sizes)
