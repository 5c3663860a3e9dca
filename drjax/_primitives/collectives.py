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
from drjax._jaxprs.prng_keys import on_raw
from drjax._primitives import fused_lowering, registration
from drjax._sharding.avals import global_aval, partitioned_aval
from drjax._sharding.execute import (
    shard_map_over_devices,
    undivided_if_uneven,
    vary,
    with_sharding_of,
)
from drjax._sharding.layout import Layout, make_layout

LOW_PRECISION = (jnp.bfloat16, jnp.float16)


def accumulator(dtype):
    """The dtype in which a device adds up values of a dtype.

    It is float32 for 16-bit floats, else `dtype` itself.
    """
    return jnp.float32 if dtype in LOW_PRECISION else dtype


# ---------------------------------------------------------------------------------
# broadcast: [*s] -> [n, *s]

broadcast_p = registration.new_primitive("broadcast")


def execute_broadcast(x, *, partition, mesh):
    """Execution function of `broadcast`: give each group a copy of a global value.

    Each device makes the copies of its groups, without communication.

    Args:
      x: The global value, `[*s]`.
      partition: The `Partition`, of n groups.
      mesh: The mesh, or None: the program runs locally.

    Returns:
      The partitioned value, `[n, *s]`.
    """
    layout = make_layout(partition, mesh)

    def body(x):
        shape = (layout.per_device, *jnp.shape(x))
        dims = tuple(range(1, jnp.ndim(x) + 1))
        return [vary(lax.broadcast_in_dim(x, shape, dims), layout.axes)]

    return shard_map_over_devices(layout, body, [x], [False], [True])[0]


def _broadcast_abstract_eval(x, *, partition, mesh):
    return partitioned_aval(x, make_layout(partition, mesh))


# <broadcast(x), y> = sum_i <x, y_i> = <x, reduce_sum(y)>
def _broadcast_transpose(ct, x, **params):
    return [reduce_sum_p.bind(ct, **params)]


# ---------------------------------------------------------------------------------
# reduce_sum: [n, *s] -> [*s]

reduce_sum_p = registration.new_primitive("reduce_sum")


def _local_sum(layout: Layout, x, indices, scale=None):
    """Sum a device's slices over its groups; 16-bit floats are added in float32.

    Args:
      layout: The layout of the partition: k slots on each device.
      x: The slices of the device, `[k, *s]`.
      indices: The group index of each slot, int32 `[k]`, to leave out padding; None if
        no slot is padding.
      scale: A Python number by which the sum is multiplied, before it is rounded to 16
        bits; None: no multiplication.

    Returns:
      The sum, `[*s]`, in the dtype of `x`.
    """
    x = layout.mask_padding(x, indices, 0)
    total = jnp.sum(x, axis=0, dtype=accumulator(x.dtype))
    return (total if scale is None else total * scale).astype(x.dtype)


def psum(layout: Layout, *xs):
    """Sum each of several values over the partition's devices, in one `lax.psum`.

    It is called inside a `shard_map` over the partition's axes; on a layout without
    axes (no mesh), the values are returned as they are.

    Args:
      layout: The layout of the partition.
      *xs: The device's values: arrays of any shapes and dtypes.

    Returns:
      A sequence with the sum of each value, in its shape and dtype, on all devices.
    """
    if not layout.axes:
        return xs
    return sum_over_devices(layout, lambda *xs: lax.psum(xs, layout.axes), *xs)


