"""Equations that read, or update, the slices of some of the groups.

Input: an equation whose first operand alone is partitioned. Output: the same equation
written with building blocks, `(partition, *operands) -> result`, or None if it does
something else:

* `read_some_groups`: a slice, `y[i]`, `y[:2]`, `a, b, c = y`, or a gather, `y[ids]`,
  `jnp.take(y, ids, axis=0)`, has a global result. Few groups are selected as by
  `drjax.select`, each with one more slice that every group sends; of more, all are
  gathered, which then costs less.
* `update_some_groups`: an update, `y.at[i].set(v)`, stays partitioned: each group
  compares the indices with its own.

Invariants: indices out of bounds mean what they mean in JAX (clipped, dropped, or
filled in). Sharp edges: a slice with known bounds that reads most groups is a shuffle,
which is refused: it costs as much as `drjax.gather`, and should look like it.
"""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.lax import GatherScatterMode

from drjax import _compat
from drjax._compat.types import Array, Eqn, GlobalArray
from drjax._partition import Partition
from drjax._planner.bind_blocks import (
    WithBlocks,
    gather_groups,
    map_groups,
    partition_index,
    select_group,
)
from drjax._planner.unbatching.core import drop

SCATTERS = frozenset(
    "scatter scatter-add scatter-sub scatter-mul scatter-min scatter-max".split()
)


def read_some_groups(eqn: Eqn, axis: int) -> WithBlocks | None:
    """Rewrite an equation that reads some groups of its first operand by their index.

    The first operand alone is partitioned, along `axis`; the result is global. None in
    each of these cases:

    * the equation does not read groups by their index;
    * a `slice`, or a `pad` of negative size, reads no group or more than half;
    * a `dynamic_slice` reads no group or all of them;
    * a `gather` reads parts of slices, or has a form that is not rewritten.
    """
    shape = eqn.invars[0].aval.shape
    if eqn.primitive is lax.slice_p:
        return _slice(eqn, axis, shape)
    if eqn.primitive is lax.dynamic_slice_p:
        return _dynamic_slice(eqn, axis, shape)
    if eqn.primitive is lax.pad_p:
        return _pad(eqn, axis, shape)
    if eqn.primitive is lax.squeeze_p:
        # With one group, JAX simplifies y[0] to a squeeze.
        dimensions = eqn.params["dimensions"]
        return _squeeze(axis, dimensions) if axis in dimensions else None
    if eqn.primitive is lax.gather_p:
        return _gather(eqn, axis, shape)
    # By name: older versions of JAX lack the primitive and write slices.
    if eqn.primitive.name == "unstack" and eqn.params["axis"] == axis:
        return _unstack(eqn, axis)
    return None


def update_some_groups(eqn: Eqn, axis: int) -> WithBlocks | None:
    """Rewrite an equation that updates some groups of its first operand by their index.

    The first operand alone is partitioned, along `axis`, and so is the result. None if
    the equation does not update some groups by their index.
    """
    if eqn.primitive is lax.dynamic_update_slice_p:
        return _dynamic_update_slice(eqn, axis)
    if eqn.primitive.name in SCATTERS:
        return _scatter(eqn, axis)
    return None


def _select_many_groups(
    partition: Partition, x: Array, axis: int, indices: GlobalArray
) -> GlobalArray:
    """Select the slices of k groups as a global value, stacked along the group axis.

    If k * k <= n, every group adds k slices (zeros, if it is not selected) to a sum: n
    k operations. If not, all slices are gathered, n slices of memory, and k of them
    taken. The indices, integers `[k]`, are clipped to 0..n-1.
    """
    if indices.dtype.itemsize < 4:  # n may not fit in it
        indices = indices.astype(jnp.int32)
    # Clipped before the conversion, as large integers would wrap around; and because
    # select_group counts negative indices from the end, which lax does not.
    indices = jnp.clip(indices, 0, partition.size - 1).astype(jnp.int32)
    # k slices for each of n groups against n slices: a gather costs less from about
    # k = sqrt(n) on.
    if indices.size**2 > partition.size:
        return jnp.take(gather_groups(x, axis, partition), indices, axis, mode="clip")
    slices = jnp.moveaxis(x, axis, 0)
    # By vmap, so that one reduction communicates all k slices.
    select_all = jax.vmap(lambda i: select_group(slices, i, partition))
    return jnp.moveaxis(select_all(indices), 0, axis)


# -------------------------------------------------------------------------------------
# Reading. `axis` is the group axis of the operand, whose shape is `shape`. Each rewrite
# returns `(partition, *operands) -> result`, or None if it does not apply. The first
# operand alone is partitioned, and the result is global.


