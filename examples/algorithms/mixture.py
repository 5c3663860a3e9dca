"""EM for a mixture of Gaussians (Dempster, Laird and Rubin 1977, section 4.3).

"Maximum likelihood from incomplete data via the EM algorithm", on clients that keep
their points.

python -m examples.algorithms.mixture
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import sklearn.datasets

import drjax
from examples.common import clients

Array = jax.Array | np.ndarray
REGULARIZATION = 1e-6  # on the diagonals of covariances, scikit-learn's default


class Mixture(NamedTuple):
    """Weights p_k `[K]`, means m_k `[K, d]` and covariances S_k `[K, d, d]`."""

    weights: Array
    means: Array
    covariances: Array


def log_joint(mixture, x):
    """log p_k N(x_j; m_k, S_k): `[points, K]`."""

    def component(p, m, S):
        return jnp.log(p) + jax.scipy.stats.multivariate_normal.logpdf(x, m, S)

    return jax.vmap(component, out_axes=1)(*mixture)


def e_step(mixture, x, mask):
    """A client's sums of r_jk, r_jk x_j, r_jk x_j x_j^T, and its log-likelihood."""
    joint = log_joint(mixture, x)
    total = jax.nn.logsumexp(joint, axis=1, keepdims=True)
    r = jnp.exp(joint - total) * mask[:, None]  # r_jk = P(component k | x_j)
    squares = jnp.einsum("jk,jd,je->kde", r, x, x)
    return r.sum(0), r.T @ x, squares, jnp.sum(total[:, 0], where=mask)


def m_step(N, a, B):
    """The mixture, from the sums r_jk (N_k), r_jk x_j (a_k), r_jk x_j x_j^T (B_k)."""
    m = a / N[:, None]
    S = B / N[:, None, None] - jax.vmap(jnp.outer)(m, m)
    return Mixture(N / N.sum(), m, S + REGULARIZATION * jnp.eye(m.shape[1]))


def em_step(mixture, x, mask):
    """One round; also the mean log-likelihood of a point before it."""
    sums = drjax.map_fn(e_step, (drjax.broadcast(mixture), x, mask))
    N, a, B, likelihood = drjax.reduce_sum(sums)
    return m_step(N, a, B), likelihood / N.sum()


def main(n=10, K=3):
    x = np.asarray(sklearn.datasets.load_iris(return_X_y=True)[0])
    x = (x - x.mean(0)) / x.std(0)
    means = np.random.default_rng(0).permutation(x)[:K]
    mixture = Mixture(np.full(K, 1 / K), means, np.stack([np.eye(4)] * K))
    parts = clients.split_iid(x, n, seed=0, spread=0.5)
    points, mask = clients.pad([x[part] for part in parts])

    step = drjax.jit(drjax.program(clients=n)(em_step))
    print("step  log-likelihood  weights")
    for t in range(1, 51):
        mixture, likelihood = step(mixture, points, mask)
        if t in (1, 2, 5, 10, 20, 50):
            weights = "  ".join(f"{p:.3f}" for p in mixture.weights)
            print(f"{t:4} {likelihood:15.4f}  {weights}")


if __name__ == "__main__":
    main()
