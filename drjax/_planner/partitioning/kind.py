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

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from drjax import primitives
from drjax._compat.jax_types import Primitive
from drjax._primitives.moves import MOVES
from drjax._primitives.reduce_ops import of_primitive


@dataclass(frozen=True)
class Kind:
    """The kind of a variable: "free", "global", or "partitioned" along `axis`.

    A variable is free if no kind is inferred for it yet: the lowest element of the
    lattice. `axis` is the group axis; None for the other kinds.
    """

    name: str
    axis: int | None = None

    def __str__(self) -> str:
        # Axis 0 is the rule in users' programs, so only others are printed.
        suffix = f" along axis {self.axis}" if self.axis else ""
        return self.name + suffix

    @property
    def partitioned(self) -> bool:
        """Whether the kind is partitioned, along any axis."""
        return self.axis is not None


FREE, GLOBAL, PARTITIONED = Kind("free"), Kind("global"), Kind("partitioned", 0)


@functools.cache
def partitioned_along(axis: int) -> Kind:
    """Return the kind of a partitioned value whose groups lie along `axis`."""
    # One object for each kind, as kinds are compared often.
    return PARTITIONED if axis == 0 else Kind("partitioned", axis)


def kinds_of_axes(axes: Sequence[int | None]) -> list[Kind]:
    """Return a list of kinds: for an axis, partitioned along it; for None, global."""
    return [GLOBAL if axis is None else partitioned_along(axis) for axis in axes]


def shift_axis(kind: Kind, by: int) -> Kind:
    """Return the kind of one step of a scan's stack (`by` -1), or of the stack (+1).

    A stack has the steps along a new axis 0, so a group axis is greater by one in the
    stack than in a step. One step of a stack that is partitioned along axis 0, whose
    steps are the groups, is free. Free and global kinds are returned unchanged.
    """
    if kind.axis is None:
        return kind
    axis = kind.axis + by
    # The groups of a stack may be its steps. One step then has no group axis.
    return FREE if axis < 0 else partitioned_along(axis)


# The kinds of a primitive's operands, of which the last is that of all further ones,
# and the kind of its results.
Signature = tuple[tuple[Kind, ...], Kind]
# The type rules of the primitives that do not reduce.
_SIGNATURES: dict[Any, Signature] = {
    primitives.broadcast_p: ((GLOBAL,), PARTITIONED),
    primitives.map_fn_p: ((PARTITIONED,), PARTITIONED),
    primitives.gather_p: ((PARTITIONED,), GLOBAL),
    primitives.scatter_p: ((GLOBAL,), PARTITIONED),
    primitives.partition_index_p: ((), PARTITIONED),
    # Slices, and perhaps an index.
    **dict.fromkeys(MOVES.values(), ((PARTITIONED, GLOBAL), PARTITIONED)),
}


def signature(primitive: Primitive) -> Signature | None:
    """Return the kinds that a primitive of drjax takes, and the kind of each result.

    None for primitives of JAX, and for a fold, whose kinds depend on its parameters.
    """
    # Plug-ins register reductions of their own, so the table above lists none.
    if of_primitive(primitive) is not None:
        return (PARTITIONED,), GLOBAL
    return _SIGNATURES.get(primitive)
