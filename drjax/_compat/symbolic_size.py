"""A number of groups as a symbol: JAX's symbolic dimensions, for open plans.

Input: nothing. Output: a dimension that no code can compute with unseen. Arithmetic
with it gives further symbolic dimensions, or an equation of a jaxpr; a comparison that
does not hold for all numbers is an error.

Sharp edges: JAX answers False where an equality is open. Here it is an error, but where
JAX itself asks.
"""

import sys
from collections.abc import Iterable, Iterator
from typing import Any

import jax
from jax._src.export import shape_poly

from drjax._compat.jax_types import Literal
from drjax._compat.jaxprs import jaxprs_in, open_jaxpr
from drjax._compat.types import ClosedJaxpr, Eqn, OpenJaxpr, Var

_ASKED_BY_JAX = ("jax", "jaxlib", "numpy", "drjax")
_READS_A_SIZE = ("dim_as_value", "dimension_size")


class _Size(shape_poly._DimExpr):
    """A positive integer that is not known."""

    __slots__ = ("_plain",)

    def __init__(self, name: str):
        plain: Any = jax.export.symbolic_shape(name)[0]
        super().__init__(plain._sorted_terms, plain._scope)
        self._plain = plain

    def __hash__(self) -> int:
        return hash(self._plain)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, _Size):
            return self._plain == other._plain
        if not isinstance(other, shape_poly._DimExpr):
            caller = sys._getframe(1).f_globals.get("__name__", "")
            if caller.partition(".")[0] not in _ASKED_BY_JAX:
                raise shape_poly.InconclusiveDimensionOperation(
                    f"Symbolic dimension comparison '{self}' == '{other}' is "
                    "inconclusive."
                )
        return self._plain == other


def symbolic_size(name: str) -> Any:
    """Return a number, one or more, that is not known and has this name."""
    return _Size(name)


def _is_symbolic(size: object) -> bool:
    return isinstance(size, shape_poly._DimExpr)


def reads_of_size(
    jaxpr: ClosedJaxpr | OpenJaxpr, size: Any, known: Iterable[Var] | None = None
) -> Iterator[Eqn]:
    """Yield the equations of a jaxpr whose results depend on a symbolic size.

    That is, those that read it as a number, those with a shape that is computed from
    it, and those that sum, or reduce otherwise, an array of that size which is made of
    nothing that the groups have. `known` are the inputs made of nothing of theirs.
    """
    raw = open_jaxpr(jaxpr)
    foreigners = set(known or ())
    sized = lambda v: any(_is_symbolic(d) for d in getattr(v.aval, "shape", ()))
    for eqn in raw.eqns:
        block = eqn.primitive.name.startswith("drjax_")
        ins = [v for v in eqn.invars if not isinstance(v, Literal)]
        foreign = not block and all(v in foreigners or not sized(v) for v in ins)
        shapes = [d for v in eqn.outvars for d in getattr(v.aval, "shape", ())]
        computed = any(_is_symbolic(d) and d != size for d in shapes)
        reduced = foreign and any(map(sized, ins)) and not all(map(sized, eqn.outvars))
        if eqn.primitive.name in _READS_A_SIZE or computed or reduced:
            yield eqn
        if foreign:
            foreigners |= {v for v in eqn.outvars if sized(v)}
        for inner in jaxprs_in(eqn.params):
            yield from reads_of_size(inner, size)
