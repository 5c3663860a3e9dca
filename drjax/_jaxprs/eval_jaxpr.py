"""An interpreter: evaluate a jaxpr equation by equation.

Input: a jaxpr and its arguments, values or tracers. Output: its results.
"""

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
    """Evaluate a jaxpr equation by equation; returns its results.

    Args:
      jaxpr: The jaxpr, open or closed.
      args: Its arguments: arrays or tracers.
      step: `step(eqn, operands)` returns the results of an equation; or None, so that
        the equation is bound as it is. Default: all are bound.
      consts: Values of its constants; None: those that a closed jaxpr holds.
    """
    raw = _compat.open_jaxpr(jaxpr)
    consts = _compat.jaxpr_consts(jaxpr) if consts is None else consts
    env = dict(zip(raw.constvars, consts, strict=True))
    env.update(zip(raw.invars, args, strict=True))

    def read(atom):
        return atom.val if isinstance(atom, Literal) else env[atom]

    for eqn in raw.eqns:
        operands = [read(atom) for atom in eqn.invars]
        outs = step(eqn, operands)
        if outs is None:
            outs = _compat.bind_equation(eqn, operands)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(atom) for atom in raw.outvars]
