"""Local SGD of a small transformer, of which each group may use several devices.

`program(how)` states the sharding of heads and hidden units over the mesh axis `model`
in one of the ways `HOW`; `program("plain")` states none, and is what they must equal.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, reshard
from jax.sharding import PartitionSpec as P

import drjax

CLIENTS, LAYERS, HEADS, WIDTH, HIDDEN, LENGTH = 5, 2, 4, 8, 16, 6
AXES = (("model", 4),)

# Tensor parallelism: heads and hidden units are over the devices.
SPECS = {
    "qkv": P(None, None, "model", None),
    "out": P("model", None, None),
    "up": P(None, "model"),
    "down": P("model", None),
}
HOW = ("auto", "shard_map", "explicit")


def mesh(how):
    """The mesh of one group, of no devices."""
    kind = AxisType.Explicit if how == "explicit" else AxisType.Auto
    return AbstractMesh((4,), ("model",), axis_types=(kind,))


def parameters():
    keys = iter(jax.random.split(jax.random.key(0), 4 * LAYERS))
    normal = lambda *shape: 0.3 * jax.random.normal(next(keys), shape)
    return [
        {
            "qkv": normal(3, WIDTH, HEADS, WIDTH // HEADS),
            "out": normal(HEADS, WIDTH // HEADS, WIDTH),
            "up": normal(WIDTH, HIDDEN),
            "down": normal(HIDDEN, WIDTH),
        }
        for _ in range(LAYERS)
    ]


def data(clients=CLIENTS):
    rng = np.random.default_rng(1)
    return rng.normal(size=(clients, 2, LENGTH, WIDTH)).astype(np.float32)


def attention(w, x, matmul):
    q, k, v = (jnp.einsum("bld,dhk->bhlk", x, w["qkv"][i]) for i in range(3))
    weights = jax.nn.softmax(jnp.einsum("bhlk,bhmk->bhlm", q, k), axis=-1)
    heads = jnp.einsum("bhlm,bhmk->bhlk", weights, v)
    return matmul("bhlk,hkd->bld", heads, w["out"])


def multilayer_perceptron(w, x, matmul):
    return matmul("blh,hd->bld", jax.nn.gelu(x @ w["up"]), w["down"])


def layer(w, x, matmul=jnp.einsum):
    x = x + attention(w, x, matmul)
    return x + multilayer_perceptron(w, x, matmul)


def auto(w, x):
    return layer({k: lax.with_sharding_constraint(w[k], SPECS[k]) for k in w}, x)


def by_shard_map(w, x):
    def matmul(*args):
        return lax.psum(jnp.einsum(*args), "model")

    run = functools.partial(layer, matmul=matmul)
    specs = {k: SPECS[k] for k in w}
    return jax.shard_map(run, in_specs=(specs, P()), out_specs=P())(w, x)


def explicit(w, x):
    matmul = functools.partial(jnp.einsum, out_sharding=P())
    return layer({k: reshard(w[k], SPECS[k]) for k in w}, x, matmul)


LAYER = {"plain": layer, "auto": auto, "shard_map": by_shard_map, "explicit": explicit}


def loss(params, x, how):
    y = x
    for w in params:
        y = LAYER[how](w, y)
    return jnp.mean((y[:, :-1] - x[:, 1:]) ** 2)


def program(how, clients=CLIENTS):
    """The mean of the clients' models after two steps, and each client's loss."""

    def local(params, x):
        def step(params, _):
            value, grads = jax.value_and_grad(loss)(params, x, how)
            return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value

        params, values = lax.scan(step, params, length=2)
        return params, values[-1]

    @drjax.program(clients=clients)
    def train(params, x):
        params, losses = drjax.map_fn(local, (drjax.broadcast(params), x))
        return drjax.reduce_mean(params), losses

    return train


def plan(how, clients=CLIENTS):
    args = parameters(), data(clients)
    return drjax.make_plan(program(how, clients), group_mesh=mesh(how))(*args)


@functools.cache
def expected(clients):
    """The results on one device."""
    return jax.jit(program("plain", clients))(parameters(), data(clients))


def check(results, clients=CLIENTS):
    """They equal those of one device, to rounding."""
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6),
        results,
        expected(clients),
    )