def _are_few(count: int, n: int) -> bool:
    """Whether `count` of `n` groups may be selected: 0 < count <= n / 2.

    To read more of them would be a shift or a shuffle of the groups, which is refused.
    """
    return 0 < count <= n // 2


def _slice(eqn: Eqn, axis: int, shape: Sequence[int]) -> WithBlocks | None:
    """Rewrite `x[start:stop:step]`, whose bounds are parameters: select these groups.

    None if it reads no group or more than half of them.
    """
    params = eqn.params
    strides = params["strides"] or (1,) * len(shape)
    starts, limits = list(params["start_indices"]), list(params["limit_indices"])
    selected = range(starts[axis], limits[axis], strides[axis])
    if not _are_few(len(selected), shape[axis]):
        return None
    # Each group slices its other axes itself, before anything is communicated.
    starts[axis], limits[axis] = 0, shape[axis]
    steps = (*strides[:axis], 1, *strides[axis + 1 :])

    def with_blocks(partition: Partition, x: Array) -> Array:
        x = lax.slice(x, starts, limits, steps)
        return _select_many_groups(partition, x, axis, jnp.asarray(selected, jnp.int32))

    return with_blocks


def _pad(eqn: Eqn, axis: int, shape: Sequence[int]) -> WithBlocks | None:
    """Rewrite a `pad` that removes groups by negative padding: select those that stay.

    The derivative of a slice's derivative has this form. None if the padding adds
    elements along the group axis, or if no group or more than half of them stay.
    """
    config = list(eqn.params["padding_config"])
    low, high, interior = config[axis]
    selected = range(-low, shape[axis] + high)
    if max(low, high, interior) > 0 or not _are_few(len(selected), shape[axis]):
        return None
    config[axis] = (0, 0, 0)

    def with_blocks(partition: Partition, x: Array, value: Array) -> Array:
        x = lax.pad(x, value, config)
        return _select_many_groups(partition, x, axis, jnp.asarray(selected, jnp.int32))

    return with_blocks


def _dynamic_slice(eqn: Eqn, axis: int, shape: Sequence[int]) -> WithBlocks | None:
    """Rewrite a `dynamic_slice` along the group axis: select groups from its start on.

    None if it reads no group or all of them.
    """
    sizes = list(eqn.params["slice_sizes"])
    count, sizes[axis] = sizes[axis], shape[axis]
    # Most of them, too: such is the derivative of an update, which is planned.
    if not 0 < count < shape[axis]:
        return None

    def with_blocks(partition: Partition, x: Array, *starts: GlobalArray) -> Array:
        start = _clamped(starts[axis], partition.size - count)
        # Each group slices its other axes itself: the new window covers all groups.
        starts = (*starts[:axis], jnp.zeros_like(starts[axis]), *starts[axis + 1 :])
        x = lax.dynamic_slice(x, starts, sizes)
        return _select_many_groups(
            partition, x, axis, start + jnp.arange(count, dtype=jnp.int32)
        )

    return with_blocks


def _clamped(start: GlobalArray, last: int) -> GlobalArray:
    """Clamp a start index, an integer `[]`, to 0..`last`, as JAX does; return int32."""
    start = start if start.dtype.itemsize >= 4 else start.astype(jnp.int32)
    return jnp.clip(start, 0, last).astype(jnp.int32)


def _squeeze(axis: int, dimensions: Sequence[int]) -> WithBlocks:
    """Rewrite a `squeeze` of the group axis, of size one: select the only group."""
    # Dimension numbers of the slice, which lacks the group axis.
    others = tuple(d - (d > axis) for d in dimensions if d != axis)

    def with_blocks(partition: Partition, x: Array) -> Array:
        first = jnp.asarray(0, jnp.int32)
        only = select_group(jnp.moveaxis(x, axis, 0), first, partition)
        return lax.squeeze(only, others)

    return with_blocks


def _unstack(eqn: Eqn, axis: int) -> WithBlocks:
    """Rewrite `a, b, c = y`, one result for each group: gather all slices first."""

    def with_blocks(partition: Partition, x: Array) -> list[GlobalArray]:
        return _compat.bind_equation(eqn, [gather_groups(x, axis, partition)])

    return with_blocks


