"""Newton's method, the lasso by ADMM, and k-means on clients: what scikit-learn finds.

    python -m examples.reproductions.federated_sklearn

Three classics of statistics work with sums over the data, so clients that keep their
data need send no more than their part of a sum.

* **Logistic regression by Newton's method.** The loss, its gradient g and its Hessian H
  are sums over the clients. A step is w = w - H^-1 g: one round, in which a client
  sends d + d^2 numbers.
* **Lasso by consensus ADMM** (Boyd et al. 2011, "Distributed optimization and
  statistical learning via the alternating direction method of multipliers", 8.2)

        x_i = argmin |A_i x - b_i|^2 / 2 + rho / 2 |x - z + u_i|^2   in each client
        z = soft threshold of mean(x_i + u_i) at lambda / (rho n)    on the server
        u_i = u_i + x_i - z                                          in each client

* **k-means by Lloyd's algorithm** (Lloyd 1982): each client sends, for each center,
  the sum and the number of its points that are nearest to it.

`jax.hessian` of a program is a program, and its plan has one round. The clients' x_i
and u_i are partitioned values that stay with them.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import sklearn.cluster
import sklearn.datasets
import sklearn.linear_model
import tyro

import drjax
from drjax.plan import Plan
from examples.algorithms import kmeans, lasso, newton
from examples.common import clients, results
from examples.common.devices import make_mesh
from examples.common.rounds import Round


@dataclasses.dataclass(frozen=True)
class Config:
    """Fit three models on clients, and compare them with scikit-learn's."""

    output: Path = Path("runs/federated_sklearn")
    """Folder of the table and the figure."""
    clients: int = 10
    """Clients of unequal sizes."""
    spread: float = 0.5
    """Standard deviation of the logarithm of the clients' sizes."""
    newton_steps: int = 10
    """Steps of Newton's method."""
    admm_steps: int = 100
    """Steps of ADMM."""
    lloyd_steps: int = 30
    """Steps of Lloyd's algorithm."""
    devices: int = 2
    """Devices; virtual ones on a CPU."""
    groups_per_step: int | None = None
    """Clients of a device that run at once; all by default."""
    seed: int = 0
    """Seed of the partition."""


def to_clients(config: Config, *arrays):
    """The arrays of all clients, padded, and their mask."""
    parts = clients.split_iid(arrays[0], config.clients, config.seed, config.spread)
    padded, mask = clients.pad([tuple(a[i] for a in arrays) for i in parts])
    return *padded, mask


def standardize(x):
    return ((x - x.mean(0)) / (x.std(0) + 1e-12)).astype(np.float32)


def iterate(config: Config, step, start, steps: int, data) -> list[np.ndarray]:
    """The first of the state's leaves before and after each step."""

    @drjax.program(clients=config.clients)
    def run(start, data):
        body = lambda state, _: (step(state, data), jax.tree.leaves(state)[0])
        last, states = jax.lax.scan(body, start, length=steps)
        return jnp.concatenate([states, jax.tree.leaves(last)[0][None]])

    return list(np.asarray(drjax.jit(run, config.groups_per_step)(start, data)))


def fit_logistic(config: Config):
    x, y = sklearn.datasets.load_breast_cancer(return_X_y=True)
    x, y = standardize(x), np.where(y, 1, -1).astype(np.float32)
    model = sklearn.linear_model.LogisticRegression(tol=1e-10, max_iter=10_000)
    model.fit(x.astype(float), y)
    expected = np.append(model.coef_[0], model.intercept_)
    step = lambda w, data: newton.step(w, *data)
    start, data = jnp.zeros(x.shape[1] + 1), to_clients(config, x, y)
    return iterate(config, step, start, config.newton_steps, data), expected


def plan_newton(config: Config, d: int = 30) -> Plan:
    """The plan of a step of Newton's method, for d coefficients and an intercept."""
    data = jnp.zeros((config.clients, 1, d)), *(jnp.ones((config.clients, 1)),) * 2
    args = jnp.zeros(d + 1), *data[:2], data[2] > 0
    return drjax.make_plan(drjax.program(clients=config.clients)(newton.step))(*args)


