"""Data larger than memory: the peak memory of a process for growing data.

    python -m benchmarks.out_of_core --out benchmarks/results

Each row is a process of its own, which takes one step of gradient descent on a model of
256 kB for groups of 1 MB of data, that are made when they are read: `drjax.jit` gets
them as `Groups`, or as one array, or the hand-written loop reads, computes and adds up
one chunk after the other, by `jax.jit` of the gradient of a chunk. Two rounds read the
data: the loss of a mean is not linear.

Groups read are those of a step; one more is for the types of the first group. CPU
seconds are those of a step that is compiled already: the median of five, and quartiles.
They have the time to make the data, but of an array, which exists before. The machine
may be shared: compare within a run, and only what is further apart than the quartiles.

A second table is of results of the groups, 256 kB each, which go to a file: by `out=`,
by a hand-written loop over chunks, or from the array that the program returns.

A third table is of a million tiny groups, one step of linear regression: CPU seconds
of a step, from arrays, from arrays by `Groups.from_batches`, from a Parquet file, and
from that file hand-written, Arrow's batches of rows to numpy.
"""

import argparse
import importlib
import itertools
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import drjax
from benchmarks.report import spread, table
from drjax.backends import Groups, Parquet

_ROWS, _WIDTH = 1024, 256  # of the data of a group: 1 MB
_CHUNK = 4  # groups at once
_SIZES = (64, 512, 2048)  # groups, and MB
_ARRAY = 512  # more would need several GB
_KINDS = ("Groups", "hand-written loop", "array")
_STEPS = 5  # of each process that are timed


class Source:
    """The data of the groups, made when they are read."""

    def __init__(self, n: int):
        self.n, self.reads = n, 0
        self._base = np.random.default_rng(0).normal(size=(_ROWS, _WIDTH))
        self._base = self._base.astype(np.float32)

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> np.ndarray:
        self.reads += 1
        return self._base * np.float32(1 + i / self.n)


