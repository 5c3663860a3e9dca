"""Which worker has which task, for pools that choose the worker of each task.

Input: workers, and the handles of tasks that were submitted, finished or abandoned.
Output: the worker with the fewest tasks, and whether it has a plan file, or slices,
already.

Invariants: an abandoned task, whose result is not needed, counts as load until it ends
or its worker is replaced: the worker is still busy with it.

Sharp edges: workers and handles are compared by identity and by hash: they are objects
of the pool, such as Ray's actors and references. Nothing is sent from here.
"""

import logging
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

_logger = logging.getLogger("drjax")


class PlacedTask(NamedTuple):
    """A task, with the pool's object for the worker to which it was sent.

    Attributes:
      number: The `Task.number`.
    """

    worker: Any
    number: int


class Placement:
    """A table of the tasks, plan files and slices that each worker of a pool has.

    Workers and handles of tasks are objects of the pool, hashable, such as handles of
    Ray's actors and its references.

    Attributes:
      workers: The current workers: new ones are appended.
      abandoned: The tasks, by handle, whose results are not needed, but which may still
        run.
    """

    def __init__(self, workers: Iterable[Any] = ()):
        self.workers = [*workers]
        self.abandoned: dict[Any, PlacedTask] = {}
        self._in_flight: dict[Any, PlacedTask] = {}
        self._files: dict[Any, set[str]] = {}
        # The numbers of the slices that a worker has, and how many were removed then.
        self._slices: dict[Any, tuple[set[int], int]] = {}

    def least_loaded(self) -> Any:
        """Return the worker with the fewest tasks; of several such ones, the first.

        Tasks in flight count, and abandoned ones. Nothing is recorded.
        """
        load = {id(worker): 0 for worker in self.workers}
        for task in (*self._in_flight.values(), *self.abandoned.values()):
            # A replaced worker is not in `load`; its task stays until `finished`.
            load[id(task.worker)] = load.get(id(task.worker), 0) + 1
        return min(self.workers, key=lambda worker: load[id(worker)])

    def first_use(self, worker: Any, file: str) -> bool:
        """Return whether a worker lacks a plan file, and record it as sent there."""
        known = self._files.setdefault(worker, set())
        lacks = file not in known
        known.add(file)
        return lacks

    def outdated(
        self, worker: Any, numbers: Collection[int], removed: int
    ) -> list[int] | None:
        """Return which slices a worker has that are not stored any more.

        `numbers` are those that are stored, `removed` counts those that are not. They
        are recorded as forgotten. None: whatever the worker has, nothing is recorded.
        """
        if worker not in self._slices:
            self._slices[worker] = set(), removed
            return None
        held, before = self._slices[worker]
        gone = held.difference(numbers) if removed != before else ()
        self._slices[worker] = held.difference(gone) if gone else held, removed
        return sorted(gone)

    def lacks(self, worker: Any, number: int) -> bool:
        """Return whether a worker lacks slices, and record them as sent there."""
        held, _ = self._slices[worker]
        lacks = number not in held
        held.add(number)
        return lacks

    def unsure(self, worker: Any) -> None:
        """Forget which slices a worker has: a message to it may have been lost."""
        self._slices.pop(worker, None)

    def submitted(self, handle: Any, worker: Any, number: int) -> None:
        """Record a task, by its `Task.number`, as in flight at a worker."""
        self._in_flight[handle] = PlacedTask(worker, number)

    def finished(self, handle: Any) -> Any:
        """Remove a task from those in flight, and return the worker that had it."""
        return self._in_flight.pop(handle).worker

    def abandon(self, handle: Any) -> PlacedTask | None:
        """Move a task to `abandoned`, and return it; None if it is not in flight."""
        task = self._in_flight.pop(handle, None)
        if task is not None:
            self.abandoned[handle] = task
        return task

    def remove(self, worker: Any) -> None:
        """Remove a worker that has ended, its plan files, and its abandoned tasks.

        A task in flight stays until `finished`.
        """
        self.abandoned = {
            handle: task
            for handle, task in self.abandoned.items()
            if task.worker is not worker
        }
        self._files.pop(worker, None)
        self.unsure(worker)
        self.workers.remove(worker)

    def settle(
        self,
        wait: Callable[[list[Any], int, float | None], tuple[list[Any], list[Any]]],
        replace_worker: Callable[[Any], None],
        timeout: float | None,
    ) -> None:
        """Remove abandoned tasks that are done; replace workers that are stuck in one.

        `wait(handles, count, seconds)` returns lists `(done, not done)` of the handles,
        as soon as `count` tasks are done or the time is over. `replace_worker` ends a
        worker, starts another, and calls `remove`. `timeout` is how many seconds
        abandoned tasks get to end; None: no worker is replaced, and no task is waited
        for.
        """
        if not self.abandoned:
            return
        handles = [*self.abandoned]
        # Without a limit no task is late: its worker stays, and counts as busy.
        done, late = wait(handles, len(handles), timeout or 0)
        for handle in done:
            del self.abandoned[handle]
        if late and timeout is None:
            _logger.warning(
                "%d blocks of an earlier call, which failed or was stopped, still run: "
                "new blocks wait for them. Close the runner to end its workers, or set "
                "timeout=, after which such workers are replaced.",
                len(late),
            )
        for handle in late if timeout is not None else ():
            # Its worker may have been replaced already, with another task of it.
            if task := self.abandoned.get(handle):
                replace_worker(task.worker)
