"""An interpreter: evaluate a jaxpr equation by equation.

Input: a jaxpr and its arguments, values or tracers. Output: its results.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from drjax import _compat
from drjax._compat.jax_types import Literal
from drjax._compat.types import Array, Atom, ClosedJaxpr, Eqn, OpenJaxpr


def literal_value(literal: Literal) -> Any:
    """Return the value of a jaxpr's literal: a number or array that has a dtype."""
    # JAX's numbers in literals have dtypes; but a bool of Python has no subclass.
    return np.bool_(literal.val) if isinstance(literal.val, bool) else literal.val


def as_arrays(values: Sequence[Any], dtypes: Sequence[Any]) -> list[Array]:
    """Convert the results of an evaluated jaxpr to arrays.

    A result that is a literal of the jaxpr evaluates to a number, which gets the dtype
    in its place of `dtypes`. Arrays and tracers stay as they are.
    """
    return [
        x if isinstance(x, jax.Array) else jnp.asarray(x, dtype)
        for x, dtype in zip(values, dtypes, strict=True)
    ]


def evaluate(
    jaxpr: ClosedJaxpr | OpenJaxpr,
    args: Sequence[Any],
    step: Callable[[Eqn, list[Any]], Sequence[Any] | None] = lambda eqn, operands: None,
    consts: Sequence[Any] | None = None,
) -> list[Any]:
    """Evaluate a jaxpr equation by equation.

    `step(eqn, operands)` evaluates one equation, and returns its results; or it returns
    None, and the equation is bound as it is. `consts` replace the constants that a
    closed jaxpr holds. Operands and results are arrays, tracers, or numbers with a
    dtype.
    """
    raw = _compat.open_jaxpr(jaxpr)
    consts = _compat.jaxpr_consts(jaxpr) if consts is None else consts
    env = dict(zip(raw.constvars, consts, strict=True))
    env.update(zip(raw.invars, args, strict=True))

    def read(atom: Atom) -> Any:
        return literal_value(atom) if isinstance(atom, Literal) else env[atom]

    for eqn in raw.eqns:
        operands = [read(atom) for atom in eqn.invars]
        outs = step(eqn, operands)
        if outs is None:
            outs = _compat.bind_equation(eqn, operands)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(atom) for atom in raw.outvars]
