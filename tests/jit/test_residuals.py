"""What `drjax.jit` saves for a later round, and what it rematerializes.

Covers: drjax._jit.jit_primitive, drjax.backends.xla.compile_plan,
drjax._planner.rematerialize_loops.
"""

import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import drjax
from drjax._jit import jit_primitive, tune
from tests.helpers.cases import checkerboard
from tests.helpers.compiled import flops, temp_bytes
from tests.helpers.meshes import in_mesh_of

N, D = 8, 32
W = np.eye(D, dtype=np.float32)
X = np.random.default_rng(0).normal(size=(N, 16, D)).astype(np.float32)


@drjax.program(clients=N)
def round_(w, x):
    def train(w, x):
        loss = lambda w: jnp.mean((jnp.tanh(x @ w) @ w - x) ** 2)
        return w - 0.1 * jax.grad(loss)(w)

    return drjax.reduce_mean(drjax.map_fn(train, (drjax.broadcast(w), x)))


def unrolled(w, x):
    return jnp.sum(jnp.sin(round_(round_(w, x), x)))


def scanned(w, x):
    return jnp.sum(
        jnp.sin(jax.lax.scan(lambda w, _: (round_(w, x), None), w, length=3)[0])
    )


ALL_AT_ONCE = {"default": None, "auto": "auto", "a number": N}


@checkerboard(2, f=[unrolled, scanned], option=ALL_AT_ONCE, devices=[1, 2])
def test_all_groups_at_once_rematerialize_nothing(f, option, devices):
    """There is no memory to save, so the work is that of `jax.jit`."""
    gradient = jax.grad(f)
    with in_mesh_of({"clients": devices} if devices > 1 else None):
        run = drjax.jit(gradient, groups_per_step=ALL_AT_ONCE[option])
        args = jnp.asarray(W), jnp.asarray(X)
        assert flops(run, *args) <= 1.05 * flops(jax.jit(gradient), *args)
        assert temp_bytes(run, *args) <= 1.3 * temp_bytes(jax.jit(gradient), *args)
        np.testing.assert_allclose(run(*args), jax.jit(gradient)(*args), 1e-5, 1e-5)


@pytest.mark.once
@pytest.mark.parametrize("f", [unrolled, scanned], ids=lambda f: f.__name__)
def test_chunks_rematerialize(f):
    """Memory for residuals would grow with the number of groups."""
    gradient, args = jax.grad(f), (jnp.asarray(W), jnp.asarray(X))
    chunks = drjax.jit(gradient, groups_per_step=1)
    saved = drjax.jit(gradient, groups_per_step=1, residuals="store")
    assert temp_bytes(chunks, *args) < temp_bytes(saved, *args)


def adam_rounds(n, steps=3):
    """A gradient through rounds of n clients, each with Adam of its own."""
    adam = optax.adam(0.1, eps_root=1e-8)

    @drjax.program(clients=n)
    def one_round(w, x):
        def train(w, x):
            def step(carry, _):
                w, state = carry
                loss = lambda w: jnp.mean((jnp.tanh(x @ w) - x) ** 2)
                updates, state = adam.update(jax.grad(loss)(w), state, w)
                return (optax.apply_updates(w, updates), state), None

            return jax.lax.scan(step, (w, adam.init(w)), length=steps)[0][0]

        return drjax.reduce_mean(drjax.map_fn(train, (drjax.broadcast(w), x)))

    def last_loss(w, x):
        w, _ = jax.lax.scan(lambda w, _: (one_round(w, x), None), w, length=3)
        return jnp.sum(jnp.sin(jnp.asarray(w)))

    return jax.grad(last_loss)


@pytest.mark.once
def test_what_an_optimizer_of_a_client_begins_with_is_not_saved_for_each_client():
    """Its zeros are made from nothing, in a map whose other results are costly."""
    run = drjax.jit(adam_rounds(N), groups_per_step=1)
    with jax.enable_x64(True):
        args = W.astype(float) + 0.1, X.astype(float)
        expected = adam_rounds(N)(*args)
        atol = 1e-10 * np.abs(expected).max()
        np.testing.assert_allclose(run(*args), expected, rtol=1e-9, atol=atol)
    small, large = (
        temp_bytes(
            drjax.jit(adam_rounds(n), groups_per_step=1),
            *(jax.ShapeDtypeStruct(s, jnp.float32) for s in ((D, D), (n, 2, D))),
        )
        for n in (16, 256)
    )
    # Less than one model for each client more.
    assert large - small < (256 - 16) * 4 * D * D / 2


def test_an_option_rematerializes_all_the_same():
    gradient, args = jax.grad(scanned), (jnp.asarray(W), jnp.asarray(X))
    recomputed = drjax.jit(gradient, residuals="recompute")
    assert flops(recomputed, *args) > 1.2 * flops(jax.jit(gradient), *args)


