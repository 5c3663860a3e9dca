"""Measure engines: tiny groups, against the reference backend, and many groups.

    python -m benchmarks.engines --engine ray               # needs '.[ray]'
    python -m benchmarks.engines --engine beam              # needs '.[beam]'
    python -m benchmarks.engines --engine beam --parquet 1000000
    python -m benchmarks.engines --engine flower --groups 10   # and 'flwr[simulation]'

A group trains a small perceptron for some steps, with noise from a key of its own. The
first run of each starts the workers and compiles; a run is one round on Ray, whose
workers stay, one on Flower, whose clients are simulated, and three on Beam, which
starts a pipeline for each. With `--parquet` that many groups of eight numbers are
written to Parquet files first, and reduced from there; the report has the peak memory
of the processes. With `--out` the tables go to `engines-ENGINE-jax-VERSION.md`.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import drjax
from benchmarks import report, run
from benchmarks.measured import Watched
from benchmarks.report import Goal
from benchmarks.worker import hello
from drjax._extras import needed
from drjax.backends.parquet import Parquet
from drjax.plan import Plan

LIMITS = {"ray": 0.5, "beam": 1.0}
ROUNDS = {"ray": 1, "beam": 3, "flower": 1}  # in a run
STEPS, BATCH, FEATURES, HIDDEN = 5, 8, 16, 32


def trained(n: int, rounds: int) -> Callable:
    """Rounds of local SGD of a perceptron, with n groups."""

    def loss(model, batch):
        x, y = batch
        hidden = jnp.tanh(x @ model["w1"] + model["b1"])
        return jnp.mean(((hidden @ model["w2"])[:, 0] - y) ** 2)

    def work(model, x, y):
        key = jax.random.fold_in(jax.random.key(0), drjax.partition_index())

        def step(m, batch):
            value, grads = jax.value_and_grad(loss)(m, batch)
            return jax.tree.map(lambda p, g: p - 0.05 * g, m, grads), value

        noise = 0.01 * jax.random.normal(key, x.shape)
        new, losses = jax.lax.scan(step, model, (x + noise, y))
        return jax.tree.map(jnp.subtract, new, model), losses.mean()

    @drjax.program(clients=n)
    def train(model, data):
        def one(model, _):
            deltas, losses = drjax.map_fn(work, (drjax.broadcast(model), *data))
            mean = drjax.reduce_mean(deltas)
            return jax.tree.map(jnp.add, model, mean), drjax.reduce_mean(losses)

        if rounds == 1:
            return one(model, None)
        return jax.lax.scan(one, model, length=rounds)

    return train


def arguments(n: int) -> tuple:
    draw = np.random.default_rng(0)
    normal = lambda *shape: draw.normal(size=shape).astype(np.float32)
    model = {
        "w1": 0.2 * normal(FEATURES, HIDDEN),
        "b1": np.zeros(HIDDEN, np.float32),
        "w2": 0.2 * normal(HIDDEN, 1),
    }
    return model, (normal(n, STEPS, BATCH, FEATURES), normal(n, STEPS, BATCH))


def start(engine: str, plan: Plan, **options: Any) -> AbstractContextManager:
    """A runner of two workers."""
    if engine == "ray":
        from drjax.backends import ray

        return ray.compile(plan, workers=2, **options)
    from drjax.backends import beam

    return beam.compile(plan, workers=2, **options)


def measure(engine: str, n: int, runs: int) -> dict[str, Any]:
    """Seconds of each run, of the engine and of the reference loop in turn."""
    model, data = arguments(n)
    plan = drjax.make_plan(trained(n, ROUNDS[engine]))(model, data)
    reference = drjax.backends.reference.compile(plan)
    on_device = jax.tree.map(jnp.asarray, (model, data))

    def in_turn(on_engine: Any, data: Any) -> dict[str, Any]:
        times: dict[str, list[float]] = {"engine": [], "reference": []}
        for _ in range(runs):
            result = _timed(times["engine"], lambda: on_engine(model, data))
            expected = _timed(times["reference"], lambda: reference(*on_device))
        pairs = zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True)
        far = max(float(np.max(np.abs(a - b))) for a, b in pairs)
        processes = len(on_engine.report.workers)
        return {"times": times, "difference": far, "processes": processes}

    if engine == "flower":
        from drjax.backends.flower import Clients
        from examples.flower.simulation import simulate

        return simulate(plan, data, lambda run: in_turn(run, Clients()))
    with start(engine, plan) as on_engine:
        return in_turn(on_engine, data)


def _timed(times: list[float], fn: Callable) -> Any:
    begin = time.perf_counter()
    result = jax.block_until_ready(fn())
    times.append(time.perf_counter() - begin)
    return result


# ---------------------------------------------------------------------------------
# Many groups, from files


def reduced(n: int) -> Callable:
    @drjax.program(clients=n)
    def moments(scale, x):
        y = drjax.map_fn(lambda s, x: jnp.tanh(s * x), (drjax.broadcast(scale), x))
        return drjax.reduce_mean(y), drjax.reduce_max(y)

    return moments


def write_groups(folder: Path, n: int, files: int = 16) -> np.ndarray:
    """Eight numbers for each of n groups; their sum of tanh in float64."""
    arrow, tables = (needed(m, "beam", "This") for m in ("pyarrow", "pyarrow.parquet"))
    draw, total = np.random.default_rng(0), np.zeros(8)
    for part, count in enumerate(np.diff(np.linspace(0, n, files + 1).astype(int))):
        x = draw.normal(size=(count, 8)).astype(np.float32)
        total += np.tanh(x.astype(np.float64)).sum(0)
        rows = arrow.FixedSizeListArray.from_arrays(x.ravel(), 8)
        path = folder / f"groups-{part:02}.parquet"
        tables.write_table(arrow.table({"x": rows}), path, row_group_size=16384)
    return total


def measure_files(engine: str, n: int) -> dict[str, Any]:
    """One run over files, with the most memory of each process."""
    with tempfile.TemporaryDirectory() as folder:
        total = write_groups(Path(folder), n)
        data = jax.ShapeDtypeStruct((n, 8), jnp.float32)
        plan = drjax.make_plan(reduced(n))(np.float32(1), data)
        groups, times = Parquet(Path(folder) / "groups-*.parquet"), []
        with start(engine, plan, block_size=4096) as on_engine, _Memory() as memory:
            mean, _ = _timed(times, lambda: on_engine(np.float32(1), groups))
            processes = len(on_engine.report.workers)
    far = float(np.max(np.abs(np.asarray(mean) - total / n)))
    return {
        "n": n,
        "seconds": times[0],
        "difference": far,
        "processes": processes,
        "peak": memory.peak,
    }


class _Memory(Watched):
    """The most resident memory of this process and of its descendants, in bytes."""

    seconds = 0.1

    def __init__(self):
        self.peak = {"this process": 0, "largest other process": 0}

    def look(self) -> None:
        parents, resident = {}, {}
        for path in Path("/proc").glob("[0-9]*/status"):
            try:
                lines = path.read_text().splitlines()
            except OSError:  # it has ended
                continue
            fields = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
            pid = int(path.parent.name)
            parents[pid] = int(fields["PPid"])
            resident[pid] = int(fields.get("VmRSS", "0 kB").split()[0]) * 1024
        for pid, size in resident.items():
            if pid == os.getpid():
                self._record("this process", size)
            elif _descends(pid, parents):
                self._record("largest other process", size)

    def _record(self, who: str, size: int) -> None:
        self.peak[who] = max(self.peak[who], size)


def _descends(pid: int, parents: dict[int, int]) -> bool:
    while pid in parents and pid != os.getpid():
        pid = parents[pid]
    return pid == os.getpid()


# ---------------------------------------------------------------------------------
# Tables


def markdown(engine: str, n: int, result: dict[str, Any]) -> str:
    parts = []
    who = hello()
    simulated = " (its simulation)" if engine == "flower" else ""
    parts.append(
        f"JAX {who['jax']}, Python {who['python']}, {os.cpu_count()} CPU cores, 2 "
        f"workers of {engine}{simulated}."
    )
    if "times" in result:
        times, rounds = result["times"], ROUNDS[engine]
        parts.append(f"## {n:,} tiny groups")
        if (limit := LIMITS.get(engine)) is not None:
            warm = report.ratio(times["engine"][1:], times["reference"][1:])
            goal: Goal = (
                f"{engine} / reference loop, warm",
                f"≤ {limit:g}",
                f"{warm:.2f}",
                warm <= limit,
            )
            parts.append(report.goal_table([goal]))
        rows = [
            [name, *(f"{t:.2f}" for t in times[name])]
            for name in ("engine", "reference")
        ]
        header = [
            f"seconds, rounds: {rounds}",
            "cold",
            *["warm"] * (len(times["engine"]) - 1),
        ]
        parts.append(report.table(header, rows))
    if "peak" in result:
        cells = [[who, f"{size / 1e6:,.0f}"] for who, size in result["peak"].items()]
        parts += [
            f"## {result['n']:,} groups from Parquet files",
            f"{result['seconds']:.1f} s, workers' start and compiling included.",
            report.table(["peak resident memory", "MB"], cells),
        ]
    parts.append(
        f"Largest difference from the reference: {result['difference']:.1g}; "
        f"{result['processes']} processes took part in the last run."
    )
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", choices=sorted(ROUNDS), required=True)
    parser.add_argument("--groups", type=int, default=10_000)
    parser.add_argument("--runs", type=int, default=4)
    parser.add_argument("--parquet", type=int, metavar="N")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.parquet:
        result = measure_files(options.engine, options.parquet)
    else:
        result = measure(options.engine, options.groups, options.runs)
    tables = markdown(options.engine, options.groups, result)
    print(tables)
    if options.out:
        many = "-parquet" if options.parquet else ""
        name = f"engines-{options.engine}{many}-jax-{jax.__version__}"
        run.write(options.out, result, name, {name: tables})


if __name__ == "__main__":
    main()
