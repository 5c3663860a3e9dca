"""Gradient descent with the gradient that is closest to those of n - f - 2 others.

Blanchard et al. 2017, "Byzantine-Tolerant Machine Learning", arXiv 1703.02757, section
4: Krum, and multi-Krum, the mean of m gradients.

python -m examples.algorithms.krum
"""

import jax
import jax.numpy as jnp

import drjax
from examples.algorithms import robust


def inner_products(V):
    """<V_i, V_j> for all workers i and j, `[n, n]`; no device ever has all V_i."""
    parts = drjax.reduce_columns(lambda x: jnp.outer(x, x), V, sum=True)
    return sum(jax.tree.leaves(parts), jnp.zeros(()))


def scores(V, f):
    """s(i): the sum of the squared distances from V_i to its n - f - 2 closest."""
    gram = inner_products(V)
    squares = jnp.diag(gram)[:, None] + jnp.diag(gram)[None] - 2 * gram
    # The first of the sorted distances is that of V_i to itself.
    return jnp.sort(squares, axis=1)[:, 1 : len(gram) - f - 1].sum(1)


def krum(V, f):
    return drjax.select(V, jnp.argmin(scores(V, f)))


def multi_krum(V, f):
    """The mean of the m = n - f with the least scores."""
    s = scores(V, f)
    chosen = s <= jnp.sort(s)[len(s) - f - 1]
    return drjax.reduce_mean(V, where=drjax.scatter(chosen))


if __name__ == "__main__":
    robust.main(krum, multi_krum)
