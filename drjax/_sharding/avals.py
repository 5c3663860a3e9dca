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
    """Remove mesh axes from one entry of a `PartitionSpec`.

    Args:
      spec_entry: The entry: a mesh axis, a tuple of them, None or `UNCONSTRAINED`.
      axes: The names of the mesh axes to remove.

    Returns:
      The axis that remains, or the tuple of axes; None if no axis remains, as for the
      entries None and `UNCONSTRAINED`.
    """
    if spec_entry is None or spec_entry is P.UNCONSTRAINED:
        return None
    entry = spec_entry if isinstance(spec_entry, tuple) else (spec_entry,)
    left = tuple(a for a in entry if a not in axes)
    return left[0] if len(left) == 1 else left or None


def inner_spec(aval, layout: Layout, skip: int):
    """How a value is sharded inside a group: its spec without the partition's axes.

    Of a partitioned value, only the group axis may be sharded over these axes.

    Args:
      aval: The type of a value, `[*s]` or `[n, *s]`.
      layout: The layout of the partition.
      skip: The number of leading dimensions to leave out: 1 for the group axis of a
        partitioned value, else 0.

    Returns:
      A list with a `PartitionSpec` entry for each dimension from `skip` on.
    """
    spec = (*aval.sharding.spec, *[None] * aval.ndim)[: aval.ndim]
    return [_without(entry, layout.axes) for entry in spec[skip:]]


def _typed(aval, layout, mesh, shape, spec, varying):
    """Copy a type with another shape, sharding and VMA.

    Args:
      aval: The type to copy; its dtype stays.
      layout: The layout of the partition.
      mesh: The abstract mesh of the new sharding. Without a mesh in the layout it is
        ignored, and the new type has the mesh of `aval`.
      shape: The new shape.
      spec: For each dimension an entry of the new `PartitionSpec`.
      varying: The set of mesh axes over which a value of the new type varies.
    """
    if layout.mesh is None:  # keep the operand's own mesh, if it has one
        mesh = aval.sharding.mesh
    sharding = NamedSharding(mesh, P(*spec))
    return _compat.replace_aval(aval, shape, sharding, varying)


@_compat.cache()
def partitioned_aval(aval, layout: Layout):
    """The type of a partitioned value, from that of a global value or of a slice.

    Args:
      aval: The type `[*s]`.
      layout: The layout of the partition.

    Returns:
      The type `[n, *s]`, for n groups. Inside a user's `shard_map` over the partition's
      axes, `[k, *s]`, for the k groups of a device; with VMA checking it varies over
      these axes.
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
    """The type of a reduction's result, from that of its partitioned operand.

    Args:
      aval: The type `[n, *s]`; `[k, *s]` inside a user's `shard_map` over the
        partition's axes.
      layout: The layout of the partition.

    Returns:
      The type `[*s]`, which does not vary over the partition's axes.
    """
    return _typed(
        aval, layout, layout.abstract_mesh, aval.shape[1:],
        inner_spec(aval, layout, 1), _compat.varying(aval) - set(layout.axes),
    )  # fmt: skip


def scattered_aval(aval, layout: Layout, axis: int):
    """The type of a global value of which each device has a part: `result="sharded"`.

    Args:
      aval: The type of the global value, `[*s]`.
      layout: The layout of the partition, which is sharded.
      axis: The axis along which the value is divided over the partition's devices.

    Returns:
      The type `[*s]`, with the partition's Explicit axes at `axis`.
    """
    spec = inner_spec(aval, layout, 0)
    spec[axis] = layout.spec_entry
    mesh, varying = layout.abstract_mesh, _compat.varying(aval)
    return _typed(aval, layout, mesh, aval.shape, spec, varying)


@_compat.cache()
def group_aval(aval, layout: Layout):
    """The type of one group's slice, from that of a partitioned value.

    Args:
      aval: The type `[n, *s]`; `[k, *s]` inside a user's `shard_map` over the
        partition's axes.
      layout: The layout of the partition.

    Returns:
      The type `[*s]`, which does not vary over the partition's axes. Else what a mapped
      function closes over, which does not vary, would be cast, and the transpose of
      the cast is a sum over the devices.
    """
    varying = _compat.varying(aval) - set(layout.axes)
    return _typed(
        aval, layout, layout.abstract_mesh, aval.shape[1:],
        inner_spec(aval, layout, 1), varying,
    )  # fmt: skip


def slices_aval(aval, layout: Layout):
    """The type with which an operand of a map enters the function that is lowered.

    That function is traced like the work of one group: its values do not vary over the
    partition's axes, although in a user's `shard_map` the operands do.

    Args:
      aval: The type of the operand, `[k, *s]`, or `[*s]` if all groups share it.
      layout: The layout of the partition.

    Returns:
      The same type, but inside a user's `shard_map` over the partition's axes it does
      not vary over these.
    """
    if not layout.manual:
        return aval
    varying = _compat.varying(aval) - set(layout.axes)
    return _compat.replace_aval(aval, aval.shape, aval.sharding, varying)


@_compat.cache()
def column_aval(aval, layout: Layout, skip: int, partitioned: bool):
    """The type of an operand of the function of one column, for `map_columns`.

    A column has, at one coordinate of the slices, the elements of all groups.

    Args:
      aval: The type of the whole operand, `[*s, *t]`; of a partitioned value, `[n, *s,
        *t]`, or `[k, *s, *t]` inside a user's `shard_map` over the partition's axes.
      layout: The layout of the partition, of n groups.
      skip: The number of dimensions of `s`, the shape of the coordinates; 0 if all
        coordinates share the value.
      partitioned: Whether the value is partitioned.

    Returns:
      The type `[*t]`, or `[n, *t]` for all groups. It varies over no Manual axes.
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
    """The type of a result of `map_columns`, from that of one column's result.

    Args:
      aval: The type of one column's result, `[*t]`, or `[n, *t]` for all groups.
      layout: The layout of the partition, of n groups.
      lead: The dimensions before `t` in the new type, such as those of the coordinates.
      partitioned: Whether the result is partitioned. Then `lead` and the type of one
        column's result have a group axis, as axis 0.
      varying: The mesh axes over which an operand varies.

    Returns:
      The type `[*lead, *t]`. A global value does not vary over the partition's axes.
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
    """The type of a group index, an int32 scalar on the mesh in context."""
    mesh = jax.sharding.get_abstract_mesh()
    return _compat.ShapedArray((), jnp.int32, sharding=NamedSharding(mesh, P()))
