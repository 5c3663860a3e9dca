"""Programs as the body of a scan over rounds, and the gradient through it.

Covers: drjax._primitives.collectives, drjax._primitives.extrema,
drjax._primitives.map_fn, drjax._primitives.partition_index.
"""

import jax
import jax.numpy as jnp
import pytest

from tests.helpers.cases import assert_close, grid, on_mesh

ROUNDS = 3


@pytest.mark.slow
@grid(shift=3, every=9)
def test_scan_over_rounds(case, mesh_name):
    with on_mesh(case, mesh_name) as (first, *rest):

        def step(x, _):
            y = case.fn(x, *rest)
            return x + 0.01 * jnp.sum(jnp.sin(y)), y

        def scanned(x):
            return jax.lax.scan(step, x, None, length=ROUNDS)

        def unrolled(x):
            ys = []
            for _ in range(ROUNDS):
                x, y = step(x, None)
                ys.append(y)
            return x, jnp.stack(ys)

        def with_gradient(run):
            gradient = jax.grad(lambda x: jnp.sum(run(x)[0]))
            return jax.jit(lambda x: (*run(x), gradient(x)))

        result, expected = with_gradient(scanned)(first), with_gradient(unrolled)(first)
        for got, want in zip(result, expected, strict=True):
            assert_close(got, want)
