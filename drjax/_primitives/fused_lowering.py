"""Lowering rules of broadcast, map_fn and reduce_sum that merge equations.

Input: the execution function of the primitive, from the file that registers the rule.
Output: a lowering rule, which turns the MLIR values of an equation's operands into
those of its results. They equal the results of the execution function, up to the order
of additions. The rules merge three pairs of equations, as hand-written code does:

* A map whose operand is the result of a `broadcast` reads the source of the broadcast,
  so that no copy exists for each group. Derivatives profit, too, as their maps take the
  same broadcast values as residuals.
* A sum of a map's result is computed within the map, where `contract_groups.py`
  supports it: with D_d the groups of device d,

      sum_i y_i = sum_d (sum_{i in D_d} y_i)

  The inner sums are a partitioned value of one group a device, and `reduce_sum` over
  that partition is the outer one.

* A reduction of a map's result that is itself the same reduction over an inner level is
  one collective over the mesh axes of both: see `partial_reduction.py`.

The separate broadcast or map is lowered as well. The compiler's dead-code elimination
removes it if it has no other use.

Invariants: equations merge only if their partition and mesh agree. A rule knows the
equations that were lowered before it in the same module, by the values of their
results; what it knows is deleted with the module.
Sharp edges: a value defined in one MLIR block (a branch, a loop's body) may not be used
in another one, so the sums of a map are lowered once for each block with a use. Without
these rules, programs compute the same and need more memory.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters.mlir import LoweringRuleContext

from drjax import _compat
from drjax._compat.types import Array, Aval, ClosedJaxpr, Flags, Mesh, Params
from drjax._partition import Partition
from drjax._primitives.contract_groups import GroupSums, group_sums
from drjax._primitives.lowered_equations import (
    InnerReduction,
    MlirValue,
    Operand,
    Placement,
    lowered_equations,
    map_of,
)
from drjax._primitives.map_lowering import (
    lowers_by_vmap,
    over_groups,
    prepare_for_shard_map,
)
from drjax._primitives.partial_reduction import (
    reduction_rule,
    with_partial_reductions,
)
from drjax._sharding.avals import partitioned_aval, slices_aval
from drjax._sharding.execute import shard_map_over_devices, vary
from drjax._sharding.layout import Layout, make_layout

# An operand of sums: its MLIR value and type, and whether it is partitioned.
Stack: TypeAlias = tuple[MlirValue, Aval, bool]


def broadcast_rule(execute: Callable) -> Callable:
    """Make the lowering rule of `broadcast`, which also records its operand.

    A map that is lowered later, and takes the result as an operand, reads the global
    value of which the result has n copies instead; if nothing else reads the copies,
    the compiler removes them. `execute` is the execution function.
    """

    def rule(
        ctx: LoweringRuleContext, x: MlirValue, **placement: Any
    ) -> Sequence[MlirValue]:
        source = x, ctx.avals_in[0]
        outs = _compat.lower_cached_function(ctx, execute, source, **placement)
        placement.pop("secure", None)
        lowered_equations(ctx).broadcasts[outs[0]] = placement, source
        return outs

    return rule


def map_rule(execute: Callable) -> Callable:
    """Make the lowering rule of `map_fn`, which reads the sources of broadcasts.

    An operand that is the result of a `broadcast` with the same partition and mesh,
    lowered before in the same module, is replaced by the operand of the broadcast. The
    rule also records the map in the module's `_LoweredEquations`, so that sums of its
    results can be computed within it.

    A result of the mapped function may be a reduction over an inner level of groups
    (`with_partial_reductions`). If both levels are sharded, the map gets one more
    result for it: the part of the reduction on each device of the inner level. Before
    JAX 0.12, it does not if the mesh has Explicit axes that are not the partition's.

    `execute` is the execution function with one more keyword, `shared`: a tuple with a
    bool for each operand, whether it is the source of a broadcast, `[*s]` instead of
    `[n, *s]`.
    """

    def rule(
        ctx: LoweringRuleContext, *args: MlirValue, **params: Any
    ) -> Sequence[MlirValue]:
        placement = {"partition": params["partition"], "mesh": params["mesh"]}
        lowered = lowered_equations(ctx)
        operands, shared = list(zip(args, ctx.avals_in, strict=True)), []
        for i, arg in enumerate(args):
            # A broadcast over another partition or mesh has other copies: no match.
            of_broadcast, source = lowered.broadcasts.get(arg, (None, None))
            shared.append(of_broadcast == placement)
            if source is not None and shared[i]:
                operands[i] = source
        layout = make_layout(**placement)
        operands = [(x, slices_aval(aval, layout)) for x, aval in operands]
        run = functools.partial(execute, shared=tuple(shared))
        jaxpr, inner = params["jaxpr"], {}
        gathers = _compat.GATHERS_EXPLICIT_RESULTS and layout.other_explicit_axes
        if layout.sharded and not gathers:
            extended, inner = with_partial_reductions(jaxpr)
            params = {**params, "jaxpr": extended}
        contraction = None if inner else _contraction(layout, jaxpr)
        stacks = []
        if contraction is None:
            outs = _compat.lower_function(ctx, run, operands, True, **params)
        else:
            outs, stacks = contraction.lower(ctx, operands, shared)
        partial = {
            i: (each, (outs[each.position], _partitioned_out(params, each.position)))
            for i, each in inner.items()
        }
        outs = outs[: len(jaxpr.out_avals)]
        a_map = _LoweredMap(
            placement, operands, tuple(shared), jaxpr, partial, contraction, stacks
        )
        lowered.maps.update({out: (a_map, i) for i, out in enumerate(outs)})
        return outs

    return rule


def _partitioned_out(params: Params, position: int) -> Aval:
    """Return the type `[n, *t]` of a map's result at `position`."""
    layout = make_layout(params["partition"], params["mesh"])
    return partitioned_aval(params["jaxpr"].out_avals[position], layout)


