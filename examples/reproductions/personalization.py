"""Personalization: layers that stay with their client (FedPer), and fine-tuning.

    python -m examples.reproductions.personalization

Clients differ, and one model for all is the best for none. Two ways out:

* **FedPer** (Arivazhagan et al. 2019, arXiv 1912.00818, algorithms 1 and 2): the base
  layers are shared, and each client keeps its own head.
* **Fine-tuning** (Wang et al. 2019, arXiv 1910.10252): FedAvg's model, trained further
  by each client on its own examples. Each client measures the model that it got and
  its own on held-out examples of its own, and reports both: a federated evaluation.

All layers shared is FedAvg; all layers kept are clients that train alone. So all of it
is one program, for three ways to divide the layers. What stays is a partitioned value,
a result of one round and an argument of the next: `compile(plan, keep={1: 1})`. Clients
report how many of their examples are right, and the server gets the number of clients
for each such count, so that not even an accuracy is known to be that of a client.

`--engine flower` runs the same plan files on the processes of Flower's simulation
(`pip install '.[flower]' 'flwr[simulation]'`): the examples and the kept layers never
leave their client. The clients have MNIST's digits of a few labels each.
"""

import dataclasses
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from matplotlib.figure import Figure
from tqdm import tqdm

import drjax
from examples.algorithms import fedper
from examples.common import clients, digits, results
from examples.common.devices import make_mesh
from examples.common.rounds import Round


@dataclasses.dataclass(frozen=True)
class Config:
    """Compare kept layers, fine-tuning, one model for all, and clients alone."""

    output: Path = Path("runs/personalization")
    """Folder of the plans, the table and the figure."""
    engine: Literal["xla", "flower"] = "xla"
    """What runs the plans."""
    only: str = ""
    """Run only the methods with this in their name, such as "FedPer"."""
    rounds: int = 30
    """Rounds of training."""
    clients: int = 50
    """Clients; all take part in each round."""
    shards: int = 4
    """Shards of the digits sorted by label that a client has."""
    tests: int = 20
    """Examples of each client that it holds out."""
    epochs: int = 2
    """Epochs of a client in a round."""
    batch: int = 10
    """Examples in a step of SGD."""
    rate: float = 0.1
    """Rate of SGD."""
    width: int = 32
    """Width of the hidden layer."""
    devices: int = 2
    """Devices; virtual ones on a CPU."""
    groups_per_step: int | None = None
    """Clients of a device that run at once; all by default."""
    seed: int = 0
    """Seed of the initial model, the partition and the batches."""
    seeds: int = 3
    """Trainings of each method, of as many seeds."""


def make_round(config: Config):
    """A round of the shared and the kept layers; either may be none."""

    def report(before, after, tests):
        right = [(fedper.apply(x, tests.x).argmax(-1) == tests.y).sum()
                 for x in (before, after)]  # fmt: skip
        change = jnp.sign(right[1] - right[0]) + 1  # worse, the same, better
        counts = [jax.nn.one_hot(x, config.tests + 1) for x in right]
        return *counts, jax.nn.one_hot(change, 3)

    sgd = {"e": config.epochs, "b": config.batch, "eta": config.rate}
    client_update = fedper.make_client_update(fedper.loss, report, **sgd)
    return fedper.make_round(client_update, config.clients)


KEPT = {"FedAvg": (), "FedPer": ("head", "bias"), "alone": ("head", "bias", "base")}


def init_layers(config: Config):
    normal = jax.nn.initializers.he_normal()
    return {
        "base": normal(jax.random.key(config.seed), (784, config.width)),
        "head": jnp.zeros((config.width, 10)),
        "bias": jnp.zeros(10),
    }


def divide_layers(config: Config, method: str):
    """The layers that are shared, and those that clients keep, `[clients, ...]`."""
    layers = init_layers(config)
    own = {name: layers.pop(name) for name in KEPT[method]}
    copies = lambda x: np.stack([np.asarray(x)] * config.clients)
    return layers, jax.tree.map(copies, own)


def partition(config: Config):
    """The digits of each client: those to train on, and those it holds out."""
    parts = digits.load_mnist()
    whole = jax.tree.map(lambda *x: np.concatenate(x), *parts)
    mine = clients.split_shards(
        whole.y, config.clients, config.seed, shards=config.shards
    )
    random = np.random.default_rng(config.seed)
    size = min(map(len, mine)) - config.tests
    size -= size % config.batch
    ids = np.stack([random.permutation(x)[: size + config.tests] for x in mine])
    pick = lambda ids: jax.tree.map(lambda x: x[ids], whole)
    return pick(ids[:, config.tests :]), pick(ids[:, : config.tests])


def make_plan(config: Config, method: str, data):
    """The plan of a round, and the arguments of the first one."""
    shared, own = divide_layers(config, method)
    args = shared, own, jax.random.key(config.seed), data
    return drjax.make_plan(make_round(config))(*args), args


def run_rounds(config: Config, run, shared, own, data, progress):
    """The reports of the clients on the model of each round."""
    reports, key = [], jax.random.key(config.seed)
    for number in range(config.rounds + 1):
        keys = jax.random.fold_in(key, number)
        shared, own, report = run(shared, own, keys, data)
        reports.append(jax.tree.map(np.asarray, report))
        progress.update()
    return reports


