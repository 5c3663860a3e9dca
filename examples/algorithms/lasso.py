"""The lasso by consensus ADMM (Boyd et al. 2011, section 8.2.1).

"Distributed optimization and statistical learning via the alternating direction method
of multipliers".

python -m examples.algorithms.lasso
"""

import jax.numpy as jnp
import numpy as np
import sklearn.datasets
import sklearn.linear_model

import drjax
from examples.common import clients


def S(kappa, a):
    """Soft thresholding."""
    return jnp.sign(a) * jnp.maximum(jnp.abs(a) - kappa, 0)


def step(z, u, A, b, mask, penalty, rho):
    """An iteration, with the paper's lambda as `penalty`; each client keeps its u_i."""

    def minimize(z, u, A, b, mask):
        """argmin |A_i x - b_i|^2 / 2 + rho / 2 |x - z + u_i|^2, without padding."""
        A, b = A * mask[:, None], b * mask
        return jnp.linalg.solve(
            A.T @ A + rho * jnp.eye(len(z)), A.T @ b + rho * (z - u)
        )

    x = drjax.map_fn(minimize, (drjax.broadcast(z), u, A, b, mask))
    mean = drjax.reduce_mean(drjax.map_fn(jnp.add, (x, u)))
    z = S(penalty / (rho * drjax.partition_size()), mean)
    return z, drjax.map_fn(lambda u, x, z: u + x - z, (u, x, drjax.broadcast(z)))


def main(N=10, alpha=0.05):
    A, b = map(np.asarray, sklearn.datasets.load_diabetes(return_X_y=True))
    A, b = (A - A.mean(0)) / A.std(0), (b - b.mean()) / b.std()
    model = sklearn.linear_model.Lasso(alpha=alpha, fit_intercept=False, tol=1e-12)
    expected, penalty, rho = model.fit(A, b).coef_, alpha * len(b), len(b) / N
    parts = clients.split_iid(b, N, seed=0, spread=0.5)
    (A, b), mask = clients.pad([(A[part], b[part]) for part in parts])

    @drjax.jit
    @drjax.program(clients=N)
    def admm_step(z, u, A, b, mask):
        return step(z, u, A, b, mask, penalty, rho)

    z, u = jnp.zeros(A.shape[-1]), jnp.zeros((N, A.shape[-1]))
    print("iteration  coefficients that are 0  largest difference from scikit-learn's")
    for k in range(1, 51):
        z, u = admm_step(z, u, A, b, mask)
        if k % 10 == 0:
            print(f"{k:9} {(z == 0).sum():24} {np.abs(z - expected).max():43.1e}")


if __name__ == "__main__":
    main()
