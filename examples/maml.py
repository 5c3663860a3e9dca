"""MAML, parallel over tasks: Finn et al. 2017 (arXiv 1703.03400, section 5.1).

    python -m examples.maml

The first part shows the programs of Rush et al. 2024 (arXiv 2403.07128, Snippets 3, 4
and 7): the loss of one task after a gradient step, its mean over a partition of tasks,
and the gradients of that, which are MapReduce programs too. The second part trains an
initialization for sinusoids with them, and compares it with pretraining on all tasks:
test error after 0, 1, 5 and 10 gradient steps on ten points of a new sinusoid.
"""

import dataclasses
import functools
import itertools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro  # The flags, their types and their help come from the dataclass below.
from jax import Array
from rich.console import Console
from rich.table import Table
from tqdm import trange

import drjax
from examples.common import plots
from examples.common.sinusoid import (
    Model,
    Points,
    Task,
    init,
    loss,
    predict,
    sample_task,
)

META_BATCH = 25  # tasks in a step
INNER_LR = 0.01
OUTER_LR = 1e-3
TEST_STEPS = (0, 1, 5, 10)


@dataclasses.dataclass(frozen=True)
class Config:
    """Learn to fit sinusoids from ten points in one gradient step."""

    output: Path = Path("runs/maml")
    """Folder of the plot."""
    steps: int = 40_000
    """Outer steps, for MAML and for pretraining."""
    test_tasks: int = 1_000
    """New sinusoids to test on."""
    seed: int = 0
    """Seed of the initial parameters and of all tasks."""


def adapt(model: Model, lr: Array | float, points: Points) -> Model:
    """One step of gradient descent."""
    grads = jax.grad(loss)(model, points)
    return jax.tree.map(lambda p, g: p - lr * g, model, grads)


def maml_loss(model: Model, lr: Array | float, task: Task) -> Array:
    """Snippet 3: the loss of one task, after one step on it."""
    return loss(adapt(model, lr, task.support), task.query)


@drjax.program(tasks=META_BATCH)
def parallel_maml_loss(model: Model, lr: Array | float, tasks: Task) -> Array:
    """Snippet 4: the mean over a partition of tasks."""
    models = drjax.broadcast(model)
    lrs = drjax.broadcast(lr)
    losses = drjax.map_fn(maml_loss, (models, lrs, tasks))
    return drjax.reduce_mean(losses)


# Snippet 7: its gradient by the model, and by the learning rate of the inner step.
parallel_maml_gradients = jax.grad(parallel_maml_loss, argnums=(0, 1))


@drjax.program(tasks=META_BATCH)
def pretraining_loss(model: Model, lr: Array | float, tasks: Task) -> Array:
    """The baseline: the loss with no adaptation, over the same tasks."""
    del lr
    losses = drjax.map_fn(
        lambda model, task: loss(model, task.query), (drjax.broadcast(model), tasks)
    )
    return drjax.reduce_mean(losses)


