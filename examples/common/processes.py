"""An engine of worker processes on this machine: a pool of Python's own executors.

It is for demonstrations: `drjax.backends.ray` is the engine for training. The workers
get a plan file and arrays, and one that dies is replaced; `docs/extending/engine.md`
says what else an engine may do.
"""

import concurrent.futures
import multiprocessing
import os
import signal
from collections.abc import Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from typing import Any

from drjax.engines.core import pool_scheduler, worker
from drjax.engines.core.driver import Runner
from drjax.engines.core.messages import (
    BlockResult,
    File,
    Task,
    WorkerState,
    refuse_group_mesh,
)
from drjax.engines.core.options import EngineOptions
from drjax.engines.core.protocols import Lost, Results, StageCall
from drjax.plan import Plan


def compile(plan: Plan, pool: "Processes", **options: Any) -> Runner:
    """A function that runs a plan in these processes; options of `EngineOptions`."""
    return Runner(plan, pool, EngineOptions.checked(**options))


class _Process:
    """A worker: an executor of one process, so that nothing else ends with it."""

    def __init__(self):
        context = multiprocessing.get_context("spawn")  # JAX has threads
        self.executor = concurrent.futures.ProcessPoolExecutor(1, context)
        self.tasks: set[concurrent.futures.Future] = set()
        self._pid = self.executor.submit(os.getpid)

    def kill(self) -> None:
        with suppress(ProcessLookupError, BrokenProcessPool):
            os.kill(self._pid.result(), signal.SIGKILL)

    def close(self) -> None:
        self.kill()
        self.executor.shutdown(wait=False)


class Processes:
    """A `drjax.engines.core.protocols.Pool` of processes."""

    def __init__(self, workers: int = 2):
        self.workers = self.working = workers
        self.generation, self.stays = 0, ""
        self.processes: list[_Process] = []
        self.killed = 0

    def open(self) -> None:
        while len(self.processes) < self.workers:
            self.processes.append(_Process())

    def check_mesh(self, axes: Any) -> None:
        refuse_group_mesh(axes, "this engine")

    def results(self, call: StageCall) -> Results:
        return pool_scheduler.results(self, call)

    def share(self, x: Any) -> Any:
        return x  # it goes with each message

    def submit(self, task: Task, file: File, shared: Any) -> Any:
        one = min(self.processes, key=lambda one: len(one.tasks))
        try:
            handle = one.executor.submit(worker.run, file, task, shared)
        except BrokenProcessPool:  # it died without a task
            self._replace(one)
            return self.submit(task, file, shared)
        one.tasks.add(handle)
        return handle

    def wait(self, handles: Sequence[Any], timeout: float | None) -> Sequence[Any]:
        first = concurrent.futures.FIRST_COMPLETED
        return [*concurrent.futures.wait(handles, timeout, first).done]

    def result(self, handle: Any) -> BlockResult:
        one = self._finished(handle)
        try:
            return handle.result()
        except BrokenProcessPool as error:
            self._replace(one)
            raise Lost("a worker process died") from error

    def abandon(self, handle: Any) -> None:
        self._replace(self._finished(handle))

    def forget(self, handle: Any) -> None:
        self._finished(handle)

    def states(self) -> list[WorkerState]:
        return []

    def kill(self) -> None:
        """Kills a worker that has a task, as another process might."""
        max(self.processes, key=lambda one: len(one.tasks)).kill()
        self.killed += 1

    def close(self) -> None:
        for one in self.processes:
            one.close()
        self.processes = []

    def _finished(self, handle: Any) -> "_Process | None":
        for one in self.processes:
            if handle in one.tasks:
                one.tasks.remove(handle)
                return one
        return None  # it was replaced already

    def _replace(self, one: "_Process | None") -> None:
        """The tasks of the old one fail, and are lost when their results are asked."""
        if one in self.processes:
            one.close()
            self.processes[self.processes.index(one)] = _Process()
