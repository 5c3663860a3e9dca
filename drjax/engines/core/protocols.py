"""What an engine does for the driver, and what a pool of workers does for an engine.

Input of an `Engine`: a `StageCall`. Output: pairs of a block and its `BlockResult`.
Most engines are a `Pool`, which runs one block at a time in a worker;
`drjax.engines.core.pool_scheduler` makes an engine of it.

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

from drjax._sharding.group_mesh import MeshAxes
from drjax.engines.core.job import Job
from drjax.engines.core.messages import Block, BlockResult, File, Task, WorkerState
from drjax.engines.core.options import EngineOptions
from drjax.engines.slices.slices import Slices


@dataclass(frozen=True)
class StageCall:
    """One run of a round's local stage: what the driver asks of an engine.

    Attributes:
      slices: The partitioned inputs of the stage, in order. If the groups of the stage
        are coordinates, these are columns.
      alive: Which groups take part, bool `[n]`; the others were dropped.
      block_size: The number of groups in a block; the last may have fewer.
      lost: The engine calls it with the reason whenever a block is lost and tried
        again; also with the kind of the error (`Retry`), and the seconds to wait.
      check: The engine calls it at least once a second: it raises `CanceledError` once
        the call was canceled.
      workers: An engine whose workers come and go calls it with their number.
      cache: Where the engine may store objects, by keys of its own, between calls of
        the same `Runner`.
      initial: A description, as JSON data, of one group's slice of the kept arguments
        (those that are results of the call before): structure, names and types. Workers
        that load these slices themselves before the first call check them against it.
        None if nothing is kept.
      partial_bytes: The size of the partial reductions of a block.
    """

    job: Job
    slices: list[Slices]
    alive: np.ndarray
    block_size: int
    options: EngineOptions
    lost: Callable[..., None]
    check: Callable[[], None]
    workers: Callable[[int], None]
    cache: dict[str, Any]
    initial: Any = None
    partial_bytes: int = 0


Results = Generator[tuple[Block, BlockResult], None, None]


class Engine(Protocol):
    """A protocol: what runs the local stages of a plan for the driver.

    Attributes:
      workers: How many workers there are.
      stays: Of which outputs of stages the workers have the slices between stages:
        `"all"` that are read later, and no worker may have those of others; `"kept"`,
        results that stay for the next call, and slices that workers read from each
        other; or `""`, none. If there are some, the engine is a
        `drjax.engines.slices.worker_slices.Keeping`, and results of blocks have a
        `piece`.
    """

    workers: int
    stays: str

    def open(self) -> None:
        """Start the workers, unless they run already."""
        ...

    def check_mesh(self, axes: MeshAxes) -> None:
        """Raise a `MeshError` unless each worker has the devices for these axes.

        It is called for plans alone whose groups need a mesh, when they are compiled.
        """
        ...

    def results(self, call: StageCall) -> Results:
        """Run the stage on all groups that take part, each in one block.

        An engine that combines partial reductions itself yields these last, as the
        result of an empty block; its results before that have none. Whatever it raises
        means that the stage failed, and that no single group causes it.
        """
        ...

    def close(self) -> None:
        """End the workers."""
        ...


class Lost(Exception):
    """Raised by `Pool.result` if the worker of a block is gone.

    No group is to blame: the block may be tried again on another worker. `kind` is that
    of the error, as in `Retry`.
    """

    def __init__(self, why: str, kind: str = "worker"):
        super().__init__(why)
        self.kind = kind


class Pool(Protocol):
    """A protocol: workers that run one block at a time.

    In each worker `drjax.engines.core.worker.run` runs the block. References and
    handles are objects of the pool's own types; handles are hashable. `result`,
    `abandon` and `forget` each end the use of a handle.

    Attributes:
      workers: How many workers there are, if none is away.
      stays: As of an `Engine`.
      generation: A number that grows whenever all workers are started again, and
        objects that were shared with the former ones are gone.
    """

    workers: int
    stays: str
    generation: int

    @property
    def working(self) -> int:
        """How many workers can take tasks now."""
        ...

    def share(self, x: File | list[np.ndarray]) -> Any:
        """Make an object available to all workers; return a reference for `submit`.

        It is a plan file, or a stage's global inputs, a list of arrays.
        """
        ...

    def submit(self, task: Task, file: Any, shared: Any) -> Any:
        """Send a task to the least loaded worker, and return its handle.

        `file` and `shared` are references from `share`, to the plan file and to the
        global inputs of the stage. It does not wait for the task.
        """
        ...

    def wait(self, handles: Sequence[Any], timeout: float | None) -> Sequence[Any]:
        """Wait until some task is done, and return the handles of those that are.

        The result is empty if `timeout` seconds are over, None: no limit, or if a
        worker has joined. Without handles it waits for a worker, if there is none.
        """
        ...

    def result(self, handle: Any) -> BlockResult:
        """Return the result of a task that is done.

        `Lost` is raised if the worker is gone; and what the stage raised, or an
        exception with its text. Another worker may join later, in `wait`.
        """
        ...

    def abandon(self, handle: Any) -> None:
        """Give up a task: end the worker that has it, and start another."""
        ...

    def forget(self, handle: Any) -> None:
        """Release a task whose result is not needed.

        The worker stays, and may finish the task; `abandon` replaces it.
        """
        ...

    def states(self) -> list[WorkerState]:
        """Ask each worker what it is doing.

        One that does not answer in time may be left out. The list is empty if the pool
        cannot run the groups of a block one by one to find a group that takes too long.
        """
        ...
