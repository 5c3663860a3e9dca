"""The lowering of the work of the groups on a mesh: by `shard_map`, or by `vmap`.

Input: the jaxpr of one group, traced under the mesh in context, and operands. Output:
results for all groups, sharded over the partition's axes. Two lowerings compute them:

* A `shard_map` over the partition's axes, and a vmap over the groups of each device. A
  device then works on its own groups only: its loops end when its groups are done, and
  work that the compiler cannot partition (LAPACK, callbacks) stays on it. Where each
  device has one group, there is no vmap, so that kernels without a batching rule work,
  and a `cond` stays a branch. The jaxpr is
  retyped for the inside of the `shard_map`, so that a `jax.shard_map(mesh=mesh)` of the
  model's own means the mesh without these axes.
* `vmap(spmd_axis_name=axes)` over all groups. The compiler partitions the work, with
  each group constrained to its device. Loops go on until all groups are done.

Only `lowers_by_vmap` chooses between them. The first is the default. The second is for
cases in which the first is impossible:

* XLA's partitioner aborts the process for a gather or scatter in a table sharded over
  two other mesh axes, where the partition's axes are Manual
  (`spmd_partitioner_util.cc`: 6 of 10 placements, forward and gradient, on CPU and TPU;
  the same written with `jax.shard_map` alone). Every embedding of a model with FSDP and
  tensor parallelism is such a table. So: two other Auto axes larger than one, and a
  gather or scatter anywhere in the jaxpr.
* Inside a user's `shard_map(check_vma=True)` over another axis, types that vary over
  the partition's axes, too, would not fit the loops that were traced without. Nor may
  vmap name the axes there: JAX takes them for axes of that `shard_map`.

Invariants: both give each group the same index and the same random bits, and no work
communicates over the partition's axes, but for the `while_loop` below.

Sharp edges: a jaxpr that was retyped is not differentiated any more. `vmap` costs an
all-reduce per step of a `while_loop` whose condition differs from group to group.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from drjax import _compat
from drjax._compat import retype_mesh
from drjax._compat.types import (
    Array,
    ClosedJaxpr,
    DeviceArray,
    Flags,
    PartitionedArray,
)
from drjax._primitives.ordered_callbacks import rewrite_ordered_callbacks
from drjax._primitives.partition_index import GroupAxis, with_index_of_device
from drjax._primitives.rbg_per_group import rewrite_draws
from drjax._sharding.execute import (
    auto_partition,
    first_group_indices,
    shard_map_over_devices,
    vary,
)
from drjax._sharding.layout import Layout, other_axes
from drjax._sharding.padding import (
    copy_slice_to_padding,
    for_real_groups,
    tree_zeros_like,
    unless_empty,
)

_INDEXING = (
    "gather", "scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min",
    "scatter-max",
)  # fmt: skip


def lowers_by_vmap(layout: Layout, jaxpr: ClosedJaxpr | None) -> bool:
    """Decide whether a map is lowered by a `vmap` that the compiler partitions.

    The default is a `shard_map` over the partition's axes, in which each device runs
    its own groups. The `vmap` is for the two cases in which that is impossible: the map
    is in a user's `shard_map(check_vma=True)` over other mesh axes; or its jaxpr has a
    `lax.gather` or `lax.scatter` (array indexing), at any depth, and the mesh has two
    or more Auto axes larger than one that are not the partition's, for which XLA would
    abort the process. If the layout is not sharded, neither is needed, and the groups
    run on the current device. A stage from a plan file, whose jaxpr is None, is never
    lowered by a `vmap`.
    """
    if not layout.sharded or jaxpr is None:
        return False
    return _compat.check_vma() or (
        len(other_axes(layout)) > 1 and _compat.has_primitive(jaxpr, _INDEXING)
    )


def run_groups(
    layout: Layout, jaxpr: ClosedJaxpr, args: Sequence[Array], partitioned_in: Flags
) -> list[PartitionedArray]:
    """Run a per-group jaxpr for all groups of a partition, to results `[n, *t]`.

    It is a `vmap` over the groups of each device, if it has several, in a `shard_map`
    over the devices; or, where `lowers_by_vmap` says so, one `vmap` over all groups. An
    operand is `[n, *s]`, or `[*s]` if it is not `partitioned_in`.
    """
    if lowers_by_vmap(layout, jaxpr):
        fn = _compat.jaxpr_as_checked_fun(prepare_group_jaxpr(layout, jaxpr, True))
        mapped = _vmap_groups(
            layout, fn, partitioned_in, layout.num_slots, _spmd_axes(layout)
        )
        run = lambda *args: ([], mapped(*args))
        return auto_partition(layout, run, args, partitioned_in)[1]
    prepared = prepare_for_shard_map(layout, jaxpr)
    fn = _compat.jaxpr_as_checked_fun(prepared)
    if layout.other_explicit_axes:
        fn = _on_traced_meshes(fn, prepared.in_avals)

    def body(*operands: Array) -> list[DeviceArray]:
        outs = over_groups(layout, fn, partitioned_in)(*operands)
        return [vary(y, layout.axes) for y in outs]

    if layout.uneven:
        effects = bool(_compat.effects_of(jaxpr))
        body = functools.partial(_run_padded, layout, fn, partitioned_in, effects)
    # The surrounding check_vma: users' loops inside were traced under it.
    everywhere = [True] * len(jaxpr.out_avals)
    return shard_map_over_devices(
        layout,
        body,
        args,
        partitioned_in,
        everywhere,
        _compat.check_vma(),
        with_first_index=layout.uneven,
    )


def _on_traced_meshes(
    fn: Callable[..., Sequence[Array]], avals: Sequence[Any]
) -> Callable[..., list[Array]]:
    """Cast what a function takes to the meshes of its types, and its results back.

    Where JAX itself makes Explicit axes Auto, as `jax.random.gamma` does, residuals are
    on that mesh.
    """

    def cast(x: Array, mesh: jax.sharding.AbstractMesh) -> Array:
        sharding = _compat.typeof(x).sharding
        if sharding.mesh == mesh:
            return x
        with jax.sharding.use_abstract_mesh(mesh):
            return jax.sharding.reshard(x, sharding.update(mesh=mesh))

    def run(*xs: Array) -> list[Array]:
        around = jax.sharding.get_abstract_mesh()
        meshes = [aval.sharding.mesh for aval in avals]
        outs = fn(*map(cast, xs, meshes))
        return [cast(y, around) for y in outs]

    return run


def _run_padded(
    layout: Layout,
    fn: Callable[..., Sequence[Array]],
    partitioned_in: Flags,
    effects: bool,
    *args: Array,
) -> list[DeviceArray]:
    """Run a per-group function on a device's slots, of which some may be padding.

    A slot is a place for one group on a device. Without effects, padded slots of a
    device that has groups run copies of its first group, and a device without groups
    skips the work. With effects, exactly the groups run. Slices of results in padded
    slots have no meaning.

    The operands are those of the device, `[k, *s]` if `partitioned_in`, else `[*s]`;
    and last the group index of its first slot, int32 `[1]`.
    """
    *operands, first = args
    first = first[0]
    indices = first + lax.iota(jnp.int32, layout.per_device)
    # An effect on a padded slot would be visible: exactly the groups may run.
    if effects:
        run = lambda count: _groups_of_device(layout, fn, partitioned_in, count)
        return for_real_groups(
            layout,
            indices,
            layout.partial_count,
            run,
            operands,
            partitioned_in,
        )

    # Copies of a real group on padded slots: loops there end, and checks hold.
    def work() -> list[DeviceArray]:
        own = [
            copy_slice_to_padding(layout, indices, x, x[:1]) if p else x
            for x, p in zip(operands, partitioned_in, strict=True)
        ]
        return [
            vary(y, layout.axes) for y in over_groups(layout, fn, partitioned_in)(*own)
        ]

    def nothing() -> list[DeviceArray]:
        return [vary(y, layout.axes) for y in tree_zeros_like(jax.eval_shape(work))]

    return unless_empty(layout, first, work, nothing)


def prepare_for_shard_map(layout: Layout, jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """Rewrite a per-group jaxpr for a `shard_map` over the partition's axes.

    The types are put on the mesh with the partition's axes Manual. But if then all axes
    of the mesh are Manual, and the jaxpr has no `shard_map` or sharding constraint, the
    types get no mesh at all, as some libraries refuse other types at lowering than at
    tracing. Without a mesh, and inside a user's `shard_map` over the axes, the types
    stay. In each case, draws from random keys of `rbg` or `unsafe_rbg` become equations
    of `draw_per_key`, so that the bits of a group do not depend on the other groups in
    a batch; and ordered callbacks become equations that are called in order. If each
    device has one group, which no vmap will give its index, the index is computed from
    the position of the device.

    The result is for lowering only: it may have no derivatives.
    """
    if layout.sharded and (layout.partly_manual or _compat.is_bound_to_devices(jaxpr)):
        jaxpr = retype_mesh.with_manual_axes(jaxpr, layout.axes)
    elif layout.sharded:
        jaxpr = retype_mesh.without_mesh_types(jaxpr)
    jaxpr = rewrite_ordered_callbacks(rewrite_draws(jaxpr))
    return with_index_of_device(jaxpr, layout) if layout.per_device == 1 else jaxpr


def prepare_group_jaxpr(
    layout: Layout, jaxpr: ClosedJaxpr, by_vmap: bool
) -> ClosedJaxpr:
    """Rewrite a per-group jaxpr for the lowering that will run it.

    For a `shard_map`, `prepare_for_shard_map` puts its types on the mesh with the
    partition's axes Manual, and makes draws from `rbg` keys independent of the other
    groups in a batch. For a `vmap`, which `by_vmap` (the result of `lowers_by_vmap`)
    chooses, each `shard_map` in the jaxpr, which the user's mapped function has called,
    is made to map over the partition's axes, too; but the jaxpr stays as it is if these
    axes are Explicit, or if the map is in a user's `shard_map(check_vma=True)`.
    """
    if not by_vmap:
        return prepare_for_shard_map(layout, jaxpr)
    axes = _spmd_axes(layout)
    return jaxpr if axes is None else retype_mesh.with_whole_shard_maps(jaxpr, axes)


def vmap_over_devices(
    layout: Layout,
    fn: Callable[..., tuple[list[Array], list[DeviceArray]]],
    args: Sequence[Array],
    partitioned_in: Flags,
) -> tuple[list[Array], list[PartitionedArray]]:
    """Run a function of one device's slices for all devices, by a vmap over devices.

    The results are those of a `shard_map` of the function. A slot is a place for one
    group on a device; the last slots may be padding, which holds the slice of group 0.
    The layout is sharded, over Auto axes.

    `fn(*operands, first)` takes the operands of a device, `[k, *s]`, or `[*s]` if not
    `partitioned_in`, and the group index of its first slot, int32 `[]`. It returns a
    pair of lists: values of the device, `[*s]`, and results with a slice for each slot,
    `[k, *s]`. The pair here has stacks of the m devices' values, `[m, *s]`, and the
    partitioned results, `[n, *s]`, without padding.
    """
    m, k = layout.devices, layout.per_device

    def run(*args) -> tuple[list[Array], list[Array]]:
        split = lambda x: x.reshape(m, k, *x.shape[1:])
        args = [split(x) if p else x for x, p in zip(args, partitioned_in, strict=True)]
        args.append(first_group_indices(layout))
        # Traced first: the vmaps in `fn` must not see the axes of the surrounding vmap.
        split_in = (*partitioned_in, True)
        avals = [
            _aval_of_slice(x) if p else x for x, p in zip(args, split_in, strict=True)
        ]
        jaxpr, (own, stacks) = jax.make_jaxpr(fn, return_shape=True)(*avals)
        one = _compat.jaxpr_as_checked_fun(jaxpr)
        axes = tuple(0 if p else None for p in split_in)
        mapped = jax.vmap(one, axes, axis_size=m, spmd_axis_name=_spmd_axes(layout))
        outs = mapped(*args)
        own, stacks = outs[: len(own)], outs[len(own) :]
        return own, [x.reshape(m * k, *x.shape[2:]) for x in stacks]

    return auto_partition(layout, run, args, partitioned_in)


def _aval_of_slice(x: Array) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of one slice of the array `x` along its axis 0."""
    return jax.ShapeDtypeStruct(x.shape[1:], x.dtype)


