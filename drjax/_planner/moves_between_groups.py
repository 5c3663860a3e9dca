"""Equations that move the slices of all groups to other groups.

Input: an equation of JAX with a partitioned operand. Output: the same equation written
with building blocks, and the group axes of its operands and results, or None if it does
something else:

* `y[index]` and `jnp.take(y, index, axis=0)`, with as many indices as groups: a take,
  or of a permutation that is known a permute;
* `y[::-1]` and `jnp.roll(y, 1, axis=0)`: a permute;
* `z.at[index].add(y)` and `.set(y)`, with the slices of `y` as updates: a put_add, or
  of `.set` a take of the group that writes last; of a known permutation a permute.

Invariants: an index is a global value, and one out of bounds means what it means in JAX
(clipped, dropped, or filled in). Sharp edges: a roll is a single equation only after
`rotations`. Of updates to one slice, JAX promises no order; here, the one of the last
group stays.
"""

from collections.abc import Sequence
from typing import TypeAlias

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.lax import GatherScatterMode

from drjax._compat.types import Array, Eqn
from drjax._partition import Partition
from drjax._planner.bind_blocks import WithBlocks, permute, put_add, take
from drjax._planner.read_and_update_groups import fill_value
from drjax._planner.rotations import rearrange_p, sources_of
from drjax._planner.unbatching.core import drop
from drjax._primitives.moves import inverse, is_permutation, last_writer
from drjax._primitives.select_slice import as_int32

Axes = tuple[int | None, ...]
# `(fn, in_axes, out_axes)`: the group axes of the operands, as `fn` takes them, and of
# its results; None: a global value.
Rewrite: TypeAlias = tuple[WithBlocks, Axes, Axes]


def move_groups(
    eqn: Eqn, axes: Sequence[int | None], index: tuple[int, ...] | None = None
) -> Rewrite | None:
    """Rewrite an equation that moves the slices of all groups with building blocks.

    `index` has the values of its second operand, the indices `[n, 1]` of a gather or
    scatter, if they are known while planning. None if the equation moves no slices, if
    its index is partitioned, or if no building block can express the move.
    """
    if eqn.primitive is lax.rev_p:
        return _rev(eqn, axes[0])
    if eqn.primitive is rearrange_p:
        return _rearrange(eqn, axes[0])
    if eqn.primitive is lax.gather_p and axes[1] is None:
        return _gather(eqn, axes[0], index)
    if eqn.primitive in (lax.scatter_p, lax.scatter_add_p) and axes[1] is None:
        return _scatter(eqn, axes[2], index)
    return None


def _rev(eqn: Eqn, axis: int | None) -> Rewrite | None:
    """Rewrite `y[::-1]`, reversed along the group axis, as a permute of the groups.

    Each group reverses the other dimensions of its slice by itself.
    """
    if axis is None or axis not in eqn.params["dimensions"]:
        return None
    others = [d for d in eqn.params["dimensions"] if d != axis]

    def with_blocks(partition: Partition, x: Array) -> Array:
        sources = tuple(range(partition.size))[::-1]
        moved = permute(jnp.moveaxis(lax.rev(x, others), axis, 0), sources, partition)
        return jnp.moveaxis(moved, 0, axis)

    return with_blocks, (axis,), (axis,)


def _rearrange(eqn: Eqn, axis: int | None) -> Rewrite | None:
    """Rewrite a `jnp.roll` along the group axis as a permute of the groups."""
    if axis is None or axis != eqn.params["dimension"]:
        return None
    sources = sources_of(eqn.params["segments"])

    def with_blocks(partition: Partition, x: Array) -> Array:
        moved = permute(jnp.moveaxis(x, axis, 0), sources, partition)
        return jnp.moveaxis(moved, 0, axis)

    return with_blocks, (axis,), (axis,)


