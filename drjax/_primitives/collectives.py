"""The linear communication primitives and all of their rules.

Input: one leaf; the partition and the mesh are parameters. Output: one leaf. `[*s]` is
the shape of a global value and `[n, *s]` that of a partitioned one.

Each primitive is linear, and its transpose is another one of them, with the inner
product <x, y> = sum_i <x_i, y_i> of partitioned values (Rush et al. 2024, section 3;
JAX note 17111, "Efficient transposition of replication-inducing collectives"):

    broadcast^T = reduce_sum        reduce_sum^T = broadcast
    scatter^T   = gather            gather^T     = scatter
    reduce_mean^T = broadcast o (1/n)

On a mesh, broadcast is a `pcast` to varying (no communication). A reduction is a sum
over the device's groups and one `psum`. Scatter is a slice (no communication), and
gather an all-gather whose result does not vary. The lowering rules of broadcast and
reduce_sum merge their equations with maps (`lowered_equations.py` says how).

Invariants: a rule binds these primitives only, so a derivative of a program is a
program; a result has the dtype of its operand; a reduction never reads padding.
Sharp edges: 16-bit floats are added in float32 on a device and communicated in 16 bits.
Reverse mode inside a user's `shard_map(check_vma=False)` over the partition's axes is
an error (`check_transposable`).
"""

from collections.abc import Callable, Sequence
from typing import Any, TypedDict, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad
from jax.interpreters.mlir import LoweringRuleContext

from drjax import _compat
from drjax._compat import UndefinedPrimal
from drjax._compat.jax_types import Primitive
from drjax._compat.types import (
    Array,
    Aval,
    DeviceArray,
    GlobalArray,
    Mesh,
    PartitionedArray,
)
from drjax._errors import MeshError
from drjax._jaxprs.prng_keys import is_key, on_raw
from drjax._partition import Partition
from drjax._plan.wire import Wire
from drjax._primitives import partial_reduction, registration
from drjax._primitives.between_slices import all_gather, divided_inside_slices
from drjax._primitives.device_sums import (
    LOW_PRECISION,
    accumulator,
    add_devices,
    scattered_axis,
)
from drjax._primitives.lowered_equations import MlirValue, lowered_equations, map_of
from drjax._primitives.registration import SlotIndices, Tangent
from drjax._primitives.segments import (
    InSegments,
    operand_of_device,
    placed_aval,
    placed_of,
    reduce_segments,
)
from drjax._sharding.avals import (
    global_aval,
    inner_spec,
    partitioned_aval,
    scattered_aval,
)
from drjax._sharding.execute import (
    as_operand,
    shard_map_over_devices,
    sharded_spec,
    undivided_if_uneven,
    vary,
    with_sharding_of,
)
from drjax._sharding.layout import Layout, Placement, make_layout

# ---------------------------------------------------------------------------------
# broadcast: [*s] -> [n, *s]

broadcast_p = registration.new_block("broadcast")


class BroadcastParams(Placement, total=False):
    """The parameters of `broadcast`: `execute_broadcast` has them."""

    secure: int


def execute_broadcast(
    x: GlobalArray, *, partition: Partition, mesh: Mesh | None, secure: int = 0
) -> PartitionedArray:
    """Give each group a copy of a global value.

    Each device makes the copies of its groups, without communication. `secure`, for the
    planner, is positive if `x` is the cotangent of a secure sum: the least number of
    groups of that sum.
    """
    layout = make_layout(partition, mesh)

    def body(x: Array) -> list[DeviceArray]:
        shape = (layout.per_device, *jnp.shape(x))
        dims = tuple(range(1, jnp.ndim(x) + 1))
        return [vary(lax.broadcast_in_dim(x, shape, dims), layout.axes)]

    return shard_map_over_devices(layout, body, [x], [False], [True])[0]


def _broadcast_abstract_eval(
    x: Aval, *, partition: Partition, mesh: Mesh | None, secure: int = 0
) -> Aval:
    return partitioned_aval(x, make_layout(partition, mesh))


def _lower_broadcast(
    ctx: LoweringRuleContext, x: MlirValue, **placement: Unpack[BroadcastParams]
) -> Sequence[MlirValue]:
    """Lowering rule of `broadcast`, which also records its operand.

    A map that is lowered later, and takes the result as an operand, reads the global
    value of which the result has n copies instead; if nothing else reads the copies,
    the compiler removes them.
    """
    source = x, ctx.avals_in[0]
    outs = _compat.lower_cached_function(ctx, execute_broadcast, source, **placement)
    placement.pop("secure", None)
    lowered_equations(ctx).broadcasts[outs[0]] = placement, source
    return outs


