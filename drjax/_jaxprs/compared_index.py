"""Results of a jaxpr that only say whether an index is one of some values.

Input: a jaxpr whose first argument is an index, such as that of a group. Output: for
each result the values with which the index is compared, if that decides it.

Invariants: views of a value count as the value. Sharp edges: equations that are not
known here say nothing, so that comparisons are lost and never wrong.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np

from drjax import _compat
from drjax._compat.jax_types import Literal, Variable
from drjax._compat.types import Atom, Aval, ClosedJaxpr, Eqn, OpenJaxpr, Var
from drjax._jaxprs.walk import CALLS
from drjax._jaxprs.zeros import VIEWS


@dataclass(frozen=True)
class Compared:
    """`yes` where the index is equal to one of some values, and `no` where it is not.

    Attributes:
      values: A variable of the jaxpr, or a number.
      yes: A number: an element, if the value that belongs to it is the index.
      no: Likewise, if it is not.
    """

    values: Var | int
    yes: Any
    no: Any


_INDEX = "the index"
# The index, a comparison with it, a number, a variable of the jaxpr; None: unknown.
_Known: TypeAlias = Any


def compared(jaxpr: ClosedJaxpr) -> list[Compared | None]:
    """For each result of a jaxpr with what it compares the first argument, an integer.

    None: the result may depend on more than that.
    """
    raw = _compat.open_jaxpr(jaxpr)
    outs = _results(raw, [_INDEX, *raw.invars[1:]], outermost=True)
    return [x if isinstance(x, Compared) else None for x in outs]


def _results(raw: OpenJaxpr, args: Sequence[_Known], outermost: bool) -> list[_Known]:
    """Propagate what is known of the arguments through equations."""
    known: dict[Any, _Known] = dict(zip(raw.invars, args, strict=True))

    def of(atom: Atom) -> _Known:
        return _number(atom) if isinstance(atom, Literal) else known.get(atom)

    for eqn in raw.eqns:
        outs = _of_equation(eqn, [*map(of, eqn.invars)])
        for var, x in zip(eqn.outvars, outs, strict=True):
            known[var] = var if x is None and outermost else x
    return [*map(of, raw.outvars)]


def _number(literal: Literal) -> _Known:
    # Of random keys, say, there is no number.
    aval: Aval = literal.aval
    if aval.shape or not jnp.issubdtype(aval.dtype, np.generic):
        return None
    return np.asarray(literal.val).item()


def _of_equation(eqn: Eqn, xs: list[_Known]) -> Sequence[_Known]:
    """What is known of the results of an equation, from that of its operands."""
    name, first = eqn.primitive.name, xs[0] if xs else None
    if name in CALLS:
        inner = _compat.open_jaxpr(eqn.params[CALLS[name]])
        if len(inner.invars) == len(xs):
            return _results(inner, xs, outermost=False)
    if name in VIEWS:
        return [first]
    if first is _INDEX and name == "convert_element_type":
        return [_INDEX if _is_exact(eqn.params["new_dtype"]) else None]
    if name in ("eq", "ne") and (first is _INDEX or xs[1] is _INDEX):
        values: Any = xs[1] if first is _INDEX else first
        if type(values) is int or isinstance(values, Variable):
            return [Compared(values, name == "eq", name == "ne")]
    if isinstance(first, Compared) and {first.yes, first.no} == {0, 1}:
        yes, no = first.yes, first.no
        if name == "not" and yes in (True, False):
            return [Compared(first.values, no, yes)]
        # One of the values is the index.
        if name == "convert_element_type" or name == (
            "reduce_or" if yes else "reduce_and"
        ):
            return [first]
        if name == "select_n" and all(
            isinstance(x, bool | int | float) for x in xs[1:]
        ):
            return [Compared(first.values, xs[1 + yes], xs[1 + no])]
    return [None] * len(eqn.outvars)


def _is_exact(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.integer) and np.dtype(dtype).itemsize >= 4
