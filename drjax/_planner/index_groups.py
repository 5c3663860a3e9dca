"""Equations that take, or change, the slices of some of the groups.

What goes in is an equation whose first operand alone is partitioned; what comes out is
the same work written with building blocks, `(partition, *operands) -> result`, or None
if the equation does something else:

* `taken`: a slice, `y[i]`, `y[:2]`, or a gather, `y[ids]`, `jnp.take(y, ids, axis=0)`,
  gives global values. Few groups are chosen as by `drjax.select`, each with one more
  slice that every group sends; of more, all are gathered, which is cheaper then.
* `changed`: an update of some groups, `y.at[i].set(v)`, stays partitioned: each group
  looks whether it is one of them.

What takes the slices of most groups in another order is a shuffle, which is refused: it
costs as much as `drjax.gather`, and should look like it.
"""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.lax import GatherScatterMode

from drjax import _compat
from drjax._api.reductions import select
from drjax._api.resolve import map_leaves
from drjax._partition import Partition
from drjax._planner.unbatching.core import drop
from drjax.primitives import gather_p, partition_index_p

_SCATTERS = frozenset(
    "scatter scatter-add scatter-sub scatter-mul scatter-min scatter-max".split()
)


def taken(eqn, axis: int) -> Callable | None:
    """Work whose result has, along the group axis, some groups only."""
    shape = eqn.invars[0].aval.shape
    if eqn.primitive is lax.slice_p:
        return _slice(eqn, axis, shape)
    if eqn.primitive is lax.dynamic_slice_p:
        return _dynamic_slice(eqn, axis, shape)
    if eqn.primitive is lax.squeeze_p:  # what is left of y[0] if there is one group
        gone = eqn.params["dimensions"]
        return _only_row(axis, gone) if axis in gone else None
    if eqn.primitive is lax.gather_p:
        return _gather(eqn, axis, shape)
    return None


def changed(eqn, axis: int) -> Callable | None:
    """Work that gives some groups other values, and leaves the others as they are."""
    if eqn.primitive is lax.dynamic_update_slice_p:
        return _dynamic_update_slice(eqn, axis)
    if eqn.primitive.name in _SCATTERS:
        return _scatter(eqn, axis)
    return None


def gathered(partition: Partition, x, axis: int):
    """The slices of all groups, along the group axis, as a global value."""
    rows = gather_p.bind(jnp.moveaxis(x, axis, 0), partition=partition, mesh=None)
    return jnp.moveaxis(rows, 0, axis)


def _chosen(partition: Partition, x, axis: int, indices):
    """The slices of the groups with these indices, along the group axis.

    With k chosen groups each group sends k slices to be added up, of which n - 1 hold
    zeros, or one slice to be gathered: n k of work, or n of memory.
    """
    if indices.dtype.itemsize < 4:  # n may not fit in it
        indices = indices.astype(jnp.int32)
    indices = jnp.clip(indices, 0, partition.size - 1).astype(jnp.int32)
    if indices.size**2 > partition.size:
        return jnp.take(gathered(partition, x, axis), indices, axis, mode="clip")
    rows = jnp.moveaxis(x, axis, 0)
    pick = jax.vmap(lambda i: select(rows, i, partition=partition))
    return jnp.moveaxis(pick(indices), 0, axis)


# -------------------------------------------------------------------------------------
# Taking


def _are_some(count: int, n: int) -> bool:
    """Whether a slice of so many groups leaves out enough to be no shift of them."""
    return 0 < count <= n // 2


def _slice(eqn, axis: int, shape: Sequence[int]) -> Callable | None:
    params = eqn.params
    strides = params["strides"] or (1,) * len(shape)
    starts, limits = list(params["start_indices"]), list(params["limit_indices"])
    wanted = range(starts[axis], limits[axis], strides[axis])
    if not _are_some(len(wanted), shape[axis]):
        return None
    starts[axis], limits[axis] = 0, shape[axis]
    steps = (*strides[:axis], 1, *strides[axis + 1 :])

    def rows(partition: Partition, x):
        x = lax.slice(x, starts, limits, steps)
        return _chosen(partition, x, axis, jnp.asarray(wanted, jnp.int32))

    return rows


def _dynamic_slice(eqn, axis: int, shape: Sequence[int]) -> Callable | None:
    sizes = list(eqn.params["slice_sizes"])
    count, sizes[axis] = sizes[axis], shape[axis]
    if not _are_some(count, shape[axis]):
        return None

    def rows(partition: Partition, x, *starts):
        start = _clamped(starts[axis], partition.size - count)
        starts = (*starts[:axis], jnp.zeros_like(starts[axis]), *starts[axis + 1 :])
        x = lax.dynamic_slice(x, starts, sizes)
        return _chosen(partition, x, axis, start + jnp.arange(count, dtype=jnp.int32))

    return rows


def _clamped(start, last: int):
    start = start if start.dtype.itemsize >= 4 else start.astype(jnp.int32)
    return jnp.clip(start, 0, last).astype(jnp.int32)


def _only_row(axis: int, gone: Sequence[int]) -> Callable:
    others = tuple(d - (d > axis) for d in gone if d != axis)

    def row(partition: Partition, x):
        found = select(jnp.moveaxis(x, axis, 0), 0, partition=partition)
        return lax.squeeze(found, others)

    return row


