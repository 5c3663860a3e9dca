"""Count the bytes that DiLoCo hides behind inner steps: the TPU compiler's schedule.

    python -m benchmarks.overlap --out benchmarks/results/overlap.md

Each worker is a slice of TPU v5e, and workers exchange over the data center's network.
The chips of a slice divide each layer (`model`), or the batch of data (`data`).
In `a round a call`, Streaming DiLoCo by `drjax.contrib.diloco`, a fragment is sent
DELAY inner steps before it is received. In `a step a call`, trainers that compile one
inner step send and apply a fragment in branches of that program. The language models
are those of `experiments`. Nothing is run, and no TPU is needed: `pip install libtpu`.
With `--gpus` workers are hosts with H100s, too, which needs no GPU: `pip install
jax-cuda12-plugin jax-cuda12-pjrt`. With `--schedule` the collectives are printed.

Each program is compiled in a process of its own, which is ended after `--limit`
seconds; the table says so. With `--kept FILE` the line of each program is appended to a
file as soon as it is known. A run that was ended goes on where it was.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P
from tqdm import tqdm

import drjax
from benchmarks.report import table, write
from drjax.compiled import Report, Total, totals
from drjax.compiled.hlo import Module
from drjax.contrib import diloco
from examples.common.transformer import mean_loss
from experiments import config, machine, model

SIZE, BATCH, STEPS, DELAY, FRAGMENTS, MIXING = 512, 128, 20, 5, 2, 0.5
WIRES = None, "bfloat16", "int8", "float4_e2m1fn"
INNER, OUTER = optax.adam(1e-3), optax.sgd(0.7, 0.9, nesterov=True)
CONFIGS = Path(__file__).parents[1] / "configs/fig4"
MODELS = {  # of `experiments`, and a slice that holds what a worker has
    "350M": ("350m-n4.toml", "v5e:2x2"),
    "1B": ("1b-n4.toml", "v5e:2x2"),
    "8B": ("8b-n128.toml", "v5e:4x4"),
}
MODEL_WIRES = None, "int8", "float4_e2m1fn"
MODEL_STEPS, MODEL_DELAY, SEQUENCES, TOKENS = 6, 2, 8, 512
PEAK = 197e12  # operations of a chip in a second: cloud.google.com/tpu/docs/v5e


class Cell(NamedTuple):
    """What one process compiles."""

    way: str  # a key of WAYS, or of MODELS
    slices: int
    wire: str | None
    jit: str = "drjax.jit"
    axis: str = "model"
    ordered: bool = False  # what a chip does, instead of counts
    gpus: int = 0  # of a worker; 0: it is a slice of TPUs
    together: int = 0  # collectives that a GPU may run at a time; 0: the default


class Program(NamedTuple):
    """What is compiled for so many workers: a function, and its arguments' types."""

    fn: Callable
    args: tuple[Any, ...]


def loss(params, data):
    """Of a model with a layer for each fragment."""
    x = data
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.mean((x - data) ** 2)


