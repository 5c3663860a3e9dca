"""One process that builds and runs programs on command: JSON lines in, JSON lines out.

The driver starts one worker in its own environment and one in an environment with
Google's drjax, and asks them in turn, so that all timings are interleaved. Each
command is `{"do": name, ...arguments}`; each answer is one line, a result or
`{"error": text}`. Everything that libraries print goes to stderr. The driver sets the
number of devices in the environment.
"""

import contextlib
import gc
import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import drjax
from benchmarks.implementations import AXIS, IMPLEMENTATIONS, drjax_program
from benchmarks.long_programs import LONG_PROGRAMS
from benchmarks.probes import PROBES, entered, leak_makers
from benchmarks.tasks import TASKS, Task

_compiled: dict[str, Callable[[], Any]] = {}
_events = {"traced": 0, "compiled": 0}


def _count_events(event: str, duration_secs: float, **_: Any) -> None:
    if event == "/jax/core/compile/jaxpr_trace_duration":
        _events["traced"] += 1
    elif event == "/jax/core/compile/backend_compile_duration":
        _events["compiled"] += 1


def hello() -> dict[str, Any]:
    """Who is here."""
    jax.monitoring.register_event_duration_secs_listener(_count_events)
    ours = hasattr(drjax, "primitives")
    return {
        "jax": jax.__version__,
        "python": ".".join(map(str, sys.version_info[:3])),
        "drjax": "drjax" if ours else "google drjax",
        "version": importlib.metadata.version("drjax"),
    }


def mesh_of(devices: int) -> jax.sharding.Mesh:
    auto = (jax.sharding.AxisType.Auto,)
    return jax.make_mesh(
        (devices,), (AXIS,), axis_types=auto, devices=jax.devices()[:devices]
    )


def build(
    slot: str,
    implementation: str,
    task: str,
    n: int,
    devices: int,
    arrival: str,
    small: bool,
    until: str = "run",
) -> dict[str, Any]:
    """Trace and lower one program with cold caches; perhaps compile and run it.

    Args:
      until: The last step: "lower", "compile", or "run", for which data is made.

    Returns:
      CPU seconds of each step; if compiled, what the compiler says; if run, a checksum
      of the result. A program to run is kept under `slot`.
    """
    problem, mesh = TASKS[task], mesh_of(devices)
    program = IMPLEMENTATIONS[implementation](problem, n)
    types = _types(problem, n, mesh, arrival, small)
    with jax.set_mesh(mesh):
        with _cold():
            start = time.process_time()
            traced = program.trace(*types)
            after_trace = time.process_time()
            lowered = traced.lower()
            after_lower = time.process_time()
            compiled: Any = lowered.compile() if until != "lower" else None
            after_compile = time.process_time()
    answer: dict[str, Any] = {
        "trace_s": after_trace - start,
        "lower_s": after_lower - after_trace,
    }
    if compiled is None:
        return answer
    answer |= {
        "compile_s": after_compile - after_lower,
        "temp_bytes": compiled.memory_analysis().temp_size_in_bytes,
        "data_bytes": sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(types)),
        "flops": compiled.cost_analysis()["flops"],
        "hlo": compiled.as_text(),  # read by the driver, where drjax is our own
    }
    if until == "run":
        args = jax.tree.map(
            lambda x, t: jax.device_put(x, t.sharding), problem.make(n, small), types
        )
        _compiled[slot] = lambda: compiled(*args)
        leaves = jax.tree.leaves(_compiled[slot]())
        answer["checksum"] = float(sum(np.abs(np.asarray(x)).sum() for x in leaves))
    return answer


def _types(task: Task, n: int, mesh: Any, arrival: str, small: bool) -> tuple:
    """What a task's program takes, without making data for n groups."""
    params, data = task.make(1, small)
    data_spec = P(AXIS) if arrival == "sharded" else P()

    def typed(x, leading: tuple[int, ...], spec):
        shape = leading + x.shape[len(leading) :]
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=sharding)

    return (
        jax.tree.map(lambda x: typed(x, (), P()), params),
        jax.tree.map(lambda x: typed(x, (n,), data_spec), data),
    )


@contextlib.contextmanager
def _cold() -> Iterator[None]:
    """Empty caches, and no garbage collection meanwhile."""
    jax.clear_caches()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def taken(action: Callable[[], Any]) -> float:
    """CPU seconds of an action, with cold caches."""
    with _cold():
        start = time.process_time()
        action()
        return time.process_time() - start


def plan(task: str, n: int, chunk: int | None, small: bool) -> dict[str, float]:
    """CPU seconds of making a task's program ready for 8 devices, with cold caches."""
    problem, mesh = TASKS[task], mesh_of(8)
    types = _types(problem, n, mesh, "sharded", small)
    with jax.set_mesh(mesh):
        return _planning(drjax_program(problem, n), types, chunk)


