"""Sums over all elements of an array that was raveled first, as sums over its axes.

Input: an inlined jaxpr that has no plan. Output: the same one, in which a product of
two raveled arrays (`jnp.vdot`, and so conjugate gradients), or a reduction of one, is
over the axes of the arrays. A raveled array has no group axis.

Sharp edges: numbers are added in another order, so that only programs that have no plan
otherwise are rewritten.
"""

from typing import Any

from jax import lax

from drjax._compat.jax_types import Literal
from drjax._compat.types import Atom, Eqn, Var
from drjax._jaxprs.walk import definitions, live_equations
from drjax._planner.inline import CONTROL, InlinedJaxpr

_REDUCTIONS = {f"reduce_{name}" for name in "sum max min prod and or".split()}


def without_ravels(program: InlinedJaxpr) -> InlinedJaxpr | None:
    """Rewrite products and reductions of raveled arrays; None if there are none."""
    defined = definitions(program.eqns)

    def raveled(atom: Atom) -> Any:
        eqn = None if isinstance(atom, Literal) else defined.get(atom)
        if eqn is None or eqn.primitive is not lax.reshape_p:
            return None
        source: Any = eqn.invars[0]
        flat = len(eqn.params["new_sizes"]) == 1 < source.aval.ndim
        return source if flat and eqn.params.get("dimensions") is None else None

    eqns, bodies, changed = [], dict(program.known_bodies), False
    for eqn in program.eqns:
        sources = [raveled(v) for v in eqn.invars]
        new = None
        if all(v is not None for v in sources):
            new = _product(eqn, sources) or _reduction(eqn, sources)
        changed |= new is not None
        eqns.append(new or eqn)
        if eqn.primitive.name in CONTROL:
            rewritten = list(map(without_ravels, program.bodies(eqn)))
            if loop := program.replaced_bodies(eqn, rewritten):
                bodies[eqn], changed = loop, True
    if not changed:
        return None
    return program.rewritten(live_equations(eqns, program.outvars), bodies)


def _product(eqn: Eqn, sources: list[Var]) -> Eqn | None:
    """Write a product of two raveled arrays of one shape over all of their axes."""
    if eqn.primitive is not lax.dot_general_p or eqn.outvars[0].aval.ndim:
        return None
    x, y = (v.aval.shape for v in sources)
    axes = (*range(len(x)),)
    numbers = ((axes, axes), ((), ()))
    params = {**eqn.params, "dimension_numbers": numbers}
    return eqn.replace(invars=sources, params=params) if x == y else None


def _reduction(eqn: Eqn, sources: list[Var]) -> Eqn | None:
    """Write a reduction of a raveled array over all of its axes."""
    if eqn.primitive.name not in _REDUCTIONS or len(sources) != 1:
        return None
    params = {**eqn.params, "axes": (*range(sources[0].aval.ndim),)}
    return eqn.replace(invars=sources, params=params) if eqn.params["axes"] else None
