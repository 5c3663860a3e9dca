"""Blocks of coordinates of slices that workers have.

Covers: drjax.engines.slices.coordinates, drjax.engines.slices.worker_slices.
"""

import numpy as np
import pytest

from drjax.engines.slices.worker_slices import Columns, Pieces


@pytest.mark.parametrize("coordinates", [[2, 3, 4], [4, 0], []])
def test_columns_of_pieces(coordinates):
    x = np.arange(4 * 6 * 2, dtype=np.float32).reshape(4, 3, 2, 2)
    pieces, piece = {"a": [x[:0], x[:2]], "b": [x[:0], x[2:]]}, np.array([1, 0, -1, 0])
    which = Columns(np.arange(6), 6, np.full(2, np.nan, np.float32))
    places = piece, np.array([1, 1, 0, 0])
    columns = Pieces([("a", 1), ("b", 1)], *places, which)
    whole = x[[3, 1, 0, 0]]
    whole[2] = np.nan
    expected = whole.reshape(4, 6, 2).transpose(1, 0, 2)
    index = np.array(coordinates, int)
    np.testing.assert_array_equal(
        columns[index].assemble(pieces.__getitem__), expected[index]
    )