def _gather(
    eqn: Eqn, axis: int | None, known: tuple[int, ...] | None
) -> Rewrite | None:
    """Rewrite a `gather` of one whole slice for each group as a take, or a permute.

    That is `y[index]` or `jnp.take(y, index, axis)`: group j gets slice `index[j]`. It
    is a permute if the index is known and a permutation of the groups. None in each of
    these cases:

    * the first operand is not partitioned;
    * there are not as many indices as groups, or they index another axis too;
    * it has batch dimensions;
    * an index reads a part of a slice;
    * the mode neither clips, nor fills in, nor promises that indices are in bounds;
    * it would fill in a random key.
    """
    params, shape = eqn.params, eqn.invars[0].aval.shape
    dims, mode, out = params["dimension_numbers"], params["mode"], eqn.outvars[0].aval
    if axis is None or eqn.invars[1].aval.shape != (shape[axis], 1):
        return None
    indexed = (*dims.start_index_map,) == (*dims.collapsed_slice_dims,) == (axis,)
    if not indexed or dims.operand_batching_dims:
        return None
    whole = drop(axis, params["slice_sizes"]) == drop(axis, shape)
    fills = mode == GatherScatterMode.FILL_OR_DROP
    inside = (GatherScatterMode.CLIP, GatherScatterMode.PROMISE_IN_BOUNDS)
    # A random key has no value that could fill.
    if not (whole and (mode in inside or (fills and _is_plain(out.dtype)))):
        return None
    (position,) = set(range(out.ndim)) - {*dims.offset_dims}

    def with_blocks(partition: Partition, x: Array, indices: Array) -> Array:
        if known is not None and is_permutation(known, partition.size):
            slices = permute(jnp.moveaxis(x, axis, 0), known, partition)
            return jnp.moveaxis(slices, 0, position)
        index = _index(known, indices, partition.size)
        if not fills:
            index = index.clip(0, partition.size - 1)
        slices = take(jnp.moveaxis(x, axis, 0), index, partition)
        if fills:
            inside = (index >= 0) & (index < partition.size)
            inside = lax.broadcast_in_dim(inside, slices.shape, (0,))
            value = fill_value(out.dtype, params["fill_value"])
            slices = jnp.where(inside, slices, value)
        return jnp.moveaxis(slices, 0, position)

    return with_blocks, (axis, None), (position,)


def _scatter(
    eqn: Eqn, axis: int | None, known: tuple[int, ...] | None
) -> Rewrite | None:
    """Rewrite a `scatter` or `scatter-add` whose updates are the groups' slices.

    That is `z.at[index].add(y)` or `.set(y)`: the slice of group j of `y` updates slice
    `index[j]` of `z`. It is a permute if the index is known and a permutation of the
    groups; else `.add` is a put_add (each group gets the sum of the slices sent to it),
    and `.set` a take of the slice of the last group that writes. A global `z` is
    scattered, along the axis that is indexed. None in each of these cases:

    * the updates are not partitioned, or along a window dimension;
    * updates, indices and slices of `z` are not as many as groups;
    * it has batch dimensions;
    * an index updates a part of a slice;
    * the dtype has no arithmetic, as that of random keys.
    """
    params, (x, indices, updates) = eqn.params, (v.aval for v in eqn.invars)
    dims, mode = params["dimension_numbers"], params["mode"]
    if axis is None or axis in dims.update_window_dims or dims.operand_batching_dims:
        return None
    if not dims.scatter_dims_to_operand_dims:  # `x.at[:].add(y)`: nothing moves
        return None
    group_axis, *others = dims.scatter_dims_to_operand_dims
    n = updates.shape[axis]
    indexed = not others and (*dims.inserted_window_dims,) == (group_axis,)
    whole = drop(axis, updates.shape) == drop(group_axis, x.shape)
    if not (indexed and whole and indices.shape == (n, 1) and _is_plain(x.dtype)):
        return None
    if x.shape[group_axis] != n:
        return None

    def with_blocks(
        partition: Partition, x: Array, indices: Array, updates: Array
    ) -> Array:
        index = _index(known, indices, n)
        if mode == GatherScatterMode.CLIP:
            index = index.clip(0, n - 1)
        where = np.where if isinstance(index, np.ndarray) else jnp.where
        index = where((index >= 0) & (index < n), index, n)  # n: dropped
        slices, old = jnp.moveaxis(updates, axis, 0), jnp.moveaxis(x, group_axis, 0)
        adds = eqn.primitive is lax.scatter_add_p
        if known is not None and is_permutation(known, partition.size):
            moved = permute(slices, inverse(known), partition)
            new = old + moved if adds else moved
        elif adds:
            new = old + put_add(slices, index, partition)
        else:
            writer = last_writer(index, n)
            moved = take(slices, writer, partition)
            written = lax.broadcast_in_dim(writer >= 0, moved.shape, (0,))
            new = jnp.where(written, moved, old)
        return jnp.moveaxis(new, 0, group_axis)

    return with_blocks, (group_axis, None, axis), (group_axis,)


def _index(known: tuple[int, ...] | None, indices: Array, n: int) -> Array | np.ndarray:
    """Return an index of groups, `[n, 1]`, as int32 `[n]`; of NumPy if it is known."""
    if known is None:
        return as_int32(indices[:, 0], -1, n)
    return np.clip(np.asarray(known, object), -1, n).astype(np.int32)


def _is_plain(dtype: np.dtype) -> bool:
    """Whether values of a dtype can be added: numbers and bools, not random keys."""
    return jnp.issubdtype(dtype, jnp.number) or dtype == jnp.bool_
