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
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np

from drjax import _compat
from drjax._compat.jax_types import Primitive
from drjax._compat.types import Array, GlobalArray, PartitionedArray
from drjax._partition import Partition
from drjax._plan.schedule_moves import Sources
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

# `fn(partition, *operands)` computes the results of an equation, an array or a list,
# with building blocks.
WithBlocks: TypeAlias = Callable[..., Any]


def broadcast(x: GlobalArray, partition: Partition) -> PartitionedArray:
    """Bind `broadcast_p`: copy a global value `[*s]` to n groups, `[n, *s]`."""
    return broadcast_p.bind(x, partition=partition, mesh=None)


def partition_index(partition: Partition) -> PartitionedArray:
    """Bind `partition_index_p`: the indices of all groups, int32 `[n]`, partitioned."""
    return partition_index_p.bind(partition=partition, mesh=None, per_group=False)


def reduce_groups(
    primitive: Primitive, x: PartitionedArray, partition: Partition
) -> GlobalArray:
    """Bind the primitive of a reduction over the groups, such as `reduce_sum_p`."""
    return primitive.bind(x, partition=partition, mesh=None)


def map_groups(
    fn: Callable[..., Sequence[Array]],
    *operands: PartitionedArray,
    partition: Partition,
) -> list[PartitionedArray]:
    """Bind `map_fn_p`: apply `fn` to the slices of each group.

    Values that `fn` closes over are broadcast; its name becomes that of the equation.
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


def gather_groups(x: Array, axis: int, partition: Partition) -> GlobalArray:
    """Bind `gather_p`: all slices of a partitioned value as one global value.

    It has the shape of `x`: the slices lie along `axis`, in the order of the groups.
    """
    # gather_p takes the groups along axis 0. For one group this move is the identity,
    # as its slice lacks the axis; the server moves the axis back.
    slices = gather_p.bind(jnp.moveaxis(x, axis, 0), partition=partition, mesh=None)
    return jnp.moveaxis(slices, 0, axis)


def permute(
    x: PartitionedArray, sources: Sequence[int], partition: Partition
) -> PartitionedArray:
    """Bind `permute_p`: group j gets the slice of group `sources[j]`."""
    return permute_p.bind(x, sources=Sources(sources), partition=partition, mesh=None)


def take(
    x: PartitionedArray, index: GlobalArray | np.ndarray, partition: Partition
) -> PartitionedArray:
    """Bind `take_p`: group j gets the slice of group `index[j]`, clipped to 0..n-1.

    An index of NumPy is known, and not clipped: out of bounds it gives zeros.
    """
    if not isinstance(index, np.ndarray):
        index = index.clip(0, partition.size - 1)
    return _bind_indexed(take_p, x, index, partition)


def put_add(
    x: PartitionedArray, index: GlobalArray | np.ndarray, partition: Partition
) -> PartitionedArray:
    """Bind `put_add_p`: the slice of group j is added to that of group `index[j]`.

    The index n drops the slice. A group that was sent none gets zeros. An index of
    NumPy is known.
    """
    return _bind_indexed(put_add_p, x, index, partition)


def _bind_indexed(
    primitive: Primitive,
    x: PartitionedArray,
    index: GlobalArray | np.ndarray,
    partition: Partition,
) -> PartitionedArray:
    params = {"sources": Sources.of(index), "partition": partition, "mesh": None}
    return primitive.bind(x, jnp.asarray(index), **params)


def select_group(
    x: PartitionedArray, i: GlobalArray, partition: Partition
) -> GlobalArray:
    """Select the slice of one group as a global value: a sum in which others add zeros.

    `x` may be of any dtype, random keys included. As in `drjax.select`, `i`, int32
    `[]`, counts from the end if it is negative, and is clamped.
    """
    # One array in place of a list of one, under the name of the function.
    one = lambda fn: functools.wraps(fn)(lambda *xs: [fn(*xs)])
    map_one = lambda fn, *xs: map_groups(one(fn), *xs, partition=partition)[0]
    indices = index_pair(i, partition=partition, mesh=None)
    return select_slice(x, indices, map_one, partition=partition, mesh=None)