def sum_over_devices(layout: Layout, collective: Callable, *xs):
    """Run a collective that sums over the partition's devices.

    In code that is Manual over some axes of the mesh only, XLA's CPU compiler aborts
    the process when it promotes an all-reduce of bfloat16 to float32. On CPU this
    function does the promotion instead of XLA: same bytes, same sum.

    Args:
      layout: The layout of the partition, which has mesh axes.
      collective: From the device's values to a tuple with as many results.
      *xs: The device's values: arrays of any shapes and dtypes.

    Returns:
      The results, each in the dtype of its value.
    """
    # With VMA checking, collectives take values that vary over all of their axes.
    xs = [vary(x, layout.axes) for x in xs]
    if not layout.partly_manual or all(x.dtype != jnp.bfloat16 for x in xs):
        return collective(*xs)

    def promoted(*xs):
        wide = [x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x for x in xs]
        sums = collective(*wide)
        return tuple(y.astype(x.dtype) for x, y in zip(xs, sums, strict=True))

    # The platform is known only at lowering: a program may be traced without devices.
    return lax.platform_dependent(*xs, cpu=promoted, default=collective)


def reduce_scatter(layout: Layout, x, axis: int = 0):
    """Sum a value over the partition's devices; each device keeps its part of the sum.

    It is called inside a `shard_map` over the partition's axes, on m devices. If the
    mesh has an Explicit axis besides, which JAX 0.12 does not lower, it is an
    all-to-all and a sum.

    Args:
      layout: The layout of the partition, which has mesh axes.
      x: The device's value; the size of `axis` is a multiple of m.
      axis: The axis along which the sum is divided.

    Returns:
      The part of this device, in the dtype of `x`: `axis` has a m-th of its size.
    """
    if not layout.other_explicit_axes:
        scatter = lambda x: (
            lax.psum_scatter(x, layout.axes, scatter_dimension=axis, tiled=True),
        )
        return sum_over_devices(layout, scatter, x)[0]
    parts = lax.all_to_all(vary(x, layout.axes), layout.axes, axis, axis, tiled=True)
    before, after = x.shape[:axis], x.shape[axis + 1 :]
    parts = parts.reshape(*before, layout.devices, -1, *after)
    return jnp.sum(parts, axis=axis, dtype=accumulator(x.dtype)).astype(x.dtype)


def execute_reduce_sum(x, *, partition, mesh):
    """Execution function of `reduce_sum`: sum a partitioned value over the groups.

    Each device adds the slices of its groups; one all-reduce adds the devices' sums.

    Args:
      x: The partitioned value, `[n, *s]`.
      partition: The `Partition`, of n groups.
      mesh: The mesh, or None: the program runs locally.

    Returns:
      The sum, a global value `[*s]`, in the dtype of `x`.
    """
    layout = make_layout(partition, mesh)

    def body(x, indices=None):
        return psum(layout, _local_sum(layout, x, indices))

    return shard_map_over_devices(
        layout, body, [x], [True], [False], with_indices=layout.uneven
    )[0]


def _reduce_abstract_eval(x, *, partition, mesh):
    # The execution casts to a dtype, and the result of a cast is not weakly typed.
    return global_aval(x, make_layout(partition, mesh)).update(weak_type=False)


# <reduce_sum(y), x> = sum_i <y_i, x> = <y, broadcast(x)>
def _reduce_sum_transpose(ct, x, **params):
    return [broadcast_p.bind(ct, **params)]


# ---------------------------------------------------------------------------------
# reduce_mean: [n, *s] -> [*s], inexact dtypes only (the API promotes the others).
# A primitive of its own, as a plan names the mean, and as the division precedes the
# rounding to 16 bits.

reduce_mean_p = registration.new_primitive("reduce_mean")


def execute_reduce_mean(x, *, partition, mesh):
    """Execution function of `reduce_mean`: average a partitioned value over the groups.

    Each device adds the slices of its groups; one all-reduce adds the devices' sums.
    16-bit floats are divided by n before the first rounding to 16 bits, as a 16-bit sum
    may overflow; other values are divided after the all-reduce.

    Args:
      x: The partitioned value, `[n, *s]`, of an inexact dtype.
      partition: The `Partition`, of n groups.
      mesh: The mesh, or None: the program runs locally.

    Returns:
      The mean, a global value `[*s]`, in the dtype of `x`.
    """
    layout, n = make_layout(partition, mesh), partition.size

    def body(x, indices=None):
        if x.dtype in LOW_PRECISION:  # divide first: a 16-bit sum may overflow
            return psum(layout, _local_sum(layout, x, indices, 1 / n))
        return [y / n for y in psum(layout, _local_sum(layout, x, indices))]

    return shard_map_over_devices(
        layout, body, [x], [True], [False], with_indices=layout.uneven
    )[0]