def _gather(eqn: Eqn, axis: int, shape: Sequence[int]) -> WithBlocks | None:
    """Rewrite a `gather` of groups' slices: select the groups that it indexes.

    With batch dimensions, which operand and indices share, the indices of each batch
    element select from the slices of this element. Indices out of bounds are clipped or
    filled in, as the mode of the gather says. None in each of these cases:

    * `eqn` does not index the group axis, or collapses another one;
    * it reads parts of slices, or several consecutive groups at each index;
    * there is only one group;
    * its mode neither clips, nor fills in, nor promises that indices are in bounds;
    * it would fill in a random key.
    """
    params = eqn.params
    dims, mode = params["dimension_numbers"], params["mode"]
    fills = mode == GatherScatterMode.FILL_OR_DROP
    inside = (GatherScatterMode.CLIP, GatherScatterMode.PROMISE_IN_BOUNDS)
    dtype = eqn.outvars[0].aval.dtype
    # A random key has no value that could fill.
    if fills and jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        return None
    batched = dims.operand_batching_dims
    plain = axis in dims.start_index_map and (fills or mode in inside)
    if not (plain and set(dims.collapsed_slice_dims) <= {axis}):
        return None
    sizes = [
        shape[d] if d in batched else size
        for d, size in enumerate(params["slice_sizes"])
    ]
    if drop(axis, sizes) != drop(axis, shape) or not sizes[axis] == 1 < shape[axis]:
        return None
    out, column = eqn.outvars[0].aval.shape, dims.start_index_map.index(axis)
    batch = [d for d in range(len(out)) if d not in dims.offset_dims]

    def with_blocks(partition: Partition, x: Array, indices: GlobalArray) -> Array:
        leading = indices.shape[:-1]
        # Windows are whole along every other indexed axis, so that an index is 0, or is
        # out of bounds: clipped to 0, or filled in below. Only this column selects.
        slices = _select_many_groups(partition, x, axis, indices[..., column].ravel())
        # A unit axis in place of the group axis, so that the dimension numbers of the
        # operand hold behind the leading axes.
        slices = jnp.expand_dims(jnp.moveaxis(slices, axis, 0), 1 + axis)
        slices = slices.reshape(*leading, *slices.shape[1:])
        # A selected slice has all arrays of the batch, of which the indices of array b
        # read array b: the diagonal.
        for d, i in zip(batched, dims.start_indices_batching_dims, strict=True):
            own = lax.broadcasted_iota(jnp.int32, (*leading, *(1,) * len(shape)), i)
            slices = jnp.take_along_axis(slices, own, len(leading) + d, mode="clip")
        removed = {*batched, *dims.collapsed_slice_dims}
        slices = jnp.squeeze(slices, tuple(len(leading) + d for d in removed))
        # A gather may have its batch dimensions anywhere between the offset dimensions.
        slices = jnp.moveaxis(slices, range(len(batch)), batch)
        if not fills:
            return slices
        # Narrow integers cannot hold the bounds that they are compared with.
        wide = indices if indices.dtype.itemsize >= 4 else indices.astype(jnp.int32)
        last = [shape[d] - params["slice_sizes"][d] for d in dims.start_index_map]
        in_bounds = jnp.all((wide >= 0) & (wide <= _per_column(last, wide)), axis=-1)
        in_bounds = lax.broadcast_in_dim(in_bounds, out, batch)
        return jnp.where(in_bounds, slices, fill_value(dtype, params["fill_value"]))

    return with_blocks


def _per_column(limits: Sequence[int], indices: Array) -> Array:
    """Broadcast limits of k columns to the shape and dtype of indices, `[..., k]`."""
    return jnp.broadcast_to(jnp.array(limits, indices.dtype), indices.shape)


def fill_value(dtype: np.dtype, value: complex | np.number | None) -> GlobalArray:
    """Return the scalar that a `gather` fills in for indices out of bounds.

    `value` is its parameter `fill_value`; None: the default of JAX for the dtype.
    """
    # JAX chooses it by dtype: NaN, or the least or greatest integer. Ask JAX itself.
    one = jnp.zeros((1,), dtype)
    return one.at[1].get(mode="fill", fill_value=value)


# -------------------------------------------------------------------------------------
# Updating. `axis` is the group axis of the operand. Rewrites return the same as above,
# but that the result is partitioned, along `axis`, too.


def _each_group(
    update: Callable[[Array, Array], Array], partition: Partition, x: Array, axis: int
) -> Array:
    """Apply `update` to the slice of each group of `x`, partitioned along `axis`.

    `update(group, own)` takes the group index, int32 `[]`, and the slice, and returns
    the new slice. Both slices have the group axis, of size one. Values that it closes
    over are broadcast.
    """

    def update_slice(group: Array, own: Array) -> list[Array]:
        # A unit axis, as the equation's dimension numbers count the group axis.
        return [lax.squeeze(update(group, lax.expand_dims(own, (axis,))), (axis,))]

    group, slices = partition_index(partition), jnp.moveaxis(x, axis, 0)
    (updated,) = map_groups(update_slice, group, slices, partition=partition)
    return jnp.moveaxis(updated, 0, axis)