def extremum_rule(primitive: Primitive, execute: Callable) -> Callable:
    """Make the lowering rule of an extremum: a `reduction_rule`.

    Where it does not merge, `execute`, the execution function, is lowered.
    """

    def alone(
        ctx: LoweringRuleContext, x: MlirValue, **params: Any
    ) -> Sequence[MlirValue]:
        return _compat.lower_cached_function(
            ctx, execute, (x, ctx.avals_in[0]), **params
        )

    return reduction_rule(primitive, alone)


def reduce_sum_rule(execute: Callable) -> Callable:
    """Make the lowering rule of `reduce_sum`, which sums a map's result within the map.

    The operand may be a result of a map that was lowered before in the same module, for
    the same partition and mesh. If `_LoweredMap.sums` of that map has the result, the
    map computes each device's sum over its groups, without storing a slice for each
    group. Then `execute`, the execution function, adds up these sums, which it gets as
    a value of a partition with one group for each device. Else it gets the operand
    itself.
    """

    def rule(
        ctx: LoweringRuleContext,
        x: MlirValue,
        *,
        partition: Partition,
        mesh: Mesh | None,
        **options: Any,
    ) -> Sequence[MlirValue]:
        operand, placement = (
            (x, ctx.avals_in[0]),
            {"partition": partition, "mesh": mesh},
        )
        a_map, index = map_of(ctx, x, placement)
        if a_map is not None:
            sums = a_map.sums(ctx)
            if index in sums:
                operand, placement = sums[index], a_map.device_placement
        params = placement | options
        return _compat.lower_cached_function(ctx, execute, operand, **params)

    return rule


