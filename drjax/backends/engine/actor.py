"""A worker as an object, for engines whose workers are actors.

Input: tasks, whose block has no slices, and the slices apart from them. Output:
`BlockResult`s of `drjax.backends.engine.worker.run`.

Invariants: a message has only what is new to the worker: a plan file is sent once, and
then named. The slices of a block are an argument of their own, as an engine may store
them where the worker reads them without a copy.

Sharp edges: `skip` and `state` must be answered while `run` runs, so an actor needs a
second thread.
"""

from dataclasses import replace

import numpy as np

from drjax.backends.engine import worker
from drjax.backends.engine.messages import BlockResult, File, Task, WorkerState

Arrays = list[np.ndarray]


class Worker:
    """A worker that keeps plan files by name, for engines whose workers are actors."""

    def __init__(self):
        self._files: dict[str, File] = {}

    def run(
        self, name: str, file: File | None, task: Task, slices: Arrays, shared: Arrays
    ) -> BlockResult:
        """Run a block through a stage of a plan file; returns its `BlockResult`.

        Args:
          name: The name of the plan file, by which the worker keeps it.
          file: The file; None if the worker was sent it before, by this name.
          task: The task; its block has no slices.
          slices: The slices of the block, one array `[c, ...]` for each partitioned
            input.
          shared: The global inputs of the stage.
        """
        if file is not None:
            self._files[name] = file
        # The task came without its slices: `slices` may be views of the shared store.
        task = replace(task, block=replace(task.block, slices=slices))
        # The worker module keeps the compiled stages of a file, by its key.
        return worker.run(self._files[name], task, shared)

    def skip(self, number: int) -> None:
        """Do not begin the task with this number: its result is not needed any more."""
        worker.skip(number)

    def state(self) -> WorkerState:
        """What the worker is doing, as a `WorkerState`; answered while `run` runs."""
        return worker.state()
