"""Padding of n groups that m devices do not divide: the work of the padded slots.

Input: a layout, the group indices of a device's slots, and their slices. Output: slices
for all slots, or work that runs only for slots with groups.

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

Results of padded slots are masked by every reduction, and cut off elsewhere.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from drjax._sharding.execute import vary
from drjax._sharding.layout import Layout


def copy_index_to_padding(layout: Layout, indices, first):
    """The group indices of slots, with `first` in those that are padding.

    Args:
      layout: The layout.
      indices: The indices of slots, int32 [slots]; of padding, n or more.
      first: The index of the device's first group.
    """
    if not layout.uneven:
        return indices
    return jnp.where(indices < layout.partition.size, indices, first)


def copy_slice_to_padding(layout: Layout, indices, slices, first_slice):
    """The slices of slots, `[slots, *s]`, with `first_slice` in those that are padding.

    Args:
      layout: The layout.
      indices: The group indices of the slots, int32 [slots]; of padding, n or more.
      slices: Their slices of an operand.
      first_slice: The slice of the device's first group, `[1, *s]`.
    """
    if not layout.uneven:
        return slices
    real = lax.broadcast_in_dim(indices < layout.partition.size, slices.shape, (0,))
    return jnp.where(real, slices, first_slice)


def unless_empty(layout: Layout, first, work: Callable, otherwise: Callable):
    """`work()`, or `otherwise()` on a device without groups.

    Args:
      layout: The layout.
      first: The index of the device's first slot, int32 []; n or more, if it has no
        group.
      work: Returns results; it is not run on such a device.
      otherwise: Returns results of the same types.
    """
    if not layout.has_empty_devices:
        return work()
    return lax.cond(first < layout.partition.size, work, otherwise)


def tree_zeros_like(values):
    """Zeros in the shapes and dtypes of a tree of arrays or of their types."""
    return jax.tree.map(lambda like: jnp.zeros(like.shape, like.dtype), values)


def for_real_groups(
    layout: Layout,
    indices,
    few: int,
    run: Callable[[int], Callable],
    operands: Sequence,
    partitioned_in: Sequence[bool],
) -> list:
    """Run work with effects for exactly the slots that have groups.

    The number of these is traced, as it differs from device to device, but it has only
    three possible values: all slots, `few`, or none. There is a branch for each.

    Args:
      layout: An uneven layout.
      indices: The group indices of the slots, int32 [slots]; of padding, n or more.
      few: How many of them are groups on the device that has fewer groups than slots.
      run: `run(count)(*operands)` works for so many groups.
      operands: Operands, `[slots, *s]` with a slice for each slot, or shared.
      partitioned_in: Which operands have slices.

    Returns:
      The results, `[slots, *s]`, with zeros in padded slots.
    """
    slots = indices.shape[0]
    shapes = jax.eval_shape(run(slots), *operands)
    counts = sorted({slots, few, 0}, reverse=True)

    def branch(count: int) -> Callable:
        def work(*operands):
            if not count:
                return [vary(y, layout.axes) for y in tree_zeros_like(list(shapes))]
            pairs = zip(operands, partitioned_in, strict=True)
            outs = run(count)(*(x[:count] if p else x for x, p in pairs))
            return [vary(_padded(y, slots - count), layout.axes) for y in outs]

        return work

    real = jnp.sum(indices < layout.partition.size, dtype=jnp.int32)
    index = sum(jnp.int32(real < count) for count in counts[:-1])
    return lax.switch(index, [branch(count) for count in counts], *operands)


def _padded(x, extra: int):
    """`x` with `extra` zero slices behind those that it has."""
    if not extra:
        return x
    nothing = tree_zeros_like(jax.ShapeDtypeStruct((extra, *x.shape[1:]), x.dtype))
    return jnp.concatenate([x, nothing])
