"""Running a jaxpr equation by equation."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import Literal

from drjax import _compat
from drjax._sharding import sharding_of_product


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


def evaluate_on_mesh(jaxpr: Any, args: Sequence[Any]) -> list:
    """The results of a jaxpr that was traced without the mesh of its arguments.

    On Explicit axes, JAX must be told how the result of a product lies that contracts
    dimensions which both operands have sharded: as the other dimensions do, that is,
    with one all-reduce. Where the product was traced, nobody knew. What is inside of
    inner jits and loops is not typed again.
    """
    if not any(map(_is_sharded, args)):
        return _compat.jaxpr_as_fun(jaxpr)(*args)

    def step(eqn, operands):
        if eqn.primitive is not lax.dot_general_p or eqn.params["out_sharding"]:
            return None
        sharding = sharding_of_product(eqn.params["dimension_numbers"], *operands)
        return sharding and _compat.bind_equation(eqn, operands, out_sharding=sharding)

    return evaluate(jaxpr, args, step)


def _is_sharded(x: Any) -> bool:
    """Whether the type of a value says that it is sharded."""
    return any(part is not None for part in jax.typeof(x).sharding.spec)
