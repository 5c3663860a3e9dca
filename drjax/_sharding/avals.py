"""Types of global and partitioned values, on meshes with Explicit and Manual axes.

Input: the type of a value, and a layout. Output: its type after a broadcast, a
reduction, or for one group: shape, sharding, and varying manual axes (VMA).

Invariants: axes of the partition occur in the leading entry of a partitioned value's
spec only; a global value does not vary over them.
Sharp edges: without VMA checking no value varies; Auto axes have no entry in types.
"""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from drjax import _compat
from drjax._sharding.layout import Layout


def _without(spec_entry, axes):
    """Remove mesh axes from one entry of a `PartitionSpec`, and return the new entry.

    Args:
      spec_entry: The entry: a mesh axis, a tuple of them, None or `UNCONSTRAINED`.
      axes: The names of the mesh axes to remove.

    Returns:
      The name of the axis that remains, or the tuple of the names if several remain.
      None if none remains, and for the entries None and `UNCONSTRAINED`.
    """
    if spec_entry is None or spec_entry is P.UNCONSTRAINED:
        return None
    entry = spec_entry if isinstance(spec_entry, tuple) else (spec_entry,)
    left = tuple(a for a in entry if a not in axes)
    return left[0] if len(left) == 1 else left or None


def inner_spec(aval, layout: Layout, skip: int):
    """Return how a value is sharded inside a group: without the partition's axes.

    Of a partitioned value, only the group axis may be sharded over the partition's mesh
    axes; this removes them from all other dimensions.

    Args:
      aval: The type of a global value `[*s]`, or of a partitioned value `[n, *s]`.
      layout: The layout of the partition.
      skip: The number of leading dimensions to leave out: 1 for the group axis of a
        partitioned value, else 0.

    Returns:
      A list with a `PartitionSpec` entry for each dimension from `skip` on.
    """
    spec = (*aval.sharding.spec, *[None] * aval.ndim)[: aval.ndim]
    return [_without(entry, layout.axes) for entry in spec[skip:]]


def _typed(aval, layout, mesh, shape, spec, varying):
    """Copy a type with another shape, sharding and set of varying mesh axes.

    Args:
      aval: The type to copy, a `ShapedArray`; its dtype stays.
      layout: The layout of the partition.
      mesh: The abstract mesh of the new sharding. If `layout` has no mesh, this
        argument is ignored, and the new type has the mesh of `aval`.
      shape: The new shape.
      spec: For each dimension an entry of the new `PartitionSpec`.
      varying: The set of Manual mesh axes over which a value of the new type varies.
    """
    if layout.mesh is None:  # keep the operand's own mesh, if it has one
        mesh = aval.sharding.mesh
    sharding = NamedSharding(mesh, P(*spec))
    return _compat.replace_aval(aval, shape, sharding, varying)


@_compat.cache()
def partitioned_aval(aval, layout: Layout):
    """Return the type of a partitioned value, given that of a global value or slice.

    The group axis is sharded over those axes of the partition that are Explicit.

    Args:
      aval: The type of the global value or of one group's slice, `[*s]`.
      layout: The layout of the partition, n groups.

    Returns:
      The type `[n, *s]`. Inside a user's `shard_map` over the partition's axes it is
      `[k, *s]`, for the k groups of a device; with varying-manual-axes checking (VMA),
      it then varies over these axes.
    """
    varying = _compat.varying(aval) - set(layout.axes)
    if layout.manual and _compat.check_vma():
        varying |= set(layout.axes)
    return _typed(
        aval, layout, layout.abstract_mesh, (layout.group_axis_size, *aval.shape),
        (layout.spec_entry, *inner_spec(aval, layout, 0)), varying,
    )  # fmt: skip


@_compat.cache()
def global_aval(aval, layout: Layout):
    """Return the type of a reduction's result, from that of its partitioned operand.

    Args:
      aval: The type of the operand, `[n, *s]` for n groups; or `[k, *s]`, for the k
        groups of a device, inside a user's `shard_map` over the partition's axes.
      layout: The layout of the partition.

    Returns:
      The type `[*s]`: neither sharded over the partition's mesh axes, nor varying over
      them.
    """
    return _typed(
        aval, layout, layout.abstract_mesh, aval.shape[1:],
        inner_spec(aval, layout, 1), _compat.varying(aval) - set(layout.axes),
    )  # fmt: skip


def scattered_aval(aval, layout: Layout, axis: int):
    """Return the type of a global value that is divided over the devices.

    It is for reductions with `result="sharded"`: each device has a part of the result.

    Args:
      aval: The type of the whole global value, `[*s]`.
      layout: The layout of the partition, which is sharded.
      axis: The axis of `[*s]` along which the value is divided.

    Returns:
      The type `[*s]`, still that of the whole value. Dimension `axis` is sharded over
      those axes of the partition that are Explicit; Auto axes are not in types.
    """
    spec = inner_spec(aval, layout, 0)
    spec[axis] = layout.spec_entry
    mesh, varying = layout.abstract_mesh, _compat.varying(aval)
    return _typed(aval, layout, mesh, aval.shape, spec, varying)


