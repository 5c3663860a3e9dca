"""How the compiler propagates the shardings of Auto mesh axes.

Input: arrays. Output: the same arrays, with an operation of Shardy, XLA's partitioner,
around them. JAX has no functions for these. Only lowering rules trace them, so they
have no derivatives. Sharp edge: GSPMD, the partitioner before Shardy, ignores them.
"""

from typing import Any

import jax
from jax._src import config, core, sharding_impls
from jax._src.interpreters import mlir
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import sdy

from drjax._compat.types import Array

_NONE, _FORWARD = 0, 1  # the directions of a barrier


def devices_of_shard_map(ctx: mlir.LoweringRuleContext) -> jax.sharding.Mesh | None:
    """Return the mesh of the `shard_map` whose code is being lowered, with its devices.

    None if the devices are not known, or if shardings are not propagated by Shardy.
    """
    axes: Any = ctx.module_context.axis_context
    if not isinstance(axes, sharding_impls.SPMDAxisContext):
        return None
    known = isinstance(axes.mesh, jax.sharding.Mesh) and not axes.mesh.empty
    return axes.mesh if known and config.use_shardy_partitioner.value else None


def forward_only(x: Array) -> Array:
    """Return `x`, so that the sharding of `x` shards the result, but not vice versa."""
    return _barrier_p.bind(x, direction=_FORWARD)


def unrelated(x: Array) -> Array:
    """Return `x`, so that no sharding comes from `x` to the result or vice versa."""
    return _barrier_p.bind(x, direction=_NONE)


_barrier_p = core.Primitive("propagation_barrier")
_barrier_p.def_abstract_eval(lambda x, *, direction: x)


def _lower_barrier(
    ctx: mlir.LoweringRuleContext, x: ir.Value, *, direction: int
) -> list[ir.Value]:
    to: Any = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), direction)
    return [sdy.PropagationBarrierOp(x, allowed_direction=to).result]


mlir.register_lowering(_barrier_p, _lower_barrier)
