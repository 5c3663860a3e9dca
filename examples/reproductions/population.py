"""Population-based training: members copy better ones, and change their settings.

    python -m examples.reproductions.population

A population of n models trains in parallel, each with hyperparameters h of its own,
which change on the way (Jaderberg et al. 2017, arXiv 1711.09846, algorithm 1). Again
and again

    each member i, in parallel:
        w_i = some steps of training from w_i with h_i
        p_i = evaluation of w_i
    exploit: a member of the worst fifth gets w_j and h_j of one of the best fifth,
        drawn at random (truncation selection)
    explore: those that did perturb their copy of h, by factors of 0.8 or 1.2

The scores are gathered: n numbers, from which follows who copies whom. `drjax.take`
then moves models and states of optimizers between groups, and no server sees them.

Two tasks. In the paper's toy problem (figure 2) two members maximize

    Q(w) = 1.2 - w_1^2 - w_2^2    by gradient ascent on    1.2 - h_1 w_1^2 - h_2 w_2^2

from w = (0.9, 0.9), with h = (1, 0) and (0, 1). With fixed h, one coordinate stays at
0.9, so Q is 0.39 at best. Here h is perturbed by noise, as a factor keeps a zero. And
20 networks learn digits of MNIST by SGD with momentum, from rates and weight decays
that are drawn at random; the same ones stay fixed in a random search.
"""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from matplotlib.figure import Figure
from tqdm import tqdm

import drjax
from examples.algorithms import population
from examples.common import digits, results
from examples.common.devices import make_mesh
from examples.common.network import apply, init, loss


@dataclasses.dataclass(frozen=True)
class Config:
    """Train populations whose hyperparameters evolve, and ones where they are fixed."""

    output: Path = Path("runs/population")
    """Folder of the table and the figure."""
    members: int = 20
    """Networks (n)."""
    rounds: int = 40
    """Rounds of training, exploiting and exploring, of the networks."""
    steps: int = 25
    """Steps of SGD in a round."""
    batch: int = 50
    """Digits in a step."""
    width: int = 32
    """Width of the networks' hidden layer."""
    toy_rounds: int = 50
    """Rounds of the toy problem; each has four steps."""
    only: str = ""
    """Run only the tasks with this in their name: "toy" or "digits"."""
    devices: int = 2
    """Devices; virtual ones on a CPU."""
    groups_per_step: int | None = None
    """Members of a device that train at once; all by default."""
    seed: int = 0
    """First seed of the hyperparameters, the models, the batches and the copies."""
    seeds: int = 3
    """Populations of each kind, of as many seeds."""


def make_train(config: Config):
    """SGD with momentum; the score is minus the loss on validation digits."""

    def train(member, data, key):
        (params, state), h = member
        train_set, validation = data
        sgd = optax.chain(
            optax.add_decayed_weights(h["decay"]), optax.sgd(h["rate"], momentum=0.9)
        )

        def step(carry, key):
            params, state = carry
            ids = jax.random.randint(key, (config.batch,), 0, len(train_set.y))
            batch = jax.tree.map(lambda x: x[ids], train_set)
            grads = jax.grad(loss)(params, batch)
            updates, state = sgd.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        keys = jax.random.split(key, config.steps)
        (params, state), _ = jax.lax.scan(step, (params, state), keys)
        return ((params, state), h), -loss(params, validation)

    return train


def explore_factors(h, key):
    factors = jnp.array([0.8, 1.2])
    keys = optax.tree.split_key_like(key, h)
    return jax.tree.map(lambda x, key: x * jax.random.choice(key, factors), h, keys)


def start_digits(config: Config, seed: int):
    """Networks `[n, ...]` and hyperparameters `[n]`."""
    rng = np.random.default_rng(seed)
    h = {"rate": 10 ** rng.uniform(-4, 0, config.members)}
    h["decay"] = 10 ** rng.uniform(-6, -1, config.members)

    def start(key):
        params = init(jax.random.split(key), 784, config.width)
        state = optax.chain(
            optax.add_decayed_weights(0.0), optax.sgd(0.1, momentum=0.9)
        )
        return params, state.init(params)

    keys = jax.random.split(jax.random.key(seed), config.members)
    return jax.vmap(start)(keys), jax.tree.map(jnp.float32, h)