def _dynamic_update_slice(eqn: Eqn, axis: int) -> WithBlocks | None:
    """Rewrite a `dynamic_update_slice` of some groups; other slices stay.

    None if the update has no group or all of them along the group axis.
    """
    count = eqn.invars[1].aval.shape[axis]
    if count == 0 or count == eqn.invars[0].aval.shape[axis]:
        return None

    def with_blocks(
        partition: Partition, x: Array, values: Array, *starts: GlobalArray
    ) -> Array:
        first = _clamped(starts[axis], partition.size - count)
        starts = (*starts[:axis], jnp.zeros_like(starts[axis]), *starts[axis + 1 :])

        def update(group: Array, own: Array) -> Array:
            i = group - first
            # A group knows only at run time whether it is updated, so each computes an
            # update, and those that are not drop it.
            value = lax.dynamic_slice_in_dim(values, jnp.clip(i, 0, count - 1), 1, axis)
            updated = lax.dynamic_update_slice(own, value, starts)
            return jnp.where((0 <= i) & (i < count), updated, own)

        return _each_group(update, partition, x, axis)

    return with_blocks


def _scatter(eqn: Eqn, axis: int) -> WithBlocks | None:
    """Rewrite a scatter that indexes the group axis: each group applies its updates.

    A group drops the updates whose index is that of another group. Indices out of
    bounds are clipped or dropped, as the mode of the scatter says. None in each of
    these cases:

    * `eqn` does not index the group axis;
    * it has as many indices as there are groups, or more;
    * its windows extend over all groups;
    * it has several windows, of several groups each.
    """
    params = eqn.params
    dims, mode = params["dimension_numbers"], params["mode"]
    operand, indices, updates = (v.aval for v in eqn.invars)
    indexed = dims.scatter_dims_to_operand_dims
    # Of each array of a batch, whose updates are its own.
    batch = dims.scatter_indices_batching_dims
    sizes_of_indices = indices.shape[:-1]
    count = math.prod(d for i, d in enumerate(sizes_of_indices) if i not in batch)
    # Each group applies or drops every update, so that n updates would cost n^2.
    if axis not in indexed or count >= operand.shape[axis]:
        return None
    removed = (*dims.inserted_window_dims, *dims.operand_batching_dims)
    kept = [d for d in range(operand.ndim) if d not in removed]
    windows = dict(zip(kept, dims.update_window_dims, strict=True))
    sizes = [
        updates.shape[windows[d]] if d in windows else 1 for d in range(operand.ndim)
    ]
    if sizes[axis] == operand.shape[axis] or (sizes[axis] > 1 and count > 1):
        return None
    last = [operand.shape[d] - sizes[d] for d in indexed]
    column = indexed.index(axis)
    # Each group has one slice, so that indices of other groups are out of bounds.
    drops = {**params, "mode": GatherScatterMode.FILL_OR_DROP}
    # Whether an index is the group's own is in no order, whatever the user's were.
    drops["indices_are_sorted"] = False

    def with_blocks(
        partition: Partition, x: Array, indices: GlobalArray, updates: Array
    ) -> Array:
        if indices.dtype.itemsize < 4:
            indices = indices.astype(jnp.int32)
        inside = jnp.clip(indices, 0, _per_column(last, indices))
        valid = jnp.all(inside == indices, axis=-1)
        # Other modes apply the clipped index, or promise that clipping changes nothing.
        valid |= mode != GatherScatterMode.FILL_OR_DROP
        inside = inside.astype(jnp.int32)

        def update(group: Array, own: Array) -> Array:
            i, own_updates = group - inside[..., column], updates
            if axis in windows:
                # Of one window over several groups, each group applies its slice.
                start = jnp.clip(i.ravel()[0], 0, sizes[axis] - 1)
                own_updates = lax.dynamic_slice_in_dim(updates, start, 1, windows[axis])
            is_own = valid & (0 <= i) & (i < sizes[axis])
            # The slice has a group axis of one: index 1 is out of bounds, and dropped.
            own_index = inside.at[..., column].set(jnp.where(is_own, 0, 1))
            operands = [own, own_index, own_updates]
            return _compat.bind_equation(eqn, operands, **drops)[0]

        return _each_group(update, partition, x, axis)

    return with_blocks
