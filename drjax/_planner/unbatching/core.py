"""The equation of one group, and what unbatching rules share.

Input: an equation and, for each operand, its group axis or None. Output: an
`UnbatchedEquation`, whose `run` binds the equation of one group.

Let `x[i]` be the slice of x at index i of its group axis, and x itself for an operand
without one. An `UnbatchedEquation` u of an equation f states, for each group i,

    f(x, y, ...)[i] == u(x[i], y[i], ...)

Invariants: an operand whose `in_axes` is None enters every group whole. A rule may give
an operand an axis that was None: inference then demands it partitioned.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from jax import lax

from drjax import _compat
from drjax._compat.types import Array, Eqn, Params

T = TypeVar("T")
# The group axis of each operand; None: it is not partitioned.
Axes = Sequence[int | None]
# From the equation and the group axis of its one operand to the group axis of its
# results, and the parameters that differ for one group; None: it mixes groups.
AxisRule: TypeAlias = Callable[[Eqn, int], tuple[int, Params] | None]


@dataclass(frozen=True)
class UnbatchedEquation:
    """The equation of one group, derived from a batched equation.

    Attributes:
      in_axes: For each operand of the batched equation, also for a dropped one, its
        group axis; None: every group takes the whole operand.
      out_axes: For each result of the batched equation its group axis.
      params: The parameters of the equation of one group; None: those of the batched
        equation.
      dropped_operands: The positions, among the operands of the batched equation, of
        those that the equation of one group does not take.
      keeps_unit_axis: Whether the equation of one group takes and returns slices that
        still have the group axis, of size one.
      pointwise: Whether it is a pointwise equation of one result.
    """

    in_axes: tuple[int | None, ...]
    out_axes: tuple[int, ...]
    params: dict[str, Any] | None
    dropped_operands: tuple[int, ...] = ()
    keeps_unit_axis: bool = False
    pointwise: bool = False

    def run(self, eqn: Eqn, operands: Sequence[Array]) -> list[Array]:
        """Bind the equation of one group, from slices to slices without the group axis.

        There is an operand for each one of `eqn`, the batched equation, also for those
        that are dropped; one whose entry in `self.in_axes` is None is whole.
        """
        if self.keeps_unit_axis:
            # The primitive needs this dimension, or an index addresses it. Where it has
            # size one, dimension numbers of the batched equation fit a single group.
            operands = [
                x if axis is None else lax.expand_dims(x, (axis,))
                for x, axis in zip(operands, self.in_axes, strict=True)
            ]
        operands = [x for i, x in enumerate(operands) if i not in self.dropped_operands]
        params = eqn.params if self.params is None else self.params
        # Bound with the source line of the batched equation, for error texts.
        if self.pointwise:
            (axis,), shape = self.out_axes, eqn.outvars[0].aval.shape
            return _compat.bind_pointwise(eqn, operands, drop(axis, shape), params)
        outs = _compat.bind_equation(eqn, operands, **params)
        if self.keeps_unit_axis:
            outs = [
                lax.squeeze(x, (axis,))
                for x, axis in zip(outs, self.out_axes, strict=True)
            ]
        return outs


# From the equation and the group axes of its operands to the equation of one group;
# None: it mixes groups, or no operand is partitioned.
UnbatchingRule: TypeAlias = Callable[[Eqn, Axes], UnbatchedEquation | None]


def without(axis: int, dims: Sequence[int]) -> tuple[int, ...]:
    """Renumber dimensions of an array from which dimension `axis` is removed.

    `dims` does not have `axis`; those after it become less by one, and stay in order.
    """
    return tuple(d - (d > axis) for d in dims)


def drop(axis: int, values: Sequence[T]) -> tuple[T, ...]:
    """Return `values` without the entry at position `axis`, as a tuple."""
    return (*values[:axis], *values[axis + 1 :])


def elementwise(eqn: Eqn, axes: Axes) -> UnbatchedEquation | None:
    """Unbatch a pointwise equation: `f(x, y)[i] == f(x[i], y[i])`, along one axis.

    The group takes slices of all operands but scalars. None if no operand is
    partitioned, or operands are partitioned along different axes.
    """
    known = None
    for axis in axes:
        # Groups along different axes would meet as a matrix of all pairs of groups.
        if axis is not None and known is not None and axis != known:
            return None
        known = axis if known is None else known
    if known is None:
        return None
    # Scalars have no axis to slice; the primitive broadcasts them.
    # Inlining makes pointwise broadcasts explicit, so that all others have one shape;
    # global ones among them are scattered.
    in_axes = tuple([known if var.aval.shape else None for var in eqn.invars])
    outs = (known,) * len(eqn.outvars)
    if "sharding" not in eqn.params:
        return _pointwise(in_axes, outs)
    # A sharding names the dimensions of the whole array.
    params = {**eqn.params, "sharding": None}
    return UnbatchedEquation(in_axes, outs, params, pointwise=len(outs) == 1)


@functools.cache
def _pointwise(in_axes: tuple[int | None, ...], outs: tuple[int, ...]) -> Any:
    # One object for each form, as there are many pointwise equations.
    return UnbatchedEquation(in_axes, outs, None, pointwise=len(outs) == 1)


def unary(rule_of_axis: AxisRule) -> "UnbatchingRule":
    """Build the unbatching rule of a primitive with one operand.

    It is None if the operand is not partitioned, or the equation mixes groups.
    """

    def rule(eqn: Eqn, axes: Axes) -> UnbatchedEquation | None:
        axis = axes[0]
        if axis is None or len(axes) != 1:
            return None
        unbatched = rule_of_axis(eqn, axis)
        if unbatched is None:
            return None
        out, params = unbatched
        params = {**eqn.params, **params}
        return UnbatchedEquation((axis,), (out,) * len(eqn.outvars), params)

    return rule
