"""The primitives that move slices between groups, and all of their rules.

Input: a partitioned value `[n, *s]`, and an index, which says for each group whose
slice it gets. Output: a partitioned value; of n groups, or with an index `[k]` of k, as
a cohort of a population is. Its partition has the same name and mesh axes.

    permute(x)[j]        = x[sources[j]]        sources: a permutation, a parameter
    take(x, index)[j]    = x[index[j]]          index: int32 [k], a global operand
                           zeros if index[j] is not in 0 to n - 1
    put_add(y, index)[i] = sum_{j: index[j] = i} y[j]       [k, *s] -> [n, *s]

The parameter `partition` is that of x, and of the result of put_add: n groups.

Each is linear in x, and its transpose is another one of them, with the inner product
<x, y> = sum_i <x_i, y_i> of partitioned values:

    permute(sources)^T = permute(the inverse of sources)
    take^T = put_add        put_add^T = take

On a mesh, a permutation, or an index whose numbers are the parameter `sources`, is the
`ppermute`s and the all-to-all of `schedule_moves`, and its transpose the same ones
backwards; a shift sends the slices at the edge of a device only. Another index is data.
If the result has as many groups or fewer, each device puts those of its slices that are
asked for in zeros of the size of the result, and one reduce-scatter adds these up. On
TPUs, whose compiler makes an all-reduce of that, a ragged all-to-all sends each slice
to the device that gets it, or an all-gather sends all of them if they are tiny. If the
result has more groups, an all-gather gives each device the slices, of which it takes
those for its groups. All send no more than the smaller of operand and result.

Invariants: a rule binds these primitives only. A move copies bits: it keeps NaN and the
sign of zeros, and has every dtype, random keys included. Padding is never read. For
every index, in bounds or not, negative ones included, take and put_add are transposes
of each other: what put_add drops gets no cotangent. Sharp edges: to clamp an index, or
to count from the end, is up to the caller. Reverse mode inside a user's
`shard_map(check_vma=False)` is an error, as for a reduction.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad, batching
from jax.sharding import PartitionSpec as P

from drjax import _compat
from drjax._compat import UndefinedPrimal
from drjax._compat.jax_types import Primitive
from drjax._compat.types import (
    Array,
    Aval,
    DeviceArray,
    Eqn,
    GlobalArray,
    Mesh,
    PartitionedArray,
)
from drjax._jaxprs.prng_keys import is_key, on_raw
from drjax._partition import Partition
from drjax._plan.schedule_moves import Schedule, Sources, schedule
from drjax._primitives import registration
from drjax._primitives.collectives import (
    checked_transpose,
    register_linear,
)
from drjax._primitives.device_sums import accumulator, reduce_scatter
from drjax._sharding.execute import as_operand, shard_map_over_devices, vary
from drjax._sharding.layout import Layout, make_layout

permute_p = registration.new_block("permute")
take_p = registration.new_block("take")
put_add_p = registration.new_block("put_add")
# The primitives that move slices between groups, by their names in plans.
MOVES = {"permute": permute_p, "take": take_p, "put_add": put_add_p}


# ---------------------------------------------------------------------------------
# Bits: what a collective can send, and add to zeros without a change


def _move_bits(move: Callable[[Array], Array], x: Array, *, adds: bool = True) -> Array:
    """Move slices `[k, *s]` of any dtype, random keys included, as integers.

    `move` may use a collective that adds slices to zeros. On integers this is an exact
    copy; on floats it would change NaNs and the sign of zeros. So `move` gets the bits
    of floats as unsigned integers; bools as uint8; the raw data of random keys; of
    complex numbers the bits of real and imaginary parts, along a new last axis; and
    integers as they are. It keeps the dtype, and each element of its result must be an
    element of its operand, or zero. Where it `adds` nothing, float32 and float64 are
    moved as they are, without the copies that a cast of bits is on CPU; collectives of
    smaller floats are not copies on all platforms.
    """
    dtype = x.dtype
    if is_key(dtype):
        return on_raw(move, x)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        parts = jnp.stack([jnp.real(x), jnp.imag(x)], -1)
        parts = _move_bits(move, parts, adds=adds)
        return lax.complex(parts[..., 0], parts[..., 1])
    if dtype == jnp.bool_:
        return move(x.astype(jnp.uint8)) != 0
    if jnp.issubdtype(dtype, jnp.integer) or not adds and dtype.itemsize > 2:
        return move(x)
    bits = jnp.dtype(f"uint{8 * dtype.itemsize}")
    return lax.bitcast_convert_type(move(lax.bitcast_convert_type(x, bits)), dtype)


# ---------------------------------------------------------------------------------
# permute: [n, *s] -> [n, *s] by a static permutation


def execute_permute(
    x: PartitionedArray,
    *,
    sources: Sequence[int],
    partition: Partition,
    mesh: Mesh | None,
) -> PartitionedArray:
    """Give group j the slice of group `sources[j]`, by the collectives of a `Schedule`.

    Without a mesh it is an index.
    """
    layout = make_layout(partition, mesh)
    if not layout.axes:
        return on_raw(lambda x: _read(x, np.asarray(sources, np.int32)[None], None), x)

    return _take_known(x, sources, layout, layout)


def _take_known(
    x: PartitionedArray, sources: Sequence[int], layout: Layout, result: Layout
) -> PartitionedArray:
    """Give group j the slice of group `sources[j]`, on a mesh; zeros without one."""

    def move(x: DeviceArray, device: Array) -> DeviceArray:
        plan = _schedule(x, sources, layout)
        y = _read(_received(layout, plan, x, device), plan.positions, device)
        if plan.all_filled:
            return y
        filled = lax.broadcast_in_dim(_of_device(plan.filled, device), y.shape, (0,))
        return jnp.where(filled, y, jnp.zeros((), y.dtype))

    def body(x: DeviceArray, first: Array) -> list[DeviceArray]:
        device = first[0] // layout.per_device
        return [_move_bits(lambda x: move(x, device), x, adds=False)]

    return _run_on_devices(layout, body, x, result=result)


def _schedule(x: DeviceArray, sources: Sequence[int], layout: Layout) -> Schedule:
    """Make the `Schedule` of a move from the groups of a layout, of slices of x."""
    nbytes = math.prod(x.shape[1:]) * x.dtype.itemsize
    return schedule(sources, layout.partition.size, layout.devices, nbytes)


def _received(
    layout: Layout, plan: Schedule, x: DeviceArray, device: Array
) -> DeviceArray:
    """Send slices to other devices; concatenate own ones and those received."""
    parts = [x] if plan.own else []
    for step in plan.steps:
        # A ppermute takes operands that vary over all of its axes.
        sent = vary(_read(x, step.slots, device), layout.axes)
        parts.append(lax.ppermute(sent, layout.axes, step.pairs))
    if plan.exchanged.size:
        sent = vary(_read(x, plan.exchanged, device), layout.axes)
        parts.append(lax.all_to_all(sent, layout.axes, 0, 0, tiled=True))
    return jnp.concatenate(parts)


def _sent_back(layout: Layout, plan: Schedule, x: DeviceArray) -> DeviceArray:
    """Send slices back to where a schedule sends them from: transpose `_received`.

    Its own, the first ones, stay. Those that a device gets are for its slots
    `plan.slots`; where a `ppermute` has none for it, they are zeros.
    """
    parts, start = [lax.slice_in_dim(x, 0, plan.own)], plan.own
    for step in plan.steps:
        end = start + step.slots.shape[1]
        sent = vary(lax.slice_in_dim(x, start, end), layout.axes)
        pairs = [(receiver, sender) for sender, receiver in step.pairs]
        parts.append(lax.ppermute(sent, layout.axes, pairs))
        start = end
    if plan.exchanged.size:
        sent = vary(lax.slice_in_dim(x, start, None), layout.axes)
        parts.append(lax.all_to_all(sent, layout.axes, 0, 0, tiled=True))
    return jnp.concatenate(parts)


_MOST_RUNS = 8  # of slices that are copied one by one


def _read(x: Array, table: np.ndarray, device: Array | None) -> Array:
    """Return `x[table[device]]`; with None, the table is for one device.

    If its indices are a few runs of consecutive slices, all forwards or all backwards,
    of equal lengths on all devices, the runs are copied one by one: a table in memory
    and a gather would cost more than what is moved.
    """
    if (table == table[:1]).all():
        table, device = table[:1], None
    steps = np.diff(table, axis=1)
    cuts_by_step = {i: np.flatnonzero((steps != i).any(0)) + 1 for i in (1, -1)}
    step, cuts = min(cuts_by_step.items(), key=lambda item: len(item[1]))
    if len(cuts) >= _MOST_RUNS:
        return x[table[0] if device is None else _of_device(table, device)]
    runs = []
    for first, end in itertools.pairwise([0, *cuts.tolist(), table.shape[1]]):
        starts = table[:, first if step == 1 else end - 1]
        if device is None:
            start = int(starts[0])
            run = lax.slice_in_dim(x, start, start + end - first)
        else:
            run = lax.dynamic_slice_in_dim(x, _of_device(starts, device), end - first)
        runs.append(run if step == 1 else lax.rev(run, (0,)))
    return jnp.concatenate(runs)


def _of_device(table: np.ndarray, device: Array) -> Array:
    """Return `table[device]`, of a device that its code knows."""
    return lax.dynamic_index_in_dim(jnp.asarray(table), device, keepdims=False)


def is_permutation(index: Sequence[int] | np.ndarray, n: int) -> bool:
    """Return whether an index has each of 0 to n - 1 exactly once."""
    return len(index) == n and bool((np.sort(index) == np.arange(n)).all())


def inverse(sources: Sequence[int]) -> Sources:
    """Return the inverse of a permutation of 0 to n - 1.

    If the permutation takes slice `sources[j]` to j, its inverse takes it back: element
    i of the result is the j with `sources[j] = i`.
    """
    result = np.empty(len(sources), np.int64)
    result[np.asarray(sources, np.int64)] = np.arange(len(sources))
    return Sources(result)


# <permute(x), y> = sum_j <x[s(j)], y_j> = sum_i <x_i, y[s^-1(i)]>
def _permute_transpose(
    ct: PartitionedArray, x: UndefinedPrimal, *, sources: Sequence[int], **params: Any
) -> list[PartitionedArray]:
    return [permute_p.bind(ct, sources=inverse(sources), **params)]


# ---------------------------------------------------------------------------------
# take: [n, *s], index [k] -> [k, *s]


def execute_take(
    x: PartitionedArray,
    index: GlobalArray,
    *,
    partition: Partition,
    mesh: Mesh | None,
    sources: Sequence[int] | None = None,
) -> PartitionedArray:
    """Give group j the slice of group `index[j]`.

    On a mesh it is a `Schedule` if the index is known; else one reduce-scatter, or an
    all-gather of `x` if the result has more slots (groups per device times devices)
    than `x`.
    """
    layout = make_layout(partition, mesh)
    if not layout.axes:
        return on_raw(lambda x: _slices_at(x, index), x)
    result = _layout_of_index(index, partition, mesh)
    if sources is not None:
        return _take_known(x, sources, layout, result)
    # Slots beyond the groups are padding, which no index reads.
    index = jnp.where(index < partition.size, index, layout.num_slots)

    if result.num_slots > layout.num_slots:

        def body_of_many(
            x: DeviceArray, index: Array, first: Array
        ) -> list[DeviceArray]:
            own = _own_index(index, layout, result, first)
            return [_move_bits(lambda x: _slices_at(_all_slices(layout, x), own), x)]

        divided = _index_on_devices(index, result, 0)
        return _run_on_devices(layout, body_of_many, x, *divided, result=result)

    def by_sum(x: DeviceArray, index: Array, first: Array) -> DeviceArray:
        # One device has the slice, the others zeros: a sum of bits is a copy.
        move = lambda x: reduce_scatter(result, _slices_at(x, index - first))
        return _move_bits(move, x)

    def on_tpu(x: DeviceArray, index: Array, first: Array) -> DeviceArray:
        device = first[0] // layout.per_device
        # A TPU makes an all-reduce of the reduce-scatter.
        gathered, reduced = layout.num_slots, 2 * result.num_slots
        if _ragged_sends_less(x, result.per_device, min(gathered, reduced)):
            return _take_ragged(x, index, device, layout, result)
        if reduced < gathered:
            return by_sum(x, index, first)
        own = lax.dynamic_slice_in_dim(
            index, device * result.per_device, result.per_device
        )
        return _move_bits(lambda x: _slices_at(_all_slices(layout, x), own), x)

    def body(x: DeviceArray, index: Array, first: Array) -> list[DeviceArray]:
        # A padded slot of the result gets zeros.
        index = _pad_index(index, result, layout.num_slots)
        return [_on_platforms(layout, on_tpu, by_sum, x, index, first)]

    return _run_on_devices(layout, body, x, index, result=result)


# Platforms whose compilers have a ragged all-to-all.
_RAGGED_PLATFORMS = ("tpu",)
# It pads a slice to a multiple of so many bytes.
_RAGGED_UNIT = 512


def _on_platforms(
    layout: Layout,
    on_tpu: Callable[..., DeviceArray],
    other: Callable[..., DeviceArray],
    *args: Array,
) -> DeviceArray:
    """Call the function for the platform for which the program is lowered."""
    args = tuple(vary(x, layout.axes) for x in args)
    platforms = dict.fromkeys(_RAGGED_PLATFORMS, on_tpu)
    return lax.platform_dependent(*args, **platforms, default=other)


def _ragged_sends_less(x: DeviceArray, count: int, slices: int) -> bool:
    """Whether a ragged all-to-all of `count` slices sends less than so many slices.

    TPUs emulate 64-bit numbers, and their compiler knows no ragged all-to-all of these.
    """
    parts = 2 if jnp.issubdtype(x.dtype, jnp.complexfloating) else 1
    if not is_key(x.dtype) and x.dtype.itemsize == 8 * parts:
        return False
    nbytes = math.prod(x.shape[1:]) * x.dtype.itemsize
    padded = -(-nbytes // _RAGGED_UNIT) * _RAGGED_UNIT
    return count * padded <= slices * nbytes


def _take_ragged(
    x: DeviceArray, index: Array, device: Array, layout: Layout, result: Layout
) -> DeviceArray:
    """Give each slot of this device the slice at its index, by a ragged all-to-all.

    Each slice is sent once for each slot that gets it. `index` is that of all slots of
    the result; where it is not one of `layout`, the slot gets zeros.
    """
    owner = _owner(index, layout)
    by_device = owner.reshape(result.devices, result.per_device)
    own = lax.dynamic_index_in_dim(by_device, device, keepdims=False)
    # Slices are sent in the order of the slots that get them.
    order = jnp.argsort(owner != device, stable=True)
    position = index[order] - device * layout.per_device
    # Those that this device has not come last, and are not sent.
    sent = x[position.clip(0, layout.per_device - 1)]
    received = _exchange_ragged(
        layout,
        sent,
        result.per_device,
        sizes=(by_device == device).sum(1),
        sizes_received=_bincount(own, result.devices),
        starts_there=(by_device < device).sum(1),
    )
    # They arrive in the order of their owners, and then of the slots.
    return received[jnp.argsort(jnp.argsort(own, stable=True))]


def _put_ragged(
    x: DeviceArray, index: Array, device: Array, layout: Layout, result: Layout
) -> tuple[DeviceArray, Array]:
    """Send each slice of this device to that of its index, by a ragged all-to-all.

    `index` is that of all slots of `layout`; where it is not one of the result, the
    slice is dropped. Returns the slices that this device gets, and for each its slot;
    there are as many as slots, and those that are none have the slot `per_device`.
    """
    owner = _owner(index, result)
    by_device = owner.reshape(layout.devices, layout.per_device)
    own = lax.dynamic_index_in_dim(by_device, device, keepdims=False)
    earlier = jnp.arange(layout.num_slots) < device * layout.per_device
    received = _exchange_ragged(
        layout,
        x[jnp.argsort(own, stable=True)],
        layout.num_slots,
        sizes=_bincount(own, layout.devices),
        sizes_received=(by_device == device).sum(1),
        starts_there=_bincount(
            jnp.where(earlier, owner, layout.devices), layout.devices
        ),
    )
    slots = jnp.where(
        owner == device, index - device * result.per_device, result.per_device
    )
    return received, slots[jnp.argsort(owner != device, stable=True)]


def _owner(index: Array, layout: Layout) -> Array:
    """Return the devices of slots; for those out of bounds, the number of devices."""
    inside = (index >= 0) & (index < layout.num_slots)
    return jnp.where(inside, index // layout.per_device, layout.devices)


def _bincount(x: Array, size: int) -> Array:
    """Count how often each of 0 to size - 1 is in `x`, int32 `[size]`."""
    return jnp.zeros_like(x, shape=(size,)).at[x].add(1, mode="drop")


def _exchange_ragged(
    layout: Layout,
    x: DeviceArray,
    count: int,
    *,
    sizes: Array,
    sizes_received: Array,
    starts_there: Array,
) -> DeviceArray:
    """Send to each device, in order, so many of the first slices of `x`.

    `starts_there` says where each device puts them among the `count` slices of its
    result, of which the others are zeros.
    """
    starts = jnp.cumsum(sizes) - sizes
    table = [starts, sizes, starts_there, sizes_received]
    table = [vary(t.astype(jnp.int32), layout.axes) for t in table]

    def exchange(x: DeviceArray) -> DeviceArray:
        # Of the type of a slice, which Explicit axes may shard.
        zero = jnp.zeros_like(lax.index_in_dim(x, 0, keepdims=False))
        empty = vary(lax.broadcast(zero, (count,)), layout.axes)
        return lax.ragged_all_to_all(x, empty, *table, axis_name=layout.axes)

    return _move_bits(exchange, x, adds=False)


def _slices_at(x: Array, index: Array) -> Array:
    """Return `x[index]`, with zeros where an index is negative or beyond the end."""
    get = x.at[index].get
    return get(mode="fill", fill_value=0, wrap_negative_indices=False)


# <take(x, i), y> = sum_j <x[i_j], y_j> = sum_k <x_k, sum_{j: i_j = k} y_j>
def _take_transpose(
    ct: PartitionedArray, x: UndefinedPrimal, index: GlobalArray, **params: Any
) -> list[PartitionedArray | None]:
    return [put_add_p.bind(ct, index, **params), None]


# ---------------------------------------------------------------------------------
# put_add: [k, *s], index [k] -> [n, *s]


def execute_put_add(
    x: PartitionedArray,
    index: GlobalArray,
    *,
    partition: Partition,
    mesh: Mesh | None,
    sources: Sequence[int] | None = None,
) -> PartitionedArray:
    """Add the slice of group j to slice `index[j]` of the result, from zeros on.

    The dtype has arithmetic. 16-bit floats are added in float32 on each device, and
    communicated in 16 bits. On a mesh it is the `Schedule` of the take, backwards, if
    the index is known; else one reduce-scatter, or an all-gather of `x` if the result
    has more slots (groups per device times devices) than `x`.
    """
    result = make_layout(partition, mesh)
    wide = accumulator(x.dtype)

    def add(x: Array, index: Array, size: int) -> Array:
        # Of the type of a slice, which Explicit axes may shard.
        zero = jnp.zeros_like(lax.index_in_dim(x, 0, keepdims=False), wide)
        added = (
            lax.broadcast(zero, (size,))
            .at[index]
            .add(x.astype(wide), mode="drop", wrap_negative_indices=False)
        )
        return added.astype(x.dtype)

    if not result.axes:
        return add(x, index, partition.size)
    layout = _layout_of_index(index, partition, mesh)
    if sources is not None:

        def body_of_known(x: DeviceArray, first: Array) -> list[DeviceArray]:
            plan, k = _schedule(x, sources, result), result.per_device
            device = first[0] // layout.per_device
            sent = add(x, _of_device(plan.targets, device), plan.size)
            own, slots = jnp.arange(plan.own), _of_device(plan.slots, device)
            back = _sent_back(layout, plan, sent)
            return [add(back, jnp.concatenate([own, slots]), k)]

        return _run_on_devices(layout, body_of_known, x, result=result)

    dropped = result.num_slots  # the index of padding: beyond all slots
    if result.num_slots > layout.num_slots:

        def body_of_few(
            x: DeviceArray, index: Array, first: Array
        ) -> list[DeviceArray]:
            size = result.per_device
            position = _pad_index(index, layout, dropped)
            position = position - first // layout.per_device * size
            return [add(_all_slices(layout, x), position, size)]

        return _run_on_devices(layout, body_of_few, x, index, result=result)

    def by_sum(x: DeviceArray, index: Array, first: Array) -> DeviceArray:
        own = lax.dynamic_slice_in_dim(index, first[0], layout.per_device)
        return reduce_scatter(result, add(x, own, dropped))

    def on_tpu(x: DeviceArray, index: Array, first: Array) -> DeviceArray:
        # A TPU makes an all-reduce of the reduce-scatter.
        if not _ragged_sends_less(x, layout.per_device, 2 * result.num_slots):
            return by_sum(x, index, first)
        device = first[0] // layout.per_device
        received, slots = _put_ragged(x, index, device, layout, result)
        return add(received, slots, result.per_device)

    def body(x: DeviceArray, index: Array, first: Array) -> list[DeviceArray]:
        index = _pad_index(index, layout, dropped)
        return [_on_platforms(layout, on_tpu, by_sum, x, index, first)]

    return _run_on_devices(layout, body, x, index, result=result)


def partitions_of(eqn: Eqn) -> tuple[Partition, Partition]:
    """Return the partitions of the first operand and of the result of a building block.

    Both are the parameter `partition` of the equation, but for `take` and `put_add`.
    These have an index of k elements as their second operand. The result of a `take`,
    and the first operand of a `put_add`, has k groups, in a partition with the name and
    mesh axes of the parameter.
    """
    partition = eqn.params["partition"]
    if eqn.primitive not in (take_p, put_add_p):
        return partition, partition
    indexed = replace(partition, size=eqn.invars[1].aval.shape[0])
    pair = partition, indexed
    return pair if eqn.primitive is take_p else pair[::-1]


def last_writer(index: Array | np.ndarray, n: int) -> Array | np.ndarray:
    """Find for each of n groups the last one of several that write to it.

    `index` has for each of k groups the group to which it writes, int32 `[k]`; n if it
    writes to none. Element i of the result, int32 `[n]`, is the largest j with
    `index[j] = i`; -1 if there is none. It is of NumPy if `index` is.
    """
    if isinstance(index, np.ndarray):
        known = np.full(n + 1, -1, np.int32)
        np.maximum.at(known, index, np.arange(len(index), dtype=np.int32))
        return known[:n]
    none = jnp.full(n, -1, jnp.int32)
    writers = jnp.arange(index.shape[0], dtype=jnp.int32)
    return none.at[index].max(writers, mode="drop")


# <put_add(x, i), y> = sum_k <sum_{j: i_j = k} x_j, y_k> = sum_j <x_j, y[i_j]>, where
# y[i_j] is zero for an i_j that is no k.
def _put_add_transpose(
    ct: PartitionedArray, x: UndefinedPrimal, index: GlobalArray, **params: Any
) -> list[PartitionedArray | None]:
    return [take_p.bind(ct, index, **params), None]


def _layout_of_index(
    index: GlobalArray | Aval, partition: Partition, mesh: Mesh | None
) -> Layout:
    """Return the layout of a value with a slice for each element of an index `[k]`.

    Its partition has the name and mesh axes of `partition`.
    """
    return make_layout(replace(partition, size=index.shape[0]), mesh)


def _index_on_devices(
    index: GlobalArray, layout: Layout, fill: int
) -> tuple[GlobalArray, P | bool]:
    """Pad an index, and divide it over the devices: two arguments of `_run_on_devices`.

    A global value with an element for each group of the layout, int32, gets the element
    `fill` for padded slots, which are the last ones: int32 `[k * m]` for m devices with
    k slots (places for one group) each. The `PartitionSpec` gives each device the
    elements of its own slots; it is False if the layout is not sharded: then the code
    of each device gets the whole index.
    """
    index = _pad_index(index, layout, fill)
    if not layout.sharded:
        return index, False
    return as_operand(index, layout, True), P(layout.axes)


def _own_index(index: Array, layout: Layout, of: Layout, first: Array) -> Array:
    """Return the elements of a padded index that belong to the slots of this device.

    It is called in the code of one device. A slot is a place for one group, and the
    padded index has an element for each slot of the layout `of`. If that layout is
    sharded, `_run_on_devices` has divided the index over the devices already, and it is
    returned, `[k]`. Inside a user's `shard_map` over the partition's axes, each device
    has the whole index, `[k * m]`, and its part `[k]` is cut out.

    `first` is the group index of this device's first slot in `layout`, int32 `[1]`;
    `layout` is `of`, or another layout on the same devices. They tell which device this
    is.
    """
    if of.sharded:
        return index
    start = first[0] // layout.per_device * of.per_device
    own = lax.dynamic_slice_in_dim(index, start, of.per_device)
    return vary(own, layout.axes)


def _all_slices(layout: Layout, x: DeviceArray) -> Array:
    """Gather the slices of all devices' slots, `[k * m, *s]`, by an all-gather.

    They are in the order of the groups, padding last, and the same on all devices.
    """
    return lax.all_gather(vary(x, layout.axes), layout.axes, tiled=True)


def _run_on_devices(
    layout: Layout,
    body: Callable[..., list[DeviceArray]],
    x: PartitionedArray,
    index: GlobalArray | None = None,
    spec: P | bool = False,
    result: Layout | None = None,
) -> PartitionedArray:
    """Run a function of one device's slices on all devices, to move slices.

    On a sharded layout, the function runs in a `shard_map` over the partition's mesh
    axes. Inside a user's `shard_map` over these axes it is called without another one,
    as the arguments and the result are those of one device already.

    `body(x, first)`, or with an index `body(x, index, first)`, takes the device's
    slices, the index, and the group index of the device's first slot, int32 `[1]`. The
    index, int32, is divided over the devices by `spec`; False: each device gets all of
    it. `layout` is that of `x`; `result` is that of the result, if it is another one.
    """
    args, specs = ([x], [True]) if index is None else ([x, index], [True, spec])
    return shard_map_over_devices(
        layout, body, args, specs, [True], with_first_index=True, result_layout=result
    )[0]


def _pad_index(index: Array, layout: Layout, fill: int) -> Array:
    """Append `fill` to an index, so that it has an element for each slot of a layout.

    A slot is a place for one group on a device; the last slots may be padding. The
    index is `[n]`, and then `[k * m]` for m devices with k slots each.
    """
    extra = layout.num_slots - layout.partition.size
    return lax.pad(index, jnp.asarray(fill, index.dtype), [(0, extra, 0)])


# ---------------------------------------------------------------------------------
# All registrations


def _abstract_eval(
    x: Aval, *index: Aval, partition: Partition, mesh: Mesh | None, **_: Any
) -> Aval:
    # The execution works on bits, and the result of a cast is not weakly typed.
    return x.update(weak_type=False)


def _abstract_take(
    x: Aval, index: Aval, *, partition: Partition, mesh: Mesh | None, **_: Any
) -> Aval:
    return _aval_with_groups(x, _layout_of_index(index, partition, mesh))


def _abstract_put_add(
    x: Aval, index: Aval, *, partition: Partition, mesh: Mesh | None, **_: Any
) -> Aval:
    return _aval_with_groups(x, make_layout(partition, mesh))


def _aval_with_groups(x: Aval, layout: Layout) -> Aval:
    """Return the type of a partitioned value with the slices of another, and n groups.

    It is the type of `x`, `[k, *s]`, but `[n, *s]`, and not weakly typed. Inside a
    user's `shard_map` over the partition's axes, n is the number of groups of a device.
    """
    shape = (layout.group_axis_size, *x.shape[1:])
    return x.update(shape=shape, weak_type=False)


def _batch_indexed(primitive: Primitive) -> Callable:
    """Make the batching rule of `take_p` or `put_add_p`.

    If only the value is batched, the rule binds the primitive once, with the batch
    dimension behind the group axis. If the index is batched, it binds the primitive for
    one element of the batch after the other, in a `lax.map`, and the batch dimension of
    the result is axis 0.
    """

    def rule(args: Sequence[Array], dims: Sequence, **params: Any) -> tuple[Array, int]:
        (x, index), (x_dim, index_dim) = args, dims
        if index_dim is None:
            x, dim = registration.group_axis_first(x, x_dim)
            return primitive.bind(x, index, **params), dim
        params |= {"sources": None}  # it differs by element of the batch
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
