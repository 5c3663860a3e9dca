"""A group's work on a round: local SGD of the language model, and its layout."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import PartitionSpec as P

from examples.common.transformer import Transformer, TransformerConfig, mean_loss
from experiments.config import Round

Params = Any


def shapes(config: TransformerConfig) -> tuple[nnx.GraphDef, Params]:
    """The model's graph, and its parameters as shapes and dtypes."""
    return nnx.split(nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(0))))


def initial(config: TransformerConfig, seed: int) -> Params:
    """Parameters to start from."""
    return nnx.split(Transformer(config, nnx.Rngs(seed)))[1]


def local_sgd(graphdef: nnx.GraphDef, config: Round) -> Callable:
    """A group's work: `(params, Windows) -> (update or new params, mean loss)`.

    The windows are tokens `[steps, batch, length + 1]` and lengths `[steps, batch]`.
    """

    def loss(params: Params, batch: Any) -> Array:
        return mean_loss(nnx.merge(graphdef, params), *batch)[0]

    def step(params: Params, batch: Any) -> tuple[Params, Array]:
        value, grads = jax.value_and_grad(loss)(params, batch)
        rate = lambda p: jnp.asarray(config.lr, p.dtype)
        return jax.tree.map(lambda p, g: p - rate(p) * g, params, grads), value

    def work(params: Params, windows: Any) -> tuple[Params, Array]:
        new, losses = jax.lax.scan(step, params, windows)
        if config.average == "updates":
            new = jax.tree.map(jnp.subtract, new, params)
        return new, losses.mean()

    return work


def specs(params: Params, layout: str, axis: str, fsdp: str | None = None) -> Params:
    """How parameters lie on the devices of a group.

    Args:
      params: The parameters, or their shapes.
      layout: `"tensor parallel"`: Megatron's, heads and hidden units over the devices
        (Shoeybi et al. 2019, arXiv 1909.08053, section 3); the embedding by its
        words. `"fsdp"`: each matrix by its first dimension that is not the layers'.
      axis: The mesh axis of a group's devices.
      fsdp: A second one, over which the matrices' other dimension is divided.
    """
    by_rows = layout == "fsdp"

    def spec(path: tuple, leaf: Any) -> P:
        names = [str(getattr(key, "key", key)) for key in path]
        if "embedding" in names:
            return P(axis, fsdp) if fsdp else P(axis)
        if "kernel" not in names:
            return P()
        layers = (None,) * (leaf.ndim - 2)
        of_rows = by_rows or "out" in names or "down" in names
        return P(*layers, axis, fsdp) if of_rows else P(*layers, fsdp, axis)

    return jax.tree_util.tree_map_with_path(spec, params)