def fit_lasso(config: Config, alpha: float = 0.05):
    x, y = sklearn.datasets.load_diabetes(return_X_y=True)
    x, y = standardize(x), standardize(y)
    model = sklearn.linear_model.Lasso(alpha=alpha, fit_intercept=False, tol=1e-12)
    expected = model.fit(x.astype(float), y).coef_
    penalty, rho = alpha * len(x), len(x) / config.clients
    step = lambda state, data: lasso.step(*state, *data, penalty=penalty, rho=rho)
    zeros = jnp.zeros(x.shape[1]), jnp.zeros((config.clients, x.shape[1]))
    data = to_clients(config, x, y)
    return iterate(config, step, zeros, config.admm_steps, data), expected


def fit_kmeans(config: Config):
    x = sklearn.datasets.load_digits(return_X_y=True)[0].astype(np.float32) / 16
    start = x[:10]
    options: dict[str, Any] = {"init": start, "tol": 0, "max_iter": 1000}
    model = sklearn.cluster.KMeans(10, **options)
    expected = model.fit(x.astype(float)).cluster_centers_
    step = lambda centers, data: kmeans.step(centers, *data)
    return iterate(
        config, step, start, config.lloyd_steps, to_clients(config, x)
    ), expected


FITS = {
    "logistic regression, Newton": fit_logistic,
    "lasso, ADMM": fit_lasso,
    "k-means, Lloyd": fit_kmeans,
}


def engine_round() -> Round:
    """A step of all three, with eight clients, who keep their u_i."""
    config = Config(clients=8)
    x, y = map(standardize, sklearn.datasets.load_diabetes(return_X_y=True))
    penalty, rho = 0.05 * len(x), len(x) / config.clients

    @drjax.program(clients=config.clients)
    def step(shared, own, data):
        (w, z, centers), (x, y, mask) = shared, data
        w = newton.step(w, x, jnp.sign(y), mask)
        z, own = lasso.step(z, own, x, y, mask, penalty, rho)
        return (w, z, kmeans.step(centers, x, mask)), own

    width = x.shape[1]
    shared = jnp.zeros(width + 1), jnp.zeros(width), x[:3]
    own = jnp.zeros((config.clients, width))
    return Round(step, shared, own, to_clients(config, x, y))


def main(config: Config) -> results.Results:
    """Fits all models, and shows how far they are from scikit-learn's."""
    mesh = make_mesh(config.devices, "clients")
    table, curves, numbers = [], {}, {}
    for name, fit in FITS.items():
        with jax.set_mesh(mesh):
            states, expected = fit(config)
        curve = [float(np.abs(state - expected).max()) for state in states]
        curves[name] = np.maximum(curve, 1e-9).tolist()
        numbers[name] = states[-1].ravel().tolist()
        first = next((i for i, e in enumerate(curve) if e < 1e-4), "never")
        size = np.abs(expected).max()
        table.append([name, first, f"{curve[-1]:.1e}", f"{size:.2f}"])
    worst = max(curve[-1] for curve in curves.values())
    plan = plan_newton(config)
    sent = plan.communication().up()
    figure = results.lines(
        curves, first=0, xlabel="round", ylabel="largest difference", log="y"
    )
    result = results.Results(
        title=f"{config.clients} clients and scikit-learn, which has all data",
        columns=["", "rounds to 1e-4", "difference", "largest coefficient"],
        table=table,
        measured="Logistic regression, lasso and k-means on clients are scikit-learn's "
        f"within {worst:.1e} in all coefficients and centers.",
        paper="The same, to rounding: these are exact methods for the same problems.",
        badge="exact" if worst < 1e-5 else None,
        numbers=numbers,
        remarks=[
            "Breast cancer, diabetes and digits of scikit-learn; 32-bit floats.",
            f"Rounds in the plan of a Newton step: {len(plan.rounds)}; with "
            f"jax.grad and jax.hessian: {sent:,} bytes from each client.",
        ],
    )
    result.write(config.output, config, figure)
    return result


if __name__ == "__main__":
    main(tyro.cli(Config))