# <broadcast(x), y> = sum_i <x, y_i> = <x, reduce_sum(y)>
def _broadcast_transpose(
    ct: PartitionedArray, x: UndefinedPrimal, **params: Unpack[BroadcastParams]
) -> list[GlobalArray]:
    return [reduce_sum_p.bind(ct, **params)]


# ---------------------------------------------------------------------------------
# reduce_sum: [n, *s] -> [*s]


class SumOptions(TypedDict, total=False):
    """The options of `reduce_sum` besides `sharded`: `execute_reduce_sum` has them."""

    wire: Wire | None
    secure: int
    bound: float | None


reduce_sum_p = registration.new_block("reduce_sum")


def _local_sum(
    layout: Layout,
    x: DeviceArray | InSegments,
    indices: SlotIndices,
    scale: float | None = None,
    rounded: bool = True,
) -> Array:
    """Sum a device's slices over its groups, to `[*s]`; padding is left out.

    16-bit floats are added in float32. The sum is multiplied by `scale`, and then
    rounded to the dtype of `x`; of 16-bit floats it stays in float32 if not `rounded`.
    """
    wide = accumulator(x.dtype)
    if isinstance(x, InSegments):
        total = reduce_segments(np.add, x.without_padding(layout, indices), 0, wide)
    else:
        total = jnp.sum(layout.mask_padding(x, indices, 0), axis=0, dtype=wide)
    total = total if scale is None else total * scale
    return total.astype(x.dtype) if rounded else total


def _psum_over_levels(x: Array, axes: tuple[str, ...]) -> Array:
    """Sum the devices' values over the mesh axes of several levels."""
    add = lambda x: [lax.psum(vary(x, axes), axes)]
    return divided_inside_slices(axes, add, [x])[0]


def execute_reduce_sum(
    *xs: PartitionedArray,
    partition: Partition,
    mesh: Mesh | None,
    num: int | None = None,
    wire: Wire | None = None,
    sharded: bool = False,
    secure: int = 0,
    bound: float | None = None,
) -> GlobalArray:
    """Sum a partitioned value over the groups, in its dtype.

    Each device adds the slices of its groups. Then the devices' sums are added: by one
    all-reduce; by a reduce-scatter if `sharded`, to the part of each device; or with a
    `wire`, which encodes them, by an all-to-all, and for a whole sum an all-gather.
    With `num`, `xs` are the segments and the slices of the groups.

    `secure` and `bound` are ignored here: only engines, which run the groups in other
    processes, compute a sum securely.
    """
    layout = make_layout(partition, mesh)
    return _add_on_devices(layout, xs, num, wire, sharded)


def _add_on_devices(
    layout: Layout,
    xs: Sequence[PartitionedArray],
    num: int | None,
    wire: Wire | None,
    sharded: bool,
    scale: float | None = None,
) -> GlobalArray:
    """Sum a partitioned value: on each device over its groups, then over the devices.

    With `num`, `xs` are segments and slices. Devices' sums are multiplied by `scale`.
    """
    types = [global_aval(_compat.typeof(x), layout) for x in xs]
    aval = types[0] if num is None else placed_aval(*types, num=num)
    axis = _axis_to_divide(layout, aval, sharded)

    def body(*xs: DeviceArray) -> list[Array]:
        x, indices = operand_of_device(layout, xs, num)
        total = _local_sum(layout, x, indices, scale, rounded=wire is None)
        sums = add_devices(layout, [total], [wire], [axis])
        return [y.astype(aval.dtype) for y in sums]

    return shard_map_over_devices(
        layout, body, xs, [True] * len(xs), [sharded_spec(layout, axis)],
        with_indices=layout.uneven,
    )[0]  # fmt: skip


def _reduce_abstract_eval(
    x: Aval,
    *,
    partition: Partition,
    mesh: Mesh | None,
    sharded: bool = False,
    **options: Unpack[SumOptions],
) -> Aval:
    layout = make_layout(partition, mesh)
    # The execution casts to a dtype, and the result of a cast is not weakly typed.
    aval = global_aval(x, layout).update(weak_type=False)
    axis = _axis_to_divide(layout, aval, sharded)
    return aval if axis is None else scattered_aval(aval, layout, axis)


