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
gather an all-gather whose result does not vary.

Invariants: a rule binds these primitives only, so a derivative of a program is a
program; a result has the dtype of its operand; a reduction never reads padding.
Sharp edges: 16-bit floats are added in float32 on a device and communicated in 16 bits.
Reverse mode inside a user's `shard_map(check_vma=False)` over the partition's axes is
an error (`check_transposable`).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad

from drjax import _compat
from drjax._errors import MeshError
from drjax._jaxprs.prng_keys import is_key, on_raw
from drjax._primitives import fused_lowering, levels_lowering, registration
from drjax._primitives.device_sums import (
    LOW_PRECISION,
    accumulator,
    add_devices,
    scattered_axis,
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
from drjax._sharding.layout import Layout, make_layout

# ---------------------------------------------------------------------------------
# broadcast: [*s] -> [n, *s]

broadcast_p = registration.new_primitive("broadcast")


def execute_broadcast(x, *, partition, mesh, secure=0):
    """Execution function of `broadcast`: give each group a copy of a global value.

    Each device makes the copies of its groups, without communication.

    Args:
      x: The global value, `[*s]`.
      partition: The `Partition`, of n groups.
      mesh: The mesh, or None: the program runs locally.
      secure: Of the cotangent of a secure sum, the least number of groups of that sum;
        else 0. It is ignored here: the planner reads it.

    Returns:
      The partitioned value, `[n, *s]`.
    """
    layout = make_layout(partition, mesh)

    def body(x):
        shape = (layout.per_device, *jnp.shape(x))
        dims = tuple(range(1, jnp.ndim(x) + 1))
        return [vary(lax.broadcast_in_dim(x, shape, dims), layout.axes)]

    return shard_map_over_devices(layout, body, [x], [False], [True])[0]


def _broadcast_abstract_eval(x, *, partition, mesh, secure=0):
    return partitioned_aval(x, make_layout(partition, mesh))


# <broadcast(x), y> = sum_i <x, y_i> = <x, reduce_sum(y)>
def _broadcast_transpose(ct, x, **params):
    return [reduce_sum_p.bind(ct, **params)]


# ---------------------------------------------------------------------------------
# reduce_sum: [n, *s] -> [*s]

reduce_sum_p = registration.new_primitive("reduce_sum")


def _local_sum(layout: Layout, x, indices, scale=None, rounded: bool = True):
    """Sum a device's slices over its groups; 16-bit floats are added in float32.

    Args:
      layout: The layout of the partition: k slots (places for one group) on each
        device, of which the last ones may be padding.
      x: The slices of the device, `[k, *s]`.
      indices: The group index of each slot, int32 `[k]`, to leave padding out of the
        sum; None if no slot is padding.
      scale: A Python number by which the sum is multiplied, before it is rounded to 16
        bits; None: no multiplication.
      rounded: Whether a sum of 16-bit floats is rounded to their dtype; else it stays
        in float32. It makes no difference for other dtypes.

    Returns:
      The sum, `[*s]`, in the dtype of `x`, or for 16-bit floats that are not rounded in
      float32.
    """
    x = layout.mask_padding(x, indices, 0)
    total = jnp.sum(x, axis=0, dtype=accumulator(x.dtype))
    total = total if scale is None else total * scale
    return total.astype(x.dtype) if rounded else total


def execute_reduce_sum(
    x, *, partition, mesh, wire=None, sharded=False, secure=0, bound=None
):
    """Execution function of `reduce_sum`: sum a partitioned value over the groups.

    Each device adds the slices of its groups. Then the devices' sums are added: by one
    all-reduce; by a reduce-scatter if `sharded`; or with a `wire` by an all-to-all, and
    for a whole sum an all-gather.

    Args:
      x: The partitioned value, `[n, *s]`.
      partition: The `Partition`, of n groups.
      mesh: The mesh, or None: the program runs locally.
      wire: A `drjax.plan.Wire`, the format in which the devices exchange their sums,
        with fewer bits; None: they exchange the dtype of `x`.
      sharded: Whether each device gets a part of the sum only: an m-th along the first
        axis of `[*s]` whose positive size is a multiple of m, the number of devices,
        and that no Explicit mesh axis shards. Each device gets the whole sum if there
        is no such axis, in a local program, and inside a user's `shard_map` over the
        partition's axes.
      secure: The least number of groups of a secure sum, 0 if the sum is not secure. It
        is ignored here: only engines, which run the groups in other processes, compute
        a sum securely.
      bound: Of a secure sum, the largest magnitude of a number of one group; None: the
        engine's. It is ignored here.

    Returns:
      The sum, a global value `[*s]`, in the dtype of `x`.
    """
    layout = make_layout(partition, mesh)

    def total(x, indices=None):
        return _local_sum(layout, x, indices, rounded=wire is None)

    return _add_on_devices(layout, total, x, wire, sharded)


def _add_on_devices(layout: Layout, total: Callable, x, wire, sharded: bool):
    """Sum a partitioned value: on each device over its groups, then over the devices.

    Args:
      layout: The layout of the partition: k slots (places for one group) on each
        device.
      total: `total(slices)`, from the slices `[k, *s]` of a device to their sum,
        `[*s]`. If some slots are padding, it is called as `total(slices, indices)`,
        with the group index of each slot, int32 `[k]`.
      x: The partitioned value, `[n, *s]`.
      wire: A `drjax.plan.Wire`, the format in which the devices exchange their sums,
        with fewer bits; None: they exchange the dtype of `x`.
      sharded: Whether each device gets a part of the sum only, along the axis that
        `_axis_to_divide` returns; if that is None, each device gets the whole sum.

    Returns:
      The sum, a global value `[*s]`, in the dtype of `x`.
    """
    axis = _axis_to_divide(layout, global_aval(_compat.typeof(x), layout), sharded)

    def body(x, *indices):
        sums = add_devices(layout, [total(x, *indices)], [wire], [axis])
        return [y.astype(x.dtype) for y in sums]

    return shard_map_over_devices(
        layout, body, [x], [True], [sharded_spec(layout, axis)],
        with_indices=layout.uneven,
    )[0]  # fmt: skip


def _reduce_abstract_eval(x, *, partition, mesh, sharded=False, **options):
    layout = make_layout(partition, mesh)
    # The execution casts to a dtype, and the result of a cast is not weakly typed.
    aval = global_aval(x, layout).update(weak_type=False)
    axis = _axis_to_divide(layout, aval, sharded)
    return aval if axis is None else scattered_aval(aval, layout, axis)


def _axis_to_divide(layout: Layout, aval, sharded: bool | str) -> int | None:
    """Find the axis along which the result of a reduction or gather is divided.

    Args:
      layout: The layout of the partition, on m devices.
      aval: The type `[*s]` of a reduction's result; of the result `[n, *s]` of a
        gather, the type `[*s]` of one slice.
      sharded: False: the result is not divided. True: it is, as `result="sharded"` of
        the public functions asks for. "auto": it is if the mesh has no Explicit axis,
        as on Explicit axes the division would be part of the result's type.

    Returns:
      The first axis of `[*s]` whose positive size is a multiple of m, and that no
      Explicit mesh axis shards. None if `sharded` forbids the division; if there is no
      such axis; in a local program; and inside a user's `shard_map` over the
      partition's axes. Then each device has the whole result.
    """
    explicit = layout.spec_entry is not None or layout.other_explicit_axes
    if not sharded or (sharded == "auto" and explicit):
        return None
    return scattered_axis(layout, aval.shape, inner_spec(aval, layout, 0))


# <reduce_sum(y), x> = sum_i <y_i, x> = <y, broadcast(x)>
def _reduce_sum_transpose(ct, x, *, partition, mesh, sharded=False, **options):
    if sharded:
        ct = as_operand(ct, make_layout(partition, mesh), False)
    # The demand on a summand holds for its cotangent, and for what comes of that.
    demand = {"secure": options["secure"]} if options.get("secure") else {}
    return [broadcast_p.bind(ct, partition=partition, mesh=mesh, **demand)]


def _reduce_jvp(primitive) -> Callable:
    """Make the JVP rule of `reduce_sum` or `reduce_mean`; no tangent is encoded.

    With `wire=`, the devices exchange rounded sums. Rounding is a step function, whose
    derivative is zero almost everywhere. So the tangent is that of the reduction
    without `wire` (a straight-through estimator: Bengio et al. 2013, "Estimating or
    propagating gradients through stochastic neurons"). All other parameters are those
    of the primal equation. So the tangent of a secure sum is a secure sum, too: it may
    reveal as much about a group as the sum itself.

    Args:
      primitive: `reduce_sum_p` or `reduce_mean_p`.

    Returns:
      `rule((x,), (dx,), **params)`, from a partitioned value and its tangent, `[n, *s]`
      each, to `(reduction, its tangent)`, `[*s]` each. It binds the primitive twice; if
      `dx` is a symbolic zero, once, and the tangent is a symbolic zero.
    """

    def rule(primals, tangents, *, wire=None, bound=None, **params):
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

reduce_mean_p = registration.new_primitive("reduce_mean")


def execute_reduce_mean(x, *, partition, mesh, wire=None, sharded=False):
    """Execution function of `reduce_mean`: average a partitioned value over the groups.

    Each device adds the slices of its groups. Then the devices' sums are added: by one
    all-reduce; by a reduce-scatter if `sharded`; or with a `wire` by an all-to-all, and
    for a whole mean an all-gather.

    The division by n is usually last. For 16-bit floats, and with a `wire`, it is
    first, as the sum of n slices may be too large for 16 bits: each device divides its
    own sum, before it is rounded or encoded.

    Args:
      x: The partitioned value, `[n, *s]`, of an inexact dtype.
      partition: The `Partition`, of n groups.
      mesh: The mesh, or None: the program runs locally.
      wire: A `drjax.plan.Wire`, the format in which the devices exchange their sums,
        with fewer bits; None: they exchange the dtype of `x`.
      sharded: Whether each device gets a part of the mean only: an m-th along the first
        axis of `[*s]` whose positive size is a multiple of m, the number of devices,
        and that no Explicit mesh axis shards. Each device gets the whole mean if there
        is no such axis, in a local program, and inside a user's `shard_map` over the
        partition's axes.

    Returns:
      The mean, a global value `[*s]`, in the dtype of `x`.
    """
    layout, n = make_layout(partition, mesh), partition.size

    # Divide first: a 16-bit sum may overflow.
    early = x.dtype in LOW_PRECISION or wire is not None

    def total(x, indices=None):
        scale = 1 / n if early else None
        return _local_sum(layout, x, indices, scale, rounded=wire is None)

    y = _add_on_devices(layout, total, x, wire, sharded)
    return y if early else y / n


# <reduce_mean(y), x> = sum_i <y_i, x> / n = <y, broadcast(x / n)>
def _reduce_mean_transpose(ct, x, *, partition, mesh, **options):
    # The number of groups may be infinite in 16 bits.
    share = (ct.astype(accumulator(ct.dtype)) / partition.size).astype(ct.dtype)
    return _reduce_sum_transpose(share, x, partition=partition, mesh=mesh, **options)


# ---------------------------------------------------------------------------------
# gather: partitioned [n, *s] -> the slices of all groups as a global [n, *s]

gather_p = registration.new_primitive("gather")


def execute_gather(x, *, partition, mesh, sharded=False):
    """Execution function of `gather`: give each device all groups' slices.

    On a mesh this is one all-gather, or an all-to-all if the result is sharded; typed
    random keys are communicated as integers.

    Args:
      x: The partitioned value, `[n, *s]`.
      partition: The `Partition`, of n groups.
      mesh: The mesh, or None: the program runs locally.
      sharded: Whether each device gets a part of each slice only: an m-th along the
        first axis of `[*s]` whose positive size is a multiple of m, the number of
        devices, and that no Explicit mesh axis shards. "auto": as True, if the mesh has
        no Explicit axis; else as False. Each device gets everything if there is no such
        axis, for random keys, in a local program, and inside a user's `shard_map` over
        the partition's axes.

    Returns:
      The slices of all groups as a global value, `[n, *s]`, without padding.
    """
    layout = make_layout(partition, mesh)
    slice_ = global_aval(_compat.typeof(x), layout)
    axis = None if is_key(x.dtype) else _axis_to_divide(layout, slice_, sharded)
    if axis is not None:
        return _all_to_all(layout, x, axis + 1)

    def gathered(x):
        # All devices have the same result. With VMA checking the type must say so, as
        # the result is a global value; without it JAX has one type only.
        to = "invarying" if _compat.check_vma() else "varying"
        x = lax.all_gather(vary(x, layout.axes), layout.axes, tiled=True, to=to)
        return lax.slice_in_dim(x, 0, partition.size)  # without the padding

    def body(x):
        # Collectives take no extended dtypes: typed keys are communicated as integers.
        return [on_raw(gathered, x) if layout.axes else x]

    return shard_map_over_devices(layout, body, [x], [True], [False])[0]


def _all_to_all(layout: Layout, x, axis: int):
    """Give each device its part of all groups' slices: a sharded `gather`.

    Args:
      layout: The layout of the partition, which is sharded over m devices.
      x: The partitioned value, `[n, *s]`.
      axis: The axis of `x`, at least 1, that is divided: device j gets the j-th of m
        equal parts along it. Its size is a multiple of m.

    Returns:
      The slices of all groups as a global value, `[n, *s]`, of which each device has
      its part.
    """

    def body(x):
        x = vary(x, layout.axes)
        y = lax.all_to_all(x, layout.axes, axis, 0, tiled=True)
        return [lax.slice_in_dim(y, 0, layout.partition.size)]  # without the padding

    spec = sharded_spec(layout, axis)
    return shard_map_over_devices(layout, body, [x], [True], [spec])[0]


def _gather_abstract_eval(x, *, partition, mesh, sharded=False):
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
def _gather_transpose(ct, x, *, partition, mesh, sharded=False):
    if sharded:
        ct = as_operand(ct, make_layout(partition, mesh), True)
    return [scatter_p.bind(ct, partition=partition, mesh=mesh)]


# ---------------------------------------------------------------------------------
# scatter: a global [n, *s] -> partitioned [n, *s], x[i] being the slice of group i

scatter_p = registration.new_primitive("scatter")


def execute_scatter(x, *, partition, mesh):
    """Execution function of `scatter`: slice i of a global value goes to group i.

    Each device takes the slices of its groups, without communication.

    Args:
      x: The global value, `[n, *s]`.
      partition: The `Partition`, of n groups.
      mesh: The mesh, or None: the program runs locally.

    Returns:
      The partitioned value, `[n, *s]`.
    """
    layout = make_layout(partition, mesh)

    def body(x):
        if not layout.manual:  # one device, or the shard_map has sliced the operand
            return [x]
        x, k = vary(x, layout.axes), layout.per_device
        return [lax.dynamic_slice_in_dim(x, lax.axis_index(layout.axes) * k, k)]

    x = undivided_if_uneven(x, layout, 0)
    return shard_map_over_devices(layout, body, [x], [True], [True])[0]


def _scatter_abstract_eval(x, *, partition, mesh):
    layout = make_layout(partition, mesh)
    return partitioned_aval(global_aval(x, layout), layout)


# <scatter(x), y> = sum_i <x[i], y_i> = <x, gather(y)>
def _scatter_transpose(ct, x, **params):
    return [gather_p.bind(ct, **params)]


# ---------------------------------------------------------------------------------
# All registrations


def check_transposable(layout: Layout) -> None:
    """Check that a transpose rule is not run where its cotangent is ambiguous.

    In a user's `shard_map` over the partition's axes with `check_vma=False`, JAX
    divides the cotangent of a replicated result by the number of devices, and leaves
    the cotangent of a sharded result whole. The types do not tell a transpose rule
    which of the two its cotangent is, so that the gradient could be wrong by that
    factor.

    Args:
      layout: The layout of the partition of the equation that is transposed.

    Raises:
      MeshError: The transpose rule runs in such a `shard_map`.
    """
    if layout.manual and not _compat.check_vma():
        raise MeshError(
            f"A reverse-mode derivative over partition {layout.partition} inside a "
            f"jax.shard_map(check_vma=False) over its axes {layout.axes}, where JAX's "
            "cotangents are ambiguous. Leave out check_vma=False."
        )


def checked_transpose(transpose: Callable) -> Callable:
    """Wrap a transpose rule with the check and the resharding that all of them need.

    The check is in the transpose, not in the bind, as forward mode is always possible.

    Args:
      transpose: `transpose(ct, x, *others, partition=, mesh=, **params)`. It takes the
        cotangent of the result, the operand that is transposed, an `UndefinedPrimal`,
        and the other operands. It returns the list of the operands' cotangents, that of
        `x` first.

    Returns:
      The rule, with the same signature. It raises `MeshError` inside a user's
      `shard_map(check_vma=False)` over the partition's axes, where cotangents are
      ambiguous, and reshards the cotangent of `x` to the sharding of `x`.
    """

    def rule(ct, x, *others, **params):
        check_transposable(make_layout(params["partition"], params["mesh"]))
        first, *rest = transpose(ct, x, *others, **params)
        return [with_sharding_of(first, x.aval), *rest]

    return rule


def register_linear(
    primitive,
    execute,
    abstract_eval,
    transpose,
    out_shift,
    group_axis_in=True,
    lowering_rule=None,
):
    """Register the rules of a linear primitive with one operand and one result.

    They are execution, lowering, printing, abstract evaluation, JVP, transpose and
    batching. The JVP rule binds the primitive for the tangent. The transpose rule
    raises `MeshError` inside a user's `shard_map(check_vma=False)` over the partition's
    axes, where cotangents are ambiguous.

    Args:
      primitive: The primitive. Its parameters are `partition` and `mesh`, and perhaps
        options of its own, which the four functions below take as keywords, too.
      execute: Its execution function, traceable: `execute(x, partition=, mesh=)`
        returns the result.
      abstract_eval: `abstract_eval(x, partition=, mesh=)`, from the type (aval) of the
        operand to that of the result.
      transpose: `transpose(ct, x, partition=, mesh=)`, from the cotangent of the result
        and the operand, an `UndefinedPrimal`, to a list of one element, the cotangent
        of the operand.
      out_shift: 1 if the result has a group axis and the operand has none, -1 for the
        converse, else 0.
      group_axis_in: Whether the operand has a group axis, as its axis 0.
      lowering_rule: `lowering_rule(ctx, value, partition=, mesh=)`, from the MLIR value
        of the operand to a list with that of the result. None: `execute` is lowered.
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
    lowering_rule=fused_lowering.broadcast_rule(execute_broadcast),
)
register_linear(
    reduce_sum_p,
    execute_reduce_sum,
    _reduce_abstract_eval,
    _reduce_sum_transpose,
    -1,
    lowering_rule=fused_lowering.reduction_rule(
        reduce_sum_p, fused_lowering.reduce_sum_rule(execute_reduce_sum)
    ),
)
levels_lowering.register_merging(
    reduce_sum_p,
    levels_lowering.Merging(
        _local_sum, lambda y, axes: lax.psum(vary(y, axes), axes), is_sum=True
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
