"""The Ray backend: blocks of groups run in actors, which stay warm between rounds.

Input: a plan and options. Output: a `Runner`. Each actor is a process that loads the
plan's file once and compiles each stage once.

Retries: an actor that dies is replaced, and `core/pool_scheduler.py` runs its blocks
again on other actors, as often as `retries=` says (`core/options.py`). Nothing waits
for an actor that starts, while others work.

Invariants: Ray that was started here is shut down when the last `Actors` closes; Ray
that ran before is left alone. Ray is used through `_Connection.live`, which raises once
the raylet has ended: any other use would end the driver.

Sharp edges: slices of inputs stay in Ray's object store until the workers are closed,
in up to a quarter of it; what workers read from each other is there for a round. A
canceled task can block an actor, so tasks are skipped, never canceled. A task at work
when a call fails goes on to its end.
"""

import itertools
import os
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from drjax._errors import DrjaxValueError, EngineError, MeshError
from drjax._extras import needed
from drjax._sharding.group_mesh import (
    MeshAxes,
    as_text,
    devices_of,
    lack_of_devices,
)
from drjax.engines.core import pool_scheduler
from drjax.engines.core.driver import Runner
from drjax.engines.core.messages import Block, BlockResult, Task, WorkerState
from drjax.engines.core.options import EngineOptions, checked_integer
from drjax.engines.core.protocols import Lost, Results, StageCall
from drjax.engines.ray.actor import (
    Message,
    Stored,
    Worker,
    result_of,
    without_slices,
)
from drjax.engines.ray.dataset_rows import DatasetRows, rows_of
from drjax.engines.ray.gang import Gangs, MemberLost
from drjax.engines.ray.metrics import Metrics
from drjax.engines.ray.placement import Placement
from drjax.engines.ray.process_exit import ListeningProcess
from drjax.engines.ray.read_by_workers import Unread, readable
from drjax.engines.ray.resident_slices import ResidentSlices
from drjax.engines.ray.tree_of_sums import MOST, TreeOfSums
from drjax.engines.slices.worker_slices import LOST, Keeping
from drjax.plan import Plan, Value

# Of Ray, which users may lack.
ObjectRef: TypeAlias = Any
ActorHandle: TypeAlias = Any

_START = 120  # seconds for workers to start, while there are too few
_ANSWER = 10  # seconds for a worker to say what it does
_LOOK = 1.0  # seconds between looks whether Ray is still there
_FAILED_STARTS = 5  # one after the other, before it is an error
_INLINE = 64 << 10  # bytes that go into the message itself
_RESIDENT = 0.25  # of the object store, for slices that are the same in each round
_ADDED = 1 << 20  # bytes of partial reductions from which on workers add them up
_ONE_THREAD = "--xla_cpu_multi_thread_eigen=false"  # many workers share the cores


