"""What a value is: global, partitioned along an axis, or not yet known."""

from dataclasses import dataclass
from typing import Any

from drjax import primitives
from drjax._primitives.reduce_ops import of_primitive


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


# The kind of the operands and of the results of primitives that do not reduce.
_SIGNATURES: dict[Any, tuple[Kind, Kind]] = {
    primitives.broadcast_p: (GLOBAL, PARTITIONED),
    primitives.map_fn_p: (PARTITIONED, PARTITIONED),
    primitives.gather_p: (PARTITIONED, GLOBAL),
    primitives.scatter_p: (GLOBAL, PARTITIONED),
    primitives.partition_index_p: (GLOBAL, PARTITIONED),
}


def signature(primitive: Any) -> tuple[Kind, Kind] | None:
    """The kind of a drjax primitive's operands, and that of its results."""
    if of_primitive(primitive) is not None:
        return PARTITIONED, GLOBAL
    return _SIGNATURES.get(primitive)
