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
import optax
import tyro
from matplotlib.figure import Figure

import drjax
from examples.common import digits, results
from examples.common.devices import make_mesh
from examples.common.network import apply, init, loss
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
    """Seed of the initial model, the batches and the settings."""


def train(config: Config, settings, start, data, key):
    """One model, by Adam with decoupled weight decay, and its validation accuracy."""
    (rate, decay), (train_set, validation) = settings, data
    adam = optax.adamw(rate, weight_decay=decay)

    def step(carry, key):
        params, state = carry
        ids = jax.random.randint(key, (config.batch,), 0, len(train_set.y))
        batch = jax.tree.map(lambda x: x[ids], train_set)
        updates, state = adam.update(jax.grad(loss)(params, batch), state, params)
        return (optax.apply_updates(params, updates), state), None

    keys = jax.random.split(key, config.steps)
    (params, _), _ = jax.lax.scan(step, (start, adam.init(start)), keys)
    right = apply(params, validation.x).argmax(-1) == validation.y
    return right.mean(), params


# --8<-- [start:algorithm]
def better(a, b):
    return jax.tree.map(lambda x, y: jnp.where(a[0] >= b[0], x, y), a, b)


def make_sweep(config: Config):
    @drjax.program(trials=config.trials)
    def sweep(settings, start, data, key):
        def trial(settings, start, data, key, index):
            score, params = train(config, settings, start, data, key)
            return score, index, params

        shared = drjax.broadcast((start, data, key))
        states = drjax.map_fn(trial, (settings, *shared, drjax.partition_index()))
        worst = -jnp.inf, jnp.int32(-1), jax.tree.map(jnp.zeros_like, start)
        return drjax.reduce(better, states, worst), drjax.gather(states[0])

    return sweep


# --8<-- [end:algorithm]
def gather_all(config: Config):
    """The same with a gather of all models, for its bytes."""
    return drjax.program(trials=config.trials)(drjax.gather)


def draw(config: Config) -> tuple[np.ndarray, np.ndarray]:
    """Learning rates from 1e-5 to 1, and weight decays from 1e-4 to 1."""
    rng = np.random.default_rng(config.seed)
    rates = 10 ** rng.uniform(-5, 0, config.trials)
    decays = 10 ** rng.uniform(-4, 0, config.trials)
    return rates.astype(np.float32), decays.astype(np.float32)


def engine_round() -> Round:
    """The best of eight models after five steps; the scores stay with the groups."""
    config = Config(trials=8, steps=5, width=8)
    train_set, validation = digits.load_mnist()
    sweep = make_sweep(config)

    def step(shared, own, data):
        return sweep(data, *shared)[0], own

    few = jax.tree.map(lambda x: x[:200], (train_set, validation))
    key = jax.random.key(config.seed)
    start = init((key, key), 784, config.width)
    return Round(step, (start, few, key), (), draw(config))


def main(config: Config) -> results.Results:
    """Runs the sweep, repeats it as a loop, and compares both."""
    mesh = make_mesh(config.devices, "trials")
    data, test = digits.load_mnist()
    held = np.arange(len(data.y)) % 8 == 0
    pick = lambda i: jax.tree.map(lambda x: jnp.asarray(x[i]), data)
    train_set, validation = pick(~held), pick(held)
    keys = jax.random.split(jax.random.key(config.seed), 3)
    start = init(keys, 784, config.width)
    settings = draw(config)
    args = settings, start, (train_set, validation), keys[2]
    sweep = make_sweep(config)
    with jax.set_mesh(mesh):
        best, scores = drjax.jit(sweep, config.groups_per_step)(*args)
    score, index, params = jax.tree.map(np.asarray, best)
    scores = np.asarray(scores)

    alone = jax.jit(lambda *settings: train(config, settings, *args[1:]))
    loop = [alone(*x) for x in zip(*settings, strict=True)]
    first = int(np.argmax([float(x[0]) for x in loop]))
    difference = max(
        float(jnp.abs(a - b).max())
        for a, b in zip(*map(jax.tree.leaves, (loop[first][1], params)), strict=True)
    )
    _, default = alone(jnp.float32(1e-3), jnp.float32(1e-4))
    right = lambda p: f"{(apply(p, test.x).argmax(-1) == test.y).mean():.1%}"
    size = sum(x.nbytes for x in jax.tree.leaves(start))
    models = jax.tree.map(lambda x: jnp.stack([x] * config.trials), start)
    gathered = drjax.make_plan(gather_all(config))(models).communication(8)
    folded = drjax.make_plan(sweep)(*args).communication(8)
    ratio = gathered.reduced_per_device() / folded.reduced_per_device()
    named = lambda i: f"rate {settings[0][i]:.1e}, decay {settings[1][i]:.1e}"
    table = [
        [f"best of {config.trials}, fold", named(index), f"{score:.1%}", right(params)],
        [
            "the same, by a loop",
            named(first),
            f"{loop[first][0]:.1%}",
            right(loop[first][1]),
        ],
        ["Adam's default", "rate 1e-3, decay 1e-4", "", right(default)],
    ]
    result = results.Results(
        title=f"The best of {config.trials} models after {config.steps} steps",
        columns=["", "settings", "validation", "test"],
        table=table,
        measured=f"The fold has the model of the loop, to {difference:.0e} in each "
        f"parameter; each of 8 devices gives {ratio:.1f} times fewer bytes to "
        "collectives than for a gather of the models.",
        paper="The model of the loop, to rounding; n / m = "
        f"{config.trials / 8:g} times fewer bytes.",
        numbers={"scores": scores.tolist(), "hidden": params["hidden"].sum(0).tolist()},
        remarks=[
            f"A model has {size:,} bytes. The bytes of the fold include all scores, "
            "which are gathered for the figure.",
        ],
    )
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