def plan_long(program: str, equations: int) -> dict[str, float]:
    """As `plan`, for one of `LONG_PROGRAMS`."""
    fn, types = LONG_PROGRAMS[program](equations)
    return _planning(fn, types, None)


def _planning(fn: Any, types: tuple, chunk: int | None) -> dict[str, float]:
    planned = drjax.jit(fn, groups_per_step=chunk)
    return {
        "jaxpr_s": taken(lambda: jax.make_jaxpr(fn)(*types)),
        "plain_s": taken(lambda: jax.jit(fn).trace(*types).lower()),
        "planned_s": taken(lambda: planned.trace(*types).lower()),
    }


def run(slot: str, calls: int) -> float:
    """Wall seconds for each call of a program that was built."""
    program = _compiled[slot]
    jax.block_until_ready(program())  # wakes the threads
    start = time.perf_counter()
    for _ in range(calls):
        jax.block_until_ready(program())
    return (time.perf_counter() - start) / calls


def digits(n: int, chunk: int | None, equal: bool) -> dict[str, Any]:
    """The error of a float32 mean of n numbers, relative to float64, and its costs.

    Args:
      n: The number of groups.
      chunk: How many of them at once; 0: by `jax.jit`.
      equal: Whether all numbers are 0.1, whose roundings do not cancel.
    """
    random = np.random.default_rng(0).random(n, np.float32)
    x = np.full(n, 0.1, np.float32) if equal else random

    @drjax.program(clients=n)
    def mean(x):
        return drjax.reduce_mean(drjax.map_fn(lambda x: 1.0 * x, x))

    run = jax.jit(mean) if chunk == 0 else drjax.jit(mean, groups_per_step=chunk)
    x, exact = jnp.asarray(x), np.mean(x, dtype=np.float64)
    memory: Any = run.lower(x).compile().memory_analysis()
    error = abs(float(run(x)) / exact - 1)
    times = []
    for _ in range(9):
        start = time.perf_counter()
        jax.block_until_ready(run(x))
        times.append(time.perf_counter() - start)
    return {
        "error": error,
        "temp_bytes": memory.temp_size_in_bytes,
        "run_s": times,
    }


def drop(slot: str) -> None:
    _compiled.pop(slot, None)


def probe(name: str, devices: int | None, calls: int) -> float:
    """Wall seconds for each call of one of `PROBES`, caches warm."""
    with entered(None if devices is None else mesh_of(devices)):
        call = _probe(name, devices)
        call()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - start) / calls


_probes: dict[tuple[str, int | None], Callable[[], Any]] = {}


def _probe(name: str, devices: int | None) -> Callable[[], Any]:
    """The function to call; made, and called three times, once."""
    if (name, devices) not in _probes:
        mesh = None if devices is None else mesh_of(devices)
        data = jnp.arange(8.0)
        if mesh is not None:
            data = jax.device_put(data, NamedSharding(mesh, P(AXIS)))
        scalar = jnp.float32(2.0)
        call = PROBES[name](scalar, data)
        for _ in range(3):
            call()
        _probes[name, devices] = call
    return _probes[name, devices]


def compiles(name: str, devices: int | None) -> dict[str, int]:
    """How often JAX traces and compiles in two more calls of a warm probe."""
    with entered(None if devices is None else mesh_of(devices)):
        call = _probe(name, devices)
        before = dict(_events)
        for _ in range(2):
            call()
    return {key: _events[key] - before[key] for key in _events}


def leaks(name: str, count: int) -> dict[str, int]:
    """What stays alive of `count` functions that were made, used and forgotten."""
    make = leak_makers()[name]
    for _ in range(3):
        make()
    before_objects, before_entries = _alive()
    for _ in range(count):
        make()
    objects, entries = _alive()
    return {"objects": objects - before_objects, "entries": entries - before_entries}


def _alive() -> tuple[int, int]:
    """Objects that the garbage collector tracks; entries in tables of primitives."""
    jax.clear_caches()
    for _ in range(3):
        gc.collect()
    tables: tuple[Any, ...] = (
        ad.primitive_jvps,
        ad.primitive_transposes,
        batching.primitive_batchers,
        batching.fancy_primitive_batchers,
        *(getattr(mlir, name, {}) for name in ("_lowerings", "_platform_specific")),
    )
    sizes = [len(table) for table in tables if hasattr(table, "__len__")]
    return len(gc.get_objects()), sum(sizes)


_COMMANDS = {
    f.__name__: f
    for f in (hello, build, run, digits, drop, plan, plan_long, probe, compiles, leaks)
}


def main() -> None:
    """Answer commands until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = {"result": _COMMANDS[command.pop("do")](**command)}
        except Exception as error:  # the driver decides what to do about it
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
