"""Partitioned values whose slices stay with workers, so that the driver has no array.

Input: the blocks of a stage, each with a reference to the slices that stayed with its
worker. Output: a `WorkerSlices`, which a later stage takes in place of an array; of a
block of groups a `PiecesOfBlock`, which an engine passes to the worker.

Invariants: a reference (to a *piece*, a list of arrays `[c, ...]` for some groups) is
the engine's own, and is released with the last value that has it. Blocks of a later
stage may be other ones: a block is assembled from parts of pieces.

Sharp edges: a piece may also be a list of arrays that the driver has, as for groups
that were dropped before a worker had their slices. A group of which no worker has a
slice has no piece: -1.
"""

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from drjax.engines.slices.groups import Unread, empty_slices, read_if_lazy
from drjax.plan import Gather, Loop, Plan, Scan, Scatter, Stage, Value

# The engine's reference to a piece, and the position of the value among its arrays.
Piece = tuple[Any, int]
LOST = (
    "Slices that stayed with the workers are lost, as the machine that had them has "
    "ended. Start again from arrays, such as those that .fetch() returned before."
)
INITIAL = "initial"  # the piece of slices with which workers begin by themselves


@dataclass(frozen=True)
class PiecesOfBlock:
    """The slices of a block of c groups, as parts of pieces that workers have.

    A piece is a list of arrays, with the slices that one block of an earlier stage left
    with its worker.

    Attributes:
      pieces: The pieces, as pairs: the engine's reference to the piece, or its list of
        arrays; and the position, among the arrays of the piece, of the one to read.
      piece: For each group the index of its piece in `pieces`, int `[c]`; -1: it has
        none.
      position: For each group the position of its slice along axis 0 of that array, int
        `[c]`.
    """

    pieces: list[Piece]
    piece: np.ndarray
    position: np.ndarray

    def __getitem__(self, index: np.ndarray) -> "PiecesOfBlock":
        """Return the slices of the groups at positions `[k]` or in a mask `[c]`."""
        piece, position = self.piece[index], self.position[index]
        return replace(self, piece=piece, position=position)

    def assemble(self, arrays: Callable[[Any], Sequence[np.ndarray]]) -> np.ndarray:
        """Read the slices of the c groups into one array `[c, ...]`.

        `arrays` takes the reference of a piece to its list of arrays, and is called
        once for each piece that is used. Groups that have no piece get zeros; if no
        group has one, the result is zeros `[c]`. It may be an array of a piece itself,
        if the block is exactly that.
        """
        used = [int(i) for i in np.unique(self.piece) if i >= 0]
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


class Keeping(Protocol):
    """The further methods of an `Engine` whose workers have slices between stages.

    Attributes:
      generation: A number that grows when the workers, and their slices, are gone.
    """

    generation: int

    def created(self, slices: "WorkerSlices") -> None:
        """Record new slices as in use: until their `release`, workers keep them."""

    def fetch(self, value: Value, pieces: list[Any]) -> list[Sequence[np.ndarray]]:
        """Read pieces, by the engine's references, to the driver, in order.

        `value` is the one that is read, for errors. It is a `DrjaxTypeError` if the
        workers give no slices away.
        """
        return [self.read(piece) for piece in pieces]

    def read(self, reference: Any) -> Sequence[np.ndarray]:
        """Read one piece by the engine's reference: a list of arrays `[c, ...]`."""
        ...