def _gather(eqn, axis: int, shape: Sequence[int]) -> Callable | None:
    """Whole slices of fewer groups than there are, each chosen by an index.

    Of a batch of arrays, slices are chosen of each. Beyond the bounds, `jnp.take` fills
    in a value.
    """
    params = eqn.params
    dims, mode = params["dimension_numbers"], params["mode"]
    fills = mode == GatherScatterMode.FILL_OR_DROP
    inside = (GatherScatterMode.CLIP, GatherScatterMode.PROMISE_IN_BOUNDS)
    dtype = eqn.outvars[0].aval.dtype
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
    arrays = math.prod(shape[d] for d in batched)
    if math.prod(out[d] for d in batch) >= shape[axis] * arrays:
        return None  # a shuffle

    def rows(partition: Partition, x, indices):
        leading = indices.shape[:-1]
        found = _chosen(partition, x, axis, indices[..., column].ravel())
        found = jnp.expand_dims(jnp.moveaxis(found, axis, 0), 1 + axis)
        found = found.reshape(*leading, *found.shape[1:])
        for d, i in zip(batched, dims.start_indices_batching_dims, strict=True):
            own = lax.broadcasted_iota(jnp.int32, (*leading, *(1,) * len(shape)), i)
            found = jnp.take_along_axis(found, own, len(leading) + d, mode="clip")
        gone = {*batched, *dims.collapsed_slice_dims}
        found = jnp.squeeze(found, tuple(len(leading) + d for d in gone))
        found = jnp.moveaxis(found, range(len(batch)), batch)
        if not fills:
            return found
        wide = indices if indices.dtype.itemsize >= 4 else indices.astype(jnp.int32)
        last = [shape[d] - params["slice_sizes"][d] for d in dims.start_index_map]
        known = jnp.all((wide >= 0) & (wide <= _of_columns(last, wide)), axis=-1)
        known = lax.broadcast_in_dim(known, out, batch)
        return jnp.where(known, found, _fill(dtype, params["fill_value"]))

    return rows


def _of_columns(limits: Sequence[int], indices):
    """A limit for each column of indices."""
    return jnp.broadcast_to(jnp.array(limits, indices.dtype), indices.shape)


def _fill(dtype, value):
    """What JAX gives for an index out of bounds."""
    nothing = jnp.zeros((1,), dtype)
    return nothing.at[1].get(mode="fill", fill_value=value)


# -------------------------------------------------------------------------------------
# Changing


def _each_group(update: Callable, partition: Partition, x, axis: int):
    """`update(group index, slice)` in each group; slices have a group axis of one."""

    def update_slice(group, row):
        return lax.squeeze(update(group, lax.expand_dims(row, (axis,))), (axis,))

    group = partition_index_p.bind(partition=partition, mesh=None, per_group=False)
    rows = jnp.moveaxis(x, axis, 0)
    found = map_leaves(update_slice, group, rows, partition=partition, mesh=None)
    return jnp.moveaxis(found, 0, axis)


def _dynamic_update_slice(eqn, axis: int) -> Callable | None:
    count = eqn.invars[1].aval.shape[axis]
    if count == 0 or count == eqn.invars[0].aval.shape[axis]:
        return None

    def rows(partition: Partition, x, values, *starts):
        first = _clamped(starts[axis], partition.size - count)
        starts = (*starts[:axis], jnp.zeros_like(starts[axis]), *starts[axis + 1 :])

        def update(group, row):
            i = group - first
            mine = lax.dynamic_slice_in_dim(values, jnp.clip(i, 0, count - 1), 1, axis)
            new = lax.dynamic_update_slice(row, mine, starts)
            return jnp.where((0 <= i) & (i < count), new, row)

        return _each_group(update, partition, x, axis)

    return rows


def _scatter(eqn, axis: int) -> Callable | None:
    """Each group takes the updates whose index is its own, and drops all others."""
    params = eqn.params
    dims, mode = params["dimension_numbers"], params["mode"]
    operand, indices, updates = (v.aval for v in eqn.invars)
    indexed = dims.scatter_dims_to_operand_dims
    count = math.prod(indices.shape[:-1])
    if axis not in indexed or count >= operand.shape[axis]:
        return None
    gone = (*dims.inserted_window_dims, *dims.operand_batching_dims)
    kept = [d for d in range(operand.ndim) if d not in gone]
    windows = dict(zip(kept, dims.update_window_dims, strict=True))
    sizes = [
        updates.shape[windows[d]] if d in windows else 1 for d in range(operand.ndim)
    ]
    if sizes[axis] == operand.shape[axis] or (sizes[axis] > 1 and count > 1):
        return None
    last = [operand.shape[d] - sizes[d] for d in indexed]
    column = indexed.index(axis)
    drops = {**params, "mode": GatherScatterMode.FILL_OR_DROP}

    def rows(partition: Partition, x, indices, updates):
        if indices.dtype.itemsize < 4:
            indices = indices.astype(jnp.int32)
        inside = jnp.clip(indices, 0, _of_columns(last, indices))
        known = jnp.all(inside == indices, axis=-1)
        known |= mode != GatherScatterMode.FILL_OR_DROP
        inside = inside.astype(jnp.int32)

        def update(group, row):
            i, mine = group - inside[..., column], updates
            if axis in windows:
                at = jnp.clip(i.ravel()[0], 0, sizes[axis] - 1)
                mine = lax.dynamic_slice_in_dim(updates, at, 1, windows[axis])
            is_mine = known & (0 <= i) & (i < sizes[axis])
            own = inside.at[..., column].set(jnp.where(is_mine, 0, 1))
            return _compat.bind_equation(eqn, [row, own, mine], **drops)[0]

        return _each_group(update, partition, x, axis)

    return rows