class _Contraction:
    """A map that also returns what sums of its results are computed from.

    So a sum needs the map's work once in the code, not once more for itself. It is for
    layouts whose types have no mesh axes: on others, the sums repeat the work, which
    the compiler merges.
    """

    def __init__(self, layout: Layout, jaxpr: ClosedJaxpr, sums: GroupSums) -> None:
        self._layout, self._sums = layout, sums
        raw = _compat.open_jaxpr(jaxpr)
        inputs = {v: i for i, v in enumerate(raw.invars)}
        # An input is not returned: for all groups, it may be one array.
        self._inputs = [inputs.get(v) for v in sums.per_group]
        computed = [v for v in sums.per_group if v not in inputs]
        self._stack_avals = [
            partitioned_aval(_compat.ShapedArray(v.aval.shape, v.aval.dtype), layout)
            for v in computed
        ]
        self._extended = _compat.with_outputs(jaxpr, [*raw.outvars, *computed])
        self._count = len(raw.outvars)
        self._out_avals = [
            partitioned_aval(_compat.ShapedArray(v.aval.shape, v.aval.dtype), layout)
            for v in raw.outvars
        ]

    def lower(
        self, ctx: LoweringRuleContext, operands: Sequence[Operand], shared: Flags
    ) -> tuple[list, list[Stack]]:
        """Lower the map; return its results, and the operands of `lower_sums`."""
        layout, partitioned_in = self._layout, [not x for x in shared]
        fn = _compat.jaxpr_as_fun(self._extended)

        def run(*args: Array) -> list[Array]:
            body = over_groups(layout, fn, partitioned_in)
            vary_all = lambda *xs: [vary(y, layout.axes) for y in body(*xs)]
            everywhere = [True] * len(self._extended.out_avals)
            return shard_map_over_devices(
                layout, vary_all, args, partitioned_in, everywhere, False
            )

        outs = _compat.lower_function(ctx, run, operands, True)
        stacks = iter(zip(outs[self._count :], self._stack_avals, strict=True))
        return outs[: self._count], [
            (*next(stacks), True) if i is None else (*operands[i], not shared[i])
            for i in self._inputs
        ]

    def lower_sums(
        self, ctx: LoweringRuleContext, stacks: Sequence[Stack], a_map: "_LoweredMap"
    ) -> dict[int, Operand]:
        """Lower the devices' sums: see `_LoweredMap.sums`."""
        layout, sums = self._layout, self._sums
        count, partitioned_in = layout.per_device, [p for _, _, p in stacks]

        def run(*args: Array) -> list[Array]:
            def body(*own: Array) -> list[Array]:
                values = [
                    x if p else jnp.broadcast_to(x, (count, *x.shape))
                    for x, p in zip(own, partitioned_in, strict=True)
                ]
                totals = sums.of_stacks(count, values)
                return [vary(y, layout.axes)[None] for y in totals]

            each_device = [None] * len(sums.indices)
            return shard_map_over_devices(
                layout, body, args, partitioned_in, each_device, False
            )

        operands = [(value, aval) for value, aval, _ in stacks]
        outs = _compat.lower_function(ctx, run, operands, True)
        of_devices = make_layout(**a_map.device_placement)
        avals = [
            partitioned_aval(_compat.ShapedArray(x.shape[1:], x.dtype), of_devices)
            for x in (self._out_avals[i] for i in sums.indices)
        ]
        return dict(zip(sums.indices, zip(outs, avals, strict=True), strict=True))


def _contraction(layout: Layout, jaxpr: ClosedJaxpr) -> _Contraction | None:
    """Return the `_Contraction` of a map, if it has one that saves memory."""
    simple = not layout.manual and not _compat.check_vma() and not layout.uneven
    explicit = layout.spec_entry is not None or layout.other_explicit_axes
    if not simple or explicit or layout.per_device == 1:
        return None
    if layout.partly_manual or lowers_by_vmap(layout, jaxpr):
        return None
    prepared = prepare_for_shard_map(layout, jaxpr)
    sums = group_sums(prepared)
    return _Contraction(layout, prepared, sums) if sums.indices else None


