"""Sums over the devices of a partition: the collectives of additive reductions.

Input: the values of one device, inside a `shard_map` over the partition's axes. Output:
their sums over the m devices, on all of them, or on each device its part.

    all-reduce      a psum, of values that need no other one
    reduce-scatter  a value whose result is sharded
    encoded         with `Wire`: the values of all devices are encoded, exchanged by an
                    all-to-all, added in float32, encoded again, and all-gathered;
                    or all-gathered at once, with `Wire.collectives` of 1

An encoded sum of d numbers in blocks of b sends d codes and d / b scales twice. With
s_i the sum of device i, max|s| over a block, and e the largest relative error of a
code (1/254 of the block's maximum for int8), the error of a number is at most

    e (sum_i max|s_i| + max|y|),   y the sum of the decoded s_i

Invariants: a result without a scattered axis is the same on all devices, and does not
vary by its type. Values are the same without a mesh, but for rounding.
Sharp edges: encoded values are flattened, which gathers them over Auto mesh axes that
are not the partition's; so are those of a reduce-scatter between TPU slices. JAX 0.12
lowers no reduce-scatter where such an axis is Explicit.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from drjax._compat.types import Array
from drjax._plan.wire import Wire
from drjax._primitives.between_slices import (
    after_arrival,
    by_network,
    count_of,
    divide,
    divided_inside_slices,
    on_parts,
    same,
)
from drjax._primitives.wire_codes import decode, encode, in_lanes
from drjax._sharding.execute import on_own_shards, vary
from drjax._sharding.layout import Layout

LOW_PRECISION = (jnp.bfloat16, jnp.float16)
_TPU_TILE = 1024  # of a vector of bytes


def accumulator(dtype: DTypeLike) -> DTypeLike:
    """Return the dtype in which a device adds up values of a dtype.

    It is float32 for 16-bit floats, else `dtype` itself.
    """
    return jnp.float32 if dtype in LOW_PRECISION else dtype


def psum(layout: Layout, *xs: Array) -> Sequence[Array]:
    """Sum each of several values over the partition's devices, in one `lax.psum`.

    It is called inside a `shard_map` over the partition's axes; on a layout without
    axes (no mesh), the values are returned as they are.
    """
    if not layout.axes:
        return xs
    add = lambda *xs: lax.psum(xs, layout.axes)
    total = functools.partial(sum_over_devices, layout, add)
    return divided_inside_slices(layout.axes, total, xs)


def sum_over_devices(
    layout: Layout, collective: Callable[..., tuple[Array, ...]], *xs
) -> tuple[Array, ...]:
    """Run a collective that sums over the partition's devices.

    XLA's CPU compiler promotes an all-reduce of bfloat16 to float32. If the mesh has
    axes that are not Manual (`layout.partly_manual`), it aborts the process as it does
    so. So in this case, and if the program is lowered for CPU, this function casts
    bfloat16 values to float32 before the collective, and the sums back after it. The
    bytes on the network and the sums are those of the compiler's promotion.

    `collective(*xs)`, such as a psum, gets the device's values, cast to vary over the
    partition's axes, and returns a result for each. The layout has mesh axes.
    """
    # With VMA checking, collectives take values that vary over all of their axes.
    xs = [vary(x, layout.axes) for x in xs]
    if not layout.partly_manual or all(x.dtype != jnp.bfloat16 for x in xs):
        return collective(*xs)

    def promoted(*xs: Array) -> tuple[Array, ...]:
        wide = [x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x for x in xs]
        sums = collective(*wide)
        return tuple(y.astype(x.dtype) for x, y in zip(xs, sums, strict=True))

    # The platform is known only at lowering: a program may be traced without devices.
    return lax.platform_dependent(*xs, cpu=promoted, default=collective)


def reduce_scatter(
    layout: Layout, x: Array, axis: int = 0, own_shards: bool = False
) -> Array:
    """Sum a value over the partition's devices; each device keeps its part of the sum.

    It is called inside a `shard_map` over the partition's axes, on m devices; device j
    gets the j-th of m equal parts along `axis`, whose size is a multiple of m. JAX 0.12
    does not lower `psum_scatter` if the mesh has another axis that is Explicit; then it
    is an all-to-all, and a sum on each device. So it is for numbers of 64 bits and
    complex ones on TPUs, whose compiler knows no reduce-scatter of them, or makes an
    all-reduce of it. With `own_shards` no axis is Explicit where it is called.
    """

    def by_parts(x: Array) -> Array:
        parts = lax.all_to_all(x, layout.axes, axis, axis, tiled=True)
        before, after = x.shape[:axis], x.shape[axis + 1 :]
        parts = parts.reshape(*before, layout.devices, -1, *after)
        return jnp.sum(parts, axis=axis, dtype=accumulator(x.dtype)).astype(x.dtype)

    scattered = functools.partial(_psum_scatter, layout, axis=axis)
    x = vary(x, layout.axes)
    if layout.other_explicit_axes and not own_shards:
        return by_parts(x)
    if x.dtype.itemsize < 8:
        return scattered(x)
    return lax.platform_dependent(x, tpu=by_parts, default=scattered)


def _psum_scatter(layout: Layout, x: Array, axis: int) -> Array:
    """Run `lax.psum_scatter` over the partition's devices."""
    scatter = lambda x: (
        lax.psum_scatter(x, layout.axes, scatter_dimension=axis, tiled=True),
    )
    return sum_over_devices(layout, scatter, x)[0]


