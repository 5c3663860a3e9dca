"""Logistic regression by Newton's method, on clients that keep their data.

Hastie, Tibshirani and Friedman 2009, "The Elements of Statistical Learning", section
4.4.1, with the penalty |beta|^2 / 2 of all coefficients but the intercept.

python -m examples.algorithms.newton
"""

import jax
import jax.numpy as jnp
import numpy as np
import sklearn.datasets
import sklearn.linear_model

import drjax
from examples.common import clients


def loss(beta, x, y, mask):
    """The sum over clients, whose labels are -1 or 1; beta ends with the intercept."""

    def client_loss(beta, x, y, mask):
        return jnp.sum(jnp.logaddexp(0, -y * (x @ beta[:-1] + beta[-1])), where=mask)

    losses = drjax.map_fn(client_loss, (drjax.broadcast(beta), x, y, mask))
    return drjax.reduce_sum(losses) + jnp.sum(beta[:-1] ** 2) / 2


def step(beta, *data):
    """One round: what clients send adds up to the gradient and to X^T W X."""
    gradient, hessian = jax.grad(loss)(beta, *data), jax.hessian(loss)(beta, *data)
    return beta - jnp.linalg.solve(hessian, gradient)


def main(n=10):
    x, y = map(np.asarray, sklearn.datasets.load_breast_cancer(return_X_y=True))
    x, y = (x - x.mean(0)) / x.std(0), np.where(y, 1, -1)
    model = sklearn.linear_model.LogisticRegression(tol=1e-10, max_iter=10_000)
    expected = model.fit(x, y).coef_
    parts = clients.split_iid(y, n, seed=0, spread=0.5)
    (x, y), mask = clients.pad(
        [(x[part].astype(np.float32), y[part]) for part in parts]
    )

    newton_step = drjax.jit(drjax.program(clients=n)(step))
    beta = np.zeros(x.shape[-1] + 1, np.float32)
    print("round  largest difference from scikit-learn's coefficients")
    for t in range(1, 11):
        beta = newton_step(beta, x, y, mask)
        print(f"{t:5}  {np.abs(beta[:-1] - expected).max():.1e}")


if __name__ == "__main__":
    main()
