"""Count what moves of the slices of many groups cost, hand-written and with drjax.

    python -m benchmarks.moves                   # 2048, 100 000 and a million groups
    python -m benchmarks.moves --quick           # 2048 groups
    python -m benchmarks.moves --tpu v5e:2x4     # 2048, by the compiler of TPUs

Each task is written with drjax (run by `jax.jit` and by `drjax.jit`), and hand-written
in a `jax.shard_map`: rings of `ppermute`; one all-to-all padded to the most slices that
a pair of devices exchanges, with tables made by NumPy; and of an index that is data, on
CPU a reduce-scatter, on TPUs a ragged all-to-all. For 8 devices: CPU-seconds to lower
and to compile, of turns with cold caches, bytes that one device sends, and temporary
memory. Nothing is timed but the compiler; on CPU, results are compared. With `--out`
the table goes to `moves-jax-VERSION.md`, or with `--tpu` (which needs libtpu, and no
TPU) to `moves-tpu-jax-VERSION.md`.
"""

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tqdm import tqdm

import drjax
from benchmarks import counts
from benchmarks.report import spread
from drjax.compiled import Report

SIZES, DEVICES, TURNS = (2048, 100_000, 1_000_000), 8, 5
# Of each group. On TPUs a ragged all-to-all pads the slices of a device to 512 bytes.
NUMBERS, NUMBERS_ON_TPU = 4, 256
OURS, PLANNED, BASELINE = "drjax", "drjax.jit", "shard_map"
_AXIS = "clients"
_sharded = functools.partial(jax.shard_map, out_specs=P(_AXIS))


def _ring(x, k: int):
    """A shift by at most the groups of a device."""
    ring = [(i, (i + 1) % DEVICES) for i in range(DEVICES)]
    sent = lax.ppermute(x[-k:], _AXIS, ring)
    return jnp.concatenate([sent, x[:-k]])


