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
    """One run of a stage of the groups: what the driver asks of an engine.

    Attributes:
      job: The stage, with everything but the groups; what workers get.
      slices: Its partitioned inputs: arrays with slices along axis 0, or `Lazy`.
      alive: Which groups take part, bool `[n]`; the others were dropped.
      options: The engine's options.
      lost: A function to call with the reason, whenever work is lost and tried again.
      cache: What the engine keeps between calls of the same `Runner`, by key.
    """

    job: Job
    slices: list[Any]
    alive: np.ndarray
    options: EngineOptions
    lost: Callable[[str], None]
    cache: dict[str, Any]


Results = Generator[tuple[Block, BlockResult], None, None]


class Engine(Protocol):
    """What runs the stages of the groups for the driver.

    Attributes:
      workers: How many workers there are.
    """

    workers: int

    def open(self) -> None:
        """Start the workers, unless they run."""
        ...

    def results(self, call: StageCall) -> Results:
        """Run the stage; yields blocks with their results, until each group was in one.

        An engine that combines partial reductions itself yields the totals in the end,
        with an empty block.

        Raises:
          Exception: The stage failed, and no single group causes it.
        """
        ...

    def close(self) -> None:
        """End the workers."""
        ...


class Lost(Exception):
    """The worker of a block is gone; the block may be tried again on another worker."""


class Pool(Protocol):
    """Workers that run blocks, by `drjax.backends.engine.worker.run`.

    Attributes:
      workers: How many workers there are.
      generation: A count that grows when the workers are new, and shared objects are
        gone with the former ones.
    """

    workers: int
    generation: int

    def share(self, x: Any) -> Any:
        """Make an object available to all workers; returns a reference to it."""
        ...

    def submit(self, task: Task, file: Any, shared: Any) -> Any:
        """Send a task to the worker that has the fewest; returns the task's handle.

        Args:
          task: The task, for the worker's `run`.
          file: The reference that `share` returned for the plan file.
          shared: The reference that `share` returned for the global inputs of the
            stage.
        """
        ...

    def wait(self, handles: Sequence[Any], timeout: float | None) -> Sequence[Any]:
        """Wait until a task is done, or the time is over; returns done tasks' handles.

        Args:
          handles: The handles of tasks in flight.
          timeout: In seconds; None: no limit.
        """
        ...

    def result(self, handle: Any) -> BlockResult:
        """The result of a task that is done.

        Raises:
          Lost: The worker is gone, and was replaced by another.
          Exception: The stage raised it, or it has the text of what the stage raised.
        """
        ...

    def abandon(self, handle: Any) -> None:
        """End the worker that has this task, and start another."""
        ...

    def forget(self, handle: Any) -> None:
        """Release a task whose result will not be asked for.

        The worker stays, and may finish the task; `abandon` replaces it.
        """
        ...

    def states(self) -> list[WorkerState]:
        """The state of each worker; [] from a pool that cannot run a search."""
        ...