def _spmd_axes(layout: Layout) -> tuple[str, ...] | None:
    """Return the `spmd_axis_name` for a vmap over all groups of a partition.

    It has the partition's mesh axes; () if the program runs locally. None if JAX takes
    no names: on Explicit axes, or inside a user's `shard_map(check_vma=True)`.
    """
    # In a user's shard_map(check_vma=True), JAX takes named axes for axes of that one.
    return None if _compat.check_vma() else layout.spmd_axes


def over_groups(
    layout: Layout, fn: Callable[..., Sequence[Array]], partitioned_in: Flags
) -> Callable[..., Sequence[DeviceArray]]:
    """Turn a function of one group into one of all groups of a device.

    The function of a device takes `[k, *s]` for operands that are `partitioned_in`,
    with a slice for each slot (a place for one group), and `[*s]` for those that the
    groups share. It returns `[k, *t]`. With VMA checking, it casts the operands to vary
    over the partition's mesh axes.
    """
    mapped = _groups_of_device(layout, fn, partitioned_in, layout.per_device)
    # In a user's shard_map over the partition's axes the types of one group, by which
    # `fn` was traced, do not vary over them: see `group_aval`.
    axes = () if layout.manual else layout.axes
    return lambda *operands: mapped(*(vary(x, axes) for x in operands))


