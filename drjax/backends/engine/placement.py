"""Which worker has which task, for pools that choose the worker of each task.

Input: workers, and the handles of tasks that were submitted, finished or abandoned.
Output: the worker with the fewest tasks, and whether it has a plan file already.

Invariants: an abandoned task, whose result is not needed, counts as load until it ends
or its worker is replaced: the worker is still busy with it.

Sharp edges: workers and handles are compared by identity and by hash: they are objects
of the pool, such as Ray's actors and references. Nothing is sent from here.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple


class PlacedTask(NamedTuple):
    """A task, with the worker to which it was sent.

    Attributes:
      worker: The worker.
      number: The number of the task, `Task.number`.
    """

    worker: Any
    number: int


class Placement:
    """The tasks and plan files of each worker.

    Args:
      workers: The workers.

    Attributes:
      workers: The workers, without those that were replaced.
      abandoned: The tasks whose results are not needed, by their handles.
    """

    def __init__(self, workers: Iterable[Any] = ()):
        self.workers = [*workers]
        self.abandoned: dict[Any, PlacedTask] = {}
        self._in_flight: dict[Any, PlacedTask] = {}
        self._files: dict[Any, set[str]] = {}

    def least_loaded(self) -> Any:
        """The worker with the fewest tasks; the first one if several have as few."""
        load = {id(worker): 0 for worker in self.workers}
        for task in (*self._in_flight.values(), *self.abandoned.values()):
            load[id(task.worker)] = load.get(id(task.worker), 0) + 1
        return min(self.workers, key=lambda worker: load[id(worker)])

    def first_use(self, worker: Any, file: str) -> bool:
        """Whether a worker lacks a plan file; from now on it counts as sent there.

        `file` is the name of the file.
        """
        known = self._files.setdefault(worker, set())
        lacks = file not in known
        known.add(file)
        return lacks

    def submitted(self, handle: Any, worker: Any, number: int) -> None:
        """Register a task that was sent to a worker.

        Args:
          handle: The pool's handle of the task.
          worker: The worker.
          number: The number of the task, `Task.number`.
        """
        self._in_flight[handle] = PlacedTask(worker, number)

    def finished(self, handle: Any) -> Any:
        """Remove a task that is no longer in flight; returns its worker."""
        return self._in_flight.pop(handle).worker

    def abandon(self, handle: Any) -> PlacedTask | None:
        """Mark a task whose result is not needed; returns it, None if not in flight."""
        task = self._in_flight.pop(handle, None)
        if task is not None:
            self.abandoned[handle] = task
        return task

    def replace(self, worker: Any, new: Any) -> None:
        """Put `new`, without files or tasks, in place of a worker that has ended."""
        self.abandoned = {
            handle: task
            for handle, task in self.abandoned.items()
            if task.worker is not worker
        }
        self._files.pop(worker, None)
        self.workers[self.workers.index(worker)] = new

    def settle(
        self,
        wait: Callable[[list, int, float | None], tuple[list, list]],
        replace_worker: Callable[[Any], None],
        timeout: float | None,
    ) -> None:
        """Forget abandoned tasks that are done, and replace workers that are stuck.

        Args:
          wait: Takes handles, a count and seconds; returns `(done, not done)` handles,
            as soon as `count` of them are done or the seconds are over.
          replace_worker: Ends a worker and starts another.
          timeout: Seconds that abandoned tasks get to end; then their workers are
            replaced. None: no worker is replaced, and no task is waited for.
        """
        if not self.abandoned:
            return
        handles = [*self.abandoned]
        done, late = wait(handles, len(handles), timeout or 0)
        for handle in done:
            del self.abandoned[handle]
        for handle in late if timeout is not None else ():
            # Its worker may have been replaced already, with another task of it.
            if task := self.abandoned.get(handle):
                replace_worker(task.worker)
