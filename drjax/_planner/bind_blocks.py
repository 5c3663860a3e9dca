"""Bind the primitives of building blocks, where the planner writes them.

Input: arrays, and a partition. Output: what the building block of that name returns.

The planner writes building blocks in place of equations that imply communication. Its
operands are arrays of the right shapes, without a mesh, so it binds the primitives:
nothing is resolved or checked, and no dtype is promoted.

Invariants: no equation names a mesh. Sharp edges: functions of one group are traced at
each call, and their names become those of plans' stages.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from drjax import _compat
from drjax._partition import Partition
from drjax._primitives.map_fn import trace_group
from drjax._sharding.layout import make_layout
from drjax.primitives import (
    broadcast_p,
    gather_p,
    map_fn_p,
    partition_index_p,
    reduce_max_p,
    reduce_sum_p,
)


def broadcast(x, partition: Partition):
    """Bind `broadcast_p`: copy a global value `[*s]` to n groups, `[n, *s]`."""
    return broadcast_p.bind(x, partition=partition, mesh=None)


def partition_index(partition: Partition):
    """Bind `partition_index_p`: the indices of all groups, int32 `[n]`, partitioned."""
    return partition_index_p.bind(partition=partition, mesh=None, per_group=False)


def reduce_groups(primitive, x, partition: Partition):
    """Bind a reduction of a partitioned value `[n, *s]` to a global one, `[*s]`.

    Args:
      primitive: The primitive of the reduction, such as `reduce_sum_p`.
      x: The partitioned value, its group axis first.
      partition: The partition.
    """
    return primitive.bind(x, partition=partition, mesh=None)


def map_groups(
    fn: Callable[..., Sequence[Any]], *operands, partition: Partition
) -> list[Any]:
    """Bind `map_fn_p`: apply `fn` to the slices of each group.

    Args:
      fn: The function of one group, from slices to a sequence of arrays. Values that it
        closes over are broadcast; its name becomes that of the equation.
      *operands: Partitioned values, their group axis first.
      partition: The partition.

    Returns:
      The results of all groups, partitioned along axis 0.
    """
    avals = tuple(map(_compat.typeof, operands))
    jaxpr, closed_over = trace_group(
        fn, avals, make_layout(partition, None), fn.__name__
    )
    copies = [broadcast(x, partition) for x in closed_over]
    return map_fn_p.bind(
        *copies,
        *operands,
        jaxpr=jaxpr,
        partition=partition,
        mesh=None,
        name=fn.__name__,
    )


def gather_groups(x, axis: int, partition: Partition):
    """Bind `gather_p`: a value partitioned along `axis` as a global one."""
    slices = gather_p.bind(jnp.moveaxis(x, axis, 0), partition=partition, mesh=None)
    return jnp.moveaxis(slices, 0, axis)


def select_group(x, i, partition: Partition):
    """Select the slice of one group as a global value: a sum in which others add zeros.

    Args:
      x: The partitioned value, `[n, *s]`: of any dtype, random keys included.
      i: The index of the group, int32 `[]`, global. As in `drjax.select`, it counts
        from the end if it is negative, and is clamped.
      partition: The partition.
    """
    n = partition.size
    index = partition_index(partition)
    selected = broadcast(jnp.where(i < 0, i + n, i).clip(0, n - 1), partition)
    # Keys cannot be added, their raw data can.
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    slices = map_groups(key_data, x, partition=partition)[0] if is_key else x
    operands = index, selected, slices
    (kept,) = map_groups(keep_chosen_group, *operands, partition=partition)
    # A sum of bools would be an integer.
    primitive = reduce_max_p if kept.dtype == jnp.bool_ else reduce_sum_p
    slice_ = reduce_groups(primitive, kept, partition)
    if is_key:
        return jax.random.wrap_key_data(slice_, impl=jax.random.key_impl(x))
    return slice_


# Functions of one group, under the names that plans show.


def keep_chosen_group(index, selected, own):
    """Return a group's slice if the group is the selected one, else zeros.

    Args:
      index: The index of this group, int32 `[]`.
      selected: The index of the group to select, int32 `[]`.
      own: The slice of this group.
    """
    return [jnp.where(index == selected, own, jnp.zeros((), own.dtype))]


def key_data(key):
    """Convert a group's slice of random keys to their raw data, which can be added."""
    return [jax.random.key_data(key)]
