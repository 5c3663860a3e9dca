"""The primitives that move slices between groups, and all of their rules.

Input: a partitioned value `[n, *s]`, and an index, which says for each group whose
slice it gets. Output: a partitioned value; of n groups, or with an index `[k]` of k, as
a cohort of a population is. Its partition has the same name and mesh axes.

    permute(x)[j]        = x[sources[j]]        sources: a permutation, a parameter
    take(x, index)[j]    = x[index[j]]          index: int32 [k], a global operand
    put_add(y, index)[i] = sum_{j: index[j] = i} y[j]       [k, *s] -> [n, *s]

The parameter `partition` is that of x, and of the result of put_add: n groups.

Each is linear in x, and its transpose is another one of them, with the inner product
<x, y> = sum_i <x_i, y_i> of partitioned values:

    permute(sources)^T = permute(the inverse of sources)
    take^T = put_add        put_add^T = take

On a mesh, a permutation is as many `ppermute`s as a device has groups, at most; a shift
sends the slices at the edge of a device only (`edge_coloring`). A traced index is not
known to the compiler. If the result has as many groups or fewer, each device puts those
of its slices that are asked for in zeros of the size of the result, and one
reduce-scatter adds these up. If it has more, an all-gather gives each device the
slices, of which it takes those for its groups. Both send the smaller of the two.

Invariants: a rule binds these primitives only. A move copies bits: it keeps NaN and the
sign of zeros, and has every dtype, random keys included. Padding is never read.
Sharp edges: an index out of bounds must be clamped, or dropped, by the caller. Reverse
mode inside a user's `shard_map(check_vma=False)` is an error, as for a reduction.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad, batching
from jax.sharding import PartitionSpec as P

from drjax import _compat
from drjax._jaxprs.prng_keys import is_key, on_raw
from drjax._partition import Partition
from drjax._primitives import registration
from drjax._primitives.collectives import (
    checked_transpose,
    register_linear,
)
from drjax._primitives.device_sums import accumulator, reduce_scatter
from drjax._primitives.edge_coloring import schedule
from drjax._sharding.execute import as_operand, shard_map_over_devices, vary
from drjax._sharding.layout import Layout, make_layout

permute_p = registration.new_primitive("permute")
take_p = registration.new_primitive("take")
put_add_p = registration.new_primitive("put_add")
# The primitives that move slices between groups, by their names in plans.
MOVES = {"permute": permute_p, "take": take_p, "put_add": put_add_p}


# ---------------------------------------------------------------------------------
# Bits: what a collective can send, and add to zeros without a change


def _move_bits(move: Callable, x):
    """Move slices of an array of any dtype as unsigned integers.

    A collective that adds slices to zeros then keeps NaNs and the sign of zeros.

    Args:
      move: From an array of unsigned integers `[k, *s]` to one of the same dtype. It
        returns slices of its operand and zeros.
      x: The array, of any dtype, random keys included.

    Returns:
      What `move` would return for `x`, in the dtype of `x`.
    """
    dtype = x.dtype
    if is_key(dtype):
        return on_raw(move, x)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        parts = jnp.stack([jnp.real(x), jnp.imag(x)], -1)
        parts = _move_bits(move, parts)
        return lax.complex(parts[..., 0], parts[..., 1])
    if dtype == jnp.bool_:
        return move(x.astype(jnp.uint8)) != 0
    if jnp.issubdtype(dtype, jnp.integer):
        return move(x)
    bits = jnp.dtype(f"uint{8 * dtype.itemsize}")
    return lax.bitcast_convert_type(move(lax.bitcast_convert_type(x, bits)), dtype)


# ---------------------------------------------------------------------------------
# permute: [n, *s] -> [n, *s] by a static permutation


def execute_permute(x, *, sources, partition, mesh):
    """Execution function of `permute`: group j gets the slice of group `sources[j]`.

    Args:
      x: The partitioned value, `[n, *s]`.
      sources: A permutation of 0 to n - 1, a tuple.
      partition: The `Partition`, of n groups.
      mesh: The mesh, or None: the program runs locally.

    Returns:
      The partitioned value, `[n, *s]`.
    """
    layout = make_layout(partition, mesh)
    if not layout.axes:
        return x[np.asarray(sources, np.int32)]
    moves = schedule(sources, layout.devices, layout.per_device)

    def body(x, first):
        device = first[0] // layout.per_device
        of_device = lambda table: lax.dynamic_index_in_dim(
            jnp.asarray(table), device, keepdims=False
        )

        def move(x):
            parts = [x]
            for step in moves.steps:
                # A ppermute takes operands that vary over all of its axes.
                sent = vary(x[of_device(step.slots)], layout.axes)
                parts.append(lax.ppermute(sent, layout.axes, step.pairs))
            return jnp.concatenate(parts)[of_device(moves.positions)]

        return [_move_bits(move, x)]

    return _run_on_devices(layout, body, x)


def is_permutation(index: Sequence[int], n: int) -> bool:
    """Whether a known index is a permutation of 0 to n - 1."""
    return sorted(index) == [*range(n)]


def inverse(sources: tuple[int, ...]) -> tuple[int, ...]:
    """The inverse of a permutation of 0 to n - 1: where each index occurs in it."""
    return tuple(np.argsort(np.asarray(sources, np.int64)).tolist())


# <permute(x), y> = sum_j <x[s(j)], y_j> = sum_i <x_i, y[s^-1(i)]>
def _permute_transpose(ct, x, *, sources, **params):
    return [permute_p.bind(ct, sources=inverse(sources), **params)]


# ---------------------------------------------------------------------------------
# take: [n, *s], index [k] -> [k, *s]


def execute_take(x, index, *, partition, mesh):
    """Execution function of `take`: group j gets the slice of group `index[j]`.

    Args:
      x: The partitioned value, `[n, *s]`.
      index: The index of a group for each group, int32 `[k]`, a global value.
      partition: The `Partition`, of n groups.
      mesh: The mesh, or None: the program runs locally.

    Returns:
      The partitioned value, `[k, *s]`.
    """
    layout = make_layout(partition, mesh)
    if not layout.axes:
        return x[index]
    result = _layout_of_index(index, partition, mesh)

    if result.num_slots > layout.num_slots:

        def body_of_many(x, index, first):
            own = _own_index(index, layout, result, first)
            return [_move_bits(lambda x: _all_slices(layout, x)[own], x)]

        divided = _index_on_devices(index, result, 0)
        return _run_on_devices(layout, body_of_many, x, *divided, result=result)

    def body(x, index, first):
        position = _pad_index(index, result, 0) - first
        own = (position >= 0) & (position < layout.per_device)

        def move(x):
            slices = x[position.clip(0, layout.per_device - 1)]
            mask = lax.broadcast_in_dim(own, slices.shape, (0,))
            slices = jnp.where(mask, slices, jnp.zeros((), x.dtype))
            # One device has the slice, the others zeros: a sum of bits is a copy.
            return reduce_scatter(result, slices)

        return [_move_bits(move, x)]

    return _run_on_devices(layout, body, x, index, result=result)


# <take(x, i), y> = sum_j <x[i_j], y_j> = sum_k <x_k, sum_{j: i_j = k} y_j>
def _take_transpose(ct, x, index, **params):
    return [put_add_p.bind(ct, index, **params), None]


# ---------------------------------------------------------------------------------
# put_add: [k, *s], index [k] -> [n, *s]


def execute_put_add(x, index, *, partition, mesh):
    """Execution function of `put_add`: the slice of group j is added to `index[j]`.

    16-bit floats are added in float32 on each device, and communicated in 16 bits.

    Args:
      x: The partitioned value, `[k, *s]`, of a dtype with arithmetic.
      index: The index of a group for each group, int32 `[k]`, a global value.
      partition: The `Partition` of the result, n groups.
      mesh: The mesh, or None: the program runs locally.

    Returns:
      The partitioned value, `[n, *s]`; zeros for groups to which nothing is added.
    """
    result = make_layout(partition, mesh)
    wide = accumulator(x.dtype)

    def add(x, index, size: int):
        zeros = jnp.zeros((size, *x.shape[1:]), wide)
        return zeros.at[index].add(x.astype(wide), mode="drop").astype(x.dtype)

    if not result.axes:
        return add(x, index, partition.size)
    layout = _layout_of_index(index, partition, mesh)

    dropped = result.num_slots  # the index of padding: beyond all slots
    if result.num_slots > layout.num_slots:

        def body_of_few(x, index, first):
            size = result.per_device
            position = _pad_index(index, layout, dropped)
            position = position - first // layout.per_device * size
            # A negative index would count from the end.
            position = jnp.where(position >= 0, position, size)
            return [add(_all_slices(layout, x), position, size)]

        return _run_on_devices(layout, body_of_few, x, index, result=result)

    def body(x, index, first):
        own = _own_index(index, layout, layout, first)
        return [reduce_scatter(result, add(x, own, dropped))]

    return _run_on_devices(layout, body, x, *_index_on_devices(index, layout, dropped),
                       result=result)  # fmt: skip


def partitions_of(eqn) -> tuple[Partition, Partition]:
    """The partitions of the operand and of the result of a building block.

    They differ if it moves slices between a population and a cohort of it.

    Args:
      eqn: An equation of a primitive of drjax.
    """
    partition = eqn.params["partition"]
    if eqn.primitive not in (take_p, put_add_p):
        return partition, partition
    indexed = replace(partition, size=eqn.invars[1].aval.shape[0])
    pair = partition, indexed
    return pair if eqn.primitive is take_p else pair[::-1]


def last_writer(index, n: int):
    """The inverse of an index: the last group that writes to each group.

    Args:
      index: For each group the group to which it writes, int32 `[k]`; n: to none.
      n: The number of groups to which they write.

    Returns:
      A group index for each group, int32 `[n]`; -1 if no group writes to it.
    """
    none = jnp.full(n, -1, jnp.int32)
    writers = jnp.arange(index.shape[0], dtype=jnp.int32)
    return none.at[index].max(writers, mode="drop")


# <put_add(x, i), y> = sum_k <sum_{j: i_j = k} x_j, y_k> = sum_j <x_j, y[i_j]>
def _put_add_transpose(ct, x, index, **params):
    return [take_p.bind(ct, index, **params), None]


def _layout_of_index(index, partition: Partition, mesh) -> Layout:
    """The layout of a value with a slice for each element of an index.

    Args:
      index: The index, int32 `[k]`.
      partition: The partition to whose groups it points.
      mesh: The mesh, or None: the program runs locally.

    Returns:
      The layout of the partition of k groups with the name of `partition`.
    """
    return make_layout(replace(partition, size=index.shape[0]), mesh)


def _index_on_devices(index, layout: Layout, fill: int):
    """Divide an index over the devices, as an operand of `_run_on_devices`.

    Args:
      index: The index, with an element for each group of the layout, a global value.
      layout: The layout.
      fill: The element for padded slots.

    Returns:
      `(index, spec)`: the padded index, with an element for each slot, and its
        `PartitionSpec`; False in place of this if the layout is not sharded.
    """
    index = _pad_index(index, layout, fill)
    if not layout.sharded:
        return index, False
    return as_operand(index, layout, True), P(layout.axes)


def _own_index(index, layout: Layout, of: Layout, first):
    """The elements of a padded index that belong to the slots of a device.

    Args:
      index: What a device gets of the index: these elements already; or, inside a
        user's `shard_map`, the elements for all slots of the layout `of`.
      layout: The layout of which `first` is a group index.
      of: The layout of the slots, on the same devices.
      first: The group index of the device's first slot in `layout`, int32 `[1]`.

    Returns:
      int32 `[k]`, of the k slots of the device in `of`.
    """
    if of.sharded:
        return index
    start = first[0] // layout.per_device * of.per_device
    own = lax.dynamic_slice_in_dim(index, start, of.per_device)
    return vary(own, layout.axes)


def _all_slices(layout: Layout, x):
    """Gather the slices of all devices' slots, `[k * m, *s]`, by an all-gather.

    Args:
      layout: The layout: k slots on each of m devices.
      x: The slices of this device's slots, `[k, *s]`.
    """
    return lax.all_gather(vary(x, layout.axes), layout.axes, tiled=True)


def _run_on_devices(
    layout: Layout,
    body: Callable,
    x,
    index=None,
    spec: P | bool = False,
    result: Layout | None = None,
):
    """Run a function that moves one device's slices on all devices.

    Args:
      layout: The layout of `x`: k slots on each device.
      body: `body(x, index, first)`, from the device's slices `[k, *s]`, the index, if
        there is one, and the group index of the device's first slot, int32 `[1]`, to a
        list of its new slices.
      x: The partitioned value, `[n, *s]`.
      index: The index, int32, or None.
      spec: The `PartitionSpec` of the index; False: each device gets all of it.
      result: The layout of the result; None: `layout`.

    Returns:
      The partitioned value of all devices' new slices.
    """
    args, specs = ([x], [True]) if index is None else ([x, index], [True, spec])
    return shard_map_over_devices(
        layout, body, args, specs, [True], with_first_index=True, result_layout=result
    )[0]


def _pad_index(index, layout: Layout, fill: int):
    """Pad an index to one element for each slot of a layout's devices.

    Args:
      index: The index, with an element for each group.
      layout: The layout.
      fill: The element for padded slots.
    """
    extra = layout.num_slots - layout.partition.size
    return lax.pad(index, jnp.asarray(fill, index.dtype), [(0, extra, 0)])


# ---------------------------------------------------------------------------------
# All registrations


def _abstract_eval(x, *index, partition, mesh, **_):
    # The execution works on bits, and the result of a cast is not weakly typed.
    return x.update(weak_type=False)


def _abstract_take(x, index, *, partition, mesh):
    return _aval_with_groups(x, _layout_of_index(index, partition, mesh))


def _abstract_put_add(x, index, *, partition, mesh):
    return _aval_with_groups(x, make_layout(partition, mesh))


def _aval_with_groups(x, layout: Layout):
    """The type of a partitioned value with the slices of `x`, for another partition.

    Args:
      x: The type of a partitioned value.
      layout: The layout of the other partition.
    """
    shape = (layout.group_axis_size, *x.shape[1:])
    return x.update(shape=shape, weak_type=False)


def _batch_indexed(primitive) -> Callable:
    """Make the batching rule of `take_p` or `put_add_p`.

    A batch of values with one index stays one equation. With a batch of indices, the
    elements of the batch run one after the other.
    """

    def rule(args, dims, **params):
        (x, index), (x_dim, index_dim) = args, dims
        if index_dim is None:
            x, dim = registration.group_axis_first(x, x_dim)
            return primitive.bind(x, index, **params), dim
        index = _compat.moveaxis(index, index_dim, 0)
        if x_dim is None:
            run = lambda i: primitive.bind(x, i, **params)
            return lax.map(run, index), 0
        x = _compat.moveaxis(x, x_dim, 0)
        return lax.map(lambda pair: primitive.bind(*pair, **params), (x, index)), 0

    return rule


register_linear(permute_p, execute_permute, _abstract_eval, _permute_transpose, 0)

for _primitive, _execute, _abstract, _transpose in (
    (take_p, execute_take, _abstract_take, _take_transpose),
    (put_add_p, execute_put_add, _abstract_put_add, _put_add_transpose),
):
    registration.register_execution(_primitive, _execute)
    _primitive.def_abstract_eval(_abstract)
    ad.defjvp(
        _primitive,
        lambda t, x, index, _p=_primitive, **params: _p.bind(t, index, **params),
        None,
    )
    ad.primitive_transposes[_primitive] = checked_transpose(_transpose)
    batching.primitive_batchers[_primitive] = _batch_indexed(_primitive)