def _of_group(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.mean(jnp.tanh(x @ w) ** 2)


def _planned(source: Source) -> tuple[Callable, Callable[[], Any]]:
    @drjax.program(clients=source.n)
    def loss(w, data):
        losses = drjax.map_fn(_of_group, (drjax.broadcast(w), data))
        return jnp.log(drjax.reduce_mean(losses))

    step = drjax.jit(jax.value_and_grad(loss), groups_per_step=_CHUNK)
    return step, lambda: Groups(source)


def _by_hand(source: Source) -> tuple[Callable, Callable[[], Any]]:
    of_chunk = lambda w, x: jax.vmap(_of_group, (None, 0))(w, x).sum()
    forward = jax.jit(of_chunk)
    backward = jax.jit(jax.grad(of_chunk))

    def step(w: jax.Array, source: Source) -> tuple[jax.Array, jax.Array]:
        chunks = [range(i, i + _CHUNK) for i in range(0, source.n, _CHUNK)]
        total, gradient = jnp.zeros(()), jnp.zeros_like(w)
        for chunk in chunks:
            total += forward(w, np.stack([source[i] for i in chunk]))
        for chunk in chunks:
            gradient += backward(w, np.stack([source[i] for i in chunk]))
            gradient.block_until_ready()  # or all chunks would wait in memory
        return jnp.log(total / source.n), gradient / total

    return step, lambda: source


def _as_array(source: Source) -> tuple[Callable, Callable[[], Any]]:
    def array() -> np.ndarray:
        data = np.empty((source.n, _ROWS, _WIDTH), np.float32)
        for i in range(source.n):
            data[i] = source[i]
        return data

    return _planned(source)[0], array


_MAKE: dict[str, Callable] = dict(
    zip(_KINDS, (_planned, _by_hand, _as_array), strict=True)
)


def measure(kind: str, n: int) -> dict[str, Any]:
    """Run one step in this process: its peak memory, reads, and seconds."""
    source = Source(n)
    step, data = _MAKE[kind](source)
    w = jnp.full((_WIDTH, _WIDTH), 0.01)
    whole = data() if kind == "array" else None
    jax.block_until_ready(step(w, data() if whole is None else whole))
    source.reads, seconds = 0, []
    for _ in range(_STEPS):
        start = time.process_time()
        out = step(w, data() if whole is None else whole)
        value, gradient = jax.block_until_ready(out)
        seconds.append(time.process_time() - start)
    return {
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "reads": source.reads // _STEPS,
        "seconds": seconds,
        "value": float(value),
        "norm": float(jnp.linalg.norm(gradient)),
    }


# ---------------------------------------------------------------------------------
# Results of the groups, in a file

_RESULT_KINDS = ("out=", "hand-written loop to a file", "returned array")
_RESULTS = (64, 512, 2048)  # groups


class ResultFile:
    """An array `[n, 256, 256]` in a file, written by slices and never mapped.

    What is mapped would count as memory of the process, whoever may take it back.
    """

    def __init__(self, file: Any, n: int):
        self._file, self.shape, self.dtype = file, (n, _WIDTH, _WIDTH), np.float32

    def __setitem__(self, index: slice, values: np.ndarray) -> None:
        self._file.seek(index.start * 4 * _WIDTH**2)
        self._file.write(memoryview(np.ascontiguousarray(values)).cast("B"))


def _features(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w)[:_WIDTH]


def measure_results(kind: str, n: int) -> dict[str, Any]:
    """Write the results of the groups in this process: its peak memory, and seconds."""
    source, w = Source(n), jnp.full((_WIDTH, _WIDTH), 0.01)
    program = drjax.program(clients=n)(
        lambda w, data: drjax.map_fn(_features, (drjax.broadcast(w), data))
    )
    of_chunk = jax.jit(jax.vmap(_features, (None, 0)))
    with tempfile.TemporaryFile() as file:
        target = ResultFile(file, n)

        def run() -> None:
            if kind == "out=":
                step = drjax.jit(program, groups_per_step=_CHUNK, out=target)
                step(w, Groups(source))
            elif kind == "returned array":
                step = drjax.jit(program, groups_per_step=_CHUNK)
                target[0:n] = np.asarray(step(w, Groups(source)))
            else:
                for i in range(0, n, _CHUNK):
                    x = np.stack([source[j] for j in range(i, i + _CHUNK)])
                    target[i : i + _CHUNK] = np.asarray(of_chunk(w, x))

        run()
        seconds = []
        for _ in range(_STEPS):
            start = time.process_time()
            run()
            seconds.append(time.process_time() - start)
        file.seek(0)
        total = 0.0
        while block := file.read(4 * _WIDTH**2):
            total += float(np.abs(np.frombuffer(block, np.float32)).sum())
    return {
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "seconds": seconds,
        "value": total / n,
    }


# ---------------------------------------------------------------------------------
# Tiny groups

_TINY = 1_000_000
_TINY_CHUNK = 200_000
_TINY_KINDS = ("arrays", "Groups.from_batches", "Parquet", "hand-written from Parquet")


def _tiny_loss(w: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    return (x @ w - y) ** 2


def measure_tiny(kind: str, n: int) -> dict[str, Any]:
    """Run one step for tiny groups in this process: its CPU seconds."""
    arrow = importlib.import_module("pyarrow")
    files = importlib.import_module("pyarrow.parquet")
    rng = np.random.default_rng(0)
    data = {"x": rng.normal(size=(n, 4)), "y": rng.normal(size=n)}
    data = {k: v.astype(np.float32) for k, v in data.items()}

    @drjax.program(clients=n)
    def loss(w, data):
        one = lambda w, d: _tiny_loss(w, d["x"], d["y"])
        return drjax.reduce_mean(drjax.map_fn(one, (drjax.broadcast(w), data)))

    of_chunk = lambda w, x, y: jax.vmap(_tiny_loss, (None, 0, 0))(w, x, y).sum()
    chunked = jax.jit(jax.value_and_grad(of_chunk))
    step = drjax.jit(jax.value_and_grad(loss), groups_per_step=_TINY_CHUNK)
    w = jnp.ones(4)
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/groups.parquet"
        rows = arrow.FixedSizeListArray.from_arrays(data["x"].reshape(-1), 4)
        files.write_table(arrow.table({"x": rows, "y": data["y"]}), path)

        def handwritten() -> tuple[Any, Any]:
            value, gradient = jnp.zeros(()), jnp.zeros(4)
            with files.ParquetFile(path) as file:
                for batch in file.iter_batches(_TINY_CHUNK):
                    x = batch["x"].flatten().to_numpy().reshape(-1, 4)
                    new = chunked(w, x, batch["y"].to_numpy())
                    value, gradient = value + new[0], gradient + new[1]
            return value / n, gradient / n

        def read(index: slice) -> dict[str, np.ndarray]:
            return {key: values[index] for key, values in data.items()}

        # Made once, as for the steps of a program: the first one reads the types.
        batches, parquet = Groups.from_batches(read, n), Parquet(path)
        runs: dict[str, Callable[[], Any]] = {
            "arrays": lambda: step(w, data),
            "Groups.from_batches": lambda: step(w, batches),
            "Parquet": lambda: step(w, parquet),
            "hand-written from Parquet": handwritten,
        }
        seconds = []
        for _ in range(1 + _STEPS):  # the first one compiles
            start = time.process_time()
            value, gradient = jax.block_until_ready(runs[kind]())
            seconds.append(time.process_time() - start)
    return {
        "seconds": seconds[1:],
        "value": float(value),
        "norm": float(jnp.linalg.norm(gradient)),
    }


def _in_process(kind: str, n: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.out_of_core", "--one", kind, str(n)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Print the table, and write it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", nargs=2)
    options = parser.parse_args()
    if options.one:
        kind, n = options.one
        run = measure
        if kind in _TINY_KINDS:
            run = measure_tiny
        elif kind in _RESULT_KINDS:
            run = measure_results
        print(json.dumps(run(kind, int(n))))
        return
    columns = ["data", "given as", "peak MB", "groups read", "CPU seconds", "loss"]
    rows = []
    for n, kind in itertools.product(_SIZES, _KINDS):
        if kind == "array" and n > _ARRAY:
            continue
        row = _in_process(kind, n)
        counts = [f"{row['peak']:.0f}", f"{row['reads']:,}", spread(row["seconds"])]
        rows.append([f"{n} MB", kind, *counts, f"{row['value']:.6f}"])
        print(*rows[-1], sep=", ", flush=True)
    results = []
    for n, kind in itertools.product(_RESULTS, _RESULT_KINDS):
        row = _in_process(kind, n)
        counts = [f"{row['peak']:.0f}", spread(row["seconds"]), f"{row['value']:.1f}"]
        results.append([f"{n // 4} MB", kind, *counts])
        print(*results[-1], sep=", ", flush=True)
    tiny = []
    for kind in _TINY_KINDS:
        row = _in_process(kind, _TINY)
        tiny.append([kind, spread(row["seconds"], 3), f"{row['value']:.6f}"])
        print(*tiny[-1], sep=", ", flush=True)
    text = f"JAX {jax.__version__}, CPU.\n\n{table(columns, rows)}\n"
    columns = ["results", "written by", "peak MB", "CPU seconds", "mean"]
    text += "\nResults of each group in a file:\n\n"
    text += f"{table(columns, results)}\n"
    text += "\nA million groups of 20 bytes:\n\n"
    text += f"{table(['given as', 'CPU seconds', 'loss'], tiny)}\n"
    if options.out:
        path = options.out / f"out-of-core-jax-{jax.__version__}.md"
        path.write_text(text)


if __name__ == "__main__":
    main()
