"""Gradient descent with the median or the trimmed mean of n workers, f of them liars.

Yin et al. 2018, "Byzantine-Robust Distributed Learning: Towards Optimal Statistical
Rates", arXiv 1803.01498, algorithm 1, options I and II, where n is m and f is beta m;
without its projection.

python -m examples.algorithms.robust
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import drjax
from examples.common import clients, digits


def mean(g, f):
    return drjax.reduce_mean(g)


def median(g, f):
    """Option I: the median of each coordinate."""
    return drjax.reduce_columns(jnp.median, g)


def trimmed_mean(g, f):
    """Option II: the mean of each, without the f largest and the f smallest."""
    kept = slice(f, drjax.partition_size() - f)
    return drjax.reduce_columns(lambda x: jnp.sort(x)[kept].mean(), g)


def make_step(gradient, aggregate, n, f, eta):
    @drjax.program(workers=n)
    def step(w, examples):
        g = drjax.map_fn(gradient, (drjax.broadcast(w), examples))
        return optax.tree.add_scale(w, -eta, aggregate(g, f))

    return step


def loss(w, examples):
    """Multi-class logistic regression, as in section 7."""
    logits = examples.x @ w["W"] + w["b"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, examples.y).mean()


def main(*aggregates, n=20, f=4, steps=50):
    """Trains on digits, then with the labels of f workers flipped to 9 - y."""
    train, test = digits.load_mnist()
    parts = np.stack(clients.split_iid(train.y, n, seed=0))
    honest = jax.tree.map(lambda x: x[parts], train)
    liars = np.arange(n)[:, None] < f
    flipped = honest._replace(y=np.where(liars, 9 - honest.y, honest.y))

    print("test accuracy     no attack  flipped labels")
    for aggregate in aggregates:
        step = jax.jit(make_step(jax.grad(loss), aggregate, n, f, eta=1.0))
        accuracies = []
        for examples in honest, flipped:
            w = {"W": jnp.zeros((784, 10)), "b": jnp.zeros(10)}
            for _ in range(steps):
                w = step(w, examples)
            right = (test.x @ w["W"] + w["b"]).argmax(-1) == test.y
            accuracies.append(f"{right.mean():.1%}")
        print(f"{aggregate.__name__:20}  {accuracies[0]}           {accuracies[1]}")


if __name__ == "__main__":
    main(mean, median, trimmed_mean)
