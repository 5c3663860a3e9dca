"""Count what goes between TPU slices and inside them, hand-written and with drjax.

    python -m benchmarks.between_slices --out benchmarks/results

Each group is a slice of four chips of TPU v5e, over which the values of a group are
replicated, as the gradients of data-parallel steps are. Each task is written with drjax
(run by `jax.jit` and by `drjax.jit`), and hand-written in a `jax.shard_map`: `one axis`
is over the groups only, and each chip sends the whole value; in `both axes`, a chip
sends its fourth, which an all-gather inside the slice completes. Bytes are those that
one chip sends, and temporary memory, by the TPU compiler. Nothing is run, and no TPU is
needed: `pip install libtpu`. The table goes to `between-slices-jax-VERSION.md`.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tqdm import tqdm

import drjax
from benchmarks import counts
from benchmarks.report import table
from drjax._primitives.wire_codes import decode, encode
from drjax.compiled import Report
from drjax.plan import Wire
from experiments import machine
from experiments.config import Machine

SIZE, LAYERS, BATCH, STEPS, CHIPS = 1024, 4, 512, 8, 4
OURS, PLANNED, ONE, BOTH = "drjax", "drjax.jit", "one axis", "both axes"
_G, _D, _WIRE = "groups", "data", Wire("int8")
_WHOLE, _PARTS = P(), P(_G)
_mean = lambda x: lax.psum(x, _G) / lax.axis_size(_G)


def _loss(params, data):
    x = data
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.mean((x - data) ** 2)


def _train(params, data, gradient: Callable):
    """What STEPS steps subtract from the parameters of a group."""

    def step(new, batch):
        grads = gradient(new, batch)
        return jax.tree.map(lambda w, g: w - 0.01 * g, new, grads), None

    new, _ = lax.scan(step, params, data)
    return jax.tree.map(jnp.subtract, params, new)


def _divided(collective: Callable) -> Callable:
    """A collective on the fourth of a value, which all chips of a slice complete."""

    def run(x):
        part = x.shape[-1] // CHIPS
        own = lax.dynamic_slice_in_dim(x, lax.axis_index(_D) * part, part, x.ndim - 1)
        y = collective(own)
        return lax.all_gather(y, _D, axis=y.ndim - 1, tiled=True)

    return run


def _scattered(x):
    return lax.psum_scatter(x, _G, tiled=True) / lax.axis_size(_G)


def _codes(x, gather: Callable = lambda codes: codes[None]):
    """The mean of int8 codes; `gather` is of those that a chip has, of all groups."""
    m = lax.axis_size(_G)
    sent = encode(x.reshape(m, -1) / m, _WIRE)
    received = lax.all_to_all(sent, _G, 0, 0, tiled=True)
    own = encode(jnp.sum(decode(received, _WIRE), 0), _WIRE)
    every = gather(lax.all_gather(own, _G))
    return decode(every, _WIRE)


def _codes_of_part(x):
    rows = x.reshape(lax.axis_size(_G), CHIPS, -1)
    own = lax.dynamic_index_in_dim(rows, lax.axis_index(_D), 1, False)
    sums = _codes(own, lambda codes: lax.all_gather(codes, _D))
    return jnp.moveaxis(sums, 0, 1).reshape(x.shape)


def _hand_written(fn: Callable, both: bool, out: P = _WHOLE) -> Callable:
    """`fn` of the slice of one group, on each chip."""
    axes = {_G, _D} if both else {_G}
    of_chip = lambda x: jax.tree.map(fn, jax.tree.map(lambda x: x[0], x))
    return jax.shard_map(
        of_chip, in_specs=P(_G), out_specs=out, axis_names=axes, check_vma=False
    )


def _round(groups: int) -> dict[str, Callable]:
    """A round of DiLoCo: local steps, of which each averages the chips' gradients."""

    @drjax.program(groups=groups)
    def ours(params, data):
        work = lambda params, data: _train(params, data, jax.grad(_loss))
        deltas = drjax.map_fn(work, (drjax.broadcast(params), data))
        return jax.tree.map(jnp.subtract, params, drjax.reduce_mean(deltas))

    def hand_written(params, data, both: bool):
        def gradient(params, batch):
            grads = jax.grad(_loss)(params, batch)
            return lax.pmean(grads, _D) if both else grads

        def of_chip(params, data):
            deltas = _train(params, data[0], gradient)
            mean = _divided(_mean) if both else _mean
            return jax.tree.map(lambda w, d: w - mean(d), params, deltas)

        data_spec = P(_G, None, _D) if both else P(_G)
        axes = {_G, _D} if both else {_G}
        return jax.shard_map(
            of_chip, in_specs=(P(), data_spec), out_specs=P(), axis_names=axes,
            check_vma=False,
        )(params, data)  # fmt: skip

    by = lambda both: functools.partial(hand_written, both=both)
    return {OURS: ours, ONE: by(False), BOTH: by(True)}


