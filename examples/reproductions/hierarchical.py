"""Hierarchical local SGD: frequent averages inside pods, rare ones between them.

    python -m examples.reproductions.hierarchical

Links between pods of machines are slower than links inside one. So the groups of a pod
average their models every 10 steps, and the pods theirs every 100 (hierarchical local
SGD: Lin et al. 2018, "Don't use large mini-batches, use local SGD", arXiv 1808.07217;
for clients, edge servers and a cloud: Liu et al. 2019, arXiv 1905.06641):

    in each pod, 10 times:
        each group takes 10 steps of SGD on its own examples, from the model of its pod
        the model of the pod = the mean of its groups' models
    the model = the mean of the pods' models

`@drjax.program(pods=4, groups=4)` has two levels, and each block says by `over=` on
which it acts. With as many steps between the two kinds of averages it is flat local
SGD: every 10 steps, which communicates ten times as much between pods; or every 100
steps, when the groups of a pod do not meet before.

The ledger of the plan has the bytes of each level. Each of the 16 groups has digits of
few labels, and a pod has digits of most.
"""

import dataclasses
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import tyro
from matplotlib.figure import Figure
from tqdm import tqdm

import drjax
from drjax.plan import Ledger
from examples.algorithms import hierarchical
from examples.common import clients, digits, results
from examples.common.devices import make_mesh
from examples.common.network import apply, init, loss


@dataclasses.dataclass(frozen=True)
class Config:
    """Train by hierarchical and by flat local SGD, and count bytes of each level."""

    output: Path = Path("runs/hierarchical")
    """Folder of the table and the figure."""
    pods: int = 4
    """Pods."""
    groups: int = 4
    """Groups of a pod."""
    often: int = 10
    """Steps from average to average in a pod."""
    seldom: int = 100
    """Steps from average to average between pods."""
    steps: int = 1000
    """Steps of each group."""
    batch: int = 10
    """Digits in a step."""
    rate: float = 0.05
    """Rate of SGD."""
    width: int = 64
    """Width of the network's hidden layer."""
    only: str = ""
    """Run only the methods with this in their name, such as "hierarchical"."""
    devices: int = 2
    """Devices, the first two for two halves of the pods; virtual ones on a CPU."""
    groups_per_step: int | None = None
    """Pods, and groups of a pod, of a device that run at once; all by default."""
    seed: int = 0
    """Seed of the initial model, the partition and the batches."""


class Run(NamedTuple):
    """What a method leaves; losses and accuracies after each `seldom` steps."""

    losses: list[float]
    accuracies: list[float]
    ledger: Ledger  # of one round
    rounds: int


def train(config: Config, often: int, seldom: int, examples, held_out) -> Run:
    shape = config.pods, config.groups, often, seldom // often
    train_round = hierarchical.make_round(loss, *shape, config.rate, config.batch)
    per_point = config.seldom // seldom  # rounds from point to point of the curves

    def step(params, examples, key):
        body = lambda params, key: (train_round(params, examples, key), None)
        params, _ = jax.lax.scan(body, params, jax.random.split(key, per_point))
        right = apply(params, held_out.x).argmax(-1) == held_out.y
        return params, (loss(params, held_out), right.mean())

    step = drjax.jit(step, groups_per_step=config.groups_per_step)
    keys = jax.random.split(jax.random.key(config.seed), 3)
    params = init(keys, 784, config.width)
    ledger = drjax.make_plan(train_round)(params, examples, keys[2]).communication()
    scores = []
    points = config.steps // config.seldom
    for key in jax.random.split(keys[2], points):
        params, score = jax.block_until_ready(step(params, examples, key))
        scores.append(score)
    losses, accuracies = np.array(scores).T.tolist()
    return Run(losses, accuracies, ledger, points * per_point)


def draw(runs: dict[str, Run], config: Config) -> Figure:
    """Held-out losses by steps, and by bytes between pods."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for name, run in runs.items():
        points = np.arange(1, len(run.losses) + 1)
        sent = run.ledger.up(over="pods") * run.rounds / len(points) * points
        left.plot(points * config.seldom, run.losses, label=name)
        right.plot(sent, run.losses)
    left.set(xlabel="steps of each group", ylabel="held-out loss")
    right.set(xlabel="bytes from each pod", xscale="log")
    left.legend()
    for axes in (left, right):
        axes.grid(alpha=0.3)
    return figure


def main(config: Config) -> results.Results:
    """Trains by hierarchical and by flat local SGD, and shows losses and bytes."""
    mesh = make_mesh(config.devices, "pods", "groups")
    train_set, held_out = digits.load_mnist()
    shape = config.pods, config.groups
    parts = clients.split_shards(train_set.y, config.pods * config.groups, config.seed)
    size = min(map(len, parts))
    indices = np.stack([part[:size] for part in parts]).reshape(*shape, size)
    examples = jax.tree.map(lambda x: x[indices], train_set)
    methods = {
        f"flat, every {config.often} steps": (config.often, config.often),
        f"flat, every {config.seldom} steps": (config.seldom, config.seldom),
        f"hierarchical, {config.often} and {config.seldom}": (
            config.often,
            config.seldom,
        ),
    }
    runs, numbers, table = {}, {}, []
    for name, (often, seldom) in tqdm(methods.items(), unit="run"):
        if config.only not in name:
            continue
        with jax.set_mesh(mesh):
            run = runs[name] = train(config, often, seldom, examples, held_out)
        numbers[f"{name}, held-out loss"] = run.losses
        sent = [run.ledger.up(over=x) * run.rounds for x in ("groups", "pods")]
        shown = (f"{nbytes / 1e6:.1f} MB" for nbytes in sent)
        table.append(
            [name, f"{run.losses[-1]:.3f}", f"{run.accuracies[-1]:.1%}", *shown]
        )
    shown = "; ".join(f"{x[1]} and {x[4]} {x[0]}" for x in table)
    labels = [len(set(train_set.y[i])) for i in indices.reshape(config.pods, -1)]
    result = results.Results(
        title=f"{config.steps} steps of {config.pods} pods with {config.groups} groups",
        columns=["", "loss", "accuracy", "from each group", "from each pod"],
        table=table,
        measured=f"Held-out loss, sent by each pod: {shown}.",
        badge="no published number",
        paper="The papers have no numbers on this task. The ratio of bytes is exact: "
        f"{config.seldom // config.often}.",
        numbers=numbers,
        remarks=[
            f"A group has {size} digits of few labels, a pod {min(labels)} to "
            f"{max(labels)} of the ten labels.",
            "Bytes are those of the plan's ledger, up over each level, of all rounds. "
            "In a flat method, a group sends to its pod before the pod sends.",
        ],
    )
    result.write(config.output, config, draw(runs, config))
    return result


if __name__ == "__main__":
    main(tyro.cli(Config))
