"""Slices that stay where workers can read them.

Covers: drjax.engines.ray.resident_slices.
"""

import ml_dtypes
import numpy as np
import pytest

from drjax.engines.ray import resident_slices
from drjax.engines.ray.resident_slices import ResidentSlices
from drjax.engines.slices.constant import constant


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


def test_what_cannot_change_is_not_compared(monkeypatch):
    store, x = Store(), constant(np.arange(12.0))
    compared, same = [], resident_slices._same
    spy = lambda a, b: compared.append(1) or same(a, b)
    monkeypatch.setattr(resident_slices, "_same", spy)
    refer = lambda x, key="a": store.resident.reference(key, [x], place=0)
    assert [refer(x[:6]) for _ in range(3)] == [0, 0, 0] and not compared
    assert type(store.stored[0][0]) is np.ndarray
    assert refer(np.arange(6.0)) == 0 and len(compared) == 1
    assert refer(x[:6]) == 0 and refer(x[:6]) == 0 and len(compared) == 2
    assert refer(x[6:]) == 1
    assert refer(constant(x)[6:]) == 1  # another copy: compared


def test_what_is_stored_has_a_number():
    store, x = Store(limit=200), np.arange(12.0)
    refer = lambda x, key="a": store.resident.reference(key, [x], place=0)
    refer(x), refer(x, "b")
    assert store.resident.numbers == {0: 0} and not store.resident.removed
    refer(x + 1)
    assert store.resident.numbers == {0: 0, 1: 1}  # "b" has it
    refer(x + 1, "b")
    assert store.resident.numbers == {1: 1} and store.resident.removed == 1
    refer(np.zeros(100), "c")  # above the limit
    assert store.resident.numbers == {1: 1}