def compile(
    plan: Plan,
    *,
    workers: "int | tuple[int, int] | Actors" = 2,
    address: str | None = None,
    ray_options: dict[str, Any] | None = None,
    devices_per_group: int | None = None,
    processes_per_group: int = 1,
    keep: dict[Any, Any] | None = None,
    **options: Any,
) -> Runner:
    """A function that runs the plan on Ray.

    Ray is started on this machine, unless the process is connected already or an
    address is given. An argument whose values are all partitioned may also be a
    `ray.data.Dataset` with one record for each group, in their order.

    Args:
      plan: The plan.
      workers: The number of actors. Or `(least, most)`: the first call begins when
        `least` have started, and the others join while it runs. A worker that is lost
        is replaced once there is room; nothing waits for that while another works. Or
        `Actors`, which several plans may share, and which the caller closes.
      address: The address of a Ray cluster, as for `ray.init`.
      ray_options: Options of the actors, as for an actor's `.options()`: `num_gpus`,
        `resources`, `runtime_env`, ... Default: one CPU each.
      devices_per_group: How many devices each worker has for the mesh of a group: GPUs
        or TPUs if Ray's cluster has some, else virtual devices of the CPU. Default: as
        many as `plan.group_mesh` needs. See `Actors`.
      processes_per_group: How many actors, on as many hosts if there is room, are one
        worker: each has an equal part of the devices. See `Actors`.
      keep: Which partitioned results are arguments of the next call: a dict from
        results to arguments. `{1: 0}` means that element 1 of what the function returns
        is positional argument 0 of the next call, both counted from 0. The function
        returns a `Kept` for each, whose slices stay in Ray's object store, where
        workers read them.
      **options: See `drjax.backends.EngineOptions`: `block_size`, `on_error`,
        `min_groups`, `check_nans`, `timeout`, `retries`, `checkpoint`, `progress`.

    Returns:
      A `drjax.engines.core.driver.Runner` with the signature of the planned
      function. Close it, or use it in a `with` block.

    Raises:
      EngineError: Ray is not installed; (when called) a group failed, or too few
        survive.
      DrjaxTypeError, DrjaxValueError: A wrong option; the plan has a secure sum.
      MeshError: A worker has fewer devices than the mesh of a group. The workers of
        such a plan start here, and are asked.

    Example:
      >>> import drjax, jax.numpy as jnp
      >>> import drjax.backends.ray
      >>> mean = drjax.program(clients=4)(drjax.reduce_mean)
      >>> plan = drjax.make_plan(mean)(jnp.arange(4.0))
      >>> with drjax.backends.ray.compile(plan, workers=2) as run:
      ...     print(run(jnp.arange(4.0)))
      1.5
    """
    checked = EngineOptions.checked(**options)
    if isinstance(workers, Actors):
        return Runner(plan, workers, checked, owner=False, keep=keep)
    if devices_per_group is None:
        devices_per_group = devices_of(plan.group_mesh)
    for name, count in (
        ("devices_per_group", devices_per_group),
        ("processes_per_group", processes_per_group),
    ):
        if count != 1 and not plan.group_mesh:
            checked_integer(name, count, 1)
            raise DrjaxValueError(
                f"{plan.name} runs each group on one device, got {name}={count}. Shard "
                "the work of a group over a mesh, and plan it by "
                "drjax.make_plan(..., group_mesh=)."
            )
    actors = Actors(
        workers, address, ray_options, devices_per_group, processes_per_group
    )
    try:
        return Runner(plan, actors, checked, keep=keep)
    except BaseException:
        actors.close()
        raise


class _Connection:
    """The connection of a pool to Ray, which runs already or is started.

    `address` None: Ray on this machine, which is started if this process is not
    connected to one. `on_end` is called when the raylet (Ray's process on this machine)
    has ended by itself, and all actors with it.

    Attributes:
      module: The module `ray`. For anything that talks to the raylet use `live()`.
      store_bytes: The size of the object store on this machine; 0 if not connected.
    """

    def __init__(self, address: str | None, on_end: Callable[[], None]):
        self.module = needed("ray", "ray", "drjax.backends.ray")
        self.store_bytes = 0.0
        self._address, self._on_end = address, on_end
        self._raylet: ListeningProcess | None = None

    def open(self, workers: int) -> None:
        """Connect this process to Ray, or start Ray, unless it is connected already.

        The connection is added to `_open`, those in use. Ray is started if the
        connection has no address, with at least one CPU for each worker; it is shut
        down when the last connection of this process closes. `EngineError`: the raylet
        of an earlier `open` has ended.
        """
        ray = self.live()
        _open.add(self)
        if not ray.is_initialized():
            ours = self._address is None
            settings = {"address": self._address}
            if ours:  # a machine may have fewer cores than workers
                cores = max(workers, os.cpu_count() or 1)
                settings = {"num_cpus": cores, "include_dashboard": False}
            with warnings.catch_warnings():  # Ray forks, but only to start programs
                warnings.filterwarnings("ignore", "os.fork")
                ray.init(log_to_driver=False, **settings)
            if ours:
                # Ray that we started is shut down again by the last one to close.
                _starters.add(self)
        for node in ray.nodes():
            if node["NodeID"] == ray.get_runtime_context().get_node_id():
                # Ray's client would end this process when the raylet dies.
                self._raylet = ListeningProcess(node["RayletSocketName"])
                self.store_bytes = node["Resources"].get("object_store_memory", 0)

    def live(self) -> ModuleType:
        """Return the module `ray`, if the raylet still runs; else raise `EngineError`.

        The raylet is Ray's process on this machine. If it has ended, any use of the
        module would end this process. Before the error is raised, all connections of
        this process are reset, their function `on_end` is called, and Ray is shut down,
        so that the next `open` starts or joins it again.
        """
        if self._raylet is not None and self._raylet.ended():
            # All connections of the process use one raylet: its end is theirs.
            for connection in [*_open]:
                connection.reset()
                connection._on_end()
            _open.clear()
            _starters.clear()
            # Then `is_initialized` is false, so that the next `open` starts Ray again.
            self.module.shutdown()
            raise EngineError(
                "The raylet, Ray's process on this machine, has ended, and the workers "
                "with it. It was killed, or the machine had too little memory: see "
                "raylet.out in /tmp/ray/session_latest/logs. The next call starts "
                "Ray again, unless an address was given to compile."
            )
        return self.module

    def wait(
        self, handles: Sequence[ObjectRef], count: int, timeout: float | None
    ) -> tuple[list[ObjectRef], list[ObjectRef]]:
        """Wait until `count` results are done, or the time, in seconds, is over.

        The result is `(done, not done)`; `done` has at most `count` references.
        """
        end = float("inf") if timeout is None else time.monotonic() + timeout
        while True:
            # Short waits: only between them can a dead raylet be noticed.
            look = max(0.0, min(_LOOK, end - time.monotonic()))
            waited = self.live().wait([*handles], num_returns=count, timeout=look)
            if len(waited[0]) == count or time.monotonic() >= end:
                return waited

    def reset(self) -> None:
        """Stop watching the raylet, Ray's process on this machine; Ray itself runs on.

        `store_bytes` is 0 from then on: not connected.
        """
        self.store_bytes = 0.0
        if self._raylet is not None:
            self._raylet.close()
            self._raylet = None

    def close(self) -> None:
        """Stop using Ray: reset this connection, and remove it from those in use.

        Ray is shut down if this process started it and no other connection is in use.
        """
        self.reset()
        _open.discard(self)
        if _starters and not _open:
            self.module.shutdown()
            _starters.clear()


