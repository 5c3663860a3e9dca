"""What scans over rounds save and rematerialize.

Covers: drjax._planner.rematerialize_loops, drjax._planner.rematerialize_nested.
"""

import collections
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import drjax
from drjax._jaxprs.walk import deep_equations
from drjax.compiled import Report
from drjax.plan import Scan

N, D, T = 4, 5, 6
RANDOM = np.random.default_rng(0)
W = RANDOM.normal(size=(D, D)).astype(np.float32) / D
S = RANDOM.normal(size=(N, D, D)).astype(np.float32)
X = RANDOM.normal(size=(N, 8, D)).astype(np.float32)


def scans(fn, *args) -> list[Any]:
    """The scans over rounds of a plan."""
    plan = drjax.make_plan(fn)(*args)
    return [step for step in plan.steps if isinstance(step, Scan)]


def primitives(fn, *args):
    """How often each primitive is in the bodies of a plan's scans."""
    stages = (
        stage for scan in scans(fn, *args) for _, stage in scan.bodies[0].stages()
    )
    names = (e.primitive.name for x in stages for e in deep_equations(x.jaxpr))
    return collections.Counter(names)


@drjax.program(clients=N)
def round_with_state(w, state, x):
    """The activations of a group have more bytes than its state, or fewer."""

    def work(w, state, x):
        return jnp.tanh(jnp.tanh(x @ state) @ w).T @ x / 64, 0.9 * state + w

    new, state = drjax.map_fn(work, (drjax.broadcast(w), state, x))
    return drjax.reduce_mean(new), state


def last(w, state, x):
    step = lambda carry, _: (round_with_state(carry[0], carry[1], x), None)
    (w, _), _ = lax.scan(step, (w, state), length=T)
    return jnp.sum(jnp.sin(jnp.asarray(w)))


@pytest.mark.parametrize("examples, shape", [(8, (D, D)), (1, (1, D))])
def test_a_state_is_stacked_where_it_has_fewer_bytes_than_the_residuals(
    examples, shape
):
    gradient, args = jax.grad(last), (W, S, X[:, :examples])
    forward, backward = scans(gradient, *args)
    stacks = forward.outputs[forward.carry :]
    # Once for a round; or the residuals, which are two activations of each example.
    assert {v.shape for v in stacks if v.partitioned} == {(T, *shape)}
    run = drjax.jit(gradient, groups_per_step=1)
    np.testing.assert_allclose(run(*args), jax.jit(gradient)(*args), 1e-4, 1e-6)
    assert backward.reverse


def test_no_more_than_a_state_is_stacked():
    forward, _ = scans(jax.grad(last), W, S, X)
    stacks = forward.outputs[forward.carry :]
    assert [v.shape for v in stacks if v.partitioned] == [(T, D, D)]


@drjax.program(clients=N)
def round_with_momentum(w, state, x):
    """The new state is linear in the old one: its derivative needs neither."""

    def work(w, state, x):
        state = 0.9 * state + jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
        return w - 0.1 * state, state

    new, state = drjax.map_fn(work, (drjax.broadcast(w), state, x))
    return drjax.reduce_mean(new), state


def after_epochs(one_round, w, state, x, rates):
    """Rounds in epochs, as nested scans."""

    def epoch(carry, rates):
        step = lambda carry, rate: (one_round(*carry, rate * x), jnp.sum(carry[0]))
        (w, state), sums = lax.scan(step, carry, rates)
        return (1.1 * w, state), sums

    (w, state), sums = lax.scan(epoch, (w, state), rates)
    return jnp.sum(jnp.sin(w)) + jnp.sum(sums**2) + jnp.sum(state**2)


def test_a_state_that_no_derivative_needs_is_not_stacked():
    def last(w, state, x):
        step = lambda carry, _: (round_with_momentum(carry[0], carry[1], x), None)
        return jnp.sum(jnp.sin(lax.scan(step, (w, state), length=T)[0][0]))

    forward, _ = scans(jax.grad(last), W, S, X)
    assert not [v for v in forward.outputs[forward.carry :] if v.partitioned]
    run = drjax.jit(jax.grad(last), groups_per_step=1)
    np.testing.assert_allclose(run(W, S, X), jax.jit(jax.grad(last))(W, S, X), 1e-4)


@pytest.mark.once
@pytest.mark.parametrize(
    "one_round, shapes",
    [(round_with_momentum, set()), (round_with_state, {(3, 2, D, D)})],
    ids=["momentum", "state"],
)
@pytest.mark.parametrize("step", [1, 2])
def test_nested_scans_stack_no_more_than_states(one_round, shapes, step):
    fn = jax.grad(lambda *args: after_epochs(one_round, *args), (0, 1, 2, 3))
    args = W, S, X, np.linspace(0.5, 1.5, 6, dtype=np.float32).reshape(3, 2)
    forward, backward = scans(fn, *args)
    stacks = forward.outputs[forward.carry :]
    assert {v.shape for v in stacks if v.partitioned} == shapes
    # No reduction again.
    assert all(len(scan.bodies[0].rounds) <= 2 for scan in (forward, backward))
    results = drjax.jit(fn, groups_per_step=step)(*args)
    for result, exact in zip(results, jax.jit(fn)(*args), strict=True):
        np.testing.assert_allclose(result, exact, 1e-4, 1e-5)


