"""Measure plan files: saving, loading, tracing and lowering; file sizes.

    python -m benchmarks.plan_files            # the examples, about a minute
    python -m benchmarks.plan_files --quick    # the small one of them, once

What a process does without the file: it plans the program and lowers the plan. With it:
it loads the plan and lowers what it loaded. All is CPU time with cold caches. With
`--out` the tables go to `plan_files-jax-VERSION.md`.
"""

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

import drjax
from benchmarks import report, run
from benchmarks.report import Goal, Row, spread
from benchmarks.worker import hello, taken
from examples import plans
from examples.common.sinusoid import init
from examples.common.transformer import TransformerConfig
from examples.reproductions import diloco

BYTES = 1_000_000


@dataclass(frozen=True)
class Settings:
    """How much to measure.

    Attributes:
      programs: Names of programs.
      rounds: How often each is measured.
    """

    programs: tuple[str, ...]
    rounds: int = 7


def sinusoid() -> tuple[Callable, tuple]:
    """The round of `examples/plans.py`."""
    model = jax.eval_shape(init, jax.random.key(0))
    shape = (plans.CLIENTS, plans.LOCAL_STEPS, 10)
    points = jax.ShapeDtypeStruct(shape, jnp.float32)
    return plans.local_sgd, (model, (points, points))


def transformer() -> tuple[Callable, tuple]:
    """The round of `examples/reproductions/diloco.py`."""
    config = diloco.Config(
        only="H = 10", model=TransformerConfig(d_model=16, layers=1, heads=2)
    )
    task, (method,) = diloco.Task(config), diloco.list_methods(config)
    params, k = task.params(0), config.workers
    train_round = diloco.make_round(method, task.loss)
    batches = task.draw(task.deal(k), diloco.step_keys(0, 0, method.period, k))
    args = diloco.start(train_round, method, params), batches
    typed = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
    return train_round, jax.tree.map(typed, args)


PROGRAMS = {"local SGD, perceptron": sinusoid, "DiLoCo, transformer": transformer}
QUICK = Settings(tuple(PROGRAMS)[:1], 1)


def measure(settings: Settings, show_progress: bool = True) -> dict[str, Any]:
    """All measurements of one run, as JSON."""
    programs = {name: PROGRAMS[name]() for name in settings.programs}
    rows: dict[str, Row] = {name: {"program": name} for name in programs}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.drjax"
        turns = [name for _ in range(settings.rounds) for name in programs]
        for name in tqdm(turns, disable=not show_progress):
            for key, seconds in _once(*programs[name], path).items():
                rows[name].setdefault(key, []).append(seconds)
            rows[name]["bytes"] = path.stat().st_size
    machine = {**hello(), "cores": os.cpu_count()}
    return {"machine": machine, "rounds": settings.rounds, "rows": [*rows.values()]}


def _once(program: Callable, args: tuple, path: Path) -> dict[str, float]:
    planned = drjax.make_plan(program)(*args)
    lower = lambda plan: jax.jit(drjax.backends.xla.compile(plan)).lower(*args)
    result = {
        "plan_s": taken(lambda: drjax.make_plan(program)(*args)),
        "lower_s": taken(lambda: lower(planned)),
        "save_s": taken(lambda: planned.save(path)),
        "load_s": taken(lambda: drjax.load_plan(path)),
    }
    loaded = drjax.load_plan(path)
    return {**result, "lower_loaded_s": taken(lambda: lower(loaded))}


# ---------------------------------------------------------------------------------
# Tables


def goals(results: dict[str, Any]) -> list[Goal]:
    """Whether each goal of plan files is met."""
    rows = results["rows"]
    without = ("plan_s", "lower_s")
    return [
        report.worst(
            "save and load / plan and lower",
            1.0,
            rows,
            lambda row: _ratio(row, ("save_s", "load_s"), without),
        ),
        report.worst(
            "load, and lower what is loaded / plan and lower",
            1.0,
            rows,
            lambda row: _ratio(row, ("load_s", "lower_loaded_s"), without),
        ),
        report.worst("bytes of the file", BYTES, rows, lambda row: row["bytes"]),
    ]


def _ratio(row: Row, ours: tuple[str, ...], reference: tuple[str, ...]) -> float:
    total = lambda keys: [sum(t) for t in zip(*(row[k] for k in keys), strict=True)]
    return report.ratio(total(ours), total(reference))


def markdown(results: dict[str, Any]) -> str:
    who = results["machine"]
    keys = ("plan_s", "lower_s", "save_s", "load_s", "lower_loaded_s")
    body = [
        [
            row["program"],
            *(spread(1e3 * np.array(row[key]), 1) for key in keys),
            f"{row['bytes'] / 1e3:,.1f}",
        ]
        for row in results["rows"]
    ]
    header = [
        "program",
        "plan ms",
        "lower ms",
        "save ms",
        "load ms",
        "lower loaded ms",
        "file kB",
    ]
    return "\n\n".join(
        [
            f"JAX {who['jax']}, Python {who['python']}, {who['cores']} CPU cores, "
            f"{results['rounds']} rounds; CPU times with cold caches, medians "
            "and quartiles.",
            "## Goals",
            report.goal_table(goals(results)),
            "## Times and sizes",
            report.table(header, body, keys=1),
            "A file holds each stage of the groups twice, for one group and for a "
            "batch of any number, both for cpu, cuda and tpu; it holds no parameters.",
        ]
    )


def main() -> None:
    options = run.parse(__doc__)
    results = measure(QUICK if options.quick else Settings(tuple(PROGRAMS)))
    tables = markdown(results)
    print(tables)
    if options.out:
        name = f"plan_files-jax-{results['machine']['jax']}"
        run.write(options.out, results, name, {name: tables})


if __name__ == "__main__":
    main()
