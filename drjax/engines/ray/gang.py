"""A worker of several processes, which may be on several hosts: a gang.

Input: tasks of `drjax.engines.ray.actor`. Output: the results of the first process, the
leader, which is the gang's actor to the rest of the engine. The others get the same
messages, and return nothing.

Invariants: all members run the same tasks in the same order, as JAX needs of processes
that work together: no task is skipped. If a member ends, or fails and another does not,
it may have left the others in a collective: the whole gang is replaced.

Sharp edges: a member that waits for one that is gone waits for long. So the driver
watches all of them.
"""

import socket
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from types import ModuleType
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.experimental import multihost_utils

from drjax._extras import needed
from drjax._sharding.group_mesh import devices_of_processes, span_processes
from drjax.engines.core.blocks_of_groups import LoadedBlock
from drjax.engines.core.messages import Block
from drjax.engines.ray.actor import Worker

# Of Ray, which users may lack.
ObjectRef: TypeAlias = Any
ActorHandle: TypeAlias = Any
PlacementGroup: TypeAlias = Any

_CONNECTED = 60  # seconds for members that have started to find each other
_GRACE = 10  # seconds in which the others fail, too, if the stage has failed


class Member(Worker):
    """A process of a gang."""

    def address(self) -> str:
        """Return an address that is free on this machine, for JAX's coordinator."""
        host = needed("ray", "ray", "drjax.backends.ray").util.get_node_ip_address()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family) as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def join(self, index: int, *addresses: str) -> None:
        """Connect JAX to that of the other members; wait until all are connected.

        `addresses` are those of all members.
        """
        # Not by what Slurm or Kubernetes says of the processes that have started Ray.
        jax.distributed.initialize(
            addresses[0],
            len(addresses),
            index,
            cluster_detection_method="deactivate",
            initialization_timeout=_CONNECTED,
        )
        span_processes()
        devices_of_processes()  # for which all have to wait, too

    def follow(self, data: bytes, *arguments: Any) -> None:
        """Do what the leader does in `run`."""
        self._result(data, arguments)

    def devices(self) -> tuple[int, str]:
        devices = devices_of_processes()
        return sum(map(len, devices)), devices[0][0].platform

    def _read(self, block: Block, lazy: Sequence[Any]) -> LoadedBlock:
        """Read the slices of a block, without those that another member cannot read."""
        block, failed = super()._read(block, lazy)
        valid = np.all(multihost_utils.process_allgather(block.valid), axis=0)
        others = "another process of the worker cannot read it"
        lost = {int(i): others for i in block.groups[block.valid & ~valid]}
        return block.without_failed(lost) if lost else block, failed | lost


class MemberLost(Exception):
    """Some members of a gang have run a task, or still do, and others have failed."""


