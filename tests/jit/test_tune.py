"""`groups_per_step="tune"`: the number of groups at once that is fastest.

Covers: drjax._jit.tune, drjax.backends.xla.step_size.
"""

import functools
import logging
import math
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import drjax
from drjax._jit import tune
from tests.helpers.maml import make_parallel_maml_loss, maml_args
from tests.helpers.meshes import in_mesh, make_mesh
from tests.helpers.raising import raises

pytestmark = pytest.mark.usefixtures("leaks_unchecked")

# Seconds by the number of groups at once, for 2048 groups.
CURVES = {
    "all at once": lambda k: 1 + 10 / k,
    "one by one": lambda k: 1 + k / 10,
    "a cache of 40": lambda k: (1 + 8 / k) * (1 if k <= 40 else 1 + (k / 40 - 1) / 20),
    "between": lambda k: 1 + abs(math.log2(k / 90)) / 10,
    "flat": lambda k: 1.0,
    "memory": lambda k: math.inf if k > 300 else 1 + 10 / k,
}


@pytest.mark.parametrize("n", [1, 2, 7, 100, 2048])
@pytest.mark.parametrize("curve", CURVES)
def test_the_fastest_number_is_almost_found(curve, n):
    asked = []

    def seconds(size):
        asked.append(size)
        return CURVES[curve](size)

    result = tune.fastest(n, seconds)
    best = min(map(CURVES[curve], range(1, n + 1)))
    assert CURVES[curve](result) <= 1.1 * best
    assert len(asked) == len({*asked}) <= 4 + math.log2(n) / 2
    assert all(1 <= size <= n for size in asked)


@pytest.mark.parametrize("best, near", [(60, [16, 64]), (70, [64, 256])])
def test_half_and_twice_the_best_number_are_measured_last(best, near):
    asked = []

    def seconds(size):
        asked.append(size)
        return 1 + abs(math.log2(size / best))

    result = tune.fastest(2048, seconds)
    assert asked[:4] == [2048, 512, 128, 32] and asked[-2:] == near
    assert result == min(asked, key=lambda k: abs(math.log2(k / best)))


def test_not_even_one_fits():
    text = "Not even one group at a time fits in memory"
    raises(drjax.DrjaxValueError, text, tune.fastest, 8, lambda k: math.inf)


@drjax.program(clients=12)
def loss(model, x):
    y = drjax.map_fn(lambda m, x: jnp.sin(m * x), (drjax.broadcast(model), x))
    return drjax.reduce_mean(y).sum()


MODEL, X = jnp.arange(3.0), jnp.ones((12, 3))


@pytest.mark.sampled
@pytest.mark.parametrize("devices", [0, 4])
def test_values_and_what_is_remembered(devices, monkeypatch, caplog):
    measured = []

    def seconds(run, args, kwargs):
        jax.block_until_ready(run(*args, **kwargs))
        measured.append(run)
        return abs(len(measured) - 2) + 1.0  # the second one is the fastest

    monkeypatch.setattr(tune, "_least_seconds", seconds)
    step = drjax.jit(jax.grad(loss), groups_per_step="tune")
    mesh = in_mesh(make_mesh({"clients": devices}) if devices else None)
    with mesh, caplog.at_level(logging.INFO, logger="drjax"):
        for factor in (1, 2):
            result = step(factor * MODEL, x=X)
            np.testing.assert_allclose(
                result, jax.grad(loss)(factor * MODEL, X), rtol=1e-6
            )
        count = len(measured)
        best = 1 if devices else 3
        assert f"groups_per_step={best} of {12 // (devices or 1)} is" in caplog.text
        step(jnp.arange(3, dtype=jnp.bfloat16).astype(jnp.float32), x=X)
        assert len(measured) == count
        step(MODEL.astype(jnp.bfloat16), x=X)
        assert len(measured) > count
        assert step.__name__ == "loss" and step.lower(MODEL, x=X).compile()


@pytest.mark.parametrize("name, donated", [("nums", 0), ("names", "model")])
def test_static_and_donated_arguments(name, donated, monkeypatch):
    def seconds(run, args, kwargs):
        """Time a run, after which the arguments must be there for the next number."""
        jax.block_until_ready(run(*args, **kwargs))
        assert not args[0].is_deleted()
        return 1.0

    monkeypatch.setattr(tune, "_least_seconds", seconds)
    options = {"static_argnums": 2, f"donate_arg{name}": donated}

    @functools.partial(drjax.jit, groups_per_step="tune", **options)
    def step(model, x, k):
        assert isinstance(k, int)
        return model - k * jax.grad(loss)(model, x)

    model = jnp.arange(3.0)
    expected = model - 2 * jax.grad(loss)(model, X)
    np.testing.assert_allclose(step(model, X, 2), expected, rtol=1e-6)
    assert model.is_deleted()


def test_without_groups():
    assert drjax.jit(jnp.sin, groups_per_step="tune")(jnp.float32(0)) == 0


def test_memory():
    fn, args = make_parallel_maml_loss(8), maml_args(8)
    step = drjax.jit(fn, groups_per_step="tune", memory_budget=1)
    raises(drjax.DrjaxValueError, "Not even one group", step, *args)


def test_traced_arguments():
    step = drjax.jit(loss, groups_per_step="tune")
    types = jax.eval_shape(lambda *x: x, MODEL, X)
    text = "which must be arrays. Call it outside of jax.jit"
    for run, args in (
        (jax.jit(step), (MODEL, X)),
        (jax.grad(step), (MODEL, X)),
        (step.lower, types),
    ):
        raises(drjax.DrjaxValueError, text, run, *args)
    kind = 'a positive int, "auto" or None'
    plan = drjax.make_plan(loss)(MODEL, X)
    tuned = lambda: drjax.backends.xla.compile(plan, groups_per_step="tune")
    raises(drjax.DrjaxValueError, kind, tuned)


@pytest.mark.slow
@pytest.mark.parametrize("width", [32, 256])
def test_measured_times(width):
    """Within 1.1 of the best number of an exhaustive search, by powers of two."""
    n = 512

    @drjax.program(clients=n)
    def work(model, x):
        of_group = lambda m, x: jnp.tanh(jnp.tanh(x @ m) @ m).sum(0)
        return drjax.reduce_mean(drjax.map_fn(of_group, (drjax.broadcast(model), x)))

    args = jnp.ones((width, width)) / width, jnp.ones((n, 4, width))
    sizes = [2**i for i in range(10)]
    steps = [drjax.jit(work, groups_per_step=k) for k in sizes]
    # Other work on the machine adds time: the least of many, interleaved; three tries.
    steps += [drjax.jit(work, groups_per_step="tune") for _ in range(3)]
    for step in steps:
        jax.block_until_ready(step(*args))
    best = [math.inf] * len(steps)
    for _ in range(60):
        for i, step in enumerate(steps):
            start = time.perf_counter()
            jax.block_until_ready(step(*args))
            best[i] = min(best[i], time.perf_counter() - start)
    # And what it takes to look the number up.
    assert min(best[-3:]) <= 1.1 * min(best) + 1e-4, best
