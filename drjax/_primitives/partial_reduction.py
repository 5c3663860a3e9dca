"""The primitive `partial_reduction`, which merges reductions over two levels of groups.

A reduction over two levels is one collective over the mesh axes of both. Three lowering
rules have their share in it: that of `map_fn` returns the parts of the reduction over
the inner level, by equations of `partial_reduction` (`with_partial_reductions`); the
`reduction_rule` of the outer reduction reduces these parts; and the rule of
`partial_reduction` takes a device's part from within a map, where that is possible.

Input: a map over an outer partition, of which a result is reduced over an inner one in
each group; then the reduction of that result over the outer partition. Output: the
reduction over both, with the same value up to the order of the operations.

Programs and their derivatives reduce one level after the other. With D_d the groups of
the outer partition on device d of its mesh axis, and E_e the inner groups on device e
of theirs,

    sum_i sum_j x_ij = sum_{d,e} (sum_{i in D_d} sum_{j in E_e} x_ij)

The map returns the sums over E_e as additional results, one slice for each device e,
without communication. The outer reduction adds these over D_d, and then over d and e.
The same holds for maxima and minima. The compiler removes what has no other use: the
additional results, or the collective over the inner axes alone.

Invariants: only lowering rules see the primitive `partial_reduction`, which has no
derivatives. Sharp edges: 16-bit sums are rounded where a device's inner sum is; inner
reductions that encode or divide their result stay as they are, and so do those that are
not results of the map themselves.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.interpreters.mlir import LoweringRuleContext
from jax.typing import DTypeLike

from drjax import _compat
from drjax._compat.jax_types import Primitive
from drjax._compat.types import (
    Array,
    Aval,
    ClosedJaxpr,
    DeviceArray,
    GlobalArray,
    Mesh,
    PartitionedArray,
)
from drjax._partition import Partition
from drjax._primitives import registration
from drjax._primitives.lowered_equations import InnerReduction, MlirValue, map_of
from drjax._primitives.registration import SlotIndices
from drjax._primitives.segments import operand_of_device, placed_of
from drjax._sharding.avals import global_aval, partitioned_aval
from drjax._sharding.execute import (
    shard_map_over_devices,
    shard_map_over_levels,
    vary,
)
from drjax._sharding.layout import Layout, Placement, make_layout


@dataclass(frozen=True)
class Merging:
    """How a reduction is split between the devices and the collective.

    Attributes:
      local: `local(layout, x, indices)` reduces the slices `[k, *s]`, or `InSegments`,
        of a device's k slots (places for one group) to `[*s]`. `indices` are the group
        indices of the slots, int32 `[k]`, to leave out padding; None if no slot is
        padding.
      across: `across(y, axes)` reduces the devices' values `[*s]` over mesh axes.
      ufunc: The binary function of the reduction, as a NumPy ufunc.
      identity: From a dtype to the number that is neutral for it.
    """

    local: Callable
    across: Callable
    ufunc: np.ufunc
    identity: Callable[[DTypeLike], Any]

    @property
    def is_sum(self) -> bool:
        """Whether it is the sum.

        Only of a sum can the lowering of the `map_fn` that computes the slices return
        the device's partial sums itself, so that no `[n, *s]` is stored
        (`LoweredMap.sums`).
        """
        return self.ufunc is np.add


_REDUCTIONS: dict[Primitive, Merging] = {}


def register_merging(primitive: Primitive, merging: Merging) -> None:
    """Register that a reduction may merge with the same one over an inner level.

    Then a reduction over an inner level in each group, and one of the results over the
    outer level, are lowered as one collective over the mesh axes of both. Equations
    merge if they have no parameters but `partition` and `mesh`. A second call for a
    primitive replaces the first.
    """
    _REDUCTIONS[primitive] = merging


# ---------------------------------------------------------------------------------
# partial_reduction: [n, *s] -> [m, *s], the reduction of each of m devices

partial_reduction_p = registration.new_primitive("partial_reduction")


def execute_partial_reduction(
    *xs: PartitionedArray,
    partition: Partition,
    mesh: Mesh | None,
    reduction: Primitive,
    num: int | None = None,
) -> PartitionedArray:
    """Reduce the slices on each of m devices: slice d of `[m, *s]` is that of device d.

    There is no communication. Padding is left out. `reduction` is one for which
    `register_merging` was called, and the mesh has the partition's axes. With `num`,
    `xs` are the segments and the slices of the groups.
    """
    layout = make_layout(partition, mesh)

    def body(*xs: DeviceArray) -> list[Array]:
        x, indices = operand_of_device(layout, xs, num)
        y = _REDUCTIONS[reduction].local(layout, x, indices)
        return [vary(y, layout.axes)[None]]

    # None: one slice a device.
    return shard_map_over_devices(
        layout, body, xs, [True] * len(xs), [None], with_indices=layout.uneven
    )[0]


def _partial_abstract_eval(
    x: Aval, *, partition: Partition, mesh: Mesh | None, reduction: Primitive
) -> Aval:
    layout = make_layout(partition, mesh)
    devices = Partition(partition.name, layout.devices, partition.mesh_axes)
    aval = partitioned_aval(global_aval(x, layout), make_layout(devices, mesh))
    return aval.update(weak_type=False)


def _partial_reduction_rule(
    ctx: LoweringRuleContext,
    x: MlirValue,
    *,
    partition: Partition,
    mesh: Mesh | None,
    reduction: Primitive,
) -> Sequence[MlirValue]:
    """Lowering rule of `partial_reduction`, which returns the sums of a map if it can.

    They are those of `LoweredMap.sums`, for a sum of a result of a map that was lowered
    before in the same module, for the same partition and mesh; no slice for each group
    is stored. Else the slices of each device are reduced.
    """
    placement: Placement = {"partition": partition, "mesh": mesh}
    a_map, index = map_of(ctx, x, placement)
    if a_map is not None and _REDUCTIONS[reduction].is_sum:
        sums = a_map.sums(ctx)
        if index in sums:
            return [sums[index][0]]
    aval: Aval = ctx.avals_in[0]
    params, operands = {**placement, "reduction": reduction}, [(x, aval)]
    merging = _REDUCTIONS[reduction]
    neutral = merging.identity(aval.dtype)
    if (placed := placed_of(ctx, x, placement, merging.ufunc, neutral)) is not None:
        operands, params["num"] = placed.operands, placed.num
    return _compat.lower_function(
        ctx, execute_partial_reduction, operands, False, **params
    )


# ---------------------------------------------------------------------------------
# The reductions over the inner level among a map's results, and over the outer level


@_compat.weakref_lru_cache
def with_partial_reductions(
    jaxpr: ClosedJaxpr,
) -> tuple[ClosedJaxpr, dict[int, InnerReduction]]:
    """Add the devices' parts of inner reductions to the results of a mapped function.

    A result of the jaxpr is an inner reduction if a reduction equation computes it, for
    which `register_merging` was called; the equation has no options, such as an
    encoding or a sharded result; and its partition is sharded over m devices. For each
    such result, the new jaxpr also returns what each of these devices has before the
    collective, by a `partial_reduction` equation. Cached by the jaxpr, which has no
    constants.

    The additional results, `[m, *s]` each, follow those of `jaxpr`. The dict has the
    `InnerReduction` of each by the position of the inner reduction among the results of
    `jaxpr`. `(jaxpr, {})` if no result is an inner reduction.
    """
    raw = _compat.open_jaxpr(jaxpr)
    defined = {eqn.outvars[0]: eqn for eqn in raw.eqns if eqn.primitive in _REDUCTIONS}
    inner: dict[int, InnerReduction] = {}
    eqns = []
    for i, result in enumerate(raw.outvars):
        eqn = None if hasattr(result, "val") else defined.get(result)
        if eqn is None or set(eqn.params) - {"partition", "mesh"}:
            continue  # not a reduction, or one that is encoded or divided
        layout = make_layout(**eqn.params)
        if not layout.sharded:
            continue
        params = {**eqn.params, "reduction": eqn.primitive}
        out = _compat.new_var(_partial_abstract_eval(eqn.invars[0].aval, **params))
        inner[i] = InnerReduction(
            eqn.primitive, layout.axes, len(raw.outvars) + len(eqns)
        )
        eqns.append(
            eqn.replace(primitive=partial_reduction_p, params=params, outvars=[out])
        )
    return (_compat.with_results(jaxpr, eqns), inner) if eqns else (jaxpr, inner)


def reduce_levels(
    x: PartitionedArray, *, layout: Layout, inner: InnerReduction
) -> GlobalArray:
    """Reduce the parts of an inner reduction over the outer level: one collective.

    `x` has for each of the n groups of the outer level, which is sharded, the parts of
    the reduction on the m devices of the inner level, `[n, m, *s]`.
    """
    reduction = _REDUCTIONS[inner.primitive]

    def body(x: DeviceArray, indices: SlotIndices = None) -> Array:
        y = reduction.local(layout, jax.lax.squeeze(x, (1,)), indices)
        return reduction.across(y, (*layout.axes, *inner.axes))

    return shard_map_over_levels(layout, inner.axes, body, x)


def reduction_rule(primitive: Primitive, execute: Callable) -> Callable:
    """Make the lowering rule of a reduction, which merges with one over an inner level.

    A program may reduce over an inner level in each group of an outer one, and then
    over the outer level: a map whose result is a reduction, and a reduction of that
    result. The rule lowers both as one collective over the mesh axes of both levels, if
    both are of one primitive and have no options such as `wire`, both levels are
    sharded, and the map was lowered before in the same module for the same partition
    and mesh as the outer reduction. Else it calls `execute`, a lowering rule.
    """

    def rule(
        ctx: LoweringRuleContext, x: MlirValue, **params: Any
    ) -> Sequence[MlirValue]:
        a_map, index = map_of(ctx, x, params)  # none if there are options
        if a_map is not None:
            inner, operand = a_map.partial.get(index, (None, None))
            if inner is not None and inner.primitive is primitive:
                run = functools.partial(
                    reduce_levels, layout=make_layout(**params), inner=inner
                )
                return _compat.lower_function(ctx, run, [operand], False)
        return execute(ctx, x, **params)

    return rule


# ---------------------------------------------------------------------------------
# All registrations

registration.register_execution(
    partial_reduction_p, execute_partial_reduction, _partial_reduction_rule
)
partial_reduction_p.def_abstract_eval(_partial_abstract_eval)
registration.register_batching(partial_reduction_p, 0, group_axis_in=True)
