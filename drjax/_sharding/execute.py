"""Execution of a function of one device's slices on all devices.

Input: a function of the slices of a device's k groups, and operands for the whole
partition. Output: its results for the whole partition, or one for each device.

`shard_map_over_devices` calls it inside a `shard_map` over the partition's axes with
varying-manual-axes checking; on local and manual layouts, directly. `auto_partition`
leaves the distribution to the compiler.

Invariants: operands are on the mesh of the layout, and padded to k * m slices; results
are cut to n slices. Sharp edges: the function sees padding, and has to mask it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from drjax import _compat
from drjax._jaxprs.prng_keys import on_raw
from drjax._sharding.avals import inner_spec
from drjax._sharding.layout import Layout


def shard_map_over_devices(
    layout: Layout,
    body: Callable[..., Sequence[Any]],
    args: Sequence[Any],
    partitioned_in: Sequence[bool | P],
    partitioned_out: Sequence[bool | P | None],
    check_vma: bool = True,
    with_indices: bool = False,
    with_first_index: bool = False,
    result_layout: Layout | None = None,
) -> list[Any]:
    """Run a function of one device's slices on all devices of the partition.

    Args:
      layout: The layout of the partition: n groups on m devices, each with k slots for
        groups.
      body: The function. It takes and returns flat sequences: slices `[k, *s]` of
        partitioned values, padding included, and whole global ones, `[*s]`.
      args: Its operands for the whole partition, `[n, *s]` or `[*s]`.
      partitioned_in: For each operand whether it is partitioned. A `PartitionSpec`: how
        it is divided over the devices, which divide it evenly.
      partitioned_out: For each result whether it is partitioned. None: it is neither
        partitioned nor global, but a value `[1, *s]` of each device. A `PartitionSpec`:
        a global value of which each device returns its part.
      check_vma: Whether the `shard_map` checks varying manual axes.
      with_indices: Whether `body` takes as its last argument the group indices of the
        device's slots, int32 `[k]`.
      with_first_index: Whether `body` takes as its last argument the group index of the
        device's first slot, int32 `[1]`.
      result_layout: The layout of partitioned results, of another number of groups on
        the same devices; None: `layout`.

    Returns:
      The results: `[n, *s]`, `[*s]`, or `[m, *s]` if `partitioned_out` is None for
      them. Inside a user's `shard_map` over the partition's axes, the results of `body`
      on the current device.
    """
    if not layout.sharded:
        if with_indices or with_first_index:
            indices = layout.group_indices()
            args = [*args, indices[:1] if with_first_index else indices]
        return list(body(*args))
    args = [
        _pad_slices(as_operand(x, layout, True), layout) if p is True else x
        for x, p in zip(args, partitioned_in, strict=True)
    ]
    # An operand, as `lax.axis_index` costs a nested shard_map for each use.
    if with_indices or with_first_index:
        make = first_group_indices if with_first_index else all_group_indices
        args.append(make(layout))
        partitioned_in = (*partitioned_in, True)
    whole = {False: P(), True: P(layout.axes), None: P(layout.axes)}
    spec_of = lambda p: p if isinstance(p, P) else whole[p]
    in_specs = tuple(map(spec_of, partitioned_in))
    out_specs = tuple(map(spec_of, partitioned_out))
    run = lambda *xs: tuple(body(*xs))
    outs = shard_map(layout, run, in_specs, out_specs, check_vma)(*args)
    result = result_layout or layout
    n = result.partition.size
    return [
        lax.slice_in_dim(y, 0, n) if p is True and result.uneven else y
        for y, p in zip(outs, partitioned_out, strict=True)
    ]


def shard_map_over_levels(layout: Layout, axes: tuple[str, ...], body: Callable, x):
    """Run a function of a device's values that are partitioned over two levels.

    Args:
      layout: The layout of the outer level, which is sharded: n groups, k slots on each
        device.
      axes: The mesh axes of the inner level, m devices.
      body: The function: from the values of a device, `[k, 1, *s]`, and if some slots
        are padding their group indices, int32 `[k]`, to a global value, `[*t]`.
      x: A value of each of the m devices for each group of the outer level,
        `[n, m, *s]`.

    Returns:
      The global value, `[*t]`.
    """
    args, specs = [_pad_slices(x, layout)], [P(layout.axes, axes)]
    if layout.uneven:
        args.append(all_group_indices(layout))
        specs.append(P(layout.axes))
    mesh = layout.mesh if isinstance(layout.mesh, Mesh) else None
    names = {*layout.axes, *axes}
    run = jax.shard_map(
        body, mesh=mesh, in_specs=tuple(specs), out_specs=P(), axis_names=names
    )
    return run(*args)


def sharded_spec(layout: Layout, axis: int | None) -> P | bool:
    """How a global value is divided, as an entry of `partitioned_out`.

    Args:
      layout: The layout of the partition.
      axis: The axis along which each device has a part of the value; None: each device
        has all of it.

    Returns:
      The `PartitionSpec`; False if `axis` is None. `shard_map_over_devices` takes both.
    """
    return False if axis is None else P(*[None] * axis, layout.axes)


def auto_partition(
    layout: Layout, run: Callable, args: Sequence[Any], partitioned_in: Sequence[bool]
) -> tuple[list[Any], list[Any]]:
    """Run a function of all devices' slices, which the compiler partitions.

    It takes the place of `shard_map_over_devices` for maps that cannot run in a
    `shard_map`: those for which `map_lowering.lowers_by_vmap` is true.

    Args:
      layout: A sharded layout: n groups on m devices, each with k slots for groups.
      run: The function: from operands, padded to k * m slices, to a pair of lists:
        values of the devices, `[m, *s]`, and partitioned results, `[k * m, *s]`. Padded
        slots hold the slice of group 0.
      args: The operands, `[n, *s]` or `[*s]`.
      partitioned_in: For each operand whether it is partitioned, `[n, *s]`.

    Returns:
      A pair of lists: the values of the devices, `[m, *s]`, and the partitioned
        results, `[n, *s]`.
    """
    n = layout.partition.size

    def operand(x):
        padded = _laid_out(_pad_slices(as_operand(x, layout, True), layout), layout)
        if not layout.uneven:
            return padded
        real = lax.iota(jnp.int32, layout.num_slots) < n  # padding: copies of group 0
        real = lax.broadcast_in_dim(real, padded.shape, (0,))
        return _laid_out(jnp.where(real, padded, padded[:1]), layout)

    pairs = zip(args, partitioned_in, strict=True)
    args = [operand(x) if p else x for x, p in pairs]
    own, outs = ([_laid_out(y, layout) for y in ys] for ys in run(*args))
    return own, [lax.slice_in_dim(y, 0, n) if layout.uneven else y for y in outs]


def all_group_indices(layout: Layout):
    """The group indices of all slots, int32 `[k * m]`: k slots on each of m devices.

    An index of n, the number of groups, or more belongs to padding. On a mesh, the
    indices have the type of a partitioned operand, so that a device gets those of its
    slots.
    """
    return as_operand(lax.iota(jnp.int32, layout.num_slots), layout, True)


def first_group_indices(layout: Layout):
    """The group index of each device's first slot, int32 `[m]` for m devices.

    The index is n, the number of groups, or more if the device has no group. On a mesh,
    `[m]` has the type of a partitioned operand with one slice for each device.
    """
    indices = lax.iota(jnp.int32, layout.devices) * layout.per_device
    return as_operand(indices, layout, True)


def _laid_out(x, layout: Layout):
    """Constrain axis 0 of `x` to be sharded over the partition's mesh axes.

    On Explicit axes return `x` as it is: its type has the sharding already, and JAX
    refuses constraints there.

    Args:
      x: `[k * m, *s]`, a slice for each slot; or `[m, *s]`, a slice for each device.
      layout: A sharded layout: k slots on each of m devices.

    Returns:
      `x`, with the constraint.
    """
    if layout.spec_entry is not None:
        return x
    assert layout.mesh is not None
    spec = P(layout.axes, *[P.UNCONSTRAINED] * (x.ndim - 1))
    return lax.with_sharding_constraint(x, NamedSharding(layout.mesh, spec))


def undivided_if_uneven(x, layout: Layout, axis: int):
    """Constrain a global value that is scattered, so that XLA does not divide it early.

    XLA's partitioner aborts the process if it divides the result of a `scatter-add`
    unevenly (`PadBaseShapeBeforeUnevenTiledSharding`); a gradient on the server may be
    one. All devices have a global value, so the constraint costs nothing.

    Args:
      x: The value, whose slices along `axis` are scattered.
      layout: The layout of the partition.
      axis: The group axis.

    Returns:
      `x`, not sharded along `axis` if the layout is sharded and uneven.
    """
    if not (layout.sharded and layout.uneven):
        return x
    assert layout.mesh is not None
    spec: list[Any] = [P.UNCONSTRAINED] * x.ndim
    spec[axis] = None
    return lax.with_sharding_constraint(x, NamedSharding(layout.mesh, P(*spec)))


def shard_map(
    layout: Layout, fn: Callable, in_specs: Any, out_specs: Any, check_vma: bool = True
) -> Callable:
    """Map `fn` by `jax.shard_map` over the partition's mesh axes only.

    Args:
      layout: A sharded layout. If its mesh is abstract, the mesh in context is used.
      fn: The function of one device's values.
      in_specs: As for `jax.shard_map`.
      out_specs: As for `jax.shard_map`.
      check_vma: As for `jax.shard_map`.

    Returns:
      The function of the values of all devices.
    """
    mesh = layout.mesh if isinstance(layout.mesh, Mesh) else None
    mapped = jax.shard_map(
        fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs,
        axis_names=set(layout.axes), check_vma=check_vma,
    )  # fmt: skip
    # Eagerly, JAX fails to nest shard_maps over different axes.
    return mapped if _compat.under_trace() else jax.jit(mapped)


def vary(x, axes):
    """Cast `x` to vary over all of the mesh axes `axes`, by `pcast(x, to="varying")`.

    This is pbroadcast, the twin of psum under transposition: it costs no communication
    (JAX note 17111, "Efficient transposition of replication-inducing collectives").

    Args:
      x: An array or tracer.
      axes: The names of Manual mesh axes. Those over which `x` varies already are left
        out.

    Returns:
      The same value; `x` itself without VMA checking.
    """
    if not _compat.check_vma():
        return x
    missing = tuple(a for a in axes if a not in _compat.varying(_compat.typeof(x)))
    return lax.pcast(x, missing, to="varying") if missing else x


def full_of_type(like, fill):
    """An array of the shape and dtype of `like`, with the number `fill` everywhere.

    It has the sharding of `like` on Explicit axes, and varies over the Manual mesh axes
    over which `like` varies: carries of loops and results of branches need equal types.

    Args:
      like: A `jax.ShapeDtypeStruct`, such as `jax.eval_shape` returns.
      fill: The number.
    """
    explicit = AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types
    sharding = like.sharding if explicit else None
    x = lax.full(like.shape, fill, like.dtype, sharding=sharding)
    return vary(x, _compat.varying(like)) if _compat.check_vma() else x


def as_operand(x, layout: Layout, partitioned: bool):
    """Give an array the type that the operand of a building block needs on a mesh.

    On Explicit axes, the array is resharded: of its dimensions, only the group axis is
    sharded over the partition's axes. As this is outside the primitive, JAX transposes
    it: a global array used as a partitioned one gets its cotangent back as a global
    array. With a concrete mesh that is not in JAX's context, the array gets a sharding
    constraint without any axes: jit finds the devices in it, and does not search our
    primitives.

    Args:
      x: An array or a tracer.
      layout: The layout of the partition.
      partitioned: Whether `x` is partitioned, `[n, *s]`, or global.

    Returns:
      An array with the values of `x`; `x` itself if the layout is not sharded.
    """
    mesh, aval = layout.mesh, _compat.typeof(x)
    if mesh is None or not layout.sharded:
        return x
    auto = AxisType.Auto in mesh.axis_types
    if isinstance(mesh, Mesh) and _compat.under_trace():
        if auto or aval.sharding.mesh.empty:
            free = P(*[P.UNCONSTRAINED if auto else None] * aval.ndim)
            x = lax.with_sharding_constraint(x, NamedSharding(mesh, free))
    if AxisType.Explicit in mesh.axis_types:
        lead = (layout.spec_entry,) if partitioned else ()
        spec = P(*lead, *inner_spec(aval, layout, len(lead)))
        if aval.sharding != NamedSharding(layout.abstract_mesh, spec):
            x = jax.sharding.reshard(x, NamedSharding(mesh, spec))
    return x


def with_sharding_of(x, aval):
    """Reshard an array to the sharding of a type on Explicit axes; else return it.

    For transpose rules: on Explicit axes, JAX checks that a cotangent has the type of
    the value that it belongs to.

    Args:
      x: An array, tracer or symbolic zero, such as the cotangent.
      aval: The type, such as that of the value.
    """
    if type(x) is _compat.Zero:
        return x
    mesh = aval.sharding.mesh
    explicit = not mesh.empty and AxisType.Explicit in mesh.axis_types
    if not explicit or _compat.typeof(x).sharding == aval.sharding:
        return x
    return jax.sharding.reshard(x, aval.sharding)


def _pad_slices(x, layout: Layout):
    """Pad a partitioned value `[n, *s]` to `[k * m, *s]`: k slots on each of m devices.

    The new slices are zeros; those of typed keys have zeros as key data. What the work
    of padded slots sees in place of them is in `padding.py`.
    """
    extra = layout.per_device * layout.devices - layout.partition.size
    if not extra:
        return x

    def padded(x):
        zero = jnp.zeros((), x.dtype)
        return lax.pad(x, zero, [(0, extra, 0)] + [(0, 0, 0)] * (x.ndim - 1))

    return on_raw(padded, x)
