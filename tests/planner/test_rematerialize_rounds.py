"""What rounds in straight-line code save and rematerialize.

Covers: drjax._planner.rematerialize_rounds, drjax._planner.work.
"""

import collections
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import drjax
from drjax._jaxprs.walk import deep_equations, definitions
from drjax._planner.work import is_cheap, operations

N, D = 3, 4
W, S = np.eye(D, dtype=np.float32) / 2, np.full((N, D, D), 0.1, np.float32)


@drjax.program(clients=N)
def round_with_state(w, state):
    """The state of a group is a product of matrices with its last one."""

    def work(w, state):
        return w @ state, jnp.tanh(state @ w)

    new, state = drjax.map_fn(work, (drjax.broadcast(w), state))
    return drjax.reduce_mean(new), state


def rounds_with_state(count):
    def last(w, state):
        for _ in range(count):
            w, state = round_with_state(w, state)
        return w

    return last


def products(fn, *args):
    """How many matrix products the local stages of a plan have together."""
    stages = [r.local for r in drjax.make_plan(fn)(*args).rounds]
    eqns = (e for stage in stages for e in deep_equations(stage.jaxpr))
    return collections.Counter(e.primitive.name for e in eqns)["dot_general"]


def kept(fn, *args):
    """The names of what each local stage of a plan keeps for a later one."""
    plan = drjax.make_plan(fn)(*args)
    names = plan.kept()
    return [[v.name for v in r.local.outputs if v.name in names] for r in plan.rounds]


@pytest.mark.parametrize("count", [2, 3, 6])
def test_the_work_of_rounds_with_a_state_is_linear_in_their_number(count):
    """Each round rematerializes one round before it, or none."""
    forward = lambda *args: jnp.sum(rounds_with_state(count)(*args))
    assert products(forward, W, S) <= 3 * count
    gradient = jax.grad(forward)
    # Two products of a round, each once more for the two cotangents of its operands;
    # and the forward products twice. The last state is not needed.
    assert products(gradient, W, S) <= 8 * count
    run = drjax.jit(gradient, groups_per_step=1)
    np.testing.assert_allclose(run(W, S), jax.jit(gradient)(W, S), rtol=1e-5)


def test_a_state_is_saved_once():
    *first, _, last = kept(lambda *args: jnp.sum(rounds_with_state(5)(*args)), W, S)
    assert all(len(names) <= 1 for names in first) and not last


def test_earlier_versions_of_results_are_saved():
    """Memory for the groups' results is there anyway."""

    @drjax.program(clients=N)
    def twice(w, state):
        for _ in range(2):
            w, state = round_with_state(w, state)
        return w, state

    assert products(twice, W, S) == 4


def test_what_one_later_round_needs_of_another_is_rematerialized():
    @drjax.program(clients=N)
    def variance(w, x):
        y = drjax.map_fn(lambda w, x: x @ w, (drjax.broadcast(w), x))
        mean = drjax.broadcast(drjax.reduce_mean(y))
        return drjax.reduce_mean(drjax.map_fn(lambda y, m: (y - m) ** 2, (y, mean)))

    assert kept(variance, W, S) == [[], []]


def test_one_costly_value_is_rematerialized_by_each_round_that_needs_it():
    """Memory grows with no number of groups, however many rounds read the value."""

    def centered(w, x):
        y = drjax.map_fn(lambda w, x: x @ w @ w[:, 1:], (drjax.broadcast(w), x))
        mean = drjax.broadcast(drjax.reduce_mean(y))
        differences = drjax.map_fn(jnp.subtract, (y, mean))
        variance = drjax.reduce_mean(drjax.map_fn(jnp.square, differences))
        scaled = (differences, drjax.broadcast(variance))
        return jnp.sum(drjax.reduce_mean(drjax.map_fn(lambda d, v: d**4 / v, scaled)))

    fn = drjax.program(clients=N)(centered)
    w, x = jnp.eye(128), jnp.ones((N, 8, 128))
    assert not any(kept(fn, w, x))
    # What a round reads is a difference of the first round's value and its mean.
    assert not any(kept(jax.grad(fn), w, x))


def test_the_memory_of_results_is_not_given_away_twice():
    """There is one result of the type of two values that later rounds read."""

    @drjax.program(clients=N)
    def fn(w, x):
        first = drjax.map_fn(lambda x: x @ x, x)
        w = w + drjax.reduce_mean(first)
        second = drjax.map_fn(lambda x, w: x @ w, (x, drjax.broadcast(w)))
        w = w + drjax.reduce_mean(second)
        both = (first, second, drjax.broadcast(w))
        return drjax.map_fn(lambda a, b, w: a * b * w, both)

    assert [len(names) for names in kept(fn, W, S)] == [1, 0, 1]


# -------------------------------------------------------------------------------------
# Estimates of work

A = jnp.ones((8, 8))
OPERATIONS = {
    "an addition": (lambda x: x + 1, 64),
    "a sine": (jnp.sin, 8 * 64),
    "a sum": (jnp.sum, 64),
    "a matrix product": (lambda x: x @ x, 2 * 8**3),
    "a scan": (lambda x: lax.scan(lambda c, _: (c + 1, None), x, length=5)[0], 5 * 64),
    "a branch": (lambda x: lax.cond(x[0, 0] > 0, jnp.sin, lambda x: x, x), 8 * 64),
    "a convolution": (
        lambda x: lax.conv(x[None, None], x[None, None, :3, :3], (1, 1), "VALID"),
        2 * 6 * 6 * 9,
    ),
    "windows": (
        lambda x: lax.reduce_window(x, 0.0, lax.add, (2, 2), (1, 1), "VALID"),
        64 * 4,
    ),
    "a decomposition": (jnp.linalg.cholesky, 8**3),
    "a sort": (lambda x: lax.sort(x), 8 * 64 * 6),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations(name):
    fn, expected = OPERATIONS[name]
    total = sum(map(operations, jax.make_jaxpr(fn)(A).jaxpr.eqns))
    assert expected <= total <= 1.3 * expected + 300  # indices, comparisons, reshapes


@pytest.mark.parametrize(
    "fn, cheap",
    [
        (lambda x: 2 * x + 1, True),
        (jnp.zeros_like, True),
        (lambda x: jnp.sin(jnp.sin(jnp.sin(x))), False),
        (lambda x: x @ x, False),
    ],
)
def test_chains_are_judged_as_a_whole(fn, cheap):
    jaxpr: Any = jax.make_jaxpr(fn)(A).jaxpr
    assert is_cheap(jaxpr.outvars[0], definitions(jaxpr.eqns).get) == cheap


def test_a_long_chain_of_small_values_is_not_cheap():
    def fn(x):
        y = x[0, 0]
        for _ in range(70):
            y = -y
        return x * y

    jaxpr: Any = jax.make_jaxpr(fn)(A).jaxpr
    assert not is_cheap(jaxpr.outvars[0], definitions(jaxpr.eqns).get)
