"""Partitioned values whose slices stay with workers, so that the driver has no array.

Input: the blocks of a stage, each with a reference to the slices that stayed with its
worker. Output: a `WorkerSlices`, which a later stage takes in place of an array; of a
block of groups a `Pieces`, which an engine passes to the worker.

Invariants: a reference (to a *piece*, a list of arrays `[c, ...]` for some groups) is
the engine's own, and is released with the last value that has it. Blocks of a later
stage may be other ones: a block is assembled from parts of pieces.

Sharp edges: a piece may also be a list of arrays that the driver has, as for groups
that were dropped before a worker had their slices. A group of which no worker has a
slice has no piece: -1.
"""

import weakref
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from drjax._errors import EngineError
from drjax.engines.slices.slices import (
    Partitioned,
    Slices,
    empty_slices,
    read_if_lazy,
)
from drjax.plan import Gather, Loop, Plan, Scan, Scatter, Stage, Value

# The engine's reference to a piece, and the position of the value among its arrays.
Piece = tuple[Any, int]
LOST = (
    "Slices that stayed with the workers are lost, as the machine that had them has "
    "ended. Start again from arrays, such as those that .fetch() returned before."
)
INITIAL = "initial"  # the piece of slices with which workers begin by themselves


@dataclass(frozen=True)
class Pieces:
    """The slices of c groups, or columns of them, as parts of pieces that workers have.

    A piece is a list of arrays, with the slices that one block of an earlier stage left
    with its worker.

    Attributes:
      pieces: The pieces, as pairs: the engine's reference to the piece, or its list of
        arrays; and the position, among the arrays of the piece, of the one to read.
      piece: For each group the index of its piece in `pieces`, int `[c]`; -1: it has
        none.
      position: For each group the position of its slice along axis 0 of that array, int
        `[c]`.
      columns: Which columns are read of the slices; None: the slices themselves.
    """

    pieces: list[Piece]
    piece: np.ndarray
    position: np.ndarray
    columns: "Columns | None" = None

    def __len__(self) -> int:
        columns = self.columns
        return len(self.piece if columns is None else columns.coordinates)

    def __getitem__(self, index: np.ndarray | slice) -> "Pieces":
        """Return the slices, or the columns, at positions `[k]` or in a mask `[c]`."""
        if self.columns is not None:
            return replace(self, columns=self.columns[index])
        piece, position = self.piece[index], self.position[index]
        return replace(self, piece=piece, position=position)

    def used(self) -> list[int]:
        """Return the indices of the pieces that some group has."""
        return [int(i) for i in np.unique(self.piece) if i >= 0]

    def only_used(self) -> "Pieces":
        """Return the same slices without pieces that no group has."""
        used, new = self.used(), np.full(len(self.pieces) + 1, -1)
        new[used] = np.arange(len(used))
        pieces = [self.pieces[i] for i in used]
        return replace(self, pieces=pieces, piece=new[self.piece])

    def assemble(self, arrays: Callable[[Any], Sequence[np.ndarray]]) -> np.ndarray:
        """Read the slices of the c groups into one array `[c, ...]`, or the columns.

        `arrays` takes the reference of a piece to its list of arrays, and is called
        once for each piece that is used. Groups that have no piece get zeros; if no
        group has one, the result is zeros `[c]`. It may be an array of a piece itself,
        if the block is exactly that.
        """
        used = self.used()
        if self.columns is not None:
            return self.columns.assemble(self, used, arrays)
        parts = {i: arrays(self.pieces[i][0])[self.pieces[i][1]] for i in used}
        count = len(self.piece)
        if len(used) == 1:
            part = parts[used[0]]
            # The same block as before, mostly: no copy.
            whole = len(part) == count and (self.piece >= 0).all()
            if whole and (self.position == np.arange(count)).all():
                return part
        if not used:
            return np.zeros(count)
        like = parts[used[0]]
        out = np.zeros((count, *like.shape[1:]), like.dtype)
        for i, part in parts.items():
            out[self.piece == i] = part[self.position[self.piece == i]]
        return out


