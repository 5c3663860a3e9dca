"""The lowering of `map_columns`, for `reduce_columns`: by an all-to-all, or a gather.

A column has the elements of all groups at one coordinate of their slices.

Input: the jaxpr of one coordinate, and operands of the kinds of `map_columns`. Output:
results for all coordinates.

On m devices, with k groups and d coordinates each, d padded to a multiple of m:

    "groups"       [k, d] -> all-to-all -> [n, d / m]      and back for a result
    "coordinates"  [d]    -> slice      -> [d / m]         an all-gather for a result
    "whole"        []     -> as it is                      an all-reduce for a result

Invariants: the jaxpr sees columns of exactly n groups, as padding of the group axis is
cut off before. Padding of the coordinates consists of copies of the first one, and is
left out of sums. Sharp edges: the jaxpr was traced without VMA checking, so it runs
without it; its results then vary over all axes over which an operand varies.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from drjax import _compat
from drjax._compat.types import (
    Array,
    ClosedJaxpr,
    GlobalArray,
    Mesh,
    Params,
    PartitionedArray,
)
from drjax._partition import Partition
from drjax._primitives.collectives import (
    execute_gather,
    execute_scatter,
)
from drjax._primitives.device_sums import accumulator, psum
from drjax._primitives.map_fn import lowers_by_vmap, prepare_for_shard_map
from drjax._sharding.execute import shard_map_over_devices, vary
from drjax._sharding.layout import Layout, make_layout

GROUPS, COORDINATES, WHOLE = "groups", "coordinates", "whole"
# One of these for each operand or result, in order. As a parameter of an equation, and
# in keys of caches, it is a tuple.
Kinds: TypeAlias = Sequence[str]


def execute_columns(
    *args: Array,
    jaxpr: ClosedJaxpr,
    kinds_in: Kinds,
    kinds_out: Kinds,
    coordinates: Sequence[int],
    partition: Partition,
    mesh: Mesh | None,
    name: str,
) -> list[Array]:
    """Apply a jaxpr to each coordinate; `map_columns.py` describes the kinds."""
    layout = make_layout(partition, mesh)
    shape, kinds = tuple(coordinates), (kinds_in, kinds_out)
    if lowers_by_vmap(layout, jaxpr):
        run = functools.partial(
            evaluate_columns,
            jaxpr=jaxpr,
            kinds_in=kinds_in,
            kinds_out=kinds_out,
            coordinates=shape,
            partition=partition,
        )
        params = {"partition": partition, "mesh": mesh}
        return by_gather_and_scatter(
            run, args, kinds, execute_gather, execute_scatter, params
        )
    fn = _compat.jaxpr_as_checked_fun(prepare_for_shard_map(layout, jaxpr))

    def body(*args) -> list[Array]:
        *args, first = args
        device = first[0] // layout.per_device
        return _run_device(layout, fn, kinds, shape, args, device)

    partitioned_in, partitioned_out = (
        [kind == GROUPS for kind in side] for side in kinds
    )
    # The surrounding check_vma: users' loops inside were traced under it.
    return shard_map_over_devices(
        layout,
        body,
        args,
        partitioned_in,
        partitioned_out,
        _compat.check_vma(),
        with_first_index=True,
    )


def evaluate_columns(
    *args: Array,
    jaxpr: ClosedJaxpr,
    kinds_in: Kinds,
    kinds_out: Kinds,
    coordinates: Sequence[int],
    partition: Partition,
    mesh: Mesh | None = None,
    name: str | None = None,
) -> list[Array]:
    """Apply the jaxpr of one coordinate to all coordinates, where all slices are.

    It does on one device what `execute_columns` does; the operands may be tracers.
    """
    del mesh, name
    fn, local = _compat.jaxpr_as_checked_fun(jaxpr), make_layout(partition, None)
    return _run_device(local, fn, (kinds_in, kinds_out), tuple(coordinates), args)


def by_gather_and_scatter(
    run: Callable[..., Sequence[Array]],
    args: Sequence[Array],
    kinds: tuple[Kinds, Kinds],
    gather: Callable[..., GlobalArray],
    scatter: Callable[..., PartitionedArray],
    params: Params,
) -> list[Array]:
    """Run a function of all groups' slices, between a gather and a scatter.

    It is for work that needs the slices of all groups at once. `gather` decides which
    device gets them: usually each device gets all slices, and computes everything; in a
    plan the server does.

    `kinds` are those of the operands and those of the results. Operands of the kind
    `GROUPS` are gathered before `run`, which takes and returns flat sequences with `[n,
    *s]` for this kind; results of it are scattered after it. All others pass as they
    are. `params` are the keywords of `gather` and of `scatter`, its inverse:
    `partition` and `mesh`.
    """
    pairs = zip(args, kinds[0], strict=True)
    outs = run(*[gather(x, **params) if k == GROUPS else x for x, k in pairs])
    pairs = zip(outs, kinds[1], strict=True)
    return [scatter(y, **params) if k == GROUPS else y for y, k in pairs]


def _run_device(
    layout: Layout,
    fn: Callable[..., Sequence[Array]],
    kinds: tuple[Kinds, Kinds],
    coordinates: tuple[int, ...],
    args: Sequence[Array],
    device: Array | int = 0,
) -> list[Array]:
    """Run a function of one coordinate for a device's share of the coordinates.

    It is called in the code of one device: inside a `shard_map` over the partition's
    axes, or in a local program, where the device has all groups and all coordinates.
    Each device has its groups' slices at all d coordinates. An all-to-all gives it all
    groups' elements for d / m of the coordinates, the last ones perhaps padding. It
    runs the function on these, and collectives return the results for all coordinates.

    Operands and results are those of one device: `[k, *s, *t]` of the kind "groups",
    `[*s, *t]` of "coordinates", and `[*t]` of "whole", of a result the sum over all
    coordinates, not only those of the device. `kinds` are those of the operands and
    those of the results; `device` is the device's index along the partition's axes,
    int32 `[]`.
    """
    d = math.prod(coordinates)
    chunk = -(-d // layout.devices)
    args = [
        _own_columns(layout, x, kind, coordinates, chunk, device)
        for x, kind in zip(args, kinds[0], strict=True)
    ]
    varying = set(layout.axes).union(
        *(_compat.varying(_compat.typeof(x)) for x in args)
    )
    mapped = jax.vmap(
        lambda *xs: fn(*xs),
        in_axes=tuple({GROUPS: 1, COORDINATES: 0, WHOLE: None}[k] for k in kinds[0]),
        out_axes=[1 if kind == GROUPS else 0 for kind in kinds[1]],
        axis_size=chunk,
    )
    with _compat.without_vma():  # as the jaxpr was traced
        outs = mapped(*args)
    real = None
    if chunk * layout.devices != d:
        real = device * chunk + lax.iota(jnp.int32, chunk) < d
    outs = [vary(y, varying) for y in outs]
    sums = [
        _sum_coordinates(y, real)
        for y, kind in zip(outs, kinds[1], strict=True)
        if kind == WHOLE
    ]
    sums = iter(psum(layout, *sums) if sums else ())
    return [
        next(sums) if kind == WHOLE else _all_columns(layout, y, kind, coordinates)
        for y, kind in zip(outs, kinds[1], strict=True)
    ]


def _own_columns(
    layout: Layout,
    x: Array,
    kind: str,
    coordinates: tuple[int, ...],
    chunk: int,
    device: Array | int,
) -> Array:
    """Return the part of an operand for a device's share of the coordinates.

    It is called in the code of one device, with the operand that the device has. The d
    coordinates are in their flat order; device j gets the `chunk` ones (d / m, rounded
    up) from `j * chunk` on. Coordinates beyond d are padding, which holds copies of the
    first coordinate.

    The result is `[n, chunk, *t]` for "groups", the elements of all n groups, by an
    all-to-all; `[chunk, *t]` for "coordinates"; and `x` itself for "whole".
    """
    if kind == WHOLE:
        return x
    axis = 1 if kind == GROUPS else 0
    d, t = math.prod(coordinates), x.shape[axis + len(coordinates) :]
    x = lax.reshape(x, (*x.shape[:axis], d, *t))
    if not layout.axes:
        return x
    if d and (extra := chunk * layout.devices - d):
        # Copies of a real coordinate: loops there end, and nothing is divided by zero.
        first = lax.slice_in_dim(x, 0, 1, axis=axis)
        shape = (*x.shape[:axis], extra, *t)
        copies = lax.broadcast_in_dim(first, shape, range(x.ndim))
        x = lax.concatenate([x, copies], axis)
    if kind == COORDINATES:
        x = vary(x, layout.axes)
        return lax.dynamic_slice_in_dim(x, device * chunk, chunk)
    if x.size:
        x = lax.all_to_all(vary(x, layout.axes), layout.axes, 1, 0, tiled=True)
        return lax.slice_in_dim(x, 0, layout.partition.size)
    return jnp.zeros((layout.partition.size, chunk, *t), x.dtype)


def _sum_coordinates(x: Array, real: Array | None) -> Array:
    """Sum the results `[chunk, *t]` of a device's coordinates, in their dtype.

    16-bit floats are added in float32. `real`, bool `[chunk]`, is False for padding,
    which is left out; None if there is none.
    """
    if real is not None:
        mask = lax.broadcast_in_dim(real, x.shape, (0,))
        x = jnp.where(mask, x, jnp.zeros((), x.dtype))
    return jnp.sum(x, axis=0, dtype=accumulator(x.dtype)).astype(x.dtype)


def _all_columns(
    layout: Layout, y: Array, kind: str, coordinates: tuple[int, ...]
) -> Array:
    """Collect a result of the devices' shares of the coordinates into all coordinates.

    It is the inverse of `_own_columns`, for "groups" and "coordinates": an all-to-all
    to `[k, *s, *t]`, with zeros in padded slots; and an all-gather to `[*s, *t]`, the
    same on all devices. Padding of the coordinates is cut off.
    """
    axis, k = (1, layout.per_device) if kind == GROUPS else (0, 0)
    d, t = math.prod(coordinates), y.shape[axis + 1 :]
    lead = (k,) * axis
    if not y.size:
        y = jnp.zeros((*lead, d, *t), y.dtype)
        y = vary(y, layout.axes) if axis else y
    elif layout.axes and kind == GROUPS:
        extra = layout.num_slots - layout.partition.size
        config = [(0, extra, 0)] + [(0, 0, 0)] * (y.ndim - 1)
        y = lax.pad(y, jnp.zeros((), y.dtype), config)
        y = lax.all_to_all(vary(y, layout.axes), layout.axes, 0, 1, tiled=True)
    elif layout.axes:
        # All devices have the same result. With VMA checking its type must say so.
        to = "invarying" if _compat.check_vma() else "varying"
        y = lax.all_gather(y, layout.axes, tiled=True, to=to)
    y = lax.slice_in_dim(y, 0, d, axis=axis)
    return lax.reshape(y, (*lead, *coordinates, *t))
