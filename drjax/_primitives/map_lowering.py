"""The lowering of the work of the groups on a mesh: by `shard_map`, or by `vmap`.

Input: the jaxpr of one group, traced under the mesh in context, and operands. Output:
results for all groups, sharded over the partition's axes. Two lowerings compute them:

* A `shard_map` over the partition's axes, and a vmap over the groups of each device. A
  device then works on its own groups only: its loops end when its groups are done, and
  work that the compiler cannot partition (LAPACK, callbacks) stays on it. The jaxpr is
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

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from drjax import _compat
from drjax._compat import retype_mesh
from drjax._primitives.partition_index import GroupAxis
from drjax._primitives.rbg_per_group import in_turn
from drjax._sharding.execute import first_row_numbers, on_all_devices, on_devices, vary
from drjax._sharding.layout import Layout, other_axes
from drjax._sharding.padding import (
    for_real_groups,
    like_nothing,
    own_rows,
    unless_empty,
)

_INDEXING = (
    "gather", "scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min",
    "scatter-max",
)  # fmt: skip


def lowers_by_vmap(where: Layout, jaxpr) -> bool:
    """Whether the work of the groups is partitioned by the compiler; see above."""
    if not where.sharded or jaxpr is None:
        return False
    return _compat.check_vma() or (
        len(other_axes(where)) > 1 and _compat.holds(jaxpr, _INDEXING)
    )


def run_groups(
    where: Layout, jaxpr, args: Sequence[Any], by_rows: Sequence[bool]
) -> list:
    """The results of a per-group jaxpr for all groups of a partition.

    Args:
      where: The layout of the groups.
      jaxpr: The jaxpr of one group.
      args: Its operands: `[rows, *s]`, or `[*s]` for all groups.
      by_rows: Which operands have a slice for each group.
    """
    if lowers_by_vmap(where, jaxpr):
        fn = _compat.jaxpr_as_fun(on_each(where, jaxpr, True))
        mapped = _vmap(where, fn, by_rows, where.padded, _spmd_axes(where))
        run = lambda *args: ([], mapped(*args))
        return on_all_devices(where, run, args, by_rows)[1]
    fn = _compat.jaxpr_as_fun(inside(where, jaxpr))

    def body(*operands):
        outs = over_rows(where, fn, by_rows)(*operands)
        return [vary(y, where.axes) for y in outs]

    if where.uneven:
        effects = bool(_compat.effects_of(jaxpr))
        body = functools.partial(_on_padded_rows, where, fn, by_rows, effects)
    # The surrounding check_vma: users' loops inside were traced under it.
    everywhere = [True] * len(jaxpr.out_avals)
    return on_devices(
        where, body, args, by_rows, everywhere, _compat.check_vma(), first=where.uneven
    )


def _on_padded_rows(where: Layout, fn: Callable, by_rows, effects: bool, *args) -> list:
    """A per-group function on a device's slots, of which some may be padding."""
    *operands, first = args
    first = first[0]
    numbers = first + lax.iota(jnp.int32, where.per_device)
    # An effect on a padded slot would be visible: exactly the groups may run.
    if effects:
        run = lambda count: _vmap(where, fn, by_rows, count, None)
        return for_real_groups(where, numbers, where.few, run, operands, by_rows)

    # Copies of a real group on padded slots: loops there end, and checks hold.
    def work():
        own = [
            own_rows(where, numbers, x, x[:1]) if rows else x
            for x, rows in zip(operands, by_rows, strict=True)
        ]
        return [vary(y, where.axes) for y in over_rows(where, fn, by_rows)(*own)]

    def nothing():
        return [vary(y, where.axes) for y in like_nothing(jax.eval_shape(work))]

    return unless_empty(where, first, work, nothing)


def inside(where: Layout, jaxpr):
    """A per-group jaxpr for the inside of a `shard_map` over the partition's axes.

    If the mesh has no other axes, no equation needs the mesh, and the jaxpr becomes one
    without: some libraries compare the types of tracing with those of lowering.
    """
    if where.sharded and (where.partly_manual or _compat.is_bound_to_devices(jaxpr)):
        jaxpr = retype_mesh.with_manual_axes(jaxpr, where.axes)
    elif where.sharded:
        jaxpr = retype_mesh.without_mesh_types(jaxpr)
    return in_turn(jaxpr)


def on_each(where: Layout, jaxpr, by_vmap: bool):
    """A per-group jaxpr for one of the two lowerings."""
    if jaxpr is None or not by_vmap:
        return jaxpr and inside(where, jaxpr)
    axes = _spmd_axes(where)
    return jaxpr if axes is None else retype_mesh.with_whole_shard_maps(jaxpr, axes)


def by_device(
    where: Layout, fn: Callable, args: Sequence[Any], by_rows: Sequence[bool]
) -> tuple[list, list]:
    """Run `fn` on each device's slices by a vmap, with the results of a `shard_map`.

    Args:
      where: A sharded layout of Auto axes.
      fn: From operands of a device, and the index of its first group, to values of the
        device, `[*s]`, and partitioned results, `[k, *s]`.
      args: Its operands for all devices.
      by_rows: Which of them are partitioned.

    Returns:
      `(stacks of the devices' values, [m, *s]; partitioned results, [n, *s])`.
    """
    m, k = where.devices, where.per_device

    def run(*args):
        split = lambda x: x.reshape(m, k, *x.shape[1:])
        args = [split(x) if rows else x for x, rows in zip(args, by_rows, strict=True)]
        args.append(first_row_numbers(where))
        # Traced first: the vmaps in `fn` must not see the axes of the surrounding vmap.
        rows = (*by_rows, True)
        avals = [_one(x) if r else x for x, r in zip(args, rows, strict=True)]
        jaxpr, (own, stacks) = jax.make_jaxpr(fn, return_shape=True)(*avals)
        one = _compat.jaxpr_as_fun(jaxpr)
        axes = tuple(0 if r else None for r in rows)
        mapped = jax.vmap(one, axes, axis_size=m, spmd_axis_name=_spmd_axes(where))
        outs = mapped(*args)
        own, stacks = outs[: len(own)], outs[len(own) :]
        return own, [x.reshape(m * k, *x.shape[2:]) for x in stacks]

    return on_all_devices(where, run, args, by_rows)


def _one(x) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape[1:], x.dtype)


def _spmd_axes(where: Layout) -> tuple[str, ...] | None:
    # In a user's shard_map(check_vma=True), JAX takes named axes for axes of that one.
    return None if _compat.check_vma() else where.spmd_axes


def over_rows(where: Layout, fn: Callable, by_rows: Sequence[bool]) -> Callable:
    """`fn` of one group as a function of the slices of a device's groups."""
    mapped = _vmap(where, fn, by_rows, where.per_device, None)
    return lambda *operands: mapped(*(vary(x, where.axes) for x in operands))


# The axis name lets `partition_index` recognize this vmap among the user's own.
def _vmap(where: Layout, fn: Callable, by_rows, size: int, spmd_axes) -> Callable:
    return jax.vmap(
        lambda *xs: fn(*xs),
        in_axes=tuple(0 if by_row else None for by_row in by_rows),
        axis_name=GroupAxis(where.partition, where.mesh),
        axis_size=size,
        spmd_axis_name=spmd_axes,
    )
