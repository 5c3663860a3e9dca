"""What a plan saves for later rounds and rematerializes, counted and printed.

Covers: drjax._planner.cost, drjax._plan.as_text, drjax._planner.check.
"""

import jax
import jax.numpy as jnp
import pytest

import drjax
from benchmarks.residuals import matrix_operations
from drjax._planner.cost import costs, saved_as_text
from tests.helpers.plan_files import saved

N, D = 8, 32
TYPES = [jax.ShapeDtypeStruct(s, "float32") for s in ((D, D), (N, D, D), (N, 16, D))]
MODEL = 4 * D * D


@drjax.program(clients=N)
def one_round(w, state, x):
    """Training that a state of each group moves, which its derivative needs."""

    def train(w, state, x):
        loss = lambda w: jnp.mean((jnp.tanh(x @ w) @ w - x) ** 2)
        state = 0.9 * state + jax.grad(loss)(w + state)
        return w - 0.1 * state, state

    w, state = drjax.map_fn(train, (drjax.broadcast(w), state, x))
    return drjax.reduce_mean(w), state


def unrolled(w, state, x):
    for _ in range(3):
        w, state = one_round(w, state, x)
    return jnp.sum(jnp.sin(w))


def scanned(w, state, x):
    step = lambda carry, _: (one_round(carry[0], carry[1], x), None)
    (w, _), _ = jax.lax.scan(step, (w, state), length=3)
    return jnp.sum(jnp.sin(w))


@pytest.fixture(params=[unrolled, scanned], ids=lambda f: f.__name__)
def gradient(request):
    return jax.grad(request.param)


@pytest.mark.once
def test_rematerialized_is_what_saving_does_not_compute(gradient):
    """Within the operations of indices and zeros, and of what carries a state."""
    signature = drjax.check(gradient)(*TYPES)
    (_, saving), (_, again) = (signature.costs[r] for r in ("store", "recompute"))
    assert not saving.rematerializes
    assert again.rematerializes
    more = again.operations - saving.operations
    assert again.rematerialized == pytest.approx(more, rel=0.05)
    for option, cost in ("store", saving), ("recompute", again):
        run = drjax.jit(gradient, groups_per_step=1, residuals=option)
        products = matrix_operations(run.lower(*TYPES).compile())
        assert N * cost.operations == pytest.approx(products, rel=0.2)


def test_saved_are_states_and_models(gradient):
    signature = drjax.check(gradient)(*TYPES)
    server, group = signature.costs["recompute"]
    # A state that enters each of the rounds but the first; in a loop also that one.
    assert 2 * MODEL <= group.saved <= 3 * MODEL
    assert 2 * MODEL <= server.saved <= 5 * MODEL
    assert signature.costs["store"][1].saved > 2 * group.saved


def test_a_printed_plan_says_what_it_saves_and_rematerializes(gradient):
    plan = drjax.make_plan(gradient)(*TYPES)
    server, group = costs(plan)
    text = str(plan)
    assert f"  saves    {saved_as_text(server, group)}, at most, for later" in text
    assert f"rematerializes {group.rematerialized_as_text()} of each group" in text
    assert text.count("rematerializes  ") == (3 if "scan" not in text else 1)
    assert f"[{D},{D}]   {MODEL} B" in text


def test_check_prints_both_options(gradient):
    lines = str(drjax.check(gradient)(*TYPES)).splitlines()
    start = lines.index(f"between rounds, on each device with {N} groups")
    assert lines[start + 1] == "  residuals='store'"
    assert lines[start + 3].startswith("    rematerializes 0 flop of ")
    assert lines[start + 4] == "  residuals='recompute'"
    assert len(lines) == start + 7


def test_one_round_saves_nothing_for_another():
    first = lambda *args: jnp.sum(one_round(*args)[0])
    plan = drjax.make_plan(jax.grad(first))(*TYPES)
    assert "saves" not in str(plan)
    assert "rematerializes" not in str(plan)
    assert "between rounds" not in str(drjax.check(jax.grad(first))(*TYPES))


@pytest.mark.once
def test_what_is_rematerialized_has_the_name_that_jax_gives_it(gradient):
    run = drjax.jit(gradient, groups_per_step=1)
    text = run.lower(*TYPES).compile().as_text() or ""
    assert "rematted_computation" in text
    saving = drjax.jit(gradient, groups_per_step=1, residuals="store")
    text = saving.lower(*TYPES).compile().as_text() or ""
    assert "rematted_computation" not in text


def test_branches_loops_and_levels():
    """Of branches the costliest counts, of a while loop one step, of a level each."""

    @drjax.program(pods=2, groups=3)
    def mean(w, x):
        y = drjax.map_fn(jnp.matmul, (drjax.broadcast(w), x))
        return drjax.reduce_mean(drjax.reduce_mean(y, over="groups"), over="pods")

    def program(w, x, index, branches=True):
        less = lambda w: jnp.all(w < 1)
        if not branches:
            return jax.lax.while_loop(less, lambda w: mean(w, x) + 1, w)
        one, two = lambda w: mean(w, x), lambda w: mean(mean(w, x), x)
        return jax.lax.cond(index == 0, one, two, w)

    types = (TYPES[0], jax.ShapeDtypeStruct((2, 3, D, D), "float32"), 1)
    product = 2 * D**3
    for branches, times in (True, 2), (False, 1):
        run = lambda *args, branches=branches: program(*args, branches=branches)
        _, group = costs(drjax.make_plan(run)(*types))
        assert group.operations == pytest.approx(3 * times * product, rel=0.1)


def test_a_plan_file_has_the_counts(gradient, tmp_path):
    plan = drjax.make_plan(gradient)(*TYPES)
    loaded = saved(plan, tmp_path / "plan.drjax")
    assert "rematerializes " in str(loaded)
    # Twice, as a plan that was loaded has no equations of its own.
    assert costs(saved(loaded, tmp_path / "again.drjax")) == costs(plan)