def _groups_of_device(
    layout: Layout,
    fn: Callable[..., Sequence[Array]],
    partitioned_in: Flags,
    count: int,
) -> Callable[..., Sequence[DeviceArray]]:
    """Turn a function of one group into one of the first `count` groups of a device."""
    if layout.per_device > 1:
        return _vmap_groups(layout, fn, partitioned_in, count, None)

    def only(*operands: Array) -> list[DeviceArray]:
        pairs = zip(operands, partitioned_in, strict=True)
        own = [lax.squeeze(x, (0,)) if p else x for x, p in pairs]
        varying = frozenset().union(*(_compat.varying(_compat.typeof(x)) for x in own))
        # In a user's shard_map over the partition's axes the types of one group, by
        # which `fn` was traced, do not vary over them: see `group_aval`.
        with _compat.without_vma() if layout.manual else contextlib.nullcontext():
            outs = fn(*own)
        return [vary(lax.expand_dims(y, (0,)), varying) for y in outs]

    return only


def _vmap_groups(
    layout: Layout,
    fn: Callable[..., Sequence[Array]],
    partitioned_in: Flags,
    size: int,
    spmd_axes: tuple[str, ...] | None,
) -> Callable[..., Sequence[Array]]:
    """Turn a function of one group into one of `size` groups, by a vmap.

    The axis name of the vmap is a `GroupAxis`. By it, the batching rule of
    `partition_index` knows that the vmap is over groups, and gives each its index.
    `size` counts the groups of all devices, of one device, or fewer; operands and
    results are as in `over_groups`, for `size` in place of k.
    """
    return jax.vmap(
        lambda *xs: fn(*xs),
        in_axes=tuple(0 if p else None for p in partitioned_in),
        axis_name=GroupAxis(layout.partition, layout.mesh),
        axis_size=size,
        spmd_axis_name=spmd_axes,
    )