def test_the_memory_of_nested_scans_does_not_grow_with_the_groups():
    def compiled(n):
        @drjax.program(clients=n)
        def one_round(w, state, x):
            work = lambda w, x: jnp.tanh(jnp.tanh(x @ w) @ w).T @ x / 64
            return drjax.reduce_mean(drjax.map_fn(work, (drjax.broadcast(w), x))), state

        def last(w, x, rates):
            return after_epochs(one_round, w, jnp.zeros(()), x, rates)

        run = drjax.jit(jax.grad(last), groups_per_step=1)
        types = [
            jax.ShapeDtypeStruct(s, "float32") for s in ((D, D), (n, 8, D), (3, 2))
        ]
        return Report.of(run.lower(*types).compile()).temp_bytes

    # The data, which are scaled in each round, exist once more.
    assert compiled(64) - compiled(16) <= 2 * 48 * 8 * D * 4


def test_a_backward_scan_does_not_repeat_a_move():
    population = RANDOM.normal(size=(3 * N, D)).astype(np.float32)
    index = RANDOM.integers(0, 3 * N, (T, N))

    @drjax.program(clients=N)
    def last(w, population, index):
        def step(w, index):
            own = drjax.take(population, index)
            slices = drjax.map_fn(
                lambda w, x: jnp.tanh(w * x), (drjax.broadcast(w), own)
            )
            return drjax.reduce_mean(slices), None

        return jnp.sum(lax.scan(step, w, index)[0])

    gradient, args = jax.grad(last), (W[0], population, index)
    ledger = drjax.make_plan(gradient)(*args).communication(2)
    assert sum("take" in str(message) for message in ledger.messages) == 1
    run = drjax.jit(gradient, groups_per_step=1)
    np.testing.assert_allclose(run(*args), jax.jit(gradient)(*args), 1e-5, 1e-6)


def test_what_an_effect_gives_is_stacked_and_run_once():
    calls = []

    def noted(x):
        calls.append(1)
        return x

    @drjax.program(clients=N)
    def last(w, x):
        def work(w, x):
            kind = jax.ShapeDtypeStruct((), x.dtype)
            mean = jax.pure_callback(noted, kind, jnp.mean(x), vmap_method="sequential")
            return jnp.tanh(x @ w * lax.stop_gradient(mean)).T @ x

        def step(w, _):
            return drjax.reduce_mean(drjax.map_fn(work, (drjax.broadcast(w), x))), None

        return jnp.sum(lax.scan(step, w, length=T)[0])

    gradient = jax.grad(last)
    run = drjax.jit(gradient, groups_per_step=1)
    np.testing.assert_allclose(run(W, X), jax.jit(gradient)(W, X), 1e-4, 1e-6)


def chain(count):
    def work(x):
        for _ in range(count):
            x = jnp.sin(x)
        return x

    return work


BEFORE = {
    "one sine": (chain(1), lambda w, z: jnp.mean(w * z), True),
    "twenty sines": (chain(20), lambda w, z: jnp.mean(w * z), False),
    "a draw": (
        lambda x: x + jax.random.normal(jax.random.key(0), x.shape),
        lambda w, z: jnp.mean(w * z),
        False,
    ),
    "a product": (lambda x: x @ x.T, lambda w, z: jnp.mean(w * z), False),
    "less than the steps do": (
        chain(4),
        lambda w, z: jnp.mean(chain(200)(w * z)),
        True,
    ),
}


@pytest.mark.parametrize("name", BEFORE)
def test_work_before_a_loop_is_done_in_its_steps_where_it_is_cheap(name):
    before, work, in_the_steps = BEFORE[name]

    @drjax.program(clients=N)
    def last(w, x):
        z = drjax.map_fn(before, x)

        def step(w, _):
            slices = drjax.map_fn(work, (drjax.broadcast(w), z))
            return drjax.reduce_mean(slices), None

        return lax.scan(step, w, length=T)[0]

    (loop,) = scans(last, W[0, 0], X)
    constants = loop.inputs[: loop.consts[0]]
    # Each step takes the argument, or what was computed of it.
    inside = [v for v in constants if v.partitioned and v.name.startswith("x")]
    assert bool(inside) == in_the_steps


@pytest.mark.parametrize("length, in_the_steps", [(1, True), (50, False)])
def test_a_loop_of_one_step_does_no_work_twice(length, in_the_steps):
    @drjax.program(clients=N)
    def last(w, x):
        z = drjax.map_fn(chain(20), x)
        step = lambda w, _: (
            drjax.reduce_mean(
                drjax.map_fn(lambda w, z: jnp.mean(w * z), (drjax.broadcast(w), z))
            ),
            None,
        )
        return lax.scan(step, w, length=length)[0]

    counts = primitives(last, W[0, 0], X)
    assert (counts["sin"] == 20) == in_the_steps


def test_residuals_of_the_server_are_rematerialized_from_what_is_stacked_anyway():
    """Two models a round: what the scan carries, and the mean of the groups."""

    @drjax.program(clients=N)
    def last(rate, w, x):
        def step(w, _):
            work = lambda w, x: jnp.tanh(x @ w).T @ x
            update = drjax.reduce_mean(drjax.map_fn(work, (drjax.broadcast(w), x)))
            return w - rate * jnp.tanh(update / 3) * jnp.sin(w), None

        return jnp.sum(lax.scan(step, w, length=T)[0])

    gradient, args = jax.grad(last), (jnp.float32(0.1), W, X)
    forward, _ = scans(gradient, *args)
    stacks = forward.outputs[forward.carry :]
    assert [v.shape for v in stacks] == [(T, D, D)] * 2
    run = drjax.jit(gradient, groups_per_step=1)
    np.testing.assert_allclose(run(*args), jax.jit(gradient)(*args), 1e-4, 1e-6)