def scattered_axis(
    layout: Layout, shape: Sequence[Any], spec: Iterable = ()
) -> int | None:
    """Find the axis along which a `result="sharded"` is divided over the devices.

    It is the first axis of `shape` whose size is positive, a multiple of the number of
    devices and not symbolic, and whose entry in `spec`, the leading entries of a
    `PartitionSpec`, is None: else an Explicit mesh axis shards it already. None if
    there is no such axis, or if the layout is not sharded: each device has the whole
    result.
    """
    if not layout.sharded:
        return None
    taken = (*spec, *[None] * len(shape))
    for axis, size in enumerate(shape):
        if taken[axis] is None and isinstance(size, int) and size:
            if size % layout.devices == 0:
                return axis
    return None


def add_devices(
    layout: Layout,
    xs: Sequence[Array],
    wires: Sequence[Wire | None],
    axes: Sequence[int | None],
) -> list[Array]:
    """Sum each of several values over the partition's devices, each in its own way.

    On several devices, all values that are neither encoded nor divided share one
    all-reduce. Values with equal `Wire`s, floats, are encoded together: they share one
    all-to-all and one all-gather; or if they are whole sums of a `Wire` of one
    collective, an all-gather. Each other value that is divided has a reduce-scatter. On
    one device nothing is encoded or divided; without mesh axes, the values are returned
    as they are.

    `axes` has for each value `[*s]` the axis along which its sum is divided, so that
    this device gets an m-th of it; or None for the whole sum. A sum has the dtype of
    its value; encoded values are added in float32, also float64 ones.
    """
    results = list(xs)
    if not layout.axes:
        return results
    plain: list[int] = []
    encoded: dict[Wire, list[int]] = {}
    gathered: dict[Wire, list[int]] = {}
    scattered: dict[Any, list[int]] = {}
    for i, (wire, axis) in enumerate(zip(wires, axes, strict=True)):
        if layout.devices == 1 or (wire is None and axis is None):
            plain.append(i)
        elif wire is not None:
            at_once = wire.collectives == 1 and axis is None
            (gathered if at_once else encoded).setdefault(wire, []).append(i)
        else:
            scattered.setdefault(xs[i].dtype, []).append(i)
    if plain:
        for i, y in zip(plain, psum(layout, *(xs[i] for i in plain)), strict=True):
            results[i] = y
    codes, two, scatter = (
        (_add_codes_of_shards, _add_codes_of_parts),
        (_add_encoded_shards, _add_parts),
        (_scatter_each, _add_parts),
    )
    for wire, members, (add, add_parts) in (
        *((wire, members, codes) for wire, members in gathered.items()),
        *((wire, members, two) for wire, members in encoded.items()),
        *((None, members, scatter) for members in scattered.values()),
    ):
        values, divided = [xs[i] for i in members], [axes[i] for i in members]
        whole = functools.partial(add, layout, wire, divided)
        parts = functools.partial(add_parts, layout, wire, divided)
        sums = by_network(layout.axes, whole, parts, values)
        for i, y in zip(members, sums, strict=True):
            results[i] = y
    return results


def _scatter_each(
    layout: Layout, wire: None, axes: Sequence[Any], *xs: Array
) -> list[Array]:
    """Sum each value over the devices, of which each keeps its part along an axis."""
    return [reduce_scatter(layout, x, axis) for x, axis in zip(xs, axes, strict=True)]


def _add_encoded_shards(
    layout: Layout, wire: Wire, axes: Sequence[int | None], *xs: Array
) -> list[Array]:
    """Run `_add_encoded` on a device's own shards of what Explicit axes shard."""
    add = functools.partial(_add_encoded, layout, wire, axes)
    return on_own_shards(layout, add, list(xs))