# <reduce_mean(y), x> = sum_i <y_i, x> / n = <y, broadcast(x / n)>
def _reduce_mean_transpose(ct, x, *, partition, mesh):
    # The number of groups may be infinite in 16 bits.
    share = (ct.astype(accumulator(ct.dtype)) / partition.size).astype(ct.dtype)
    return [broadcast_p.bind(share, partition=partition, mesh=mesh)]


# ---------------------------------------------------------------------------------
# gather: partitioned [n, *s] -> the slices of all groups as a global [n, *s]

gather_p = registration.new_primitive("gather")


def execute_gather(x, *, partition, mesh):
    """Execution function of `gather`: give each device all groups' slices.

    On a mesh this is one all-gather; typed random keys are communicated as integers.

    Args:
      x: The partitioned value, `[n, *s]`.
      partition: The `Partition`, of n groups.
      mesh: The mesh, or None: the program runs locally.

    Returns:
      The slices of all groups as a global value, `[n, *s]`.
    """
    layout = make_layout(partition, mesh)

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


def _gather_abstract_eval(x, *, partition, mesh):
    layout = make_layout(partition, mesh)
    slice_ = global_aval(x, layout)
    spec = (None, *slice_.sharding.spec)
    sharding = slice_.sharding.update(spec=jax.sharding.PartitionSpec(*spec))
    shape = (partition.size, *slice_.shape)
    return _compat.replace_aval(slice_, shape, sharding, _compat.varying(slice_))


# <gather(y), x> = sum_i <y_i, x[i]> = <y, scatter(x)>
def _gather_transpose(ct, x, **params):
    return [scatter_p.bind(ct, **params)]


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
    """Check that a transpose rule is not in a user's `shard_map(check_vma=False)`.

    That is a `shard_map` over the partition's axes. In it, JAX divides the cotangent of
    a replicated result by the number of devices, and leaves the cotangent of a sharded
    result whole. Without VMA types, a transpose rule cannot distinguish the two.

    Args:
      layout: The layout of the partition of the equation that is transposed.

    Raises:
      MeshError: The transpose rule is in such a `shard_map`.
    """
    if layout.manual and not _compat.check_vma():
        raise MeshError(
            f"A reverse-mode derivative over partition {layout.partition} inside a "
            f"jax.shard_map(check_vma=False) over its axes {layout.axes}, where JAX's "
            "cotangents are ambiguous. Leave out check_vma=False."
        )


def checked_transpose(transpose: Callable) -> Callable:
    """Add to a transpose rule what those of all linear primitives need.

    The check is part of the transpose, not of the bind: forward mode is well-defined.

    Args:
      transpose: `transpose(ct, x, *others, partition=, mesh=, **params)`, from the
        cotangent of the result, the operand that is transposed, an `UndefinedPrimal`,
        and the other operands, to the list of the operands' cotangents, that of `x`
        first.

    Returns:
      The rule. It raises `MeshError` where cotangents are ambiguous, and gives the
      cotangent of `x` the sharding of `x`.
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
    """Register all rules of a linear primitive with one operand and one result.

    Args:
      primitive: The primitive; its parameters are `partition`, `mesh`, and what the
        functions below take besides.
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
    lowering_rule=fused_lowering.reduce_sum_rule(execute_reduce_sum),
)
register_linear(
    reduce_mean_p,
    execute_reduce_mean,
    _reduce_abstract_eval,
    _reduce_mean_transpose,
    -1,
)
register_linear(gather_p, execute_gather, _gather_abstract_eval, _gather_transpose, 0)
register_linear(
    scatter_p, execute_scatter, _scatter_abstract_eval, _scatter_transpose, 0
)
