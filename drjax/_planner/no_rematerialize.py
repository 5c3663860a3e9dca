"""Rows whose very values leave the groups, and so must not be computed a second time.

Another stage may round a row otherwise. That changes a result as little as any rounding
does, unless a later round looks for the row that the server knows: the derivative of an
extremum, `loss == drjax.reduce_min(loss)`, or `loss >= the k-th of
drjax.gather(loss)`. So what goes unchanged into an extremum, a gather, or the choice of
one group is kept, through all work that only moves, chooses or negates values.
"""

from collections.abc import Iterator
from typing import Any

from jax.extend.core import Literal

from drjax import _compat, primitives
from drjax._planner.inline import CALLS, Flat
from drjax._primitives.reduce_ops import of_primitive

_FIRST = frozenset(
    """broadcast_in_dim convert_element_type copy copy_p cummax cummin dynamic_slice
    dynamic_update_slice expand_dims gather neg pad reduce_max reduce_min
    reduce_precision reshape rev slice split squeeze tile transpose unstack""".split()
)  # work whose results are values of its first operand
_EVERY = frozenset("concatenate max min stack".split())  # ... of all its operands


def exact(program: Flat) -> frozenset:
    """Variables that must not be computed a second time."""
    definition = {v: eqn for eqn in program.eqns for v in eqn.outvars}
    found: set[Any] = set()
    for eqn in program.eqns:
        op, gathers = of_primitive(eqn.primitive), eqn.primitive is primitives.gather_p
        if op or gathers:  # of what is added up, only what a select_n has chosen
            every = gathers or (op is not None and op.selects)
            rows = _sources(definition, eqn.invars[0], every)
            found |= {var for var, chosen in rows if chosen}
    return frozenset(found)


def _sources(definition: dict, var, chosen: bool) -> set[tuple[Any, bool]]:
    """Variables with the values of `var`, and whether some may have been chosen."""
    found: set[tuple[Any, bool]] = set()
    todo = [(var, chosen)]
    while todo:
        var, chosen = todo.pop()
        if isinstance(var, Literal) or (var, chosen) in found:
            continue
        found.add((var, chosen))
        eqn = definition.get(var)
        if eqn is not None:
            operands = _operands(eqn, eqn.outvars.index(var))
            todo += [(operand, chosen or choice) for operand, choice in operands]
    return found


def _operands(eqn, index: int) -> Iterator[tuple[Any, bool]]:
    """The operands that a result takes its values from, and whether it chooses them."""
    name = eqn.primitive.name
    if name == "select_n":
        yield from ((operand, True) for operand in eqn.invars[1:])
    elif name in _FIRST:
        yield eqn.invars[0], False
    elif name in _EVERY:
        yield from ((operand, False) for operand in eqn.invars)
    elif name in ("clamp", "sort"):
        yield eqn.invars[1 if name == "clamp" else index], False
    elif eqn.primitive is primitives.map_fn_p:
        yield from _through(eqn.params["jaxpr"], eqn.invars, index, False)
    elif name in CALLS:
        yield from _through(eqn.params[CALLS[name]], eqn.invars, index, False)
    elif name == "cond":
        for branch in eqn.params["branches"]:
            yield from _through(branch, eqn.invars[1:], index, True)


def _through(jaxpr, operands, index: int, chosen: bool) -> Iterator[tuple[Any, bool]]:
    raw = _compat.open_jaxpr(jaxpr)
    outer = dict(zip(raw.invars, operands, strict=True))
    definition = {v: eqn for eqn in raw.eqns for v in eqn.outvars}
    for var, choice in _sources(definition, raw.outvars[index], chosen):
        if var in outer:
            yield outer[var], choice
