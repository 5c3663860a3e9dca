"""Padding of n groups that m devices do not divide: the work of the padded slots.

Input: a layout, the group indices of a device's slots, and their slices. Output: slices
for all slots, or work that runs only for slots with groups. Padded slots are appended,
as slices of zeros, and cut off the results in `execute.py`, and masked before each
reduction by `Layout.mask_padding` (`layout.py`).

Each device has k = ceil(n / m) slots. The last devices have fewer groups: one of them
has n mod k, the others after it none. Padding may decide neither values, nor control
flow, nor effects:

* Padded slots of a device that has groups hold copies of its first group, index
  included. So a loop that ends for every group ends for them, too, and a check that
  holds for every group holds. Each device copies after the slices are divided over the
  devices; before, the copies would cost all-gathers.
* A device without groups skips the work, by a `cond` on its first group index.
* Work with effects runs for exactly the groups of a device. Their number is one of
  three that are known when the work is traced, so there is a branch for each.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from drjax._sharding.execute import full_of_type
from drjax._sharding.layout import Layout


def copy_index_to_padding(layout: Layout, indices, first):
    """Replace the index of each padded slot by that of the device's first group.

    A slot is a place for one group on a device. With the index, padding behaves like a
    group that exists: a loop that ends for this group ends for padding, too.

    Args:
      layout: The layout of n groups. If no slot is padding, `indices` is returned.
      indices: The group indices of some slots of a device, int32 `[slots]`; of padding,
        n or more.
      first: The index of the device's first group, int32 `[]` or `[1]`, or a Python
        int; for the slots of all devices, 0.

    Returns:
      The indices, int32 `[slots]`.
    """
    if not layout.uneven:
        return indices
    return jnp.where(indices < layout.partition.size, indices, first)


def copy_slice_to_padding(layout: Layout, indices, slices, first_slice):
    """Replace the slice of each padded slot by that of the device's first group.

    A slot is a place for one group on a device. So the work of padding does what that
    of a group does, and never sees the zeros with which operands are padded.

    Args:
      layout: The layout of n groups. If no slot is padding, `slices` is returned.
      indices: The group indices of some slots of a device, int32 `[slots]`; of padding,
        n or more.
      slices: The slices of an operand in these slots, `[slots, *s]`.
      first_slice: The slice of the device's first group, `[1, *s]`.

    Returns:
      The slices, `[slots, *s]`.
    """
    if not layout.uneven:
        return slices
    real = lax.broadcast_in_dim(indices < layout.partition.size, slices.shape, (0,))
    return jnp.where(real, slices, first_slice)


def unless_empty(layout: Layout, first, work: Callable, otherwise: Callable):
    """Run `work()`; on a device without groups, run `otherwise()` instead.

    It is a `lax.cond`, unless every device has a group: then `work()` is called
    directly.

    Args:
      layout: The layout of n groups.
      first: The group index of the device's first slot, int32 `[]`; it is n or more if
        the device has no group.
      work: Takes nothing, and returns a tree of arrays.
      otherwise: Takes nothing, and returns a tree of the same types.

    Returns:
      The tree that `work` or `otherwise` returned.
    """
    if not layout.has_empty_devices:
        return work()
    return lax.cond(first < layout.partition.size, work, otherwise)


def tree_zeros_like(types):
    """Make a tree of zeros from a tree of types, such as `jax.eval_shape` returns.

    Each array varies over the Manual mesh axes over which its type varies, so that the
    arrays can be the results of a branch.
    """
    return jax.tree.map(lambda like: full_of_type(like, 0), types)


def for_real_groups(
    layout: Layout,
    indices,
    partial_count: int,
    run: Callable[[int], Callable],
    operands: Sequence,
    partitioned_in: Sequence[bool],
) -> list:
    """Run work with effects for exactly those slots of a device that have groups.

    A slot is a place for one group; padded slots have none, and must run no effects.
    How many slots have groups differs between devices, so it is a traced number. But it
    has only three possible values: all slots, `partial_count`, or none. There is a
    branch of a `lax.switch` for each, in which the number is static.

    Args:
      layout: An uneven layout of n groups.
      indices: The group indices of the slots, int32 `[slots]`, in ascending order; of
        padding, n or more.
      partial_count: How many of these slots have groups, on the one device that has
        both groups and padding.
      run: `run(count)` returns the function that works for the first `count` slots,
        count > 0. It takes the operands, those with a slice for each slot cut to
        `[count, *s]`, and returns a sequence of results, `[count, *t]`.
      operands: The operands: `[slots, *s]` with a slice for each slot, or shared by
        all.
      partitioned_in: For each operand whether it has a slice for each slot.

    Returns:
      The list of results, `[slots, *t]`, with zeros in padded slots.
    """
    slots = indices.shape[0]
    types = jax.eval_shape(run(slots), *operands)
    counts = sorted({slots, partial_count, 0}, reverse=True)

    def branch(count: int) -> Callable:
        def work(*operands):
            if not count:
                return tree_zeros_like(list(types))
            pairs = zip(operands, partitioned_in, strict=True)
            outs = run(count)(*(x[:count] if p else x for x, p in pairs))
            return [_append_zeros(y, slots - count) for y in outs]

        return work

    real = jnp.sum(indices < layout.partition.size, dtype=jnp.int32)
    index = sum(jnp.int32(real < count) for count in counts[:-1])
    return lax.switch(index, [branch(count) for count in counts], *operands)


def _append_zeros(x, extra: int):
    """Append slices of zeros along axis 0, for padded slots whose work did not run.

    Args:
      x: The results of the slots that have groups, `[count, *s]`.
      extra: The number of slices to append; 0: `x` is returned.

    Returns:
      An array `[count + extra, *s]`.
    """
    if not extra:
        return x
    return jnp.concatenate([x, jnp.zeros((extra, *x.shape[1:]), x.dtype)])
