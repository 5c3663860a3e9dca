"""Walks over jaxprs: definitions, deep equations, backward slices, substitution.

Input: equations, or a jaxpr. Output: tables and lists of the same equations, or copies.
Nothing is evaluated and nothing is modified.

Invariants: equations and variables come out in the order of the program, or in that of
a depth-first search from the roots, so that plans are deterministic. Sharp edges: a
literal is no variable; functions that return variables leave literals out.
"""

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from jax.extend.core import Literal

from drjax import _compat


def definitions(eqns: Iterable[Any]) -> dict[Any, Any]:
    """Map each variable that some equations define to the equation that defines it."""
    return {var: eqn for eqn in eqns for var in eqn.outvars}


def variables(atoms: Iterable[Any]) -> list[Any]:
    """Return the atoms that are variables, in order; `Literal`s are left out."""
    return [atom for atom in atoms if not isinstance(atom, Literal)]


def substitute(atoms: Iterable[Any], names: dict[Any, Any]) -> list[Any]:
    """Replace variables in a list of atoms.

    Args:
      atoms: Variables and literals.
      names: From a variable to the atom that replaces it. Other atoms stay.

    Returns:
      The list of atoms after the replacement, in the same order.
    """
    return [a if isinstance(a, Literal) else names.get(a, a) for a in atoms]


def deep_equations(
    jaxpr: Any, enters: Callable[[Any], bool] = lambda eqn: True
) -> Iterator[Any]:
    """Iterate over all equations of a jaxpr, and of its inner jaxprs at any depth.

    Args:
      jaxpr: The jaxpr, open or closed.
      enters: `enters(eqn)` says whether to visit the jaxprs in the parameters of an
        equation. Default: all are visited.

    Yields:
      The equations in the order of the program. An equation, also one that is not
      entered, precedes those of the jaxprs in its parameters.
    """
    for eqn in _compat.open_jaxpr(jaxpr).eqns:
        yield eqn
        if enters(eqn):
            for inner in _compat.jaxprs_in(eqn.params):
                yield from deep_equations(inner, enters)


def live_equations(eqns: list, outvars: Iterable[Any]) -> list:
    """Eliminate dead code: return the equations that the results or effects need.

    Liveness is propagated backward: a variable is live if it is a result or an operand
    of a live equation. One pass suffices, as definitions precede uses.

    Args:
      eqns: The equations, definitions before uses.
      outvars: The results, variables or literals.

    Returns:
      The live equations, in the same order.
    """
    live = set(variables(outvars))
    kept = []
    for eqn in reversed(eqns):
        if eqn.effects or any(v in live for v in eqn.outvars):
            kept.append(eqn)
            live.update(variables(eqn.invars))
    return kept[::-1]


def backward_slice(
    roots: Iterable[Any],
    definition: dict[Any, Any],
    enters: Callable[[Any, Any], bool] = lambda var, eqn: True,
) -> tuple[dict[int, Any], list[Any]]:
    """Collect the equations on which some variables depend: their backward slice.

    Args:
      roots: The variables, or literals, which are ignored.
      definition: For each variable the equation that defines it, as `definitions`
        returns it. A variable that is not in it, such as an input, has no equation.
      enters: `enters(var, eqn)` says whether to continue from `var` through `eqn`,
        which defines it, to the operands of `eqn`. If not, the slice starts from `var`.
        Default: always.

    Returns:
      `(eqns, starts)`: the equations, as a dict `{id(eqn): eqn}` in the order of a
      depth-first search from the roots, not that of the program; and the list of
      variables from which the slice starts: those without an equation, and those for
      which `enters` returned False.
    """
    eqns: dict[int, Any] = {}
    starts: dict[Any, None] = {}
    stack = list(roots)
    while stack:
        var = stack.pop()
        if isinstance(var, Literal) or var in starts:
            continue
        eqn = definition.get(var)
        if eqn is None or not enters(var, eqn):
            starts[var] = None
        elif id(eqn) not in eqns:
            eqns[id(eqn)] = eqn
            stack += eqn.invars
    return eqns, list(starts)


def copy_equations(eqns: Iterable[Any], starts: Iterable[Any]) -> tuple[dict, list]:
    """Copy equations with fresh variables.

    Args:
      eqns: The equations, definitions before uses.
      starts: The variables that `eqns` use and do not define.

    Returns:
      `(names, copies)`: a dict from each variable of `starts` and each one that `eqns`
      define to its fresh variable, and the list of copied equations.
    """
    names: dict[Any, Any] = {v: _compat.new_var(v.aval) for v in starts}
    copies = []
    for eqn in eqns:
        names.update((v, _compat.new_var(v.aval)) for v in eqn.outvars)
        outs = [names[v] for v in eqn.outvars]
        copies.append(eqn.replace(invars=substitute(eqn.invars, names), outvars=outs))
    return names, copies


def rewrite_equations(value: Any, rule: Callable[[Any], list | None]) -> Any:
    """Replace equations at any depth of a jaxpr, or of those in a tuple or list.

    `rule` returns the equations that replace one; None: it stays, but for its jaxprs.
    Where nothing is replaced, the same object is returned, so that caches hit.
    """
    if type(value) in (tuple, list):
        items = [rewrite_equations(x, rule) for x in value]
        same = all(new is old for new, old in zip(items, value, strict=True))
        return value if same else type(value)(items)
    if not isinstance(value, _compat.JAXPR_TYPES):
        return value
    old, eqns = _compat.open_jaxpr(value).eqns, []
    for eqn in old:
        new = rule(eqn)
        if new is None:
            params = {k: rewrite_equations(x, rule) for k, x in eqn.params.items()}
            same = all(params[k] is x for k, x in eqn.params.items())
            new = [eqn if same else eqn.replace(params=params)]
        eqns += new
    same = len(eqns) == len(old) and all(map(operator.is_, eqns, old))
    return value if same else _compat.with_equations(value, eqns)


def split_scan(eqn, values: Sequence[Any]) -> tuple[list, list, list]:
    """Split a list with one element for each operand of a scan by the sort of operand.

    Args:
      eqn: The equation of the scan.
      values: One element for each operand, such as its variable, array, kind or name.

    Returns:
      `(constants, carried values, stacks)`, three lists of elements of `values`. The
      scan runs over the slices of the stacks.
    """
    n_consts, n_carry = _compat.scan_sizes(eqn)
    first = n_consts + n_carry
    return list(values[:n_consts]), list(values[n_consts:first]), list(values[first:])


def split_while(eqn, values: Sequence[Any]) -> tuple[list, list, list]:
    """Split a list with one element for each operand of a while by the sort of operand.

    Args:
      eqn: The equation of the while.
      values: One element for each operand, such as its variable, array, kind or name.

    Returns:
      `(constants of the condition, constants of the body, carried values)`, three lists
      of elements of `values`.
    """
    n_cond, n_body = (eqn.params[f"{name}_nconsts"] for name in ("cond", "body"))
    n = n_cond + n_body
    return list(values[:n_cond]), list(values[n_cond:n]), list(values[n:])
