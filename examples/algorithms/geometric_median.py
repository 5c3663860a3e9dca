"""Gradient descent with the point that has the least sum of distances to n gradients.

Pillutla et al. 2022, "Robust Aggregation for Federated Learning", arXiv 1912.13445,
algorithm 2, the smoothed Weiszfeld algorithm, with equal alpha_i. The paper aggregates
the clients' models, w_i; here they are gradients, as in the other robust steps.

python -m examples.algorithms.geometric_median
"""

import jax
import jax.numpy as jnp

import drjax
from examples.algorithms import krum, robust


def geometric_median(w, f, R=20, nu=1e-6):
    """Every iterate v is a weighted mean of the w_i: their inner products suffice.

    A w_i whose square is not finite has no weight. `f` is not used.
    """
    gram = krum.inner_products(w)
    finite = jnp.isfinite(jnp.diag(gram))
    gram = jnp.where(finite[:, None] & finite, gram, 0)

    def weiszfeld(weights, _):
        center = gram @ weights  # <w_i, v>
        squares = jnp.diag(gram) - 2 * center + weights @ center  # |w_i - v|^2
        beta = finite / jnp.maximum(jnp.sqrt(jnp.maximum(squares, 0)), nu)
        return beta / beta.sum(), None

    weights, _ = jax.lax.scan(weiszfeld, finite / finite.sum(), length=R)
    where = drjax.scatter(finite)
    return drjax.reduce_weighted_mean(w, drjax.scatter(weights), where=where)


if __name__ == "__main__":
    robust.main(geometric_median)
