"""Running a jaxpr equation by equation."""

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import Literal

from drjax import _compat


def evaluate(
    jaxpr: Any,
    args: Sequence[Any],
    step: Callable = lambda eqn, operands: None,
    consts: Sequence[Any] | None = None,
) -> list:
    """The results of a jaxpr.

    Args:
      jaxpr: The jaxpr.
      args: Its arguments.
      step: `step(eqn, operands)` may give the results of an equation; None: bind it.
      consts: Its constants, if not those that it holds.
    """
    raw = _compat.open_jaxpr(jaxpr)
    held = _compat.jaxpr_consts(jaxpr) if consts is None else consts
    values = dict(zip(raw.constvars, held, strict=True))
    values.update(zip(raw.invars, args, strict=True))

    def read(atom):
        return atom.val if isinstance(atom, Literal) else values[atom]

    for eqn in raw.eqns:
        operands = [read(atom) for atom in eqn.invars]
        outs = step(eqn, operands)
        if outs is None:
            outs = _compat.bind_equation(eqn, operands)
        values.update(zip(eqn.outvars, outs, strict=True))
    return [read(atom) for atom in raw.outvars]
