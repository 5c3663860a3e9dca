"""Each building block alone, with each of its options that changes what it does."""

import inspect
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import drjax

N = 8
X = np.arange(N * 4, dtype=np.float32).reshape(N, 4) / 17 - 1
W = np.arange(1, N + 1, dtype=np.float32)
INDEX = np.array([3, 3, 0, 7, 0, 2, 2, 6], np.int32)


def _middle(column):
    return jnp.sort(column)[2:-2].mean()


def _product(a, b):
    return a * b / 8 + a + b


# By name, which begins with that of the block: a function of X and W.
BLOCKS: dict[str, Callable] = {
    "broadcast": lambda x, w: drjax.broadcast(w),
    "map_fn": lambda x, w: drjax.map_fn(lambda x: jnp.sin(x), x),
    "reduce_sum": lambda x, w: drjax.reduce_sum(x),
    "reduce_sum, where": lambda x, w: drjax.reduce_sum(x, where=w > 3),
    "reduce_sum, by": lambda x, w: drjax.reduce_sum(
        x, by=w.astype(jnp.int32) % 3, num=3
    ),
    "reduce_sum, sharded": lambda x, w: drjax.reduce_sum(x, result="sharded"),
    "reduce_mean": lambda x, w: drjax.reduce_mean(x),
    "reduce_mean, where": lambda x, w: drjax.reduce_mean(x, where=w > 3),
    "reduce_mean, wire": lambda x, w: drjax.reduce_mean(x, wire="bfloat16"),
    "reduce_weighted_mean": lambda x, w: drjax.reduce_weighted_mean(x, w),
    "reduce_max": lambda x, w: drjax.reduce_max(x),
    "reduce_min": lambda x, w: drjax.reduce_min(x),
    "reduce_argmax": lambda x, w: drjax.reduce_argmax(w * 2),
    "reduce_argmin": lambda x, w: drjax.reduce_argmin(w * 2),
    "select": lambda x, w: drjax.select(x, 2),
    "select, where": lambda x, w: drjax.select(x, 2, where=w > 3),
    "gather": lambda x, w: drjax.gather(x),
    "scatter": lambda x, w: drjax.scatter(x * 2),
    "partition_index": lambda x, w: drjax.partition_index(),
    "take": lambda x, w: drjax.take(x, jnp.asarray(INDEX)),
    "take, permutation": lambda x, w: drjax.take(x, [1, 0, 3, 2, 5, 4, 7, 6]),
    "put": lambda x, w: drjax.put(x, jnp.asarray(INDEX)),
    "put, add": lambda x, w: drjax.put(x, jnp.asarray(INDEX), add=True),
    "put, into": lambda x, w: drjax.put(x, jnp.asarray(INDEX), x * 2),
    "shift": lambda x, w: drjax.shift(x, 3),
    "reduce_columns": lambda x, w: drjax.reduce_columns(_middle, x),
    "reduce_columns, sum": lambda x, w: drjax.reduce_columns(
        lambda c: jnp.outer(c, c), x, sum=True
    ),
    "reduce": lambda x, w: drjax.reduce(_product, x, 0.0),
}


def names() -> set[str]:
    """The names of all building blocks that drjax has."""
    blocks = set()
    for name, value in vars(drjax).items():
        others = ("program", "shard", "partition_size")
        if inspect.isfunction(value) and name not in others:
            parameters = inspect.signature(value).parameters
            if {"mesh", "partition"} <= {*parameters}:
                blocks.add(name)
    return blocks


def value(name: str) -> Callable:
    return drjax.program(clients=N)(BLOCKS[name])


def gradient(name: str) -> Callable:
    """The gradient in the data of a scalar function of the block's result."""
    f = value(name)

    def total(x, w):
        y = f(x, w)
        return jnp.sum(jnp.sin(y)) if jnp.issubdtype(y.dtype, jnp.floating) else 0.0

    return jax.grad(total)
