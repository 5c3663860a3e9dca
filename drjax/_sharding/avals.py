"""Types of global and partitioned values, on meshes with Explicit and Manual axes.

Input: the type of a value, and a layout. Output: its type after a broadcast, a
reduction, or for one group: shape, sharding, and varying manual axes (VMA).

Invariants: axes of the partition occur in the leading entry of a partitioned value's
spec only; a global value does not vary over them.
Sharp edges: without VMA checking no value varies; Auto axes have no entry in types.
"""

from collections.abc import Collection, Iterable, Set
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from drjax import _compat
from drjax._compat.types import Aval
from drjax._sharding.layout import Layout, SpecEntry


def _without(spec_entry: Any, axes: Collection[str]) -> SpecEntry:
    """Remove mesh axes from an entry of a `PartitionSpec`.

    The entry may also be `P.UNCONSTRAINED`, of which None remains.
    """
    if spec_entry is None or spec_entry is P.UNCONSTRAINED:
        return None
    entry = spec_entry if isinstance(spec_entry, tuple) else (spec_entry,)
    left = tuple(a for a in entry if a not in axes)
    return left[0] if len(left) == 1 else left or None


def inner_spec(aval: Aval, layout: Layout, skip: int) -> list[SpecEntry]:
    """Return how a value is sharded inside a group: without the partition's axes.

    Of a partitioned value, only the group axis may be sharded over the partition's mesh
    axes; this removes them from all other dimensions. There is an entry of a
    `PartitionSpec` for each dimension from `skip` on: 1 leaves out the group axis.
    """
    spec = (*aval.sharding.spec, *[None] * aval.ndim)[: aval.ndim]
    return [_without(entry, layout.axes) for entry in spec[skip:]]


def _typed(
    aval: Aval,
    layout: Layout,
    mesh: AbstractMesh,
    shape: tuple[int, ...],
    spec: Iterable[SpecEntry],
    varying: Set[str],
) -> Aval:
    """Copy a type with another shape, sharding and set of varying mesh axes.

    If the layout has no mesh, `mesh` is ignored.
    """
    if layout.mesh is None:  # keep the operand's own mesh, if it has one
        mesh = aval.sharding.mesh
    sharding = NamedSharding(mesh, P(*spec))
    return _compat.replace_aval(aval, shape, sharding, varying)


