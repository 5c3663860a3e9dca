"""Checkpoints of loops over rounds: values, and what is saved and done again.

Covers: drjax._planner.checkpoint_loops, drjax._planner.scans.
"""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import drjax
from drjax._planner import checkpoint_loops
from tests.helpers.cases import checkerboard
from tests.helpers.compiled import temp_bytes
from tests.helpers.meshes import EXPLICIT, in_mesh, make_mesh
from tests.helpers.raising import raises

N, D, T = 8, 16, 12
W = jnp.asarray(np.random.default_rng(0).normal(size=(D, D)) / 4)
X = jnp.asarray(np.random.default_rng(1).normal(size=(N, 4, D)))
S = jnp.asarray(np.random.default_rng(2).normal(size=(N, D, D)) / 4)
RATES = jnp.linspace(0.1, 0.3, T)
BATCHES = jnp.asarray(np.random.default_rng(3).normal(size=(T, N, 4, D)))


def train(w, state, x, rate):
    state = 0.5 * state + jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
    return w - rate * state, state


@drjax.program(clients=N)
def one_round(w: Any, state: Any, x: Any, rate: Any) -> Any:
    one = lambda w, state, x: train(w, state, x, rate)
    w, state = drjax.map_fn(one, (drjax.broadcast(w), state, x))
    return drjax.reduce_mean(w), state


def carried(w, s, x, rates, batches):
    step = lambda carry, _: (one_round(carry[0], carry[1], x, 0.1), None)
    (w, _), _ = lax.scan(step, (w, s), length=T)
    return w.sum()


def with_entries(w, s, x, rates, batches):
    """Each round has numbers, and slices of groups, of its own."""
    step = lambda carry, xs: (one_round(carry[0], carry[1], xs[1], xs[0]), None)
    (w, s), _ = lax.scan(step, (w, s), (rates, batches))
    return w.sum() + jnp.sum(s**2)


def with_results(w, s, x, rates, batches):
    """And results of its own, of which some are read by the backward scan, too."""

    def step(carry, rate):
        w, s = one_round(carry[0], carry[1], x, rate)
        return (w, s), (jnp.sum(w**2), jnp.sin(s))

    (w, _), (norms, states) = lax.scan(step, (w, s), rates, reverse=True)
    return w.sum() + jnp.sum(norms**2) + jnp.sum(states**3)


def with_branches(w, s, x, rates, batches):
    def step(carry, rate):
        half = lambda w, s: one_round(w, s, x, rate / 2)
        return lax.cond(rate > 0.2, half, lambda w, s: (w * 0.9, s), *carry), None

    (w, _), _ = lax.scan(step, (w, s), rates)
    return w.sum()


def with_extrema(w, s, x, rates, batches):
    """Their derivative compares values of one run."""

    @drjax.program(clients=N)
    def step(w, x):
        y = drjax.map_fn(lambda w, x: jnp.tanh(x @ w), (drjax.broadcast(w), x))
        return w + 0.1 * drjax.reduce_max(y).sum(), drjax.reduce_min(y).sum()

    w, lows = lax.scan(lambda w, _: step(w, x), w, length=T)
    return w.sum() + jnp.sum(lows**2)


def with_moves(w, s, x, rates, batches):
    @drjax.program(clients=N)
    def step(w, s):
        s = drjax.map_fn(lambda a, b: jnp.sin(a + b), (s, drjax.shift(s, 1)))
        return w + drjax.reduce_mean(s), s

    (w, _), _ = lax.scan(lambda c, _: (step(*c), None), (w, s), length=T)
    return w.sum()


ARGS = W, S, X, RATES, BATCHES
FUNCTIONS = [carried, with_entries, with_results, with_branches, with_extrema]
FUNCTIONS += [with_moves]
MESHES = {
    "none": None,
    "auto": lambda: make_mesh({"clients": 4}),
    "explicit": lambda: make_mesh({"clients": 4}, EXPLICIT),
    "uneven": lambda: make_mesh({"clients": 3}),
}


@pytest.fixture(autouse=True)
def segments_of_three(monkeypatch):
    """The one choice of the code, whatever saves bytes here."""
    monkeypatch.setattr(checkpoint_loops, "_rounds_of_segment", lambda *_: 3)


@checkerboard(6, f=FUNCTIONS, k=[None, 1, 3], mesh=MESHES)
def test_gradients_where_rounds_remain(f, k, mesh, monkeypatch):
    """Of 12 rounds, two segments of 5, and 2 that are saved."""
    monkeypatch.setattr(checkpoint_loops, "_rounds_of_segment", lambda *_: 5)
    check_gradients(f, k, mesh, r"dense<2> : tensor<i")


@checkerboard(6, f=FUNCTIONS, k=[None, 1, 3], mesh=MESHES)
def test_gradients(f, k, mesh):
    check_gradients(f, k, mesh, rf"dense<{T // 3}> : tensor<i")  # a loop over segments


