"""Coordinates of gathered slices in the place of groups, for stages on workers.

A function of one coordinate (`drjax.reduce_columns`) is the local stage of a plan whose
groups are the coordinates: workers compute blocks of coordinates, each with the numbers
of all groups of the program.

Input: the values of a loop of the op `columns`. Output: for its body arrays with the
coordinates along axis 0, and the reverse. Slices that workers have stay with them: each
worker reads its block of coordinates from all of them, and the driver reads none.
`read_by_workers` says which slices of a plan do, those that move to other groups
included.

Invariants: coordinates are in their flat order. Groups without a slice have NaNs, or
zeros if the dtype has none, in each column.

Sharp edges: if anything else reads the gathered slices, the driver has them anyway, and
sends the columns.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from drjax._plan import uses
from drjax.engines.slices.groups import empty_slices
from drjax.engines.slices.worker_slices import PiecesOfBlock, WorkerSlices
from drjax.plan import Columns, Gather, Move, Plan, Value


def gathers_for_columns(plan: Plan) -> frozenset[str]:
    """Return the names of gathered values that only work on coordinates reads."""
    columns, others = set[str](), set[str]()
    for position, value in uses.reads(plan):
        reader = plan.steps[position] if position < len(plan.steps) else None
        names = columns if isinstance(reader, Columns) else others
        names.add(value.name)
    gathers = [step for step in plan.steps if isinstance(step, Gather)]
    return frozenset(step.result.name for step in gathers) & columns - others


def is_move_of_slices(move: Move) -> bool:
    """Return whether a move gives each group the slice of one group.

    So does a permute or a take. Not a move from or to a population, which the server
    has, nor one that adds slices.
    """
    ends = move.source.partitioned and move.result.partitioned
    return move.whole_slices and ends


def read_by_workers(plan: Plan) -> frozenset[str]:
    """Return the names of values whose slices workers can read from each other.

    They are outputs of local stages, which are read as columns or move to other groups.
    """
    columns = gathers_for_columns(plan)
    return frozenset(
        step.source.name
        for step in plan.steps
        if (isinstance(step, Gather) and step.result.name in columns)
        or (isinstance(step, Move) and is_move_of_slices(step))
    )


@dataclass(frozen=True)
class PiecesOfColumns(PiecesOfBlock):
    """The columns of a block of c coordinates, as parts of pieces that workers have.

    Attributes:
      pieces: The pieces, as in `PiecesOfBlock`.
      piece: For each of the n groups the index of its piece in `pieces`, int `[n]`; -1:
        it has none.
      position: For each group the position of its slice along axis 0, int `[n]`.
      coordinates: The flat indices of the coordinates of the block, int `[c]`.
      number: How many coordinates a slice has.
      empty: The number, or small array `[*t]`, of a group that has no slice.
    """

    coordinates: np.ndarray
    number: int
    empty: np.ndarray

    def __getitem__(self, index: np.ndarray) -> "PiecesOfColumns":
        """Return the columns of those coordinates: positions `[k]` or a mask `[c]`."""
        return replace(self, coordinates=self.coordinates[index])

    def assemble(self, arrays: Callable[[Any], Sequence[np.ndarray]]) -> np.ndarray:
        """Read the columns of the c coordinates into one array `[c, n, *t]`.

        `arrays` takes the reference of a piece to its list of arrays, and is called
        once for each piece that is used.
        """
        shape = (len(self.coordinates), len(self.piece), *self.empty.shape)
        columns = np.empty(shape, self.empty.dtype)
        columns[...] = self.empty
        for i in np.unique(self.piece[self.piece >= 0]):
            reference, leaf = self.pieces[i]
            part = cut_coordinates(arrays(reference)[leaf], self)
            groups = np.flatnonzero(self.piece == i)
            columns[:, groups] = np.swapaxes(part, 0, 1)[:, self.position[groups]]
        return columns

    def of_its_own_parts(self) -> "PiecesOfColumns":
        """Return the same columns of pieces that have nothing but this block's.

        The arrays of such pieces are `[k, c, *t]`.
        """
        count = len(self.coordinates)
        return replace(self, coordinates=np.arange(count), number=count)


def cut_coordinates(slices: np.ndarray, columns: PiecesOfColumns) -> np.ndarray:
    """Return the part `[k, c, *t]` of some groups' slices for a block of c coordinates.

    The slices are `[k, *s, *t]` for coordinates of the shape `s`. The result is a view
    if the coordinates are consecutive.
    """
    flat = slices.reshape(len(slices), columns.number, *columns.empty.shape)
    first, index = columns.coordinates[:1], columns.coordinates
    # Mostly a range: a view, so that nothing but the block is copied.
    if len(index) and (index == np.arange(len(index)) + first).all():
        return flat[:, int(first[0]) : int(first[0]) + len(index)]
    return flat[:, index]


class WorkerColumns:
    """The columns of slices that workers have, as a partitioned input of a stage.

    `value` is the input of the body of a `columns` loop, a column of each of its `size`
    coordinates. Workers keep the slices while this refers to them.
    """

    def __init__(self, value: Value, slices: WorkerSlices, size: int):
        self.slices, self._size = slices, size
        flat = empty_slices(slices.value, 1).reshape(size, *value.shape[1:])
        self._empty = flat[0]

    def pieces(self) -> list[tuple[Any, tuple[int, int, int]]]:
        """List the pieces of the slices, and what is read of each.

        These are pairs of the engine's reference to a piece, and
        `(position of the value among its arrays, d, number of axes of t)` for slices
        `[*s, *t]` of d coordinates.
        """
        axes = self._empty.ndim
        return [(x, (leaf, self._size, axes)) for x, leaf in self.slices.pieces]

    def block(self, low: int, high: int) -> PiecesOfColumns:
        """Return the columns of the coordinates from `low` to before `high`, unread."""
        slices = self.slices
        return PiecesOfColumns(
            slices.pieces,
            slices.piece,
            slices.position,
            np.arange(low, high),
            self._size,
            self._empty,
        )


def by_coordinate(value: Value, x: Any, size: int) -> Any:
    """Return an input of a `columns` loop as its body takes it.

    `value` is the input of the body, and `x` that of the loop: `[n, *s, *t]` or
    `[*s, *t]` for `size` coordinates of the shape `s`, or a `WorkerSlices`. The result
    is a view with the d coordinates first, `[d, n, *t]` or `[d, *t]`, or
    `WorkerColumns`. An `x` that all coordinates share is returned as it is.
    """
    if not value.partitioned:
        return x
    if isinstance(x, WorkerSlices):
        return WorkerColumns(value, x, size)
    return np.moveaxis(np.reshape(x, value.whole_shape(size)), value.axis, 0)


def whole_of_coordinates(value: Value, result: Value, x: np.ndarray) -> np.ndarray:
    """Return an output of the body of a `columns` loop as an output of the loop.

    `value` is the output of the body, and `x` its array, `[d, n, *t]` or `[d, *t]`: the
    result is `[n, *s, *t]` or `[*s, *t]` for coordinates of the shape `s`. A sum over
    the coordinates is returned as it is.
    """
    if not value.partitioned:
        return x
    return np.reshape(np.moveaxis(x, 0, value.axis), result.shape)
