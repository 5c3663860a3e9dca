"""Bind the primitives of building blocks, where the planner writes them.

Input: arrays, and a partition. Output: what the building block of that name returns.

The planner writes building blocks in place of equations that imply communication. Its
operands are arrays of the right shapes, without a mesh, so it binds the primitives:
nothing is resolved or checked, and no dtype is promoted.

Invariants: no equation names a mesh. Sharp edges: functions of one group are traced at
each call, and their names become those of plans' stages.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from drjax import _compat
from drjax._partition import Partition
from drjax._primitives.map_fn import trace_group
from drjax._primitives.select_slice import index_pair, select_slice
from drjax._sharding.layout import make_layout
from drjax.primitives import (
    broadcast_p,
    gather_p,
    map_fn_p,
    partition_index_p,
    permute_p,
    put_add_p,
    take_p,
)


def broadcast(x, partition: Partition):
    """Bind `broadcast_p`: copy a global value `[*s]` to n groups, `[n, *s]`."""
    return broadcast_p.bind(x, partition=partition, mesh=None)


def partition_index(partition: Partition):
    """Bind `partition_index_p`: the indices of all groups, int32 `[n]`, partitioned."""
    return partition_index_p.bind(partition=partition, mesh=None, per_group=False)


def reduce_groups(primitive, x, partition: Partition):
    """Bind the primitive of a reduction over the groups.

    Args:
      primitive: The primitive of the reduction, such as `reduce_sum_p`.
      x: The partitioned value, `[n, *s]`.
      partition: The partition, of n groups.

    Returns:
      The reduction of all slices: a global value, `[*s]`.
    """
    return primitive.bind(x, partition=partition, mesh=None)


def map_groups(
    fn: Callable[..., Sequence[Any]], *operands, partition: Partition
) -> list[Any]:
    """Bind `map_fn_p`: apply `fn` to the slices of each group.

    Args:
      fn: The function of one group. It takes a slice `[*s]` of each operand, and
        returns a sequence of arrays. Values that it closes over are broadcast; its name
        becomes that of the equation.
      *operands: Partitioned values, `[n, *s]`.
      partition: The partition, of n groups.

    Returns:
      A partitioned value `[n, *t]` for each array `[*t]` that `fn` returns.
    """
    avals = tuple(map(_compat.typeof, operands))
    jaxpr, closed_over = trace_group(
        fn, avals, make_layout(partition, None), fn.__name__
    )
    # The jaxpr of a map_fn has no constants, and its operands are all partitioned.
    # The transpose of these broadcasts sums the cotangents over the groups.
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
    """Bind `gather_p`: all slices of a partitioned value as one global value.

    Args:
      x: The partitioned value.
      axis: Its group axis.
      partition: The partition.

    Returns:
      The global value, of the shape of `x`: the slices lie along `axis`, in the order
      of the groups.
    """
    # gather_p takes the groups along axis 0. For one group this move is the identity,
    # as its slice lacks the axis; the server moves the axis back.
    slices = gather_p.bind(jnp.moveaxis(x, axis, 0), partition=partition, mesh=None)
    return jnp.moveaxis(slices, 0, axis)


def permute(x, sources: tuple[int, ...], partition: Partition):
    """Bind `permute_p`: group j gets the slice of group `sources[j]`.

    Args:
      x: The partitioned value, `[n, *s]`.
      sources: A permutation of the group indices, n integers.
      partition: The partition, of n groups.

    Returns:
      A partitioned value, `[n, *s]`.
    """
    return permute_p.bind(x, sources=sources, partition=partition, mesh=None)


def take(x, index, partition: Partition):
    """Bind `take_p`: group j gets the slice of group `index[j]`.

    Args:
      x: The partitioned value, `[n, *s]`.
      index: Group indices, global, int32 `[n]`. They are clipped to 0..n-1.
      partition: The partition, of n groups.

    Returns:
      A partitioned value, `[n, *s]`.
    """
    index = index.clip(0, partition.size - 1)
    return take_p.bind(x, index, partition=partition, mesh=None)


def put_add(x, index, partition: Partition):
    """Bind `put_add_p`: the slice of group j is added to that of group `index[j]`.

    Args:
      x: The partitioned value, `[n, *s]`.
      index: Group indices, global, int32 `[n]`. With n, the slice is dropped.
      partition: The partition, of n groups.

    Returns:
      For each group the sum of the slices that were sent to it, `[n, *s]`, 0 if none
      was.
    """
    return put_add_p.bind(x, index, partition=partition, mesh=None)


def select_group(x, i, partition: Partition):
    """Select the slice of one group as a global value: a sum in which others add zeros.

    Args:
      x: The partitioned value, `[n, *s]`: of any dtype, random keys included.
      i: The index of the group, int32 `[]`, global. As in `drjax.select`, it counts
        from the end if it is negative, and is clamped.
      partition: The partition, of n groups.

    Returns:
      The slice, `[*s]`, a global value.
    """
    # One array in place of a list of one, under the name of the function.
    one = lambda fn: functools.wraps(fn)(lambda *xs: [fn(*xs)])
    map_one = lambda fn, *xs: map_groups(one(fn), *xs, partition=partition)[0]
    indices = index_pair(i, partition=partition, mesh=None)
    return select_slice(x, indices, map_one, partition=partition, mesh=None)
