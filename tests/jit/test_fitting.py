"""`groups_per_step="auto"` compiles a program once for each number of groups.

Covers: drjax._jit.fitting, drjax._jit.jit.
"""

from typing import Any

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import drjax
from tests.helpers.compiled import compilations, temp_bytes
from tests.helpers.maml import make_parallel_maml_loss, maml_args
from tests.helpers.meshes import in_mesh_of

pytestmark = pytest.mark.usefixtures("leaks_unchecked")
N = 16


def make():
    @drjax.program(clients=N)
    def loss(w, x):
        work = lambda w, x: jnp.sum(jnp.tanh(x @ w) ** 2)
        return drjax.reduce_mean(drjax.map_fn(work, (drjax.broadcast(w), x)))

    return jax.value_and_grad(loss)


def arguments(width=8):
    return jnp.ones((width, width)), jnp.ones((N, 4, width))


def of_programs(names):
    """How many of the compiled functions are programs, and no constants."""
    return sum("loss" in name for name in names)


def assert_close(actual, expected):
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5)
    jax.tree.map(close, actual, expected)


def auto(fn, **options):
    return drjax.jit(fn, groups_per_step="auto", **options)


@pytest.mark.parametrize("mesh", [None, {"clients": 4}])
def test_what_fits_is_compiled_once(mesh):
    with in_mesh_of(mesh):
        fn, args = make(), arguments()
        step = auto(fn)
        with compilations() as compiled:
            result = step(*args)
            step(*args)
        assert of_programs(compiled) == 1
        with compilations() as compiled:
            step.lower(*args).compile()
            auto(fn)(*args)  # the same function and options
        assert not of_programs(compiled)
        assert_close(result, jax.jit(fn)(*args))


def test_each_type_of_arguments_is_asked():
    step = auto(make())
    for width in (4, 8):
        with compilations() as compiled:
            step(*arguments(width))
        assert of_programs(compiled) == 1


@pytest.mark.once
def test_what_does_not_fit_is_searched_for():
    fn, args = jax.value_and_grad(make_parallel_maml_loss(N)), maml_args(N, 32)
    few, every = (
        temp_bytes(drjax.jit(fn, groups_per_step=k), *args) for k in (1, None)
    )
    step = auto(fn, memory_budget=(few + every) // 2)
    assert temp_bytes(step, *args) < every
    assert_close(step(*args), jax.jit(fn)(*args))


def test_under_transformations():
    fn, args = make(), arguments()
    expected = jax.jit(fn)(*args)
    assert_close(jax.jit(auto(fn))(*args), expected)
    batched = jax.vmap(auto(fn))(*jax.tree.map(lambda x: x[None], args))
    assert_close(jax.tree.map(lambda x: x[0], batched), expected)


def test_without_jit():
    fn, args = make(), arguments()
    expected = jax.jit(fn)(*args)
    with jax.disable_jit():
        assert_close(auto(fn)(*args), expected)


@pytest.mark.parametrize("residuals", [None, "store", "recompute"])
def test_what_a_search_compiles_is_not_compiled_again(residuals):
    fn, args = jax.value_and_grad(make_parallel_maml_loss(N)), maml_args(N, 32)
    of = lambda k: drjax.jit(fn, groups_per_step=k, residuals=residuals)
    few, every = (temp_bytes(of(k), *args) for k in (1, None))
    fn = jax.value_and_grad(make_parallel_maml_loss(N))
    step: Any = auto(fn, memory_budget=(few + every) // 2, residuals=residuals)
    with compilations() as compiled:
        result = step(*args)
    # All of them are the program, for one number of groups each.
    assert 2 < of_programs(compiled) <= len(step._fitting._known)
    assert "<lambda>" not in "".join(compiled)
    with compilations() as compiled:
        step.lower(*args).compile()
        assert_close(step(*args), result)
        auto(fn, memory_budget=(few + every) // 2, residuals=residuals)(*args)
    assert not compiled


@pytest.mark.once
@pytest.mark.parametrize("copied", [False, True])
def test_each_of_a_search_writes(copied):
    data = np.random.RandomState(0).randn(N, 64, 16).astype(np.float32)

    def make_program():
        @drjax.program(clients=N)
        def loss(w, x):
            y = drjax.map_fn(lambda w, x: jnp.tanh(x @ w), (drjax.broadcast(w), x))
            return drjax.reduce_mean(drjax.map_fn(jnp.sum, y)), y

        return loss

    w, out = jnp.eye(16), np.zeros((N, 64, 16), np.float32)
    fixed = lambda k: drjax.jit(make_program(), groups_per_step=k, out={1: out})
    few, every = (
        fixed(k).lower(w, data).compile().memory_analysis().temp_size_in_bytes
        for k in (1, None)
    )
    budget = (few + every) // 2
    step = auto(make_program(), memory_budget=budget, out={1: out})
    if copied:
        step = cloudpickle.loads(cloudpickle.dumps(step))
    for factor in (1, 2):
        with compilations() as compiled:
            _, written = step(factor * w, data)
        assert bool(of_programs(compiled)) == (factor == 1)
        np.testing.assert_allclose(written, np.tanh(factor * data), rtol=1e-5)


def test_what_is_chosen_is_said():
    fn, args = jax.value_and_grad(make_parallel_maml_loss(N)), maml_args(N, 32)
    few, every = (
        temp_bytes(drjax.jit(fn, groups_per_step=k), *args) for k in (1, None)
    )
    step = auto(fn, memory_budget=(few + every) // 2)
    line = str(drjax.check(step)(*args)).splitlines()[-1]
    with compilations() as compiled:
        step(*args)
    assert not of_programs(compiled)
    assert f"of {N}" in line and "residuals=" in line
