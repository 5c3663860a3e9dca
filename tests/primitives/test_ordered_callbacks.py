"""Ordered effects run once for each group, in the order of the groups.

Covers: drjax._primitives.ordered_callbacks, drjax._compat.rule_registries.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import drjax
from tests.helpers.cases import checkerboard
from tests.helpers.meshes import in_mesh_of

N = 4
X = np.arange(N, dtype=np.float32)


def by_io(callback, *args):
    io_callback(callback, None, *args, ordered=True)


def by_debug(callback, *args):
    jax.debug.callback(callback, *args, ordered=True)


RUNS = {
    "eager": lambda f: f,
    "jax.jit": jax.jit,
    "drjax.jit": drjax.jit,
    "drjax.jit, 1": lambda f: drjax.jit(f, groups_per_step=1),
    "drjax.jit, 3": lambda f: drjax.jit(f, groups_per_step=3),
}


@pytest.mark.parametrize("call", [by_io, by_debug], ids=lambda f: f.__name__)
@pytest.mark.parametrize("run", RUNS)
def test_ordered_effects_run_in_the_order_of_groups(run, call):
    seen = []

    def one(x):
        call(lambda i: seen.append(("first", int(i))), drjax.partition_index())
        call(lambda x: seen.append(("second", int(x))), x)
        return x

    f = drjax.program(clients=N)(lambda x: drjax.reduce_sum(drjax.map_fn(one, x)))
    assert RUNS[run](f)(X) == 6
    jax.effects_barrier()
    for name in ("first", "second"):
        assert [i for which, i in seen if which == name] == [0, 1, 2, 3]
    # Of one group, the first one comes before the second one.
    assert all(seen.index(("first", i)) < seen.index(("second", i)) for i in range(N))


@pytest.mark.parametrize("run", RUNS)
def test_each_group_calls_with_what_all_groups_share(run):
    seen = []

    def one(x):
        by_io(lambda y: seen.append(int(y)), jnp.int32(7))
        return x

    f = drjax.program(clients=N)(lambda x: drjax.map_fn(one, x))
    RUNS[run](f)(X)
    jax.effects_barrier()
    assert seen == [7] * N


@checkerboard(2, run=["jax.jit", "drjax.jit", "drjax.jit, 1"], devices=[2, 3])
def test_ordered_callbacks_on_a_mesh(run, devices):
    """The order is that of each device; JAX refuses other ordered effects there."""
    seen = []

    def one(x):
        result = jax.ShapeDtypeStruct((), x.dtype)

        def double(i, x):
            seen.append(int(i))
            return np.float32(2 * x)

        return io_callback(double, result, drjax.partition_index(), x, ordered=True)

    f = drjax.program(clients=N)(lambda x: drjax.reduce_sum(drjax.map_fn(one, x)))
    with in_mesh_of({"clients": devices}):
        assert RUNS[run](f)(jnp.asarray(X)) == 12
        jax.effects_barrier()
    assert sorted(seen) == [0, 1, 2, 3]
    k = -(-N // devices)  # groups of a device
    for first in range(0, N, k):
        own = [i for i in seen if first <= i < first + k]
        assert own == sorted(own)


def test_callbacks_in_loops_and_levels_are_ordered():
    seen = []

    def one(x):
        def body(c, i):
            by_io(lambda x, i: seen.append((int(i), int(x))), x, i)
            return c, None

        return jax.lax.scan(body, x, jnp.arange(2))[0]

    @drjax.program(pods=2, groups=2)
    def f(x):
        return drjax.reduce_sum(drjax.map_fn(one, x))

    jax.jit(f)(X.reshape(2, 2))
    jax.effects_barrier()
    assert seen == [(i, x) for i in range(2) for x in range(N)]
