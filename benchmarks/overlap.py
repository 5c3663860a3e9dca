"""Count the bytes that DiLoCo hides behind inner steps: the TPU compiler's schedule.

    python -m benchmarks.overlap --out benchmarks/results/overlap.md

Each worker is a slice of TPU v5e, and workers exchange over the data center's network.
The chips of a slice divide each layer, or (`data`) the batch of data.
In `a round a call`, Streaming DiLoCo of `examples.algorithms`, a fragment is sent DELAY
inner steps before it is received. In `a step a call`, trainers that compile one inner
step send and apply a fragment in branches of that program. Nothing is run, and no TPU
is needed: `pip install libtpu`. With `--schedule` the collectives of each are printed.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P
from tqdm import tqdm

import drjax
from benchmarks.report import table
from drjax.compiled import Report, Total, totals
from examples.algorithms import streaming_diloco
from experiments import machine
from experiments.config import Machine

SIZE, BATCH, STEPS, DELAY, FRAGMENTS, MIXING = 512, 128, 20, 5, 2, 0.5
WIRES = None, "bfloat16", "int8", "float4_e2m1fn"
INNER, OUTER = optax.adam(1e-3), optax.sgd(0.7, 0.9, nesterov=True)


class Program(NamedTuple):
    """What is compiled for so many workers: a function, and its arguments' types."""

    fn: Callable
    args: tuple[Any, ...]


def loss(params, data, key):
    """Of a model with a layer for each fragment."""
    data = data + jax.random.normal(key)
    x = data
    for (w,) in params:
        x = jnp.tanh(x @ w)
    return jnp.mean((x - data) ** 2)


def a_round_a_call(workers: int, wire: str | None) -> Program:
    """A round: FRAGMENTS exchanges among STEPS steps."""
    fn = streaming_diloco.make_round(loss, INNER, OUTER, workers, DELAY, MIXING, wire)
    keys = lambda: jax.random.split(jax.random.key(0), (workers, STEPS))
    return Program(fn, (*start(workers), data_of(workers), jax.eval_shape(keys)))


def a_step_a_call(workers: int, wire: str | None) -> Program:
    """A step, after which fragment p may be due to be sent, or to be received."""
    interval = STEPS // FRAGMENTS

    @drjax.program(workers=workers)
    def step(shared: Any, own: Any, sent: Any, data: Any, keys: Any, number: Any):
        (theta, momentum), (theta_i, states) = map(list, shared), own

        def inner_step(params: Any, state: Any, data: Any, key: Any) -> Any:
            grads = jax.grad(loss)(params, data, key)
            updates, state = INNER.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        theta_i, states = drjax.map_fn(inner_step, (theta_i, states, data, keys))
        for p in range(FRAGMENTS):
            received = ((p + 1) * interval) % STEPS

            def send(theta_p, theta_ip, _):
                args = drjax.broadcast(theta_p), theta_ip
                delta = drjax.map_fn(optax.tree.sub, args)
                return drjax.reduce_mean(delta, wire=wire)

            def receive(theta_p, momentum_p, theta_ip, delta):
                updates, momentum_p = OUTER.update(delta, momentum_p, theta_p)
                theta_p = optax.apply_updates(theta_p, updates)
                mix = lambda x, y: MIXING * x + (1 - MIXING) * y
                mixed = drjax.map_fn(
                    lambda x, y: jax.tree.map(mix, x, y),
                    (theta_ip, drjax.broadcast(theta_p)),
                )
                return theta_p, momentum_p, mixed

            due = number % STEPS == received - DELAY
            args = theta[p], theta_i[p], sent[p]
            sent[p] = jax.lax.cond(due, send, lambda *x: x[-1], *args)
            args = theta[p], momentum[p], theta_i[p], sent[p]
            due = number % STEPS == received
            kept = lambda *x: x[:-1]
            theta[p], momentum[p], theta_i[p] = jax.lax.cond(due, receive, kept, *args)
        return (theta, momentum), (theta_i, states), sent

    shared, own = start(workers)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), workers))
    number = jax.ShapeDtypeStruct((), jnp.int32)
    return Program(step, (shared, own, shared[0], data_of(workers), keys, number))


