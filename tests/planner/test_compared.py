"""What a sum selects is rematerialized, unless the program may tell roundings apart.

Covers: drjax._planner.compared, drjax._planner.bitwise_observable.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import drjax
from drjax._planner.compared import is_only_added
from tests.helpers.compiled import temp_bytes

W = jnp.asarray(np.random.RandomState(0).randn(16, 16), jnp.float32)
CONTINUOUS = {
    "itself": lambda x: x,
    "a sum of squares": lambda x: jnp.sum(x**2),
    "a product": lambda x: jnp.tanh(x @ x) - jnp.exp(x) / 3,
    "chosen by another": lambda x: jnp.where(W > 0, x, 0),
    "in a jit": jax.jit(lambda x: jnp.sin(x) + 1),
    "a derivative": jax.grad(lambda x: jnp.sum(jnp.sin(x) ** 2)),
    "for each group": lambda x: drjax.reduce_sum(
        drjax.map_fn(lambda y, i: y * i, (drjax.broadcast(x), jnp.arange(4.0)))
    ),
}
COMPARED = {
    "its sign": jnp.sign,
    "an order": lambda x: x > 0,
    "a condition": lambda x: jnp.where(x > 0, x, 0),
    "a maximum": jnp.max,
    "an index": lambda x: W[jnp.int32(x[0, 0])],
    "integers": lambda x: x.astype(jnp.int32),
    "in a jit": jax.jit(lambda x: x == W),
    "in a loop": lambda x: jax.lax.fori_loop(0, 3, lambda i, y: y + x, x),
    "in each group": lambda x: drjax.map_fn(
        lambda y, i: y == i, (drjax.broadcast(x), jnp.ones((4, 16, 16)))
    ),
    "among groups": lambda x: drjax.reduce_max(drjax.broadcast(x)),
}


def only_added(fn):
    jaxpr = jax.make_jaxpr(drjax.program(clients=4)(lambda x: fn(x)))(W).jaxpr
    return is_only_added(jaxpr.eqns, jaxpr.invars[0])


@pytest.mark.parametrize("name", CONTINUOUS)
def test_continuous_functions(name):
    assert only_added(CONTINUOUS[name])


@pytest.mark.parametrize("name", COMPARED)
def test_what_tells_roundings_apart(name):
    assert not only_added(COMPARED[name])


def best(n, result=lambda y: jnp.sum(y**2), saved=False):
    """Of the slices of the group with the least loss, a function."""

    def of_group(w, x):
        y = jnp.tanh(jnp.tanh(x @ w) @ w)
        return y, jnp.sum(y**2)

    @drjax.program(clients=n)
    def program(w, x):
        slices, losses = drjax.map_fn(of_group, (drjax.broadcast(w), x))
        chosen = drjax.select(slices, drjax.reduce_argmin(losses))
        return (result(chosen), slices) if saved else result(chosen)

    return program


def arguments(n):
    return W, jnp.asarray(np.random.RandomState(1).randn(n, 64, 16), jnp.float32)


@pytest.mark.once
@pytest.mark.parametrize("derived", [lambda f: f, jax.value_and_grad])
@pytest.mark.parametrize("step", [1, 3])
def test_memory_does_not_grow_with_the_groups(derived, step):
    run = lambda n: drjax.jit(derived(best(n)), groups_per_step=step)
    few, many = (temp_bytes(run(n), *arguments(n)) for n in (12, 96))
    assert many - few < 84 * 16
    args = arguments(12)
    for x, y in zip(
        jax.tree.leaves(run(12)(*args)),
        jax.tree.leaves(jax.jit(derived(best(12)))(*args)),
        strict=True,
    ):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-5)


def mean_of_some(n):
    @drjax.program(clients=n)
    def program(w, x):
        fn = lambda w, x: jnp.tanh(jnp.tanh(x @ w) @ w)
        slices = drjax.map_fn(fn, (drjax.broadcast(w), x))
        mean = drjax.reduce_mean(slices, where=jnp.arange(n) % 6 == 1)
        return jnp.sum(jnp.sin(mean))

    return program


def test_slices_of_a_mask_are_not_saved():
    run = lambda n: drjax.jit(jax.value_and_grad(mean_of_some(n)), groups_per_step=1)
    few, many = (temp_bytes(run(n), *arguments(n)) for n in (12, 96))
    assert many - few < 84 * 16
    plan = drjax.make_plan(jax.value_and_grad(mean_of_some(12)))(*arguments(12))
    kept = [v for v in plan.rounds[0].local.outputs if v.name in plan.kept()]
    assert not any(len(v.shape) > 1 for v in kept)
    # Tests of numbers of a group that takes part: the compiler drops them.
    compiled: Any = run(12).lower(*arguments(12)).compile()
    assert "is-finite(f32[64,16]" not in compiled.as_text()


def test_slices_that_are_compared_or_returned_are_saved():
    n, slices = 12, 12 * 64 * 16 * 4
    args = arguments(n)
    signs = best(n, lambda y: jnp.sum(jnp.sign(y - 0.5)))
    assert temp_bytes(drjax.jit(signs, groups_per_step=1), *args) >= slices
    chosen, every = drjax.jit(best(n, lambda y: y, saved=True), groups_per_step=1)(
        *args
    )
    assert any(np.array_equal(chosen, y) for y in every)
