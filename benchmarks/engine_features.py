"""Features of the Ray engine, and what a good engineer writes with plain Ray.

    python -m benchmarks.engine_features --out benchmarks/results    # needs '.[ray]'

*Groups on several devices*: a gradient of residual layers whose hidden units are over
four virtual devices, of one process or of two. *Machines that come and go*: training
while workers are killed, at the same blocks for both. *State in checkpoints*: SCAFFOLD
whose control variates stay with workers, and are written in each round. *Seen from
outside*: callbacks, logs and traces. *Data that stays the same*: what `run.put` saves.
The baselines are in `benchmarks/actor_loops.py`. Rounds of both are in turn, each pair
in another order.
"""

import argparse
import contextlib
import importlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType

import drjax
from benchmarks import actor_loops, report, run
from benchmarks.actor_loops import LAYERS, RATE, SPECS
from benchmarks.measured import (
    HAND_WRITTEN,
    Own,
    Received,
    Serialized,
    seconds_of,
)
from benchmarks.report import Goal, spread
from benchmarks.worker import hello
from drjax.backends import Retry
from drjax.backends import ray as backend
from drjax.backends.engine import events

OURS, UNSEEN = "drjax", "drjax, not observed"
DEVICES, GANG = "Groups on four devices", "Groups on two processes"
STEADY, KILLS = "Workers that may come and go", "Workers that are killed"
RETRY, LOST = "A block that is lost", "A machine that is lost for good"
STATE, FEW = "State in checkpoints", "State in checkpoints, small rounds"
SEEN = "Seen from outside"
PUT = "Data that stays the same"
SENT = {
    DEVICES: "to the driver",
    GANG: "to the driver",
    STATE: "on disk",
    FEW: "on disk",
    PUT: "serialized",
}  # what is counted in bytes
SMALL, WORK, MEMORY, BYTES, GOODPUT = 1.5, 1.2, 1.2, 1.0, 0.95  # the goals
NO_CPU = {"num_cpus": 0}
Loops = dict[str, Callable[..., Any]]


@dataclass(frozen=True)
class Sizes:
    """How much to measure.

    Attributes:
      rounds, small: How often each round is timed, and a small one.
      groups, batch, width, hidden: Of layers on several devices.
      blocks, steps, features: Of training on machines that come and go: blocks of four
        groups, steps of a group, and features of a record.
      legs: How often training with kills is timed; each has `per_leg` rounds and
        `kills` kills.
      losses: How often a machine is lost for good.
      state, clients, local: Of SCAFFOLD: floats of a model, how many clients, and
        their local steps, of which small rounds have a fifth.
      data: Of what is put: groups, records of each, floats of a record.
    """

    rounds: int = 16
    small: int = 40
    groups: int = 8
    batch: int = 256
    width: int = 256
    hidden: int = 1024
    blocks: int = 24
    steps: int = 200
    features: int = 128
    legs: int = 4
    per_leg: int = 10
    kills: int = 2
    losses: int = 5
    state: int = 100_000
    clients: int = 16
    local: int = 50
    data: tuple[int, int, int] = (64, 4, 50_000)


QUICK = Sizes(2, 3, 4, 8, 8, 16, 4, 2, 8, 1, 2, 1, 1, 100, 4, 5, (4, 2, 1000))


@dataclass
class Measured:
    """What was measured of a point.

    Attributes:
      what: What ran, of which sizes, for people.
      limit: Of the ratio of times.
      seconds: Of each round, by who ran it.
      difference: The largest between results.
      peak, bytes: Memory of a worker and bytes, if measured, by who ran it.
      other: Whatever else, by name.
    """

    what: str
    limit: float
    seconds: dict[str, list[float]] = field(default_factory=dict)
    difference: float = 0.0
    peak: dict[str, float] = field(default_factory=dict)
    bytes: dict[str, float] = field(default_factory=dict)
    other: dict[str, Any] = field(default_factory=dict)


