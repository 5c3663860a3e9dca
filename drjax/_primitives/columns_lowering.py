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

import jax
import jax.numpy as jnp
from jax import lax

from drjax import _compat
from drjax._primitives.collectives import (
    execute_gather,
    execute_scatter,
)
from drjax._primitives.device_sums import accumulator, psum
from drjax._primitives.map_lowering import lowers_by_vmap, prepare_for_shard_map
from drjax._sharding.execute import shard_map_over_devices, vary
from drjax._sharding.layout import Layout, make_layout

GROUPS, COORDINATES, WHOLE = "groups", "coordinates", "whole"


def execute_columns(
    *args, jaxpr, kinds_in, kinds_out, coordinates, partition, mesh, name
):
    """Execution function of `map_columns`: apply a jaxpr to each coordinate.

    `s` is the shape of the coordinates. The kind of an operand or result says its
    shape, and what the jaxpr takes or returns for one coordinate:

        "groups"       `[n, *s, *t]`  a column `[n, *t]`, the elements of all groups
        "coordinates"  `[*s, *t]`     the element `[*t]` of this coordinate
        "whole"        `[*t]`         an operand: the same `[*t]` for all coordinates
                                      a result: `[*t]`, of which the sum is returned

    Args:
      *args: The operands.
      jaxpr: The closed jaxpr of one coordinate.
      kinds_in: For each operand its kind, a tuple.
      kinds_out: For each result its kind, a tuple.
      coordinates: The shape `s` of the coordinates, a tuple.
      partition: The `Partition`, of n groups.
      mesh: The mesh, or None: the program runs locally.
      name: The name of the function of one coordinate, ignored.

    Returns:
      The list of results, in the shapes that the table has for their kinds.
    """
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

    def body(*args):
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
    *args, jaxpr, kinds_in, kinds_out, coordinates, partition, **_
) -> list:
    """Apply the jaxpr of one coordinate to all coordinates, where all slices are.

    Args:
      *args: The operands of `map_columns`, or tracers, each whole.
      jaxpr: The closed jaxpr of one coordinate.
      kinds_in: For each operand its kind: "groups", "coordinates" or "whole".
      kinds_out: For each result its kind.
      coordinates: The shape of the coordinates, a tuple.
      partition: The `Partition`, of n groups.
      **_: The further parameters of the equation, ignored.

    Returns:
      The list of results, in the shapes that `execute_columns` says.
    """
    fn, local = _compat.jaxpr_as_checked_fun(jaxpr), make_layout(partition, None)
    return _run_device(local, fn, (kinds_in, kinds_out), tuple(coordinates), args)


def by_gather_and_scatter(run, args, kinds, gather, scatter, params) -> list:
    """Run a function of all groups' slices, between a gather and a scatter.

    It is for work that needs the slices of all groups at once. `gather` decides which
    device gets them: usually each device gets all slices, and computes everything; in a
    plan the server does.

    Args:
      run: The function. It takes and returns flat sequences of arrays: `[n, *s]`, with
        the slices of all groups, for operands and results of the kind "groups".
      args: The operands: partitioned values `[n, *s]`, and global values.
      kinds: `(kinds of the operands, kinds of the results)`, a string each. Operands of
        the kind `GROUPS` ("groups") are gathered before `run`, and results of that kind
        are scattered after it; all others pass as they are.
      gather: `gather(x, partition=, mesh=)`, from a partitioned value to the same
        slices as a global one.
      scatter: Its inverse, `scatter(y, partition=, mesh=)`.
      params: The keywords of both, a dict with `partition` and `mesh`.

    Returns:
      The list of results.
    """
    pairs = zip(args, kinds[0], strict=True)
    outs = run(*[gather(x, **params) if k == GROUPS else x for x, k in pairs])
    pairs = zip(outs, kinds[1], strict=True)
    return [scatter(y, **params) if k == GROUPS else y for y, k in pairs]


def _run_device(layout: Layout, fn, kinds, coordinates, args, device=0) -> list:
    """Run a function of one coordinate for a device's share of the coordinates.

    It is called in the code of one device: inside a `shard_map` over the partition's
    axes, or in a local program, where the device has all groups and all coordinates.
    Each device has its groups' slices at all d coordinates. An all-to-all gives it all
    groups' elements for d / m of the coordinates, the last ones perhaps padding. It
    runs the function on these, and collectives return the results for all coordinates.

    Args:
      layout: The layout: m devices with k slots (places for one group) each. m is 1 if
        the program runs locally.
      fn: The function of one coordinate: it takes and returns flat sequences of arrays.
      kinds: `(kinds of the operands, kinds of the results)`, tuples of "groups",
        "coordinates" or "whole".
      coordinates: The shape `s` of all coordinates, a tuple.
      args: The operands that the device has: `[k, *s, *t]` of the kind "groups",
        `[*s, *t]` of "coordinates", `[*t]` of "whole".
      device: The index of the device along the partition's axes, int32 `[]`.

    Returns:
      The list of results: `[k, *s, *t]` of the kind "groups", for the groups of the
      device; `[*s, *t]` of "coordinates"; `[*t]`, the sum over all coordinates, of
      "whole".
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


def _own_columns(layout: Layout, x, kind: str, coordinates, chunk: int, device):
    """Return the part of an operand for a device's share of the coordinates.

    It is called in the code of one device. The d coordinates are in their flat order;
    device j gets the `chunk` ones from `j * chunk` on. Coordinates beyond d are
    padding, which holds copies of the first coordinate.

    Args:
      layout: The layout: m devices with k slots (places for one group) each.
      x: The operand: `[k, *s, *t]` of the kind "groups", `[*s, *t]` of "coordinates",
        `[*t]` of "whole".
      kind: Its kind.
      coordinates: The shape `s` of the coordinates, a tuple of product d.
      chunk: The number of coordinates of a device, d / m rounded up.
      device: The index of the device along the partition's axes, int32 `[]`.

    Returns:
      For "groups" `[n, chunk, *t]`, the elements of all n groups, by an all-to-all; for
      "coordinates" `[chunk, *t]`; for "whole" `x` itself.
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


def _sum_coordinates(x, real):
    """Sum the results of a device's coordinates; 16-bit floats are added in float32.

    Args:
      x: The results, `[chunk, *t]`, one for each coordinate of the device.
      real: For each coordinate False if it is padding, bool `[chunk]`, to leave it out;
        None: none is padding.

    Returns:
      The sum, `[*t]`, in the dtype of `x`.
    """
    if real is not None:
        mask = lax.broadcast_in_dim(real, x.shape, (0,))
        x = jnp.where(mask, x, jnp.zeros((), x.dtype))
    return jnp.sum(x, axis=0, dtype=accumulator(x.dtype)).astype(x.dtype)


def _all_columns(layout: Layout, y, kind: str, coordinates):
    """Collect a result of the devices' shares of the coordinates into all coordinates.

    It is the inverse of `_own_columns`: an all-to-all for "groups", an all-gather for
    "coordinates". Padding of the coordinates is cut off.

    Args:
      layout: The layout: m devices with k slots (places for one group) each.
      y: The result for this device's share: `[n, chunk, *t]` of the kind "groups",
        `[chunk, *t]` of "coordinates".
      kind: Its kind, one of these two.
      coordinates: The shape `s` of all coordinates, a tuple.

    Returns:
      For "groups" `[k, *s, *t]`, the slices of this device's slots, zeros in padded
      ones; for "coordinates" `[*s, *t]`, the same on all devices.
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