def _padded(index: np.ndarray, n: int) -> Callable:
    """`x[index]`, by one all-to-all; each device gets each slice once."""
    k, m = n // DEVICES, DEVICES
    to = np.arange(n) // k
    keys, edge = np.unique((index // k * m + to) * k + index % k, return_inverse=True)
    pair, slot = keys // k, keys % k
    first = np.searchsorted(pair, np.arange(m * m))
    place = np.arange(len(pair)) - first[pair]
    width = int(place.max()) + 1
    sent = np.zeros((m, m * width), np.int32)
    sent[pair // m, pair % m * width + place] = slot
    position = (pair // m * width + place)[edge].astype(np.int32).reshape(m, k)

    def of_device(x, sent, position):
        received = lax.all_to_all(x[sent[0]], _AXIS, 0, 0, tiled=True)
        return received[position[0]]

    run = _sharded(of_device, in_specs=P(_AXIS))
    return lambda x, _: run(x, sent, position)


def take_by_sum(x, index):
    k = x.shape[0]
    position = index - lax.axis_index(_AXIS) * k
    own = ((position >= 0) & (position < k))[:, None]
    slices = jnp.where(own, x[position.clip(0, k - 1)], 0)
    return lax.psum_scatter(slices, _AXIS, tiled=True)


def put_by_sum(x, index):
    k = x.shape[0]
    own = lax.dynamic_slice_in_dim(index, lax.axis_index(_AXIS) * k, k)
    slices = jnp.zeros((k * DEVICES, x.shape[1]), x.dtype).at[own].add(x)
    return lax.psum_scatter(slices, _AXIS, tiled=True)


def _ragged(x, count: int, sizes, targets, received):
    starts = jnp.cumsum(sizes) - sizes
    empty = jnp.zeros((count, x.shape[1]), x.dtype)
    return lax.ragged_all_to_all(
        x, empty, starts, sizes, targets, received, axis_name=_AXIS
    )


def take_ragged(x, index):
    k, device = x.shape[0], lax.axis_index(_AXIS)
    owner = (index // k).reshape(DEVICES, k)
    order = jnp.argsort(owner.ravel() != device, stable=True)
    slices = x[(index[order] - device * k).clip(0, k - 1)]
    received = _ragged(
        slices,
        k,
        (owner == device).sum(1),
        (owner < device).sum(1),
        jnp.bincount(owner[device], length=DEVICES),
    )
    return received[jnp.argsort(jnp.argsort(owner[device], stable=True))]


def put_ragged(x, index):
    k, device = x.shape[0], lax.axis_index(_AXIS)
    owner = (index // k).reshape(DEVICES, k)
    earlier = jnp.where(jnp.arange(DEVICES)[:, None] < device, owner, DEVICES)
    received = _ragged(
        x[jnp.argsort(owner[device], stable=True)],
        k * DEVICES,
        jnp.bincount(owner[device], length=DEVICES),
        jnp.bincount(earlier.ravel(), length=DEVICES + 1)[:DEVICES],
        (owner == device).sum(1),
    )
    order = jnp.argsort(owner.ravel() != device, stable=True)
    slots = jnp.where(owner.ravel() == device, index - device * k, k)[order]
    return jnp.zeros_like(x).at[slots].add(received, mode="drop")


def tasks(n: int, on_tpu: bool) -> dict[str, tuple[Callable, Callable]]:
    """For each task: the program, and the hand-written function, both of `(x, index)`.

    Args:
      n: How many groups.
      on_tpu: Whether the compiler has a ragged all-to-all.
    """
    draw = np.random.RandomState(0)
    permutation, repeated = draw.permutation(n), draw.randint(0, n, n)
    ring = lambda k: _sharded(lambda x, _: _ring(x, k), in_specs=(P(_AXIS), P()))
    by_data = lambda fn: _sharded(fn, in_specs=(P(_AXIS), P()), check_vma=False)
    take, put = (take_ragged, put_ragged) if on_tpu else (take_by_sum, put_by_sum)
    squares = lambda fn: jax.grad(lambda x, i: jnp.sum(fn(x, i) ** 2))
    program = drjax.program(clients=n)
    known = lambda x, _: drjax.take(x, repeated)
    return {
        "shift by one group": (
            program(lambda x, _: drjax.shift(x, 1)),
            ring(1),
        ),
        "shift by one device": (
            program(lambda x, _: drjax.shift(x, n // DEVICES)),
            ring(n // DEVICES),
        ),
        "random permutation": (
            program(lambda x, _: drjax.take(x, permutation)),
            _padded(permutation, n),
        ),
        "known index": (program(known), _padded(repeated, n)),
        "gradient of a known index": (
            squares(program(known)),
            squares(_padded(repeated, n)),
        ),
        "take, traced index": (program(drjax.take), by_data(take)),
        "put, traced index": (
            program(lambda x, i: drjax.put(x, i, add=True)),
            by_data(put),
        ),
    }


def measure(
    sizes: tuple[int, ...], topology: str | None = None, turns: int = TURNS
) -> Iterator[dict]:
    """All counts.

    Args:
      sizes: Numbers of groups, multiples of `DEVICES`.
      topology: `DEVICES` TPU chips, such as "v5e:2x4", that need not be there; None:
        devices of the CPU.
      turns: How often each is lowered and compiled.

    Yields:
      A dict for each size, task and implementation: `n`, `task`, `implementation`,
      `lower` and `compile` in CPU-seconds, `[turns]`, `bytes` (a dict from kinds of
      collectives to bytes that one device sends), and `temp` in bytes.
    """
    mesh = counts.mesh_of(_AXIS, DEVICES, topology)
    for n in sizes:
        with jax.set_mesh(mesh):
            for task, (ours, baseline) in tqdm(tasks(n, bool(topology)).items()):
                yield from _measure_task(
                    task, (ours, baseline), mesh, n, not topology, turns
                )


def _measure_task(
    task: str, versions: tuple, mesh: Any, n: int, runs: bool, turns: int
) -> Iterator[dict]:
    """The measurements of one task; see `measure`."""
    ours, baseline = versions
    draw = np.random.RandomState(1)
    args = (
        draw.randn(n, NUMBERS if runs else NUMBERS_ON_TPU).astype(np.float32),
        draw.randint(0, n, n).astype(np.int32),
    )
    specs = P(_AXIS), P()
    shapes = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
        for x, spec in zip(args, specs, strict=True)
    ]
    functions: dict[str, Callable] = {
        OURS: lambda: jax.jit(ours),
        PLANNED: lambda: jax.jit(drjax.jit(ours)),
        BASELINE: lambda: jax.jit(baseline),
    }
    seconds: dict[str, list[tuple[float, float]]] = {k: [] for k in functions}
    last: dict[str, Any] = {}
    for _ in range(turns):
        for name, fn in functions.items():
            jax.clear_caches()
            begin = time.process_time()
            lowered: Any = fn().lower(*shapes)
            middle = time.process_time()
            last[name] = lowered.compile()
            seconds[name].append((middle - begin, time.process_time() - middle))
    if runs:
        placed = [
            jax.device_put(x, NamedSharding(mesh, spec))
            for x, spec in zip(args, specs, strict=True)
        ]
        first, *others = (np.asarray(compiled(*placed)) for compiled in last.values())
        for other in others:
            np.testing.assert_allclose(other, first, rtol=1e-4, atol=1e-4)
    for name, compiled in last.items():
        report, times = Report.of(compiled), np.transpose(seconds[name])
        yield {
            "n": n,
            "task": task,
            "implementation": name,
            "lower": times[0],
            "compile": times[1],
            "bytes": counts.bytes_by_kind(report),
            "temp": report.temp_bytes,
        }


def markdown(rows: list[dict], where: str) -> str:
    """The table of `measure`, with what it was compiled for."""
    lines = [
        f"JAX {jax.__version__}, {where}. Bytes are those that one device sends; the "
        "last column is CPU-seconds to lower and to compile, the medians and the "
        "quartiles of turns.",
        "",
        "| task | n | written with | bytes sent | temporary bytes | seconds |",
        "|---|---:|---|---|---:|---:|",
    ]
    for row in sorted(rows, key=lambda row: [*_names(rows)].index(row["task"])):
        first = row["implementation"] == OURS
        task, n = (row["task"], f"{row['n']:,}") if first else ("", "")
        sent = counts.as_text(row["bytes"])
        lines.append(
            f"| {task} | {n} | {row['implementation']} | {sent} | "
            f"{row['temp']:,} | {spread(row['lower'])} + {spread(row['compile'])} |"
        )
    return "\n".join(lines) + "\n"


def _names(rows: list[dict]) -> dict[str, None]:
    """The tasks in the order in which they were measured."""
    return dict.fromkeys(row["task"] for row in rows)


def main() -> None:
    options = counts.parser(__doc__, "2048 groups only", tpu=True).parse_args()
    jax.config.update("jax_num_cpu_devices", DEVICES)
    # A TPU's compiler takes minutes to sort more indices.
    sizes = SIZES[: 1 if options.quick or options.tpu else None]
    rows = [*measure(sizes, options.tpu)]
    of_each = NUMBERS_ON_TPU if options.tpu else NUMBERS
    where = counts.place_of(DEVICES, options.tpu)
    where = f"{where}, groups of {of_each} float32 numbers"
    kind = "moves-tpu" if options.tpu else "moves"
    counts.write(markdown(rows, where), options.out, kind)


if __name__ == "__main__":
    main()
