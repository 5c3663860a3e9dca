"""What an engine does for the driver, and what a pool of workers does for an engine.

Input of an `Engine`: a `StageCall`. Output: pairs of a block and its `BlockResult`.
Most engines are a `Pool`, which runs one block at a time in a worker;
`drjax.backends.engine.pool_scheduler` makes an engine of it.

Invariants: each group that takes part is in exactly one result with its slices; the
partial reductions of all results together are those of the stage. An engine passes
`BlockResult`s through and never looks into values.

Sharp edges: `results` is a generator that the driver may close early, after an error.
It must then release what is in flight. `Lost` means that the worker is gone, never that
a group failed.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from drjax.backends.engine.job import Job
from drjax.backends.engine.messages import Block, BlockResult, Task, WorkerState
from drjax.backends.engine.options import EngineOptions


@dataclass(frozen=True)
class StageCall:
    """One run of a round's local stage: what the driver asks of an engine.

    Attributes:
      job: The stage with its global inputs, a `Job`: what all workers get.
      slices: For each partitioned input of the stage, in order, an array `[n, ...]`
        with the slices along axis 0; a `drjax.backends.groups.Lazy`, whose slices are
        read block by block; or a `WorkerSlices`, whose slices workers have. If the
        groups of the stage are coordinates, also a `WorkerColumns`.
      alive: Which groups take part, bool `[n]`; the others were dropped.
      options: The engine's options, an `EngineOptions`.
      lost: A function of the reason, a text, without a result. The engine calls it
        whenever a block is lost and tried again.
      cache: A dict in which the engine may store objects, by keys of its own, between
        calls of the same `Runner`.
      initial: A description, as JSON data, of one group's slice of the kept arguments
        (those that are results of the call before): structure, names and types. Workers
        that load these slices themselves before the first call check them against it.
        None if nothing is kept.
    """

    job: Job
    slices: list[Any]
    alive: np.ndarray
    options: EngineOptions
    lost: Callable[[str], None]
    cache: dict[str, Any]
    initial: Any = None


Results = Generator[tuple[Block, BlockResult], None, None]


class Engine(Protocol):
    """A protocol: what runs the local stages of a plan for the driver.

    Attributes:
      workers: How many workers there are, int.
      stays: Of which outputs of stages the workers have the slices between stages,
        text: `"all"` that are read later, and no worker may have those of others;
        `"kept"`, results that stay for the next call, and slices that workers read
        from each other; or `""`, none. If there are some, the engine is a
        `drjax.backends.engine.worker_slices.Keeping`, and results of blocks have a
        `piece`.
    """

    workers: int
    stays: str

    def open(self) -> None:
        """Start the workers, unless they run already."""
        ...

    def results(self, call: StageCall) -> Results:
        """Run the stage on all groups that take part, in blocks.

        Args:
          call: The run of the stage.

        Yields:
          Pairs of a `Block` (groups that run at once) and its `BlockResult` (their
          partial reductions and slices, and which groups failed), until each group was
          in one. An engine that combines partial reductions itself yields these last,
          as the result of an empty block; its results before that have none.

        Raises:
          Exception: The stage failed, and no single group causes it.
        """
        ...

    def close(self) -> None:
        """End the workers."""
        ...


class Lost(Exception):
    """Raised by `Pool.result` if the worker of a block is gone.

    No group is to blame: the block may be tried again on another worker.
    """


class Pool(Protocol):
    """A protocol: workers that run one block at a time.

    In each worker `drjax.backends.engine.worker.run` runs the block.

    Attributes:
      workers: How many workers there are, int.
      stays: Of which outputs of stages the workers have the slices between stages,
        text: `"all"`, `"kept"` or `""`, as of an `Engine`.
      generation: An int that grows whenever all workers are started again, and objects
        that were shared with the former ones are gone.
    """

    workers: int
    stays: str
    generation: int

    def share(self, x: Any) -> Any:
        """Make an object available to all workers.

        Args:
          x: A plan file, or a stage's global inputs, a list of arrays.

        Returns:
          A reference to the object, for `submit`; its type is the pool's own.
        """
        ...

    def submit(self, task: Task, file: Any, shared: Any) -> Any:
        """Send a task to the worker that has the fewest tasks, without waiting.

        Args:
          task: The block, and the stage to run.
          file: The reference that `share` returned for the plan file.
          shared: The reference that `share` returned for the global inputs of the
            stage.

        Returns:
          The handle of the task: an object of the pool, hashable, for the other
          methods.
        """
        ...

    def wait(self, handles: Sequence[Any], timeout: float | None) -> Sequence[Any]:
        """Wait until some task is done, or until the time is over.

        Args:
          handles: The handles of tasks in flight.
          timeout: In seconds; None: no limit.

        Returns:
          Handles of tasks that are done, at least one; none if the time is over.
        """
        ...

    def result(self, handle: Any) -> BlockResult:
        """Return the result of a task that is done, and release its handle.

        Args:
          handle: What `submit` returned for the task; it is not used again.

        Raises:
          Lost: The worker is gone, and was replaced by another.
          Exception: The stage raised it, or it has the text of what the stage raised.
        """
        ...

    def abandon(self, handle: Any) -> None:
        """Give up a task: end the worker that has it, and start another.

        Args:
          handle: What `submit` returned for the task; it is not used again.
        """
        ...

    def forget(self, handle: Any) -> None:
        """Release a task whose result is not needed.

        The worker stays, and may finish the task; `abandon` replaces it.

        Args:
          handle: What `submit` returned for the task; it is not used again.
        """
        ...

    def states(self) -> list[WorkerState]:
        """Ask each worker what it is doing, and return a list of `WorkerState`s.

        A worker that does not answer in time may be left out. The list is empty if the
        pool cannot run the groups of a block one by one to find a group that takes too
        long.
        """
        ...
