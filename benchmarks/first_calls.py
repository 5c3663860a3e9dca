"""Measure the cost of first calls, and that of JAX functions or hand-written code.

    python -m benchmarks.first_calls             # all rows, some minutes
    python -m benchmarks.first_calls --quick     # each once
    python -m benchmarks.first_calls --only NAME # the rows whose names contain NAME
    python -m benchmarks.first_calls --tpu v5e:2x4  # also by the compiler of TPUs

Each is CPU time with cold caches: JAX's are emptied, and functions are defined again.
The two sides of a row take turns; which one is first changes. A ratio is the median of
those of turns, with its quartiles. Imports are measured in new processes. With `--tpu`
(which needs libtpu, and no TPU) float4 sums are also compiled for these. With `--out`
the table goes to `first_calls-jax-VERSION.md`.
"""

import functools
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import export, lax
from jax.sharding import PartitionSpec as P
from tqdm import tqdm

import drjax
from benchmarks import counts, report
from benchmarks.descent import Params, descend, loss
from benchmarks.long_programs import LONG_PROGRAMS
from benchmarks.probes import entered
from benchmarks.worker import taken
from drjax._plan_file.exported_stage import PLATFORMS

DEVICES, N, WIDTH, STEPS, BATCH = 8, 16, 16, 3, 4
_AXIS = "clients"
Action = Callable[[], Any]


@dataclass(frozen=True)
class Row:
    """What is compared.

    Attributes:
      name: What it is.
      limit: The most that ours may take, as a multiple of the other.
      ours: What ours is, and the other is, in words.
      other: The same of the other.
      make: From nothing to two new actions, ours and the other.
      mesh: Whether both run on a mesh of all devices.
      warm: Whether both were called before, so that caches are not emptied.
      tpu: Whether that mesh is one of TPU chips, for which both are only compiled.
    """

    name: str
    limit: float
    ours: str
    other: str
    make: Callable[[], tuple[Action, Action]]
    mesh: bool = False
    warm: bool = False
    tpu: bool = False


# -------------------------------------------------------------------------------------
# Programs


def _arguments() -> tuple[Params, jax.Array]:
    params = {name: jnp.ones((WIDTH, WIDTH)) for name in ("in", "out")}
    return params, jnp.ones((N, STEPS, BATCH, WIDTH))


def _types(args: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)


def _rounds(count: int) -> Callable:
    """Rounds of local descent, one after the other, by building blocks."""

    @drjax.program(clients=N)
    def rounds(params, x):
        for _ in range(count):
            new = drjax.map_fn(descend, (drjax.broadcast(params), x))
            params = drjax.reduce_mean(new)
        return params

    return rounds


def _rounds_in_a_loop(count: int) -> Callable:
    """The same, hand-written, in a loop over groups with running sums."""

    def rounds(params, x):
        for _ in range(count):

            def add(sums, x, params=params):
                return jax.tree.map(jnp.add, sums, descend(params, x)), None

            sums, _ = lax.scan(add, jax.tree.map(jnp.zeros_like, params), x)
            params = jax.tree.map(lambda y: y / N, sums)
        return params

    return rounds


def _rounds_by_vmap(count: int) -> Callable:
    """The same, hand-written, by `jax.vmap`."""

    def rounds(params, x):
        for _ in range(count):
            new = jax.vmap(descend, (None, 0))(params, x)
            params = jax.tree.map(lambda y: jnp.mean(y, 0), new)
        return params

    return rounds


# -------------------------------------------------------------------------------------
# Rows


def _auto() -> tuple[Action, Action]:
    fn, args = jax.value_and_grad(_total(_rounds(2))), _arguments()
    ours = drjax.jit(fn, groups_per_step="auto")
    fixed = drjax.jit(fn, groups_per_step=N)
    return lambda: ours(*args), lambda: fixed(*args)


def _auto_as_jit() -> tuple[Action, Action]:
    fn, args = jax.value_and_grad(_total(_rounds(2))), _arguments()
    ours = drjax.jit(fn, groups_per_step="auto")
    theirs = jax.jit(fn)
    return lambda: ours(*args), lambda: theirs(*args)


def _total(fn: Callable) -> Callable:
    return lambda *args: sum(jnp.sum(w) for w in jax.tree.leaves(fn(*args)))


_BOUNDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_CODES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _float4_hand_written() -> Callable:
    """A sum over devices in float4 with a float32 scale of 32 numbers."""

    def encode(x):
        x = x.reshape(*x.shape[:-1], -1, 32)
        scale = jnp.max(jnp.abs(x), -1, keepdims=True) / 6
        x = x / jnp.where(scale > 0, scale, 1)
        code = sum((jnp.abs(x) > bound).astype(jnp.uint8) for bound in _BOUNDS)
        code = code | (jnp.signbit(x).astype(jnp.uint8) << 3)
        return code[..., ::2] | (code[..., 1::2] << 4), scale

    def decode(code, scale):
        code = jnp.stack([code & 15, code >> 4], -1).reshape(*code.shape[:-1], 32)
        size = jnp.array(_CODES)[code & 7]
        x = jnp.where(code >= 8, -size, size) * scale
        return x.reshape(*x.shape[:-2], -1)

    @jax.shard_map(in_specs=P(_AXIS), out_specs=P(), check_vma=False)
    def total(x):
        own = x.sum(0).reshape(DEVICES, -1)
        swap = lambda y: lax.all_to_all(y, _AXIS, 0, 0, tiled=True)
        part = decode(*map(swap, encode(own))).sum(0)
        every = decode(*(lax.all_gather(y, _AXIS) for y in encode(part)))
        return every.reshape(x.shape[1:])

    return total


def _float4() -> tuple[Action, Action]:
    @drjax.program(clients=N)
    def program(x):
        return drjax.reduce_sum(x, wire="float4_e2m1fn")

    x = jax.ShapeDtypeStruct((N, 64, 128), jnp.float32)
    ours, theirs = jax.jit(program), jax.jit(_float4_hand_written())
    return (lambda: ours.lower(x).compile(), lambda: theirs.lower(x).compile())


def _unrolled(hand_written: bool) -> tuple[Action, Action]:
    args, fn = _types(_arguments()), _rounds(20)
    ours = drjax.jit(fn, groups_per_step=1)
    theirs = jax.jit(_rounds_in_a_loop(20) if hand_written else fn)
    return lambda: ours.lower(*args), lambda: theirs.lower(*args)


def _unrolled_gradient(hand_written: bool) -> tuple[Action, Action]:
    args = _types(_arguments())
    fn = jax.grad(_total(_rounds(20)))
    ours = drjax.jit(fn, groups_per_step=1)
    theirs = jax.jit(jax.grad(_total(_rounds_in_a_loop(20))) if hand_written else fn)
    return lambda: ours.lower(*args), lambda: theirs.lower(*args)


def _planned(program: str) -> tuple[Action, Action]:
    fn, types = LONG_PROGRAMS[program](3000)
    return lambda: drjax.make_plan(fn)(*types), lambda: jax.make_jaxpr(fn)(*types)


def _planned_and_lowered(program: str) -> tuple[Action, Action]:
    fn, types = LONG_PROGRAMS[program](3000)
    ours, theirs = drjax.jit(fn), jax.jit(fn)

    def traced_and_lowered() -> None:
        # Of another function, as JAX would not trace the same one again.
        jax.make_jaxpr(lambda *xs: fn(*xs))(*types)
        theirs.lower(*types)

    return lambda: ours.lower(*types), traced_and_lowered


def _mean(planned: bool) -> tuple[Action, Action]:
    leaves = [jax.ShapeDtypeStruct((N, 2, 1 + i % 8), jnp.float32) for i in range(3000)]
    program = drjax.program(clients=N)(drjax.reduce_mean)
    hand_written = lambda xs: jax.tree.map(lambda x: jnp.mean(x, 0), xs)
    ours = (drjax.jit if planned else jax.jit)(lambda xs: program(xs))
    theirs = jax.jit(hand_written)
    return lambda: ours.lower(leaves), lambda: theirs.lower(leaves)


def _mean_on_mesh() -> tuple[Action, Action]:
    leaves = [jax.ShapeDtypeStruct((N, 2, 1 + i % 8), jnp.float32) for i in range(3000)]
    program = drjax.program(clients=N)(drjax.reduce_mean)

    @jax.shard_map(in_specs=P(_AXIS), out_specs=P())
    def hand_written(xs):
        return [x / N for x in lax.psum([x.sum(0) for x in xs], _AXIS)]

    ours, theirs = jax.jit(lambda xs: program(xs)), jax.jit(hand_written)
    return lambda: ours.lower(leaves), lambda: theirs.lower(leaves)