@_compat.cache()
def group_aval(aval, layout: Layout):
    """Return the type of one group's slice, from that of a partitioned value.

    Args:
      aval: The type of the partitioned value, `[n, *s]` for n groups; or `[k, *s]`, for
        the k groups of a device, inside a user's `shard_map` over the partition's axes.
      layout: The layout of the partition.

    Returns:
      The type `[*s]`, which does not vary over the partition's axes. If it did, JAX
      would cast what a mapped function closes over, which does not vary; and the
      transpose of that cast is a sum over the devices.
    """
    varying = _compat.varying(aval) - set(layout.axes)
    return _typed(
        aval, layout, layout.abstract_mesh, aval.shape[1:],
        inner_spec(aval, layout, 1), varying,
    )  # fmt: skip


def slices_aval(aval, layout: Layout):
    """Return the type of a map's operand inside the function that lowers the map.

    That function is traced as the work of one group is: no value in it varies over the
    partition's mesh axes, although in a user's `shard_map` the operands of the map do.

    Args:
      aval: The type of the operand: `[n, *s]` for n groups, or `[k, *s]` for the k
        groups of a device inside a user's `shard_map` over the partition's axes; or
        `[*s]` if all groups share it.
      layout: The layout of the partition.

    Returns:
      A type of the same shape, dtype and sharding that does not vary over the
      partition's axes. Outside such a `shard_map` it is `aval` itself.
    """
    if not layout.manual:
        return aval
    varying = _compat.varying(aval) - set(layout.axes)
    return _compat.replace_aval(aval, aval.shape, aval.sharding, varying)


@_compat.cache()
def column_aval(aval, layout: Layout, skip: int, partitioned: bool):
    """Return the type of an operand of a `map_columns`, for its function of one column.

    A column has the elements of all n groups at one coordinate c: an index into the
    leading dimensions `s` of the slices.

    Args:
      aval: The type of the whole operand: of a global value `[*s, *t]`; of a
        partitioned value `[n, *s, *t]`, or `[k, *s, *t]` for the k groups of a device
        inside a user's `shard_map` over the partition's axes.
      layout: The layout of the partition, n groups.
      skip: The number of dimensions of `s`; 0 if all coordinates share the value, which
        then is `[*t]`.
      partitioned: Whether the value is partitioned.

    Returns:
      The type `[*t]` of a global value, or `[n, *t]` of a partitioned one: a column has
      all n groups, also inside a `shard_map`. It varies over no mesh axes, and is not
      weakly typed.
    """
    lead = (layout.partition.size,) if partitioned else ()
    skip += len(lead)
    shape = (*lead, *aval.shape[skip:])
    spec = (*[None] * len(lead), *inner_spec(aval, layout, skip))
    typed = _typed(aval, layout, layout.abstract_mesh, shape, spec, set())
    return typed.update(weak_type=False)


@_compat.cache()
def columns_aval(
    aval, layout: Layout, lead: tuple[int, ...], partitioned: bool, varying: frozenset
):
    """Return the type of a `map_columns` result, given the type for one column.

    The function computes the result of one column: of the elements of all n groups at
    one coordinate of the slices.

    Args:
      aval: The type that the function returns, `[*t]` of a global value, or `[n, *t]`
        of a partitioned one.
      layout: The layout of the partition, n groups.
      lead: The dimensions before `t` in the new type. If the result is partitioned,
        first the size of the group axis: n, or inside a user's `shard_map` over the
        partition's axes the number of groups on a device. Then the shape of the
        coordinates, if the result has a value for each of them.
      partitioned: Whether the result is partitioned.
      varying: The Manual mesh axes over which some operand varies.

    Returns:
      The type `[*lead, *t]`, which is not weakly typed. It varies over those axes in
      `varying` that are not the partition's. It varies over the partition's axes, too,
      if `partitioned` is True and the code is inside a user's
      `shard_map(check_vma=True)` over them.
    """
    varying = varying - set(layout.axes)
    if partitioned and layout.manual and _compat.check_vma():
        varying |= set(layout.axes)
    group_axes = 1 if partitioned else 0
    shape = (*lead, *aval.shape[group_axes:])
    group_entry = (layout.spec_entry,) * group_axes
    free = [None] * (len(lead) - group_axes)
    spec = (*group_entry, *free, *inner_spec(aval, layout, group_axes))
    typed = _typed(aval, layout, layout.abstract_mesh, shape, spec, varying)
    return typed.update(weak_type=False)


def index_aval():
    """Return the type of a group index: an int32 scalar, on the mesh in context."""
    mesh = jax.sharding.get_abstract_mesh()
    return _compat.ShapedArray((), jnp.int32, sharding=NamedSharding(mesh, P()))