def _axis_to_divide(layout: Layout, aval: Aval, sharded: bool | str) -> int | None:
    """Find the axis along which the result of a reduction or gather is divided.

    It is the first axis of `aval`, `[*s]`, whose positive size is a multiple of m, the
    number of devices, and that no Explicit mesh axis shards. `aval` is the type of a
    reduction's result; of a gather, whose result is `[n, *s]`, that of one slice.

    None, each device has the whole result: if `sharded` is False; if there is no such
    axis; in a local program; and inside a user's `shard_map` over the partition's axes.
    "auto" is as True if the mesh has no Explicit axis, else as False, since on Explicit
    axes the division would be part of the result's type.
    """
    if not sharded or (sharded == "auto" and layout.explicit):
        return None
    return scattered_axis(layout, aval.shape, inner_spec(aval, layout, 0))


# <reduce_sum(y), x> = sum_i <y_i, x> = <y, broadcast(x)>
def _reduce_sum_transpose(
    ct: GlobalArray,
    x: UndefinedPrimal,
    *,
    partition: Partition,
    mesh: Mesh | None,
    sharded: bool = False,
    **options: Unpack[SumOptions],
) -> list[PartitionedArray]:
    if sharded:
        ct = as_operand(ct, make_layout(partition, mesh), False)
    # The demand on a summand holds for its cotangent, and for what comes of that.
    demand = {"secure": secure} if (secure := options.get("secure")) else {}
    return [broadcast_p.bind(ct, partition=partition, mesh=mesh, **demand)]


def _lower_reduce_sum(
    ctx: LoweringRuleContext,
    x: MlirValue,
    *,
    partition: Partition,
    mesh: Mesh | None,
    **options: Any,
) -> Sequence[MlirValue]:
    """Lowering rule of `reduce_sum`, which sums a map's result within the map.

    The operand may be a result of a map that was lowered before in the same module, for
    the same partition and mesh. If `LoweredMap.sums` of that map has the result, the
    map computes each device's sum over its groups, without storing a slice for each
    group. Then `execute_reduce_sum` adds up these sums, which it gets as a value of a
    partition with one group for each device. Else it gets the operand itself; but of
    slices in segments (`LoweredMap.placed`) the slices.
    """
    operand = x, ctx.avals_in[0]
    placement: Placement = {"partition": partition, "mesh": mesh}
    if (placed := placed_of(ctx, x, placement, np.add, 0)) is not None:
        params = {**placement, **options, "num": placed.num}
        return _compat.lower_function(
            ctx, execute_reduce_sum, placed.operands, False, **params
        )
    a_map, index = map_of(ctx, x, placement)
    if a_map is not None:
        sums = a_map.sums(ctx)
        if index in sums:
            operand, placement = sums[index], a_map.device_placement
    params = {**placement, **options}
    return _compat.lower_cached_function(ctx, execute_reduce_sum, operand, **params)


def _reduce_jvp(primitive: Primitive) -> Callable:
    """Make the JVP rule of `reduce_sum` or `reduce_mean`; no tangent is encoded.

    With `wire=`, the devices exchange rounded sums. Rounding is a step function, whose
    derivative is zero almost everywhere. So the tangent is that of the reduction
    without `wire` (a straight-through estimator: Bengio et al. 2013, "Estimating or
    propagating gradients through stochastic neurons"). All other parameters are those
    of the primal equation. So the tangent of a secure sum is a secure sum, too: it may
    reveal as much about a group as the sum itself.
    """

    def rule(
        primals: tuple[PartitionedArray],
        tangents: tuple[Tangent],
        *,
        wire: Wire | None = None,
        bound: float | None = None,
        **params: Any,
    ) -> tuple[GlobalArray, Tangent]:
        encoded = {} if wire is None else {"wire": wire}
        # A tangent may be of any magnitude.
        encoded |= {} if bound is None else {"bound": bound}
        y = primitive.bind(*primals, **params, **encoded)
        (t,) = tangents
        if type(t) is _compat.Zero:
            return y, _compat.Zero(_compat.typeof(y).to_tangent_aval())
        return y, primitive.bind(t, **params)

    return rule


# ---------------------------------------------------------------------------------
# reduce_mean: [n, *s] -> [*s], inexact dtypes only (the API promotes the others).
# A primitive of its own, as a plan names the mean, and as the division precedes the
# rounding to 16 bits.

reduce_mean_p = registration.new_block("reduce_mean")


def execute_reduce_mean(
    x: PartitionedArray,
    *,
    partition: Partition,
    mesh: Mesh | None,
    wire: Wire | None = None,
    sharded: bool = False,
) -> GlobalArray:
    """Average a partitioned value, of an inexact dtype, over the groups.

    The devices add, and `wire` and `sharded` mean, as in `execute_reduce_sum`. The
    division by n is usually last. For 16-bit floats, and with a `wire`, it is first, as
    the sum of n slices may be too large for 16 bits: each device divides its own sum,
    before it is rounded or encoded.
    """
    layout, n = make_layout(partition, mesh), partition.size

    # Divide first: a 16-bit sum may overflow.
    early = x.dtype in LOW_PRECISION or wire is not None

    scale = 1 / n if early else None
    y = _add_on_devices(layout, [x], None, wire, sharded, scale)
    return y if early else y / n


