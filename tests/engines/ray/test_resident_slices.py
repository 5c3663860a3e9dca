"""Slices that stay where workers can read them.

Covers: drjax.engines.ray.resident_slices.
"""

import ml_dtypes
import numpy as np
import pytest

from drjax.engines.ray import resident_slices
from drjax.engines.ray.resident_slices import ResidentSlices


class Store:
    """Copies of what was stored, by number."""

    def __init__(self, limit=10**6):
        self.stored = []
        self.resident = ResidentSlices(self.put, self.stored.__getitem__, limit)

    def put(self, slices):
        self.stored.append([x.copy() for x in slices])
        return len(self.stored) - 1


@pytest.mark.parametrize(
    "dtype",
    ["float32", "float64", "complex64", "complex128", "int8", "uint32", "bool",
     ml_dtypes.bfloat16],
)  # fmt: skip
def test_slices_are_stored_again_only_if_they_changed(dtype):
    store, x = Store(), np.arange(12).reshape(4, 3).astype(dtype)
    y = np.asfortranarray(x)
    assert [store.resident.reference("a", [x, y]) for _ in range(3)] == [0, 0, 0]
    assert store.resident.reference("a", [x.copy(), y.copy()]) == 0
    assert store.resident.reference("b", [x, y]) == 1
    y[3, 2] = 0
    assert store.resident.reference("a", [x, y]) == 2
    np.testing.assert_array_equal(store.stored[2][1], y)
    assert store.resident.reference("a", [x[:3], y[:3]]) == 3
    assert (
        store.resident.reference("a", []) == 4
        and store.resident.reference("a", []) == 4
    )


def test_the_same_is_bit_by_bit():
    store, x = Store(), np.array([0.0, np.nan], np.float32)
    assert [store.resident.reference("a", [x]) for _ in range(2)] == [0, 0]
    x[0] = -0.0
    assert store.resident.reference("a", [x]) == 1
    assert store.resident.reference("a", [x.astype(np.float64)]) == 2
    empty = np.zeros((0, 3), np.float32)
    assert [store.resident.reference("b", [empty]) for _ in range(2)] == [3, 3]


def test_no_more_stays_than_the_limit():
    store, x = Store(limit=100), np.zeros(10, np.float32)  # 40 bytes
    refer = lambda key: store.resident.reference(key, [x])
    store.resident.begin()
    assert [refer(key) for key in "abcabc"] == [0, 1, 2, 0, 1, 3]
    for _ in range(resident_slices._OLD + 1):
        store.resident.begin()
        refer("a")
    assert [refer("c"), refer("c"), refer("a")] == [4, 4, 0]  # for b, which was old
    assert refer("b") == 5 and refer("b") == 6


def test_keys_of_one_place_share_slices():
    store, x, y = Store(limit=80), np.zeros(10, np.float32), np.ones(10, np.float32)
    refer = lambda key, x, place=0: store.resident.reference(key, [x], place)
    assert [refer(key, x) for key in "aba"] == [0, 0, 0]
    assert refer("c", x, place=1) == 1  # which fills the store
    # Another key still has the former slices of "a", which take part of the limit.
    assert [refer("a", y), refer("a", y), refer("b", x)] == [2, 3, 0]
    assert [refer("b", y), refer("b", y)] == [4, 4]  # now no key has them
