"""EM for a mixture of Gaussians on clients: what scikit-learn finds, step by step.

    python -m examples.reproductions.mixture

The points of all clients are from a mixture of K Gaussians with weights p_k, means m_k
and covariances S_k. Expectation maximization (Dempster, Laird and Rubin 1977, "Maximum
likelihood from incomplete data via the EM algorithm") repeats

    E: each client, for its points x_j:
        r_jk = p_k N(x_j; m_k, S_k) / sum_l p_l N(x_j; m_l, S_l)
        send the sums of r_jk, of r_jk x_j, of r_jk x_j x_j^T, and the log-likelihood
    M: the server, from the sums N_k, a_k and B_k of the clients':
        p_k = N_k / N,  m_k = a_k / N_k,  S_k = B_k / N_k - m_k m_k^T

A step is one round, and a client sends K (1 + d + d^2) + 1 numbers, however many points
it has. The points are standardized, so the difference of squares loses few digits.

Scikit-learn's GaussianMixture, which has all points, starts from the same values and
takes as many steps, in double precision.
"""

import dataclasses
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np
import sklearn.datasets
import sklearn.exceptions
import sklearn.mixture
import tyro
from matplotlib.figure import Figure
from matplotlib.patches import Ellipse

import drjax
from examples.algorithms import mixture
from examples.algorithms.mixture import REGULARIZATION, Mixture
from examples.common import clients, results
from examples.common.devices import make_mesh


@dataclasses.dataclass(frozen=True)
class Config:
    """Fit mixtures of Gaussians on clients, and compare them with scikit-learn's."""

    output: Path = Path("runs/mixture")
    """Folder of the table and the figure."""
    clients: int = 10
    """Clients of unequal sizes."""
    spread: float = 0.5
    """Standard deviation of the logarithm of the clients' sizes."""
    steps: int = 100
    """Steps of EM."""
    only: str = ""
    """Fit only the data sets with this in their name: "iris", "wine" or "ring"."""
    devices: int = 2
    """Devices; virtual ones on a CPU."""
    groups_per_step: int | None = None
    """Clients of a device that run at once; all by default."""
    seed: int = 0
    """Seed of the partition and of the initial values."""


def fit(config: Config, start: Mixture, x) -> tuple[Mixture, np.ndarray]:
    """The mixture after all steps, and the mean log-likelihood before each."""
    parts = clients.split_iid(x, config.clients, config.seed, config.spread)
    points, mask = clients.pad([x[part] for part in parts])

    @drjax.program(clients=config.clients)
    def run(start, points, mask):
        step = lambda fitted, _: mixture.em_step(fitted, points, mask)
        return jax.lax.scan(step, start, length=config.steps)

    run = drjax.jit(run, groups_per_step=config.groups_per_step)
    return jax.tree.map(np.asarray, run(start, points, mask))


def fit_sklearn(config: Config, start: Mixture, x) -> Mixture:
    """The same by scikit-learn: as many steps, from the same values."""
    model: Any = sklearn.mixture.GaussianMixture(
        len(start.weights),
        tol=0.0,
        max_iter=config.steps,
        reg_covar=REGULARIZATION,
        weights_init=start.weights,
        means_init=start.means,
        precisions_init=np.linalg.inv(start.covariances),
    )
    with warnings.catch_warnings():
        # With tol = 0 it takes all steps, and warns that it did.
        warnings.simplefilter("ignore", sklearn.exceptions.ConvergenceWarning)
        model.fit(x)
    return Mixture(model.weights_, model.means_, model.covariances_)


def load(config: Config) -> dict[str, tuple[np.ndarray, int]]:
    """Standardized points, float64 `[n, d]`, and numbers of components, by name."""
    rng = np.random.default_rng(config.seed)
    angle = rng.uniform(0, 2 * np.pi, 2000)
    radius = 1 + 0.1 * rng.standard_normal(2000)
    ring = np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1)
    sets = {
        "iris": (sklearn.datasets.load_iris(return_X_y=True)[0], 3),
        "wine": (sklearn.datasets.load_wine(return_X_y=True)[0][:, :6], 3),
        "ring": (ring, 8),
    }
    standard = lambda x: (x - x.mean(0)) / x.std(0)
    return {name: (standard(x), k) for name, (x, k) in sets.items()}