# <reduce_mean(y), x> = sum_i <y_i, x> / n = <y, broadcast(x / n)>
def _reduce_mean_transpose(
    ct: GlobalArray,
    x: UndefinedPrimal,
    *,
    partition: Partition,
    mesh: Mesh | None,
    **options: Any,
) -> list[PartitionedArray]:
    # The number of groups may be infinite in 16 bits.
    share = (ct.astype(accumulator(ct.dtype)) / partition.size).astype(ct.dtype)
    return _reduce_sum_transpose(share, x, partition=partition, mesh=mesh, **options)


# ---------------------------------------------------------------------------------
# gather: partitioned [n, *s] -> the slices of all groups as a global [n, *s]

gather_p = registration.new_block("gather")


def execute_gather(
    x: PartitionedArray,
    *,
    partition: Partition,
    mesh: Mesh | None,
    sharded: bool | str = False,
) -> GlobalArray:
    """Give each device all groups' slices, `[n, *s]`, without padding.

    On a mesh this is one all-gather. If `sharded`, it is an all-to-all, and each device
    gets a part of each slice, along the axis that `_axis_to_divide` finds; but random
    keys are never divided. Typed random keys are communicated as integers.
    """
    layout = make_layout(partition, mesh)
    slice_ = global_aval(_compat.typeof(x), layout)
    axis = None if is_key(x.dtype) else _axis_to_divide(layout, slice_, sharded)
    if axis is not None:
        return _all_to_all(layout, x, axis + 1)

    def gathered(x: DeviceArray) -> Array:
        x = all_gather(layout, x)
        return lax.slice_in_dim(x, 0, partition.size)  # without the padding

    def body(x: DeviceArray) -> list[Array]:
        # Collectives take no extended dtypes: typed keys are communicated as integers.
        return [on_raw(gathered, x) if layout.axes else x]

    return shard_map_over_devices(layout, body, [x], [True], [False])[0]


def _all_to_all(layout: Layout, x: PartitionedArray, axis: int) -> GlobalArray:
    """Give each device its part of all groups' slices: a sharded `gather`.

    Device j gets the j-th of m equal parts of `[n, *s]` along `axis`, an axis of `x`
    and not 0, whose size is a multiple of m. The layout is sharded.
    """

    def body(x: DeviceArray) -> list[Array]:
        x = vary(x, layout.axes)
        y = lax.all_to_all(x, layout.axes, axis, 0, tiled=True)
        return [lax.slice_in_dim(y, 0, layout.partition.size)]  # without the padding

    spec = sharded_spec(layout, axis)
    return shard_map_over_devices(layout, body, [x], [True], [spec])[0]


def _gather_abstract_eval(
    x: Aval, *, partition: Partition, mesh: Mesh | None, sharded: bool | str = False
) -> Aval:
    layout = make_layout(partition, mesh)
    slice_ = global_aval(x, layout)
    axis = None if is_key(x.dtype) else _axis_to_divide(layout, slice_, sharded)
    if axis is not None:
        slice_ = scattered_aval(slice_, layout, axis)
    spec = (None, *slice_.sharding.spec)
    sharding = slice_.sharding.update(spec=jax.sharding.PartitionSpec(*spec))
    shape = (partition.size, *slice_.shape)
    return _compat.replace_aval(slice_, shape, sharding, _compat.varying(slice_))


# <gather(y), x> = sum_i <y_i, x[i]> = <y, scatter(x)>
def _gather_transpose(
    ct: GlobalArray,
    x: UndefinedPrimal,
    *,
    partition: Partition,
    mesh: Mesh | None,
    sharded: bool | str = False,
) -> list[PartitionedArray]:
    if sharded:
        ct = as_operand(ct, make_layout(partition, mesh), True)
    return [scatter_p.bind(ct, partition=partition, mesh=mesh)]


# ---------------------------------------------------------------------------------
# scatter: a global [n, *s] -> partitioned [n, *s], x[i] being the slice of group i

scatter_p = registration.new_block("scatter")


