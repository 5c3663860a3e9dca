"""Federated averaging with differential privacy for each client (DP-FedAvg).

    python -m examples.reproductions.dp_fedavg

Nobody who sees the trained model can tell whether a client took part: McMahan et al.
2018 (arXiv 1710.06963, algorithm 1). Each client is drawn for a round independently,
with probability q; the change of its model is clipped to norm S; and the server adds
noise with standard deviation z S to the sum of the changes.

The update of a client moves the sum by at most S, and the noise is z times as large: q,
z and the number of rounds T are all that the accountant needs.
It gives an epsilon for each delta, so that for any event the odds with and without one
client differ by a factor of exp(epsilon) at most, but for a probability delta.

The number of drawn clients is random, and the divisor is not: a mean over those drawn
would reveal how many they were. The cohort has more places than are ever taken, a mask
says which are, and `reduce_sum(..., where=taken)` adds those.
"""

import dataclasses
import math
from pathlib import Path

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import tyro
from dp_accounting import pld, rdp
from tqdm import tqdm

import drjax
from examples.algorithms import dp_fedavg
from examples.common import clients, digits, results
from examples.common.devices import make_mesh


@dataclasses.dataclass(frozen=True)
class Config:
    """Train with several multiples of noise, and count the privacy spent."""

    output: Path = Path("runs/dp_fedavg")
    """Folder of the table and the figure."""
    rounds: int = 100
    """Rounds of a run (T)."""
    clients: int = 1000
    """The population (W)."""
    rate: float = 0.1
    """Chance of a client to be drawn for a round (q)."""
    places: int = 170
    """Places for drawn clients; a run with more of them in a round is refused."""
    clip: float = 0.5
    """The largest norm of a client's update (S)."""
    noises: tuple[float, ...] = (0.0, 0.5, 1.0, 2.0)
    """Standard deviations of the noise, in units of S (z)."""
    delta: float = 1e-3
    """The probability for which epsilon does not hold; about one over the clients."""
    steps: int = 5
    """Gradient steps of a client in a round."""
    client_lr: float = 0.1
    """Rate of the clients' SGD."""
    devices: int = 2
    """Devices; virtual ones on a CPU."""
    groups_per_step: int | None = None
    """Clients of a device that run at once; all by default."""
    seed: int = 0
    """Seed of the partition, the cohorts and the noise."""
    seeds: int = 3
    """Trainings with each noise, of as many seeds."""


def make_round(config: Config, noise: float):
    """A round with that multiple of noise."""
    client_update = dp_fedavg.make_client_update(
        dp_fedavg.loss, config.clip, config.steps, config.client_lr
    )
    expected = config.rate * config.clients
    return dp_fedavg.make_round(
        client_update, config.places, config.clip, noise, expected
    )


def spent(rate: float, noise: float, rounds: int, delta: float) -> tuple[float, ...]:
    """Epsilon by the moments accountant, by Renyi's divergence, and by its losses."""
    gaussian = dp_accounting.GaussianDpEvent(noise)
    sampled = dp_accounting.PoissonSampledDpEvent(rate, gaussian)
    event = dp_accounting.SelfComposedDpEvent(sampled, rounds)
    improved, moments = [], []
    for order in range(2, 129):
        epsilon = rdp.RdpAccountant([order]).compose(event).get_epsilon(delta)
        improved.append(epsilon)
        # Mironov 2017 instead of Canonne et al. 2020: what Abadi et al. 2016 have.
        moments.append(epsilon - math.log1p(-1 / order) + math.log(order) / (order - 1))
    return (
        min(moments),
        min(improved),
        pld.PLDAccountant().compose(event).get_epsilon(delta),
    )


