"""Evaluation of a jaxpr on a mesh that was unknown when it was traced.

Input: a jaxpr, and arguments whose types have a mesh. Output: its results, with types
on that mesh. Invariants: values are those of the jaxpr; only `out_sharding` of products
is added. Sharp edges: inner jits and loops are evaluated with their traced types.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from drjax import _compat
from drjax._jaxprs.eval_jaxpr import evaluate


def evaluate_on_mesh(jaxpr: Any, args: Sequence[Any]) -> list:
    """Evaluate a jaxpr that was traced without the mesh of its arguments.

    On Explicit axes, JAX needs the sharding of the result of a product that contracts
    dimensions which both operands have sharded: that of the other dimensions, with one
    all-reduce. That sharding was unknown when the product was traced.

    Args:
      jaxpr: The closed jaxpr: of a stage of a plan.
      args: Its arguments, arrays or tracers.

    Returns:
      The list of results.
    """
    explicit = AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types
    # JAX would evaluate each equation in the context in which it was traced. There,
    # an array without operands (zeros, iota) has a type without the mesh.
    if not explicit and not any(map(_is_sharded, args)):
        return _compat.jaxpr_as_fun(jaxpr)(*args)

    def step(eqn, operands):
        if eqn.primitive is not lax.dot_general_p or eqn.params["out_sharding"]:
            return None
        sharding = sharding_of_product(eqn.params["dimension_numbers"], *operands)
        return sharding and _compat.bind_equation(eqn, operands, out_sharding=sharding)

    return evaluate(jaxpr, args, step)


def _is_sharded(x: Any) -> bool:
    """Whether the type of a value has a dimension that is sharded."""
    return any(part is not None for part in jax.typeof(x).sharding.spec)


def sharding_of_product(dimension_numbers, x, y) -> NamedSharding | None:
    """The `out_sharding` that JAX needs for `dot_general(x, y)`, on Explicit axes.

    Args:
      dimension_numbers: Those of `lax.dot_general`.
      x: The left operand.
      y: The right operand.

    Returns:
      The sharding; None if no dimension that the product contracts is sharded in both
      operands, as JAX infers the sharding then.
    """
    (lc, rc), (lb, rb) = dimension_numbers
    (left, right) = (jax.typeof(v).sharding for v in (x, y))
    contracted = zip(lc, rc, strict=True)
    if not any(left.spec[a] and right.spec[b] for a, b in contracted):
        return None
    parts = [left.spec[a] or right.spec[b] for a, b in zip(lb, rb, strict=True)]
    parts += [s for d, s in enumerate(left.spec) if d not in (*lc, *lb)]
    parts += [s for d, s in enumerate(right.spec) if d not in (*rc, *rb)]
    return NamedSharding(left.mesh, P(*parts))
