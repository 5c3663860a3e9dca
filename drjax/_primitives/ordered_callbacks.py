"""Ordered host callbacks in groups: one call for each group, in their order.

Input: the jaxpr of one group. Output: the same jaxpr, in which an `io_callback` with
`ordered=True` is an equation of `call_in_order`. JAX refuses to batch the former; the
batching rule of the latter is a loop, as JAX's own for `jax.debug.callback` is.

Invariants: each group calls once, also where the operands are the same for all groups.
Sharp edges: of two callbacks, the first one runs for all groups of a device before the
second one does. On a mesh, each device has an order of its own.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.interpreters import batching

from drjax import _compat
from drjax._compat.jax_types import Primitive
from drjax._compat.types import Array, Aval, ClosedJaxpr, Eqn, PyTree
from drjax._jaxprs.walk import rewrite_equations
from drjax._primitives import registration
from drjax._primitives.registration import AxisData

call_in_order_p = registration.new_primitive("call_in_order", multiple_results=True)


# Cached, so that lowering a jaxpr twice gives the same object, and later caches hit.
@_compat.weakref_lru_cache
def rewrite_ordered_callbacks(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """Replace ordered callbacks by `call_in_order`, at any depth; cached."""
    return rewrite_equations(jaxpr, _rewrite_callback)


def _rewrite_callback(eqn: Eqn) -> list[Eqn] | None:
    """Replace an ordered callback by `call_in_order`; None for other equations."""
    if eqn.primitive.name != "io_callback" or not eqn.params["ordered"]:
        return None
    params = {
        "call": eqn.primitive,
        "options": tuple(sorted(eqn.params.items())),
        "avals": tuple(v.aval for v in eqn.outvars),
        "called": frozenset(eqn.effects),
    }
    return [eqn.replace(primitive=call_in_order_p, params=params)]


def _call(
    *args: Array,
    call: Primitive,
    options: tuple[tuple[str, Any], ...],
    avals: tuple[Aval, ...],
    called: frozenset,
) -> Sequence[Array]:
    return call.bind(*args, **dict(options))


def _batch(
    axis_data: AxisData,
    args: Sequence[Array],
    dims: Sequence[int | None],
    **params: Any,
) -> tuple[Sequence[Array], list[int]]:
    """Batching rule of `call_in_order`: one call after the other."""
    batched = [
        None if d is None else _compat.moveaxis(x, d, 0)
        for x, d in zip(args, dims, strict=True)
    ]

    def one(step: None, slices: PyTree) -> tuple[None, Sequence[Array]]:
        _, slices = slices
        pairs = zip(args, slices, strict=True)
        args_of_one = [x if s is None else s for x, s in pairs]
        return step, call_in_order_p.bind(*args_of_one, **params)

    _, outs = lax.scan(one, None, (jnp.arange(axis_data.size), batched))
    return outs, [0] * len(outs)


registration.register_execution(call_in_order_p, _call)
call_in_order_p.def_effectful_abstract_eval(
    lambda *_, avals, called, **__: (list(avals), set(called))
)
batching.fancy_primitive_batchers[call_in_order_p] = _batch