def train(objective, key: Array, steps: int, name: str) -> Model:
    """Minimizes an objective of (model, learning rate, tasks) with Adam."""
    adam = optax.adam(OUTER_LR)
    model = init(key)

    def step(carry, number):
        model, moments = carry
        keys = jax.random.split(jax.random.fold_in(key, number), META_BATCH)
        grads = jax.grad(objective)(model, INNER_LR, jax.vmap(sample_task)(keys))
        updates, moments = adam.update(grads, moments)
        return (optax.apply_updates(model, updates), moments), None

    chunk = max(1, steps // 20)
    scan = jax.jit(lambda carry, numbers: jax.lax.scan(step, carry, numbers)[0])
    carry = model, adam.init(model)
    for begin in trange(0, steps, chunk, desc=name, unit_scale=chunk):
        carry = jax.block_until_ready(scan(carry, begin + jnp.arange(chunk)))
    return carry[0]


def fit(model: Model, lr: Array | float, points: Points) -> Model:
    """The models after each number of gradient steps in TEST_STEPS, stacked."""
    step = lambda model, _: (adapt(model, lr, points), model)
    _, models = jax.lax.scan(step, model, length=max(TEST_STEPS) + 1)
    return jax.tree.map(lambda leaf: leaf[np.array(TEST_STEPS)], models)


@jax.jit
def test_errors(model: Model, lr: Array | float, tasks: Task) -> Array:
    """The mean error on new tasks after each number of steps in TEST_STEPS."""

    def errors(model: Model, lr: Array, task: Task) -> Array:
        fitted = fit(model, lr, task.support)
        return jax.vmap(loss, in_axes=(0, None))(fitted, task.query)

    @drjax.program(tasks=len(tasks.support[0]))
    def mean_errors(model: Model, lr: Array | float, tasks: Task) -> Array:
        model, lr = drjax.broadcast((model, lr))
        return drjax.reduce_mean(drjax.map_fn(errors, (model, lr, tasks)))

    return mean_errors(model, lr, tasks)


def tuned_lr(model: Model, tasks: Task) -> float:
    """The step size that leaves the least error after all steps, as in the paper."""
    grid = np.geomspace(1e-5, INNER_LR, 13).tolist()
    last = [float(test_errors(model, lr, tasks)[-1]) for lr in grid]
    return grid[int(np.nanargmin(last))]


def outline(program, *args) -> str:
    """The primitives of a program in order, without what is inside map_fn."""
    names = [eqn.primitive.name for eqn in jax.make_jaxpr(program)(*args).eqns]
    runs = [(name, len(list(run))) for name, run in itertools.groupby(names)]
    return ", ".join(f"{name} x {n}" if n > 1 else name for name, n in runs)


def main(config: Config) -> None:
    """Prints the programs, trains both initializations, and compares them."""
    keys = jax.random.split(jax.random.key(config.seed), 4)
    sample_test = jax.vmap(functools.partial(sample_task, queries=100))
    validation = sample_test(jax.random.split(keys[1], config.test_tasks))
    unseen = sample_test(jax.random.split(keys[2], config.test_tasks))
    tasks = sample_test(jax.random.split(keys[3], META_BATCH))
    console = Console(highlight=False, soft_wrap=True)
    example = init(keys[0]), INNER_LR, tasks
    console.print("parallel MAML loss:", outline(parallel_maml_loss, *example))
    console.print("its gradients:", outline(parallel_maml_gradients, *example))

    maml = train(parallel_maml_loss, keys[0], config.steps, "MAML")
    pretrained = train(pretraining_loss, keys[0], config.steps, "pretraining")
    rates = {"MAML": INNER_LR, "pretraining": tuned_lr(pretrained, validation)}
    table = Table(title=f"Mean squared error on {config.test_tasks:,} new sinusoids")
    table.add_column("gradient steps of size")
    for steps in TEST_STEPS:
        table.add_column(str(steps), justify="right")
    results, curves = {}, {}
    x = jnp.linspace(-5, 5, 200)
    for name, model in (("MAML", maml), ("pretraining", pretrained)):
        errors = test_errors(model, rates[name], unseen).tolist()
        results[name] = dict(zip(TEST_STEPS, errors, strict=True))
        table.add_row(f"{name}, {rates[name]:.2g}", *(f"{e:.3f}" for e in errors))
        for i in range(3):
            points = jax.tree.map(lambda a, i=i: a[i], unseen.support)
            fitted = jax.jit(fit)(model, rates[name], points)
            curves[name, i] = jax.vmap(predict, in_axes=(0, None))(fitted, x)
    console.print(table)
    targets = [jax.tree.map(lambda a, i=i: a[i], unseen) for i in range(3)]
    plots.fitted_curves(config.output / "curves.png", x, targets, curves, TEST_STEPS)
    (config.output / "errors.json").write_text(json.dumps(results, indent=1) + "\n")
    console.print(f"Errors and plot: {config.output}")


if __name__ == "__main__":
    main(tyro.cli(Config))
