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
    """An entry of a `PartitionSpec`, without some mesh axes: a name, names or None."""
    if spec_entry is None or spec_entry is P.UNCONSTRAINED:
        return None
    entry = spec_entry if isinstance(spec_entry, tuple) else (spec_entry,)
    left = tuple(a for a in entry if a not in axes)
    return left[0] if len(left) == 1 else left or None


def inner_spec(aval, layout: Layout, skip: int):
    """The entries of a type's spec from dimension `skip` on, as a list.

    Without the partition's axes, which may shard the group axis only.
    """
    spec = (*aval.sharding.spec, *[None] * aval.ndim)[: aval.ndim]
    return [_without(entry, layout.axes) for entry in spec[skip:]]


def _typed(aval, layout, mesh, shape, spec, varying):
    """A type like `aval`, with this shape, spec and set of varying manual axes.

    The mesh of its sharding is `mesh`, or on local layouts that of `aval`.
    """
    if layout.mesh is None:  # keep the operand's own mesh, if it has one
        mesh = aval.sharding.mesh
    sharding = NamedSharding(mesh, P(*spec))
    return _compat.group_aval(aval, shape, sharding, varying)


@_compat.cache()
def partitioned_aval(aval, layout: Layout):
    """Type of a partitioned `[n, *s]` from that of a global or per-group `[*s]`."""
    varying = _compat.varying(aval) - set(layout.axes)
    if layout.manual and _compat.check_vma():
        varying |= set(layout.axes)
    return _typed(
        aval, layout, layout.abstract_mesh, (layout.group_axis_size, *aval.shape),
        (layout.spec_entry, *inner_spec(aval, layout, 0)), varying,
    )  # fmt: skip


@_compat.cache()
def global_aval(aval, layout: Layout):
    """Type of `[*s]` from the type of a partitioned `[n, *s]`."""
    return _typed(
        aval, layout, layout.abstract_mesh, aval.shape[1:],
        inner_spec(aval, layout, 1), _compat.varying(aval) - set(layout.axes),
    )  # fmt: skip


@_compat.cache()
def group_aval(aval, layout: Layout):
    """Type of one group's `[*s]` from the type of a partitioned `[n, *s]`."""
    varying = _compat.varying(aval)
    if layout.manual and _compat.check_vma():
        varying |= set(layout.axes)
    return _typed(
        aval, layout, layout.abstract_mesh, aval.shape[1:],
        inner_spec(aval, layout, 1), varying,
    )  # fmt: skip


def index_aval(partition: Partition | None):
    """Type of an int32 scalar; with a partition, of the index of one of its groups."""
    mesh = jax.sharding.get_abstract_mesh()
    scalar = _compat.ShapedArray((), jnp.int32, sharding=NamedSharding(mesh, P()))
    if partition is None or not _compat.check_vma():
        return scalar
    manual = set(partition.mesh_axes) & set(mesh.manual_axes)
    return _compat.group_aval(scalar, (), scalar.sharding, manual)