def inner_step(state: Any, data: Any) -> Any:
    """A step of one worker: `(state, batch) -> (state, metrics)`."""
    value, grads = jax.value_and_grad(loss)(state["params"], data)
    updates, opt = INNER.update(grads, state["opt"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "opt": opt}, value


def a_round_a_call(workers: int, wire: str | None) -> Program:
    """A round: FRAGMENTS exchanges among STEPS steps."""
    round_ = diloco.Round(
        inner_step, workers, outer=OUTER, fragments=FRAGMENTS, delay=DELAY,
        mixing=MIXING, wire=wire,
    )  # fmt: skip
    batches = jax.ShapeDtypeStruct((workers, STEPS, BATCH, SIZE), jnp.float32)
    return Program(round_, (jax.eval_shape(round_.init, first_state()), batches))


def a_step_a_call(workers: int, wire: str | None) -> Program:
    """A step, after which fragment p may be due to be sent, or to be received."""
    interval = STEPS // FRAGMENTS

    @drjax.program(workers=workers)
    def step(shared: Any, own: Any, sent: Any, data: Any, number: Any):
        theta, momentum = map(list, shared)
        own, _ = drjax.map_fn(inner_step, (own, data))
        theta_i = list(own["params"])
        for p in range(FRAGMENTS):
            received = ((p + 1) * interval) % STEPS

            def send(theta_p, theta_ip, _):
                args = drjax.broadcast(theta_p), theta_ip
                return drjax.reduce_mean(drjax.map_fn(jnp.subtract, args), wire=wire)

            def receive(theta_p, momentum_p, theta_ip, delta):
                updates, momentum_p = OUTER.update(delta, momentum_p, theta_p)
                theta_p = optax.apply_updates(theta_p, updates)
                mix = lambda x, y: MIXING * x + (1 - MIXING) * y
                mixed = drjax.map_fn(mix, (theta_ip, drjax.broadcast(theta_p)))
                return theta_p, momentum_p, mixed

            due = number % STEPS == received - DELAY
            args = theta[p], theta_i[p], sent[p]
            sent[p] = jax.lax.cond(due, send, lambda *x: x[-1], *args)
            args = theta[p], momentum[p], theta_i[p], sent[p]
            due = number % STEPS == received
            kept = lambda *x: x[:-1]
            theta[p], momentum[p], theta_i[p] = jax.lax.cond(due, receive, kept, *args)
        return (theta, momentum), own | {"params": theta_i}, sent

    first = first_state()
    theta, momentum = first["params"], [*map(OUTER.init, first["params"])]
    of_all = lambda x: jax.ShapeDtypeStruct((workers, *x.shape), x.dtype)
    shared, own = jax.eval_shape(lambda: (theta, momentum)), jax.tree.map(of_all, first)
    data = jax.ShapeDtypeStruct((workers, BATCH, SIZE), jnp.float32)
    number = jax.ShapeDtypeStruct((), jnp.int32)
    return Program(step, (shared, own, shared[0], data, number))


def first_state() -> Any:
    """Of one worker: a layer for each fragment, and the state of its optimizer."""
    params = [jnp.zeros((SIZE, SIZE))] * FRAGMENTS
    return {"params": params, "opt": INNER.init(params)}


TOGETHER = "xla_gpu_experimental_parallel_collective_overlap_limit"
JITS = {"jax.jit": jax.jit, "drjax.jit": drjax.jit}
WAYS = {"a round a call": a_round_a_call, "a step a call": a_step_a_call}


def mesh_of(slices: int, axis: str, topology: str = "v5e:2x2") -> jax.sharding.Mesh:
    """A worker for each slice, whose chips are along the axis."""
    of = config.Machine(platform="tpu", topology=topology)
    chips = machine.devices(of, slices)
    return jax.sharding.Mesh(chips.reshape(slices, -1), ("workers", axis))


def hosts(count: int, gpus: int) -> jax.sharding.Mesh:
    """A worker for each host, of so many H100s, which divide each layer."""
    of = config.Machine(platform="cuda", topology=f"{count}x1x{gpus}")
    axes = "workers", "model"
    return jax.sharding.Mesh(machine.devices(of).reshape(count, -1), axes)


def compiled(
    way: str,
    mesh: jax.sharding.Mesh,
    wire: str | None,
    jit: Callable,
    **options: Any,
) -> jax.stages.Compiled:
    """Compile one of the programs; chips of a worker divide layers, or data."""
    (workers, axis), slices = mesh.axis_names, mesh.devices.shape[0]
    fn, args = WAYS[way](slices, wire)

    def spec(x: jax.ShapeDtypeStruct) -> P:
        lead = [workers] * (x.ndim > 0 and x.shape[0] == slices)
        free: list[str | None] = [None] * (x.ndim - len(lead))
        if axis == "model" and x.shape[-2:] == (SIZE, SIZE):
            free[-1] = axis
        if axis == "data" and x.shape[-2:] == (BATCH, SIZE):
            free[-2] = axis
        return P(*lead, *free)

    on = lambda x: jax.NamedSharding(mesh, spec(x))
    typed = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on(x)), args
    )
    with jax.set_mesh(mesh):
        return jit(fn).lower(*typed).compile(compiler_options=options)


def compiled_model(name: str, slices: int, wire: str | None, jit: Callable) -> Report:
    """Compile a round of a language model, tensor parallel over a slice, with SGD."""
    file, topology = MODELS[name]
    graph, params = model.shapes(config.load(CONFIGS / file).model)
    mesh = mesh_of(slices, "model", topology)

    def step(state: Any, tokens: Any) -> Any:
        lengths = jnp.full(tokens.shape[0], TOKENS)
        of = lambda params: mean_loss(nnx.merge(graph, params), tokens, lengths)[0]
        value, grads = jax.value_and_grad(of)(state["params"])
        sgd = lambda p, g: p - jnp.asarray(0.01, p.dtype) * g
        return {"params": jax.tree.map(sgd, state["params"], grads)}, value

    parts = diloco.fragments(params, FRAGMENTS, scanned="blocks")
    round_ = diloco.Round(
        step, slices, outer=OUTER, fragments=parts, delay=MODEL_DELAY, mixing=MIXING,
        wire=wire,
    )  # fmt: skip
    state = jax.eval_shape(round_.init, {"params": params})

    def on(x: Any, *spec: Any) -> Any:
        sharding = jax.NamedSharding(mesh, P(*spec))
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    def laid(tree: Any, *lead: str) -> Any:
        one = lambda x: jax.ShapeDtypeStruct(x.shape[len(lead) :], x.dtype)
        specs = model.specs(jax.tree.map(one, tree), "tensor parallel", "model")
        return jax.tree.map(lambda x, spec: on(x, *lead, *spec), tree, specs)

    workers = laid(state.workers, "workers")
    state = diloco.State(laid(state.theta), laid(state.outer), workers)
    shape = slices, MODEL_STEPS, SEQUENCES, TOKENS + 1
    tokens = on(jax.ShapeDtypeStruct(shape, jnp.int32), "workers")
    with jax.set_mesh(mesh):
        lowered = jit(round_).lower(state, tokens)
        return Report.of(lowered.compile(), mesh)