class WorkerSlices(Unread):
    """A partitioned value whose slices are in pieces that workers have.

    A piece is a list of arrays, with the slices that one block of an earlier stage left
    with its worker. `pieces` are pairs of the engine's reference to a piece, or its
    list of arrays, and the position of the value among these. `piece` and `position`,
    int `[n]`, are for each group the index of its piece in `pieces`, -1 if it has none,
    and the position of its slice along axis 0 of the piece's array. The constructor
    registers the value with the engine, so that its workers keep the pieces until
    `release`; None: the driver has all of them.

    Attributes:
      generation: The `generation` of these workers.
      held: Whether a handle of the caller has them: then they are needed after the
        call.
      shape: The shape of the array `[..., n, ...]` of all groups.
      dtype: The dtype of that array.
    """

    def __init__(
        self,
        value: Value,
        pieces: list[Piece],
        piece: np.ndarray,
        position: np.ndarray,
        engine: Keeping | None,
    ):
        self.value, self.engine = value, engine
        self.generation = 0 if engine is None else engine.generation
        self.held = False
        # Without pieces that no group has any more, so that these are released.
        used = [int(i) for i in np.unique(piece) if i >= 0]
        self.pieces = [pieces[i] for i in used]
        new = np.full(len(pieces) + 1, -1)
        new[used] = np.arange(len(used))
        self.piece, self.position = new[piece], position
        self.shape = value.whole_shape(len(piece))
        self.dtype = value.dtype
        if engine is not None:
            engine.created(self)

    @classmethod
    def of_array(cls, value: Value, slices: np.ndarray) -> "WorkerSlices":
        """Make the value from an array `[n, ...]`, as one piece that the driver has."""
        n = len(slices)
        return cls(value, [([slices], 0)], np.zeros(n, int), np.arange(n), None)

    def of_value(self, value: Value) -> "WorkerSlices":
        """Return a new `WorkerSlices` with the slices of this one, for another value.

        A call may return an argument unchanged as a result, and the argument is
        released then: the new one stays until its own `release`.
        """
        return WorkerSlices(value, self.pieces, self.piece, self.position, self.engine)

    def release(self) -> None:
        """Drop the references to all pieces, as the slices are not needed any more.

        From then on no group has a slice. Workers keep a piece until no value has it.
        """
        self.pieces, self.piece, self.held = [], np.full_like(self.piece, -1), False

    def block(self, low: int, high: int) -> PiecesOfBlock:
        """Return the slices of the groups from index `low` to before `high`, unread."""
        part = slice(low, high)
        return PiecesOfBlock(self.pieces, self.piece[part], self.position[part])

    def without_dropped(self, alive: np.ndarray) -> "WorkerSlices":
        """Return a new `WorkerSlices` in which dropped groups have no slices.

        `alive`, bool `[n]`, is false for these, here and below.
        """
        piece = np.where(alive, self.piece, -1)
        return WorkerSlices(self.value, self.pieces, piece, self.position, self.engine)

    def moved(self, value: Value, index: np.ndarray) -> "WorkerSlices":
        """Return the slices in other groups: group i gets that of the group `index[i]`.

        `value` is the one that the move gives, and `index` is int `[n]`. Nothing is
        sent: workers read the slices where they are.
        """
        places = self.piece[index], self.position[index]
        return WorkerSlices(value, self.pieces, *places, self.engine)

    def unless_dropped(
        self, old: Unread | np.ndarray, alive: np.ndarray
    ) -> "WorkerSlices":
        """Return this value, but with the slices of `old` for dropped groups.

        `old` is an array `[n, ...]`; a `WorkerSlices`, of which nothing is read; or
        another `Unread`, whose slices are read. The result is a new `WorkerSlices`;
        this one itself if no group was dropped.
        """
        if alive.all():
            return self
        if not isinstance(old, WorkerSlices):
            old = WorkerSlices.of_array(self.value, read_if_lazy(old))
        return WorkerSlices(
            self.value,
            [*self.pieces, *old.pieces],
            np.where(
                alive,
                self.piece,
                np.where(old.piece < 0, -1, old.piece + len(self.pieces)),
            ),
            np.where(alive, self.position, old.position),
            self.engine,
        )

    def whole(self) -> np.ndarray:
        """Read the slices of all groups into one array `[n, ...]`.

        The slice of a group that has none is NaN, or zero if the dtype has no NaN. It
        is a `DrjaxTypeError` if the workers give no slices away.
        """
        references = [x for x, _ in self.pieces if not isinstance(x, list)]
        arrays: dict[Hashable, Any] = {}
        if references:
            assert self.engine is not None  # it has made these references
            fetched = self.engine.fetch(self.value, references)
            arrays = dict(zip(map(id, references), fetched, strict=True))
        read = lambda x: x if isinstance(x, list) else arrays[id(x)]
        missing, out = self.piece < 0, empty_slices(self.value, len(self.piece))
        if not missing.all():
            out[~missing] = self.block(0, len(out))[~missing].assemble(read)
        return out


def keep_dropped(
    value: Value, new: Any, old: Unread | np.ndarray, alive: np.ndarray
) -> WorkerSlices | np.ndarray:
    """Return a kept result in which dropped groups have the slices of the call before.

    `new` is the result of the call, and `old` the argument that it replaces: arrays
    `[n, ...]`, or `Unread`s, slices that are not in this process. If workers have the
    slices of `new`, the result is a new `WorkerSlices`. Else it is an array `[n, ...]`,
    which is a copy if a group was dropped.
    """
    if isinstance(new, WorkerSlices):
        return new.of_value(value).unless_dropped(old, alive)
    new = read_if_lazy(new)
    if not alive.all():
        new = np.array(new)
        new[~alive] = read_if_lazy(old)[~alive]
    return new


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
