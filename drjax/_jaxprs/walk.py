"""Walks over jaxprs: definitions, deep equations, backward slices, substitution.

Input: equations, or a jaxpr. Output: tables and lists of the same equations, or copies.
Nothing is evaluated and nothing is modified.

Invariants: equations and variables come out in the order of the program, or in that of
a depth-first search from the roots, so that plans are deterministic. Sharp edges: a
literal is no variable; functions that return variables leave literals out.
"""

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from drjax import _compat
from drjax._compat.jax_types import Literal
from drjax._compat.types import Atom, ClosedJaxpr, Eqn, OpenJaxpr, Var

T = TypeVar("T")

# Equations that only call the jaxpr in this parameter.
CALLS = {
    "jit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "checkpoint": "jaxpr",
    "remat": "jaxpr",
    "remat2": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "eval_jaxpr": "call_jaxpr",
    "custom_vmap_call": "call",
    "drjax_jit": "jaxpr",
}


def definitions(eqns: Iterable[Eqn]) -> dict[Var, Eqn]:
    """Map each variable that some equations define to the equation that defines it."""
    return {var: eqn for eqn in eqns for var in eqn.outvars}


def variables(atoms: Iterable[Atom]) -> list[Var]:
    """Return the atoms that are variables, in order; `Literal`s are left out."""
    return [atom for atom in atoms if type(atom) is not Literal]


def substitute(atoms: Iterable[Atom], names: Mapping[Var, Atom]) -> list[Atom]:
    """Replace the variables that are in `names`; other atoms stay, in order."""
    return [a if type(a) is Literal else names.get(a, a) for a in atoms]


def deep_equations(
    jaxpr: ClosedJaxpr | OpenJaxpr, enters: Callable[[Eqn], bool] = lambda eqn: True
) -> Iterator[Eqn]:
    """Iterate over all equations of a jaxpr, and of its inner jaxprs at any depth.

    They come in the order of the program. An equation precedes those of the jaxprs in
    its parameters, which are visited if `enters(eqn)`.
    """
    for eqn in _compat.open_jaxpr(jaxpr).eqns:
        yield eqn
        if enters(eqn):
            for inner in _compat.jaxprs_in(eqn.params):
                yield from deep_equations(inner, enters)


def live_equations(eqns: list[Eqn], outvars: Iterable[Atom]) -> list[Eqn]:
    """Eliminate dead code: return the equations that the results or effects need.

    Liveness is propagated backward: a variable is live if it is a result or an operand
    of a live equation. One pass suffices, as definitions precede uses.
    """
    live = set(variables(outvars))
    kept = []
    for eqn in reversed(eqns):
        if eqn.effects or not live.isdisjoint(eqn.outvars):
            kept.append(eqn)
            live.update([v for v in eqn.invars if type(v) is not Literal])
    return kept[::-1]


def backward_slice(
    roots: Iterable[Atom],
    definition: Mapping[Var, Eqn],
    enters: Callable[[Var, Eqn], bool] = lambda var, eqn: True,
) -> tuple[dict[int, Eqn], list[Var]]:
    """Collect the equations on which some variables depend: their backward slice.

    The result is `({id(eqn): eqn}, starts)`. The equations are in the order of a
    depth-first search from the roots, not that of the program. The slice starts from
    the variables that `definition`, as `definitions` returns it, does not have; and
    from those for which `enters(var, eqn)` does not let it continue through the
    equation that defines them.
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


def copy_equations(
    eqns: Iterable[Eqn], starts: Iterable[Var]
) -> tuple[dict[Var, Var], list[Eqn]]:
    """Copy equations with fresh variables.

    Definitions precede uses; `starts` are the variables that are used and not defined.
    The dict maps these, and all that are defined, to their fresh variables.
    """
    names: dict[Any, Any] = {v: _compat.new_var(v.aval) for v in starts}
    copies = []
    for eqn in eqns:
        names.update((v, _compat.new_var(v.aval)) for v in eqn.outvars)
        outs = [names[v] for v in eqn.outvars]
        copies.append(eqn.replace(invars=substitute(eqn.invars, names), outvars=outs))
    return names, copies


def rewrite_equations(value: Any, rule: Callable[[Eqn], list[Eqn] | None]) -> Any:
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


def split_scan(eqn: Eqn, values: Sequence[T]) -> tuple[list[T], list[T], list[T]]:
    """Split a list with one element for each operand of a scan by the sort of operand.

    The sorts are constants, carried values, and stacks, over whose slices the scan
    runs. An element may be the variable, array, kind or name of its operand.
    """
    n_consts, n_carry = _compat.scan_sizes(eqn)
    first = n_consts + n_carry
    return list(values[:n_consts]), list(values[n_consts:first]), list(values[first:])


def split_while(eqn: Eqn, values: Sequence[T]) -> tuple[list[T], list[T], list[T]]:
    """Split a list with one element for each operand of a while by the sort of operand.

    The sorts are constants of the condition, constants of the body, and carried values.
    """
    n_cond, n_body = (eqn.params[f"{name}_nconsts"] for name in ("cond", "body"))
    n = n_cond + n_body
    return list(values[:n_cond]), list(values[n_cond:n]), list(values[n:])