def between_slices(report: Report) -> tuple[Total, Total]:
    """All that is sent between slices, and what of it is hidden."""
    sent = [c for c in report.collectives if c.between_slices]
    every = totals(sent, lambda c: True)[True]
    hidden = totals([c for c in sent if c.hidden], lambda c: True)
    return every, hidden.get(True, Total(0, 0, 0, 0))


def needed(report: Report) -> float | None:
    """Gbit/s that a chip sends to other slices so that no step waits; None: it waits.

    What is hidden by the same steps shares their time, that of their matrix products
    at the chip's peak.
    """
    together: dict[Any, list[float]] = {}
    for c in report.collectives:
        if c.between_slices:
            if not c.hidden_flops:
                return None
            sent = together.setdefault(c.hidden_by, [0.0, c.hidden_flops / PEAK])
            sent[0] += 8e-9 * c.bytes
    return max(gbits / seconds for gbits, seconds in together.values())


def schedule(compiled: jax.stages.Compiled) -> str:
    """What a chip does, in order: inner steps, and what goes between slices."""
    module = Module(compiled.as_text() or "")

    def events(computation: str) -> list[str]:
        done: list[str] = []
        for x in module.computations[computation]:
            if x.opcode == "while":
                done.append(f"{module.trip_count(x)} steps")
            elif x.opcode in ("send", "recv-done"):
                done.append({"send": "send", "recv-done": "receive"}[x.opcode])
            elif x.opcode == "conditional":
                done += max((events(name) for _, name in x.called), key=len)
        return done

    done = events(module.entry)
    pairs = zip(done, ["", *done], strict=False)  # legs of several arrays are one
    return ", ".join(x for x, before in pairs if x != before)


def small_cells(slices: tuple[int, ...] = (2, 8)) -> list[Cell]:
    """The small programs."""
    return [
        Cell(way, n, wire, jit, axis)
        for n in slices
        for way in WAYS
        for axis in ("model", "data")
        for wire in WIRES
        for jit in JITS
        if way == "a round a call" or (axis, wire, jit) == ("model", None, "jax.jit")
    ]


def numbers_of(cell: Cell) -> str:
    """The dtype that is sent: without a wire, that of the parameters."""
    if cell.wire or cell.way not in MODELS:
        return cell.wire or "float32"
    return config.load(CONFIGS / MODELS[cell.way][0]).model.param_dtype


def title(cell: Cell) -> list[str]:
    """What a line of a table begins with."""
    numbers = numbers_of(cell)
    if cell.ordered:
        return [f"{cell.way}, {numbers}"]
    if cell.gpus:
        name = f"{cell.way}, {cell.slices} workers of {cell.gpus}, {cell.jit}"
        return [name, str(cell.together or "default"), numbers]
    name = f"{cell.way}, {cell.slices} slices"
    if cell.way in WAYS:
        name += f", {cell.axis}, {cell.jit}"
    return [name, numbers]


def cell_line(cell: Cell, show: bool = False) -> list[str]:
    """Compile one program: its line in a table."""
    jit = JITS[cell.jit]
    if cell.way in MODELS:
        report = compiled_model(cell.way, cell.slices, cell.wire, jit)
    else:
        slices, gpus = cell.slices, cell.gpus
        mesh = hosts(slices, gpus) if gpus else mesh_of(slices, cell.axis)
        options: dict[str, Any] = {TOGETHER: cell.together} if cell.together else {}
        program = compiled(cell.way, mesh, cell.wire, jit, **options)
        if cell.ordered:
            return [*title(cell), schedule(program)]
        report = Report.of(program, mesh)
    if show:
        print(*cell, report, sep="\n", file=sys.stderr)
    return [*title(cell), *measured(report, bool(cell.gpus))]


def measured(report: Report, of_hosts: bool) -> list[str]:
    """What a line of a table ends with; of hosts with GPUs without a bandwidth."""
    every, hidden = between_slices(report)
    counts = [f"{every.count}", f"{every.bytes:,}", f"{hidden.bytes / every.bytes:.0%}"]
    if of_hosts:
        return counts
    gbits = needed(report)
    return [*counts, "waits" if gbits is None else f"{gbits:,.2f}"]