@dataclass(frozen=True)
class Columns:
    """Columns of c coordinates of slices `[*s, *t]`, for coordinates of the shape `s`.

    Attributes:
      coordinates: The flat indices of the coordinates, int `[c]`.
      number: How many coordinates a slice has.
      empty: The number, or small array `[*t]`, of a group that has no slice.
    """

    coordinates: np.ndarray
    number: int
    empty: np.ndarray

    def __getitem__(self, index: np.ndarray | slice) -> "Columns":
        return replace(self, coordinates=self.coordinates[index])

    def of_its_own_parts(self) -> "Columns":
        """Return the same columns of pieces that have nothing else, `[k, c, *t]`."""
        count = len(self.coordinates)
        return replace(self, coordinates=np.arange(count), number=count)

    def cut(self, slices: np.ndarray) -> np.ndarray:
        """Return the part `[k, c, *t]` of some groups' slices, `[k, *s, *t]`.

        The result is a view if the coordinates are consecutive.
        """
        flat = slices.reshape(len(slices), self.number, *self.empty.shape)
        first, index = self.coordinates[:1], self.coordinates
        # Mostly a range: a view, so that nothing but the block is copied.
        if len(index) and (index == np.arange(len(index)) + first).all():
            return flat[:, int(first[0]) : int(first[0]) + len(index)]
        return flat[:, index]

    def assemble(
        self,
        table: Pieces,
        used: Sequence[int],
        arrays: Callable[[Any], Sequence[np.ndarray]],
    ) -> np.ndarray:
        """Read the columns of the c coordinates into one array `[c, n, *t]`."""
        shape = (len(self.coordinates), len(table.piece), *self.empty.shape)
        columns = np.empty(shape, self.empty.dtype)
        columns[...] = self.empty
        for i in used:
            reference, leaf = table.pieces[i]
            part = self.cut(arrays(reference)[leaf])
            groups = np.flatnonzero(table.piece == i)
            columns[:, groups] = np.swapaxes(part, 0, 1)[:, table.position[groups]]
        return columns


class Keeping:
    """The base of an `Engine` whose workers have slices between stages.

    Attributes:
      generation: A number that grows when the workers, and their slices, are gone.
      in_use: The slices of workers that were not released; those that nothing else
        refers to are gone.
    """

    generation: int = 0

    def __init__(self) -> None:
        self.in_use: weakref.WeakSet[WorkerSlices] = weakref.WeakSet()

    def fetch(self, value: Value, pieces: list[Any]) -> list[Sequence[np.ndarray]]:
        """Read pieces, by the engine's references, to the driver, in order.

        `value` is the one that is read, for errors. It is a `DrjaxTypeError` if the
        workers give no slices away.
        """
        raise NotImplementedError

    def saved_as(self, piece: Any) -> str:
        """Return the digest of the file with the slices of a piece; "": none has them.

        It is that of `BlockResult.saved`, or of `load`.
        """
        return ""

    def load(self, folder: str, digests: Sequence[str]) -> list[Any]:
        """Let workers read files of slices in the folder of a checkpoint, as pieces.

        `ValueError`: a file is gone, or damaged.
        """
        raise NotImplementedError


