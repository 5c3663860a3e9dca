"""Measure the ways to move and combine groups, and hand-written code.

    python -m benchmarks.combinations          # n = 32 groups of 20 000 numbers
    python -m benchmarks.combinations --quick  # small groups
    python -m benchmarks.combinations --tpu v5e:2x4  # what the TPU compiler says

Each task is written with drjax (run by `jax.jit` and by `drjax.jit`), hand-written in a
`jax.shard_map`, and in plain `jax.numpy`, of which the compiler makes the collectives
(GSPMD). On 8 devices of the CPU: bytes that one device sends in collectives, and
temporary memory, both of which do not depend on the machine; and run time as a ratio to
the hand-written code, which is measured twice, in interleaved rounds. With `--out` the
table goes to `combinations-jax-VERSION.md`. With `--tpu` (which needs libtpu, and no
TPU) the counts are the TPU compiler's, and nothing runs:
`combinations-tpu-jax-VERSION.md`.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tqdm import tqdm

import drjax
from benchmarks import counts, moves
from benchmarks.report import spread
from drjax.compiled import Report

N, DEVICES = 32, 8
OURS, PLANNED, BASELINE, PLAIN = "drjax", "drjax.jit", "shard_map", "jax.numpy"
_AXIS = "clients"
_K = N // DEVICES
_PERMUTATION = [*range(N)][::-1]


def _sharded(fn: Callable, out: P, check_vma: bool = True) -> Callable:
    """`fn` of one device's groups, `[k, d]`, on all devices."""
    return jax.shard_map(fn, in_specs=P(_AXIS), out_specs=out, check_vma=check_vma)


def _program(fn: Callable) -> Callable:
    return drjax.program(clients=N)(fn)


def _shift(x):
    ring = [(i, (i + 1) % DEVICES) for i in range(DEVICES)]
    return jnp.concatenate([lax.ppermute(x[-1:], _AXIS, ring), x[:-1]])


def _reverse(x):
    return lax.ppermute(x[::-1], _AXIS, [(i, DEVICES - 1 - i) for i in range(DEVICES)])


def _traced_index():
    """An index of groups that the compiler does not know."""
    return (jnp.arange(N) * 7 + lax.optimization_barrier(jnp.int32(3))) % N


def _by_index(fn: Callable) -> Callable:
    return _sharded(lambda x: fn(x, _traced_index()), P(_AXIS), False)


def _columns(fn: Callable, x, gathered: bool = True):
    y = fn(lax.all_to_all(x, _AXIS, 1, 0, tiled=True))
    if not gathered:
        return lax.psum(y, _AXIS)
    return lax.all_gather(y, _AXIS, tiled=True)


def _logsumexp(x):
    largest = lax.pmax(x.max(0), _AXIS)
    return largest + jnp.log(lax.psum(jnp.exp(x - largest[None]).sum(0), _AXIS))


def _logsumexp_of_groups(x):
    largest = drjax.reduce_max(x)
    terms = drjax.map_fn(lambda x, m: jnp.exp(x - m), (x, drjax.broadcast(largest)))
    return largest + jnp.log(drjax.reduce_sum(terms))


def _fold_by_columns(x):
    """The fold of all groups of a part of the numbers, on each device."""

    def tree(states):
        while len(states) > 1:
            states = jnp.logaddexp(states[::2], states[1::2])
        return states[0]

    parts = tree(x).reshape(DEVICES, -1)
    own = tree(lax.all_to_all(parts, _AXIS, 0, 0, tiled=True))
    return lax.all_gather(own, _AXIS, tiled=True)


def _matrices(x):
    """Matrices near the identity, `[..., d / 16, 4, 4]`."""
    x = x.reshape(*x.shape[:-1], -1, 4, 4) / 16
    return x + jnp.broadcast_to(jnp.eye(4), x.shape)


def _product(matrices):
    """The product of `[k, ...]` matrices by a balanced tree."""
    while len(matrices) > 1:
        matrices = matrices[::2] @ matrices[1::2]
    return matrices[0]


def _product_of_devices(x):
    return _product(lax.all_gather(_product(_matrices(x)), _AXIS))