def iterate(step, members, data, rounds: int, seed: int):
    """Members before and after each round, and their scores."""
    root = jax.random.key(seed)
    history, scores = [members], []
    for number in tqdm(range(rounds), unit="round", leave=False):
        key = jax.random.fold_in(root, number)
        members, score = jax.block_until_ready(step(members, data, key))
        history.append(members)
        scores.append(np.asarray(score))
    return history, np.array(scores)


def make_toy(config: Config, evolve: bool):
    """A round of the toy problem."""
    program = population.make_round(
        2, population.train_toy, population.explore_toy, evolve
    )
    return drjax.jit(program, groups_per_step=config.groups_per_step)


def run_toy(config: Config, step, seed: int):
    """The paths of both members, `[rounds + 1, 2, 2]`, and the scores."""
    start = jnp.full((2, 2), 0.9), jnp.eye(2)
    history, scores = iterate(step, start, (), config.toy_rounds, seed)
    return np.array([w for w, _ in history]), scores


def make_digits(config: Config, evolve: bool):
    """A round of the networks."""
    return population.make_round(
        config.members, make_train(config), explore_factors, evolve
    )


def run_digits(config: Config, step, data, seed: int):
    """The scores `[rounds, n]` and the last networks."""
    start = start_digits(config, seed)
    history, scores = iterate(step, start, data, config.rounds, seed)
    (params, _), _ = history[-1]
    return scores, params


def count_bytes(config: Config, data) -> str:
    """What a round of the networks communicates, in words."""
    args = start_digits(config, config.seed), data, jax.random.key(0)
    ledger = drjax.make_plan(make_digits(config, True))(*args).communication()
    return (
        f"In a round, a network sends {ledger.up()} bytes up, its score, and "
        f"{ledger.between():,} to other groups: its parameters, momentum and "
        "hyperparameters."
    )


def accuracy(params, examples):
    """Of each of the networks `[n, ...]`."""
    right = jax.vmap(lambda p: (apply(p, examples.x).argmax(-1) == examples.y).mean())
    return np.asarray(right(params))


def draw(paths, curves, config: Config) -> Figure:
    """The paths of the toy problem; losses of the best and of the median network."""
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    grid = np.linspace(-0.05, 1, 100)
    q = 1.2 - grid[:, None] ** 2 - grid**2
    left.contourf(grid, grid, q, levels=20, cmap="Greys_r", alpha=0.5)
    for i, (name, path) in enumerate(paths.items()):
        for member in range(2):
            label = name if member == 0 else None
            left.plot(*path[:, member].T, ".-", color=f"C{i}", label=label)
    left.set(title="toy problem", xlabel="$w_1$", ylabel="$w_2$", aspect="equal")
    for i, (name, losses) in enumerate(curves.items()):
        steps = config.steps * np.arange(1, len(losses) + 1)
        right.plot(steps, losses.min(1), color=f"C{i}", label=f"{name}, best")
        median = np.median(losses, 1)
        right.plot(steps, median, "--", color=f"C{i}", label=f"{name}, median")
    right.set(title="digits", xlabel="step", ylabel="validation loss", yscale="log")
    right.grid(alpha=0.3)
    for axes, shown in ((left, paths), (right, curves)):
        if shown:
            axes.legend(fontsize=9)
    return figure


