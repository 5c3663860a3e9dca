"""What a `lax.cond` around rounds saves and rematerializes.

Covers: drjax._planner.rematerialize_branches, drjax._planner.rematerialized.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import drjax
from drjax.backends import Groups
from drjax.compiled import Report
from drjax.plan import Cond, Plan, Scan

N, D, T = 3, 5, 4
RANDOM = np.random.default_rng(0)
W = RANDOM.normal(size=(D, D)).astype(np.float32) / D
S = RANDOM.normal(size=(N, D, D)).astype(np.float32)
X = RANDOM.normal(size=(N, 8, D)).astype(np.float32)
FLAGS = np.array([1.0, -1.0, 1.0, 1.0], np.float32)


def round_of(n):
    @drjax.program(clients=n)
    def one_round(w, state, x):
        """The activations of a group have more bytes than its state."""

        def work(w, state, x):
            return jnp.tanh(jnp.tanh(x @ state) @ w).T @ x / 64, 0.9 * state + w

        new, state = drjax.map_fn(work, (drjax.broadcast(w), state, x))
        return drjax.reduce_mean(new), state

    return one_round


def skipped(w, state):
    return jnp.sin(w), state


def in_branch(one_round, values, x, flag):
    work = lambda w, state: one_round(w, state, x)
    return lax.cond(flag > 0, work, skipped, *values)


def one_round(one_round, w, state, x, flags):
    return in_branch(one_round, (w, state), x, flags[0])


def two_rounds(one_round, w, state, x, flags):
    work = lambda w, state: one_round(*one_round(w, state, x), x)
    return lax.cond(flags[0] > 0, work, skipped, w, state)


def three_branches(one_round, w, state, x, flags):
    """Two of them with rounds, which share what the conds exchange."""

    def work(scale):
        return lambda w, state: one_round(*one_round(scale * w, state, x), x)

    index = jnp.int32(flags[0] + 1)
    return lax.switch(index, [skipped, work(0.5), work(2.0)], w, state)


def branches_in_a_scan(one_round, w, state, x, flags):
    step = lambda carry, flag: (in_branch(one_round, carry, x, flag), None)
    return lax.scan(step, (w, state), flags)[0]


def branches_by_a_constant(one_round, w, state, x, flags):
    step = lambda carry, _: (in_branch(one_round, carry, x, flags[0]), None)
    return lax.scan(step, (w, state), length=T)[0]


def branches_by_values(one_round, w, state, x, flags):
    def step(carry, flag):
        return in_branch(one_round, carry, x, jnp.sum(carry[0]) + flag), None

    return lax.scan(step, (w, state), flags)[0]


def rounds_and_branches_in_a_scan(one_round, w, state, x, flags):
    def step(carry, flag):
        return in_branch(one_round, one_round(*carry, x), x, flag), None

    return lax.scan(step, (w, state), flags)[0]


def scan_in_a_branch(one_round, w, state, x, flags):
    step = lambda carry, _: (one_round(*carry, x), None)
    rounds = lambda w, state: lax.scan(step, (w, state), length=T)[0]
    return lax.cond(flags[0] > 0, rounds, skipped, w, state)


def branch_in_a_branch(one_round, w, state, x, flags):
    inner = lambda w, state: in_branch(one_round, (w, state), x, flags[0])
    return lax.cond(flags[2] > -5, inner, skipped, w, state)


def checkpoints_in_a_scan(one_round, w, state, x, flags):
    again = jax.checkpoint(functools.partial(in_branch, one_round))
    step = lambda carry, flag: (again(carry, x, flag), None)
    return lax.scan(step, (w, state), flags)[0]


# With the number of states of a group that its gradient may save, or copy.
PROGRAMS = {
    one_round: 0,
    two_rounds: 1,
    three_branches: 1,
    branches_in_a_scan: T + 3,
    branches_by_a_constant: T + 3,
    branches_by_values: T + 3,
    rounds_and_branches_in_a_scan: T + 4,
    scan_in_a_branch: T + 5,
    branch_in_a_branch: 0,
    checkpoints_in_a_scan: T + 3,
}


def gradient(program, n, argnums: Any = 0):
    def last(w, state, x, flags):
        w, state = program(round_of(n), w, state, x, flags)
        return jnp.sum(jnp.sin(w))

    return jax.grad(last, argnums)


@pytest.mark.parametrize("flag", [1, -1])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_gradients_are_those_of_jax(program, flag):
    fn, args = gradient(program, N, (0, 1, 2)), (W, S, X, flag * FLAGS)
    results = drjax.jit(fn, groups_per_step=1)(*args)
    for result, exact in zip(results, jax.jit(fn)(*args), strict=True):
        np.testing.assert_allclose(result, exact, 1e-4, 1e-6)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_memory_grows_with_the_states_alone(program):
    def temporary(n):
        run = drjax.jit(gradient(program, n), groups_per_step=1)
        shapes = (D, D), (n, D, D), (n, 64, D), (T,)
        types = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
        return Report.of(run.lower(*types).compile()).temp_bytes

    states = PROGRAMS[program]
    assert temporary(64) - temporary(16) <= 48 * states * 4 * D * D


def conds(plan: Plan) -> list[Cond]:
    return [step for step in plan.steps if isinstance(step, Cond)]


def test_branches_return_global_values_where_groups_rematerialize():
    plan = drjax.make_plan(gradient(one_round, N))(W, S, X, FLAGS)
    forward, backward = conds(plan)
    assert not [v for v in forward.outputs if v.partitioned]
    assert {v.name for v in backward.inputs if v.partitioned} == {"state", "x"}


def test_branches_share_what_they_return():
    plan = drjax.make_plan(gradient(three_branches, N))(W, S, X, FLAGS)
    forward, _ = conds(plan)
    # The model after both rounds, and after the first one.
    assert [v.shape for v in forward.outputs] == [(D, D)] * 2


def test_second_derivatives():
    def fn(*args):
        return sum(jnp.sum(jnp.sin(x)) for x in gradient(one_round, N, (0, 1))(*args))

    args = (W, S, X, FLAGS)
    second = jax.grad(fn, (0, 1))
    results = drjax.jit(second, groups_per_step=1)(*args)
    for result, exact in zip(results, jax.jit(second)(*args), strict=True):
        np.testing.assert_allclose(result, exact, 1e-3, 1e-5)


def test_a_gradient_takes_the_branch_of_the_forward_pass():
    """The index is saved, as a sum may be rounded otherwise when it is done again."""
    fn, args = gradient(branches_by_values, N), (W, S, X, FLAGS)
    plan = drjax.make_plan(fn)(*args)
    forward, backward = (step for step in plan.steps if isinstance(step, Scan))
    (inner,) = conds(backward.bodies[0])
    index = inner.inputs[0]
    assert index in backward.bodies[0].inputs
    stacks = forward.outputs[forward.carry :]
    assert (T,) in [v.shape for v in stacks if v.dtype == index.dtype]


def test_random_keys_cross_a_branch():
    @drjax.program(clients=N)
    def last(w, x, flag):
        def work(w, x):
            key = jax.random.fold_in(jax.random.key(0), drjax.reduce_sum(x).astype(int))
            noise = drjax.map_fn(
                lambda w, x: jnp.tanh(w * x) * jax.random.normal(key, x.shape),
                (drjax.broadcast(w), x),
            )
            return drjax.reduce_mean(noise)

        return jnp.sum(lax.cond(flag, work, lambda w, x: 2 * w, w, x))

    args = np.float32(0.5), X[:, 0, 0], True
    run = drjax.jit(jax.grad(last), groups_per_step=1)
    np.testing.assert_allclose(run(*args), jax.jit(jax.grad(last))(*args), 1e-5)


@pytest.mark.parametrize("loop", [False, True])
def test_branches_read_data_of_groups(loop):
    """The host reads them again, in the branch, for a chunk of groups."""

    def compiled(n):
        @drjax.program(clients=n)
        def one_round(w, x):
            work = lambda w, x: jnp.tanh(jnp.tanh(x @ w) @ w).T @ x / 64
            return drjax.reduce_mean(drjax.map_fn(work, (drjax.broadcast(w), x)))

        def last(w, x):
            step = lambda w: lax.cond(
                w[0, 0] > -9, lambda w: one_round(w, x), jnp.sin, w
            )
            if loop:
                return jnp.sum(lax.scan(lambda w, _: (step(w), None), w, length=T)[0])
            return jnp.sum(step(w))

        run = drjax.jit(jax.grad(last), groups_per_step=1)
        x = np.ones((n, 8, D), np.float32)
        temporary = Report.of(run.lower(W, Groups([*x])).compile()).temp_bytes
        np.testing.assert_allclose(run(W, Groups([*x])), jax.grad(last)(W, x), 1e-4)
        return temporary

    assert compiled(32) == compiled(8)


def test_a_broadcast_before_a_branch_is_made_in_it():
    @drjax.program(clients=N)
    def value(w, x, flag):
        own = drjax.broadcast(w)
        work = lambda own: drjax.reduce_mean(drjax.map_fn(jnp.dot, (x, own)))
        return lax.cond(flag, work, lambda own: drjax.reduce_sum(own), own)

    plan = drjax.make_plan(value)(W, X[:, :D], True)
    (branches,) = conds(plan)
    assert [v.name for v in branches.inputs if v.partitioned] == ["x"]
    np.testing.assert_allclose(
        drjax.jit(value, groups_per_step=1)(W, X[:, :D], True),
        value(W, X[:, :D], True),
        1e-5,
    )
