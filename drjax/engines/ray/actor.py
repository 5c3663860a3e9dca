"""A worker as an object, for engines whose workers are actors.

Input: tasks, whose block has no slices, and the slices apart from them. Output:
`BlockResult`s of `drjax.engines.core.worker.run`, and apart from them the slices
that stay with the workers.

Invariants: a message has only what is new to the worker: a plan file is sent once, and
then named, and so are slices that stay stored. They are arguments of their own, as an
engine may store them where the worker reads them without a copy; all else is pickled
here, as engines take much longer for each of their own objects.

Sharp edges: `skip` and `state` must be answered while `run` runs, so an actor needs a
second thread.
"""

import importlib
import os
import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np

from drjax.engines.core import combine, worker
from drjax.engines.core.blocks_of_groups import LoadedBlock
from drjax.engines.core.messages import (
    Block,
    BlockResult,
    File,
    Task,
    WorkerState,
)
from drjax.engines.core.saved_calls import read_slices, write_slices
from drjax.engines.ray import read_by_workers
from drjax.engines.ray.read_by_workers import UnreadPart
from drjax.engines.slices.worker_slices import Pieces

Arrays = list[np.ndarray]
_SMALL = 8 << 10  # bytes of a block that go into the message itself


def without_slices(
    name: str, task: Task, reference: Callable[..., Any]
) -> tuple[Task, list[int | Pieces | UnreadPart], list[Any]]:
    """Take the slices out of the block of a task, for `Worker.run`.

    The result is `(task, sources, parts)`: a copy of the task with a block without
    slices, and how to put them together again. `parts` has the slices: lists of arrays,
    if all arrays of the block together have 8 KiB at most, else references, from the
    method `ResidentSlices.reference`; and the engine's references to slices that
    workers have. `sources` says for each partitioned input of the stage, in order,
    where its slices are: an int is the index in `parts` of a list with one array
    `[c, ...]`. A `Pieces` says that workers have the slices: its `pieces` name
    indices in `parts` in place of references. An `UnreadPart` is read by the worker.

    `name` is that of the plan file.
    """
    block, parts = task.block, []
    sources: list[int | Pieces | UnreadPart] = []
    arrays = [x for x in block.slices if isinstance(x, np.ndarray)]
    small = sum(x.nbytes for x in arrays) <= _SMALL
    groups = block.group(0), len(block)
    for i, x in enumerate(block.slices):
        if isinstance(x, UnreadPart):
            sources.append(x)
            continue
        if isinstance(x, Pieces):
            x = x.only_used()  # as others may be large
            pieces = [(len(parts) + k, leaf) for k, (_, leaf) in enumerate(x.pieces)]
            parts += [getattr(piece, "reference", piece) for piece, _ in x.pieces]
            sources.append(replace(x, pieces=pieces))
            continue
        sources.append(len(parts))
        # Which slices they are; whether they are the same is compared. Each input by
        # itself, as one may change and another not, and for all rounds.
        key = name, task.stage, i, *groups
        parts.append([np.asarray(x)] if small else reference(key, [x], groups))
    return task.with_block(block.with_slices([])), sources, parts


class Stored(NamedTuple):
    """A part of a message that an argument of `Worker.run` has, by its index.

    Attributes:
      number: By which the worker keeps it for later messages; None: it does not.
    """

    argument: int
    number: int | None = None


class Message(NamedTuple):
    """What a worker is sent with a task, as bytes; see `without_slices`.

    Attributes:
      name: Of the plan file.
      file: The argument with the file; None if an earlier message had it.
      task: Without the slices of its block.
      shared: The global inputs of the stage, or the argument that has them.
      parts: Each is a list of arrays, the argument that has it, or the number of an
        earlier argument.
      outdated: Numbers that the worker forgets first; None: all.
      inputs: The argument with the `Lazy` inputs that the worker reads; None: none.
    """

    name: str
    file: Stored | None
    task: Task
    sources: list[int | Pieces | UnreadPart]
    shared: Arrays | Stored
    parts: list[Arrays | Stored | int]
    outdated: list[int] | None
    inputs: Stored | None = None

    def to_bytes(self) -> bytes:
        return pickle.dumps(self._replace(task=_fields(self.task))[:])

    @classmethod
    def from_bytes(cls, data: bytes) -> "Message":
        name, file, task, *rest = pickle.loads(data)
        return cls(name, file, Task(*task), *rest)


def _fields(x: Any) -> tuple[Any, ...]:
    """Return the fields of a dataclass in their order: pickle is slow with objects."""
    return tuple(vars(x).values())


def result_of(data: bytes | BlockResult) -> BlockResult:
    """Return the result that `Worker.run` has returned, pickled or not."""
    return BlockResult(*pickle.loads(data)) if isinstance(data, bytes) else data


