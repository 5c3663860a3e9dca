"""What is computed: for each task the work of one group, in plain JAX, and its data.

Every task is the mean over the groups of `fn(params, data_i)`, or the gradient of
that mean. `implementations.py` writes it in several ways.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Arrays = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """One benchmark problem.

    Attributes:
      name: The name in the tables.
      fn: `(params, data of one group) -> tree of arrays`.
      gradient: Whether the result is the gradient in `params` of the mean of `fn`.
      make: `(n, small) -> (params, data [n, ...])`, as numpy arrays.
    """

    name: str
    fn: Callable[[Arrays, Arrays], Any]
    gradient: bool
    make: Callable[[int, bool], tuple[Arrays, Arrays]]


def _mlp(params: Arrays, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ params["w1"] + params["b1"]) @ params["w2"] + params["b2"]


def _loss(params: Arrays, data: Arrays) -> jax.Array:
    residual = _mlp(params, data["x"]) - data["y"]
    return (residual * residual).mean()


def _sgd_step(params: Arrays, data: Arrays, rate: float) -> Arrays:
    grads = jax.grad(_loss)(params, data)
    return jax.tree.map(lambda p, g: p - rate * g, params, grads)


def _local_sgd(params: Arrays, data: Arrays) -> Arrays:
    """The parameters after one step of SGD on each of the group's batches."""
    step = lambda params, batch: (_sgd_step(params, batch, 0.1), None)
    return jax.lax.scan(step, params, data)[0]


def _maml_loss(params: Arrays, data: Arrays) -> jax.Array:
    """The loss on the query set after one step on the support set."""
    adapted = _sgd_step(params, {"x": data["x"], "y": data["y"]}, 0.1)
    return _loss(adapted, {"x": data["query_x"], "y": data["query_y"]})


def _scaled_tanh(params: Arrays, data: Arrays) -> jax.Array:
    return jnp.tanh(params["x"] * data["scale"])


def _normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape, dtype=np.float32)


def _mlp_params(rng, width: int) -> Arrays:
    w1, w2 = _normal(rng, 16, width) / 4, _normal(rng, width, 4) / width**0.5
    zeros = lambda size: np.zeros((1, size), np.float32)
    return {"w1": w1, "b1": zeros(width), "w2": w2, "b2": zeros(4)}


def _make_local_sgd(n: int, small: bool):
    rng = np.random.default_rng(0)
    steps, batch, width = (2, 4, 16) if small else (8, 32, 64)
    data = {
        "x": _normal(rng, n, steps, batch, 16),
        "y": _normal(rng, n, steps, batch, 4),
    }
    return _mlp_params(rng, width), data


def _make_maml(n: int, small: bool):
    rng = np.random.default_rng(0)
    shots, width = (4, 16) if small else (16, 64)
    data = {
        "x": _normal(rng, n, shots, 16), "y": _normal(rng, n, shots, 4),
        "query_x": _normal(rng, n, shots, 16), "query_y": _normal(rng, n, shots, 4),
    }  # fmt: skip
    return _mlp_params(rng, width), data


def _make_large(n: int, small: bool):
    rng = np.random.default_rng(0)
    size = 1 << 10 if small else 1 << 16
    return {"x": _normal(rng, size)}, {"scale": _normal(rng, n)}


TASKS = {
    task.name: task
    for task in (
        Task("local SGD", _local_sgd, False, _make_local_sgd),
        Task("MAML gradient", _maml_loss, True, _make_maml),
        Task("large array", _scaled_tanh, False, _make_large),
    )
}
