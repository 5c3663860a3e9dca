"""A worker as an object, for engines whose workers are actors.

A message bears what is new to the worker: a plan file is sent once, and then named; the
rows of a block may be stored where the worker reads them.
"""

from dataclasses import replace

import numpy as np

from drjax.backends.engine import worker
from drjax.backends.engine.messages import Done, File, State, Work

Arrays = list[np.ndarray]


class Worker:
    """What an actor is; `skip` and `state` must be answered while `run` runs."""

    def __init__(self):
        self._files: dict[str, File] = {}

    def run(
        self, name: str, file: File | None, task: Work, rows: Arrays, shared: Arrays
    ) -> Done:
        """Run a block, of these rows; `file`: None, if the worker has it by `name`."""
        if file is not None:
            self._files[name] = file
        task = replace(task, block=replace(task.block, rows=rows))
        return worker.run(self._files[name], task, shared)

    def skip(self, number: int) -> None:
        """See `drjax.backends.engine.worker.skip`."""
        worker.skip(number)

    def state(self) -> State:
        """What the worker is doing."""
        return worker.state()