def _eager(derive: Callable, calls: int) -> tuple[Action, Action]:
    """Calls outside of jit, after a first one."""
    args = _arguments()

    @drjax.program(clients=N)
    def program(params, x):
        copies = drjax.broadcast(params)
        return drjax.reduce_mean(drjax.map_fn(lambda w, x: loss(w, x[0]), (copies, x)))

    def hand_written(params, x):
        return jnp.mean(jax.vmap(lambda w, x: loss(w, x[0]), (None, 0))(params, x))

    def called(fn: Callable) -> Action:
        fn = derive(fn)
        jax.block_until_ready(fn(*args))
        return lambda: [jax.block_until_ready(fn(*args)) for _ in range(calls)]

    return called(program), called(hand_written)


_FILES = tempfile.TemporaryDirectory()


def _files(derived: Callable, count: int) -> tuple[Action, Action]:
    fn, args = derived(_rounds(count)), _types(_arguments())
    plan = drjax.make_plan(fn)(*args)
    path = Path(_FILES.name) / "plan.drjax"

    def saved_and_loaded() -> None:
        plan.save(path)
        drjax.load_plan(path)

    return saved_and_loaded, lambda: drjax.make_plan(fn)(*args)


def _files_by_hand(derived: Callable, count: int) -> tuple[Action, Action]:
    ours, _ = _files(derived, count)
    args, path = _types(_arguments()), Path(_FILES.name) / "hand-written"
    theirs = jax.jit(derived(_rounds_by_vmap(count)))

    def exported_and_loaded() -> None:
        exported = export.export(theirs, platforms=PLATFORMS)(*args)
        path.write_bytes(exported.serialize())
        export.deserialize(bytearray(path.read_bytes()))

    return ours, exported_and_loaded


def _files_and_lowering(count: int) -> tuple[Action, Action]:
    fn, args = _rounds(count), _types(_arguments())
    plan = drjax.make_plan(fn)(*args)
    path = Path(_FILES.name) / "plan.drjax"
    lower = lambda plan: jax.jit(drjax.backends.xla.compile(plan)).lower(*args)

    def saved_and_loaded() -> None:
        plan.save(path)
        lower(drjax.load_plan(path))

    return saved_and_loaded, lambda: lower(drjax.make_plan(fn)(*args))


ROWS = [
    Row("first call, two rounds", 1.2, '"auto"', "k = all", _auto),
    Row("first call, two rounds", 1.2, '"auto"', "jax.jit", _auto_as_jit),
    Row("compile a float4 sum", 1.2, "wire=", "hand-written", _float4, mesh=True),
    Row(
        "compile a float4 sum for TPUs",
        1.2,
        "wire=",
        "hand-written",
        _float4,
        mesh=True,
        tpu=True,
    ),
    Row("lower 20 rounds", 1.3, "k = 1", "jax.jit", lambda: _unrolled(False)),
    Row("lower 20 rounds", 1.3, "k = 1", "hand-written loop", lambda: _unrolled(True)),
    Row(
        "lower a gradient of 20 rounds",
        1.3,
        "k = 1",
        "jax.jit",
        lambda: _unrolled_gradient(False),
    ),
    *(
        Row(
            f"plan and lower 3000 equations {where}",
            2.0,
            "drjax.jit",
            "make_jaxpr, and lower by jax.jit",
            functools.partial(_planned_and_lowered, where),
        )
        for where in ("between maps", "on the server")
    ),
    *(
        Row(
            f"plan 3000 equations {where}",
            2.0,
            "make_plan",
            "make_jaxpr",
            functools.partial(_planned, where),
        )
        for where in ("between maps", "on the server")
    ),
    Row(
        "lower a mean of 3000 leaves", 1.5, "jax.jit", "jnp.mean", lambda: _mean(False)
    ),
    Row(
        "lower a mean of 3000 leaves", 1.5, "drjax.jit", "jnp.mean", lambda: _mean(True)
    ),
    Row(
        "lower a mean of 3000 leaves",
        1.5,
        "jax.jit",
        "shard_map",
        _mean_on_mesh,
        mesh=True,
    ),
    Row(
        "eager value",
        1.1,
        "program",
        "vmap",
        lambda: _eager(lambda f: f, 20),
        warm=True,
    ),
    Row(
        "eager gradient",
        1.1,
        "program",
        "vmap",
        lambda: _eager(jax.grad, 20),
        warm=True,
    ),
    Row(
        "a plan of 20 rounds",
        1.0,
        "save and load",
        "make_plan",
        lambda: _files(lambda f: f, 20),
    ),
    Row(
        "a plan of a gradient of 20 rounds",
        1.0,
        "save and load",
        "make_plan",
        lambda: _files(lambda f: jax.grad(_total(f)), 20),
    ),
    Row(
        "a plan of a gradient of 20 rounds",
        1.0,
        "save and load",
        "hand-written, by jax.export",
        lambda: _files_by_hand(lambda f: jax.grad(_total(f)), 20),
    ),
    Row(
        "a plan of 20 rounds, lowered",
        1.0,
        "save and load",
        "make_plan",
        lambda: _files_and_lowering(20),
    ),
]


