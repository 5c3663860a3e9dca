"""The row-by-row form of an equation, and what its rules share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jax import lax

from drjax import _compat

Axes = Sequence[int | None]


@dataclass(frozen=True)
class Rows:
    """How an equation works row by row.

    Attributes:
      ins: For each operand its group axis; None: every group takes all of it.
      outs: For each result its group axis.
      params: The parameters of the equation for one group.
      without: Operands that the equation for one group does not take.
      size_one: Whether the equation for one group takes and gives rows that still have
        the group axis, of size one.
    """

    ins: tuple[int | None, ...]
    outs: tuple[int, ...]
    params: dict[str, Any]
    without: tuple[int, ...] = ()
    size_one: bool = False

    def run(self, eqn, operands: Sequence[Any]) -> list:
        """The results of the equation for one group."""
        if self.size_one:
            operands = [
                x if axis is None else lax.expand_dims(x, (axis,))
                for x, axis in zip(operands, self.ins, strict=True)
            ]
        operands = [x for i, x in enumerate(operands) if i not in self.without]
        outs = _compat.bind_equation(eqn, operands, **self.params)
        if self.size_one:
            outs = [
                lax.squeeze(x, (axis,)) for x, axis in zip(outs, self.outs, strict=True)
            ]
        return outs


def without(axis: int, dims: Sequence[int]) -> tuple[int, ...]:
    """Dimension numbers after a dimension that is not among them has been removed."""
    return tuple(d - (d > axis) for d in dims)


def drop(axis: int, values: Sequence[Any]) -> tuple[Any, ...]:
    return (*values[:axis], *values[axis + 1 :])


def elementwise(eqn, axes: Axes) -> Rows | None:
    known = {axis for axis in axes if axis is not None}
    if len(known) != 1:
        return None
    (axis,) = known
    ins = tuple(axis if var.aval.shape else None for var in eqn.invars)
    params = dict(eqn.params)
    if "sharding" in params:
        params["sharding"] = None
    return Rows(ins, (axis,) * len(eqn.outvars), params)


def unary(form: Callable) -> Callable:
    """A rule for one operand: `form(eqn, axis)` gives `(out axis, params)` or None."""

    def rule(eqn, axes: Axes) -> Rows | None:
        axis = axes[0]
        if axis is None or len(axes) != 1:
            return None
        found = form(eqn, axis)
        if found is None:
            return None
        out, params = found
        return Rows((axis,), (out,) * len(eqn.outvars), {**eqn.params, **params})

    return rule
