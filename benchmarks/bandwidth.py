"""The bandwidth that compiled rounds ask for, and that of two published tables.

    python -m benchmarks.bandwidth --out benchmarks/results/bandwidth.md

A round of a small model, by `drjax.contrib.diloco`, is compiled for two slices of TPU
v5e. The compiled program has the schedule: after how many inner steps each exchange
starts, how many of them are between its start and its done, and how many bytes it
sends. The published sizes and times of a step, put into this schedule, give the
utilization of the accelerators for each bandwidth, by the simulation of
`examples.algorithms.bandwidth`. Data-parallel training is a round of one step. Nothing
is run, and no TPU is needed: `pip install libtpu`.
"""

import argparse
import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from tqdm import tqdm

from benchmarks.overlap import OUTER, mesh_of
from benchmarks.report import table, write
from drjax.compiled import Report
from drjax.compiled.hlo import Module
from drjax.compiled.schedule import Schedule
from drjax.contrib import diloco
from examples.algorithms import bandwidth
from examples.algorithms.bandwidth import Exchange
from examples.reproductions.bandwidth import GBITS, MODELS, Model, index_of, shown

SIZE, BATCH, WORKERS = 256, 8, 2
WIRE = "float4_e2m1fn"


def inner_step(w: Any, batch: Any) -> Any:
    """A step of one worker, whose parameters are `[layers, SIZE, SIZE]`."""

    def loss(w: Any) -> Any:
        x = jnp.einsum("bi,lij->bj", batch, w) - batch
        return jnp.mean(x.astype(jnp.float32) ** 2)

    value, grads = jax.value_and_grad(loss)(w)
    return w - jnp.asarray(0.01, w.dtype) * grads, value


@functools.cache
def exchanges(
    layers: int, H: int, fragments: int, delay: int, wire: str | None
) -> tuple[Exchange, ...]:
    """Those of a compiled round; `gbits` are of a model with a billion parameters."""
    mesh = mesh_of(WORKERS, "data")
    w = jax.ShapeDtypeStruct((layers, SIZE, SIZE), jnp.bfloat16)
    parts = diloco.fragments(w, fragments, scanned=".*")
    round_ = diloco.Round(
        inner_step, WORKERS, outer=OUTER, fragments=parts, delay=delay, mixing=0.5,
        wire=wire, params=lambda state: state,
    )  # fmt: skip

    def on(x: Any, *spec: str | None) -> Any:
        sharding = jax.NamedSharding(mesh, P(*spec))
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    state = jax.eval_shape(round_.init, w)
    theta, outer = jax.tree.map(on, (state.theta, state.outer))
    state = diloco.State(theta, outer, on(state.workers, "workers"))
    batches = jax.ShapeDtypeStruct((WORKERS, H, BATCH, SIZE), jnp.bfloat16)
    with jax.set_mesh(mesh):
        lowered = jax.jit(round_).lower(state, on(batches, "workers", None, "data"))
        compiled = lowered.compile()
    report = Report.of(compiled, mesh)
    sent = [x for x in report.collectives if x.between_slices]
    module = Module(compiled.as_text() or "")
    schedule, entry = Schedule(module), module.computations[module.entry]
    place = {x.name: i for i, x in enumerate(entry)}
    sent.sort(key=lambda x: place[x.name])
    legs, rest = divmod(len(sent), fragments)
    if rest:
        raise ValueError(f"{len(sent)} exchanges are those of no {fragments} fragments")

    def steps(flops: int | None) -> int:
        """How many inner steps have so many operations: all H have the program's."""
        count, rest = divmod((flops or 0) * H, schedule.flops(entry) or 1)
        if rest:
            raise ValueError("the schedule has a part of an inner step in one place")
        return count

    def exchange(i: int) -> Exchange:
        """The i-th of the program."""
        x, (slices,) = sent[i], parts.parts[i // legs].leaves.values()
        of_part = (
            range(layers) if slices is None else range(layers)[slices[0] :: fragments]
        )
        chips = mesh.size // WORKERS
        bits = 8 * chips * x.bytes / (layers * SIZE * SIZE)
        before = schedule.flops(entry[: place[x.name]])
        return Exchange(steps(before), steps(x.hidden_flops), of_part, bits)

    return tuple(map(exchange, range(len(sent))))


def of_line(model: Model, line: str) -> tuple[list[Exchange], int]:
    """The exchanges of a published line, compiled, with the model's size; and its H."""
    settings = model.settings(line)
    H, fragments = settings.get("H", 1), settings.get("fragments", 1)
    wire, delay = WIRE if "fp4" in line else None, settings.get("delay", 0)
    # Numbers in few bits have two exchanges, with an inner step for each of them.
    delay *= 2 if wire else 1
    small = exchanges(model.layers, H, fragments, delay, wire)
    return [x._replace(gbits=x.gbits * model.billions) for x in small], H


class Line(NamedTuple):
    """The bandwidths that a compiled schedule needs: indices in the tables' grid."""

    name: str
    layers: np.ndarray  # as the tables have it: a layer is sent when it has gradients
    steps: np.ndarray  # as it is compiled: a fragment is sent after the step
    quoted: tuple[float, ...]

    @property
    def off(self) -> np.ndarray:
        """Steps of the grid from the published ones."""
        return self.layers - index_of(self.quoted)


def measure(models: Iterable[Model] = MODELS) -> list[Line]:
    """The lines of the tables."""
    cells = [(model, line) for model in models for line in model.quoted]
    lines = []
    for model, line in tqdm(cells):
        sent, H = of_line(model, line)
        layers = bandwidth.needed(sent, model.seconds, model.layers, H)
        whole = [x._replace(layers=range(1)) for x in sent]
        steps = bandwidth.needed(whole, model.seconds, 1, H)
        name = f"{model.table}: {model.billions:.0f}B, {line}"
        lines.append(Line(name, layers, steps, model.quoted[line]))
    return lines


def markdown(lines: list[Line]) -> str:
    """The table, and how far it is from the published ones."""
    off = np.abs([x.off for x in lines])
    text = (
        f"JAX {jax.__version__}, the compiler for TPU v5e, {WORKERS} slices. Gbit/s "
        "for a share of time in which accelerators compute, in brackets the published: "
        "Table 4 of arXiv 2501.18512, Table 6 of arXiv 2503.09799, whose grid has "
        f"steps of 21 %. Of {off.size} numbers {(off == 0).sum()} are equal, "
        f"{(off <= 1).sum()} within one step, all within {off.max()}. As in these "
        "tables a layer is sent as soon as it has its gradients. "
        f"In fp4 (`{WIRE}`) a fragment has two exchanges, and one step of delay "
        "for each; where the papers count 4 bits, it sends 5, those of scales "
        "included.\n\n"
    )
    columns = ["table, model", *(f"{target:.0%}" for target in bandwidth.TARGETS)]
    compared, whole = [], []
    for x in lines:
        pairs = zip(shown(GBITS[x.layers]), shown(x.quoted), strict=True)
        compared.append([x.name, *(f"{ours} ({theirs})" for ours, theirs in pairs)])
        if "4: 10B" in x.name:
            whole.append([x.name, *shown(GBITS[x.steps])])
    after = (
        "## Fragments that are sent after a step\n\n"
        "As the compiler does it: an exchange starts when an inner step is over, and "
        "the step that waits for it does not begin before."
    )
    return f"{text}{table(columns, compared)}\n\n{after}\n\n{table(columns, whole)}\n"


def main() -> None:
    """Writes or prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    write(markdown(measure()), args.out)


if __name__ == "__main__":
    main()