# -------------------------------------------------------------------------------------
# Measurements


def _seconds_of_import(module: str) -> float:
    """CPU seconds of a new process that imports a module."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", f"import {module}"], env=env, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return sum(after[:2]) - sum(before[:2])


def _turns(row: Row, rounds: int) -> Iterator[tuple[float, float]]:
    """CPU seconds of ours and of the other, once for each round."""
    timed = _seconds if row.warm else taken
    for i in range(rounds):
        sides = row.make()
        seconds = {j: timed(sides[j]) for j in ((0, 1) if i % 2 else (1, 0))}
        yield seconds[0], seconds[1]


def _seconds(action: Action) -> float:
    """CPU seconds of an action, with the caches as they are."""
    start = time.process_time()
    action()
    return time.process_time() - start


def measure(
    rows: Sequence[Row],
    rounds: int,
    topology: str | None = None,
    show_progress: bool = True,
) -> list[tuple[Row, list[tuple[float, float]]]]:
    """For each row its pairs of CPU seconds, of ours and of the other."""
    results = []
    rows = [row for row in rows if topology or not row.tpu]
    for row in tqdm(rows, disable=not show_progress):
        chips = topology if row.tpu else None
        mesh = counts.mesh_of(_AXIS, DEVICES, chips) if row.mesh else None
        with entered(mesh):
            results.append((row, list(_turns(row, rounds))))
    return results


def measure_imports(rounds: int) -> tuple[Row, list[tuple[float, float]]]:
    """The same of imports, in new processes."""
    nothing: Any = lambda: None
    row = Row("import", 1.1, "drjax", "jax", nothing)
    both = lambda: (_seconds_of_import("drjax"), _seconds_of_import("jax"))
    pairs = [both() for _ in range(rounds)]
    return row, pairs


def markdown(results: Sequence[tuple[Row, list[tuple[float, float]]]]) -> str:
    """The table of `measure`, with what it was measured on."""
    rounds = len(results[0][1])
    body = []
    for row, pairs in results:
        ours, other = zip(*pairs, strict=True)
        body.append(
            [
                row.name,
                f"{row.ours} / {row.other}",
                f"{1e3 * statistics.median(ours):,.0f}",
                f"{1e3 * statistics.median(other):,.0f}",
                report.compared(ours, other),
                f"{row.limit:g}",
            ]
        )
    header = ["what", "compared", "ms", "other ms", "ratio", "limit"]
    return (
        f"JAX {jax.__version__}, {rounds} interleaved turns; CPU times, medians; "
        "ratios with their quartiles.\n\n" + report.table(header, body, keys=2) + "\n"
    )


def main() -> None:
    parser = counts.parser(__doc__, "each once", tpu=True)
    parser.add_argument("--only", default="", help="the rows with this in their names")
    parser.add_argument("--turns", type=int, default=7, help="how often, each")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", DEVICES)
    rounds = 1 if options.quick else options.turns
    rows = [row for row in ROWS if options.only in row.name]
    results = measure(rows, rounds, options.tpu)
    if options.only in "import":
        results.insert(0, measure_imports(rounds))
    counts.write(markdown(results), options.out, "first-calls")


if __name__ == "__main__":
    main()
