"""jax.checkpoint around programs, with and without policies.

Covers: drjax._primitives.collectives, drjax._primitives.extrema,
drjax._primitives.map_fn, drjax._primitives.partition_index.
"""

import jax
import jax.numpy as jnp
import pytest

from tests.helpers.cases import assert_close, grid, on_mesh

POLICIES = {
    "none": None,
    "dots": jax.checkpoint_policies.dots_saveable,
    "everything": jax.checkpoint_policies.everything_saveable,
}


@pytest.mark.sampled
@grid(shift=2, every=9)
def test_gradient_is_unchanged(case, mesh_name):
    with on_mesh(case, mesh_name) as args:
        argnums = tuple(range(len(args)))

        def scalar(fn):
            return lambda *args: jnp.sum(jnp.sin(fn(*args)))

        want = jax.jit(jax.grad(scalar(case.fn), argnums))(*args)
        for policy in POLICIES.values():
            rematerialized = jax.checkpoint(case.fn, policy=policy)
            got = jax.jit(jax.grad(scalar(rematerialized), argnums))(*args)
            for g, w in zip(got, want, strict=True):
                assert_close(g, w)