def _devices(
    count: int, resources: dict[str, float]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Choose how a worker gets so many devices, by what Ray's cluster has.

    The result is options of the actor, and variables of its environment.
    """
    if "GPU" in resources:
        return {"num_gpus": count}, {}
    if "TPU" in resources:
        return {"resources": {"TPU": count}}, {}
    return {}, {"JAX_NUM_CPU_DEVICES": str(count)}


class _Piece(NamedTuple):
    """Slices in the object store, and the digest of a file with them; "": none has."""

    reference: ObjectRef
    digest: str


# Connections of this process: those that are in use, and those that have started Ray.
_open, _starters = set[_Connection](), set[_Connection]()


class Actors(Keeping):
    """Workers as Ray actors: a `drjax.engines.core.protocols.Pool`.

    Args:
      workers: The number of actors; or `(least, most)`: a call begins with at least
        the former, and others join while it runs.
      address: The address of a Ray cluster, as for `ray.init`. Default: Ray on this
        machine, which is started if the process is not connected to one.
      ray_options: A dict of options of the actors, as for an actor's `.options()`:
        `num_gpus`, `resources`, `runtime_env`, ... Default: one CPU each.
      devices_per_group: How many devices each actor has, for plans whose groups need a
        mesh. If Ray's cluster has GPUs or TPUs, each actor gets so many of them, else
        so many virtual devices of the CPU; `ray_options` with `num_gpus` or `resources`
        are used as they are, and those with a `runtime_env` set the number of virtual
        devices themselves, by `JAX_NUM_CPU_DEVICES` in its `env_vars`.
      processes_per_group: How many actors are one worker, connected by
        `jax.distributed`: the mesh of a group is over the devices of all, of which each
        has an equal part. They are in a placement group with the strategy `SPREAD`, and
        `ray_options` are those of each of them.

    Attributes:
      workers: The number of actors, if none is away; `working` is how many work now.
      generation: An int that grows when actors are started and when they are ended.
      stays: `"kept"`: results that are kept, and slices that workers read from each
        other, are objects in the store.
      observers: Of the events of calls: Ray's own metrics.

    Raises:
      DrjaxValueError: `workers` is no integer from 1, nor two; or
        `processes_per_group` does not divide `devices_per_group`.
    """

    def __init__(
        self,
        workers: int | tuple[int, int],
        address: str | None = None,
        ray_options: dict[str, Any] | None = None,
        devices_per_group: int = 1,
        processes_per_group: int = 1,
    ):
        super().__init__()
        pair = workers if isinstance(workers, tuple) else (workers, workers)
        if len(pair) != 2:
            raise DrjaxValueError(
                f"workers must be an integer, or (least, most), got {workers!r}."
            )
        self._least = self._needed = checked_integer("workers", pair[0], 1)
        self.workers = checked_integer("workers", pair[1], pair[0])
        self._failed_starts = 0
        self.devices = checked_integer("devices_per_group", devices_per_group, 1)
        self.processes = checked_integer("processes_per_group", processes_per_group, 1)
        if self.devices % self.processes:
            raise DrjaxValueError(
                f"devices_per_group must be a multiple of processes_per_group="
                f"{processes_per_group}, got {devices_per_group}."
            )
        self.generation, self.stays = 0, "kept"
        self.observers = [Metrics()]
        self._options: dict[str, Any] = ray_options or {}
        if self.processes > 1 and "scheduling_strategy" in self._options:
            raise DrjaxValueError(
                "ray_options has a scheduling_strategy, and the processes of a worker "
                "have a placement group of their own. Say by resources where they run."
            )
        self._connection = _Connection(address, self._forget)
        self._ray = self._connection.module
        # By dataset of Ray Data its data in Ray's store. It is not of the actors: those
        # that start later read it, too.
        self._datasets = weakref.WeakKeyDictionary[Any, DatasetRows]()
        self._reset()

    def _reset(self, limit: float = 0) -> None:
        """Clear the records of actors, tasks and stored slices; no actor is ended.

        `generation` grows by 1: it tells the driver that slices and objects of the
        former actors are gone. From now on, `limit` bytes of slices may stay in the
        object store, so that later rounds do not send them again.
        """
        # Objects that were shared with the former actors are gone with them.
        self.generation += 1
        self._placement = Placement()
        self._starting: dict[ObjectRef, ActorHandle] = {}  # by when they have started
        self._gangs = Gangs(self._ray, self.processes, self._connection.wait)
        self._last_enough = time.monotonic()
        put = lambda slices: self._connection.live().put(slices)
        self._slices = ResidentSlices(put, self.read, limit)
        self._inputs: Any = None  # of the stage, which workers read
        # By the handle of a task in flight: its slices that stay, and its partial
        # reductions, if they are apart.
        self._own: dict[Any, tuple[Any, Any]] = {}

    def _forget(self) -> None:
        """Clear all records: of actors, and of what is in Ray's store."""
        self._datasets.clear()
        self._reset()

    # -----------------------------------------------------------------------------
    # Workers

    @property
    def working(self) -> int:
        return len(self._placement.workers)

    def open(self) -> None:
        ray = self._connection.live()
        # Warm: both the actors and the Ray in which they live.
        if (self.working or self._starting) and ray.is_initialized():
            return
        self._connection.reset()
        self._connection.open(self.workers * self.processes)
        self._reset(_RESIDENT * self._connection.store_bytes)
        self._needed, self._failed_starts = self._least, 0
        for _ in range(self.workers):
            self._start()
        while self.working < self._least:
            self._watch([], _LOOK)
        # From here on work goes on with those that are left.
        self._needed = 1
        while self._watch([], 0):  # those that have started by now
            pass

    def _start(self) -> None:
        """Start an actor, without waiting: it joins the workers in `_watch`.

        Ray delays the start of an actor until the resources for it are free.
        """
        ray = self._connection.live()
        flags = f"{os.environ.get('XLA_FLAGS', '')} {_ONE_THREAD}".strip()
        # A single worker may use all cores.
        variables = {"XLA_FLAGS": flags} if self.workers > 1 else {}
        devices: dict[str, Any] = {}
        if self.devices > 1 and not {"num_gpus", "resources"} & {*self._options}:
            count = self.devices // self.processes
            devices, virtual = _devices(count, ray.cluster_resources())
            variables |= virtual
        # The user's options come last: they replace these, `runtime_env` included.
        environment = {"runtime_env": {"env_vars": variables}}
        options = {"num_cpus": 1, **environment, **devices, **self._options}
        if self._gangs:
            actor, started = self._gangs.start(options)
            self._starting |= dict.fromkeys(started, actor)
            return
        # A second thread in each actor, to answer `state` while `run` runs.
        kind = ray.remote(concurrency_groups={"asked": 1})(Worker)
        # No restarts by Ray: a new actor must be sent the plan file again, and Ray's
        # retries of a task wait for the actor that had it.
        actor = kind.options(max_restarts=0, **options).remote()
        self._starting[_ask(actor.state)] = actor

    def _watch(self, handles: Sequence[ObjectRef], timeout: float | None) -> list[Any]:
        """Wait until a task is done, or a worker has started, which joins the others.

        The result has references of both; with a `timeout` of 0, of all that are done.
        `EngineError`: there are too few workers, and none has joined for 120 seconds.
        """
        watched = [*handles, *self._starting, *self._gangs.running(handles)]
        done: list[ObjectRef] = []
        if watched:
            count = len(watched) if timeout == 0 else 1
            done, _ = self._connection.wait(watched, count, timeout)
        for reference in done:
            if actor := self._starting.pop(reference, None):
                self._join(actor, reference)
        done += self._gangs.failed(done)
        now = time.monotonic()
        if self.working >= self._needed:
            self._last_enough = now
        elif now - self._last_enough > _START:
            resources, needed = self._ray.cluster_resources(), self._needed
            self.close()
            raise EngineError(
                f"{needed} workers did not start on Ray within {_START} s. Its "
                f"resources are {resources}, of which others have some: "
                'ask for fewer workers, or for less by ray_options={"num_cpus": ...}.'
            )
        return done

    def _wait_for_worker(self) -> None:
        """Wait until there is a worker, if there is none."""
        while not self.working:
            self._watch([], _LOOK)

    def _join(self, actor: ActorHandle, started: ObjectRef) -> None:
        """Add an actor to the workers, or start another if it was lost meanwhile."""
        errors = self._ray.exceptions
        refused = (errors.RayTaskError,) if self._gangs else ()  # they do not connect
        try:
            self._ray.get(started)
        except (errors.RayActorError, *refused) as error:
            rest = self._starting.items()
            self._starting = {x: other for x, other in rest if other is not actor}
            self._end(actor)
            self._failed_starts += 1
            if self._failed_starts > _FAILED_STARTS:
                why = str(error).strip()
                self.close()
                raise EngineError(f"Workers on Ray do not start: {why}") from error
            self._start()
        else:
            if actor in self._starting.values():
                return  # not all members of a gang have started
            self._failed_starts = 0
            self._placement.workers.append(actor)

    def _replace(self, actor: ActorHandle) -> None:
        """Kill an actor that is dead or too slow, and start another, without waiting.

        If the actor is not among the workers, it was replaced already, and nothing
        happens.
        """
        if actor not in self._placement.workers:
            return  # it was replaced already
        # What is taken for dead may live, and would keep what the next one needs.
        self._end(actor)
        self._placement.remove(actor)
        self._start()

    def _end(self, actor: ActorHandle) -> None:
        self._ray.kill(actor)
        self._gangs.end(actor)

    def as_groups(self, x: Any) -> Any:
        """Return a `ray.data.Dataset` as `Groups`, and others as they are."""
        data = sys.modules.get("ray.data")  # else there is no dataset
        if data is None or not isinstance(x, data.Dataset):
            return x
        ray = self._connection.live()
        if x not in self._datasets:
            # Of this process's workers: others may end, or be moved. A worker that
            # starts, as in place of one that was lost, is going to have its own.
            workers = self.working + len({*self._starting.values()})
            taken = self._options.get("num_cpus", 1) * workers * self.processes
            cpus = ray.cluster_resources().get("CPU", 0) - taken
            self._datasets[x] = rows_of(x, cpus)
        return self._datasets[x]

    def check_mesh(self, axes: MeshAxes) -> None:
        fix = f"Pass devices_per_group={devices_of(axes)}."
        if text := lack_of_devices(axes, self.devices, "each worker", fix):
            raise MeshError(text)
        if devices_of(axes) % self.processes:
            raise MeshError(
                f"The plan runs each group on a mesh of {as_text(axes)}, and "
                f"{devices_of(axes)} devices are not the same number in each of "
                f"{self.processes} processes. Pass another processes_per_group."
            )
        of_each = devices_of(axes) // self.processes
        self.open()
        asked = [_ask(actor.devices) for actor in self._placement.workers]
        for count, kind in self._connection.live().get(asked):
            fix = (
                f'Give it more: by ray_options, as {{"num_gpus": {of_each}}}, '
                "with a JAX that uses GPUs; on CPUs by JAX_NUM_CPU_DEVICES in the "
                "env_vars of its runtime_env."
            )
            if text := lack_of_devices(axes, count, f"a worker on {kind}", fix):
                raise MeshError(text)

    def states(self) -> list[WorkerState]:
        states, asked = [], [_ask(actor.state) for actor in self._placement.workers]
        if not asked:
            return []
        # At once, or each machine that is out of reach would cost that time.
        for state in self._connection.wait(asked, len(asked), _ANSWER)[0]:
            with suppress(self._ray.exceptions.RayActorError):  # it was lost
                states.append(self._ray.get(state))
        return states

    def close(self) -> None:
        actors = dict.fromkeys([*self._placement.workers, *self._starting.values()])
        for actor in actors if self._ray.is_initialized() else ():
            self._end(actor)
        self._forget()
        self._connection.close()

    # -----------------------------------------------------------------------------
    # Objects in the object store

    def share(self, x: Any) -> Any:
        # Small arrays go with the message: the object store costs more than it saves.
        if isinstance(x, list) and sum(y.nbytes for y in x) <= _INLINE:
            return x
        return self._connection.live().put(x)

    def fetch(self, value: Value, pieces: list["_Piece"]) -> list[Any]:
        return [self.read(piece.reference) for piece in pieces]

    def saved_as(self, piece: "_Piece") -> str:
        return piece.digest

    def load(self, folder: str, digests: Sequence[str]) -> list["_Piece"]:
        self._wait_for_worker()
        pairs = [
            actor.load.options(num_returns=2).remote(folder, digest)
            for actor, digest in zip(itertools.cycle(self._placement.workers), digests)
        ]
        reasons = filter(None, [self.read(why) for why, _ in pairs])
        if why := next(reasons, ""):
            raise ValueError(why)
        return [
            _Piece(slices, digest)
            for (_, slices), digest in zip(pairs, digests, strict=True)
        ]

    def read(self, reference: ObjectRef) -> Any:
        """Read an object of Ray's object store; wait until it is there.

        Its arrays are read-only views of the object store. `EngineError`: it is lost.
        """
        try:
            return self._connection.live().get(reference)
        except self._ray.exceptions.ObjectLostError as error:
            raise EngineError(LOST) from error

    # -----------------------------------------------------------------------------
    # Tasks

    def results(self, call: StageCall) -> Results:
        # What begins behind what a failed call has left at work would seem late.
        wait = self._connection.wait
        self._placement.settle(wait, self._replace, call.options.timeout)
        self._slices.begin()
        self._own.clear()  # of tasks that a failed call has left
        lazy, self._inputs = [x for x in call.slices if readable(x)], None
        if lazy:
            self._inputs, index = self._connection.live().put(lazy), itertools.count()
            slices = [Unread(x, next(index)) if readable(x) else x for x in call.slices]
            call = replace(call, slices=slices)
        blocks = -(-len(call.alive) // call.block_size)
        if blocks > MOST and call.partial_bytes >= _ADDED:
            return self._added_up(call, call.options.retry("worker").times)
        return pool_scheduler.results(self, call)

    def _added_up(self, call: StageCall, retries: int) -> Results:
        """Run the blocks of a stage, and have workers add up their partial reductions.

        If some are lost on the way, the blocks run again, `retries` times.
        """
        took_part, count = np.zeros(len(call.alive), bool), itertools.count()

        def add(references: Sequence[ObjectRef]) -> ObjectRef:
            self._wait_for_worker()
            actor = self._placement.workers[next(count) % self.working]
            return actor.add.remote(call.job.ops, *references)

        tree = TreeOfSums(add)
        apart = replace(call, job=replace(call.job, apart=True))
        for block, result in pool_scheduler.results(self, apart):
            if result.partials:
                tree.append(result.partials[0])
                took_part[block.place] |= block.valid
                took_part[[*result.failed]] = False
            yield block, replace(result, partials=[])
        if (total := tree.total()) is None:
            return
        errors = self._ray.exceptions
        lost = errors.RayActorError, errors.ObjectLostError, errors.OutOfMemoryError
        nobody = Block(np.zeros(0, np.int32), np.zeros(0, bool), [])
        self._connection.wait([total], 1, None)
        try:
            sums = self._connection.live().get(total)
        except lost as error:
            why = str(error).strip().splitlines()[0]
            if not retries:
                raise EngineError(
                    "Partial reductions are lost, as the workers or machines that had "
                    f"them have ended: {why}"
                ) from error
            call.lost(f"partial reductions: {why}")
        else:
            yield nobody, BlockResult(sums, [], {})
            return
        # The same blocks, so that the sums have the same bits.
        again = replace(call, alive=took_part, job=replace(call.job, stay=()))
        for block, result in self._added_up(again, retries - 1):
            for group, why in result.failed.items():
                # Its slices, and its share of a mean, are counted.
                raise EngineError(
                    f"it failed only when it ran again: {why}", group=group
                )
            if not len(block):
                yield block, result

    def submit(self, task: Task, file: ObjectRef, shared: Any) -> ObjectRef:
        # First: if the raylet has ended, this clears the placement and raises.
        self._connection.live()
        actor, name = self._placement.least_loaded(), file.hex()
        # Apart from the task, as Ray resolves references only in arguments.
        task, sources, parts = without_slices(name, task, self._slices.reference)
        arguments: list[ObjectRef] = []

        def stored(reference: ObjectRef, number: int | None = None) -> Stored:
            arguments.append(reference)
            return Stored(len(arguments) - 1, number)

        def part(x: Any) -> Any:
            if isinstance(x, list):
                return x
            number = self._slices.numbers.get(x)
            if number is None:
                return stored(x)
            lacks = self._placement.lacks(actor, number)
            return stored(x, number) if lacks else number

        numbers, removed = self._slices.numbers.values(), self._slices.removed
        message = Message(
            name,
            stored(file) if self._placement.first_use(actor, name) else None,
            task,
            sources,
            shared if isinstance(shared, list) else stored(shared),
            outdated=self._placement.outdated(actor, numbers, removed),
            parts=[*map(part, parts)],
            inputs=None if self._inputs is None else stored(self._inputs),
        )
        run, apart = actor.run, bool(task.stay) + task.apart
        run = run.options(num_returns=1 + apart) if apart else run
        data = message.to_bytes()
        refs = run.remote(data, *arguments)
        handle, *own = refs if isinstance(refs, list) else [refs]
        self._gangs.submitted(handle, actor, data, arguments)
        partials = own.pop() if task.apart else None
        self._own[handle] = own[0] if own else None, partials
        self._placement.submitted(handle, actor, task.number)
        return handle

    def wait(
        self, handles: Sequence[ObjectRef], timeout: float | None
    ) -> Sequence[ObjectRef]:
        done = {*self._watch(handles, timeout)}
        return [handle for handle in handles if handle in done]

    def result(self, handle: ObjectRef) -> BlockResult:
        actor, errors = self._placement.finished(handle), self._ray.exceptions
        try:
            result = self._gangs.result(handle, self.read)
        # The worker is gone, not the group wrong: others may do the block.
        except (errors.RayActorError, errors.OutOfMemoryError, MemberLost) as error:
            self._replace(actor)
            # The rest is Ray's own advice, many lines of it.
            why = f"a worker died: {str(error).strip().splitlines()[0]}"
            memory = isinstance(error, errors.OutOfMemoryError)
            raise Lost(why, "memory" if memory else "worker") from error
        except Exception:
            # Slices may have been lost on their way, so that the task has not begun.
            self._placement.unsure(actor)
            if self._gangs:  # not all members may have come equally far
                self._replace(actor)
            raise
        result = result_of(result)
        slices, partials = self._own.pop(handle)
        if partials is not None and result.partials:
            result = replace(result, partials=[partials])
        if slices is not None:
            result = replace(result, piece=_Piece(slices, result.saved))
        return result

    def abandon(self, handle: ObjectRef) -> None:
        self._gangs.forget(handle)
        self._replace(self._placement.finished(handle))

    def forget(self, handle: ObjectRef) -> None:
        # Not by ray.cancel: an actor may then wait for the place of the canceled task
        # in the order of its tasks forever, and is taken for dead.
        task = self._placement.abandon(handle)
        self._gangs.forget(handle)
        if task is not None and not self._gangs:  # and Ray has not ended
            _ask(task.worker.skip, task.number)


def _ask(method: Any, *args: Any) -> ObjectRef:
    """Call a method of an actor in its second thread, without waiting for the result.

    So the actor can answer while its first thread runs a task. `method` is that of the
    actor's handle, as `actor.state`.
    """
    return method.options(concurrency_group="asked").remote(*args)