def difference(results: Any, others: Any) -> float:
    """The largest between two trees, as a share of the largest number."""
    pairs = [*zip(jax.tree.leaves(results), jax.tree.leaves(others), strict=True)]
    far = max(float(np.max(np.abs(a - b))) for a, b in pairs)
    return far / max(float(np.max(np.abs(b))) for _, b in pairs)


def in_turn(loops: Loops, model: Any, rounds: int) -> tuple[dict[str, list], dict]:
    """Seconds of rounds, and the last results: each goes on from its own."""
    models = dict.fromkeys(loops, model)
    return going_on(loops, models, rounds), models


def going_on(loops: Loops, models: dict[str, Any], rounds: int) -> dict[str, list]:
    """Seconds of rounds that begin with the models, by who runs, and replace them."""
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    for turn in range(rounds):
        for name in run.shuffled(loops, turn):
            begin = time.perf_counter()
            models[name] = jax.block_until_ready(loops[name](models[name]))
            seconds[name].append(time.perf_counter() - begin)
    return seconds


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@contextlib.contextmanager
def cluster() -> Iterator[Any]:
    """Ray on this machine, to which nodes can be added."""
    ray = importlib.import_module("ray")
    kind = importlib.import_module("ray.cluster_utils").Cluster
    head: dict[str, Any] = {"num_cpus": 2, "include_dashboard": False}
    head["object_store_memory"] = 1 << 30
    head["resources"] = dict.fromkeys(("ours", "theirs"), 1)
    result = kind(initialize_head=True, head_node_args=head)
    ray.init(address=result.address, log_to_driver=False)
    try:
        yield result
    finally:
        ray.shutdown()
        result.shutdown()


# ---------------------------------------------------------------------------------
# A group on several devices


def sharded_step(groups: int) -> Callable[..., Any]:
    @drjax.program(clients=groups)
    def step(model, x):
        def gradient(model, x):
            pin = lax.with_sharding_constraint
            model = [{k: pin(w, SPECS[k]) for k, w in one.items()} for one in model]
            return actor_loops.layers_gradient(model, x)

        grads = drjax.reduce_mean(drjax.map_fn(gradient, (drjax.broadcast(model), x)))
        return jax.tree.map(lambda w, g: w - RATE * g, model, grads)

    return step


def on_devices(sizes: Sizes, processes: int) -> Measured:
    """Rounds with groups on four devices each, of one process or of two."""
    width, hidden, devices = sizes.width, sizes.hidden, 4
    rounds = sizes.rounds if processes > 1 else sizes.small
    model = [
        {
            "up": normal(width, hidden, seed=i) / np.float32(width**0.5),
            "down": normal(hidden, width, seed=i) / np.float32(hidden),
        }
        for i in range(LAYERS)
    ]
    x = normal(sizes.groups, sizes.batch, width)
    mesh = AbstractMesh((devices,), ("model",), axis_types=(AxisType.Auto,))
    plan = drjax.make_plan(sharded_step(sizes.groups), group_mesh=mesh)(model, x)
    workers = 2 // processes
    kind = actor_loops.GangLoop if processes > 1 else actor_loops.ShardedLoop
    mega = 4e-6 * 2 * LAYERS * width * hidden
    result = Measured(
        f"{sizes.groups} groups, a model of {mega:.1f} MB, {workers} workers of "
        f"{processes} x {devices // processes} devices",
        WORK,
    )
    options: dict[str, Any] = {"ray_options": NO_CPU, "processes_per_group": processes}
    with (
        backend.compile(plan, workers=workers, **options) as on_ray,
        contextlib.closing(kind(x, devices)) as theirs,
    ):
        stored = on_ray.put(x)
        loops: Loops = {OURS: lambda m: on_ray(m, stored), HAND_WRITTEN: theirs}
        engine: Any = on_ray.engine
        pids = {OURS: [x.pid for x in engine.states()], HAND_WRITTEN: theirs.pids}
        for name, loop in loops.items():
            loop(model)  # compiles
            with Own(pids[name]) as memory:
                seconds_of(partial(loop, model), 2)
            result.peak[name] = memory.peak
            with Received() as received:
                loop(model)
            result.bytes[name] = received.bytes
        result.seconds, models = in_turn(loops, model, rounds)
        result.other["blocks"] = on_ray.report.stages[0].blocks
        result.difference = difference(models[OURS], models[HAND_WRITTEN])
    return result


