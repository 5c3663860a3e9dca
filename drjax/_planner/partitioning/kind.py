"""What a value is: global, partitioned along an axis, or not yet known."""

from dataclasses import dataclass
from typing import Any

from drjax import primitives


@dataclass(frozen=True)
class Kind:
    """Free, global, or partitioned along an axis."""

    name: str
    axis: int | None = None

    def __str__(self) -> str:
        where = f" along axis {self.axis}" if self.axis else ""
        return self.name + where

    @property
    def partitioned(self) -> bool:
        return self.axis is not None


FREE, GLOBAL, PARTITIONED = Kind("free"), Kind("global"), Kind("partitioned", 0)


def along(axis: int) -> Kind:
    return Kind("partitioned", axis)


def moved(kind: Kind | None, by: int) -> Kind | None:
    """The kind of one of the values that a loop stacks, or of the stack."""
    if kind is None or kind.axis is None:
        return kind
    axis = kind.axis + by
    return FREE if axis < 0 else along(axis)


# The drjax primitives: the kind of their operands and of their results.
SIGNATURES: dict[Any, tuple[Kind, Kind]] = {
    primitives.broadcast_p: (GLOBAL, PARTITIONED),
    primitives.map_fn_p: (PARTITIONED, PARTITIONED),
    primitives.reduce_sum_p: (PARTITIONED, GLOBAL),
    primitives.reduce_mean_p: (PARTITIONED, GLOBAL),
    primitives.reduce_max_p: (PARTITIONED, GLOBAL),
    primitives.reduce_min_p: (PARTITIONED, GLOBAL),
    primitives.gather_p: (PARTITIONED, GLOBAL),
    primitives.scatter_p: (GLOBAL, PARTITIONED),
    primitives.partition_index_p: (GLOBAL, PARTITIONED),
}
