"""What a good engineer writes with plain Ray: the baselines of `engine_features`.

Each loop is called as the function that drjax compiles, with the model, and returns the
next model. Actors import this file, and so neither drjax nor what it needs. Gradients
are functions that both sides run.
"""

import importlib
import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

ONE_THREAD = {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"}
SPECS = {"up": P(None, "model"), "down": P("model", None)}
LAYERS, RATE = 2, 0.001
KEPT = 2  # rounds whose state stays on disk


def actor(kind: type, environment: dict[str, str] | None = None, **options: Any) -> Any:
    """A class of actors that take no CPU from others, each with one thread for XLA."""
    variables = {"env_vars": ONE_THREAD | (environment or {})}
    ray = importlib.import_module("ray")
    return ray.remote(kind).options(**{"num_cpus": 0, **options}, runtime_env=variables)


def to_numpy(tree: Any) -> Any:
    return jax.tree.map(np.asarray, tree)


# ---------------------------------------------------------------------------------
# What both sides compute


def layers_gradient(model: Any, x: Any) -> Any:
    """Of residual layers, whose hidden units may be over the axis `model`."""

    def loss(model: Any) -> Any:
        y = x
        for layer in model:
            y = y + jnp.tanh(y @ layer["up"]) @ layer["down"]
        return jnp.sum((y - 1) ** 2) / len(y)

    return jax.grad(loss)(model)


def descent(model: Any, x: Any, y: Any, steps: int) -> Any:
    """Steps of gradient descent of a perceptron."""

    def loss(m: Any) -> Any:
        return jnp.mean((jnp.tanh(x @ m["hidden"]) @ m["out"] - y) ** 2)

    def step(m: Any, _: Any) -> Any:
        return jax.tree.map(lambda p, g: p - 0.05 * g, m, jax.grad(loss)(m)), None

    return lax.scan(step, model, length=steps)[0]


def controlled(model: Any, control: Any, c: Any, x: Any, y: Any, steps: int) -> Any:
    """A client's work in a round of SCAFFOLD: how much all moves, and its own c."""

    def step(m: Any, _: Any) -> Any:
        return m - 0.1 * (x.T @ (x @ m - y) / len(y) - c + control), None

    own = lax.scan(step, model, length=steps)[0]
    new = c - control + (model - own) / (steps * 0.1)
    return own - model, new - c, new


# ---------------------------------------------------------------------------------
# A group on several devices


class Sharded:
    """An actor with some groups; each runs on a mesh of all devices that it has."""

    def __init__(self, x: np.ndarray):
        mesh = jax.make_mesh((jax.device_count(),), ("model",), (AxisType.Auto,))
        self.specs = [{k: NamedSharding(mesh, SPECS[k]) for k in SPECS}] * LAYERS
        self.whole = NamedSharding(mesh, P())
        self.step = jax.jit(layers_gradient, out_shardings=self.specs)
        self.add = jax.jit(partial(jax.tree.map, jnp.add), donate_argnums=0)
        self.gather = jax.jit(lambda tree: tree, out_shardings=self.whole)
        self.x = [self.place(one, self.whole) for one in x]

    def place(self, x: np.ndarray, where: NamedSharding) -> jax.Array:
        return jax.device_put(x, where)

    def run(self, model: Any) -> Any:
        """The sum of the groups' gradients."""
        shards = jax.tree.map(self.place, model, self.specs)
        total = self.step(shards, self.x[0])
        for x in self.x[1:]:
            total = self.add(total, self.step(shards, x))
        total = self.gather(total)
        return jax.tree.map(lambda x: np.asarray(x.addressable_data(0)), total)

    def pid(self) -> int:
        return os.getpid()


class Member(Sharded):
    """One of several processes that have a group together."""

    def __init__(self):
        pass

    def address(self) -> str:
        with socket.socket() as free:
            free.bind(("", 0))
            return (
                f"{socket.gethostbyname(socket.gethostname())}:{free.getsockname()[1]}"
            )

    def join(self, i: int, count: int, address: str, x: np.ndarray) -> None:
        jax.distributed.initialize(address, count, i)
        Sharded.__init__(self, x)

    def place(self, x: np.ndarray, where: NamedSharding) -> jax.Array:
        return jax.make_array_from_callback(x.shape, where, lambda i: x[i])

    def run(self, model: Any) -> Any:
        total = super().run(model)
        return total if jax.process_index() == 0 else None


class Loop:
    """What actors compute for n groups.

    Attributes:
      actors: They end with the loop.
    """

    actors: list[Any]

    def __init__(self, n: int):
        self.ray, self.n = importlib.import_module("ray"), n

    def close(self) -> None:
        for one in self.actors:
            self.ray.kill(one)


class ShardedLoop(Loop):
    """Two actors of so many virtual devices, each with half of the groups."""

    def __init__(self, x: np.ndarray, devices: int):
        super().__init__(len(x))
        kind = actor(Sharded, {"JAX_NUM_CPU_DEVICES": str(devices)})
        self.actors = [kind.remote(half) for half in np.array_split(x, 2)]
        self.pids = self.ray.get([one.pid.remote() for one in self.actors])

    def __call__(self, model: Any) -> Any:
        stored = self.ray.put(model)
        sums = self.ray.get([one.run.remote(stored) for one in self.actors])
        sums = [x for x in sums if x is not None]
        return jax.tree.map(lambda w, *g: w - RATE * sum(g) / self.n, model, *sums)


class GangLoop(ShardedLoop):
    """One worker of two processes in a placement group, which JAX connects."""

    def __init__(self, x: np.ndarray, devices: int):
        Loop.__init__(self, len(x))
        bundles = [{"CPU": 0.001}] * 2
        self.group = self.ray.util.placement_group(bundles, strategy="SPREAD")
        place = importlib.import_module("ray.util.scheduling_strategies")
        environment = {"JAX_NUM_CPU_DEVICES": str(devices // 2)}
        strategies = [
            place.PlacementGroupSchedulingStrategy(self.group, i) for i in range(2)
        ]
        self.actors = [
            actor(Member, environment, scheduling_strategy=each).remote()
            for each in strategies
        ]
        address = self.actors[0].address.remote()
        joins = [a.join.remote(i, 2, address, x) for i, a in enumerate(self.actors)]
        self.ray.get(joins)
        self.pids = self.ray.get([self.actors[0].pid.remote()])

    def close(self) -> None:
        super().close()
        self.ray.util.remove_placement_group(self.group)


# ---------------------------------------------------------------------------------
# Machines that come and go


class Trainer:
    """An actor that trains on blocks of groups."""

    def __init__(self, steps: int):
        train = jax.vmap(partial(descent, steps=steps), (None, 0, 0))
        add_up = lambda *args: jax.tree.map(lambda a: a.sum(0), train(*args))
        self.total = jax.jit(add_up)

    def run(self, model: Any, block: Any) -> tuple[Any, float, int]:
        begin = time.perf_counter()
        result = to_numpy(self.total(model, *block))
        return result, time.perf_counter() - begin, os.getpid()

    def ready(self) -> None:
        """When this has returned, the actor has started."""


class ElasticLoop(Loop):
    """Blocks go to actors that are free; what is lost runs again, after a wait.

    An actor that is lost is replaced; the new one gets blocks once it has started.
    `on_block` is called with the process and the seconds of each block that is done.
    """

    def __init__(self, blocks: Sequence[Any], n: int, steps: int, **options: Any):
        super().__init__(n)
        self.blocks = [*map(self.ray.put, blocks)]
        self.start = lambda: actor(Trainer, **options).remote(steps)
        self.idle, self.starting, self.retried, self.wait = [], {}, 0, 0.0
        self.on_block: Callable[[int, float], object] = lambda pid, seconds: None
        for _ in range(2):
            self.add_actor()
        self.ray.get([*self.starting])

    def add_actor(self) -> None:
        new = self.start()
        self.starting[new.ready.remote()] = new

    def __call__(self, model: Any) -> Any:
        stored, parts, running = self.ray.put(model), {}, {}
        queue, later = [*enumerate(self.blocks)][::-1], []
        while len(parts) < len(self.blocks):
            now = time.monotonic()
            queue += [block for when, block in later if when <= now]
            later = [x for x in later if x[0] > now]
            while queue and self.idle:
                one, (i, block) = self.idle.pop(), queue.pop()
                running[one.run.remote(stored, block)] = one, (i, block)
            pause = min((x[0] - now for x in later), default=None)
            refs = [*running, *self.starting]
            for ref in self.ray.wait(refs, timeout=pause)[0]:
                ran = ref in running
                one, block = running.pop(ref) if ran else (self.starting.pop(ref), None)
                try:
                    result = self.ray.get(ref)
                except self.ray.exceptions.RayActorError:
                    self.add_actor()
                    if block:
                        later.append((time.monotonic() + self.wait, block))
                        self.retried += 1
                    continue
                self.idle.append(one)
                if block:
                    parts[block[0]], seconds, pid = result
                    self.on_block(pid, seconds)
        total = jax.tree.map(lambda *x: sum(x), *(parts[i] for i in sorted(parts)))
        return jax.tree.map(lambda x: x / np.float32(self.n), total)

    @property
    def actors(self) -> list[Any]:
        return [*self.idle, *self.starting.values()]


class Holder:
    """An actor with a part of the data, all groups of which run at once."""

    def __init__(self, steps: int, *data: np.ndarray):
        self.data = [*map(jnp.asarray, data)]
        self.total = Trainer(steps).total

    def run(self, model: Any) -> Any:
        return to_numpy(self.total(model, *self.data))


class FixedLoop(Loop):
    """Two actors, each with half of the data."""

    def __init__(self, data: Sequence[np.ndarray], steps: int):
        super().__init__(len(data[0]))
        halves = zip(*(np.array_split(x, 2) for x in data), strict=True)
        self.actors = [actor(Holder).remote(steps, *half) for half in halves]

    def __call__(self, model: Any) -> Any:
        stored = self.ray.put(model)
        parts = self.ray.get([one.run.remote(stored) for one in self.actors])
        return jax.tree.map(lambda a, b: (a + b) / np.float32(self.n), *parts)


# ---------------------------------------------------------------------------------
# State of workers in checkpoints


def write(path: Path, *arrays: np.ndarray) -> None:
    """Write a file that is there whole, or not at all, also after a crash."""
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        np.savez(file, *arrays)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def read(path: Path) -> list[np.ndarray]:
    with np.load(path) as arrays:
        return [*arrays.values()]


class Keeper:
    """An actor that keeps its groups' control variates, and writes them each round."""

    def __init__(self, i: int, folder: str, steps: int, *data: np.ndarray):
        self.i, self.folder, self.data = i, Path(folder), [*map(jnp.asarray, data)]
        train = jax.vmap(partial(controlled, steps=steps), (None, None, 0, 0, 0))

        def run(model: Any, control: Any, own: Any, x: Any, y: Any) -> Any:
            moves, changes, own = train(model, control, own, x, y)
            return moves.sum(0), changes.sum(0), own

        self.round = jax.jit(run, donate_argnums=2)
        self.own = jnp.zeros((len(data[0]), data[0].shape[-1]))

    def path(self, count: int) -> Path:
        return self.folder / f"own-{self.i}-{count}.npz"

    def run(self, model: Any, control: Any, count: int) -> Any:
        move, change, self.own = self.round(model, control, self.own, *self.data)
        write(self.path(count), np.asarray(self.own))
        self.path(count - KEPT).unlink(missing_ok=True)
        return np.asarray(move), np.asarray(change)

    def restore(self, count: int) -> None:
        self.own = jnp.asarray(read(self.path(count))[0])

    def fetch(self) -> np.ndarray:
        return np.asarray(self.own)


class KeepingLoop(Loop):
    """SCAFFOLD in two actors; the driver's file, written last, ends a round."""

    def __init__(self, data: Sequence[np.ndarray], steps: int, folder: Path):
        super().__init__(len(data[0]))
        halves = zip(*(np.array_split(x, 2) for x in data), strict=True)
        folder.mkdir(exist_ok=True, parents=True)
        self.folder, self.count = folder, 0
        self.actors = [
            actor(Keeper).remote(i, str(folder), steps, *half)
            for i, half in enumerate(halves)
        ]

    def path(self, count: int) -> Path:
        return self.folder / f"round-{count}.npz"

    def restore(self) -> tuple[int, list[np.ndarray]] | None:
        rounds = [int(x.stem.split("-")[1]) for x in self.folder.glob("round-*.npz")]
        if not rounds:
            return None
        self.count = max(rounds)
        self.ray.get([one.restore.remote(self.count) for one in self.actors])
        return self.count, read(self.path(self.count))

    def __call__(self, model: Any, control: Any) -> Any:
        stored, self.count = self.ray.put(model), self.count + 1
        controls = self.ray.put(control)
        tasks = [one.run.remote(stored, controls, self.count) for one in self.actors]
        moves, changes = zip(*self.ray.get(tasks), strict=True)
        model = model + sum(moves) / np.float32(self.n)
        control = control + sum(changes) / np.float32(self.n)
        write(self.path(self.count), model, control)
        self.path(self.count - KEPT).unlink(missing_ok=True)
        return model, control

    def fetch(self) -> np.ndarray:
        return np.concatenate(self.ray.get([x.fetch.remote() for x in self.actors]))


# ---------------------------------------------------------------------------------
# Data that stays the same


class Cached:
    """An actor that keeps what it is given, until it is given something else."""

    def __init__(self):
        self.data: Any = None
        self.total = jax.jit(lambda m, x: (m - x).sum((0, 1)))

    def run(self, model: np.ndarray, data: np.ndarray | None = None) -> np.ndarray:
        if data is not None:
            self.data = jnp.asarray(data)
        return np.asarray(self.total(model, self.data))


class CachedLoop(Loop):
    """The data is put once, of which actors keep their part."""

    def __init__(self, x: np.ndarray):
        super().__init__(len(x))
        self.records = x.shape[0] * x.shape[1]
        self.actors = [actor(Cached).remote() for _ in range(2)]
        halves = [*map(self.ray.put, np.array_split(x, 2))]
        zeros = np.zeros(x.shape[-1], np.float32)
        pairs = zip(self.actors, halves, strict=True)
        self.ray.get([one.run.remote(zeros, half) for one, half in pairs])

    def __call__(self, model: np.ndarray, data: np.ndarray | None = None) -> Any:
        stored = self.ray.put(model)
        halves = (None, None) if data is None else np.array_split(data, 2)
        pairs = zip(self.actors, halves, strict=True)
        parts = self.ray.get([one.run.remote(stored, half) for one, half in pairs])
        return model - 0.1 * (parts[0] + parts[1]) / np.float32(self.records)


class EventLog:
    """A line of JSON for each block, in a file."""

    def __init__(self, path: Path):
        self.file = path.open("a")

    def __call__(self, pid: int, seconds: float) -> None:
        event = {"time": time.time(), "process": pid, "seconds": seconds}
        self.file.write(json.dumps(event) + "\n")
        self.file.flush()
