"""The core of engines without an engine: every block runs in this process, in turn.

Input: a plan and options. Output: a `Runner`. For tests of the core, and for groups
that come from an iterable or from files.

Invariants: as for every `Pool`: a task is done when `submit` returns, so `wait` never
waits.

Sharp edges: a group that never ends, or that ends the process, ends the call: there is
no `timeout` and no worker to replace.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from drjax._sharding.group_mesh import MeshAxes, local_mesh
from drjax.engines.core import pool_scheduler, worker
from drjax.engines.core.driver import Runner
from drjax.engines.core.messages import BlockResult, File, Task, WorkerState
from drjax.engines.core.options import EngineOptions, checked_integer
from drjax.engines.core.protocols import Results, StageCall
from drjax.plan import Plan


def compile(
    plan: Plan,
    *,
    workers: int = 1,
    keep: dict[Any, Any] | None = None,
    **options: Any,
) -> Runner:
    """A function that runs the plan block by block in this process.

    Args:
      plan: The plan.
      workers: The number of workers for which the default block size is chosen. All
        blocks run in this process, one after another.
      keep: Which partitioned results are arguments of the next call: a dict from
        results to arguments. `{1: 0}` means that element 1 of what the function returns
        is positional argument 0 of the next call, both counted from 0. The function
        returns a `Kept` for each.
      **options: See `EngineOptions`. `timeout` interrupts no block.

    Returns:
      A `Runner` with the signature of the planned function.

    Raises:
      EngineError: (when called) a group failed, or too few survive.
      DrjaxTypeError, DrjaxValueError: A wrong option.
      MeshError: A group needs more devices than this process has.

    Example:
      >>> import drjax, jax.numpy as jnp
      >>> from drjax.backends import in_process
      >>> mean = drjax.program(clients=4)(drjax.reduce_mean)
      >>> plan = drjax.make_plan(mean)(jnp.arange(4.0))
      >>> print(in_process.compile(plan, block_size=3)(jnp.arange(4.0)))
      1.5
    """
    checked = EngineOptions.checked(**options)
    return Runner(plan, InProcess(workers), checked, keep=keep)


class InProcess:
    """A `Pool` without worker processes, which runs each block when it is submitted.

    `workers` is the number of workers for which the default block size is chosen.
    `generation` is always 0, as there are no workers that could be replaced.
    """

    def __init__(self, workers: int = 1):
        self.workers = checked_integer("workers", workers, 1)
        self.generation = 0
        self.stays = ""  # the driver has what stays: it is the same process

    @property
    def working(self) -> int:
        return self.workers

    def open(self) -> None:
        pass

    def check_mesh(self, axes: MeshAxes) -> None:
        local_mesh(axes)

    def results(self, call: StageCall) -> Results:
        return pool_scheduler.results(self, call)

    def share(self, x: Any) -> Any:
        # The workers are this process: they read the object itself.
        return x

    def submit(
        self, task: Task, file: File, shared: list[np.ndarray]
    ) -> "_FinishedTask":
        # It runs at once: a pool of one process cannot have tasks in flight.
        return _FinishedTask(file, task, shared)

    def wait(
        self, handles: Sequence["_FinishedTask"], timeout: float | None
    ) -> Sequence["_FinishedTask"]:
        return handles

    def result(self, handle: "_FinishedTask") -> BlockResult:
        if handle.error is not None:
            raise handle.error
        return handle.result

    def abandon(self, handle: "_FinishedTask") -> None:
        # Nothing is late: a task has ended when `submit` returns.
        pass

    def forget(self, handle: "_FinishedTask") -> None:
        pass

    def states(self) -> list[WorkerState]:
        # One process runs all blocks, whatever `workers` is.
        return [worker.state()]

    def close(self) -> None:
        pass


class _FinishedTask:
    """The handle of a task that has ended: the constructor runs the task.

    An exception of the task is stored, for `InProcess.result` to raise. `shared` are
    the global inputs of the stage, in order.
    """

    def __init__(self, file: File, task: Task, shared: list[np.ndarray]):
        self.result: Any = None
        self.error: Exception | None = None
        try:
            self.result = worker.run(file, task, shared)
        # Raised by `result`, where the scheduler expects it.
        except Exception as error:
            self.error = error
