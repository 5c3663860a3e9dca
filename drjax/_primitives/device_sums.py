"""Sums over the devices of a partition: the collectives of additive reductions.

Input: the values of one device, inside a `shard_map` over the partition's axes. Output:
their sums over the m devices, on all of them, or on each device its part.

    all-reduce      a psum, of values that need no other one
    reduce-scatter  a value whose result is sharded
    encoded         with `Wire`: the values of all devices are encoded, exchanged by an
                    all-to-all, added in float32, encoded again, and all-gathered

An encoded sum of d numbers in blocks of b sends d codes and d / b scales twice. With
s_i the sum of device i, max|s| over a block, and e the largest relative error of a
code (1/254 of the block's maximum for int8), the error of a number is at most

    e (sum_i max|s_i| + max|y|),   y the sum of the decoded s_i

Invariants: a result without a scattered axis is the same on all devices, and does not
vary by its type. Values are the same without a mesh, but for rounding.
Sharp edges: encoded values are flattened, which gathers them over mesh axes that are
not the partition's. JAX 0.12 lowers no reduce-scatter where such an axis is Explicit.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from drjax import _compat
from drjax._compat.types import Array
from drjax._plan.wire import Wire
from drjax._primitives.wire_codes import decode, encode
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
    return sum_over_devices(layout, lambda *xs: lax.psum(xs, layout.axes), *xs)


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


def reduce_scatter(layout: Layout, x: Array, axis: int = 0) -> Array:
    """Sum a value over the partition's devices; each device keeps its part of the sum.

    It is called inside a `shard_map` over the partition's axes, on m devices; device j
    gets the j-th of m equal parts along `axis`, whose size is a multiple of m. JAX 0.12
    does not lower `psum_scatter` if the mesh has another axis that is Explicit; then it
    is an all-to-all, and a sum on each device. So it is for numbers of 64 bits and
    complex ones on TPUs, whose compiler knows no reduce-scatter of them, or makes an
    all-reduce of it.
    """

    def by_parts(x: Array) -> Array:
        parts = lax.all_to_all(x, layout.axes, axis, axis, tiled=True)
        before, after = x.shape[:axis], x.shape[axis + 1 :]
        parts = parts.reshape(*before, layout.devices, -1, *after)
        return jnp.sum(parts, axis=axis, dtype=accumulator(x.dtype)).astype(x.dtype)

    def scattered(x: Array) -> Array:
        scatter = lambda x: (
            lax.psum_scatter(x, layout.axes, scatter_dimension=axis, tiled=True),
        )
        return sum_over_devices(layout, scatter, x)[0]

    x = vary(x, layout.axes)
    if layout.other_explicit_axes:
        return by_parts(x)
    if x.dtype.itemsize < 8:
        return scattered(x)
    return lax.platform_dependent(x, tpu=by_parts, default=scattered)


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
    all-to-all and one all-gather. Each other value that is divided has a
    reduce-scatter. On one device nothing is encoded or divided; without mesh axes, the
    values are returned as they are.

    `axes` has for each value `[*s]` the axis along which its sum is divided, so that
    this device gets an m-th of it; or None for the whole sum. A sum has the dtype of
    its value; encoded values are added in float32, also float64 ones.
    """
    results = list(xs)
    if not layout.axes:
        return results
    plain: list[int] = []
    encoded: dict[Wire, list[int]] = {}
    for i, (wire, axis) in enumerate(zip(wires, axes, strict=True)):
        if layout.devices == 1 or (wire is None and axis is None):
            plain.append(i)
        elif wire is not None:
            encoded.setdefault(wire, []).append(i)
        elif axis is not None:
            results[i] = reduce_scatter(layout, xs[i], axis)
    if plain:
        for i, y in zip(plain, psum(layout, *(xs[i] for i in plain)), strict=True):
            results[i] = y
    for wire, members in encoded.items():
        values, divided = ([ys[i] for i in members] for ys in (xs, axes))
        add = functools.partial(_add_encoded, layout, wire, divided)
        sums = on_own_shards(layout, add, values)
        for i, y in zip(members, sums, strict=True):
            results[i] = y
    return results


