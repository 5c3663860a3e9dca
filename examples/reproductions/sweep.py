"""A hyperparameter sweep that returns the best model, without a gather of all models.

    python -m examples.reproductions.sweep

Each of n groups trains a model with settings of its own, on the same data. The models
are large, and one of them is wanted. So the reduction is the choice itself: a fold of
states (score, index, model) by

    better(a, b) = a if a's score is at least b's, else b

which is associative. A device folds the models of its groups, and m devices exchange m
models, where a gather exchanges n. `groups_per_step=k` trains k models at a time, so
memory need not grow with n either.

The settings are drawn at random from the logarithms of a learning rate and of a weight
decay (Bergstra and Bengio 2012, "Random search for hyper-parameter optimization"). The
best model is compared with that of a plain loop over the same settings, and with the
default rate of Adam.
"""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from matplotlib.figure import Figure

import drjax
from examples.algorithms import sweep
from examples.common import digits, results
from examples.common.devices import make_mesh
from examples.common.network import apply, init
from examples.common.rounds import Round


@dataclasses.dataclass(frozen=True)
class Config:
    """Train many models, and keep the one that is best on a validation set."""

    output: Path = Path("runs/sweep")
    """Folder of the table and the figure."""
    trials: int = 64
    """Settings to try (n)."""
    steps: int = 200
    """Steps of Adam for each."""
    batch: int = 50
    """Digits in a step."""
    width: int = 32
    """Width of the network's hidden layer."""
    devices: int = 8
    """Devices (m); virtual ones on a CPU."""
    groups_per_step: int | None = 2
    """Models of a device that train at once; all by default."""
    seed: int = 0
    """First seed of the initial model, the batches and the settings."""
    seeds: int = 3
    """Sweeps of as many seeds."""


def make_sweep(config: Config):
    train = sweep.make_train(config.steps, config.batch)
    return sweep.make_sweep(train, config.trials)


def gather_all(config: Config):
    """The same with a gather of all models, for its bytes."""
    return drjax.program(trials=config.trials)(drjax.gather)


def draw(config: Config, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Learning rates from 1e-5 to 1, and weight decays from 1e-4 to 1."""
    rng = np.random.default_rng(seed)
    rates = 10 ** rng.uniform(-5, 0, config.trials)
    decays = 10 ** rng.uniform(-4, 0, config.trials)
    return rates.astype(np.float32), decays.astype(np.float32)


def engine_round() -> Round:
    """The best of eight models after five steps; the scores stay with the groups."""
    config = Config(trials=8, steps=5, width=8)
    train_set, validation = digits.load_mnist()
    program = make_sweep(config)

    def step(shared, own, data):
        return program(data, *shared)[0], own

    few = jax.tree.map(lambda x: x[:200], (train_set, validation))
    key = jax.random.key(config.seed)
    start = init((key, key), 784, config.width)
    return Round(step, (start, few, key), (), draw(config, config.seed))


def main(config: Config) -> results.Results:
    """Runs sweeps, repeats them as loops, and compares both."""
    mesh = make_mesh(config.devices, "trials")
    data, test = digits.load_mnist()
    held = np.arange(len(data.y)) % 8 == 0
    pick = lambda i: jax.tree.map(lambda x: jnp.asarray(x[i]), data)
    both = pick(~held), pick(held)
    program = make_sweep(config)
    search = drjax.jit(program, config.groups_per_step)
    alone = jax.jit(sweep.make_train(config.steps, config.batch))
    right = lambda w: float((apply(w, test.x).argmax(-1) == test.y).mean())
    named = lambda settings, i: f"{settings[0][i]:.1e}, {settings[1][i]:.1e}"
    numbers, figures, lines, same, differences = {}, [], {}, 0, []
    for seed in range(config.seed, config.seed + config.seeds):
        keys = jax.random.split(jax.random.key(seed), 3)
        start, settings = init(keys, 784, config.width), draw(config, seed)
        args = settings, start, both, keys[2]
        with jax.set_mesh(mesh):
            best, scores = search(*args)
        score, index, model = jax.tree.map(np.asarray, best)
        scores = np.asarray(scores)
        loop = [alone(x, *args[1:]) for x in zip(*settings, strict=True)]
        first = int(np.argmax([float(x[0]) for x in loop]))
        same += int(first == index)
        pairs = zip(*map(jax.tree.leaves, (loop[first][1], model)), strict=True)
        differences.append(max(float(jnp.abs(a - b).max()) for a, b in pairs))
        _, default = alone((jnp.float32(1e-3), jnp.float32(1e-4)), *args[1:])
        cells = {
            f"best of {config.trials}, fold": (named(settings, index), score, model),
            "the same, by a loop": (named(settings, first), *loop[first]),
            "Adam's default": ("1e-3, 1e-4", np.nan, default),
        }
        for name, (which, accuracy, w) in cells.items():
            lines.setdefault(name, []).append((which, float(accuracy), right(w)))
        numbers[f"scores, seed {seed}"] = scores.tolist()
        numbers[f"hidden, seed {seed}"] = model["hidden"].sum(0).tolist()
        figures.append((settings, scores, index))
    size = sum(x.nbytes for x in jax.tree.leaves(start))
    models = jax.tree.map(lambda x: jnp.stack([x] * config.trials), start)
    gathered = drjax.make_plan(gather_all(config))(models).communication(8)
    folded = drjax.make_plan(program)(*args).communication(8)
    ratio = gathered.reduced_per_device() / folded.reduced_per_device()
    table = []
    for name, runs in lines.items():
        which, *accuracies = zip(*runs, strict=True)
        shown = [
            "" if np.isnan(x).any() else results.show_spread(x, ".1%")
            for x in accuracies
        ]
        table.append([name, "; ".join(dict.fromkeys(which)), *shown])
    difference = max(differences)
    exact = same == config.seeds and difference < 1e-4
    result = results.Results(
        title=f"The best of {config.trials} models after {config.steps} steps; means "
        f"and spread of {config.seeds} seeds",
        columns=["", "rate and decay", "validation", "test"],
        table=table,
        measured=f"The fold has the model of the loop in {same} of {config.seeds} "
        f"sweeps, to {difference:.0e} in each parameter, for {ratio:.1f} times fewer "
        "bytes than a gather of all models.",
        paper="The model of the loop, to rounding; n / m = "
        f"{config.trials / 8:g} times fewer bytes.",
        badge="exact" if exact else None,
        numbers=numbers,
        remarks=[
            f"A model has {size:,} bytes. The bytes are those that each of 8 devices "
            "gives to collectives; those of the fold include all scores, which are "
            "gathered for the figure.",
        ],
    )
    settings, scores, index = figures[0]
    figure = Figure(figsize=(5, 3.6), layout="constrained")
    axes = figure.subplots()
    points = axes.scatter(*settings, c=scores, cmap="viridis_r")
    axes.scatter(settings[0][index], settings[1][index], s=150, c="none", ec="red")
    axes.set(xscale="log", yscale="log", xlabel="learning rate", ylabel="weight decay")
    figure.colorbar(points, label="validation accuracy")
    result.write(config.output, config, figure)
    return result


if __name__ == "__main__":
    main(tyro.cli(Config))
