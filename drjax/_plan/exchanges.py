"""The exchanges of a plan: what the server and the groups communicate.

    server -> groups      Broadcast  Scatter
    groups -> server      Reduce  Fold  Gather
    groups -> groups      Permute  Take  PutAdd

Input: the values that are communicated. Output: records, whose bytes the ledger counts.
Sharp edges: backends run a `Reduce` or a `Fold` together with the stage before it.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from drjax._partition import Partition, with_size
from drjax._plan.schedule_moves import Sources, schedule
from drjax._plan.steps import Exchange, Stage
from drjax._plan.value import Value
from drjax._plan.wire import Wire


class _OneValue(Exchange):
    """An exchange of one value for another one."""

    # Annotations alone, as in `Step`.
    source: Value
    result: Value

    @property
    def inputs(self) -> tuple[Value, ...]:
        return (self.source,)

    @property
    def outputs(self) -> tuple[Value, ...]:
        return (self.result,)


# -------------------------------------------------------------------------------------
# From the server to the groups


@dataclass(frozen=True)
class Broadcast(Exchange):
    """Each group gets a copy of a global value, which keeps its name.

    Attributes:
      source: The global value.
    """

    source: Value

    op: ClassVar[str] = "broadcast"
    direction = "down"
    outputs = ()

    @property
    def inputs(self) -> tuple[Value, ...]:
        return (self.source,)


@dataclass(frozen=True)
class Scatter(_OneValue):
    """Group i gets slice i of a global value.

    Attributes:
      source: The global value, with the groups along the axis `result.axis`.
      result: The partitioned value that it gives.
    """

    source: Value
    result: Value

    op: ClassVar[str] = "scatter"
    direction = "down"

    def messages(self) -> Iterator[tuple[Value, int]]:
        yield self.result, self.result.nbytes


# -------------------------------------------------------------------------------------
# From the groups to the server


@dataclass(frozen=True)
class Reduce(_OneValue):
    """One reduction of all groups' slices to a global value, and how it is encoded.

    Attributes:
      op: `sum`, `mean`, `max` or `min`.
      source: The partitioned value that is reduced.
      result: The global value that it gives.
      wire: How a sum or mean is encoded between devices; None: it is not encoded.
      sharded: Whether the devices of a mesh have parts of the result, not all of it.
      secure: Of a secure sum, the least number of groups to sum: no process but a
        group's own may see its slice. 0: the sum is not secure.
      bound: Of a secure sum, the largest magnitude of a number of one group; None: the
        engine's.
    """

    op: str
    source: Value
    result: Value
    wire: Wire | None = None
    sharded: bool = False
    secure: int = 0
    bound: float | None = None

    direction = "up"
    combines = True

    def messages(self) -> Iterator[tuple[Value, int]]:
        source, wire = self.source, self.wire
        yield source, wire.nbytes(math.prod(source.shape)) if wire else source.nbytes

    def slices_per_device(self, size: int, devices: int) -> int:
        return 1  # a partial reduction


@dataclass(frozen=True)
class Gather(_OneValue):
    """All groups' slices, in order, as one global value.

    Attributes:
      source: The partitioned value that is gathered.
      result: The global value, with the groups along axis 0.
      sharded: Whether the devices of a mesh have parts of the result, not all of it;
        "auto": only if the axes of the mesh are Auto.
    """

    source: Value
    result: Value
    sharded: bool | str = False

    op: ClassVar[str] = "gather"
    phrase = "all groups' slices"
    direction = "up"
    wire, secure, bound = None, 0, None  # it is neither encoded nor secure

    def slices_per_device(self, size: int, devices: int) -> int:
        return -(-size // devices)


@dataclass(frozen=True)
class Fold(Exchange):
    """One fold of all groups' states into a global state, in the order of the groups.

    Attributes:
      combine: The associative function of two states, as a stage: of the values that it
        closes over, then the leaves of the left state, and those of the right one. Its
        outputs are `results`.
      init: The leaves of the neutral state, global values.
      sources: The leaves of the groups' states, partitioned values.
      results: The leaves of the fold, global values.
      commutative: Whether states may be combined in any order.
    """

    combine: Stage
    init: tuple[Value, ...]
    sources: tuple[Value, ...]
    results: tuple[Value, ...]
    commutative: bool = False

    op: ClassVar[str] = "fold"
    direction = "up"
    combines = True

    @property
    def consts(self) -> tuple[Value, ...]:
        """The global values that the function closes over."""
        return self.combine.inputs[: -2 * len(self.sources)]

    @property
    def inputs(self) -> tuple[Value, ...]:
        """The values that the fold reads."""
        return (*self.consts, *self.init, *self.sources)

    @property
    def outputs(self) -> tuple[Value, ...]:
        return self.results

    def messages(self) -> Iterator[tuple[Value, int]]:
        return ((v, v.nbytes) for v in self.sources)

    def slices_per_device(self, size: int, devices: int) -> int:
        return 1  # the device's own state

    def stages(self) -> Iterator[tuple[str, Stage]]:
        yield "fold", self.combine


# -------------------------------------------------------------------------------------
# Between groups


class Move(_OneValue):
    """One move of slices from groups to groups: a permute, a take or a put_add.

    Attributes:
      op: `permute`, `take` or `put_add`, as the primitives in `drjax.primitives`.
      source: The partitioned value whose slices move; or a population, of which the
        groups are a cohort: a value `[N, *s]` that the server has, so that it is
        global. Here it is over a partition of N groups, the server's own.
      result: The partitioned value that it gives, or a population.
      sources: Of a permute, for each group the group whose slice it gets. Of another
        move the numbers of its index, if they are known; else ().
      index: Of a take, int32: for each slice of `result` that of `source`. Of a
        put_add, for each slice of `source` that of `result`, if there is one.
    """

    op: ClassVar[str]
    sources: tuple[int, ...]
    index: Value | None

    direction = "between"
    # Which end has the groups of the primitive's partition.
    partition_of: ClassVar[str] = "source"
    # Whether each group gets the slice of one group, unchanged.
    whole_slices: ClassVar[bool] = False

    def check(self) -> None:
        """Raise `ValueError` if no plan could have the move."""
        ends = self.source, self.result
        if not any(v.partitioned for v in ends):
            raise ValueError(f"a {self.op} moves values that are not partitioned")
        # A population has its slices along axis 0.
        first, second = ((v.shape[not v.partitioned :], v.dtype) for v in ends)
        if first != second or any(not (v.partitioned or v.shape) for v in ends):
            raise ValueError(f"a {self.op} changes the type of slices")

    def over(self, end: Value) -> Partition:
        """The partition of the source or result; a population has one of N groups."""
        if end.over:
            return end.over[0]
        (groups,) = self.source.over or self.result.over
        return with_size(groups, end.shape[0])

    @property
    def inputs(self) -> tuple[Value, ...]:
        """The values that the move reads, `source`, and `index` if there is one."""
        return (self.source,) if self.index is None else (self.source, self.index)

    def messages(self) -> Iterator[tuple[Value, int]]:
        slices = self.source if self.source.partitioned else self.result
        yield self.source, slices.nbytes


@dataclass(frozen=True)
class Permute(Move):
    """Group i gets the slice of group `sources[i]`. See `Move`."""

    source: Value
    result: Value
    sources: tuple[int, ...]

    op = "permute"
    phrase = "permuted slices"
    whole_slices = True
    index = None

    def check(self) -> None:
        if not (self.source.partitioned and self.result.partitioned):
            raise ValueError("a permute moves values that are not partitioned")
        super().check()
        size = self.over(self.source).size
        # Their number first, as a file may claim any number of groups.
        sources = np.asarray(self.sources)
        if len(sources) != size or (np.sort(sources) != np.arange(size)).any():
            raise ValueError("a permute has no permutation of the groups")

    def slices_per_device(self, size: int, devices: int) -> int:
        return _slices_sent(self, size, devices)


def _slices_sent(move: Move, size: int, devices: int) -> int:
    """The slices that a device sends by the `Schedule` of a move that is known."""
    (nbytes,) = (nbytes for _, nbytes in move.messages())
    return schedule(Sources(move.sources), size, devices, nbytes).slices_sent


class _Indexed(Move):
    """A move whose index is a value, of which the numbers may be known."""

    index: Value
    sources: tuple[int, ...]

    def check(self) -> None:
        super().check()
        indexed = self.source if self.partition_of == "result" else self.result
        size = self.over(indexed).size
        index, expected = self.index, ((size,), np.dtype(np.int32))
        if index.partitioned or (index.shape, index.dtype) != expected:
            raise ValueError(f"a {self.op} has no index of the groups")
        if self.sources and len(self.sources) != size:
            raise ValueError(f"a {self.op} has no sources of the groups")

    def slices_per_device(self, size: int, devices: int) -> int:
        if self.sources:
            of_index = getattr(self, self.partition_of)
            return _slices_sent(self, self.over(of_index).size, devices)
        # A reduce-scatter: each device puts in all slices of the result, with zeros for
        # those that it does not have. If the result has more slices than the source, it
        # is an all-gather instead, of the device's own slices of the source.
        source, result = self.over(self.source).size, self.over(self.result).size
        return -(-source // devices) if result > source else result


@dataclass(frozen=True)
class Take(_Indexed):
    """Group i gets slice `index[i]`, or zeros if there is none. See `Move`."""

    source: Value
    result: Value
    index: Value
    sources: tuple[int, ...] = ()

    op = "take"
    phrase = "slices of others"
    whole_slices = True


@dataclass(frozen=True)
class PutAdd(_Indexed):
    """Slice i is added to that of group `index[i]`, if there is one. See `Move`."""

    source: Value
    result: Value
    index: Value
    sources: tuple[int, ...] = ()

    op = "put_add"
    phrase = "added to others"
    partition_of = "result"


# All moves: the planner makes those of the primitives of their names.
MOVES: tuple[type[Move], ...] = (Permute, Take, PutAdd)
