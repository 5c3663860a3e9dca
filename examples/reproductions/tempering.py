"""Parallel tempering: replicas at different temperatures, in an ensemble of chains.

    python -m examples.reproductions.tempering

A Markov chain that samples a density with two separate modes stays in one of them. So K
replicas sample p_k(x) ~ exp(-beta_k E(x)) with 1 = beta_1 > ... > beta_K: the hot ones
cross the barrier, and states are exchanged between neighbors (Swendsen and Wang 1986,
"Replica Monte Carlo simulation of spin glasses"; Geyer 1991, "Markov chain Monte Carlo
maximum likelihood"). In a sweep, for the pairs (1, 2), (3, 4), ... and then for the
pairs (2, 3), (4, 5), ...

    each replica k, in parallel, takes a step of Metropolis et al. (1953):
        x' = x_k + noise, accepted with probability min(1, exp(beta_k (E(x_k) - E(x'))))
    each pair (k, l) exchanges x_k and x_l with probability
        min(1, exp((beta_k - beta_l) (E(x_k) - E(x_l))))

and x_1 is a sample of p_1. Both members of a pair draw the same number, from a key that
is folded with the index of the first one, so they agree without another exchange.

A chain is a program over replicas, and the ensemble a program over chains, each of
which runs one. The partners are known, so `drjax.take` is a permutation: on a mesh,
states are sent only where a pair lies on two devices. The chains are independent, so
their means give the standard error of the estimate, and R, the potential scale
reduction of Gelman and Rubin (1992, "Inference from iterative simulation using multiple
sequences").

The density lies on a ring and has two modes, of 40 % and 60 %. All chains start in the
smaller one. Quadrature has the exact moments. Plain chains get as many steps of
Metropolis as all replicas together.
"""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from matplotlib.figure import Figure

import drjax
from examples.algorithms import tempering
from examples.common import results
from examples.common.devices import make_mesh


@dataclasses.dataclass(frozen=True)
class Config:
    """Sample a density with two modes, by parallel tempering and by plain chains."""

    output: Path = Path("runs/tempering")
    """Folder of the table and the figure."""
    chains: int = 64
    """Independent chains of the ensemble."""
    replicas: int = 8
    """Temperatures of a chain (K)."""
    coldest: float = 0.03
    """The smallest beta; they are a geometric sequence from 1."""
    sweeps: int = 5000
    """Sweeps; each has two steps of Metropolis and two exchanges."""
    burn_in: int = 500
    """Sweeps at the beginning whose samples are left out."""
    step: float = 0.4
    """Standard deviation of Metropolis' noise at beta = 1; else / sqrt(beta)."""
    only: str = ""
    """Run only the methods with this in their name, such as "tempering"."""
    devices: int = 2
    """Devices, over which a chain's replicas lie; virtual ones on a CPU."""
    groups_per_step: int | None = None
    """Replicas of a device that run at once; all by default."""
    seed: int = 0
    """Seed of all chains."""


MODES = ((-2.0, 0.4), (2.0, 0.6))  # position on the first axis, weight
WIDTH = 0.3  # of the modes, along that axis
MOMENTS = ("E x", "E y", "E x^2", "E y^2", "P(x > 0)")


def energy(x):
    """Minus the logarithm of the density, up to a constant: a ring with two modes."""
    a, b = x
    ring = ((jnp.hypot(a, b) - 2) / 0.4) ** 2 / 2
    modes = [jnp.log(p) - ((a - position) / WIDTH) ** 2 / 2 for position, p in MODES]
    return ring - jnp.logaddexp(*modes)


def moments(x):
    """Of samples `[n, 2]`: `[n, 5]`."""
    a, b = x.T
    return jnp.stack([a, b, a**2, b**2, jnp.where(a > 0, 1.0, 0.0)], 1)