def start(workers: int) -> Any:
    """The types of what is shared, and of each worker's own state."""
    theta = [[jax.ShapeDtypeStruct((SIZE, SIZE), jnp.float32)]] * FRAGMENTS
    return jax.eval_shape(
        lambda x: streaming_diloco.start(x, INNER, OUTER, workers), theta
    )


def data_of(workers: int) -> jax.ShapeDtypeStruct:
    """A batch of each worker."""
    return jax.ShapeDtypeStruct((workers, BATCH, SIZE), jnp.float32)


WAYS = {"a round a call": a_round_a_call, "a step a call": a_step_a_call}


def mesh_of(slices: int, axis: str) -> jax.sharding.Mesh:
    """A worker for each slice of four chips, which are along the axis."""
    chips = machine.devices(Machine(platform="tpu", topology="v5e:2x2"), slices)
    return jax.sharding.Mesh(chips.reshape(slices, -1), ("workers", axis))


def compiled(
    way: str, slices: int, wire: str | None, jit: Callable, axis: str = "model"
) -> Report:
    """Compile one of the programs, whose chips in a slice divide layers, or data."""
    mesh, (fn, args) = mesh_of(slices, axis), WAYS[way](slices, wire)

    def spec(x: jax.ShapeDtypeStruct) -> P:
        of_worker = x.ndim and x.shape[0] == slices
        layer = x.shape[-2:] == (SIZE, SIZE)
        divided = {"model": (None, axis), "data": (axis,)}[axis]
        batch = x.shape[-2:] == (BATCH, SIZE)
        own = divided if (layer if axis == "model" else batch) else ()
        return P(*["workers"] * bool(of_worker), *own)

    typed = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=jax.NamedSharding(mesh, spec(x))
        ),
        args,
    )
    with jax.set_mesh(mesh):
        return Report.of(jit(fn).lower(*typed).compile(), mesh)


def between_slices(report: Report) -> tuple[Total, Total]:
    """All that is sent between slices, and what of it is hidden."""
    sent = [c for c in report.collectives if c.between_slices]
    every = totals(sent, lambda c: True)[True]
    hidden = totals([c for c in sent if c.hidden], lambda c: True)
    return every, hidden.get(True, Total(0, 0, 0, 0))


def measure(slices: tuple[int, ...] = (2, 4), show: bool = False) -> list[list[str]]:
    """The lines of the table."""
    cells = [
        (n, way, axis, wire, name)
        for n in slices
        for way in WAYS
        for axis in ("model", "data")
        for wire in WIRES
        for name in ("jax.jit", "drjax.jit")
        if way == "a round a call" or (axis, wire, name) == ("model", None, "jax.jit")
    ]
    lines = []
    for n, way, axis, wire, name in tqdm(cells):
        jit = {"jax.jit": jax.jit, "drjax.jit": drjax.jit}[name]
        report = compiled(way, n, wire, jit, axis)
        if show:
            print(n, way, axis, wire, name, report, sep="\n")
        every, hidden = between_slices(report)
        share = hidden.bytes / every.bytes
        line = [f"{way}, {n} slices, {axis}, {name}", wire or "float32"]
        line.append(f"{every.count}")
        lines.append([*line, f"{every.bytes:,}", f"{hidden.bytes:,}", f"{share:.0%}"])
    return lines


def markdown(lines: list[list[str]]) -> str:
    """The table."""
    columns = ["program", "numbers", "collectives", "sent", "hidden", "share"]
    return (
        f"JAX {jax.__version__}, the compiler for TPU v5e, 4 chips in a slice. "
        f"{FRAGMENTS} fragments of {SIZE * SIZE:,} parameters, {STEPS} inner steps in "
        f"a round, a delay of {DELAY}. Bytes are those that one chip sends between "
        "slices, for all fragments; hidden are those of collectives between whose "
        "start and done the schedule has inner steps.\n\n"
        f"{table(columns, lines)}\n"
    )


def main() -> None:
    """Writes or prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--schedule", action="store_true")
    args = parser.parse_args()
    text = markdown(measure(show=args.schedule))
    if args.out:
        args.out.write_text(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