# Abadi et al. 2016, section 5.1: q = 0.01, z = 4, T = 10,000, delta = 1e-5.
ABADI, QUOTED = (0.01, 4.0, 10_000, 1e-5), 1.26
REMARKS = (
    "The lines of Abadi et al. are accounting alone: nothing was trained for them. The "
    "other lines are rounds of DP-FedAvg: each draws clients, clips and adds noise.",
    "epsilon by the moments accountant (Abadi et al. 2016, arXiv 1607.00133), by Renyi "
    "divergence with the conversion of Canonne et al. 2020 (arXiv 2004.00010), and by "
    "the distribution of privacy losses, which is tight: all by the package "
    "dp-accounting, the first two for the orders 2 to 128.",
    "The paper has hundreds of thousands of users, and no numbers for this task. Noise "
    "in units of S is divided by the expected cohort, so more clients are what makes a "
    "small epsilon cheap; here a client has four digits.",
    "The noise is from JAX's generator with 32-bit floats: a study, no deployment.",
)


def train(config: Config, noise: float, seed: int, data, held_out):
    """The accuracy and the loss on the held-out digits after each round."""
    parts = clients.split_iid(data.y, config.clients, seed)
    population = clients.pad([digits.Digits(data.x[i], data.y[i]) for i in parts])
    train_round = make_round(config, noise)

    def step(params, number, population):
        key = jax.random.fold_in(jax.random.key(seed), number)
        draw, key = jax.random.split(key)
        ids, taken, fits = clients.poisson_cohort(
            draw, config.clients, config.rate, config.places
        )
        examples, mask = jax.tree.map(lambda x: x[ids], population)
        params = train_round(params, examples, mask, taken, key)
        right = (held_out.x @ params["w"] + params["b"]).argmax(-1) == held_out.y
        return params, (
            right.mean(),
            dp_fedavg.loss(params, held_out, right | True),
            fits,
        )

    step = drjax.jit(step, groups_per_step=config.groups_per_step)
    params, scores = {"w": jnp.zeros((784, 10)), "b": jnp.zeros(10)}, []
    population = jax.device_put(population)
    for number in tqdm(range(config.rounds), f"z = {noise}", leave=False):
        params, score = jax.block_until_ready(step(params, number, population))
        scores.append(score)
    accuracies, losses, fits = np.array(scores).T.tolist()
    if not all(fits):
        raise ValueError(f"More than {config.places} clients were drawn for a round.")
    return accuracies, losses


def main(config: Config) -> results.Results:
    """Trains with each noise, and shows accuracy and epsilon."""
    mesh = make_mesh(config.devices, "clients")
    data, held_out = digits.load_mnist()
    seeds = range(config.seed, config.seed + config.seeds)
    curves, numbers, table = {}, {}, []
    for noise in config.noises:
        with jax.set_mesh(mesh):
            runs = [train(config, noise, seed, data, held_out) for seed in seeds]
        accuracies, losses = map(np.array, zip(*runs, strict=True))
        curves[f"z = {noise:g}"] = accuracies.mean(0)
        numbers[f"z = {noise:g}, held-out loss"] = losses.mean(0).tolist()
        last = accuracies[:, -1]
        args = config.rate, noise, config.rounds, config.delta
        epsilons = [f"{e:.2f}" for e in spent(*args)] if noise else ["inf"] * 3
        table.append(
            [f"z = {noise:g}", f"{last.mean():.1%} ± {last.std():.1%}", *epsilons]
        )
    abadi = spent(*ABADI)
    table.append(["Abadi et al.", "", *(f"{e:.3f}" for e in abadi)])
    table.append(["Abadi et al., paper", "", str(QUOTED), "", ""])
    result = results.Results(
        title=f"Accuracy after {config.rounds} rounds, mean and spread of "
        f"{config.seeds} seeds, and epsilon at {config.delta:g}",
        columns=["", "accuracy", "moments", "Renyi", "privacy loss"],
        table=table,
        measured=f"By accounting alone, without training: epsilon {abadi[0]:.2f} for "
        f"Abadi et al.'s setting; newer accountants show {abadi[1]:.2f} and "
        f"{abadi[2]:.2f}.",
        badge="number reached" if f"{abadi[0]:.2f}" == str(QUOTED) else None,
        paper=f"{QUOTED} (Abadi et al. 2016, section 5.1).",
        numbers=numbers | {"Abadi et al.": abadi},
        remarks=REMARKS,
    )
    figure = results.lines(curves, xlabel="round", ylabel="accuracy")
    result.write(config.output, config, figure)
    return result


if __name__ == "__main__":
    main(tyro.cli(Config))
