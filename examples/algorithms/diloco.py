"""DiLoCo (Douillard et al. 2023, arXiv 2311.08105, algorithm 1).

In building blocks alone, to read; `drjax.contrib.diloco` is the layer for trainers.

python -m examples.algorithms.diloco
"""

import jax
import jax.numpy as jnp
import optax

import drjax
from examples.common import text


def make_inner_steps(loss, inner):
    def inner_steps(theta_i, state, D_i, keys):
        """A step of the inner optimizer on a batch x ~ D_i for each of the keys."""

        def step(worker, key):
            theta_i, state = worker
            value, grads = jax.value_and_grad(loss)(theta_i, D_i, key)
            updates, state = inner.update(grads, state, theta_i)
            return (optax.apply_updates(theta_i, updates), state), value

        (theta_i, state), losses = jax.lax.scan(step, (theta_i, state), keys)
        return theta_i, state, losses

    return inner_steps


def make_round(loss, inner, outer, k, wire=None):
    """A round of k workers, H steps each: keys `[k, H]`; `wire` is the dtype sent."""
    inner_steps = make_inner_steps(loss, inner)

    @drjax.program(workers=k)
    def train_round(shared, states, D, keys):
        theta, momentum = shared
        theta_0 = drjax.broadcast(theta)
        args = theta_0, states, D, keys
        theta_i, states, losses = drjax.map_fn(inner_steps, args)
        Delta_i = drjax.map_fn(optax.tree.sub, (theta_0, theta_i))
        Delta = drjax.reduce_mean(Delta_i, wire=wire)  # all that is communicated
        updates, momentum = outer.update(Delta, momentum, theta)
        return (optax.apply_updates(theta, updates), momentum), states, losses

    return train_round


def start(theta, inner, outer, k):
    """What is shared, and the state of each worker's inner optimizer, `[k, ...]`."""
    states = jax.tree.map(lambda x: jnp.stack([x] * k), inner.init(theta))
    return (theta, outer.init(theta)), states


def first_theta():
    """Of an embedding and a perceptron, which predicts a byte from 16 before it."""
    shapes = (256, 16), (16 * 16, 64), (64, 256)
    keys = jax.random.split(jax.random.key(0), 3)
    return [0.1 * jax.random.normal(*x) for x in zip(keys, shapes, strict=True)]


def loss(theta, D_i, key, size=64):
    embedding, hidden, output = theta
    starts = jax.random.randint(key, (size, 1), 0, D_i.size - 16)
    windows = D_i[starts + jnp.arange(17)].astype(jnp.int32)
    x = embedding[windows[:, :16]].reshape(size, -1)
    logits, y = jax.nn.gelu(x @ hidden) @ output, windows[:, 16]
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def train(train_round, shared, own, join=lambda theta: theta, k=8, H=50, T=20):
    """Trains on modules of Python's standard library; each worker has its own."""
    corpus = text.load_stdlib()
    D, held_out = (text.deal_modules(x, n) for x, n in zip(corpus, (k, 1), strict=True))
    train_round = jax.jit(train_round)
    print("round  steps  held-out loss, nats per byte")
    for t in range(1, T + 1):
        keys = jax.random.split(jax.random.key(t), (k, H))
        shared, own, _ = train_round(shared, own, D, keys)
        if t % 5 == 0:
            value = loss(join(shared[0]), held_out[0], jax.random.key(0), 10_000)
            print(f"{t:5}  {t * H:5}  {value:.3f}")


inner, outer = optax.adamw(3e-3), optax.sgd(0.7, momentum=0.9, nesterov=True)

if __name__ == "__main__":
    train(make_round(loss, inner, outer, 8), *start(first_theta(), inner, outer, 8))
