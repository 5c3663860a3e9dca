"""Compressed gradients with error feedback: what is left out is sent in a later step.

Top-k: Stich et al. 2018, arXiv 1809.07599, algorithm 1. Signs: Karimireddy et al. 2019,
arXiv 1901.09847, algorithm 2, whose compressor is that of algorithm 1. The step of W
workers is as in Vogels et al. 2019, arXiv 1905.13727, algorithm 2, without momentum: e
has no gamma in it, where the first two have. Each matrix is compressed by itself.

python -m examples.algorithms.compression
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import drjax
from examples.common import clients, digits


def top_k(x, share=0.01):
    """The largest numbers; the others are not sent."""
    values = jnp.abs(x.ravel())
    smallest = jax.lax.top_k(values, max(1, int(share * x.size)))[0][-1]
    return jnp.where(jnp.abs(x) >= smallest, x, 0)


def sign(x):
    """One bit for each number, and their mean magnitude."""
    return jnp.abs(x).mean() * jnp.sign(x)


def same(x):
    return x


def make_step(gradient, compress, W, gamma, feedback=True, wire=None):
    @drjax.program(workers=W)
    def step(x, e, examples):
        def worker(x, e_w, examples):
            delta_w = optax.tree.add(gradient(x, examples), e_w)
            sent = jax.tree.map(compress, delta_w)
            return sent, optax.tree.sub(delta_w, sent) if feedback else e_w

        sent, e = drjax.map_fn(worker, (drjax.broadcast(x), e, examples))
        return optax.tree.add_scale(x, -gamma, drjax.reduce_mean(sent, wire=wire)), e

    return step


def apply(x, images):
    """A network with one hidden layer; a one behind its inputs is for the biases."""
    with_one = lambda x: jnp.concatenate([x, jnp.ones((len(x), 1))], axis=1)
    return with_one(jax.nn.relu(with_one(images) @ x["hidden"])) @ x["output"]


def loss(x, examples):
    logits = apply(x, examples.x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, examples.y).mean()


def init(key, width=100):
    normal, keys = jax.nn.initializers.he_normal(), jax.random.split(key)
    shapes = {"hidden": (785, width), "output": (width + 1, 10)}
    return {name: normal(k, shapes[name]) for name, k in zip(shapes, keys, strict=True)}


def no_error(x, W):
    return jax.tree.map(lambda leaf: jnp.zeros((W, *leaf.shape)), x)


def main(methods, W=8, steps=40):
    """Trains on digits; a worker has those of a few labels only."""
    train, test = digits.load_mnist()
    parts = np.stack(clients.split_shards(train.y, W, seed=0))
    examples = jax.tree.map(lambda leaf: leaf[parts], train)
    print("test accuracy")
    for name, (step, memory) in methods.items():
        x = init(jax.random.key(0))
        step, memory = jax.jit(step), memory(x, W)
        for _ in range(steps):
            x, memory = step(x, memory, examples)
        print(f"{name:24} {(apply(x, test.x).argmax(-1) == test.y).mean():.1%}")


if __name__ == "__main__":
    make = lambda C, feedback: (
        make_step(jax.grad(loss), C, 8, 0.3, feedback),
        no_error,
    )
    main(
        {
            "float32": make(same, False),
            "top 1 % with feedback": make(top_k, True),
            "top 1 % without": make(top_k, False),
            "signs with feedback": make(sign, True),
            "signs without": make(sign, False),
        }
    )
