"""Batching of programs and of their gradients, over any argument and dimension.

Covers: drjax._primitives.collectives, drjax._primitives.extrema,
drjax._primitives.map_fn, drjax._primitives.partition_index,
drjax._primitives.map_columns, drjax._primitives.fold_groups.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import drjax
from tests.helpers.cases import assert_close, grid, on_mesh
from tests.helpers.meshes import in_mesh_of


def _variants(case, count=3):
    """A few scaled copies of the first argument."""
    return [case.args[0] * (1 + 0.25 * i) for i in range(count)]


@pytest.mark.sampled
@grid(shift=8, every=2)
def test_vmap_of_value(case, mesh_name):
    firsts = _variants(case)
    want = np.stack([case.numpy(x, *case.args[1:]) for x in firsts])
    with on_mesh(case, mesh_name) as (_, *rest):
        batched = jax.vmap(lambda x: case.fn(x, *rest))
        assert_close(jax.jit(batched)(jnp.stack(firsts)), want)


@pytest.mark.sampled
@grid(shift=0, every=4)
def test_vmap_over_the_last_dimension(case, mesh_name):
    firsts = _variants(case)
    want = np.stack([case.numpy(x, *case.args[1:]) for x in firsts], axis=-1)
    with on_mesh(case, mesh_name) as (_, *rest):
        batched = jax.vmap(lambda x: case.fn(x, *rest), in_axes=-1, out_axes=-1)
        assert_close(jax.jit(batched)(jnp.stack(firsts, axis=-1)), want)


@pytest.mark.sampled
@grid(shift=1, every=7)
def test_vmap_of_grad_and_grad_of_vmap(case, mesh_name):
    firsts = _variants(case)
    with on_mesh(case, mesh_name) as (_, *rest):

        def scalar(x):
            return jnp.sum(jnp.sin(case.fn(x, *rest)))

        stacked = jnp.stack(firsts)
        gradient = jax.jit(jax.grad(scalar))
        one_by_one = jnp.stack([gradient(jnp.asarray(x)) for x in firsts])
        assert_close(jax.jit(jax.vmap(jax.grad(scalar)))(stacked), one_by_one)
        total = jax.jit(jax.grad(lambda xs: jnp.sum(jax.vmap(scalar)(xs))))
        assert_close(total(stacked), one_by_one)


def mean(x):
    return jax.lax.pmean(x, "batch")


# Programs that use the axis of the surrounding vmap, and what they mean for the batch.
OVER_THE_BATCH = {
    "map": (
        lambda x: drjax.map_fn(lambda a: a * mean(a), x),
        lambda x: x * x.mean(0, keepdims=True),
    ),
    "columns": (
        lambda x: drjax.reduce_columns(lambda c: jnp.sum(c**2) * mean(c[0]), x),
        lambda x: jnp.sum(x**2, 1) * x[:, 0].mean(0, keepdims=True),
    ),
    "columns, index": (
        lambda x: drjax.reduce_columns(
            lambda c: jnp.sum(c**2) * (1 + jax.lax.axis_index("batch")), x
        ),
        lambda x: jnp.sum(x**2, 1) * jnp.arange(1.0, 3.0)[:, None],
    ),
    "fold": (
        lambda x: drjax.reduce(lambda a, b: a + b + 0 * mean(a * b), x, 0.0),
        lambda x: jnp.sum(x, 1),
    ),
    "fold, scaled": (
        lambda x: drjax.reduce(lambda a, b: a * b * mean(jnp.ones(3)), x, 1.0),
        lambda x: jnp.prod(x, 1),
    ),
}


@pytest.mark.sampled
@pytest.mark.parametrize("shape", [None, {"clients": 2}], ids=["no mesh", "mesh"])
@pytest.mark.parametrize("name", OVER_THE_BATCH)
def test_collectives_over_the_axis_of_a_vmap(name, shape):
    fn, meaning = OVER_THE_BATCH[name]
    x = jnp.linspace(0.3, 1.4, 2 * 4 * 3).reshape(2, 4, 3)
    loss = lambda f: lambda x: jnp.sum(jnp.sin(f(x)))
    wants = meaning(x), jax.grad(loss(meaning))(x)
    with in_mesh_of(shape):
        for jit in (lambda f: f, drjax.jit):
            batched = jax.vmap(jit(drjax.program(clients=4)(fn)), axis_name="batch")
            gots = jax.jit(batched)(x), jax.jit(jax.grad(loss(batched)))(x)
            for got, want in zip(gots, wants, strict=True):
                np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6)