def execute_scatter(
    x: GlobalArray, *, partition: Partition, mesh: Mesh | None
) -> PartitionedArray:
    """Give slice i of a global value `[n, *s]` to group i.

    Each device takes the slices of its groups, without communication.
    """
    layout = make_layout(partition, mesh)

    def body(x: Array) -> list[DeviceArray]:
        if not layout.manual:  # one device, or the shard_map has sliced the operand
            return [x]
        x, k = vary(x, layout.axes), layout.per_device
        return [lax.dynamic_slice_in_dim(x, lax.axis_index(layout.axes) * k, k)]

    x = undivided_if_uneven(x, layout, 0)
    return shard_map_over_devices(layout, body, [x], [True], [True])[0]


def _scatter_abstract_eval(x: Aval, *, partition: Partition, mesh: Mesh | None) -> Aval:
    layout = make_layout(partition, mesh)
    return partitioned_aval(global_aval(x, layout), layout)


# <scatter(x), y> = sum_i <x[i], y_i> = <x, gather(y)>
def _scatter_transpose(
    ct: PartitionedArray, x: UndefinedPrimal, **params: Unpack[Placement]
) -> list[GlobalArray]:
    return [gather_p.bind(ct, **params)]


# ---------------------------------------------------------------------------------
# All registrations


def check_transposable(layout: Layout) -> None:
    """Raise `MeshError` if a transpose rule runs where its cotangent is ambiguous.

    In a user's `shard_map` over the partition's axes with `check_vma=False`, JAX
    divides the cotangent of a replicated result by the number of devices, and leaves
    the cotangent of a sharded result whole. The types do not tell a transpose rule
    which of the two its cotangent is, so that the gradient could be wrong by that
    factor.
    """
    if layout.manual and not _compat.check_vma():
        raise MeshError(
            f"A reverse-mode derivative over partition {layout.partition} inside a "
            f"jax.shard_map(check_vma=False) over its axes {layout.axes}, where JAX's "
            "cotangents are ambiguous. Leave out check_vma=False."
        )


def checked_transpose(transpose: Callable) -> Callable:
    """Wrap a transpose rule with the check and the resharding that all of them need.

    The check (`check_transposable`) is in the transpose, not in the bind, as forward
    mode is always possible. `transpose` returns the cotangent of its first operand `x`
    first; the wrapped rule reshards it to the sharding of `x`.
    """

    def rule(
        ct: Array, x: UndefinedPrimal, *others: Array | UndefinedPrimal, **params: Any
    ) -> list:
        check_transposable(make_layout(params["partition"], params["mesh"]))
        first, *rest = transpose(ct, x, *others, **params)
        return [with_sharding_of(first, x.aval), *rest]

    return rule


def register_linear(
    primitive: Primitive,
    execute: Callable,
    abstract_eval: Callable,
    transpose: Callable,
    out_shift: int,
    group_axis_in: bool = True,
    lowering_rule: Callable | None = None,
) -> None:
    """Register the rules of a linear primitive with one operand and one result.

    They are execution, lowering, printing, abstract evaluation, JVP, transpose and
    batching (`registration.register_batching` says what `out_shift` and `group_axis_in`
    are). The JVP rule binds the primitive for the tangent. The transpose rule is
    checked (`checked_transpose`). If `lowering_rule` is None, `execute` is lowered.
    """
    registration.register_execution(primitive, execute, lowering_rule)
    primitive.def_abstract_eval(abstract_eval)
    ad.deflinear2(primitive, checked_transpose(transpose))
    registration.register_batching(primitive, out_shift, group_axis_in)


register_linear(
    broadcast_p,
    execute_broadcast,
    _broadcast_abstract_eval,
    _broadcast_transpose,
    +1,
    group_axis_in=False,
    lowering_rule=_lower_broadcast,
)
register_linear(
    reduce_sum_p,
    execute_reduce_sum,
    _reduce_abstract_eval,
    _reduce_sum_transpose,
    -1,
    lowering_rule=partial_reduction.reduction_rule(reduce_sum_p, _lower_reduce_sum),
)
partial_reduction.register_merging(
    reduce_sum_p,
    partial_reduction.Merging(
        _local_sum,
        _psum_over_levels,
        np.add,
        lambda dtype: 0,
    ),
)
register_linear(
    reduce_mean_p,
    execute_reduce_mean,
    _reduce_abstract_eval,
    _reduce_mean_transpose,
    -1,
)
for _primitive in (reduce_sum_p, reduce_mean_p):
    ad.primitive_jvps[_primitive] = _reduce_jvp(_primitive)
register_linear(gather_p, execute_gather, _gather_abstract_eval, _gather_transpose, 0)
register_linear(
    scatter_p, execute_scatter, _scatter_abstract_eval, _scatter_transpose, 0
)
