"""Saved plans on engines: a round of each algorithm, from its file alone.

    python -m examples.engines --engines reference xla ray beam flower
    python -m examples.engines --examples fedavg scaffold --engines ray

The plan of a round is saved, then every engine loads the file, runs a few rounds, and
is compared with the reference backend. What the groups keep for their next round, as
the control variates of SCAFFOLD, stays with them (`keep=`). Engines are started on this
machine: Ray and Beam with two workers, Flower as a simulation whose clients have the
groups' slices. `pip install '.[ray,beam,flower]' 'flwr[simulation]'` installs them all.
"""

import dataclasses
import importlib
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

import drjax
from drjax.plan import Plan
from examples import plans
from examples.algorithms import maml
from examples.common.rounds import Round
from examples.common.sinusoid import init, sample_task
from examples.plans import CLIENTS, LOCAL_STEPS

ENGINES = "reference", "xla", "ray", "beam", "flower"
# Each has a function `engine_round`. Robust aggregation is not for Flower: clients
# would get coordinates of the gradients of others.
EXAMPLES = {
    "fedavg": ENGINES,
    "scaffold": ENGINES,
    "diloco": ENGINES,
    "robust": ENGINES[:-1],
    "sweep": ENGINES,
    "federated_sklearn": ENGINES,
    "analytics": ENGINES,
    "personalization": ENGINES,
}


@dataclasses.dataclass(frozen=True)
class Config:
    """Run saved plans on several engines."""

    engines: tuple[str, ...] = ("reference", "xla")
    """Which: reference, xla, ray, beam, flower."""
    examples: tuple[str, ...] = ("local_sgd", "maml_gradients")
    """Which: these two, or the names of examples of the gallery."""
    output: Path = Path("runs/engines")
    """Folder of the plan files."""
    rounds: int = 5
    """How often each plan runs; the first time it is compiled."""


def local_sgd() -> Round:
    """A round of local SGD on sinusoids."""
    draw = lambda key: sample_task(key, 10 * LOCAL_STEPS).query
    points = jax.vmap(draw)(jax.random.split(jax.random.key(2), CLIENTS))
    batches = jax.tree.map(lambda x: x.reshape(CLIENTS, LOCAL_STEPS, 10) / 5, points)
    step = lambda shared, own, data: (plans.local_sgd(shared, data), own)
    return Round(step, init(jax.random.key(0)), (), batches)


def maml_gradients() -> Round:
    """The gradient of MAML on sinusoids."""
    tasks = jax.vmap(sample_task)(jax.random.split(jax.random.key(1), maml.META_BATCH))
    gradients = jax.grad(maml.meta_loss, argnums=(0, 1))
    step = lambda shared, own, data: (gradients(*shared, data), own)
    return Round(step, (init(jax.random.key(0)), np.float32(0.01)), (), tasks)


def round_of(name: str) -> Round:
    """The round of an example."""
    make = {"local_sgd": local_sgd, "maml_gradients": maml_gradients}.get(name)
    make = (
        make or importlib.import_module(f"examples.reproductions.{name}").engine_round
    )
    one = make()
    # Not on a device: the first call on XLA donates what is kept.
    return one._replace(own=jax.tree.map(np.array, one.own))


def save(one: Round, path: Path) -> None:
    """Saves the plan of a round; the partitions are those that the program has."""
    drjax.make_plan(one.step)(one.shared, one.own, one.data).save(path)


def start(
    engine: str, plan: Plan, keep: dict | None, workers: Any
) -> AbstractContextManager:
    """A context that gives a function which runs the plan."""
    if engine in ("ray", "beam"):
        backend = importlib.import_module(f"drjax.backends.{engine}")
        return closing(backend.compile(plan, workers=workers, keep=keep))
    if engine == "reference":
        return nullcontext(drjax.backends.reference.compile(plan, keep=keep))
    compiled = drjax.backends.xla.compile(plan, keep=keep)
    return nullcontext(compiled if keep else jax.jit(compiled))


def run(
    path: Path, engine: str, one: Round, rounds: int, workers: Any = 2
) -> tuple[list, list[float]]:
    """Flat results of a plan file on an engine, and the seconds of each round."""
    plan, keep = drjax.load_plan(path), {1: 1} if jax.tree.leaves(one.own) else None
    if engine == "flower":
        from drjax.backends.flower import Clients
        from examples.flower.simulation import simulate

        remote = one._replace(own=Clients() if keep else (), data=Clients())
        step = lambda run: timed(run, remote, rounds)
        return simulate(plan, one.data, step, keep=keep, initial=one.own)
    with start(engine, plan, keep, workers) as step:
        return timed(step, one, rounds)


def timed(step: Callable, one: Round, rounds: int) -> tuple[list, list[float]]:
    """Flat results of the last round, and the seconds of each.

    What the groups keep goes from round to round; the server sends the same in all.
    """
    seconds, out, own = [], None, one.own
    for _ in range(rounds):
        begin = time.perf_counter()
        out, own = step(one.shared, own, one.data)
        jax.block_until_ready(out)
        seconds.append(time.perf_counter() - begin)
    return jax.tree.leaves(out), seconds


def difference(result: list, expected: list) -> float:
    """The largest difference in an array, over the largest number there."""
    far = [0.0]
    for a, b in zip(result, expected, strict=True):
        a, b = np.asarray(a, float), np.asarray(b, float)
        far.append(float(np.abs(a - b).max() / (np.abs(b).max() or 1)))
    return max(far)


def main(config: Config) -> None:
    """Saves the plans, runs them, and prints a table."""
    table = Table("plan", "engine", "first run, s", "warm run, s", "difference")
    for name in config.examples:
        one, path = round_of(name), config.output / f"{name}.drjax"
        save(one, path)
        expected, _ = run(path, "reference", one, config.rounds)
        for engine in config.engines:
            if engine not in EXAMPLES.get(name, ENGINES):
                table.add_row(name, engine, "", "", "not for it")
                continue
            result, seconds = run(path, engine, one, config.rounds)
            warm = f"{min(seconds[1:], default=0):.4f}"
            far = f"{difference(result, expected):.1e}"
            table.add_row(name, engine, f"{seconds[0]:.2f}", warm, far)
    Console(width=88).print(table)


if __name__ == "__main__":
    main(tyro.cli(Config))
