"""SGD without a server: each of n workers averages with its neighbors (D-PSGD).

Lian et al. 2017, "Can Decentralized Algorithms Outperform Centralized Algorithms?",
arXiv 1705.09056, algorithm 1, on a ring: W has 1/3 for a worker and its two neighbors.
The step length gamma, constant in the paper, decays in `main`.

python -m examples.algorithms.gossip
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import drjax
from examples.common import clients, digits


def average_neighbors(x):
    """Line 4: the sum over j of W_ij x_j."""
    left, right = drjax.shift(x, 1), drjax.shift(x, -1)
    third = lambda *xs: jax.tree.map(lambda a, b, c: (a + b + c) / 3, *xs)
    return drjax.map_fn(third, (left, x, right))


def make_gradient(loss, B):
    def gradient(x, examples, key):
        """Lines 2 and 3: of B examples at random."""
        xi = jax.random.randint(key, (B,), 0, len(examples.y))
        return jax.grad(loss)(x, jax.tree.map(lambda e: e[xi], examples))

    return gradient


def make_step(gradient, n):
    @drjax.program(workers=n)
    def step(x, examples, keys, gamma):
        g = drjax.map_fn(gradient, (x, examples, keys))
        descend = lambda x, g, gamma: optax.tree.add_scale(x, -gamma, g)  # line 5
        args = average_neighbors(x), g, drjax.broadcast(gamma)
        return drjax.map_fn(descend, args)

    return step


def make_central_step(gradient, n):
    """C-PSGD, with a server: one model, and the mean of the same gradients."""

    @drjax.program(workers=n)
    def step(x, examples, keys, gamma):
        g = drjax.map_fn(gradient, (drjax.broadcast(x), examples, keys))
        return optax.tree.add_scale(x, -gamma, drjax.reduce_mean(g))

    return step


def loss(x, examples):
    logits = examples.x @ x["w"] + x["b"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, examples.y).mean()


def main(n=16, K=600):
    train, test = digits.load_mnist()
    parts = np.stack(clients.split_shards(train.y, n, seed=0))  # of two labels each
    examples = jax.tree.map(lambda e: e[parts], train)
    gradient, gamma = make_gradient(loss, B=16), optax.cosine_decay_schedule(0.2, K)
    step, central_step = (
        jax.jit(f(gradient, n)) for f in (make_step, make_central_step)
    )
    central = {"w": jnp.zeros((784, 10)), "b": jnp.zeros(10)}
    x = jax.tree.map(lambda leaf: jnp.zeros((n, *leaf.shape)), central)
    accuracy = lambda x: ((test.x @ x["w"] + x["b"]).argmax(-1) == test.y).mean()

    print("step  mean of the ring  a worker alone  central SGD")
    for k in range(K):
        keys = jax.random.split(jax.random.key(k), n)
        x = step(x, examples, keys, gamma(k))
        central = central_step(central, examples, keys, gamma(k))
        if (k + 1) % 100 == 0:
            mean, one = (
                jax.tree.map(f, x) for f in (lambda a: a.mean(0), lambda a: a[0])
            )
            shown = [f"{accuracy(p):.1%}" for p in (mean, one, central)]
            print(f"{k + 1:4}  {shown[0]:>16}  {shown[1]:>14}  {shown[2]:>11}")


if __name__ == "__main__":
    main()