def _add_encoded(
    layout: Layout, wire: Wire, axes: Sequence[int | None], xs: list[Array]
) -> list[Array]:
    """Sum floats over the devices: encoded, in one all-to-all and one all-gather.

    The all-to-all gives device j the j-th part of each device's values, which it adds
    in float32. The all-gather, of sums that are encoded again, is for the values that
    each device needs whole; without such values there is none. Axes and sums are those
    of `add_devices`.
    """
    m = layout.devices
    # Part j of each `[m, c]` has the numbers that device j adds up.
    parts = [_divide(x, axis, m, wire) for x, axis in zip(xs, axes, strict=True)]
    total = _sum_of_codes(layout, wire, jnp.concatenate(parts, axis=1))
    sums = _split(total, [part.shape[1] for part in parts])
    # Those that each device needs whole are encoded again.
    whole = [i for i, axis in enumerate(axes) if axis is None]
    if whole:
        own = encode(jnp.concatenate([sums[i] for i in whole]), wire)
        every = decode(all_gather_bytes(layout.axes, own), wire)
        gathered = _split(every, [parts[i].shape[1] for i in whole])
        for i, x in zip(whole, gathered, strict=True):
            sums[i] = x
    return [
        _undivide(y, x, axis, m).astype(x.dtype)
        for y, x, axis in zip(sums, xs, axes, strict=True)
    ]


def _add_codes(
    layout: Layout, wire: Wire, inside: tuple[str, ...], *xs: Array
) -> list[Array]:
    """Sum floats by one all-gather of codes, which devices inside a slice divide."""
    parts = [_divide(x, None, 1, wire) for x in xs]
    joined = jnp.concatenate(parts, axis=1)

    def add(x: Array) -> Array:
        every = all_gather_bytes(layout.axes, encode(x.reshape(-1), wire))
        return jnp.sum(in_lanes(decode(every, wire)), axis=0).reshape(x.shape)

    if inside:
        size = wire.block * count_of(inside)
        joined = jnp.pad(joined, ((0, 0), (0, -joined.shape[1] % size)))
        total = on_parts(inside, add, joined, 1, out=1)
    else:
        total = add(joined)
    sizes = [part.shape[1] for part in parts]
    sums = zip(_split(total[:, : sum(sizes)], sizes), xs, strict=True)
    return [_undivide(y, x, None, 1).astype(x.dtype) for y, x in sums]


def _add_codes_of_shards(
    layout: Layout, wire: Wire, axes: Sequence[None], *xs: Array
) -> list[Array]:
    """Run `_add_codes` on a device's own shards of what Explicit axes shard."""
    add = lambda xs: _add_codes(layout, wire, (), *xs)
    return on_own_shards(layout, add, list(xs))


def _add_codes_of_parts(
    layout: Layout,
    wire: Wire,
    axes: Sequence[None],
    inside: tuple[str, ...],
    *xs: Array,
) -> Sequence[Array]:
    """Run `_add_codes`, of which the devices inside a slice divide what they send."""
    if layout.other_explicit_axes:
        return divide(functools.partial(_add_codes, layout, wire, ()), inside, xs)
    return _add_codes(layout, wire, inside, *xs)


def _add_parts(
    layout: Layout,
    wire: Wire | None,
    axes: Sequence[int | None],
    inside: tuple[str, ...],
    *xs: Array,
) -> Sequence[Array]:
    """Sum values over the devices; the devices inside a slice divide what they send.

    Without a `wire`, the sums are divided over the devices, too, by a reduce-scatter.
    Explicit axes inside a slice divide the values themselves. Whether Auto axes do,
    only the compiler knows, which does not divide these collectives. So the values are
    flattened, as encoded ones are, and divided. Then codes of whole sums are gathered,
    and this device's parts of sums that were not encoded. Those of encoded sums stay
    divided.
    """
    if layout.other_explicit_axes:
        return divide(lambda *xs: _add_whole(layout, wire, axes, xs), inside, xs, axes)
    m, results = layout.devices, list(xs)
    block = 1 if wire is None else wire.block
    for whole in (True, False):
        members = [i for i, axis in enumerate(axes) if (axis is None) == whole]
        if not members:
            continue
        parts = [_divide(xs[i], axes[i], m, wire) for i in members]
        joined = jnp.concatenate(parts, axis=1)
        size = block * count_of(inside)
        joined = jnp.pad(joined, ((0, 0), (0, -joined.shape[1] % size)))
        add = functools.partial(_add_columns, layout, wire, whole, inside)
        stays = wire is not None and not whole
        total = on_parts(inside, add, joined, 1, out=0 if stays else None)
        sizes = [part.shape[1] for part in parts]
        sums = _split(total[..., : sum(sizes)], sizes)
        for i, y in zip(members, sums, strict=True):
            results[i] = _undivide(y, xs[i], axes[i], m).astype(xs[i].dtype)
    return results