def start_at(config: Config, x, k: int) -> Mixture:
    """Equal weights, k of the points as means, the identity as covariances."""
    means = np.random.default_rng(config.seed).permutation(x)[:k]
    eye = np.stack([np.eye(x.shape[1])] * k)
    return Mixture(np.full(k, 1 / k), means, eye)


def draw(x, fits: dict[str, Mixture], likelihoods) -> Figure:
    """Points with ellipses of both fits, and log-likelihoods by step."""
    figure = Figure(figsize=(9.5, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.scatter(*x[:, :2].T, s=3, color="0.7", linewidths=0)
    styles = {"clients": ("tab:red", "-"), "scikit-learn": ("black", ":")}
    for name, fitted in fits.items():
        color, line = styles[name]
        for i, (mean, covariance) in enumerate(zip(*fitted[1:], strict=True)):
            values, vectors = np.linalg.eigh(covariance[:2, :2])
            angle = np.degrees(np.arctan2(vectors[1, 1], vectors[0, 1]))
            width, height = 4 * np.sqrt(values[::-1])  # two standard deviations
            label = None if i else name
            style = {"fill": False, "ec": color, "ls": line, "lw": 1.8, "label": label}
            a, b = mean[:2].tolist()
            left.add_patch(Ellipse((a, b), width, height, angle=angle, **style))
    left.set(title="two standard deviations", aspect="equal")
    left.legend(loc="center")
    for name, values in likelihoods.items():
        right.plot(np.arange(len(values)), values, label=name)
    right.set(xlabel="step", ylabel="log-likelihood of a point", xscale="symlog")
    right.grid(alpha=0.3)
    right.legend()
    return figure


def main(config: Config) -> results.Results:
    """Fits all data sets, and shows how far the fits are from scikit-learn's."""
    mesh = make_mesh(config.devices, "clients")
    table, numbers, likelihoods, worst = [], {}, {}, 0.0
    for name, (x, k) in load(config).items():
        if config.only not in name:
            continue
        start = start_at(config, x, k)
        with jax.set_mesh(mesh):
            single = jax.tree.map(np.float32, (start, x))
            fitted, likelihood = fit(config, *single)
        expected = fit_sklearn(config, start, x)
        pairs = zip(fitted, expected, strict=True)
        errors = [float(np.abs(a - b).max()) for a, b in pairs]
        worst = max(worst, *errors)
        likelihoods[name] = likelihood
        numbers[f"{name}, log-likelihood"] = likelihood.tolist()
        numbers[f"{name}, weights"] = fitted.weights.tolist()
        sent = k * (1 + x.shape[1] + x.shape[1] ** 2) + 1
        shown = (f"{error:.0e}" for error in errors)
        data = f"{name}: {len(x)} x {x.shape[1]}, {k} components"
        table.append([data, *shown, sent])
        fits = {"clients": fitted, "scikit-learn": expected}
        figure = draw(x, fits, likelihoods)  # the last one has all likelihoods
    result = results.Results(
        title=f"{config.clients} clients and scikit-learn after {config.steps} steps",
        columns=["", *Mixture._fields, "numbers sent"],
        table=table,
        measured=f"{config.steps} steps of EM on clients are scikit-learn's within "
        f"{worst:.0e} in all weights, means and covariances.",
        paper="The same, to rounding: EM is deterministic, and starts are the same.",
        badge="exact" if worst < 1e-5 else None,
        numbers=numbers,
        remarks=[
            "The table has the largest differences, of standardized data; clients have "
            "32-bit floats, scikit-learn 64-bit ones.",
            "Iris and six features of wine are scikit-learn's; the ring is generated.",
        ],
    )
    result.write(config.output, config, figure)
    return result


if __name__ == "__main__":
    main(tyro.cli(Config))