class Worker:
    """A worker of an engine whose workers are actors, such as Ray's; it runs blocks.

    It stores the plan files that it receives by name, and slices by number, so that
    each is sent once.
    """

    def __init__(self):
        # What JAX imports when an exported function is first called, which takes a
        # third of the time of a short first block: others may wait for that one.
        importlib.import_module("scipy.linalg")
        self._files: dict[str, File] = {}
        self._slices: dict[int, Arrays] = {}

    def run(self, data: bytes, *arguments: Any) -> Any:
        """Run one stage of a plan file on one block of groups; `data` is a `Message`.

        The result is a `BlockResult`; or a tuple of it and of what is an object of its
        own: if `task.stay` is not (), a list of the slices for which it is true, arrays
        `[c, ...]`; if `task.apart`, the partial reductions, in the place of each of
        which the `BlockResult` has None. It has no values if `task.search` is true, if
        `skip` was called for the task, or if a group failed and `task.drop` is false.
        It is pickled if it is small. If the stage fails, and no single group does, the
        exception is raised.
        """
        result, task = self._result(data, arguments)
        own: list[Any] = []
        if task.stay:
            # A block without results has no slices.
            pairs = [*zip(result.slices, task.stay, strict=not result.slices == [])]
            own.append(kept := [x for x, stays in pairs if stays])
            saved = write_slices(task.save, kept) if task.save and kept else ""
            rest = [x for x, stays in pairs if not stays]
            result = replace(result, slices=rest, saved=saved)
        if task.apart:
            own.append(result.partials)
            result = replace(result, partials=[None] * len(result.partials))
        return (_pickled(result), *own) if own else _pickled(result)

    def _result(
        self, data: bytes, arguments: Sequence[Any]
    ) -> tuple[BlockResult, Task]:
        """Run the task of a message, and return it with its result."""
        message = Message.from_bytes(data)
        # Before the task, which may be skipped: later tasks only name the file.
        if message.file is not None:
            self._files[message.name] = arguments[message.file.argument]
        gone = message.outdated
        for number in [*self._slices] if gone is None else gone:
            self._slices.pop(number, None)

        def read(part: Arrays | Stored | int) -> Arrays:
            if isinstance(part, int):
                return self._slices[part]
            if not isinstance(part, Stored):
                return part
            arrays = arguments[part.argument]
            if part.number is not None:
                self._slices[part.number] = arrays
            return arrays

        parts, task = [*map(read, message.parts)], message.task
        slices = [
            parts[x][0]
            if isinstance(x, int)
            else x.assemble(parts.__getitem__)
            if isinstance(x, Pieces)
            else x
            for x in message.sources
        ]
        # The task came without its slices, which may be views of the shared store.
        block, failed = task.block.with_slices(slices), dict[int, str]()
        if message.inputs is not None:
            lazy: Any = arguments[message.inputs.argument]
            block, failed = self._read(block, lazy)
        task = task.with_block(block)
        if task.block.empty:
            result = BlockResult([], [], {}, os.getpid())
        else:
            # The worker module keeps the compiled stages of a file, by its key.
            result = worker.run(self._files[message.name], task, read(message.shared))
        result.failed.update(failed)
        return result, task

    def _read(self, block: Block, lazy: Sequence[Any]) -> LoadedBlock:
        return read_by_workers.read(block, lazy)

    def add(self, ops: Sequence[str], *partials: Sequence[Any]) -> list[Any]:
        """Add up partial reductions of several blocks; see `combine.add`."""
        return combine.add(ops, [None] * len(ops), *partials)

    def load(self, folder: str, digest: str) -> tuple[str, Arrays]:
        """Read the slices of a checkpoint's file; the text says why that failed."""
        try:
            return "", read_slices(folder, digest)
        except ValueError as error:
            return str(error), []

    def skip(self, number: int) -> None:
        """Skip the task with this `Task.number`, as its result is not needed.

        `run` then returns an empty `BlockResult`. A task that has begun is not stopped.
        """
        worker.skip(number)

    def state(self) -> WorkerState:
        """Return what the worker is doing, also while `run` runs in another thread."""
        return worker.state()

    def devices(self) -> tuple[int, str]:
        """Return how many devices the worker has, and of which platform."""
        devices = jax.local_devices()
        return len(devices), devices[0].platform


def _pickled(result: BlockResult) -> bytes | BlockResult:
    """Pickle a result, unless it has large arrays, which the engine may share."""
    sizes = (getattr(x, "nbytes", 0) for x in (*result.partials, *result.slices))
    return pickle.dumps(_fields(result)) if sum(sizes) <= _SMALL else result