def _add_encoded(
    layout: Layout, wire: Wire, axes: list, xs: list[Array]
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
    sent = encode(jnp.concatenate(parts, axis=1), wire)
    received = lax.all_to_all(vary(sent, layout.axes), layout.axes, 0, 0, tiled=True)
    total = jnp.sum(decode(received, wire), axis=0)
    sums = _split(total, [part.shape[1] for part in parts])
    # Those that each device needs whole are encoded again.
    whole = [i for i, axis in enumerate(axes) if axis is None]
    if whole:
        own = encode(jnp.concatenate([sums[i] for i in whole]), wire)
        every = decode(_all_gather_bytes(layout, own), wire)
        gathered = _split(every, [parts[i].shape[1] for i in whole])
        for i, x in zip(whole, gathered, strict=True):
            sums[i] = x
    return [
        _undivide(y, x, axis, m).astype(x.dtype)
        for y, x, axis in zip(sums, xs, axes, strict=True)
    ]


def _all_gather_bytes(layout: Layout, x: Array) -> Array:
    """All-gather bytes: from uint8 `[k]` on each of m devices to `[m, k]` on all.

    XLA makes an all-reduce, of twice the traffic, of an all-gather whose parts are no
    whole tiles on a TPU. So parts are padded to tiles there.
    """
    # With VMA checking, the type says that all devices have the same result.
    to = "invarying" if _compat.check_vma() else "varying"
    gather = lambda x: lax.all_gather(x, layout.axes, to=to)
    size = x.shape[0]
    padding = -size % _TPU_TILE
    if not padding:
        return gather(x)
    in_tiles = lambda x: gather(jnp.pad(x, (0, padding)))[:, :size]
    return lax.platform_dependent(x, tpu=in_tiles, default=gather)


def _split(x: Array, sizes: Sequence[int]) -> list[Array]:
    """Split an array along its last axis into consecutive pieces of these sizes."""
    return jnp.split(x, list(itertools.accumulate(sizes))[:-1], axis=-1)


def _divide(x: Array, axis: int | None, m: int, wire: Wire) -> Array:
    """Cut a value into m parts, of which device j of m will add up the j-th.

    The value `[*s]` is cut along an axis, whose size is a multiple of m; None: it is
    flattened, and cut. The result is float32 `[m, c]`: each part is flat, and padded
    with zeros to a whole number of the encoding's blocks.
    """
    x = x.astype(jnp.float32)
    if axis is None:
        width = _whole_blocks(-(-x.size // m), wire)
        return jnp.pad(x.reshape(-1), (0, m * width - x.size)).reshape(m, width)
    parts = jnp.moveaxis(x, axis, 0).reshape(m, -1)
    width = _whole_blocks(parts.shape[1], wire)
    return jnp.pad(parts, ((0, 0), (0, width - parts.shape[1])))


def _whole_blocks(count: int, wire: Wire) -> int:
    """Round a number of elements up to a multiple of the encoding's block size."""
    return -(-count // wire.block) * wire.block


def _undivide(sums: Array, x: Array, axis: int | None, m: int) -> Array:
    """Give the sums of a value its shape again, without padding: invert `_divide`.

    `x` is the value that was divided; only its shape `[*s]` is read. With an axis,
    `sums` is `[c]`, of this device's part, and so is the result: `[*s]` but an m-th
    along the axis. Else `sums` is `[m, c]`, and the result `[*s]`; both are float32.
    """
    if axis is None:
        return sums.reshape(-1)[: x.size].reshape(x.shape)
    others = (*x.shape[:axis], *x.shape[axis + 1 :])
    part = sums[: x.size // m].reshape(x.shape[axis] // m, *others)
    return jnp.moveaxis(part, 0, axis)