@_compat.cache()
def partitioned_aval(aval: Aval, layout: Layout) -> Aval:
    """Return the type `[n, *s]` of a partitioned value, given that of a slice, `[*s]`.

    The group axis is sharded over those axes of the partition that are Explicit. Inside
    a user's `shard_map` over the partition's axes the type is `[k, *s]`, for the k
    groups of a device; with varying-manual-axes checking (VMA), it then varies over
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
def global_aval(aval: Aval, layout: Layout) -> Aval:
    """Return the type `[*s]` of a reduction's result, from that of its operand.

    The operand is `[n, *s]`; or `[k, *s]`, for the k groups of a device, inside a
    user's `shard_map` over the partition's axes. The result is neither sharded over
    these axes, nor varies over them.
    """
    return _typed(
        aval, layout, layout.abstract_mesh, aval.shape[1:],
        inner_spec(aval, layout, 1), _compat.varying(aval) - set(layout.axes),
    )  # fmt: skip


def scattered_aval(aval: Aval, layout: Layout, axis: int) -> Aval:
    """Return the type of a global value `[*s]` that the devices divide along an axis.

    It is for reductions with `result="sharded"`: each device has a part of the result.
    The layout is sharded. The shape stays that of the whole value. Dimension `axis` is
    sharded over those axes of the partition that are Explicit; Auto axes are not in
    types.
    """
    spec = inner_spec(aval, layout, 0)
    spec[axis] = layout.spec_entry
    mesh, varying = layout.abstract_mesh, _compat.varying(aval)
    return _typed(aval, layout, mesh, aval.shape, spec, varying)


@_compat.cache()
def device_aval(aval: Aval, layout: Layout, shape: tuple[int, ...]) -> Aval:
    """Return the type `[m, *shape]` of one value of `shape` for each of m devices.

    Inside a user's `shard_map` it is `[1, *shape]`. No other axes shard it; its dtype
    is that of `aval`.
    """
    m = 1 if layout.manual else layout.devices
    spec = (layout.spec_entry, *[None] * len(shape))
    typed = _typed(
        aval, layout, layout.abstract_mesh, (m, *shape), spec, _compat.varying(aval)
    )
    return typed.update(weak_type=False)


@_compat.cache()
def group_aval(aval: Aval, layout: Layout) -> Aval:
    """Return the type `[*s]` of one group's slice, from that of a partitioned value.

    The value is `[n, *s]`; or `[k, *s]`, for the k groups of a device, inside a user's
    `shard_map` over the partition's axes. The slice does not vary over these axes. If
    it did, JAX would cast what a mapped function closes over, which does not vary; and
    the transpose of that cast is a sum over the devices.
    """
    varying = _compat.varying(aval) - set(layout.axes)
    return _typed(
        aval, layout, layout.abstract_mesh, aval.shape[1:],
        inner_spec(aval, layout, 1), varying,
    )  # fmt: skip


def slices_aval(aval: Aval, layout: Layout) -> Aval:
    """Return the type of a map's operand inside the function that lowers the map.

    That function is traced as the work of one group is: no value in it varies over the
    partition's mesh axes, although in a user's `shard_map` the operands of the map do.
    The operand is partitioned, or global if all groups share it; its shape, dtype and
    sharding stay.
    """
    if not layout.manual:
        return aval
    varying = _compat.varying(aval) - set(layout.axes)
    return _compat.replace_aval(aval, aval.shape, aval.sharding, varying)


@_compat.cache()
def column_aval(aval: Aval, layout: Layout, skip: int, partitioned: bool) -> Aval:
    """Return the type of an operand of a `map_columns`, for its function of one column.

    A column has the elements of all n groups at one coordinate: an index into the
    leading `skip` dimensions `s` of the slices. If all coordinates share the value,
    `skip` is 0.

    The operand is `[*s, *t]` if global; `[n, *s, *t]` if partitioned, or `[k, *s, *t]`
    for the k groups of a device inside a user's `shard_map` over the partition's axes.
    The result is `[*t]` or `[n, *t]`: a column has all n groups, also inside a
    `shard_map`. It varies over no mesh axes, and is not weakly typed.
    """
    lead = (layout.partition.size,) if partitioned else ()
    skip += len(lead)
    shape = (*lead, *aval.shape[skip:])
    spec = (*[None] * len(lead), *inner_spec(aval, layout, skip))
    typed = _typed(aval, layout, layout.abstract_mesh, shape, spec, set())
    return typed.update(weak_type=False)


@_compat.cache()
def columns_aval(
    aval: Aval,
    layout: Layout,
    lead: tuple[int, ...],
    partitioned: bool,
    varying: frozenset[str],
) -> Aval:
    """Return the type of a `map_columns` result, given the type for one column.

    The latter is `[*t]` if global, `[n, *t]` if partitioned; the result is
    `[*lead, *t]`, not weakly typed. `lead` begins with the size of the group axis if it
    is partitioned, and goes on with the shape of the coordinates if it has a value for
    each of them.

    `varying` are the Manual mesh axes over which some operand varies. The result varies
    over those that are not the partition's. It varies over the partition's axes, too,
    if it is partitioned inside a user's `shard_map(check_vma=True)` over them.
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


def index_aval() -> Aval:
    """Return the type of a group index: an int32 scalar, on the mesh in context."""
    mesh = jax.sharding.get_abstract_mesh()
    return _compat.ShapedArray((), jnp.int32, sharding=NamedSharding(mesh, P()))