class WorkerSlices(Slices):
    """A partitioned value whose slices are in pieces that workers have.

    The constructor registers the value with the engine, so that its workers keep the
    pieces until `release`; None: the driver has all of them.

    Attributes:
      generation: The `generation` of these workers.
    """

    def __init__(self, value: Value, table: Pieces, engine: Keeping | None):
        self.value, self.engine, self.n = value, engine, len(table)
        self.generation = 0 if engine is None else engine.generation
        # Without pieces that no group has any more, so that these are released.
        self.table = table.only_used()
        if engine is not None:
            engine.in_use.add(self)

    def _with(self, value: Value, **fields: Any) -> "WorkerSlices":
        return WorkerSlices(value, replace(self.table, **fields), self.engine)

    def block(self, low: int, high: int, leaves: Sequence[Any] = ()) -> Pieces:
        return self.table[low:high]

    def columns(self, value: Value, size: int) -> "WorkerSlices":
        # Workers read their block of coordinates from all pieces; the driver none.
        flat = empty_slices(self.value, 1).reshape(size, *value.shape[1:])
        return self._with(value, columns=Columns(np.arange(size), size, flat[0]))

    def moved(self, value: Value, index: np.ndarray) -> Slices:
        # Else a group would have NaNs, or zeros, which the driver knows.
        if (self.table.piece < 0).any():
            return super().moved(value, index)
        # Nothing is sent: workers read the slices where they are.
        table = self.table[index]
        return WorkerSlices(value, table, self.engine)

    def masked(self, alive: np.ndarray) -> "WorkerSlices":
        return self._with(self.value, piece=np.where(alive, self.table.piece, -1))

    def replacing(
        self, value: Value, old: Partitioned, alive: np.ndarray
    ) -> "WorkerSlices":
        # A new one, as a call may return an argument unchanged, which is released then.
        mine = self.table
        if alive.all():
            return self._with(value)
        if isinstance(old, WorkerSlices):
            other = old.table
        else:
            n, slices = self.n, read_if_lazy(old)
            other = Pieces([([slices], 0)], np.zeros(n, int), np.arange(n))
        shifted = np.where(other.piece < 0, -1, other.piece + len(mine.pieces))
        return self._with(
            value,
            pieces=[*mine.pieces, *other.pieces],
            piece=np.where(alive, mine.piece, shifted),
            position=np.where(alive, mine.position, other.position),
        )

    def opened(self) -> "WorkerSlices":
        if self.engine is not None and self.generation != self.engine.generation:
            raise EngineError(
                f"The workers that had the slices of {self.value.name} have ended, by "
                "close() or with their engine. Start again from arrays, such as those "
                "that .fetch() returned before."
            )
        return self

    def release(self) -> None:
        # From then on no group has a slice; workers keep a piece until no value has it.
        none = np.full_like(self.table.piece, -1)
        self.table, self.held = replace(self.table, pieces=[], piece=none), False

    def whole(self) -> np.ndarray:
        references = [x for x, _ in self.table.pieces if not isinstance(x, list)]
        arrays: dict[Hashable, Any] = {}
        if references:
            assert self.engine is not None  # it has made these references
            fetched = self.engine.fetch(self.value, references)
            arrays = dict(zip(map(id, references), fetched, strict=True))
        read = lambda x: x if isinstance(x, list) else arrays[id(x)]
        if self.table.columns is not None:
            return self.table.assemble(read)
        missing, out = self.table.piece < 0, empty_slices(self.value, self.n)
        if not missing.all():
            out[~missing] = self.table[~missing].assemble(read)
        return out


def slices_to_read(
    plan: Plan, taken: Sequence[Value] = (), kept: Collection[str] = ()
) -> Iterator[Value]:
    """Find the slices that are needed outside of the groups that computed them.

    An engine whose workers give no slices away refuses a plan with such values. They
    are what gathers, server stages, stacks of scans, conditions of loops and, unless
    they are kept, the plan's outputs read; some come more than once. Building blocks
    that move slices between groups, such as `drjax.take`, are not considered.

    `taken` are those of the partitioned inputs of the plan, or of the body of a loop,
    that may have been computed by an earlier stage or call; other inputs are data of
    the caller, which are never yielded. `kept` are the names of outputs that stay with
    the groups, and so are not read.
    """
    computed = {v.name for v in taken}
    read = [v for v in plan.outputs if v.name not in kept]
    for step in plan.steps:
        if isinstance(step, Stage) and step.local:
            computed |= {v.name for v in step.outputs}
        elif isinstance(step, Stage | Gather | Scatter):
            read += step.inputs
        elif isinstance(step, Loop):
            computed |= {v.name for v in step.outputs if v.partitioned}
            yield from _read_in_loop(step)
            if isinstance(step, Scan):
                read += step.split(step.inputs)[2]
    yield from (v for v in read if v.partitioned and v.name in computed)


def _read_in_loop(loop: Loop) -> Iterator[Value]:
    """Find the slices that are needed outside of the groups, in the bodies of a loop.

    What a scan or while loop carries from step to step may stay with the groups; what a
    scan stacks may not. Some come more than once.
    """
    for body in loop.bodies:
        # A while loop and a branch have no stacks.
        outputs, taken = body.outputs, body.inputs
        if isinstance(loop, Scan):
            outputs, taken = outputs[: loop.carry], loop.split(taken)[1]
        yield from slices_to_read(body, taken, {v.name for v in outputs})