def test_auto_rematerializes_where_residuals_do_not_fit(caplog):
    gradient, args = jax.grad(unrolled), (jnp.asarray(W), jnp.asarray(X))
    least = temp_bytes(drjax.jit(gradient, groups_per_step=1), *args)
    with caplog.at_level(logging.INFO, "drjax"):
        run = drjax.jit(gradient, groups_per_step="auto", memory_budget=least)
        assert temp_bytes(run, *args) <= least
    assert f"groups_per_step=1 of {N}" in caplog.text


X64 = jnp.sin(jnp.arange(64.0 * 16 * D)).reshape(64, 16, D)


@drjax.program(clients=64)
def spread(w, x):
    """Two rounds that read the same costly result of each group."""
    fit = lambda w, x: jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w) @ w)
    y = drjax.map_fn(fit, (drjax.broadcast(w), x))
    return drjax.reduce_mean((y - drjax.reduce_mean(y)) ** 2)


def test_auto_saves_what_is_small_where_few_groups_fit(caplog):
    """All groups at once do not fit, but a number of each does."""
    args = jnp.asarray(W), X64
    budget = temp_bytes(drjax.jit(spread, groups_per_step=4, residuals="store"), *args)
    with caplog.at_level(logging.INFO, "drjax"):
        run = drjax.jit(spread, groups_per_step="auto", memory_budget=budget)
        assert temp_bytes(run, *args) <= budget
        np.testing.assert_allclose(run(*args), spread(*args), rtol=1e-5)
    assert re.search("groups_per_step=[4-9] of 64, residuals='store': ", caplog.text)
    text = str(drjax.check(run)(*args)).splitlines()[-1]
    assert text.startswith("drjax.jit runs it with groups_per_step=")
    assert text.endswith(f" of {budget:,} bytes of temporary memory")


@pytest.mark.parametrize("options, text", [
    ({}, "64 of 64, residuals='store'"),
    ({"groups_per_step": 4}, "4 of 64, residuals='recompute'"),
    ({"groups_per_step": 4, "residuals": "store"}, "4 of 64, residuals='store'"),
    ({"groups_per_step": 100}, "64 of 64, residuals='store'"),
])  # fmt: skip
def test_check_says_what_runs(options, text):
    args = jnp.asarray(W), X64
    lines = str(drjax.check(drjax.jit(spread, **options))(*args)).splitlines()
    assert lines[-1] == f"drjax.jit runs it with groups_per_step={text}"
    assert lines[:-1] == str(drjax.check(spread)(*args)).splitlines()


@pytest.mark.parametrize("faster", ["store", "recompute"])
def test_tune_measures_what_is_saved(faster, monkeypatch, caplog):
    """The fastest number of groups is run once more, and saves what is needed."""
    args, runs = (jnp.asarray(W), X64), list[str]()

    def seconds(run, args, kwargs):
        runs.append(str(drjax.check(run)(*args)).splitlines()[-1])
        if "'store'" in runs[-1] and "64 of" not in runs[-1]:
            return 0.5 if faster == "store" else 2.0
        return 1.0 if "=4 of" in runs[-1] else 3.0

    monkeypatch.setattr(tune, "_least_seconds", seconds)
    step = drjax.jit(spread, groups_per_step="tune")
    np.testing.assert_allclose(step(*args), spread(*args), rtol=1e-5)
    assert runs[-1].endswith("groups_per_step=4 of 64, residuals='store'")
    text = step.lower(*args).compile().as_text()
    assert ("rematted_computation" in text) == (faster != "store")


# With this option, which newer versions have, a custom_vjp is a high-level equation.
RULES = [{}] + [{"generic_batching": True}] * (jax.__version_info__ >= (0, 12))


@pytest.mark.parametrize("options", RULES, ids=str)
def test_second_derivatives_of_a_custom_vjp(options):
    sin = jax.custom_vjp(jnp.sin)
    sin.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (ct * jnp.cos(x),), **options)
    total = drjax.program(clients=3)(lambda x: drjax.reduce_sum(drjax.map_fn(sin, x)))
    x = jnp.arange(3.0)
    slope, change = jax.jvp(jax.grad(drjax.jit(total)), (x,), (x,))
    np.testing.assert_allclose(slope, jnp.cos(x), rtol=1e-6)
    np.testing.assert_allclose(change, -x * jnp.sin(x), rtol=1e-6)


def test_a_program_in_chunks_is_planned_once(monkeypatch):
    plan, planned = jit_primitive.plan_of_jaxpr, []
    count = lambda *args, **options: planned.append(1) or plan(*args, **options)
    monkeypatch.setattr(jit_primitive, "plan_of_jaxpr", count)
    total = drjax.program(clients=8)(lambda x: drjax.reduce_sum(x * 3))
    drjax.jit(total, groups_per_step=2)(jnp.arange(8.0))
    assert len(planned) == 1