def check_gradients(f, k, mesh, loop):
    grad = jax.grad(f, (0, 1, 2, 3))
    with jax.enable_x64(True):
        args = [jnp.asarray(x, float) for x in ARGS]
        want = jax.jit(grad)(*args)
        with in_mesh(MESHES[mesh] and MESHES[mesh]()):
            run = drjax.jit(grad, groups_per_step=k, checkpoints="sqrt")
            text = run.lower(*args).as_text()
            result = run(*args)
    assert re.search(loop, text)
    for x, y in zip(result, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-12)


@pytest.mark.once
@pytest.mark.parametrize("k", [None, 1])
def test_gradients_of_a_planned_function(k):
    """And second derivatives, whose scans read several others."""
    run = drjax.jit(with_entries, groups_per_step=k, checkpoints="sqrt")
    with jax.enable_x64(True):
        args = [jnp.asarray(x, float) for x in ARGS]
        np.testing.assert_allclose(
            jax.jit(jax.grad(run))(*args), jax.grad(with_entries)(*args), rtol=1e-9
        )
        of = lambda f: lambda w: jax.grad(f)(w, *args[1:])
        tangents = (jnp.cos(args[0]),)
        got, want = (
            jax.jit(lambda w, f=f: jax.jvp(of(f), (w,), tangents)[1])(args[0])
            for f in (run, with_entries)
        )
        np.testing.assert_allclose(got, want, rtol=1e-8, atol=1e-12)


@pytest.mark.usefixtures("leaks_unchecked")  # JAX's derivative of an effect
def test_effects_run_once():
    calls = []

    @drjax.program(clients=2)
    def step(w, x):
        def one(w, x):
            jax.debug.callback(lambda x: calls.append(float(x)), w * x)
            return jnp.sin(w * x)

        return drjax.reduce_mean(drjax.map_fn(one, (drjax.broadcast(w), x)))

    def f(w, x):
        return lax.scan(lambda w, _: (step(w, x), None), w, length=T)[0]

    args = jnp.float32(1), jnp.ones(2)
    run = drjax.jit(jax.grad(f), checkpoints="sqrt")
    result = run(*args)
    jax.effects_barrier()
    assert len(calls) == 2 * T
    np.testing.assert_allclose(result, jax.grad(f)(*args), rtol=1e-6)


@pytest.mark.parametrize("saved, stacked, moved, rounds", [
    (1, 1, 0, {8: 3, 12: 3, 16: 4, 64: 8, 36: 6, 61: 7}),  # the square root
    (1, 1, 99, {8: 2, 12: 3, 16: 4, 64: 8, 36: 6, 61: 0, 257: 13}),
    (1, 16, 0, {64: 2, 16: 1, 7: 1}),  # a round leaves more than it takes
    (16, 1, 0, {256: 65, 64: 33, 16: 0}),
    (16, 1, 999, {256: 64, 64: 0, 16: 0}),
    (1, 1, 0, {2: 0, 3: 0, 7: 2, 1: 0, 0: 0}),
])  # fmt: skip
def test_the_number_of_rounds(saved, stacked, moved, rounds, monkeypatch):
    monkeypatch.undo()
    choose = checkpoint_loops._rounds_of_segment
    assert {n: choose(n, saved, stacked, moved) for n in rounds} == rounds


@pytest.mark.once
def test_a_segment_has_rounds_by_the_bytes_of_a_device(monkeypatch):
    monkeypatch.undo()
    asked = []

    def choose(*args):
        asked.append(args)
        return 0

    monkeypatch.setattr(checkpoint_loops, "_rounds_of_segment", choose)
    run = drjax.jit(jax.grad(carried), checkpoints="sqrt")
    for devices in (1, 2, 4):
        with jax.set_mesh(make_mesh({"clients": devices})):
            run.lower(*ARGS)
    model, state = W.nbytes, S.nbytes
    assert [saved - model for _, saved, _, _ in asked] == [state, state / 2, state / 4]
    assert [stacked for _, _, stacked, _ in asked] == [
        asked[0][2] / devices for devices in (1, 2, 4)
    ]


@pytest.mark.once
def test_memory_grows_with_the_square_root(monkeypatch):
    monkeypatch.undo()

    def grad(rounds):
        def f(w, s, x):
            step = lambda carry, _: (one_round(carry[0], carry[1], x, 0.1), None)
            return lax.scan(step, (w, s), length=rounds)[0][0].sum()

        return jax.grad(f)

    sizes = [
        [
            temp_bytes(
                drjax.jit(grad(n), groups_per_step=1, checkpoints=how), *ARGS[:3]
            )
            for n in (16, 64, 256)
        ]
        for how in ("sqrt", None)
    ]
    few, more, many = sizes[0]
    of_a_prime = drjax.jit(grad(257), groups_per_step=1, checkpoints="sqrt")
    # On some versions the last round has memory of its own.
    assert temp_bytes(of_a_prime, *ARGS[:3]) < many + 4 * S.nbytes
    assert many - more < 2.2 * (more - few)
    # On some versions no state is stacked without checkpoints, as a sum of gradients.
    assert many < 0.7 * sizes[1][2]


def test_options():
    text = """drjax.jit needs checkpoints="sqrt" or None, got 'log'."""
    wrong: Any = "log"
    raises(drjax.DrjaxValueError, text, drjax.jit, carried, checkpoints=wrong)
