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

from drjax._compat.types import Array, Flags, PyTree, Tree
from drjax._sharding.execute import full_of_type, types_of
from drjax._sharding.layout import Layout


def copy_index_to_padding(layout: Layout, indices: Array, first: Array | int) -> Array:
    """Replace the index of each padded slot by that of the device's first group.

    With the index, padding behaves like a group that exists: a loop that ends for this
    group ends for padding, too. `indices`, int32 `[slots]`, are n or more for padding.
    `first` is int32 `[]` or `[1]`; for the slots of all devices, 0.
    """
    if not layout.uneven:
        return indices
    return jnp.where(indices < layout.partition.size, indices, first)


def copy_slice_to_padding(
    layout: Layout, indices: Array, slices: Array, first_slice: Array
) -> Array:
    """Replace the slice of each padded slot by that of the device's first group.

    So the work of padding does what that of a group does, and never sees the zeros with
    which operands are padded. The slices are `[slots, *s]`, `first_slice` is `[1, *s]`,
    and `indices`, int32 `[slots]`, are n or more for padding.
    """
    if not layout.uneven:
        return slices
    real = lax.broadcast_in_dim(indices < layout.partition.size, slices.shape, (0,))
    return jnp.where(real, slices, first_slice)


def unless_empty(
    layout: Layout,
    first: Array,
    work: Callable[[], Tree],
    otherwise: Callable[[], Tree],
) -> Tree:
    """Run `work()`; on a device without groups, run `otherwise()` instead.

    It is a `lax.cond`, unless every device has a group: then `work()` is called
    directly. `first` is the group index of the device's first slot, int32 `[]`; it is n
    or more if the device has no group.
    """
    if not layout.has_empty_devices:
        return work()
    return lax.cond(first < layout.partition.size, work, otherwise)


def tree_zeros_like(types: PyTree) -> PyTree:
    """Make a tree of zeros from a tree of types, such as `types_of` returns.

    Each array varies over the Manual mesh axes over which its type varies, so that the
    arrays can be the results of a branch.
    """
    return jax.tree.map(lambda like: full_of_type(like, 0), types)


def for_real_groups(
    layout: Layout,
    indices: Array,
    partial_count: int,
    run: Callable[[int], Callable[..., Sequence[Array]]],
    operands: Sequence[Array],
    partitioned_in: Flags,
) -> list[Array]:
    """Run work with effects for exactly those slots of a device that have groups.

    Padded slots must run no effects. How many slots have groups differs between
    devices, so it is a traced number. But it has only three possible values: all slots,
    `partial_count`, on the one device that has both groups and padding, or none. There
    is a branch of a `lax.switch` for each, in which the number is static.

    `run(count)` returns the function that works for the first `count` > 0 slots: it
    takes the operands, those with a slice for each slot cut to `[count, *s]`, and
    returns results `[count, *t]`. The results here are `[slots, *t]`, with zeros in
    padded slots. `indices`, int32 `[slots]`, are in ascending order; those of padding
    are n or more.
    """
    slots = indices.shape[0]
    types = types_of(run(slots), *operands)
    counts = sorted({slots, partial_count, 0}, reverse=True)

    def branch(count: int) -> Callable[..., list[Array]]:
        def work(*operands: Array) -> list[Array]:
            if not count:
                return tree_zeros_like(list(types))
            pairs = zip(operands, partitioned_in, strict=True)
            outs = run(count)(*(x[:count] if p else x for x, p in pairs))
            return [_append_zeros(y, slots - count) for y in outs]

        return work

    real = jnp.sum(indices < layout.partition.size, dtype=jnp.int32)
    index = sum(jnp.int32(real < count) for count in counts[:-1])
    return lax.switch(index, [branch(count) for count in counts], *operands)


def _append_zeros(x: Array, extra: int) -> Array:
    """Append slices of zeros along axis 0, for padded slots whose work did not run."""
    if not extra:
        return x
    return jnp.concatenate([x, jnp.zeros((extra, *x.shape[1:]), x.dtype)])
