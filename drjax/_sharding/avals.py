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
from drjax._partition import Partition
from drjax._sharding.layout import Layout


def _without(spec_entry, axes):
    """Remove the mesh axes `axes` from one entry of a `PartitionSpec`.

    Returns the axis that remains, or a tuple of axes; None if no axis remains, as for
    the entries None and `UNCONSTRAINED`.
    """
    if spec_entry is None or spec_entry is P.UNCONSTRAINED:
        return None
    entry = spec_entry if isinstance(spec_entry, tuple) else (spec_entry,)
    left = tuple(a for a in entry if a not in axes)
    return left[0] if len(left) == 1 else left or None


def inner_spec(aval, layout: Layout, skip: int):
    """The entries of a type's `PartitionSpec` from dimension `skip` on, as a list.

    They leave out the partition's axes, which may shard the group axis only.

    Args:
      aval: The type of a value, `[*s]` or `[n, *s]`.
      layout: The layout of the partition.
      skip: 1 leaves out the group axis of a partitioned value; else 0.
    """
    spec = (*aval.sharding.spec, *[None] * aval.ndim)[: aval.ndim]
    return [_without(entry, layout.axes) for entry in spec[skip:]]


def _typed(aval, layout, mesh, shape, spec, varying):
    """A type like `aval`, of another shape and sharding.

    Args:
      aval: The type whose dtype is used.
      layout: The layout of the partition.
      mesh: The abstract mesh of the new sharding. A local layout ignores it: the new
        type has the mesh of `aval`.
      shape: The new shape.
      spec: An entry of a `PartitionSpec` for each dimension.
      varying: The set of mesh axes over which a value of the new type varies.
    """
    if layout.mesh is None:  # keep the operand's own mesh, if it has one
        mesh = aval.sharding.mesh
    sharding = NamedSharding(mesh, P(*spec))
    return _compat.group_aval(aval, shape, sharding, varying)


@_compat.cache()
def partitioned_aval(aval, layout: Layout):
    """The type of a partitioned `[n, *s]`, from that of a global or per-group `[*s]`.

    Inside a user's `shard_map` over the partition's axes, the group axis has the size
    k, the number of groups of a device.
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
    """The type of a reduction's result `[*s]`, from that of a partitioned `[n, *s]`."""
    return _typed(
        aval, layout, layout.abstract_mesh, aval.shape[1:],
        inner_spec(aval, layout, 1), _compat.varying(aval) - set(layout.axes),
    )  # fmt: skip


@_compat.cache()
def group_aval(aval, layout: Layout):
    """The type of one group's slice `[*s]`, from that of a partitioned `[n, *s]`."""
    varying = _compat.varying(aval)
    if layout.manual and _compat.check_vma():
        varying |= set(layout.axes)
    return _typed(
        aval, layout, layout.abstract_mesh, aval.shape[1:],
        inner_spec(aval, layout, 1), varying,
    )  # fmt: skip


def index_aval(partition: Partition | None):
    """The type of a group index, an int32 scalar.

    Args:
      partition: The partition of the group: under VMA checking, the index varies over
        the partition's Manual axes. None: a scalar that varies over no axis.
    """
    mesh = jax.sharding.get_abstract_mesh()
    scalar = _compat.ShapedArray((), jnp.int32, sharding=NamedSharding(mesh, P()))
    if partition is None or not _compat.check_vma():
        return scalar
    manual = set(partition.mesh_axes) & set(mesh.manual_axes)
    return _compat.group_aval(scalar, (), scalar.sharding, manual)
