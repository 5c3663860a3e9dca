"""Walks over jaxprs: definitions, deep equations, backward slices, substitution.

Input: equations, or a jaxpr. Output: tables and lists of the same equations, or copies.
Nothing is evaluated and nothing is modified.

Invariants: equations and variables come out in the order of the program, or in that of
a depth-first search from the roots, so that plans are deterministic. Sharp edges: a
literal is no variable; functions that return variables leave literals out.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from jax.extend.core import Literal

from drjax import _compat


def definitions(eqns: Iterable[Any]) -> dict[Any, Any]:
    """For each variable the equation that defines it."""
    return {var: eqn for eqn in eqns for var in eqn.outvars}


def variables(atoms: Iterable[Any]) -> list[Any]:
    """The atoms that are variables, not literals."""
    return [atom for atom in atoms if not isinstance(atom, Literal)]


def substitute(atoms: Iterable[Any], names: dict[Any, Any]) -> list[Any]:
    """Replace the variables that are keys of `names`; other atoms stay."""
    return [a if isinstance(a, Literal) else names.get(a, a) for a in atoms]


def deep_equations(
    jaxpr: Any, enters: Callable[[Any], bool] = lambda eqn: True
) -> Iterator[Any]:
    """All equations of a jaxpr, and of the jaxprs in their parameters at any depth.

    Args:
      jaxpr: The jaxpr, open or closed.
      enters: Whether to visit the jaxprs in the parameters of an equation.
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
    """The equations on which variables depend, and the variables they start from.

    Args:
      roots: Variables, or literals, which are ignored.
      definition: For each variable the equation that defines it, as of `definitions`.
      enters: `enters(var, eqn)`: whether to continue from `var` through `eqn`, which
        defines it, to the operands of `eqn`. Otherwise the slice starts from `var`.

    Returns:
      `({id(equation): equation}, variables from which the slice starts)`.
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
      `({old variable: fresh variable}, copies)`.
    """
    names: dict[Any, Any] = {v: _compat.new_var(v.aval) for v in starts}
    copies = []
    for eqn in eqns:
        names.update((v, _compat.new_var(v.aval)) for v in eqn.outvars)
        outs = [names[v] for v in eqn.outvars]
        copies.append(eqn.replace(invars=substitute(eqn.invars, names), outvars=outs))
    return names, copies


def split_scan(eqn, values: Sequence[Any]) -> tuple[list, list, list]:
    """Split a list into `(constants, carried values, stacks)` of a scan.

    Args:
      eqn: The scan.
      values: Anything that stands for each operand: variables, arrays, kinds or names.
    """
    n_consts, n_carry = _compat.scan_sizes(eqn)
    first = n_consts + n_carry
    return list(values[:n_consts]), list(values[n_consts:first]), list(values[first:])


def split_while(eqn, values: Sequence[Any]) -> tuple[list, list, list]:
    """Split a list into the three parts of the operands of a while.

    Args:
      eqn: The while.
      values: Anything that stands for each operand: variables, arrays, kinds or names.

    Returns:
      `(constants of the condition, constants of the body, carried values)`.
    """
    n_cond, n_body = (eqn.params[f"{name}_nconsts"] for name in ("cond", "body"))
    n = n_cond + n_body
    return list(values[:n_cond]), list(values[n_cond:n]), list(values[n:])
