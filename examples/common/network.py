"""A classifier with one hidden layer: small enough to train hundreds of times."""

import jax
import optax
from jax import Array


def init(keys, inputs: int, width: int, outputs: int = 10) -> dict[str, Array]:
    """Draws the weights of both layers, one from each of two keys (He et al. 2015)."""
    normal = jax.nn.initializers.he_normal()
    return {
        "hidden": normal(keys[0], (inputs, width)),
        "output": normal(keys[1], (width, outputs)),
    }


def apply(params, x) -> Array:
    """Logits `[..., outputs]` of inputs `[..., inputs]`."""
    return jax.nn.relu(x @ params["hidden"]) @ params["output"]


def loss(params, batch) -> Array:
    """Mean cross-entropy of a batch: inputs `batch.x`, labels `batch.y`."""
    logits = apply(params, batch.x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch.y).mean()
