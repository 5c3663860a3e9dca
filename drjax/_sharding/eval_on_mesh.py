"""Evaluation of a plan's stage on a mesh that was unknown when it was traced.

Stages are traced outside any mesh, as a plan is free of devices. On Explicit axes,
types have shardings, so some equations need more than the trace has.

Input: a jaxpr, and arguments whose types have a mesh. Output: its results, with types
on that mesh. Invariants: values are those of the jaxpr; only shardings change, of
products and of sums of cotangents. Sharp edges: inner jits and loops are evaluated with
their traced types.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from drjax import _compat
from drjax._compat.types import Array, ClosedJaxpr, Eqn
from drjax._jaxprs.eval_jaxpr import evaluate

# ((contracted of x, of y), (batch of x, of y)), as of `lax.dot_general`.
_Pair: TypeAlias = tuple[Sequence[int], Sequence[int]]
DimensionNumbers: TypeAlias = tuple[_Pair, _Pair]


def evaluate_on_mesh(jaxpr: ClosedJaxpr, args: Sequence[Array]) -> list[Any]:
    """Evaluate a jaxpr that was traced without the mesh of its arguments.

    The values are those of the jaxpr, of a stage of a plan. On Explicit axes, where
    types have shardings, these things differ from the trace:

    * Arrays that are made without operands (zeros, iota) get the mesh in their types.
    * A `dot_general` that contracts dimensions which both operands have sharded gets an
      `out_sharding`, which JAX demands. It keeps the sharding of the other dimensions;
      the contraction is completed by one all-reduce.
    * Operands of `add_any`, `select_n`, `concatenate` and `dynamic_update_slice` are
      resharded to one sharding, which JAX demands. They may differ: if several
      equations use a value, each of them gives a cotangent for it, with a sharding of
      its own; and constants have none.
    * If JAX's types refuse an equation, such as a reshape of a sharded dimension, its
      operands are gathered first.
    """
    explicit = AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types
    # JAX would evaluate each equation in the context in which it was traced. There,
    # an array without operands (zeros, iota) has a type without the mesh.
    if not explicit and not any(map(_is_sharded, args)):
        return _compat.jaxpr_as_checked_fun(jaxpr)(*args)

    def step(eqn: Eqn, operands: list[Any]) -> list[Array]:
        params = {}
        if eqn.primitive is lax.dot_general_p and not eqn.params["out_sharding"]:
            numbers = eqn.params["dimension_numbers"]
            params["out_sharding"] = sharding_of_product(numbers, *operands)
        try:
            return _compat.bind_equation(eqn, in_one_sharding(eqn, operands), **params)
        except _compat.ShardingTypeError:
            if not any(map(_is_sharded, operands)):
                raise
            return _compat.bind_equation(eqn, [*map(_gathered, operands)], **params)

    return evaluate(jaxpr, args, step)


def in_one_sharding(eqn: Eqn, operands: Sequence[Any]) -> Sequence[Any]:
    """Reshard the operands of an equation if its primitive needs one sharding."""
    if eqn.primitive.name not in _OF_ONE_SHARDING:
        return operands
    return in_same_sharding(operands)


# Their operands with dimensions need one sharding.
_OF_ONE_SHARDING = ("add_any", "select_n", "concatenate", "dynamic_update_slice")


def in_same_sharding(operands: Sequence[Any]) -> list[Any]:
    """Reshard arrays as the first one that Explicit axes shard; scalars stay."""
    shardings = [jax.typeof(x).sharding for x in operands if jax.typeof(x).ndim]
    if len({sharding.spec for sharding in shardings}) < 2:
        return list(operands)
    sharding = next(s for s in shardings if any(part is not None for part in s.spec))
    reshard = lambda x: jax.sharding.reshard(x, sharding) if jax.typeof(x).ndim else x
    return [*map(reshard, operands)]


def _gathered(x: Array) -> Any:
    """Reshard an array so that no Explicit axis shards it."""
    if not _is_sharded(x):
        return x
    return jax.sharding.reshard(x, jax.typeof(x).sharding.update(spec=P()))


def _is_sharded(x: Array) -> bool:
    """Return whether a dimension of an array is sharded over Explicit axes."""
    return any(part is not None for part in jax.typeof(x).sharding.spec)


def sharding_of_product(
    dimension_numbers: DimensionNumbers, x: Array, y: Array
) -> NamedSharding | None:
    """Return the `out_sharding` that JAX needs for a `dot_general` on Explicit axes.

    Each batch or free dimension is sharded as in the operands; of a batch dimension the
    sharding in `x` comes first. None if no contracted dimension is sharded in both
    operands: JAX then infers the sharding.
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
