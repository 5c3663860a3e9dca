"""The work of one group in a round of several benchmarks: local gradient descent."""

import jax
import jax.numpy as jnp
from jax import lax

Params = dict[str, jax.Array]


def loss(params: Params, x: jax.Array) -> jax.Array:
    """Of an autoencoder with one hidden layer."""
    return jnp.mean((jnp.tanh(x @ params["in"]) @ params["out"] - x) ** 2)


def descend(params: Params, x: jax.Array) -> Params:
    """Local steps of gradient descent, one for each batch of x, `[steps, batch, d]`."""

    def step(params: Params, x: jax.Array) -> tuple[Params, None]:
        grads = jax.grad(loss)(params, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), None

    return lax.scan(step, params, x)[0]
