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
    """A worker of an engine whose workers are actors, such as Ray's; it runs blocks.

    It stores the plan files that it receives by name, so that each is sent once.
    """

    def __init__(self):
        self._files: dict[str, File] = {}

    def run(
        self, name: str, file: File | None, task: Task, slices: Arrays, shared: Arrays
    ) -> BlockResult:
        """Run one stage of a plan file on one block of groups.

        Args:
          name: The name of the plan file in this worker's store.
          file: The plan file; None if an earlier call passed the file of this name.
          task: The index of the stage, the block, and how failures are treated. The
            block's list of slices is empty.
          slices: For each partitioned input of the stage, in order, the slices of the
            block's c groups, `[c, ...]`.
          shared: The global inputs of the stage, in order.

        Returns:
          The block's partial reductions, the groups' slices of the outputs that are
          read later, and why groups failed. No values if `task.search` is true, or if
          `skip` was called for the task.

        Raises:
          Exception: The stage failed, and no single group causes it.
        """
        # Before the task, which may be skipped: later tasks only name the file.
        if file is not None:
            self._files[name] = file
        # The task came without its slices: `slices` may be views of the shared store.
        task = replace(task, block=replace(task.block, slices=slices))
        # The worker module keeps the compiled stages of a file, by its key.
        return worker.run(self._files[name], task, shared)

    def skip(self, number: int) -> None:
        """Skip the task with this `Task.number`, as its result is not needed.

        `run` then returns an empty `BlockResult`. A task that has begun is not stopped.
        """
        worker.skip(number)

    def state(self) -> WorkerState:
        """The worker's process id, the groups that it runs, and for how long.

        It may be called in another thread while `run` runs.
        """
        return worker.state()