class _LoweredMap:
    """A lowered `map_fn` equation, which can lower sums of its results, too.

    An operand that is `shared`, the source of a broadcast, is `[*s]`, others `[n, *s]`.
    `stacks` are the operands of the sums of the `contraction` that has lowered the map.

    Attributes:
      partial: From the position of each result that the mapped function reduces over an
        inner level of groups, to how it does, and the additional result of the map,
        `[n, m, *s]`: the part of the reduction on each of the inner level's m devices.
      placement: The parameters `partition` and `mesh` of the equation.
      device_placement: As `placement`; its partition has one group for each device.
    """

    def __init__(
        self,
        placement: Placement,
        operands: Sequence[Operand],
        shared: Flags,
        jaxpr: ClosedJaxpr,
        partial: dict[int, tuple[InnerReduction, Operand]],
        contraction: "_Contraction | None",
        stacks: Sequence[Stack],
    ) -> None:
        self._contraction, self._stacks = contraction, stacks
        self.placement, self._operands, self.partial = placement, operands, partial
        self._shared, self._jaxpr = shared, jaxpr
        p, self._layout = placement["partition"], make_layout(**placement)
        devices = Partition(p.name, self._layout.devices, p.mesh_axes)
        self.device_placement = {**placement, "partition": devices}
        self._sums: list[tuple[Any, dict[int, Operand]]] = []  # by block of code

    def sums(self, ctx: LoweringRuleContext) -> dict[int, Operand]:
        """Return the devices' sums of those results that can be summed within the map.

        Such a result is float32, and linear equations compute it from a `dot_general`
        or a `reduce_sum`, into which the sum over the groups merges; and the jaxpr of
        one group is straight-line code without effects (`GroupSums`). The dict has the
        sums `[m, *s]`, for each of m devices the sum over its groups, by the position
        of the result. {} if there is no such result; if each device has one group only,
        or some slot is padding; or if the map is lowered by a `vmap` over all devices'
        groups.

        `ctx` is that of the equation that uses the sums. The first call in an MLIR
        block lowers the sums of all such results into that block; later calls in the
        block return the same values.
        """
        # A use in another block needs sums of its own: see the sharp edge above.
        block = _compat.current_block()
        for known, sums in self._sums:
            if known == block:
                return sums
        sums = self._lower_sums(ctx)
        self._sums.append((block, sums))
        return sums

    def _lower_sums(self, ctx: LoweringRuleContext) -> dict[int, Operand]:
        """Lower what `sums` returns into the current MLIR block."""
        layout = self._layout
        if self._contraction is not None:
            return self._contraction.lower_sums(ctx, self._stacks, self)
        # Padding would have to be masked in the operands of each contraction; a single
        # group has no sum; and by vmap, no code is of one device.
        if (
            layout.uneven
            or layout.per_device == 1
            or lowers_by_vmap(layout, self._jaxpr)
        ):
            return {}
        sums = group_sums(prepare_for_shard_map(layout, self._jaxpr))
        if not sums.indices:
            return {}
        # Only live operands: an unused broadcast would stay alive otherwise.
        used = [i for i, u in enumerate(sums.used) if u]
        partitioned_in = [not self._shared[i] for i in used]

        def run(*args: Array) -> list[Array]:
            def body(*operands: Array) -> list[Array]:
                run = lambda fn: over_groups(layout, fn, partitioned_in)
                totals = sums(layout.per_device, run, operands)
                return [vary(y, layout.axes)[None] for y in totals]

            # None: one slice a device, `[m, *s]`, to be reduced over the devices.
            each_device = [None] * len(sums.indices)
            vma = _compat.check_vma()
            return shard_map_over_devices(
                layout, body, args, partitioned_in, each_device, vma
            )

        operands = [self._operands[i] for i in used]
        outs = _compat.lower_function(ctx, run, operands, True)
        avals = [
            partitioned_aval(
                self._jaxpr.out_avals[i], make_layout(**self.device_placement)
            )
            for i in sums.indices
        ]
        operands = zip(outs, avals, strict=True)
        return dict(zip(sums.indices, operands, strict=True))