# ---------------------------------------------------------------------------------
# Machines that come and go


@dataclass
class Training:
    """Descent of a perceptron by all groups, four in a block; data and first model."""

    sizes: Sizes

    def __post_init__(self) -> None:
        n, d = 4 * self.sizes.blocks, self.sizes.features
        x = normal(n, 64, d)
        self.n, self.data = n, (x, np.sin(x[..., 0]) + normal(n, 64, seed=1) / 10)
        hidden = normal(d, d) / np.float32(d**0.5)
        self.model = {"hidden": hidden, "out": normal(d) / np.float32(d)}
        steps = self.steps = self.sizes.steps

        @drjax.program(clients=n)
        def train(model, data):
            descent = partial(actor_loops.descent, steps=steps)
            models = drjax.map_fn(descent, (drjax.broadcast(model), *data))
            return drjax.reduce_mean(models)

        self.plan = drjax.make_plan(train)(self.model, self.data)
        self.about = f"{n} groups of {4 * 64 * (d + 1) / 1e3:.0f} kB, {steps} steps"

    def blocks(self) -> list[Any]:
        parts = [np.split(x, self.sizes.blocks) for x in self.data]
        return [*zip(*parts, strict=True)]

    def elastic(self, **options: Any) -> Any:
        """The hand-written loop."""
        blocks = self.blocks()
        return actor_loops.ElasticLoop(blocks, self.n, self.steps, **options)

    def compile(self, **options: Any) -> Any:
        return backend.compile(self.plan, **{"block_size": 4, **options})


class Schedule:
    """Kills the process that has done a block, at some blocks."""

    def __init__(self) -> None:
        self.seconds: list[float] = []  # of each block that is done
        self.begin([])

    def begin(self, kill_at: Sequence[int]) -> None:
        self.kill_at, self.done = kill_at, 0
        self.pids: set[int] = set()

    def __call__(self, pid: int, seconds: float) -> None:
        self.done += 1
        self.seconds.append(seconds)
        self.pids.add(pid)
        if self.done in self.kill_at:
            with contextlib.suppress(ProcessLookupError):  # another loss has ended it
                os.kill(pid, signal.SIGKILL)

    def observe(self, event: Any) -> None:
        if isinstance(event, events.BlockDone):
            self(event.process, event.seconds)