def tasks(groups: int) -> dict[str, dict[str, Callable]]:
    """For each task, the implementations; all but the round are of one value."""
    program = drjax.program(groups=groups)
    mean = lambda **options: program(functools.partial(drjax.reduce_mean, **options))
    maximum = lambda x: lax.pmax(x, _G)
    gathered = lambda x: lax.all_gather(x, _G)
    square = lambda fn: lambda x: fn(x).reshape(SIZE, SIZE)
    pair = lambda ours, one, both, out=_WHOLE: {
        OURS: ours,
        ONE: _hand_written(one, False, out), BOTH: _hand_written(both, True, out),
    }  # fmt: skip
    return {
        "round of DiLoCo": _round(groups),
        "mean": pair(mean(), _mean, _divided(_mean)),
        "mean, int8": pair(mean(wire="int8"), square(_codes), _codes_of_part),
        "mean, sharded": pair(
            mean(result="sharded"), _scattered, _divided(_scattered), _PARTS
        ),
        "maximum": pair(program(drjax.reduce_max), maximum, _divided(maximum)),
        "gather": pair(program(drjax.gather), gathered, _divided(gathered)),
    }


def mesh_of(slices: int) -> jax.sharding.Mesh:
    """A group for each slice."""
    chips = machine.devices(Machine(platform="tpu", topology="v5e:2x2"), slices)
    return jax.sharding.Mesh(chips.reshape(slices, CHIPS), (_G, _D))


def measure(slices: tuple[int, ...] = (2, 4)) -> Iterator[dict[str, Any]]:
    """The counts of each task and implementation."""
    for n in slices:
        mesh = mesh_of(n)

        def on(shape, *spec, mesh=mesh):
            sharding = NamedSharding(mesh, P(*spec))
            return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

        for task, implementations in tqdm(tasks(n).items()):
            args: tuple[Any, ...] = (on((n, SIZE, SIZE), _G),)
            if task == "round of DiLoCo":
                data = on((n, STEPS, BATCH, SIZE), _G, None, _D)
                args = [on((SIZE, SIZE))] * LAYERS, data
            out = _PARTS if "sharded" in task else _WHOLE
            for name, fn, jit in (
                (OURS, implementations[OURS], jax.jit),
                (PLANNED, drjax.jit(implementations[OURS]), jax.jit),
                (ONE, implementations[ONE], jax.jit),
                (BOTH, implementations[BOTH], jax.jit),
            ):
                with jax.set_mesh(mesh):
                    run = jit(fn, out_shardings=NamedSharding(mesh, out))
                    report = Report.of(run.lower(*args).compile(), mesh)
                yield {"slices": n, "task": task, "implementation": name} | _sums(
                    report
                )


def _sums(report: Report) -> dict[str, Any]:
    sent = {True: 0, False: 0}
    for each in report.collectives:
        sent[each.between_slices] += each.bytes * (each.times or 0)
    return {
        "between": sent[True],
        "inside": sent[False],
        "temp": report.temp_bytes,
    }


def markdown(rows: list[dict[str, Any]]) -> str:
    """The table."""
    columns = [
        "task", "slices", "implementation", "between slices", "inside", "temporary"
    ]  # fmt: skip
    lines = [
        [
            row["task"],
            str(row["slices"]),
            row["implementation"],
            *(f"{row[key]:,}" for key in ("between", "inside", "temp")),
        ]
        for row in rows
    ]
    return (
        f"JAX {jax.__version__}, the compiler for TPU v5e, {CHIPS} chips in a slice. "
        f"Bytes of one chip in a call; values are {SIZE} × {SIZE} float32 numbers, and "
        f"{LAYERS} such layers in the round of {STEPS} steps.\n\n"
        f"{table(columns, lines)}\n"
    )


def main() -> None:
    """Writes or prints the table."""
    options = counts.parser(__doc__, "two slices only").parse_args()
    rows = [*measure((2,) if options.quick else (2, 4))]
    counts.write(markdown(rows), options.out, "between-slices")


if __name__ == "__main__":
    main()
