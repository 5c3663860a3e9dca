"""Variables that are bitwise-observable and must not be rematerialized.

Input: an inlined jaxpr. Output: `bitwise_observable`, a set of its variables.

A compiler may round the same equations differently in two stages. That changes a result
as little as any rounding does, unless the program compares a slice bit by bit with a
value that the server has: the derivative of an extremum, `loss ==
drjax.reduce_min(loss)`, or `loss >= the k-th of drjax.gather(loss)`. A rematerialized
`loss` could then differ from the one that was reduced, and no group, or several, would
match. So the operands of an extremum, of a gather and of the selection of one group are
computed once and saved, and so is each variable whose values they are, through
equations that only move, select or negate values.

Invariants: the set is closed backward over such equations. Sharp edges: a sum or a mean
rounds and is not observable bit by bit, unless its operand selects values (`select_n`):
then it may be the choice of one group.
"""

from collections.abc import Iterator
from typing import Any

from jax.extend.core import Literal

from drjax import _compat, primitives
from drjax._jaxprs.walk import definitions
from drjax._planner.inline import CALLS, InlinedJaxpr
from drjax._primitives.reduce_ops import of_primitive

# For each primitive that moves values, the positions of the operands that its results
# hold values of; (): all of them. A primitive with an unbatching rule of its own is
# listed here or computes new values.
MOVED_OPERANDS: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(
        """broadcast_in_dim convert_element_type copy copy_p cummax cummin dynamic_slice
        expand_dims gather neg pad reduce_max reduce_min reduce_precision
        reduce_window_max reduce_window_min reshape rev select_and_gather_add slice
        split squeeze tile top_k transpose unstack""".split(),
        (0,),
    ),
    **dict.fromkeys("concatenate max min stack".split(), ()),
    "dynamic_update_slice": (0, 1),
    **dict.fromkeys("scatter scatter-max scatter-min".split(), (0, 2)),
}


def bitwise_observable(program: InlinedJaxpr) -> frozenset:
    """The variables of a program whose exact bits it may compare with other values.

    They must not be rematerialized, as a compiler may round differently a second time.
    """
    definition = definitions(program.eqns)
    observable: set[Any] = set()
    for eqn in program.eqns:
        op, gathers = of_primitive(eqn.primitive), eqn.primitive is primitives.gather_p
        if op or gathers:
            # A sum exposes values only if all groups but one add zeros, which a
            # select_n makes.
            selected = gathers or (op is not None and op.selects)
            aliases = _aliases(definition, eqn.invars[0], selected)
            observable |= {var for var, selected in aliases if selected}
    return frozenset(observable)


def _aliases(definition: dict, var, selected: bool) -> set[tuple[Any, bool]]:
    """The variables whose values a variable holds: backward through moves of values.

    Args:
      definition: For each variable the equation that defines it.
      var: The variable to start from, which is in the result.
      selected: Whether a selection lies between the use of `var` and `var`.

    Returns:
      Pairs of a variable and whether a selection of values (a `select_n` or a `cond`)
      lies between it and the use of `var`.
    """
    aliases: set[tuple[Any, bool]] = set()
    stack = [(var, selected)]
    while stack:
        var, selected = stack.pop()
        # The flag is part of the state: a variable may be reached with and without a
        # selection, on different paths.
        if isinstance(var, Literal) or (var, selected) in aliases:
            continue
        aliases.add((var, selected))
        eqn = definition.get(var)
        if eqn is not None:
            operands = _moved_operands(eqn, eqn.outvars.index(var))
            stack += [(operand, selected or selects) for operand, selects in operands]
    return aliases


def _moved_operands(eqn, index: int) -> Iterator[tuple[Any, bool]]:
    """The operands whose values a result of an equation holds.

    Args:
      eqn: The equation.
      index: The position of the result.

    Yields:
      Pairs of an operand and whether the equation selects among several operands;
      nothing if the equation computes new values.
    """
    name = eqn.primitive.name
    # The predicate of a select_n and the index of a cond are not among the values.
    if name == "select_n":
        yield from ((operand, True) for operand in eqn.invars[1:])
    elif name in MOVED_OPERANDS:
        positions = MOVED_OPERANDS[name] or range(len(eqn.invars))
        yield from ((eqn.invars[i], False) for i in positions)
    elif name in ("clamp", "sort"):
        # The operands of clamp are (lower bound, value, upper bound).
        yield eqn.invars[1 if name == "clamp" else index], False
    elif eqn.primitive is primitives.map_fn_p:
        yield from _through_call(eqn.params["jaxpr"], eqn.invars, index, False)
    elif name in CALLS:
        yield from _through_call(eqn.params[CALLS[name]], eqn.invars, index, False)
    elif name == "cond":
        for branch in eqn.params["branches"]:
            yield from _through_call(branch, eqn.invars[1:], index, True)


def _through_call(
    jaxpr, operands, index: int, selected: bool
) -> Iterator[tuple[Any, bool]]:
    """The operands whose values a result of an equation that evaluates a jaxpr holds.

    Args:
      jaxpr: The jaxpr.
      operands: The operands of the equation that are the arguments of the jaxpr.
      index: The position of the result.
      selected: Whether the equation itself selects among jaxprs, as a `cond` does.

    Yields:
      Pairs of an operand and whether a selection among values lies between.
    """
    raw = _compat.open_jaxpr(jaxpr)
    outer = dict(zip(raw.invars, operands, strict=True))
    definition = definitions(raw.eqns)
    for var, selects in _aliases(definition, raw.outvars[index], selected):
        if var in outer:
            yield outer[var], selects
