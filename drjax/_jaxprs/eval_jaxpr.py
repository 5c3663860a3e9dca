"""An interpreter: evaluate a jaxpr equation by equation.

Input: a jaxpr and its arguments, values or tracers. Output: its results.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from drjax import _compat


def literal_value(literal: Literal) -> Any:
    """Return the value of a jaxpr's literal: a number or array that has a dtype."""
    # JAX's numbers in literals have dtypes; but a bool of Python has no subclass.
    return np.bool_(literal.val) if isinstance(literal.val, bool) else literal.val


def as_arrays(values: Sequence[Any], dtypes: Sequence[Any]) -> list[jax.Array]:
    """Convert the results of an evaluated jaxpr to arrays.

    A result that is a literal of the jaxpr evaluates to a number, not to an array.

    Args:
      values: The results: arrays, tracers or numbers.
      dtypes: For each result its dtype, to which numbers are converted; arrays and
        tracers stay as they are.
    """
    return [
        x if isinstance(x, jax.Array) else jnp.asarray(x, dtype)
        for x, dtype in zip(values, dtypes, strict=True)
    ]


def evaluate(
    jaxpr: Any,
    args: Sequence[Any],
    step: Callable = lambda eqn, operands: None,
    consts: Sequence[Any] | None = None,
) -> list:
    """Evaluate a jaxpr equation by equation.

    Args:
      jaxpr: The jaxpr, open or closed.
      args: Its arguments: arrays or tracers.
      step: `step(eqn, operands)` evaluates one equation for a list of operands, and
        returns the list of its results; or it returns None, and the equation is bound
        as it is. Default: all are bound.
      consts: Values of its constants; None: those that a closed jaxpr holds.

    Returns:
      The list of results of the jaxpr: arrays, numbers with a dtype, or tracers.
    """
    raw = _compat.open_jaxpr(jaxpr)
    consts = _compat.jaxpr_consts(jaxpr) if consts is None else consts
    env = dict(zip(raw.constvars, consts, strict=True))
    env.update(zip(raw.invars, args, strict=True))

    def read(atom):
        return literal_value(atom) if isinstance(atom, Literal) else env[atom]

    for eqn in raw.eqns:
        operands = [read(atom) for atom in eqn.invars]
        outs = step(eqn, operands)
        if outs is None:
            outs = _compat.bind_equation(eqn, operands)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(atom) for atom in raw.outvars]