def train(config: Config, method: str, data, progress):
    """Saves the plan of a round, and runs the file on the engine."""
    path = config.output / f"{method}.drjax"
    path.parent.mkdir(parents=True, exist_ok=True)
    plan, (shared, own, *_) = make_plan(config, method, data)
    plan.save(path)
    plan, keep = drjax.load_plan(path), {1: 1} if own else None
    if config.engine == "flower":
        from drjax.backends.flower import Clients
        from examples.flower.simulation import simulate

        mine = Clients() if own else own
        start = lambda run: run_rounds(config, run, shared, mine, Clients(), progress)
        return simulate(plan, data, start, keep=keep, initial=own), shared
    with jax.set_mesh(make_mesh(config.devices, "clients")):
        step = config.groups_per_step
        run = drjax.backends.xla.compile(plan, groups_per_step=step, keep=keep)
        run = run if keep else jax.jit(run)
        return run_rounds(config, run, shared, own, data, progress), shared


def summarize(counts) -> tuple[float, float, float]:
    """Mean, tenth percentile and least of the clients' accuracies."""
    all_of_them = np.repeat(np.arange(len(counts)), counts.astype(int))
    accuracies = all_of_them / (len(counts) - 1)
    tenth = np.quantile(accuracies, 0.1, method="inverted_cdf")
    return accuracies.mean(), tenth, accuracies.min()


def draw(curves, last, tests: int) -> Figure:
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, curve in curves.items():
        left.plot(curve, label=name)
        share = np.cumsum(last[name]) / last[name].sum()
        right.step(np.arange(tests + 1) / tests, share, where="post", label=name)
    left.set(xlabel="round", ylabel="mean accuracy of clients", ylim=(None, 1))
    right.set(xlabel="accuracy", ylabel="share of clients with at most it")
    right.set(xlim=(0.4, 1.01))
    for axes in (left, right):
        axes.grid(alpha=0.3)
    right.legend()
    return figure


def engine_round() -> Round:
    """A round of FedPer with eight clients, who keep their heads."""
    config = Config(clients=8, epochs=1, width=8)
    train, tests = partition(config)
    train_round = make_round(config)

    def step(shared, own, data):
        shared, own, reports = train_round(shared[0], own, shared[1], data)
        return (shared, reports), own

    shared, own = divide_layers(config, "FedPer")
    few = jax.tree.map(lambda x: x[:, :50], train)
    return Round(step, (shared, jax.random.key(config.seed)), own, (few, tests))


def main(config: Config) -> results.Results:
    """Trains in each way, and compares the clients' accuracies."""
    make_mesh(config.devices, "clients")  # before any device is used
    seeds = range(config.seed, config.seed + config.seeds)
    settings = [dataclasses.replace(config, seed=seed) for seed in seeds]
    parts = [partition(setting) for setting in settings]
    names = [name for name in KEPT if config.only in name]
    last, numbers, table, changes = {}, {}, [], ""
    total = len(names) * len(seeds) * (config.rounds + 1)
    progress = tqdm(total=total, unit="round", disable=None)
    for name in names:
        runs, shared = [], {}
        for setting, data in zip(settings, parts, strict=True):
            reports, shared = train(setting, name, data, progress)
            runs.append([np.stack(x) for x in zip(*reports, strict=True)])
        before, after, change = map(np.stack, zip(*runs, strict=True))
        shown = {name: before}
        if name == "FedAvg":
            shown["FedAvg, fine-tuned"] = after
            worse, _, better = change[:, -1].mean(0) / config.clients
            changes = f" Fine-tuning helps {better:.0%} of them, hurts {worse:.0%}."
        size = sum(x.nbytes for x in jax.tree.leaves(shared))
        for label, counts in shown.items():  # [seeds, rounds, tests + 1]
            numbers[label] = [
                float(np.mean([summarize(x)[0] for x in of_a_round]))
                for of_a_round in counts.swapaxes(0, 1)
            ]
            last[label] = counts[:, -1].sum(0)
            scores = np.array([summarize(x) for x in counts[:, -1]])
            pairs = zip(scores.mean(0), scores.std(0), strict=True)
            cells = [f"{mean:.1%} ± {spread:.1%}" for mean, spread in pairs]
            table.append([label, *cells, f"{size:,}"])
    progress.close()
    examples = parts[0][0].y.shape[1]
    shown = "; ".join(f"{line[0]} {line[1]}" for line in table)
    result = results.Results(
        title=f"Accuracy of {config.clients} clients after {config.rounds} rounds: "
        f"mean and spread of {config.seeds} seeds",
        columns=["", "mean", "tenth percentile", "worst", "bytes sent by a client"],
        table=table,
        measured=f"Mean accuracy of the clients: {shown}.{changes}",
        badge="no published number",
        paper="No numbers on this task. FedPer is above FedAvg where clients differ "
        "(Arivazhagan et al. 2019); fine-tuning helps a significant fraction of them "
        "(Wang et al. 2019).",
        numbers=numbers,
        remarks=[
            f"Engine: {config.engine}, from plan files. A client has "
            f"{examples} examples to train on and {config.tests} to test.",
            "Only shared layers are sent. Fine-tuning is of all layers, by the epochs "
            "of one round.",
            "On Flower's SuperNodes, `tests/engines/flower/test_flower_kept.py` runs a "
            "small FedPer, and looks for the heads in all messages: none has them.",
        ],
    )
    result.write(config.output, config, draw(numbers, last, config.tests))
    return result


if __name__ == "__main__":
    main(tyro.cli(Config))
