"""The lattice of partitioning inference: free, global, or partitioned along an axis.

Input: nothing. Output: `Kind`, an element of the lattice, and `signature`, the kinds
that each drjax primitive takes and returns.

            partitioned along axis 0, 1, ...    global
                                     \\         /
                                        free

Invariants: the lattice has two levels, so that a variable is raised at most once.
There is no top element: two uses that contradict each other are an error or a
scatter, never a kind.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from drjax import primitives
from drjax._primitives.reduce_ops import of_primitive


@dataclass(frozen=True)
class Kind:
    """Free, global, or partitioned along an axis: an element of the lattice.

    Attributes:
      name: "free", "global" or "partitioned".
      axis: The group axis of a partitioned value; None for the other kinds.
    """

    name: str
    axis: int | None = None

    def __str__(self) -> str:
        suffix = f" along axis {self.axis}" if self.axis else ""
        return self.name + suffix

    @property
    def partitioned(self) -> bool:
        return self.axis is not None


FREE, GLOBAL, PARTITIONED = Kind("free"), Kind("global"), Kind("partitioned", 0)


def partitioned_along(axis: int) -> Kind:
    return Kind("partitioned", axis)


def kinds_of_axes(axes: Sequence[int | None]) -> list[Kind]:
    """The kinds of values with these group axes; None: a global value."""
    return [GLOBAL if axis is None else partitioned_along(axis) for axis in axes]


def shift_axis(kind: Kind, by: int) -> Kind:
    """The kind of one step of a stacked value (by=-1), or of the stack (by=+1).

    Free for one step of a stack whose steps are the groups.
    """
    if kind.axis is None:
        return kind
    axis = kind.axis + by
    # The groups of a stack may be its steps. One step then has no group axis.
    return FREE if axis < 0 else partitioned_along(axis)


# The type rules of the primitives that do not reduce: kind of operands, of results.
_SIGNATURES: dict[Any, tuple[Kind, Kind]] = {
    primitives.broadcast_p: (GLOBAL, PARTITIONED),
    primitives.map_fn_p: (PARTITIONED, PARTITIONED),
    primitives.gather_p: (PARTITIONED, GLOBAL),
    primitives.scatter_p: (GLOBAL, PARTITIONED),
    primitives.partition_index_p: (GLOBAL, PARTITIONED),
}


def signature(primitive: Any) -> tuple[Kind, Kind] | None:
    """`(kind of operands, kind of results)` of a drjax primitive, or None."""
    if of_primitive(primitive) is not None:
        return PARTITIONED, GLOBAL
    return _SIGNATURES.get(primitive)