def main(config: Config) -> results.Results:
    """Trains all populations, and shows the best of each."""
    mesh = make_mesh(config.devices, "members")
    training, test = digits.load_mnist()
    held = np.arange(len(training.y)) % 8 == 0
    pick = lambda i: jax.tree.map(lambda x: jnp.asarray(x[i]), training)
    data = pick(~held), pick(held)
    seeds = range(config.seed, config.seed + config.seeds)
    paths, curves, numbers, columns, diverged = {}, {}, {}, {}, {}
    for name, evolve in {"population-based": True, "fixed": False}.items():
        cells = columns[name] = []
        with jax.set_mesh(mesh):
            if config.only in "toy":
                step = make_toy(config, evolve)
                runs = [run_toy(config, step, seed) for seed in seeds]
                paths[name] = runs[0][0]
                for seed, (_, scores) in zip(seeds, runs, strict=True):
                    numbers[f"{name}, Q, seed {seed}"] = scores.max(1).tolist()
                cells.append([scores[-1].max() for _, scores in runs])
            if config.only in "digits":
                step = drjax.jit(
                    make_digits(config, evolve), groups_per_step=config.groups_per_step
                )
                runs = [run_digits(config, step, data, seed) for seed in seeds]
                curves[name] = np.nan_to_num(-runs[0][0], nan=np.inf)
                last = [np.nan_to_num(-scores[-1], nan=np.inf) for scores, _ in runs]
                for seed, losses in zip(seeds, last, strict=True):
                    kept = np.sort(losses[np.isfinite(losses)])
                    numbers[f"{name}, losses, seed {seed}"] = kept.tolist()
                diverged[name] = sum(int(np.isinf(losses).sum()) for losses in last)
                cells.append([losses.min() for losses in last])
                cells.append([np.median(losses) for losses in last])
                right = [
                    accuracy(params, test)[losses.argmin()]
                    for (_, params), losses in zip(runs, last, strict=True)
                ]
                cells.append(right)
    named = {"toy": ["toy: Q of the best"]}
    named["digits"] = [
        "digits: validation loss of the best",
        "of the median member",
        "test accuracy of the best",
    ]
    exact = {"toy": ["1.2 and 0.39"], "digits": [""] * 3}
    tasks = [task for task in named if config.only in task]
    first = sum((named[task] for task in tasks), [])
    table = [
        [label, *(show(label, values) for values in both), quoted]
        for label, quoted, *both in zip(
            first,
            sum((exact[task] for task in tasks), []),
            *columns.values(),
            strict=True,
        )
    ]
    lines = {line[0]: line[1:] for line in table}
    parts = [
        f"{text} {lines[label][0]} (fixed hyperparameters: {lines[label][1]})"
        for text, label in (
            ("Toy problem: Q", "toy: Q of the best"),
            ("digits: median validation loss", "of the median member"),
        )
        if label in lines
    ]
    badge, remarks = None, []
    if "toy" in tasks:
        far = max(
            np.abs(np.subtract(columns[name][0], quoted)).max()
            for name, quoted in (("population-based", 1.2), ("fixed", 0.39))
        )
        badge = "exact" if far < 1e-3 else None
        remarks = [f"Toy problem: the largest difference from exact is {far:.0e}."]
    if "digits" in tasks:
        best = columns["population-based"][-1], columns["fixed"][-1]
        apart = np.subtract(*best)
        remarks += [
            count_bytes(config, data),
            "Networks that diverged, and count as the worst: "
            + ", ".join(f"{count} ({name})" for name, count in diverged.items())
            + f", of {config.seeds * config.members} each.",
            "Accuracies on the 1,000 test digits have a standard error of 0.8 %. Those "
            f"of the best networks differ by {apart.mean():+.1%} between the two "
            f"populations (± {apart.std():.1%} over seeds).",
        ]
    result = results.Results(
        title="Populations whose hyperparameters evolve, and ones where they are "
        f"fixed; means and spread of {config.seeds} seeds",
        columns=["", *columns, "exact"],
        table=table,
        measured="; ".join(parts) + ".",
        paper="Toy problem: the maximum is 1.2, and 0.39 with fixed hyperparameters, "
        "both exact. The paper has no numbers on these digits.",
        badge=badge,
        numbers=numbers,
        remarks=[
            *remarks,
            "In both runs, networks begin with the same parameters and "
            "hyperparameters.",
        ],
    )
    result.write(config.output, config, draw(paths, curves, config))
    return result


def show(label: str, values) -> str:
    """The mean over seeds, and the spread."""
    digits = ".1%" if "accuracy" in label else ".4f"
    return results.show_spread(values, digits)


if __name__ == "__main__":
    main(tyro.cli(Config))
