"""Arrays that nobody can change.

Covers: drjax.engines.slices.constant.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import drjax
from drjax.backends import Groups, in_process
from drjax.engines.slices.constant import constant, identity, once
from tests.helpers.conformance import slices_for, weighted_plan


def test_parts_are_the_same_by_address():
    x = constant(np.arange(12.0).reshape(4, 3))
    assert identity(x[1:3]) == identity(x[1:3]) is not None
    parts = x, x[:2], x[1:3], x[:, 1:], x.T, x[::2], x.view(np.int64)
    assert len({identity(part) for part in parts}) == len(parts)
    assert identity(constant(x)) not in (None, identity(x))  # another copy


def test_what_cannot_change_is_computed_once():
    x, seen = constant(np.arange(6.0)), []

    def total(y):
        seen.append(y)
        return y.sum()

    array = np.arange(6.0)
    for _ in range(2):
        assert [once(total, y) for y in (x, x[2:], x[:2])] == [15, 14, 1]
        assert once(total, array) == 15
    assert len(seen) == 5  # the array twice
    assert once(np.max, x) == 5


def test_what_is_computed_of_them_has_no_identity():
    x = constant(np.arange(12.0))
    for y in x.copy(), x + 1, x[[0, 1]], np.asarray(x), np.array(x), x.astype("f4"):
        assert identity(y) is None
    with pytest.raises(ValueError, match="read-only"):
        x[0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        x.flags.writeable = True


def test_put_copies_arrays():
    n, (x, w) = 6, slices_for(6)
    with in_process.compile(weighted_plan(n), block_size=3) as run:
        right = run(np.float32(2), (x, w))
        data = run.put((x, jnp.asarray(w)))
        assert identity(data[0]) is not None and identity(data[1]) is not None
        x[:] = -1  # of the caller; the copy stays
        for _ in range(2):
            jax.tree.map(np.testing.assert_array_equal, run(np.float32(2), data), right)
        with pytest.raises(drjax.DrjaxTypeError, match="put needs arrays, got Groups"):
            run.put(Groups([*x]))


def test_put_has_the_dtypes_of_calls():
    mean = drjax.program(clients=3)(drjax.reduce_mean)
    run = in_process.compile(drjax.make_plan(mean)(np.zeros(3, np.float32)))
    assert run.put(np.arange(3.0)).dtype == np.float32
    key = jax.random.key(0)
    assert run.put(key) is key
    assert run(run.put(np.arange(3.0))) == 1
