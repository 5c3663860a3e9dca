"""A small decoder-only transformer over bytes, in flax nnx.

Pre-norm blocks (Xiong et al. 2020, arXiv 2002.04745, section 3) with root-mean-square
normalization, rotary positions (Su et al. 2021, arXiv 2104.09864, section 3.4.2),
normalized queries and keys (Dehghani et al. 2023, arXiv 2302.05442, section 2), and one
matrix for the embedding and the output (Press and Wolf 2017, arXiv 1608.05859).
"""

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import Array
from jax.sharding import PartitionSpec


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """The size of the model."""

    d_model: int = 64
    """Width of the residual stream."""
    layers: int = 2
    """Number of blocks."""
    heads: int = 4
    """Attention heads in a block; must divide d_model into even widths."""
    mlp_ratio: int = 4
    """Width of a block's hidden layer, in units of d_model."""
    vocab: int = 256
    """Number of token values."""
    scan: bool = False
    """Compile one block for all layers, and rematerialize it in the backward pass."""
    attention_axis: str | None = None
    """A mesh axis over which attention is a `jax.shard_map` of its own, by heads."""
    batch_axis: str | None = None
    """A mesh axis over which activations are sharded, by their first dimension."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What is computed in."""
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """What parameters are in."""

    @property
    def dtypes(self) -> dict[str, str]:
        """Both dtypes, as keywords of layers."""
        return {"dtype": self.dtype, "param_dtype": self.param_dtype}


def rotate(x: Array, base: float = 10_000.0) -> Array:
    """Applies rotary positions to [..., time, heads, width]."""
    time, half = x.shape[-3], x.shape[-1] // 2
    frequencies = base ** -(jnp.arange(half) / half)
    angles = (jnp.arange(time)[:, None] * frequencies)[:, None, :]
    cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def by_batch(x: Array, axis: str | None) -> Array:
    """Activations [batch, ...], sharded over this mesh axis if there is one."""
    if axis is None:
        return x
    free = (PartitionSpec.UNCONSTRAINED,) * (x.ndim - 1)
    return jax.lax.with_sharding_constraint(x, PartitionSpec(axis, *free))


class Attention(nnx.Module):
    """Causal self-attention."""

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs):
        d, width = config.d_model, config.d_model // config.heads
        keywords: dict[str, Any] = {"rngs": rngs, **config.dtypes}
        self.shape, self.axis = (config.heads, 3, width), config.attention_axis
        self.qkv = nnx.Linear(d, 3 * d, use_bias=False, **keywords)
        self.out = nnx.Linear(d, d, use_bias=False, **keywords)
        self.q_norm = nnx.RMSNorm(width, **keywords)
        self.k_norm = nnx.RMSNorm(width, **keywords)

    def __call__(self, x: Array) -> Array:
        """Maps [..., time, d_model] to the same shape."""
        qkv = self.qkv(x).reshape(*x.shape[:-1], *self.shape)
        q, k, v = (qkv[..., i, :] for i in range(3))
        q, k = rotate(self.q_norm(q)), rotate(self.k_norm(k))
        attend = functools.partial(jax.nn.dot_product_attention, is_causal=True)
        if self.axis is not None:
            heads = PartitionSpec(*(None,) * (q.ndim - 2), self.axis)
            attend = jax.shard_map(attend, in_specs=(heads,) * 3, out_specs=heads)
        return self.out(attend(q, k, v).reshape(x.shape))


class Block(nnx.Module):
    """Attention and a two-layer perceptron, each behind a norm and a residual."""

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs):
        width, hidden = config.d_model, config.mlp_ratio * config.d_model
        keywords: dict[str, Any] = {"rngs": rngs, **config.dtypes}
        self.batch_axis = config.batch_axis
        self.attention_norm = nnx.RMSNorm(width, **keywords)
        self.attention = Attention(config, rngs)
        self.mlp_norm = nnx.RMSNorm(width, **keywords)
        self.up = nnx.Linear(width, hidden, use_bias=False, **keywords)
        self.down = nnx.Linear(hidden, width, use_bias=False, **keywords)

    def __call__(self, x: Array) -> Array:
        """Maps [..., time, d_model] to the same shape."""
        x = by_batch(x, self.batch_axis)
        x = x + self.attention(self.attention_norm(x))
        return x + self.down(jax.nn.gelu(self.up(self.mlp_norm(x))))


class Transformer(nnx.Module):
    """A decoder-only transformer language model."""

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs):
        keywords: dict[str, Any] = {"rngs": rngs, **config.dtypes}
        self.embed = nnx.Embed(config.vocab, config.d_model, **keywords)
        if config.scan:
            split = nnx.split_rngs(splits=config.layers)
            self.blocks = split(nnx.vmap(lambda rngs: Block(config, rngs)))(rngs)
        else:
            self.blocks = nnx.List([Block(config, rngs) for _ in range(config.layers)])
        self.norm = nnx.RMSNorm(config.d_model, **keywords)

    def __call__(self, tokens: Array) -> Array:
        """Maps integer tokens [..., time] to logits [..., time, vocab]."""
        x = self.embed(tokens)
        if isinstance(self.blocks, Block):  # all of them, their parameters stacked
            block, stacked = nnx.split(self.blocks)
            run = jax.checkpoint(lambda x, params: (nnx.merge(block, params)(x), None))
            x, _ = jax.lax.scan(run, x, stacked)
        else:
            for block in self.blocks:
                x = block(x)
        return self.embed.attend(self.norm(x))


def mean_loss(model: Transformer, tokens: Array, lengths: Array) -> tuple[Array, Array]:
    """Mean cross-entropy of the next token over the real targets, in nats.

    Args:
        tokens: integers [..., time + 1]; the first of them is only context.
        lengths: number of real targets, [...]; the rest is padding.

    Returns:
        The mean (zero if there is no real target) and the number of real targets.
    """
    tokens = tokens.astype(jnp.int32)
    logits = model(tokens[..., :-1]).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[..., 1:])
    real = jnp.arange(losses.shape[-1]) < lengths[..., None]
    targets = lengths.sum().astype(jnp.float32)
    return jnp.sum(losses, where=real) / jnp.maximum(targets, 1), targets
