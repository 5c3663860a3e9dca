"""Saved plans on engines: local SGD and the gradient of MAML, from their files alone.

    python -m examples.engines --engines reference xla ray beam flower

Each plan is saved, then every engine loads the file, runs it a few times on the same
arguments, and is compared with the reference backend. Engines are started on this
machine: Ray and Beam with two workers, Flower as a simulation whose clients have the
groups' slices. `pip install '.[ray,beam,flower]' 'flwr[simulation]'` installs them all.
"""

import dataclasses
import time
from collections.abc import Callable
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

import drjax
from drjax.plan import Plan
from examples.common.sinusoid import init, sample_task
from examples.maml import META_BATCH
from examples.plans import CLIENTS, LOCAL_STEPS, plans


@dataclasses.dataclass(frozen=True)
class Config:
    """Run two saved plans on several engines."""

    engines: tuple[str, ...] = ("reference", "xla")
    """Which: reference, xla, ray, beam, flower."""
    output: Path = Path("runs/engines")
    """Folder of the plan files."""
    rounds: int = 5
    """How often each plan runs; the first time it is compiled."""


def arguments() -> dict[str, tuple]:
    """Arguments of the plans, by name."""
    model, keys = (
        init(jax.random.key(0)),
        jax.random.split(jax.random.key(1), META_BATCH),
    )
    draw = lambda key: sample_task(key, 10 * LOCAL_STEPS).query
    points = jax.vmap(draw)(jax.random.split(jax.random.key(2), CLIENTS))
    batches = jax.tree.map(lambda x: x.reshape(CLIENTS, LOCAL_STEPS, 10) / 5, points)
    tasks = jax.vmap(sample_task)(keys)
    return {
        "local_sgd": (model, batches),
        "maml_gradients": (model, np.float32(0.01), tasks),
    }


def start(engine: str, plan: Plan) -> Any:
    """A context that gives a function which runs the plan."""
    if engine == "ray":
        from drjax.backends import ray

        return closing(ray.compile(plan, workers=2))
    if engine == "beam":
        from drjax.backends import beam

        return closing(beam.compile(plan, workers=2))
    compiled: dict[str, Callable] = {
        "reference": drjax.backends.reference.compile,
        "xla": lambda plan: jax.jit(drjax.backends.xla.compile(plan)),
    }
    return nullcontext(compiled[engine](plan))


def run(path: Path, engine: str, args: tuple, rounds: int) -> tuple[list, list[float]]:
    """Flat results of a plan file on an engine, and the seconds of each run."""
    plan = drjax.load_plan(path)
    if engine == "flower":
        from drjax.backends.flower import Clients
        from examples.flower.simulation import simulate

        *shared, data = args
        return simulate(
            plan, data, lambda step: timed(partial(step, *shared, Clients()), rounds)
        )
    with start(engine, plan) as step:
        return timed(partial(step, *args), rounds)


def timed(step: Callable[[], Any], rounds: int) -> tuple[list, list[float]]:
    """Flat results of the last run, and the seconds of each."""
    seconds, out = [], None
    for _ in range(rounds):
        begin = time.perf_counter()
        out = jax.block_until_ready(step())
        seconds.append(time.perf_counter() - begin)
    return jax.tree.leaves(out), seconds


def main(config: Config) -> None:
    """Saves both plans, runs them, and prints a table.

    A difference is the largest in an array, over the largest number there.
    """
    table = Table("plan", "engine", "first run, s", "warm run, s", "difference")
    for name, args in arguments().items():
        path = config.output / f"{name}.drjax"
        plans()[name].save(path)
        expected, _ = run(path, "reference", args, 1)
        for engine in config.engines:
            result, seconds = run(path, engine, args, config.rounds)
            pairs = zip(result, expected, strict=True)
            far = max(
                float(np.max(np.abs(a - b)) / np.max(np.abs(b))) for a, b in pairs
            )
            table.add_row(
                name,
                engine,
                f"{seconds[0]:.2f}",
                f"{min(seconds[1:]):.4f}",
                f"{far:.1e}",
            )
    Console(width=88).print(table)


if __name__ == "__main__":
    main(tyro.cli(Config))
