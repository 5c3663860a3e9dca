"""When the results of a jaxpr are zeros, because of a selection.

Input: the jaxpr of one group. Output: for each result, when it is certainly zeros: if
one of several cases holds, a *case* being some conditions on variables of the jaxpr.

So that is for the slice of a group that was not chosen, as by `where`, and for what the
chain rule makes of the zeros that are its cotangent: f'(x)^T 0 = 0.

Invariants: zeros come of `select_n` or `place_in_segment` with a number 0, never of a
product with an array that may be 0. A product of such zeros with an infinity or NaN
counts as zeros, as if the group had not run. Sharp edges: equations that are not known
here give no zeros, so that cases are lost and never wrong.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np

from drjax import _compat
from drjax._compat.jax_types import Literal
from drjax._compat.types import Atom, ClosedJaxpr, Eqn, OpenJaxpr, Var
from drjax._jaxprs.walk import CALLS, split_scan


@dataclass(frozen=True)
class Condition:
    """All elements of a variable equal a number; or if not `equal`, none does."""

    var: Var
    number: int
    equal: bool


# A case holds if all of its conditions do. Of several cases one has to hold.
Case: TypeAlias = frozenset[Condition]
Cases: TypeAlias = frozenset[Case]

NEVER: Cases = frozenset()
ALWAYS: Cases = frozenset({frozenset()})

# More would take long to combine: each product has the product of both numbers.
_MOST_CASES = 8

# Zeros if the first operand is.
_OF_FIRST = frozenset(
    """abs asin asinh atan atanh broadcast_in_dim cbrt ceil convert_element_type copy
    copy_p cumsum div dynamic_slice erf expand_dims expm1 floor imag log1p neg real
    reduce_precision reduce_sum reduce_window_sum reshape rev round
    select_and_scatter_add sign sin sinh slice sqrt square squeeze stop_gradient tan
    tanh transpose""".split()
)
# Zeros if one operand is, or if all are.
_OF_ONE = frozenset("and conv_general_dilated dot_general mul".split())
_OF_ALL = frozenset(
    """add add_any concatenate dynamic_update_slice max min or pad stack sub
    xor""".split()
)
# All elements of the result of these are elements of the operand.
VIEWS = frozenset("broadcast_in_dim expand_dims reshape squeeze transpose".split())


@_compat.weakref_lru_cache
def zero_results(jaxpr: ClosedJaxpr) -> list[Cases]:
    """For each result of a jaxpr without constants the cases in which it is zeros."""
    raw = _compat.open_jaxpr(jaxpr)
    return _results(raw, [NEVER] * len(raw.invars))


def _either(*operands: Cases) -> Cases:
    cases = sorted(frozenset().union(*operands), key=len)
    least: list[Case] = []
    for case in cases:
        if not any(other <= case for other in least):
            least.append(case)
    return frozenset(least[:_MOST_CASES])


def both(*operands: Cases) -> Cases:
    """The cases in which one of the cases of each operand holds."""
    total = ALWAYS
    for cases in operands:
        total = _either(frozenset(x | y for x, y in itertools.product(total, cases)))
    return total


def _if(var: Atom | None, number: int, equal: bool) -> Cases:
    if isinstance(var, Literal):
        return ALWAYS if bool(np.all(var.val == number)) is equal else NEVER
    if var is None:
        return NEVER
    return frozenset({frozenset({Condition(var, number, equal)})})


def _results(
    raw: OpenJaxpr,
    operands: Sequence[Cases],
    outer: Sequence[Atom | None] | None = None,
) -> list[Cases]:
    """Propagate cases through equations.

    `outer` has for each argument what it is in the jaxpr whose conditions are looked
    for, if anything there; None: this is that jaxpr.
    """
    known: dict[Any, Cases] = dict(zip(raw.invars, operands, strict=True))
    outermost = outer is None
    pairs = zip(raw.invars, raw.invars if outer is None else outer, strict=True)
    names: dict[Any, Any] = {v: x for v, x in pairs if x is not None}

    def cases(atom: Atom) -> Cases:
        if isinstance(atom, Literal):
            return ALWAYS if _is_zero(atom) else NEVER
        return known.get(atom, NEVER)

    for eqn in raw.eqns:
        if outermost:
            names.update((v, v) for v in eqn.outvars)
        own: list[Any] = [
            x if isinstance(x, Literal) else names.get(x) for x in eqn.invars
        ]
        if eqn.primitive.name in VIEWS and own[0] is not None:
            names[eqn.outvars[0]] = own[0]
        outs = _of_equation(eqn, [*map(cases, eqn.invars)], own)
        known.update(zip(eqn.outvars, outs, strict=True))
    return [*map(cases, raw.outvars)]


def _is_zero(literal: Literal) -> bool:
    # Random keys are no numbers.
    aval: Any = literal.aval
    dtype = aval.dtype
    is_number = dtype == jnp.bool_ or jnp.issubdtype(dtype, np.number)
    return is_number and not np.any(literal.val)


def _of_equation(eqn: Eqn, xs: list[Cases], own: list[Atom | None]) -> Sequence[Cases]:
    """The cases of the results of an equation, from those of its operands."""
    name, params = eqn.primitive.name, eqn.params
    if rule := _RULES.get(name):
        return rule(eqn, xs, own)
    if name in CALLS:
        return _inside(params[CALLS[name]], xs, own)
    if name in _OF_FIRST:
        return [xs[0]]
    if name in _OF_ONE:
        return [_either(*xs)]
    if name in _OF_ALL:
        return [both(*xs[: 2 if name == "dynamic_update_slice" else None])]
    return [NEVER] * len(eqn.outvars)


def _inside(
    jaxpr: ClosedJaxpr | OpenJaxpr, xs: list[Cases], own: list[Atom | None]
) -> list[Cases]:
    raw = _compat.open_jaxpr(jaxpr)
    # Constants may come first.
    more = len(raw.invars) - len(xs)
    return _results(raw, [NEVER] * more + xs, [None] * more + own)


def _select(eqn: Eqn, xs: list[Cases], own: list[Atom | None]) -> list[Cases]:
    _, *values = xs
    result = both(*values)
    # With more than two values the predicate is an integer.
    if len(values) == 2 and eqn.invars[0].aval.dtype == jnp.bool_:
        other, chosen = values
        unless = both(other, _if(own[0], 0, True)), both(chosen, _if(own[0], 0, False))
        result = _either(result, *unless)
    return [result]


def _place(eqn: Eqn, xs: list[Cases], own: list[Atom | None]) -> list[Cases]:
    num, fill = eqn.params["num"], eqn.params["fill"]
    if fill != 0 or isinstance(fill, bool):
        return [NEVER]
    nowhere = _if(own[0], num, True) if num else _if(own[0], 0, False)
    return [_either(xs[1], nowhere)]


def _slice_of(eqn: Eqn, xs: list[Cases], own: list[Atom | None]) -> list[Cases]:
    return [_either(xs[1], _if(own[0], eqn.invars[1].aval.shape[0], True))]


def _power(eqn: Eqn, xs: list[Cases], own: list[Atom | None]) -> list[Cases]:
    return [xs[0] if eqn.params["y"] > 0 else NEVER]


def _scatter(eqn: Eqn, xs: list[Cases], own: list[Atom | None]) -> list[Cases]:
    return [both(xs[0], xs[2])]


def _scan(eqn: Eqn, xs: list[Cases], own: list[Atom | None]) -> list[Cases]:
    """What is carried is zeros where it is before and after each step."""
    consts, carry, stacks = split_scan(eqn, xs)
    outer, *_ = split_scan(eqn, own)
    names = [*outer, *[None] * (len(carry) + len(stacks))]
    for attempt in itertools.count():
        operands = [*consts, *carry, *stacks]
        outs = _inside(eqn.params["jaxpr"], operands, names)
        new = [both(x, y) for x, y in zip(carry, outs, strict=False)]
        if new == carry:
            return [*carry, *outs[len(carry) :]]
        if attempt > _MOST_CASES:
            new = [x if x == y else NEVER for x, y in zip(carry, new, strict=True)]
        carry = new
    raise AssertionError


def _cond(eqn: Eqn, xs: list[Cases], own: list[Atom | None]) -> list[Cases]:
    branches = [_inside(x, xs[1:], own[1:]) for x in eqn.params["branches"]]
    return [both(*outs) for outs in zip(*branches, strict=True)]


def _each(eqn: Eqn, xs: list[Cases], own: list[Atom | None]) -> list[Cases]:
    return xs


def _parts(eqn: Eqn, xs: list[Cases], own: list[Atom | None]) -> list[Cases]:
    return [xs[0]] * len(eqn.outvars)


_RULES: dict[str, Callable[[Eqn, list[Cases], list[Atom | None]], list[Cases]]] = {
    "select_n": _select,
    "drjax_place_in_segment": _place,
    "drjax_slice_of_segment": _slice_of,
    "integer_pow": _power,
    "scatter-add": _scatter,
    "scan": _scan,
    "cond": _cond,
    "optimization_barrier": _each,
    "split": _parts,
    "unstack": _parts,
}