class Gangs:
    """The gangs of a pool, each of which is known by its leader's actor.

    Whatever is no leader, or no task of one, is left alone. `size` is how many members
    a gang has, and `wait` that of the pool's connection.
    """

    def __init__(self, ray: ModuleType, size: int, wait: Callable[..., Any]):
        self._ray, self._size, self._wait = ray, size, wait
        # By leader: the others, and what keeps the resources of all.
        self._gangs: dict[ActorHandle, tuple[list[ActorHandle], PlacementGroup]] = {}
        # By the handle of a task, the leader's reference: those of the others.
        self._tasks: dict[ObjectRef, list[ObjectRef]] = {}
        self._running: dict[ObjectRef, ObjectRef] = {}  # of the latter, to the handle

    def __bool__(self) -> bool:
        return self._size > 1

    def start(self, options: dict[str, Any]) -> tuple[ActorHandle, list[ObjectRef]]:
        """Start a gang, without waiting; its actors have these options.

        The result is the leader, and references: the gang works when all are there.
        """
        util = self._ray.util
        scheduling = needed("ray.util.scheduling_strategies", "ray", "Ray")
        bundle = _resources(options)
        # Ray may put all on one host, if no other has room.
        group = util.placement_group([bundle] * self._size, strategy="SPREAD")
        kind = self._ray.remote(concurrency_groups={"asked": 1})(Member)
        members = []
        for i in range(self._size):
            place = scheduling.PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=i
            )
            actor = kind.options(max_restarts=0, scheduling_strategy=place, **options)
            members.append(actor.remote())
        leader = members[0]
        self._gangs[leader] = members[1:], group
        # As arguments: none is waited for in JAX before all have started.
        addresses = [member.address.remote() for member in members]
        return leader, [
            member.join.remote(i, *addresses) for i, member in enumerate(members)
        ]

    def end(self, leader: ActorHandle) -> None:
        """Kill the members of a gang but the leader, and release the resources."""
        others, group = self._gangs.pop(leader, ((), None))
        for member in others:
            self._ray.kill(member)
        if group is not None:
            self._ray.util.remove_placement_group(group)

    # -----------------------------------------------------------------------------
    # Tasks

    def submitted(
        self,
        handle: ObjectRef,
        leader: ActorHandle,
        data: bytes,
        arguments: Iterable[Any],
    ) -> None:
        """Send a task, which the leader has, to the other members of its gang."""
        if leader in self._gangs:
            others, _ = self._gangs[leader]
            tasks = [member.follow.remote(data, *arguments) for member in others]
            self._tasks[handle] = tasks
            self._running |= dict.fromkeys(tasks, handle)

    def running(self, handles: Iterable[ObjectRef]) -> list[ObjectRef]:
        """Return the references of tasks that other members than leaders have."""
        asked = {*handles} if self._running else set()
        return [x for x, handle in self._running.items() if handle in asked]

    def failed(self, done: Iterable[ObjectRef]) -> list[ObjectRef]:
        """Return the handles of tasks that other members have failed, of what is done.

        Those that members have done well are not watched any more.
        """
        failed = []
        for task in done:
            if task not in self._running:
                continue
            if self._error(task) is not None:
                failed.append(self._running[task])
            else:
                del self._running[task]
        return failed

    def forget(self, handle: ObjectRef) -> None:
        """Stop watching the other members' tasks."""
        for task in self._tasks.pop(handle, ()):
            self._running.pop(task, None)

    def result(self, handle: ObjectRef, read: Callable[[ObjectRef], Any]) -> Any:
        """Return `read(handle)`, or raise what a member has raised.

        If a member is gone, that is what is raised; if some have failed, and others
        have not in some time, it is a `MemberLost`.
        """
        others = self._tasks.get(handle)
        if others is None:
            return read(handle)
        self.forget(handle)
        done, _ = self._wait(others, len(others), 0)
        if all(self._error(x) is None for x in done):
            with suppress(self._ray.exceptions.RayError):  # as below
                return read(handle)
        done, late = self._wait([handle, *others], 1 + len(others), _GRACE)
        errors, exceptions = [*map(self._error, done)], self._ray.exceptions
        gone = exceptions.RayActorError, exceptions.OutOfMemoryError
        raised = [x for x in errors if x is not None]
        for error in raised:
            if isinstance(error, gone):
                raise error
        if late or len(raised) < len(errors):
            why = f"{type(raised[0]).__name__}: {raised[0]}".strip().splitlines()[-1]
            raise MemberLost(f"one of its processes failed alone: {why}")
        return read(handle)

    def _error(self, reference: ObjectRef) -> Exception | None:
        """Return what a task that is done has raised."""
        try:
            self._ray.get(reference)
        except Exception as error:
            return error
        return None


def _resources(options: dict[str, Any]) -> dict[str, float]:
    """Return the resources that an actor with these options needs."""
    bundle = {
        "CPU": options.get("num_cpus"),
        "GPU": options.get("num_gpus"),
        "memory": options.get("memory"),
        **(options.get("resources") or {}),
    }
    if kind := options.get("accelerator_type"):
        bundle[f"accelerator_type:{kind}"] = 0.001
    # Ray refuses an empty one.
    return {name: x for name, x in bundle.items() if x} or {"CPU": 0.001}
