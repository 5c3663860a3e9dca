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
    """A copy of a global value for each group."""
    return broadcast_p.bind(x, partition=partition, mesh=None)


def partition_index(partition: Partition):
    """The indices of all groups, int32 `[n]`, partitioned."""
    return partition_index_p.bind(partition=partition, mesh=None, per_group=False)


def reduce_groups(primitive, x, partition: Partition):
    """A reduction over axis 0, such as `reduce_sum_p`."""
    return primitive.bind(x, partition=partition, mesh=None)


def map_groups(
    fn: Callable[..., Sequence[Any]], *operands, partition: Partition
) -> list[Any]:
    """`fn` of the slices of each group; it returns a sequence of arrays.

    Args:
      fn: The function of one group. What it closes over is broadcast.
      *operands: Partitioned values, along axis 0.
      partition: The partition.
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
    """The slices of all groups, which lie along `axis`, as a global value."""
    slices = gather_p.bind(jnp.moveaxis(x, axis, 0), partition=partition, mesh=None)
    return jnp.moveaxis(slices, 0, axis)


def select_group(x, i, partition: Partition):
    """The slice of group i, int32, as a global value: a sum of it and of zeros.

    As in `drjax.select`, i counts from the end if it is negative, and is clamped.
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
    """The slice of the group with the index `selected`, zeros in all others."""
    return [jnp.where(index == selected, own, jnp.zeros((), own.dtype))]


def key_data(key):
    """The raw data of a key."""
    return [jax.random.key_data(key)]
