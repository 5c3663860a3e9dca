"""Gradient descent with the gradient that is closest to those of n - f - 2 others.

Blanchard et al. 2017, "Byzantine-Tolerant Machine Learning", arXiv 1703.02757, section
4. Also its multi-Krum, the mean of m gradients, here m = n - f.

python -m examples.algorithms.krum
"""

import jax
import jax.numpy as jnp

import drjax
from examples.algorithms import robust


def inner_products(V):
    """<V_i, V_j> for all workers i and j, `[n, n]`; no device ever has all V_i.

    From each coordinate its median is subtracted. This changes no distance, and
    distances keep their digits where gradients have a large part in common.
    """

    def products(x):
        x = x - jnp.nanmedian(x)
        return jnp.outer(x, x)

    parts = drjax.reduce_columns(products, V, sum=True)
    return sum(jax.tree.leaves(parts), jnp.zeros(()))


def scores(V, f):
    """s(i): the sum of the squared distances from V_i to its n - f - 2 closest.

    It is infinite if V_i is not finite.
    """
    gram = inner_products(V)
    squares = jnp.diag(gram)[:, None] + jnp.diag(gram)[None] - 2 * gram
    # The first of the sorted distances is that of V_i to itself.
    s = jnp.sort(squares, axis=1)[:, 1 : len(gram) - f - 1].sum(1)
    return jnp.where(jnp.isnan(s), jnp.inf, s)


def krum(V, f):
    return drjax.select(V, jnp.argmin(scores(V, f)))


def multi_krum(V, f):
    """The mean of the m = n - f with the least scores."""
    s = scores(V, f)
    chosen = s <= jnp.sort(s)[len(s) - f - 1]
    return drjax.reduce_mean(V, where=drjax.scatter(chosen))


if __name__ == "__main__":
    robust.main(krum, multi_krum)
