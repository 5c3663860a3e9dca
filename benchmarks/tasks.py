"""What is computed: for each task the work of one group, in plain JAX, and its data.

Every task is made of the mean over the groups of `fn(params, data_i)`: the mean, its
derivative, or a loop over rounds. `implementations.py` writes it in several ways.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Arrays = dict[str, Any]
Program = Callable[[Any, Any], Any]


def _as_it_is(program: Program) -> Program:
    return program


@dataclass(frozen=True)
class Task:
    """One benchmark problem.

    Attributes:
      name: The name in the tables.
      fn: `(params, data of one group) -> tree of arrays`.
      make: `(n, small) -> (params, data [n, ...])`, as numpy arrays.
      derivative: What is wanted of the mean: itself, `jax.grad` or
        `jax.value_and_grad`. Derivatives are linear: that of the mean is the mean of
        those of `fn`.
      whole: From the function of the mean to the program, if it is more than that.
    """

    name: str
    fn: Program
    make: Callable[[int, bool], tuple[Arrays, Arrays]]
    derivative: Callable[..., Any] = _as_it_is
    whole: Callable[[Program], Program] = _as_it_is


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
        "x": _normal(rng, n, shots, 16),
        "y": _normal(rng, n, shots, 4),
        "query_x": _normal(rng, n, shots, 16),
        "query_y": _normal(rng, n, shots, 4),
    }
    return _mlp_params(rng, width), data


def _make_large(n: int, small: bool):
    rng = np.random.default_rng(0)
    size = 1 << 10 if small else 1 << 16
    return {"x": _normal(rng, size)}, {"scale": _normal(rng, n)}


# ---------------------------------------------------------------------------------
# Tasks for plans: groups that need much more memory than their data


def _square_loss(params: Arrays, data: Arrays) -> jax.Array:
    return jnp.mean((jnp.tanh(data["x"] @ params["a"]) @ params["b"]) ** 2)


def _wide_step(params: Arrays, data: Arrays, rate: Any) -> Arrays:
    grads = jax.grad(_square_loss)(params, data)
    return jax.tree.map(lambda p, g: p - rate * g, params, grads)


def _wide_maml_loss(params: Arrays, data: Arrays) -> jax.Array:
    """The loss after one step of the model, at a rate that is learned too."""
    model = {"a": params["a"], "b": params["b"]}
    return _square_loss(_wide_step(model, data, params["rate"]), data)


def _wide_local_sgd(params: Arrays, data: Arrays) -> Arrays:
    step = lambda params, batch: (_wide_step(params, {"x": batch}, 0.1), None)
    return jax.lax.scan(step, params, data["x"])[0]


def _gradient_through_rounds(mean: Program) -> Program:
    """The gradient of what five rounds make of the parameters."""

    def loss(params, data):
        step = lambda params, _: (mean(params, data), None)
        params, _ = jax.lax.scan(step, params, None, length=5)
        return sum(jnp.sum(w * w) for w in jax.tree.leaves(params))

    return jax.grad(loss)


def _squared_error(params: Arrays, data: Arrays) -> jax.Array:
    return (data["x"] @ params["w"] - data["y"]) ** 2


def _wide_params(rng, small: bool) -> Arrays:
    width = 16 if small else 128
    return {name: _normal(rng, width, width) / width**0.5 for name in ("a", "b")}


def _make_wide_maml(n: int, small: bool):
    rng = np.random.default_rng(0)
    params = {**_wide_params(rng, small), "rate": np.float32(0.1)}
    return params, {"x": _normal(rng, n, 4 if small else 16, len(params["a"]))}


def _make_wide_local_sgd(n: int, small: bool):
    rng = np.random.default_rng(0)
    params = _wide_params(rng, small)
    return params, {"x": _normal(rng, n, 2, 4 if small else 16, len(params["a"]))}


def _make_regression(n: int, small: bool):
    rng = np.random.default_rng(0)
    return {"w": _normal(rng, 8)}, {"x": _normal(rng, n, 8), "y": _normal(rng, n)}


TASKS = {
    task.name: task
    for task in (
        Task("local SGD", _local_sgd, _make_local_sgd),
        Task("MAML gradient", _maml_loss, _make_maml, jax.grad),
        Task("large array", _scaled_tanh, _make_large),
        Task(
            "MAML value and gradient",
            _wide_maml_loss,
            _make_wide_maml,
            jax.value_and_grad,
        ),
        Task("round of local SGD", _wide_local_sgd, _make_wide_local_sgd),
        Task(
            "gradient through 5 rounds",
            _wide_local_sgd,
            _make_wide_local_sgd,
            whole=_gradient_through_rounds,
        ),
        Task("regression", _squared_error, _make_regression, jax.value_and_grad),
    )
}
