"""Loops and batches over partitioned values, outside of mapped functions.

Covers: drjax._planner.scan_over_groups, drjax._planner.partitioning.control_flow,
drjax._planner.group_index.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import drjax
from drjax.backends import reference
from tests.helpers.cases import checkerboard

pytestmark = pytest.mark.usefixtures("leaks_unchecked")

N = 4
program = drjax.program(clients=N)
X = np.cos(np.arange(N * 3.0, dtype=np.float32)).reshape(N, 3)
W = np.linspace(0.1, 0.9, 9, dtype=np.float32).reshape(3, 3)


def slices(x):
    return drjax.map_fn(jnp.sin, x)


def sum_of_scan(w, x):
    def step(carry, slice_):
        total, squares, unchanged = carry
        return (total + w @ slice_, slice_**2 + squares, unchanged), jnp.cos(
            slice_
        ) * unchanged

    carry = jnp.ones(3), jnp.zeros(3), jnp.float32(2)
    (total, squares, _), ys = lax.scan(step, carry, slices(x))
    return total * squares + drjax.reduce_mean(ys)


def rounds(w, x):
    def a_round(w, _):
        return w - 0.1 * drjax.reduce_mean(lax.map(lambda r: jnp.outer(r, w @ r), x)), 0

    return lax.scan(a_round, w, None, length=2)[0]


MAPS = {
    "map": lambda w, x: drjax.reduce_mean(
        lax.map(lambda r: jnp.tanh(w @ r), slices(x))
    ),
    "map of several": lambda w, x: drjax.reduce_mean(
        lax.map(lambda rs: rs[0] * rs[1] * rs[2], (slices(x), x, jnp.arange(4.0)))
    ),
    "loop in a map": lambda w, x: drjax.reduce_sum(
        lax.map(lambda r: lax.fori_loop(0, 2, lambda _, r: w @ r, r), slices(x))
    ),
    "slices of the result": lambda w, x: lax.map(lambda r: w @ r, slices(x)),
    "sums of a scan": sum_of_scan,
    "backwards": lambda w, x: lax.scan(
        lambda c, r: (c + r, r), jnp.zeros(3), slices(x), reverse=True
    )[0],
    "sum from a Python number": lambda w, x: lax.scan(
        lambda c, r: (c + (w @ r).sum(), r), 0.0, slices(x)
    )[0],
    "in rounds": lambda w, x: rounds(w, slices(x)),
}


@checkerboard(3, name=MAPS)
def test_loops_over_the_groups_are_maps(name):
    fn = program(MAPS[name])
    agree(fn)
    plan = drjax.make_plan(fn)(W, X)
    assert all(loop.length != N for r in plan.rounds for loop in r.loops)


def agree(fn) -> None:
    both = jax.value_and_grad(lambda w, x: jnp.sum(jnp.sin(fn(w, x))), (0, 1))
    want = jax.jit(both)(W, X)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)
    plan = drjax.make_plan(both)(W, X)
    jax.tree.map(close, reference.compile(plan)(W, X), want)
    jax.tree.map(close, drjax.jit(both, groups_per_step=1)(W, X), want)
    ws = jnp.stack([W, 2 * W])
    batched = jax.vmap(fn, (0, None))
    close(drjax.jit(batched)(ws, X), jax.jit(batched)(ws, X))


MIXED = {
    "prefix sums": lambda c, r: (c + r, c),
    "products": lambda c, r: (c * r, r),
    "twice": lambda c, r: (c + c + r, r),
    "in the work": lambda c, r: (c + jnp.sin(c) * r, r),
    "a swap": lambda c, r: (r, r),
}


# The step reads the sum by its conversion to a type that is not weak.
READ = {
    "its sine": lambda c, r: (c + r[0], jnp.sin(c + jnp.float32(0))),
    "itself": lambda c, r: (c + jnp.sum(r), c * r),
}


@pytest.mark.parametrize("name", READ)
def test_a_sum_from_a_python_number_that_is_read_is_refused(name):
    fn = program(lambda x: lax.scan(READ[name], 0.0, slices(x)))
    with pytest.raises(drjax.PlanError, match="scan at "):
        drjax.make_plan(fn)(X)


@pytest.mark.parametrize("name", MIXED)
def test_other_loops_over_the_groups_are_refused(name):
    fn = program(lambda x: lax.scan(MIXED[name], jnp.ones(3), slices(x))[0])
    with pytest.raises(drjax.PlanError, match=r"scan at .*inside the function given"):
        drjax.make_plan(fn)(X)


def test_loops_that_read_other_groups_are_refused():
    def fn(x):
        y = slices(x)
        return lax.map(lambda r: y @ r, y)

    with pytest.raises(drjax.PlanError, match=r"scan at .*inside the function given"):
        drjax.make_plan(program(fn))(X)


def test_loops_that_end_in_each_group_in_its_own_time():
    """All groups ask, in each step, whether any goes on."""

    @program
    def fn(x):
        grow = lambda slice_: lax.while_loop(
            lambda r: jnp.sum(r) < 9.0, lambda r: 1.5 * r + 0.1, slice_
        )
        return drjax.reduce_mean(jax.vmap(grow)(jnp.abs(slices(x))))

    plan = drjax.make_plan(fn)(X)
    want = jax.jit(fn)(X)
    for got in (reference.compile(plan)(X), drjax.jit(fn, groups_per_step=1)(X)):
        np.testing.assert_allclose(got, want, rtol=1e-5)


IMAGES = np.cos(np.arange(N * 2 * 5 * 5, dtype=np.float32)).reshape(N, 2, 5, 5)
KERNEL = np.sin(np.arange(3 * 2 * 2 * 2, dtype=np.float32)).reshape(3, 2, 2, 2)


@pytest.mark.sampled
@pytest.mark.parametrize("padding", ["SAME", "VALID"])
def test_convolutions(padding):
    """The derivative in the kernel adds up over the groups, as their batch does."""

    @program
    def fn(kernel, x):
        convolved = lax.conv(slices(x), kernel, (1, 2), padding)
        pooled = lax.reduce_window(
            convolved, -jnp.inf, lax.max, (1, 1, 2, 2), (1, 1, 1, 1), "VALID"
        )
        return jnp.sum(drjax.reduce_mean(jnp.sin(pooled)))

    both = jax.value_and_grad(fn, (0, 1))
    plan = drjax.make_plan(both)(KERNEL, IMAGES)
    want = jax.jit(both)(KERNEL, IMAGES)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    jax.tree.map(close, reference.compile(plan)(KERNEL, IMAGES), want)
    got = drjax.jit(both, groups_per_step=2)(KERNEL, IMAGES)
    jax.tree.map(close, got, want)
    assert KERNEL.shape in [r.source.shape for a in plan.rounds for r in a.reduces]


def test_fourier_transforms():
    @program
    def fn(w, x):
        spectrum = jnp.fft.rfft(slices(x) @ w)
        return drjax.reduce_mean(
            jnp.fft.irfft(spectrum * 2, n=3) + jnp.abs(spectrum[:, :1])
        )

    agree(fn)
    mixes = program(lambda x: jnp.abs(jnp.fft.fft(slices(x), axis=0)))
    with pytest.raises(drjax.PlanError, match="may mix the slices"):
        drjax.make_plan(mixes)(X)