def gpu_cells() -> list[Cell]:
    """Workers of one GPU, and of four, which exchange in each step too."""
    rounds = [
        Cell("a round a call", 2, wire, jit, gpus=gpus, together=together)
        for gpus, together in ((1, 0), (4, 0), (4, 4))
        for wire in WIRES
        for jit in JITS
    ]
    return [*rounds, Cell("a step a call", 2, None, "jax.jit", gpus=1)]


def measure(
    cells: list[Cell], limit: float, kept: Path | None = None, show: bool = False
) -> list[list[str]]:
    """The lines of cells, each from a process of its own, or of an earlier run."""
    text = kept.read_text() if kept and kept.exists() else ""
    known = {Cell(*cell): got for cell, got in map(json.loads, text.splitlines())}
    lines = []
    for cell in tqdm(cells):
        if cell not in known:
            known[cell] = _in_a_process(cell, limit, show)
            if kept:
                with kept.open("a") as file:
                    file.write(json.dumps([cell, known[cell]]) + "\n")
        lines.append(known[cell])
    return lines


def _in_a_process(cell: Cell, limit: float, show: bool) -> list[str]:
    command = [sys.executable, "-m", "benchmarks.overlap", "--cell", json.dumps(cell)]
    command += ["--schedule"] * show
    try:
        done = subprocess.run(
            command, timeout=limit, stdout=subprocess.PIPE, text=True, check=True
        )
    except subprocess.TimeoutExpired:
        late = [*title(cell), f"not compiled in {limit:.0f} s"]
        return late if cell.ordered else [*late, *[""] * (6 - len(late))]
    return json.loads(done.stdout.splitlines()[-1])


ORDERED = [Cell(way, 2, None, "jax.jit", ordered=True) for way in WAYS]
ORDERED.append(Cell("a round a call", 2, "int8", "jax.jit", ordered=True))


def markdown(
    lines: list[list[str]],
    models: list[list[str]],
    orders: list[list[str]],
    gpus: list[list[str]],
) -> str:
    """The tables."""
    columns = ["program", "numbers", "collectives", "sent", "hidden", "Gbit/s"]
    text = (
        f"JAX {jax.__version__}, the compiler for TPU v5e, 4 chips in a slice. "
        f"{FRAGMENTS} fragments of {SIZE * SIZE:,} parameters, {STEPS} inner steps in "
        f"a round, a delay of {DELAY}. Bytes are those that one chip sends between "
        "slices, for all fragments; hidden are those of collectives between whose "
        "start and done the schedule has inner steps. Gbit/s are what a chip must "
        "send and receive so that these steps do not wait, if their matrix products "
        f"run at the chip's peak of {PEAK / 1e12:.0f} Tflop/s; at half of it, half.\n\n"
        f"{table(columns, lines)}\n"
    )
    if models:
        text += (
            "\n## Language models\n\n"
            "Those of `experiments`, tensor parallel over a slice of 4 "
            f"chips (8B: 16), {SEQUENCES} sequences of {TOKENS} tokens in a step, "
            f"{MODEL_STEPS} steps in a round, a delay of {MODEL_DELAY}, by "
            f"`drjax.jit`:\n\n{table(columns, models)}\n"
        )
    if gpus:
        columns = ["program", "at a time", *columns[1:-1]]
        text += (
            "\n## GPUs\n\n"
            "The small program on hosts with H100s, each a worker whose GPUs divide "
            "each layer, by the compiler for GPUs; collectives at a time are its "
            f"option `{TOGETHER}`:\n\n{table(columns, gpus)}\n"
        )
    shown = table(["program", "schedule"], orders)
    return f"{text}\n## What a chip does, in order\n\n{shown}\n"


def main() -> None:
    """Writes or prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--schedule", action="store_true")
    parser.add_argument("--models", nargs="*", choices=MODELS, default=[*MODELS])
    parser.add_argument("--gpus", action="store_true", help="also for H100s")
    parser.add_argument("--limit", type=float, default=600, help="seconds a program")
    parser.add_argument("--kept", type=Path, help="lines of programs that are known")
    parser.add_argument("--cell", type=json.loads, help="one program, for itself")
    args = parser.parse_args()
    if args.cell:
        print(json.dumps(cell_line(Cell(*args.cell), args.schedule)))
        return
    models = [Cell(name, 2, wire) for name in args.models for wire in MODEL_WIRES]
    run = lambda cells: measure(cells, args.limit, args.kept, args.schedule)
    gpus = run(gpu_cells()) if args.gpus else []
    text = markdown(run(small_cells()), run(models), run(ORDERED), gpus)
    write(text, args.out)


if __name__ == "__main__":
    main()
