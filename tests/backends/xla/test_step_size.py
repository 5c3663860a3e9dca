"""`groups_per_step="auto"`: as many groups at once as fit in memory.

Covers: drjax.backends.xla.step_size.
"""

import functools
import logging
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import drjax
from drjax.backends.xla import step_size
from tests.helpers.compiled import hlo_text, temp_bytes
from tests.helpers.maml import make_parallel_maml_loss, maml_args
from tests.helpers.meshes import in_mesh_of
from tests.helpers.raising import raises

pytestmark = pytest.mark.usefixtures("leaks_unchecked")

LINEAR = lambda step: 1000 + 10 * step
STEPS = lambda step: 1000 * (1 + step // 7)
UNEVEN = lambda step: 1000 + 10 * step + (3 * step if 64 % step else 0)


@pytest.mark.parametrize("temp", [LINEAR, STEPS, UNEVEN])
@pytest.mark.parametrize("budget", [1013, 1100, 2000, 5000, 10**9])
def test_the_largest_number_that_fits(temp, budget):
    asked = []

    def counted(step):
        asked.append(step)
        return temp(step)

    result = step_size.largest(64, counted, budget)
    assert temp(result) <= budget
    assert result == 64 or temp(result + 1) > budget
    assert len(asked) == len(set(asked)) <= 8


def _way(first, each, operations, asked):
    """A program of 64 groups, of `first` bytes and `each` for one that works."""

    def temp_bytes(step):
        asked.append(step)
        return first + each * step

    saved = min(first, 64)
    return step_size.Way(functools.cache(temp_bytes), saved, operations)


@pytest.mark.parametrize("budget", [20, 100, 400, 660, 900, 2000])
@pytest.mark.parametrize("first", [10, 64, 600])
@pytest.mark.parametrize("operations", [1.2, 1.5, 3.0])
def test_what_is_saved_takes_no_more_time(budget, first, operations):
    """By work, and by the number of steps."""
    asked = []
    saving, again = _way(first, 10, 1.0, asked), _way(0, 10, operations, asked)
    way, size = step_size.best(64, saving, again, budget)
    assert way.temp_bytes(size) <= budget
    assert len(asked) <= 12
    most = [min(64, max(0, budget - x) // 10) for x in (first, 0)]
    assert size == most[way is again]
    if most[0]:
        steps = [math.ceil(64 / k) for k in most]
        assert (way is saving) == (steps[0] <= steps[1] * operations)
    else:
        assert way is again


def test_what_does_not_fit_is_not_compiled():
    asked = []
    saving, again = _way(64, 10, 1.0, asked), _way(0, 1, 2.0, [])
    assert step_size.best(64, saving, again, 63) == (again, 63)
    assert not asked
    assert step_size.best(64, saving, None, 80) == (saving, 1)


def test_not_even_one_fits():
    with pytest.raises(drjax.DrjaxValueError, match=r"needs 1,010 bytes .* is 500\."):
        step_size.largest(64, LINEAR, 500)


@pytest.mark.once
@pytest.mark.parametrize(
    "mesh", [{"clients": 4}, pytest.param(None, marks=pytest.mark.slow)]
)
def test_drjax_jit_stays_within_the_budget(mesh, caplog):
    n = 32
    fn, args = jax.value_and_grad(make_parallel_maml_loss(n)), maml_args(n, 32)
    want = jax.jit(fn)(*args)
    with in_mesh_of(mesh), caplog.at_level(logging.INFO, logger="drjax"):
        few, all_ = (temp_bytes(drjax.jit(fn, groups_per_step=k), *args)
                     for k in (1, None))  # fmt: skip
        budget = (few + all_) // 2
        step = drjax.jit(fn, groups_per_step="auto", memory_budget=budget)
        assert few <= temp_bytes(step, *args) <= budget
        result = step(*args)
        plenty = drjax.jit(fn, groups_per_step="auto")
        assert temp_bytes(plenty, *args) == all_
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5), result, want)
    logged = [re.match(r"groups_per_step=(\d+) of (\d+)", m) for m in caplog.messages]
    numbers = {tuple(map(int, m.groups())) for m in logged if m}
    assert len(numbers) == 2 and max(numbers)[0] == max(numbers)[1]


def test_the_backend_takes_it_too():
    fn, args = make_parallel_maml_loss(8), maml_args(8)
    plan = drjax.make_plan(fn)(*args)
    run = drjax.backends.xla.compile(plan, groups_per_step="auto", memory_budget=10**6)
    np.testing.assert_allclose(run(*args), fn(*args), rtol=1e-6)


WRONG: list[tuple[dict[str, Any], Any, str]] = [
    ({"groups_per_step": "most"}, drjax.DrjaxValueError,
     "needs groups_per_step as a positive int, {words} or None, got 'most'."),
    ({"groups_per_step": "Auto"}, drjax.DrjaxValueError,
     "needs groups_per_step as a positive int, {words} or None, got 'Auto'."),
    ({"groups_per_step": 2.5}, drjax.DrjaxTypeError,
     "needs groups_per_step as a positive int, {words} or None, got 2.5."),
    ({"memory_budget": 10}, drjax.DrjaxValueError,
     "takes memory_budget= with groups_per_step={or_words}, got groups_per_step=None."),
    ({"groups_per_step": "auto", "memory_budget": 0}, drjax.DrjaxValueError,
     "needs at least one in memory_budget, got memory_budget=0."),
    ({"groups_per_step": "auto", "memory_budget": 1e6}, drjax.DrjaxTypeError,
     "needs memory_budget as a positive int, bytes with {or_words}, got 1000000.0."),
]  # fmt: skip


@pytest.mark.parametrize("options, error, text", WRONG)
def test_wrong_options(options, error, text):
    """The error has all words that the called function takes, and its name."""
    words = dict(words='"auto", "tune"', or_words='"auto" or "tune"')
    needs = f"drjax.jit {text.format_map(words)}"
    raises(error, needs, drjax.jit, lambda x: x, **options)
    words = dict(words='"auto"', or_words='"auto"')
    plan = drjax.make_plan(lambda x: x)(1.0)
    needs = f"drjax.backends.xla.compile {text.format_map(words)}"
    raises(error, needs, drjax.backends.xla.compile, plan, **options)


def test_a_manual_mesh_has_no_devices_to_ask():
    mesh = jax.sharding.AbstractMesh(
        (4,), ("clients",), axis_types=(jax.sharding.AxisType.Auto,)
    )
    fn, args = make_parallel_maml_loss(8), maml_args(8)
    with jax.sharding.use_abstract_mesh(mesh):
        with pytest.raises(drjax.DrjaxValueError, match="can be asked: give a number"):
            jax.eval_shape(drjax.jit(fn, groups_per_step="auto"), *args)


@pytest.mark.parametrize("transform", [lambda f: f, jax.value_and_grad])
def test_one_group_at_a_time_skips_the_branch_that_it_does_not_take(transform):
    """A conditional of XLA, where the batch of several groups has a select."""

    @drjax.program(clients=8)
    def f(model, chosen, data):
        def of_group(model, chosen, x):
            train = lambda: jnp.sin(model * jnp.sort(x)).sum()
            return lax.cond(chosen, train, lambda: 0.0)

        return drjax.reduce_sum(
            drjax.map_fn(of_group, (drjax.broadcast(model), chosen, data))
        )

    args = jnp.float32(2), jnp.arange(8) < 2, jnp.ones((8, 3))
    for step, conditional in ((1, True), (2, False)):
        text = hlo_text(drjax.jit(transform(f), groups_per_step=step), *args)
        assert (" conditional(" in text) == conditional


@pytest.mark.parametrize("step, runs", [(1, 3), (4, 16)])
def test_how_many_groups_run_the_branch(step, runs):
    """Of 16 groups 3 take it; with more groups at once, all of them do."""
    ran = []

    def counted(x):
        ran.append(1)
        return np.sin(x)

    @drjax.program(clients=16)
    def f(chosen, data):
        def of_group(chosen, x):
            train = lambda: jax.pure_callback(
                counted, x, x, vmap_method="sequential"
            ).sum()
            return lax.cond(chosen, train, lambda: 0.0)

        return drjax.reduce_sum(drjax.map_fn(of_group, (chosen, data)))

    chosen, data = jnp.arange(16) % 6 == 1, jnp.arange(48.0).reshape(16, 3)
    result = drjax.jit(f, groups_per_step=step)(chosen, data)
    np.testing.assert_allclose(result, np.sin(data)[chosen].sum(), rtol=1e-5)
    assert len(ran) == runs