def kills(sizes: Sizes) -> tuple[Measured, Measured]:
    """Training while workers are killed; then one block is lost in a round."""
    training, ours, theirs = Training(sizes), Schedule(), Schedule()
    per_leg, count = sizes.per_leg * sizes.blocks, sizes.kills
    result = Measured(
        f"{training.about}, {sizes.blocks} blocks a round; {sizes.per_leg} rounds with "
        f"{count} kills of workers at blocks that a seed chooses",
        WORK,
    )
    retry = Measured(f"{training.about}; one worker is killed in a round", WORK)
    wait = 0.1
    options = {"workers": (1, 2), "observers": [ours.observe], "ray_options": NO_CPU}
    options["retries"] = {"worker": Retry(3, wait=wait, factor=1.0)}
    with (
        training.compile(**options) as on_ray,
        contextlib.closing(training.elastic()) as loop,
    ):
        loop.on_block, loop.wait = theirs, wait
        stored = on_ray.put(training.data)
        loops: Loops = {OURS: lambda m: on_ray(m, stored), HAND_WRITTEN: loop}
        schedules = {OURS: ours, HAND_WRITTEN: theirs}
        model, draw = training.model, np.random.default_rng(0)

        def recover(name: str) -> None:
            """Until both workers take part."""
            pids: set[int] = set()
            while len(pids) < 2:
                schedules[name].begin([])
                loops[name](model)
                pids = schedules[name].pids

        def train(name: str, kill_at: Sequence[int], rounds: int) -> tuple[float, Any]:
            recover(name)
            schedules[name].begin(kill_at)
            begin, now = time.perf_counter(), model
            for _ in range(rounds):
                now = loops[name](now)
            return time.perf_counter() - begin, now

        result.seconds = {name: [] for name in loops}
        retry.seconds = {name: [] for name in loops}
        retry.other = {"retried": {OURS: [], HAND_WRITTEN: []}, "calm": {}}
        in_turn(loops, model, 2)  # compiles
        retry.other["calm"] = in_turn(loops, model, 4)[0]
        for leg in range(sizes.legs):
            # In equal parts of the leg, at a block that the seed says.
            part = per_leg // count
            kill_at = [i * part + int(draw.integers(1, part)) for i in range(count)]
            for name in run.shuffled(loops, leg):
                seconds, last = train(name, kill_at, sizes.per_leg)
                result.seconds[name].append(seconds)
                result.other[name] = last
            for turn in range(2):
                place = int(draw.integers(1, sizes.blocks // 2))
                for name in run.shuffled(loops, turn):
                    before = loop.retried
                    seconds, last = train(name, [place], 1)
                    retry.seconds[name].append(seconds)
                    again = len(on_ray.report.lost), loop.retried - before
                    retry.other["retried"][name].append(again[name == HAND_WRITTEN])
                    retry.other[name] = last
        # Of both: a block takes longer where others compete for the processors.
        block = np.median([*ours.seconds, *theirs.seconds])
        result.other["goodput"] = {
            name: [float(per_leg * block / (2 * x)) for x in result.seconds[name]]
            for name in loops
        }
    for x in (result, retry):
        x.difference = difference(x.other.pop(OURS), x.other.pop(HAND_WRITTEN))
    return result, retry


def no_kills(sizes: Sizes) -> Measured:
    """Rounds of workers that may come and go, and of a fixed number of actors."""
    training = Training(sizes)
    result = Measured(
        f"{training.about}; workers=(1, 2), and two actors that have half of the data "
        "each",
        WORK,
    )
    options = {"workers": (1, 2), "ray_options": NO_CPU, "block_size": None}
    fixed = actor_loops.FixedLoop(training.data, training.steps)
    with training.compile(**options) as on_ray, contextlib.closing(fixed):
        stored = on_ray.put(training.data)
        loops: Loops = {OURS: lambda m: on_ray(m, stored), HAND_WRITTEN: fixed}
        while len(on_ray.report.workers) < 2:
            loops[OURS](training.model)
        in_turn(loops, training.model, 3)  # compiles; the size of blocks changes
        result.seconds, models = in_turn(loops, training.model, sizes.rounds)
        result.difference = difference(models[OURS], models[HAND_WRITTEN])
    return result


def lost_for_good(sizes: Sizes, nodes: Any) -> Measured:
    """A round in which a machine is lost, and there is no other."""
    training, schedules = Training(sizes), {OURS: Schedule(), HAND_WRITTEN: Schedule()}
    result = Measured(
        f"{training.about}; a node with one of two workers is lost after a quarter of "
        "the blocks",
        WORK,
        {OURS: [], HAND_WRITTEN: []},
    )
    where = {OURS: "ours", HAND_WRITTEN: "theirs"}
    add = lambda name: nodes.add_node(num_cpus=1, resources={where[name]: 1})
    both = {name: add(name) for name in where}
    options = {name: {"num_cpus": 0, "resources": {x: 1}} for name, x in where.items()}
    removals: list[Any] = []

    def remove_at(pid: int, seconds: float) -> None:
        # In the main thread, as nodes of such a cluster need.
        if removals and len(removals[0]) == 1 + sizes.blocks // 4:
            nodes.remove_node(removals.pop()[0], allow_graceful=False)
        elif removals:
            removals[0].append(pid)

    def observe(event: Any) -> None:
        if isinstance(event, events.BlockDone):
            remove_at(event.process, event.seconds)
            schedules[OURS].observe(event)

    def on_block(pid: int, seconds: float) -> None:
        remove_at(pid, seconds)
        schedules[HAND_WRITTEN](pid, seconds)

    elastic = {"workers": (1, 2), "observers": [observe], "ray_options": options[OURS]}
    with (
        training.compile(**elastic) as on_ray,
        contextlib.closing(training.elastic(**options[HAND_WRITTEN])) as loop,
    ):
        loop.on_block, stored = on_block, on_ray.put(training.data)
        loops: Loops = {OURS: lambda m: on_ray(m, stored), HAND_WRITTEN: loop}
        last = {}
        for turn in range(sizes.losses):
            for name in run.shuffled(loops, turn):
                while len(schedules[name].pids) < 2:
                    schedules[name].begin([])
                    loops[name](training.model)
                removals.append([both[name]])
                begin = time.perf_counter()
                last[name] = loops[name](training.model)
                result.seconds[name].append(time.perf_counter() - begin)
                schedules[name].begin([])
                if turn + 1 < sizes.losses:
                    both[name] = add(name)
        result.difference = difference(last[OURS], last[HAND_WRITTEN])
    return result


# ---------------------------------------------------------------------------------
# Seen from outside


def seen(sizes: Sizes, folder: Path) -> Measured:
    """Rounds with an observer, logs and traces, without, and a loop that logs."""
    training = Training(sizes)
    result = Measured(
        f"{training.about}, {sizes.blocks} blocks; a callback, a log of all events in "
        "a file, traces and metrics in memory; a line of JSON for each block in a file",
        WORK,
    )
    telemetry = "drjax.engines.core.telemetry"
    counted: list[Any] = []
    options = {"workers": 2, "ray_options": NO_CPU}
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        with mock.patch(f"{telemetry}.installed", lambda: False):
            plain = enter(training.compile(**options))
        spans = enter(traces())
        observed = enter(training.compile(**options, observers=[counted.append]))
        loop = enter(contextlib.closing(training.elastic()))
        loop.on_block = actor_loops.EventLog(folder / "events.json")
        stored = plain.put(training.data)
        logger, file = logging.getLogger("drjax"), folder / "log"
        handler = enter(contextlib.closing(logging.FileHandler(file)))

        def logged(model: Any) -> Any:
            before = logger.level
            logger.addHandler(handler)
            logger.setLevel(logging.DEBUG)
            try:
                return observed(model, stored)
            finally:
                logger.setLevel(before)
                logger.removeHandler(handler)

        loops: Loops = {
            OURS: logged,
            HAND_WRITTEN: loop,
            UNSEEN: lambda m: plain(m, stored),
        }
        in_turn(loops, training.model, 2)
        result.seconds, models = in_turn(loops, training.model, sizes.rounds)
        result.difference = difference(models[OURS], models[HAND_WRITTEN])
        result.other = {
            "events": len(counted),
            "spans": len(spans.get_finished_spans()),
            "lines": len(file.read_text().splitlines()),
        }
    return result


@contextlib.contextmanager
def traces() -> Iterator[Any]:
    """OpenTelemetry that keeps spans and metrics in memory."""
    names = ("trace", "metrics", "sdk.trace", "sdk.trace.export", "sdk.metrics")
    names += ("sdk.trace.export.in_memory_span_exporter", "sdk.metrics.export")
    trace, metrics, sdk, export, meters, memory, readers = (
        importlib.import_module(f"opentelemetry.{name}") for name in names
    )
    spans, provider = memory.InMemorySpanExporter(), sdk.TracerProvider()
    provider.add_span_processor(export.SimpleSpanProcessor(spans))
    trace.set_tracer_provider(provider)
    reader = readers.InMemoryMetricReader()
    metrics.set_meter_provider(meters.MeterProvider([reader]))
    yield spans


# ---------------------------------------------------------------------------------
# State of workers in checkpoints


@dataclass
class Scaffold:
    """SCAFFOLD with its data; both sides begin with zeros."""

    sizes: Sizes
    steps: int

    def __post_init__(self) -> None:
        n, d = self.sizes.clients, self.sizes.state
        x = normal(n, 8, d) / np.float32(d**0.5)
        self.data, zeros = (x, normal(n, 8, seed=1)), np.zeros(d, np.float32)
        self.start = zeros, zeros, np.zeros((n, d), np.float32)
        steps = self.steps

        @drjax.program(clients=n)
        def scaffold(model, control, controls, data):
            shared = drjax.broadcast((model, control))
            work = partial(actor_loops.controlled, steps=steps)
            moves, changes, controls = drjax.map_fn(work, (*shared, controls, *data))
            move, change = drjax.reduce_mean((moves, changes))
            return model + move, control + change, controls

        self.program = scaffold

    def ours(self, folder: Path) -> Any:
        plan = drjax.make_plan(self.program)(*self.start, self.data)
        options = {"keep": {2: 2}, "checkpoint": folder, "ray_options": NO_CPU}
        return backend.compile(plan, workers=2, **options)

    def theirs(self, folder: Path) -> Any:
        return actor_loops.KeepingLoop(self.data, self.steps, folder)


def in_checkpoints(sizes: Sizes, steps: int, limit: float, folder: Path) -> Measured:
    """Rounds that end with their state on disk."""
    scaffold = Scaffold(sizes, steps)
    n, d = sizes.clients, sizes.state
    result = Measured(
        f"SCAFFOLD of {n} groups, each with {4e-6 * d:.1f} MB of state and "
        f"{32e-6 * d:.1f} of data, {steps} local steps",
        limit,
    )
    paths = {OURS: folder / "ours", HAND_WRITTEN: folder / "theirs"}
    with (
        scaffold.ours(paths[OURS]) as on_ray,
        contextlib.closing(scaffold.theirs(paths[HAND_WRITTEN])) as loop,
    ):
        stored = on_ray.put(scaffold.data)
        loops: Loops = {
            OURS: lambda state: on_ray(*state, stored),
            HAND_WRITTEN: lambda state: (*loop(*state[:2]), None),
        }
        _, models = in_turn(loops, scaffold.start, 3)
        rounds = sizes.small if limit == SMALL else sizes.rounds
        result.seconds = going_on(loops, models, rounds)
        ours = (*models[OURS][:2], models[OURS][2].fetch())
        theirs = (*models[HAND_WRITTEN][:2], loop.fetch())
        result.difference = difference(ours, theirs)
    for name, path in paths.items():
        result.bytes[name] = sum(x.stat().st_size for x in path.iterdir())
    return result


def rounds_lost(name: str, folder: Path, address: str, sizes: Sizes) -> int:
    """How many rounds that had ended a new driver lacks, after a kill in the next."""
    command = [sys.executable, "-m", "benchmarks.engine_features", "--driver", name]
    command += ["--folder", str(folder), "--address", address]
    command += ["--quick"] if sizes == QUICK else []
    ended, restored = 0, None
    while not ended or restored is None:
        pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
        with subprocess.Popen(command, **pipe) as driver:
            assert driver.stdout is not None
            for text in driver.stdout:
                word, count = text.split()
                if word == "ended":
                    ended = int(count)
                elif ended:
                    restored = int(count)
                if ended == 3 or restored is not None:
                    time.sleep(0.01)  # in the round that follows
                    driver.kill()
    # The kill may come after the next round was written, before the driver says so.
    return max(0, ended - restored)


def drive(name: str, folder: Path, address: str, sizes: Sizes) -> None:
    """A driver that is killed: it prints what it has restored, and what has ended."""
    ray = importlib.import_module("ray")
    ray.init(address=address, log_to_driver=False)
    scaffold = Scaffold(sizes, sizes.local)
    run = (scaffold.ours if name == OURS else scaffold.theirs)(folder)
    done, state = run.restore() or (0, scaffold.start)
    print("restored", done, flush=True)
    for count in range(done + 1, 100):
        if name == OURS:
            state = run(*state, scaffold.data)
        else:
            state = run(*state[:2])
        print("ended", count, flush=True)


# ---------------------------------------------------------------------------------
# Data that stays the same


def put_once(sizes: Sizes) -> Measured:
    """Rounds with data that were put, or are passed in each round."""
    n, records, floats = sizes.data

    @drjax.program(clients=n)
    def step(model, x):
        far = drjax.map_fn(lambda m, x: (m - x).mean(0), (drjax.broadcast(model), x))
        return model - 0.1 * drjax.reduce_mean(far)

    model, x = np.zeros(floats, np.float32), normal(n, records, floats)
    plan = drjax.make_plan(step)(model, x)
    result = Measured(
        f"{n} groups, {x.nbytes / 1e6:.0f} MB of data, a model of "
        f"{model.nbytes / 1e6:.1f} MB",
        SMALL,
    )
    on_ray_twice = [
        backend.compile(plan, workers=2, ray_options=NO_CPU) for _ in range(2)
    ]
    theirs_twice = [actor_loops.CachedLoop(x) for _ in range(2)]
    with contextlib.ExitStack() as stack:
        for one in (*on_ray_twice, *theirs_twice):
            stack.enter_context(contextlib.closing(one))
        # Of their own, as the workers of a call have what the last one had.
        (on_ray, on_ray_anew), (theirs, theirs_anew) = on_ray_twice, theirs_twice
        stored = on_ray.put(x)
        loops: Loops = {
            OURS: lambda m: on_ray(m, stored),
            HAND_WRITTEN: theirs,
            f"{OURS}, passed each time": lambda m: on_ray_anew(m, x),
            f"{HAND_WRITTEN}, passed each time": lambda m: theirs_anew(m, x),
        }
        in_turn(loops, model, 3)  # compiles; the size of blocks changes
        for name, loop in loops.items():
            with Serialized() as sent:
                loop(model)
            result.bytes[name] = sent.bytes
        result.seconds, models = in_turn(loops, model, sizes.small)
        result.other["blocks"] = on_ray.report.stages[0].blocks
        result.difference = difference(models[OURS], models[HAND_WRITTEN])
    return result


# ---------------------------------------------------------------------------------
# Tables


def goals_of(name: str, x: Measured) -> list[Goal]:
    """Of a point; shares count to two digits, as they are shown."""
    ours, theirs = x.seconds[OURS], x.seconds[HAND_WRITTEN]
    shares = [("time", report.ratio(ours, theirs), x.limit)]
    if x.peak:
        share = x.peak[OURS] / x.peak[HAND_WRITTEN]
        shares.append(("memory of a worker", share, MEMORY))
    if x.bytes:
        share = x.bytes[OURS] / x.bytes[HAND_WRITTEN]
        shares.append((SENT[name], share, BYTES))
    if UNSEEN in x.seconds:
        shares.append(
            ("time / not observed", report.ratio(ours, x.seconds[UNSEEN]), WORK)
        )
    goals = [
        (f"{name}: {what}", f"≤ {most:g}", f"{share:.2f}", round(share, 2) <= most)
        for what, share, most in shares
    ]
    if "goodput" in x.other:
        goodput = x.other["goodput"]
        share = report.ratio(goodput[OURS], goodput[HAND_WRITTEN])
        met = bool(share >= GOODPUT)
        goals.append((f"{name}: goodput", f"≥ {GOODPUT:g}", f"{share:.2f}", met))
    if "lost" in x.other:
        lost = x.other["lost"][OURS]
        goals.append((f"{name}: rounds lost", "≤ 1", f"{lost}", 0 <= lost <= 1))
    return goals


def more_of(x: Measured) -> str:
    """A sentence on whatever else was measured: ours, then the baseline's."""
    both = lambda values: " and ".join(f"{values[k]:.2g}" for k in (OURS, HAND_WRITTEN))
    medians = lambda values: both({k: np.median(t) for k, t in values.items()})
    other, sentences = x.other, []
    if "blocks" in other:
        sentences.append(f"{other['blocks']} blocks.")
    if "goodput" in other:
        sentences.append(
            "Goodput, what was done of what two workers can do in the time: "
            f"{medians(other['goodput'])}."
        )
    if "retried" in other:
        sentences.append(
            f"Blocks that ran again: {medians(other['retried'])}. A round without a "
            f"kill takes {medians(other['calm'])} s."
        )
    if "lost" in other:
        sentences.append(
            "Of the rounds that had ended a new driver lacks "
            f"{both(other['lost'])}, after a kill within the next."
        )
    if "events" in other:
        sentences.append(
            "{events} events, {lines} lines and {spans} spans in all.".format(**other)
        )
    return " ".join(sentences)


def line(who: str, x: Measured) -> list[str]:
    """Of a table: a round of one side."""
    seconds = np.array(x.seconds[who])
    paired = seconds / np.array(x.seconds[HAND_WRITTEN])
    cells = [who, spread(1e3 * seconds, 0), spread(paired)]
    for values, scale in ((x.peak, "{:,.0f}"), (x.bytes, "{:,.4g}")):
        if values:
            cells.append(scale.format(values[who] / 1e6))
    return cells


def section(name: str, x: Measured) -> list[str]:
    header = ["a round", "ms", "times as long"]
    header += ["memory of a worker, MB"] if x.peak else []
    header += [f"{SENT[name]}, MB"] if x.bytes else []
    return [
        f"## {name}\n\n{x.what}. {len(x.seconds[OURS])} of each in turn. Largest "
        f"difference: {x.difference:.1g} of the largest number. {more_of(x)}".rstrip(),
        report.table(header, [line(who, x) for who in x.seconds]),
    ]


def markdown(points: dict[str, Measured]) -> str:
    who, ray = hello(), importlib.import_module("ray")
    about = (
        f"JAX {who['jax']}, Python {who['python']}, Ray {ray.__version__}, "
        f"{os.cpu_count()} CPU cores. In parentheses: quartiles."
    )
    goals = [goal for name, x in points.items() for goal in goals_of(name, x)]
    sections = [text for name, x in points.items() for text in section(name, x)]
    return "\n\n".join([about, report.goal_table(goals), *sections])


def measure(sizes: Sizes) -> dict[str, Measured]:
    with tempfile.TemporaryDirectory() as name, cluster() as nodes:
        folder = Path(name)
        points = {DEVICES: on_devices(sizes, 1), GANG: on_devices(sizes, 2)}
        points[STEADY] = no_kills(sizes)
        points[KILLS], points[RETRY] = kills(sizes)
        few = sizes.local // 5
        points[FEW] = in_checkpoints(sizes, few, SMALL, folder / FEW)
        points[STATE] = in_checkpoints(sizes, sizes.local, WORK, folder / STATE)
        points[STATE].other["lost"] = {
            name: rounds_lost(name, folder / name, nodes.address, sizes)
            for name in (OURS, HAND_WRITTEN)
        }
        points[SEEN] = seen(sizes, folder)
        points[PUT] = put_once(sizes)
        # The last, as Ray takes a while to see that the node is gone.
        points[LOST] = lost_for_good(sizes, nodes)
        return points


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small sizes only")
    parser.add_argument("--out", type=Path, help="a folder for the results")
    for name in ("driver", "folder", "address"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = QUICK if options.quick else Sizes()
    if options.driver:
        return drive(options.driver, Path(options.folder), options.address, sizes)
    points = measure(sizes)
    tables = markdown(points)
    print(tables)
    if options.out:
        name = f"engine-features-jax-{jax.__version__}"
        results = {key: vars(x) for key, x in points.items()}
        run.write(options.out, results, name, {name: tables})


if __name__ == "__main__":
    main()
