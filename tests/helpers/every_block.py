"""A program out of every building block, and its arguments."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import drjax

RNG = np.random.default_rng(0)
X = np.asarray(RNG.normal(size=3), np.float32)
DX = np.asarray(RNG.normal(size=3), np.float32)


def data_for(n: int) -> np.ndarray:
    return np.asarray(np.random.default_rng(n).normal(size=(n, 3)), np.float32)


def make_program(n: int, block=None, **keywords):
    """A scalar program out of every building block; `block`: keywords for each."""
    block = block or {}

    @drjax.program(clients=n, **keywords)
    def everything(x, data) -> Any:
        y = drjax.broadcast(x, **block)
        number = drjax.partition_index(**block)
        weight = drjax.map_fn(lambda i: 1.0 + i, number, **block)

        def fit(y, slice_, i):
            return jnp.tanh(y * slice_) + 0.1 * i + drjax.partition_index() / n * y**2

        z = drjax.map_fn(fit, (y, data, number), **block)
        z = 2 * z + y  # pointwise work between blocks
        slices = drjax.gather(z, **block)
        back = drjax.scatter(slices[::-1], **block)
        # One rounding, so that the compiler cannot compute it in two ways.
        peaks = drjax.map_fn(jnp.multiply, (y, data), **block)
        results = (
            drjax.reduce_sum(z * back, **block) / n,
            drjax.reduce_mean(z, **block),
            drjax.reduce_mean(z, where=number < 2, **block),
            drjax.reduce_weighted_mean(z, weight, **block),
            drjax.reduce_max(peaks, **block),
            drjax.reduce_min(peaks, **block),
            drjax.select(z, n // 2, **block) ** 2,
        )
        return sum(jnp.mean(r * jnp.cos(x)) for r in results)

    return everything


def assert_close(result, expected, tol=2e-5):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=tol, atol=tol),
        result, expected,
    )  # fmt: skip