def _add_whole(
    layout: Layout,
    wire: Wire | None,
    axes: Sequence[Any],
    xs: Sequence[Array],
) -> list[Array]:
    """Sum values over the devices in code in which no axis is Explicit."""
    if wire is not None:
        return _add_encoded(layout, wire, axes, list(xs))
    pairs = zip(xs, axes, strict=True)
    return [reduce_scatter(layout, x, axis, own_shards=True) for x, axis in pairs]


def _add_columns(
    layout: Layout, wire: Wire | None, whole: bool, inside: tuple[str, ...], x: Array
) -> Array:
    """Sum a device's columns of `[m, c]`, and gather those of its slice.

    x[j] is what device j of m adds up: its sums are `[c]`, and all of them `[m, c]`.
    Encoded sums that are not needed whole stay those of a device's columns.
    """
    if wire is None:
        total = reduce_scatter(layout, x)[0]
    else:
        total = _sum_of_codes(layout, wire, x)
    if wire is not None and not whole:
        return total
    if wire is None:
        gather = lambda x: [lax.all_gather(x, inside, tiled=True, to=same())]
        return after_arrival(gather, total)[0]
    of_devices = all_gather_bytes(layout.axes, encode(total, wire))
    gather = lambda x: [all_gather_bytes(inside, x)]
    (of_slice,) = after_arrival(gather, of_devices.reshape(-1))
    sums = decode(of_slice.reshape(-1, *of_devices.shape), wire)
    return jnp.moveaxis(sums, 0, 1).reshape(len(x), -1)


def _sum_of_codes(layout: Layout, wire: Wire, x: Array) -> Array:
    """Send x[j] of float32 `[m, c]` to device j, encoded, which adds up its own."""
    codes = encode(x, wire)
    sent = vary(in_lanes(codes), layout.axes)
    received = lax.all_to_all(sent, layout.axes, 0, 0, tiled=True)
    numbers = decode(received.reshape(codes.shape), wire)
    return jnp.sum(in_lanes(numbers), axis=0).reshape(-1)


def all_gather_bytes(axes: tuple[str, ...], x: Array) -> Array:
    """All-gather bytes: from uint8 `[k]` on each of m devices to `[m, k]` on all.

    XLA makes an all-reduce, of twice the traffic, of an all-gather whose parts are no
    whole tiles on a TPU. So parts are padded to tiles there.
    """
    size = x.shape[0]
    x = in_lanes(x)
    gather = lambda x: lax.all_gather(x, axes, to=same())
    if size % _TPU_TILE:
        edges = [(0, -size % _TPU_TILE * x.shape[0] // size), (0, 0)][: x.ndim]
        in_tiles = lambda x: gather(jnp.pad(x, edges))[:, : x.shape[0]]
        every = lax.platform_dependent(x, tpu=in_tiles, default=gather)
    else:
        every = gather(x)
    return every.reshape(every.shape[0], size)


def _split(x: Array, sizes: Sequence[int]) -> list[Array]:
    """Split an array along its last axis into consecutive pieces of these sizes."""
    return jnp.split(x, list(itertools.accumulate(sizes))[:-1], axis=-1)


def _divide(x: Array, axis: int | None, m: int, wire: Wire | None) -> Array:
    """Cut a value into m parts, of which device j of m will add up the j-th.

    The value `[*s]` is cut along an axis, whose size is a multiple of m; None: it is
    flattened, and cut. The result is `[m, c]`: each part is flat; to be encoded, it is
    float32, and padded with zeros to a whole number of the encoding's blocks.
    """
    x = x if wire is None else x.astype(jnp.float32)
    if axis is None:
        width = _whole_blocks(-(-x.size // m), wire)
        return jnp.pad(x.reshape(-1), (0, m * width - x.size)).reshape(m, width)
    parts = jnp.moveaxis(x, axis, 0).reshape(m, -1)
    width = _whole_blocks(parts.shape[1], wire)
    return jnp.pad(parts, ((0, 0), (0, width - parts.shape[1])))


def _whole_blocks(count: int, wire: Wire | None) -> int:
    """Round a number of elements up to a multiple of the encoding's block size."""
    block = 1 if wire is None else wire.block
    return -(-count // block) * block


def _undivide(sums: Array, x: Array, axis: int | None, m: int) -> Array:
    """Give the sums of a value its shape again, without padding: invert `_divide`.

    `x` is the value that was divided; only its shape `[*s]` is read. With an axis,
    `sums` is `[c]`, of this device's part, and so is the result: `[*s]` but an m-th
    along the axis. Else `sums` is `[m, c]`, and the result `[*s]`.
    """
    if axis is None:
        return sums.reshape(-1)[: x.size].reshape(x.shape)
    others = (*x.shape[:axis], *x.shape[axis + 1 :])
    part = sums[: x.size // m].reshape(x.shape[axis] // m, *others)
    return jnp.moveaxis(part, 0, axis)