def _product_of_groups(x):
    neutral = jnp.broadcast_to(jnp.eye(4), (x.shape[1] // 16, 4, 4))
    return drjax.reduce(jnp.matmul, drjax.map_fn(_matrices, x), neutral)


def _own(index):
    """The part of an index `[n]` that is for the groups of the device."""
    return lax.dynamic_slice_in_dim(index, lax.axis_index(_AXIS) * _K, _K)


def _largest(x):
    """The maximum over the devices, NaN if there is one.

    `lax.pmax` of floats loses NaNs on CPUs (`benchmarks.refused`), and of integers in
    the order of the floats, with NaN above all, it does not.
    """
    flip = lambda i: jnp.where(i < 0, i ^ 0x7FFFFFFF, i)
    order = flip(lax.bitcast_convert_type(x, jnp.int32))
    order = lax.pmax(jnp.where(jnp.isnan(x), 0x7FFFFFFF, order), _AXIS)
    return lax.bitcast_convert_type(flip(order), jnp.float32)


def _argmax(x):
    group = lax.axis_index(_AXIS) * _K + jnp.arange(_K)
    attains = (x == _largest(x.max(0))[None]) | jnp.isnan(x)
    attained = jnp.where(attains, group[:, None], N)
    return lax.pmin(attained.min(0), _AXIS)


@jax.custom_vjp
def _maximum(x):
    return _largest(x.max(0))


def _maximum_and_residuals(x):
    largest = _maximum(x)
    less = x < lax.pcast(largest, _AXIS, to="varying")[None]
    attained = lax.psum(jnp.where(less, 0.0, 1.0).sum(0), _AXIS)
    return largest, (less, jnp.where(jnp.isnan(largest), largest, 1 / attained))


def _maximum_transposed(residuals, ct):
    less, share = residuals
    return (jnp.where(less, 0, lax.pcast(share * ct, _AXIS, to="varying")[None]),)


_maximum.defvjp(_maximum_and_residuals, _maximum_transposed)


def _largest_of_segments(x):
    return _largest(jax.ops.segment_max(x, _own(_by_many()), _MANY))


def _scores(largest: jax.Array) -> jax.Array:
    """What a program does with maxima, of which those of no group are infinite."""
    return jnp.tanh(largest).sum(0)


def _select(x):
    position = _traced_index()[0] - lax.axis_index(_AXIS) * _K
    own = lax.dynamic_index_in_dim(x, position.clip(0, _K - 1), keepdims=False)
    return lax.psum(jnp.where((position >= 0) & (position < _K), own, 0), _AXIS)


def _segments(x):
    ids = (lax.axis_index(_AXIS) * _K + jnp.arange(_K)) % 3
    return lax.psum(jax.ops.segment_sum(x, ids, 3), _AXIS)


def _many_segments(x):
    return lax.psum(jax.ops.segment_sum(x, _own(_by_many()), _MANY), _AXIS)


def _optimizer_step(x):
    return jnp.tanh(x) * 0.1


def _server(x):
    mean = lax.psum_scatter(x.sum(0), _AXIS, tiled=True) / N
    return x + lax.all_gather(_optimizer_step(mean), _AXIS, tiled=True)[None]


def _int8(x, block: int = 256):
    """A mean that devices exchange as int8, each block with a float32 scale."""

    def encode(x):
        scale = jnp.abs(x).reshape(*x.shape[:-1], -1, block).max(-1) / 127
        wide = jnp.repeat(scale, block, -1)
        return jnp.round(x / jnp.where(wide > 0, wide, 1)).astype(jnp.int8), scale

    def decode(codes, scale):
        return codes.astype(jnp.float32) * jnp.repeat(scale, block, -1)

    d = x.shape[1]
    width = -(-d // (DEVICES * block)) * block
    total = jnp.pad(x.sum(0) / N, (0, DEVICES * width - d)).reshape(DEVICES, width)
    exchange = functools.partial(
        lax.all_to_all, axis_name=_AXIS, split_axis=0, concat_axis=0, tiled=True
    )
    own = decode(*map(exchange, encode(total))).sum(0)
    gather = functools.partial(lax.all_gather, axis_name=_AXIS, tiled=True)
    return decode(*map(gather, encode(own)))[:d]


def _moved_to_columns(x):
    return lax.all_to_all(x, _AXIS, 1, 0, tiled=True)


def _constrained(x, spec: P):
    return lax.with_sharding_constraint(x, spec)


_median = functools.partial(jnp.median, axis=0)
# Products of float32 numbers, as `jnp.outer` has; TPUs multiply in bfloat16 otherwise.
_gram = lambda x: jnp.matmul(x, x.T, precision="highest")
_by_three = lambda: jnp.arange(N) % 3
_MANY = 100
_by_many = lambda: jnp.arange(N) * 7 % _MANY

# For each task: the program, the function of one device's groups with the layout of its
# result, and plain jax.numpy.
TASKS: dict[str, tuple[Callable, Callable, Callable]] = {
    "shift by one group": (
        lambda x: drjax.shift(x, 1),
        _sharded(_shift, P(_AXIS)),
        lambda x: jnp.roll(x, 1, axis=0),
    ),
    "known permutation": (
        lambda x: drjax.take(x, _PERMUTATION),
        _sharded(_reverse, P(_AXIS)),
        lambda x: x[np.array(_PERMUTATION)],
    ),
    "take, traced index": (
        lambda x: drjax.take(x, _traced_index()),
        _by_index(moves.take_by_sum),
        lambda x: _constrained(x[_traced_index()], P(_AXIS)),
    ),
    "median": (
        lambda x: drjax.reduce_columns(jnp.median, x),
        _sharded(functools.partial(_columns, _median), P(), False),
        _median,
    ),
    "gradient of a median": (
        jax.grad(_program(lambda x: drjax.reduce_columns(jnp.median, x).sum())),
        jax.grad(
            lambda x: _sharded(functools.partial(_columns, _median), P(), False)(
                x
            ).sum()
        ),
        jax.grad(lambda x: _median(x).sum()),
    ),
    "Gram matrix": (
        lambda x: drjax.reduce_columns(lambda c: jnp.outer(c, c), x, sum=True),
        _sharded(functools.partial(_columns, _gram, gathered=False), P()),
        _gram,
    ),
    "logsumexp": (
        _logsumexp_of_groups,
        _sharded(_logsumexp, P()),
        lambda x: jax.nn.logsumexp(x, axis=0),
    ),
    "fold by logaddexp": (
        lambda x: drjax.reduce(jnp.logaddexp, x, -jnp.inf),
        _sharded(_fold_by_columns, P(), False),
        lambda x: jnp.logaddexp.reduce(x, axis=0),
    ),
    "product of matrices": (
        _product_of_groups,
        _sharded(_product_of_devices, P(), False),
        lambda x: _product(_matrices(x)),
    ),
    "gradient of a product": (
        jax.grad(_program(lambda x: _product_of_groups(x).sum())),
        jax.grad(lambda x: _sharded(_product_of_devices, P(), False)(x).sum()),
        jax.grad(lambda x: _product(_matrices(x)).sum()),
    ),
    "put, traced index": (
        lambda x: drjax.put(x, _traced_index(), add=True),
        _by_index(moves.put_by_sum),
        lambda x: _constrained(jnp.zeros_like(x).at[_traced_index()].add(x), P(_AXIS)),
    ),
    "group of the maximum": (
        drjax.reduce_argmax,
        _sharded(_argmax, P()),
        lambda x: jnp.argmax(x, axis=0),
    ),
    "gradient of a maximum": (
        jax.grad(_program(lambda x: jnp.sin(drjax.reduce_max(x)).sum())),
        jax.grad(lambda x: jnp.sin(_sharded(_maximum, P())(x)).sum()),
        jax.grad(lambda x: jnp.sin(x.max(0)).sum()),
    ),
    "slice of one group": (
        lambda x: drjax.select(x, _traced_index()[0]),
        _sharded(_select, P()),
        lambda x: x[_traced_index()[0]],
    ),
    "sum of 3 segments": (
        lambda x: drjax.reduce_sum(x, by=_by_three(), num=3),
        _sharded(_segments, P()),
        lambda x: jax.ops.segment_sum(x, _by_three(), 3),
    ),
    "sum of 100 segments": (
        lambda x: drjax.reduce_sum(x, by=_by_many(), num=_MANY),
        _sharded(_many_segments, P()),
        lambda x: jax.ops.segment_sum(x, _by_many(), _MANY),
    ),
    "gradient of 100 segments": (
        jax.grad(
            _program(
                lambda x: jnp.sum(drjax.reduce_sum(x, by=_by_many(), num=_MANY) ** 2)
            )
        ),
        jax.grad(lambda x: jnp.sum(_sharded(_many_segments, P())(x) ** 2)),
        jax.grad(lambda x: jnp.sum(jax.ops.segment_sum(x, _by_many(), _MANY) ** 2)),
    ),
    "maximum of 100 segments": (
        lambda x: _scores(drjax.reduce_max(x, by=_by_many(), num=_MANY)),
        _sharded(lambda x: _scores(_largest_of_segments(x)), P()),
        lambda x: _scores(jax.ops.segment_max(x, _by_many(), _MANY)),
    ),
    "sharded server, broadcast": (
        lambda x: drjax.map_fn(
            jnp.add,
            (
                x,
                drjax.broadcast(
                    _optimizer_step(drjax.reduce_mean(x, result="sharded"))
                ),
            ),
        ),
        _sharded(_server, P(_AXIS)),
        lambda x: x + _optimizer_step(_constrained(x.mean(0), P(_AXIS)))[None],
    ),
    "mean in int8": (
        lambda x: drjax.reduce_mean(x, wire="int8"),
        _sharded(_int8, P(), False),
        lambda x: x.mean(0),
    ),
    "transpose to columns": (
        lambda x: drjax.gather(x, result="sharded"),
        _sharded(_moved_to_columns, P(None, _AXIS)),
        lambda x: _constrained(x, P(None, _AXIS)),
    ),
}

# What is hand-written for TPUs: the compiler for CPUs has no ragged all-to-all.
ON_TPU = {
    "take, traced index": _by_index(moves.take_ragged),
    "put, traced index": _by_index(moves.put_ragged),
}


# Two levels, on 2 x 4 devices: `[pods, groups, d]`.
_LEVELS = {"pods": 2, "groups": N // 2}


def _sharded_levels(fn: Callable, out: P) -> Callable:
    """`fn` of one device's groups, `[1, k, d]`, on all devices."""
    return jax.shard_map(fn, in_specs=P("pods", "groups"), out_specs=out)


def _largest_mean(x):
    mean = lax.psum(x.sum((0, 1)), "groups") / _LEVELS["groups"]
    return lax.pmax(mean, "pods")


def _mean_of_all(x):
    return lax.psum(x.sum((0, 1)), ("pods", "groups")) / N


def _away_from_mean_of_pod(x):
    """A mean of each pod, which goes back to its groups, and a mean of all."""
    mean = lax.psum(x.sum(1, keepdims=True), "groups") / _LEVELS["groups"]
    return _mean_of_all(jnp.tanh(x - mean))


def _away(x):
    mean = drjax.reduce_mean(x, over="groups")
    far = drjax.map_fn(
        lambda x, mean: jnp.tanh(x - mean), (x, drjax.broadcast(mean, over="groups"))
    )
    return drjax.reduce_mean(far)


def _levels_program(fn: Callable) -> Callable:
    return drjax.program(placements=_LEVELS)(fn)


LEVELS: dict[str, tuple[Callable, Callable, Callable]] = {
    "levels: mean over both": (
        lambda x: drjax.reduce_mean(x),
        _sharded_levels(_mean_of_all, P()),
        lambda x: x.mean((0, 1)),
    ),
    "levels: largest mean of a pod": (
        lambda x: drjax.reduce_max(drjax.reduce_mean(x, over="groups"), over="pods"),
        _sharded_levels(_largest_mean, P()),
        lambda x: x.mean(1).max(0),
    ),
    "levels: away from the mean of a pod": (
        _away,
        _sharded_levels(_away_from_mean_of_pod, P()),
        lambda x: jnp.tanh(x - x.mean(1, keepdims=True)).mean((0, 1)),
    ),
    "levels: gradient of these": (
        jax.grad(_levels_program(lambda x: jnp.sum(_away(x) ** 2))),
        jax.grad(
            lambda x: jnp.sum(_sharded_levels(_away_from_mean_of_pod, P())(x) ** 2)
        ),
        jax.grad(
            lambda x: jnp.sum(jnp.tanh(x - x.mean(1, keepdims=True)).mean((0, 1)) ** 2)
        ),
    ),
}


def measure(numbers: int, rounds: int, show_progress: bool = True) -> list[dict]:
    """All measurements.

    Args:
      numbers: d, how many float32 numbers each group has, a multiple of 8.
      rounds: How often each program is timed.
      show_progress: Whether to show a progress bar.

    Returns:
      A dict for each task and implementation: `task`, `implementation`, `bytes` (a
      dict from kinds of collectives to bytes that one device sends), `temp` in
      bytes, and `time`, the ratios to the hand-written code, `[rounds]`.
    """
    rows: list[dict] = []
    values = np.random.RandomState(0).randn(N, numbers).astype(np.float32)
    kinds = (
        ({_AXIS: DEVICES}, (N,), _program, TASKS),
        ({"pods": 2, "groups": DEVICES // 2}, (*_LEVELS.values(),), _levels_program,
         LEVELS),
    )  # fmt: skip
    for axes, sizes, program, tasks in kinds:
        auto = (jax.sharding.AxisType.Auto,) * len(axes)
        mesh = jax.make_mesh((*axes.values(),), (*axes,), axis_types=auto)
        with jax.set_mesh(mesh):
            x = values.reshape(*sizes, numbers)
            x = jax.device_put(x, NamedSharding(mesh, P(*axes)))
            for task, versions in tqdm(tasks.items(), disable=not show_progress):
                rows += _measure_task(task, versions, program, x, rounds)
    return rows


def _measure_task(
    task: str, versions: tuple, decorate: Callable, x, rounds: int
) -> list[dict]:
    """The measurements of one task; see `measure`."""
    functions = _functions(task, versions, decorate)
    compiled: dict[str, Any] = {
        k: jax.jit(f).lower(x).compile() for k, f in functions.items()
    }
    sent = {k: Report.of(run) for k, run in compiled.items()}
    results = {k: np.asarray(f(x)) for k, f in compiled.items()}
    for name, result in results.items():
        tolerance = 0.02 if "int8" in task else 1e-4 * np.abs(results[PLAIN]).max()
        np.testing.assert_allclose(
            result, results[PLAIN], rtol=0, atol=tolerance, err_msg=f"{task}, {name}"
        )
    times = counts.times_in_turn(compiled, BASELINE, lambda: [x], rounds)
    return [
        {
            "task": task,
            "implementation": name,
            "bytes": counts.bytes_by_kind(sent[name]),
            "temp": sent[name].temp_bytes,
            "time": times[name],
        }
        for name in compiled
    ]


def _functions(task: str, versions: tuple, decorate: Callable) -> dict[str, Callable]:
    """The implementations of a task, by name."""
    ours, baseline, plain = versions
    program = ours if "gradient" in task else decorate(ours)
    return {
        OURS: jax.jit(program),
        PLANNED: drjax.jit(program),
        BASELINE: jax.jit(baseline),
        PLAIN: jax.jit(plain),
    }


def count_on_tpu(topology: str, numbers: int) -> list[dict]:
    """Count what the TPU compiler makes of the tasks: bytes and operations.

    Args:
      topology: `DEVICES` chips, such as "v5e:2x4"; they need not be there.
      numbers: As for `measure`.

    Returns:
      A dict for each task and implementation, as `measure` does: without `time`, with
      `flops`.
    """
    mesh = counts.mesh_of(_AXIS, DEVICES, topology)
    sharding = NamedSharding(mesh, P(_AXIS))
    x = jax.ShapeDtypeStruct((N, numbers), np.float32, sharding=sharding)
    rows = []
    with jax.set_mesh(mesh):
        for task, versions in tqdm(TASKS.items()):
            functions = _functions(task, versions, _program)
            if task in ON_TPU:
                functions[BASELINE] = jax.jit(ON_TPU[task])
            for name, fn in functions.items():
                compiled: Any = jax.jit(fn).lower(x).compile()
                report = Report.of(compiled)
                rows.append(
                    {
                        "task": task,
                        "implementation": name,
                        "bytes": counts.bytes_by_kind(report),
                        "temp": report.temp_bytes,
                        "flops": compiled.cost_analysis().get("flops", 0),
                    }
                )
    return rows


def markdown(rows: list[dict], numbers: int, topology: str | None = None) -> str:
    """The table of `measure`, with what it was measured on."""
    timed = "time" in rows[0]
    where, last = counts.place_of(DEVICES, topology), "nothing was run."
    if timed:
        last = (
            "time is relative to the hand-written `shard_map`, itself measured twice: "
            f"the median and the quartiles of {len(rows[0]['time'])} rounds in turn."
        )
    lines = [
        f"JAX {jax.__version__}, {where}, n = {N} groups of {numbers:,} float32 "
        f"numbers. Bytes are those that one device sends; {last}",
        "",
        "| task | written with | bytes sent | temporary bytes | "
        f"{'time' if timed else 'operations'} |",
        "|---|---|---|---:|---:|",
    ]
    for row in rows:
        task = row["task"] if row["implementation"] == OURS else ""
        cost = spread(row["time"]) if timed else f"{row['flops']:,.0f}"
        lines.append(
            f"| {task} | {row['implementation']} | {counts.as_text(row['bytes'])} | "
            f"{row['temp']:,} | {cost} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    options = counts.parser(__doc__, "small groups", tpu=True).parse_args()
    jax.config.update("jax_num_cpu_devices", DEVICES)
    numbers, rounds = (512, 3) if options.quick else (20_000, 30)
    if options.tpu:
        rows, kind = count_on_tpu(options.tpu, numbers), "combinations-tpu"
    else:
        rows, kind = measure(numbers, rounds), "combinations"
    counts.write(markdown(rows, numbers, options.tpu), options.out, kind)


if __name__ == "__main__":
    main()