def make_ensemble(betas: np.ndarray, sweeps: int, config: Config):
    """The program of all chains.

    It returns the moments, their standard errors, R of x, and some samples.
    """
    chain = tempering.make_chain(energy, betas, sweeps, config.step)
    burn_in = sweeps * config.burn_in // config.sweeps

    @drjax.program(chains=config.chains)
    def ensemble(x, key):
        def run(x, key):
            key = jax.random.fold_in(key, drjax.partition_index())
            samples = chain(x, key)[burn_in:]
            own = moments(samples)
            return own.mean(0), own.var(0), samples[:: 1 + len(samples) // 100]

        args = x, drjax.broadcast(key)
        means, variances, samples = drjax.gather(drjax.map_fn(run, args))
        spread = means.var(0, ddof=1)
        error = jnp.sqrt(spread / config.chains)
        scale = jnp.sqrt(1 + spread / variances.mean(0))
        return means.mean(0), error, scale[0], samples

    return ensemble


def integrate(size: float = 5.0, points: int = 801):
    """The exact moments, and the density of x: trapezoids on a square."""
    grid = np.linspace(-size, size, points)
    a, b = np.meshgrid(grid, grid, indexing="ij")
    ring = ((np.hypot(a, b) - 2) / 0.4) ** 2 / 2
    modes = sum(p * np.exp(-(((a - x) / WIDTH) ** 2) / 2) for x, p in MODES)
    weights = np.exp(-ring) * modes
    weights /= weights.sum()
    # Of the points on the barrier, half the weight belongs to each side.
    values = a, b, a**2, b**2, np.where(a == 0, 0.5, a > 0)
    exact = np.array([(weights * value).sum() for value in values])
    return exact, grid, weights


def draw(samples, grid, weights) -> Figure:
    """The samples of each method over the density, and the densities of x."""
    figure = Figure(figsize=(9.6, 3.6), layout="constrained")
    *left, right = figure.subplots(1, len(samples) + 1)
    levels = weights.max() * np.array([0.003, 0.03, 0.3])
    right.fill_between(
        grid, weights.sum(1) / (grid[1] - grid[0]), color="0.85", label="quadrature"
    )
    for i, (axes, (name, points)) in enumerate(zip(left, samples.items(), strict=True)):
        points, color = points.reshape(-1, 2), f"C{i}"
        axes.contour(grid, grid, weights.T, levels=levels, colors="0.6", linewidths=0.8)
        axes.scatter(*points.T, s=2, alpha=0.3, linewidths=0, color=color)
        axes.set(title=name, xlabel="x", ylabel="y", aspect="equal")
        axes.set(xlim=(-3.6, 3.6), ylim=(-3, 3))
        bins = np.linspace(-3.6, 3.6, 73).tolist()
        right.hist(
            points[:, 0], bins, density=True, histtype="step", color=color, label=name
        )
    right.set(title="density of x", xlabel="x", xlim=(-3.6, 3.6))
    right.set_ylim(top=1.4 * right.get_ylim()[1])
    right.legend(loc="upper center")
    return figure


def main(config: Config) -> results.Results:
    """Samples by both methods, and shows their moments next to quadrature's."""
    mesh = make_mesh(config.devices, "replicas")
    exact, grid, weights = integrate()
    betas = np.geomspace(1, config.coldest, config.replicas).astype(np.float32)
    settings = {
        "plain chains": (betas[:1], config.sweeps * config.replicas),
        "parallel tempering": (betas, config.sweeps),
    }
    columns, samples, numbers, scale = {}, {}, {}, {}
    for name, (betas, sweeps) in settings.items():
        if config.only not in name:
            continue
        ensemble = make_ensemble(betas, sweeps, config)
        start = jnp.array([MODES[0][0], 0.0])
        x = jnp.tile(start, (config.chains, len(betas), 1))
        key = jax.random.key(config.seed)
        with jax.set_mesh(mesh):
            run = drjax.jit(ensemble, groups_per_step=config.groups_per_step)
            output = run(x, key)
            mean, error, scale[name], points = map(np.asarray, output)
        columns[name] = mean, error
        samples[name] = points
        numbers[name] = mean[[0, 2, 3, 4]].tolist()
    table = [
        [moment, f"{abs(exact[i]):.4f}"]
        + [f"{mean[i]:.4f} ± {error[i]:.4f}" for mean, error in columns.values()]
        for i, moment in enumerate(MOMENTS)
    ]
    table.append(["R of x", "1", *(f"{x:.3f}" for x in scale.values())])
    plan = drjax.make_plan(ensemble)(x, key)
    sent = plan.communication().between(over="replicas") // config.sweeps
    mean, error = columns[name]  # of the last one, parallel tempering
    worst = np.abs(mean - exact) / np.maximum(error, 1e-9)
    shown = [f"{x[-1]:.4f} ± {e[-1]:.4f} by {name}" for name, (x, e) in columns.items()]
    result = results.Results(
        title=f"Moments by {config.chains} chains, all of which start at x < 0",
        columns=["", "quadrature", *columns],
        table=table,
        measured=f"P(x > 0), exactly {exact[-1]:.4f}, is {' and '.join(shown)}, "
        "with as many steps.",
        paper="The papers have no numbers on this density; P(x > 0) = "
        f"{exact[-1]:.4f} by quadrature.",
        badge="no published number",
        numbers=numbers,
        remarks=[
            f"The moments of {name} are within {worst.max():.1f} standard errors of "
            "quadrature.",
            f"A sweep sends {sent} bytes from each replica to others: two states and "
            "their energies.",
            "R compares the chains with each other. It is close to 1 also if all of "
            "them miss the same mode.",
        ],
    )
    result.write(config.output, config, draw(samples, grid, weights))
    return result


if __name__ == "__main__":
    main(tyro.cli(Config))
