"""The first program of the paper, end to end."""

import jax
import jax.numpy as jnp

import drjax
from tests.meshes import in_mesh, make_mesh


def test_paper_snippet_on_and_off_a_mesh():
    @drjax.program(clients=16)
    def double_and_sum(x):
        return drjax.reduce_sum(drjax.map_fn(lambda a: 2 * a, drjax.broadcast(x)))

    for mesh in (None, make_mesh({"clients": 8})):
        with in_mesh(mesh):
            assert double_and_sum(jnp.float32(1.0)) == 32.0
            assert jax.jit(jax.grad(double_and_sum))(1.0) == 32.0
