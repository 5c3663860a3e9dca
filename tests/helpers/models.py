"""Layers as large models write them, sharded over the axes "fsdp" and "tensor"."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

import drjax

Params = Any
_RNG = np.random.RandomState(0)
MICROBATCHES = 4
SPECS = {
    "table": P("tensor", "fsdp"),
    "layers": {
        "qkv": P(None, "fsdp", "tensor"),
        "experts": P(None, "tensor", "fsdp"),
        "stages": P(None, "tensor", "fsdp"),
    },
}


def attention(x, w, mesh):
    """Heads over "tensor", by a shard_map over the whole mesh."""

    def heads(q, k, v):
        scores = jnp.einsum("shd,thd->hst", q, k) * q.shape[-1] ** -0.5
        return jnp.einsum("hst,thd->shd", jax.nn.softmax(scores), v)

    q, k, v = jnp.split(x @ w, 3, -1)
    q, k, v = (y.reshape(-1, 2, 4) for y in (q, k, v))
    spec = P(None, "tensor")
    y = jax.shard_map(
        heads, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec, check_vma=False
    )(q, k, v)
    return x + y.reshape(x.shape)


def experts(x, w, mesh):
    """A sparse layer: each device along "tensor" has one expert, and adds its part."""

    def expert(x, w, route):
        mine = route == lax.axis_index("tensor")
        return lax.psum(jnp.where(mine[:, None], x @ w[0], 0), "tensor")

    route = jnp.argmax(x[:, :2], -1)
    y = jax.shard_map(
        expert, mesh=mesh, in_specs=(P(), P("tensor"), P()), out_specs=P()
    )(x, w, route)
    return x + jnp.tanh(y)


def pipeline(x, w, mesh):
    """A stage on each device along "tensor"; microbatches go from one to the next."""

    def stage(x, w):
        i, n = lax.axis_index("tensor"), lax.axis_size("tensor")
        waiting = x.reshape(MICROBATCHES, -1, x.shape[-1])
        waiting = lax.pcast(waiting, "tensor", to="varying")

        def step(state, t):
            state = jnp.where(i == 0, waiting[jnp.minimum(t, MICROBATCHES - 1)], state)
            y = jnp.tanh(state @ w[0])
            ring = [(j, (j + 1) % n) for j in range(n)]
            return lax.ppermute(y, "tensor", ring), y

        steps = jnp.arange(MICROBATCHES + n - 1)
        _, done = lax.scan(step, jnp.zeros_like(waiting[0]), steps)
        out = done[n - 1 :].reshape(x.shape)
        return lax.psum(jnp.where(i == n - 1, out, 0), "tensor")

    return x + jax.shard_map(
        stage, mesh=mesh, in_specs=(P(), P("tensor")), out_specs=P()
    )(x, w)


LAYERS: dict[str, Callable] = {
    "attention": lambda x, w, mesh: attention(x, w["qkv"], mesh),
    "experts": lambda x, w, mesh: experts(x, w["experts"], mesh),
    "pipeline": lambda x, w, mesh: pipeline(x, w["stages"], mesh),
}


def loss(params: Params, tokens, mesh, layers=tuple(LAYERS)):
    """Of an embedding, a scan over blocks of these layers, and the embedding again."""
    x = params["table"][tokens]
    x = lax.with_sharding_constraint(x, jax.NamedSharding(mesh, P("fsdp")))

    def block(x, w):
        for layer in layers:
            x = LAYERS[layer](x, w, mesh)
        return x, None

    x, _ = lax.scan(jax.checkpoint(block), x, params["layers"])
    logits = x @ params["table"].T
    one_hot = jax.nn.one_hot(jnp.roll(tokens, -1), logits.shape[-1], dtype=x.dtype)
    return -jnp.mean(jnp.sum(jax.nn.log_softmax(logits) * one_hot, -1))


def initial(dtype) -> Params:
    normal = lambda *shape: jnp.asarray(0.3 * _RNG.randn(*shape), dtype)
    layers = {
        "qkv": normal(2, 8, 24), "experts": normal(2, 2, 8, 8),
        "stages": normal(2, 2, 8, 8),
    }  # fmt: skip
    return {"table": normal(16, 8), "layers": layers}


def local_sgd(mesh, layers=tuple(LAYERS)) -> Callable:
    """Two local steps; from `(params, tokens [2, length])` to the change."""

    def work(params, tokens):
        def step(p, t):
            grads = jax.grad(loss)(p, t, mesh, layers)
            return jax.tree.map(lambda p, g: p - 0.1 * g, p, grads), None

        new, _ = lax.scan(step, params, tokens)
        return jax.tree.map(jnp.subtract, new, params)

    return work


def diloco_round(mesh, n: int, layers=tuple(LAYERS)) -> Callable:
    """The parameters, changed by the mean of n groups' changes."""

    @drjax.program(clients=n)
    def train(params, tokens):
        slices = (drjax.broadcast(params), tokens)
        change = drjax.map_fn(local_sgd(mesh, layers), slices)
        return jax.tree.map(jnp.add, params, drjax.reduce_mean(change))

    return train
