"""Batching of programs and of their gradients, over any argument and dimension.

Covers: drjax._primitives.collectives, drjax._primitives.extrema,
drjax._primitives.map_fn, drjax._primitives.partition_index.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers.cases import assert_close, grid, on_mesh


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
