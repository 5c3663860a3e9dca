"""The slice of one group: a device reads one of its slices, as hand-written code does.

Covers: drjax._primitives.select_slice, drjax._primitives.segments, drjax._api.select.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import drjax
from drjax._primitives.segments import place_in_segment
from drjax.backends import in_process, reference, xla
from tests.helpers.cases import checkerboard
from tests.helpers.meshes import EXPLICIT, in_mesh, make_mesh

N, D, DEVICES, AXIS = 32, 20_000, 4, "clients"
K = N // DEVICES
RUNS = {
    "jax.jit": jax.jit,
    "drjax.jit": drjax.jit,
    "one at a time": functools.partial(drjax.jit, groups_per_step=1),
    "three at a time": functools.partial(drjax.jit, groups_per_step=3),
}


def handwritten(x, i):
    def of_device(x, i):
        position = jnp.where(i < 0, i + N, i) - lax.axis_index(AXIS) * K
        own = x[position.clip(0, K - 1)]
        chosen = (position >= 0) & (position < K)
        chosen = lax.expand_dims(chosen, range(chosen.ndim, own.ndim))
        return lax.psum(jnp.where(chosen, own, 0), AXIS)

    return jax.shard_map(of_device, in_specs=(P(AXIS), P()), out_specs=P())(x, i)


def in_order(x, i):
    """Groups of a mask: all of them."""
    return drjax.select(x, i, where=jnp.ones(N, bool))


PROGRAMS = {
    "a slice": drjax.select,
    "of a mask": in_order,
    "an index": lambda x, i: drjax.map_fn(lambda x: x, x)[i],
    "several": lambda x, i: jax.vmap(lambda i: drjax.select(x, i))(i),
}


@checkerboard(4, program=PROGRAMS, run=[*RUNS][:3])
def test_costs_no_more_than_hand_written_code(program, run):
    if program == "an index" and run == "jax.jit":
        pytest.skip("plain indexing, of which the compiler makes the collectives")
    ours = drjax.program(clients=N)(PROGRAMS[program])
    index = jnp.array([5, 31, -2, 5]) if program == "several" else jnp.int32(13)
    x = np.random.RandomState(0).randn(N, D).astype(np.float32)
    with in_mesh(make_mesh({AXIS: DEVICES})):
        own = jax.device_put(x, P(AXIS))
        compiled: list[Any] = [
            jax.jit(f).lower(own, index).compile()
            for f in (RUNS[run](ours), handwritten)
        ]
        for f in compiled:
            np.testing.assert_array_equal(f(own, index), x[np.asarray(index)])
    ours, best = (c.cost_analysis() for c in compiled)
    assert ours["flops"] <= 1.02 * best["flops"]
    loop = 3 * 4 * D if run == "one at a time" else 0  # adds to a carried slice
    assert ours["bytes accessed"] <= 1.02 * best["bytes accessed"] + loop


TREES = {
    "floats": lambda x: x,
    "16 bits": lambda x: x.astype(jnp.bfloat16),
    "8 bits": lambda x: x.astype(jnp.float8_e4m3fn),
    "integers": lambda x: (8 * x).astype(jnp.int8),
    "bools": lambda x: x > 0,
    "complex numbers": lambda x: x * (1 + 2j),
    "keys": lambda x: jax.random.split(jax.random.key(1), x.shape),
}


@checkerboard(12, tree=TREES, run=RUNS, n=[7, 8], mesh=[None, 4])
def test_values_of_every_type(tree, run, n, mesh):
    x = np.random.RandomState(0).randn(n, 3).astype(np.float32)
    x = TREES[tree](jnp.asarray(x))
    same = lambda x, y: np.testing.assert_array_equal(raw(x), raw(y))
    fn = drjax.program(clients=n)(
        lambda x, i: (
            drjax.select(x, i),
            jax.vmap(lambda i: drjax.select(x, i))(i + jnp.arange(3)),
            jax.vmap(lambda x: drjax.select(x, i), 1)(x),
        )
    )
    with in_mesh(None if mesh is None else make_mesh({AXIS: mesh})):
        step = RUNS[run](fn)
        for i in (0, 2, n - 1, -1, n, -n - 1):  # data: clamped
            index = np.clip(i % n if -n <= i < 0 else i, 0, n - 1)
            several = [
                np.clip(j + n if j < 0 else j, 0, n - 1) for j in (i, i + 1, i + 2)
            ]
            one, many, columns = step(x, jnp.int32(i))
            same(one, x[index])
            same(many, x[np.array(several)])
            same(columns, x[index])


def raw(x):
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if is_key else x.astype(x.dtype))


@checkerboard(6, bad=[np.nan, np.inf, -np.inf], run=RUNS, n=[7, 8])
def test_nothing_of_other_groups_leaks(bad, run, n):
    x = jnp.full((n, 2), bad).at[3].set(1.0)
    w = jnp.ones(2)

    def loss(w, x, i):
        return jnp.sum(drjax.select(drjax.map_fn(lambda x: x * w, x), i) ** 2)

    fn = drjax.program(clients=n)(loss)
    with in_mesh(make_mesh({AXIS: 4})):
        value, gradient = RUNS[run](jax.value_and_grad(fn, (0, 1)))(w, x, jnp.int32(3))
    assert value == 2
    # That of w is a sum over the groups, of zeros times what they have.
    np.testing.assert_array_equal(gradient[1][3], [2.0, 2.0])
    np.testing.assert_array_equal(jnp.delete(gradient[1], 3, 0), np.zeros((n - 1, 2)))


def twice(f):
    return jax.grad(lambda x, i: jnp.sum(jax.grad(f)(x, i) ** 2))


@pytest.mark.once
@checkerboard(4, run=RUNS, n=[7, 8])
def test_derivatives(run, n):
    x = jnp.asarray(np.random.RandomState(0).randn(n, 3))
    i = jnp.array([2, 5, 2, -1])
    one = drjax.program(clients=n)(
        lambda x, i: jnp.sum(drjax.select(jnp.sin(x), i) ** 2)
    )
    many = drjax.program(clients=n)(
        lambda x, i: jnp.sum(jax.vmap(lambda i: drjax.select(x, i))(i) ** 3)
    )
    plain_one = lambda x, i: jnp.sum(jnp.sin(x)[i] ** 2)
    plain_many = lambda x, i: jnp.sum(x[i] ** 3)
    with in_mesh(make_mesh({AXIS: 4})):
        for ours, plain, index in ((one, plain_one, i[0]), (many, plain_many, i)):
            for derivative in (jax.grad, twice):
                np.testing.assert_allclose(
                    RUNS[run](derivative(ours))(x, index),
                    derivative(plain)(x, index),
                    rtol=1e-5,
                )
            tangent = lambda f, index=index: jax.jvp(lambda x: f(x, index), (x,), (x,))
            np.testing.assert_allclose(
                tangent(RUNS[run](ours)), tangent(plain), rtol=1e-5
            )


def test_plans_run_everywhere(tmp_path):
    x = jnp.arange(21.0).reshape(7, 3)
    fn = drjax.program(clients=7)(
        lambda x, i: (
            drjax.select(drjax.map_fn(jnp.square, x), i[0]),
            jax.vmap(lambda i: drjax.select(x > 9, i))(i),
        )
    )
    i = jnp.array([4, -1])
    expected = jnp.square(x)[4], (x > 9)[i]
    plan = drjax.make_plan(fn)(x, i)
    plan.save(tmp_path / "plan")
    for each in (plan, drjax.load_plan(tmp_path / "plan")):
        for backend in (reference, xla, in_process):
            got = backend.compile(each)(x, i)
            np.testing.assert_array_equal(got[0], expected[0])
            np.testing.assert_array_equal(got[1], expected[1])


@pytest.mark.parametrize("types", [(), (EXPLICIT,)])
def test_a_mesh_of_many_axes(types):
    """There XLA cannot index the slices of a device: all of them are read."""
    x = jnp.arange(32.0).reshape(8, 4)
    fn = drjax.program(clients=8)(
        lambda x, i: jax.vmap(lambda i: drjax.select(x, i))(i)
    )
    i = jnp.array([3, 7])
    with in_mesh(make_mesh({AXIS: 2, "data": 2, "model": 2}, *types)):
        own = jax.device_put(x, P(AXIS, None) if types else P(AXIS, "model"))
        np.testing.assert_array_equal(jax.jit(fn)(own, i), x[i])


def test_a_batch_of_places_and_its_transpose():
    segments, x = jnp.array([1, 0, 0, 1]), jnp.arange(12.0).reshape(4, 3)
    place = lambda g, x: place_in_segment(g, x, 0, 0)
    for axes, slices in (((0, None), x[0]), ((0, 0), x), ((None, 1), x.T)):
        own = segments if axes[0] == 0 else segments[1]
        fn = lambda x, own=own, axes=axes: jax.vmap(place, axes)(own, x)
        out = fn(slices)
        of_each = slices.T if axes[1] == 1 else jnp.broadcast_to(slices, (4, 3))
        chosen = jnp.broadcast_to(own == 0, 4)[:, None]
        np.testing.assert_array_equal(out, jnp.where(chosen, of_each, 0))
        ct = jnp.arange(24.0, 36).reshape(4, 3)
        (back,) = jax.linear_transpose(fn, slices)(ct)
        assert jnp.vdot(back, slices) == jnp.vdot(out, ct)
