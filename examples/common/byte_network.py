"""A small network that predicts the next byte of a text from the last six."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from examples.common import text

CONTEXT, EMBEDDING = 6, 16
Params = Any


def init(key: Array, width: int) -> Params:
    """Random parameters; `width` is that of the hidden layer."""
    keys = jax.random.split(key, 3)
    normal = jax.nn.initializers.he_normal()
    return {
        "embedding": jax.random.normal(keys[0], (text.VOCAB, EMBEDDING)),
        "hidden": normal(keys[1], (CONTEXT * EMBEDDING, width)),
        "output": normal(keys[2], (width, text.VOCAB)),
        "bias": jnp.zeros(text.VOCAB),
    }


def log_probs(params: Params, windows: text.Windows) -> Array:
    """The log-probability of each target of windows: [..., length]."""
    tokens = windows.tokens.astype(jnp.int32)
    x = params["embedding"][tokens[..., :-1]]
    before = [(0, 0)] * (x.ndim - 2) + [(CONTEXT - 1, 0), (0, 0)]
    x = jnp.pad(x, before)
    size = tokens.shape[-1] - 1
    x = jnp.concatenate([x[..., k : k + size, :] for k in range(CONTEXT)], axis=-1)
    logits = jax.nn.relu(x @ params["hidden"]) @ params["output"] + params["bias"]
    logits = jax.nn.log_softmax(logits)
    return jnp.take_along_axis(logits, tokens[..., 1:, None], -1)[..., 0]


def mean_loss(values: Array, windows: text.Windows) -> Array:
    """Of log-probabilities, over the real targets, in nats per byte."""
    real = text.target_mask(windows.lengths, values.shape[-1])
    return -jnp.sum(values, where=real) / jnp.maximum(real.sum(), 1)


def loss(params: Params, windows: text.Windows) -> Array:
    """The mean loss of a model, in nats per byte."""
    return mean_loss(log_probs(params, windows), windows)
