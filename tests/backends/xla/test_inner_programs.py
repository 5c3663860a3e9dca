"""Programs inside a group's stage run in chunks of inner groups.

Covers: drjax.backends.xla.inner_programs.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import drjax
from tests.helpers.compiled import temp_bytes
from tests.helpers.meshes import in_mesh_of

MODEL = jnp.linspace(0.0, 1.0, 64)
RNG = np.random.RandomState(0)


def make(pods: int, groups: int):
    """A loss of a model and data, in two rounds of each pod, and its arguments."""

    @drjax.program(pods=pods, groups=groups)
    def loss(model, data):
        def one(model, x):
            return jnp.sum(jnp.cumsum(jnp.sin(jnp.outer(x, model)), 0) ** 2) / 64

        def in_pod(losses, x):
            mean = drjax.reduce_mean(losses)
            spread = drjax.map_fn(lambda a: (a - mean) ** 2, losses)
            return drjax.reduce_max(losses) + drjax.reduce_mean(spread) + 0 * x.sum()

        losses = drjax.map_fn(one, (drjax.broadcast(model), data))
        of_pods = drjax.map_fn(in_pod, (losses, data), over="pods")
        return drjax.reduce_mean(of_pods, over="pods")

    return loss, jnp.asarray(RNG.randn(pods, groups, 64), jnp.float32)


@pytest.mark.parametrize("shape", [None, {"pods": 2}, {"pods": 2, "groups": 4}])
@pytest.mark.parametrize("step", [1, 3])
def test_values_and_gradients(shape, step):
    loss, data = make(4, 8)
    gradient = jax.value_and_grad(loss)
    expected = gradient(MODEL, data)
    with in_mesh_of(shape):
        result = drjax.jit(gradient, groups_per_step=step)(MODEL, data)
    for a, b in zip(result, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [None, {"pods": 2}])
def test_memory_does_not_grow_with_the_groups_of_either_level(shape):
    def used(pods, groups):
        loss, data = make(pods, groups)
        step = drjax.jit(jax.value_and_grad(loss), groups_per_step=1)
        # But for the slices of one pod, which are an operand of its rounds.
        return temp_bytes(step, MODEL, data) - 2 * data[0].nbytes

    with in_mesh_of(shape):
        few = used(4, 8)
        assert used(4, 128) < 1.5 * few
        assert used(32, 8) < 1.5 * few
    assert few < 20 * MODEL.size**2 * 4


def test_inner_programs_with_effects_run_as_they_are():
    seen = []

    @drjax.program(groups=4)
    def inner(x):
        jax.debug.callback(lambda x: seen.append(float(x)), x)
        return drjax.reduce_sum(drjax.map_fn(lambda y: y * x, jnp.arange(4.0)))

    outer = drjax.program(pods=3)(lambda x: drjax.reduce_sum(drjax.map_fn(inner, x)))
    result = drjax.jit(outer, groups_per_step=1)(jnp.arange(3.0))
    jax.effects_barrier()
    assert float(result) == 18.0
    assert sorted(seen) == [0.0, 1.0, 2.0]
