"""Messages as bytes.

Covers: drjax.engines.core.wire_format.
"""

import ml_dtypes
import numpy as np

from drjax.engines.core import wire_format
from drjax.engines.core.messages import Block, BlockResult


def same(x, y):
    assert (x.dtype, x.shape) == (y.dtype, y.shape)
    np.testing.assert_array_equal(x, y)


def test_arrays_of_any_dtype_and_order():
    arrays = [
        np.arange(6, dtype=np.float32).reshape(2, 3).T,
        np.array(1.5, ml_dtypes.bfloat16),
        np.array([True, False]),
        np.zeros((0, 2), np.int8),
        np.array([1 + 2j], np.complex64),
    ]
    about = {"text": "\u00e9", "numbers": [1, None, 0.5]}
    header, again = wire_format.from_bytes(wire_format.to_bytes(about, arrays))
    assert header == about
    for x, y in zip(again, arrays, strict=True):
        same(x, y)
        assert not x.flags.writeable


def test_results_of_blocks():
    block = Block(np.array([4, 7], np.int32), np.array([True, False]), [np.ones(2)])
    slices, partial = [np.arange(4.0).reshape(2, 2)], np.array([1, 2], np.float32)
    result = BlockResult([partial, None], slices, {7: "why"}, 5, 0.25, "a piece")
    data = wire_format.result_to_bytes(block, result)
    groups, done = wire_format.result_from_bytes(data)
    same(groups.groups, block.groups)
    same(groups.valid, block.valid)
    assert groups.slices == [] and done.piece is None and done.partials == []
    assert (done.failed, done.pid, done.seconds) == ({7: "why"}, 5, 0.25)
    same(done.slices[0], slices[0])
