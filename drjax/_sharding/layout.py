"""The layout of a partition on a mesh.

Input: a partition, and a mesh or None. Output: a `Layout`, or a `MeshError`.

A partition of n groups over m devices gives each device k = ceil(n / m) slots, of one
group each. If m does not divide n, the last slots have no group: they are padding. The
primitives are written once, as functions of one device's slices, and run through
`execute.shard_map_over_devices`, in one of three modes:

* local: no mesh, or a mesh without the partition's axes. One device has all groups.
* manual: inside a user's `shard_map` over those axes. Values are sliced already.
* sharded: a `jax.shard_map` over the partition's axes only, with `check_vma`. Other
  mesh axes stay as they are, so models may be sharded over them inside a group.

Sharp edges:

* n not divisible by m: slices are padded with zeros to k * m by `lax.pad` (padding by
  a concatenation or a gather costs collectives), and every reduction masks them. The
  work of groups never sees these zeros; see `padding.py`. JAX's types cannot express
  uneven shards, so Explicit axes refuse this.
* A concrete `Mesh` that is not JAX's context mesh is invisible to jit, so operands
  are constrained to it outside the primitives.
"""

import functools
import logging
import math
import operator
from dataclasses import dataclass
from typing import TypeAlias, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike

from drjax import _compat
from drjax._compat.types import Array, DeviceArray, PyTree
from drjax._context import current_scope, planned
from drjax._errors import MeshError
from drjax._partition import Partition

_logger = logging.getLogger("drjax")

# An entry of a `PartitionSpec`: the mesh axes over which a dimension is sharded.
SpecEntry: TypeAlias = str | tuple[str, ...] | None


class Placement(TypedDict):
    """The parameters of all equations of drjax, from which their layout is made."""

    partition: Partition
    mesh: Mesh | AbstractMesh | None


# ---------------------------------------------------------------------------------
# Finding the mesh


def axis_sizes(mesh: Mesh | AbstractMesh | None, shardings: PyTree) -> dict[str, int]:
    """Return the sizes of the axes of a compiled function's mesh by name, major first.

    The mesh is the one that the user passed; else the one in context; else the largest
    one in the tree `shardings` of the function's arguments and results. {} if there is
    none.
    """
    _check_is_mesh(mesh)
    mesh = _mesh_in_context() if mesh is None else mesh
    if mesh is None:
        named = jax.tree.leaves(shardings)
        meshes = [x.mesh for x in named if isinstance(x, NamedSharding)]
        mesh = max(meshes, key=lambda m: m.size, default=None)
    return {} if mesh is None else dict(mesh.shape)


def slices_of_devices(
    mesh: Mesh | AbstractMesh | None, shardings: PyTree
) -> tuple[int, ...]:
    """Return the slice of each device of a compiled function's mesh, major first.

    () if no mesh with devices is known, or these know of no slices.
    """
    shape = axis_sizes(mesh, shardings)
    named = [x.mesh for x in jax.tree.leaves(shardings) if isinstance(x, NamedSharding)]
    for each in (mesh, *named):
        if isinstance(each, Mesh) and dict(each.shape) == shape:
            known = all(hasattr(x, "slice_index") for x in each.devices.flat)
            return tuple(_slices_of(each.devices).flat) if known else ()
    return ()


@functools.lru_cache(maxsize=256)
def axes_inside_slices(mesh: Mesh, axes: tuple[str, ...]) -> tuple[str, ...]:
    """Return the mesh axes inside slices if `axes` go from slice to slice, else ().

    A slice is a set of devices with a fast network; see `_slices_of`.
    """
    slices = _slices_of(mesh.devices)
    between = {
        axis
        for i, axis in enumerate(mesh.axis_names)
        if (slices != slices.take([0], axis=i)).any()
    }
    if between.isdisjoint(axes):
        return ()
    return tuple(axis for axis in mesh.axis_names if axis not in between.union(axes))


def _slices_of(devices: np.ndarray) -> np.ndarray:
    """Return what is equal for the devices of a slice.

    That is a TPU slice, or the devices of one process if these know of no slices. GPUs
    know of their host; but if all are in one slice, as to divide what all would send
    pays there, too, those of one process are taken for one.
    """
    known = {getattr(x, "slice_index", None) for x in devices.flat}
    by_process = None in known
    by_process |= len(known) == 1 and devices.flat[0].platform == "gpu"
    index = operator.attrgetter("process_index" if by_process else "slice_index")
    return np.vectorize(index, otypes=[object])(devices)


def _check_is_mesh(mesh: object) -> None:
    """Raise `MeshError` unless the user's argument `mesh=` is a mesh or None."""
    if not (mesh is None or isinstance(mesh, Mesh | AbstractMesh)):
        raise MeshError(
            "mesh= needs a jax.sharding.Mesh or AbstractMesh, got "
            f"{type(mesh).__name__}: {mesh!r}."
        )


def _mesh_in_context() -> Mesh | AbstractMesh | None:
    """Return the mesh of `jax.set_mesh` or of `with mesh:`; None if there is none."""
    context = jax.sharding.get_abstract_mesh()
    return _compat.legacy_mesh() if context.empty else context


def devices_in_context(partition: Partition | None) -> int:
    """Over how many devices the mesh in context divides the groups; without one, 1.

    Not of a layout: while a plan is traced, these have no mesh.
    """
    axes = () if partition is None else partition.mesh_axes
    sizes = jax.sharding.get_abstract_mesh().shape
    return math.prod(sizes.get(axis, 1) for axis in axes)


def find_mesh(
    partition: Partition, mesh: Mesh | AbstractMesh | None = None
) -> Mesh | AbstractMesh | None:
    """Choose the mesh to shard a partition over; None: the program then runs locally.

    `mesh` is the one that the user passed, or None for the one in context: that of
    `jax.set_mesh` or of a `with mesh:` block. If it was passed under `jax.set_mesh`,
    the result is the equal mesh of the context, which knows what axes are Manual.

    None in four cases: there is no mesh; it has none of the partition's axes; the call
    is inside a function that is mapped over a partition on one of the same axes; or a
    program is being traced for a plan that `drjax.jit` runs under the mesh in context
    (`planning(True)`), outside mapped functions, as such a plan has no mesh in its
    equations. A mesh on which the partition cannot be laid out is a `MeshError`.
    """
    context = jax.sharding.get_abstract_mesh()
    mapped = current_scope().mapped
    if planned.value and not mapped:
        return None
    _check_is_mesh(mesh)
    if mesh is None:
        mesh = _mesh_in_context()
        if mesh is None:
            return None
    elif not context.empty:
        if mesh.shape_tuple != context.shape_tuple:
            raise MeshError(
                f"mesh= is {_show(mesh)}, but the mesh in context is "
                f"{_show(context)}; JAX needs them to be the same. Leave out mesh=, "
                "or leave the jax.set_mesh context."
            )
        current = _compat.concrete_mesh()
        if isinstance(mesh, Mesh) and not (mesh is current or current.empty):
            _check_devices(mesh, current)
        mesh = context  # the context's mesh has the Manual axis types
    present = [axis for axis in partition.mesh_axes if axis in mesh.axis_names]
    if not present:
        _log_missing_axis(partition.mesh_axes, mesh.axis_names)
        return None
    if any(set(outer.mesh_axes) & set(partition.mesh_axes) for outer in mapped):
        return None  # these axes have the groups of an enclosing mapped function
    if len(present) != len(partition.mesh_axes):
        missing = sorted(set(partition.mesh_axes) - set(present))
        raise MeshError(
            f"Partition {partition} needs mesh axes {partition.mesh_axes}, but the "
            f"mesh {_show(mesh)} lacks {missing}. Name only axes of the mesh in "
            "mesh_axes=, or add the missing ones."
        )
    if context.empty and isinstance(mesh, AbstractMesh):
        raise MeshError(
            f"mesh= is the AbstractMesh {_show(mesh)}, which names no devices, and no "
            "mesh is in context. Pass the jax.sharding.Mesh itself, or run the program "
            "under jax.set_mesh(mesh)."
        )
    make_layout(partition, mesh)  # checks
    return mesh


@functools.lru_cache(maxsize=1024)
def _log_missing_axis(axes: tuple[str, ...], axis_names: tuple[str, ...]) -> None:
    """Log that a mesh has none of a partition's axes; once for equal arguments."""
    _logger.info(
        "mesh with axes %s has no axis %s: the program runs locally", axis_names, axes
    )


@functools.lru_cache(maxsize=1024)
def _log_copies(partition: Partition, devices: int) -> None:
    """Log that `drjax.shard` cannot divide data; once for equal arguments."""
    _logger.warning(
        "drjax.shard: %s devices do not divide the groups of %s, and JAX stores no "
        "uneven shards, so each device stores the slices of all groups. With a "
        "multiple of %s groups, some of them left out by where=, it stores its own.",
        devices, partition, devices,
    )  # fmt: skip


def _check_devices(mesh: Mesh, current: Mesh) -> None:
    """Check that the argument `mesh=` has the devices of the mesh in context, in order.

    Both have the same number of devices.
    """
    pairs = zip(mesh.devices.flat, current.devices.flat, strict=False)
    for device, needed in pairs:
        if device != needed:
            raise MeshError(
                f"mesh= {_show(mesh)} has device {device} in the place of {needed} of "
                "the mesh in context; JAX needs the meshes to be the same. Leave out "
                "mesh=, or leave the jax.set_mesh context."
            )


def _show(mesh: Mesh | AbstractMesh) -> str:
    """Format a mesh for an error, axes with sizes: `(clients: 4, model: 2)`."""
    return "(" + ", ".join(f"{k}: {v}" for k, v in mesh.shape_tuple) + ")"


# ---------------------------------------------------------------------------------
# Layouts


@dataclass(frozen=True)
class Layout:
    """How the groups of a partition are divided over the devices of a mesh.

    The n groups lie on m devices in order. Each device has k = ceil(n / m) slots, which
    are places for one group each: device d has the groups `d * k` to `d * k + k - 1`.
    If m does not divide n, the last slots have no group: they are padding.

    A layout is in one of three modes. Local: there is no mesh with the partition's
    axes, and one device has all groups. Manual: the code is inside a user's `shard_map`
    over these axes, so that values are one device's slices already. Sharded: otherwise;
    drjax's code for a device's slices then needs a `shard_map` around it.

    Attributes:
      mesh: The mesh over which it is sharded; None: the layout is local.
      axes: The names of the partition's mesh axes, () if the layout is local.
      devices: m, the number of devices along those axes, 1 if the layout is local.
      manual: Whether those axes are Manual already, inside a user's `shard_map` over
        them.
    """

    partition: Partition
    mesh: Mesh | AbstractMesh | None
    axes: tuple[str, ...]
    devices: int
    manual: bool

    @property
    def per_device(self) -> int:
        """The number k of slots on each device."""
        return -(-self.partition.size // self.devices)

    @property
    def group_axis_size(self) -> int:
        """The size of the group axis that partitioned values have in the user's code.

        They are `[n, *s]`. Inside a user's `shard_map` over the partition's axes, code
        sees only the slices of one device, `[k, *s]`.
        """
        return self.per_device if self.manual else self.partition.size

    @property
    def uneven(self) -> bool:
        """Whether some slots have no group, as the devices do not divide n."""
        return self.per_device * self.devices != self.partition.size

    @property
    def used(self) -> int:
        """The number of devices that have groups, which are the first ones."""
        return -(-self.partition.size // self.per_device)

    @property
    def has_empty_devices(self) -> bool:
        """Whether some device has no group, so that all of its slots are padding."""
        return self.used < self.devices

    @property
    def partial_count(self) -> int:
        """The number of groups on the one device that has both groups and padding.

        The groups fill the slots of the devices in order, so that one device may be
        filled partly, with n mod k groups. 0 if there is no such device.
        """
        return self.partition.size % self.per_device

    @property
    def sharded(self) -> bool:
        """Whether drjax must put a `shard_map` around code for one device's slices.

        It must on a mesh with the partition's axes, unless a user's `shard_map` has
        made them Manual already.
        """
        return bool(self.axes) and not self.manual

    @property
    def partly_manual(self) -> bool:
        """Whether code for a device's slices still has mesh axes that are not Manual.

        Such code runs in a `shard_map` over the partition's axes, perhaps inside a
        user's `shard_map` over others; the axes of both are Manual. Over any other
        axis, the compiler may shard the values inside a group. False without a mesh.
        """
        if self.mesh is None:
            return False
        types = _axis_types(self.mesh)
        manual = {a for a, kind in types.items() if kind == AxisType.Manual}
        return not set(types) <= manual.union(self.axes)

    @property
    def other_explicit_axes(self) -> bool:
        """Whether the mesh has Explicit axes that are not the partition's."""
        if self.mesh is None:
            return False
        types = _axis_types(self.mesh)
        return any(types[a] == AxisType.Explicit for a in types if a not in self.axes)

    @property
    def explicit(self) -> bool:
        """Whether any axis is Explicit, so that types say how values are divided."""
        return self.spec_entry is not None or self.other_explicit_axes

    @property
    def abstract_mesh(self) -> AbstractMesh:
        """The abstract mesh under which code for the whole partition is traced.

        It is that of the layout's mesh; without a mesh, the one in context.
        """
        if self.mesh is None:
            return jax.sharding.get_abstract_mesh()
        return self.mesh.abstract_mesh if isinstance(self.mesh, Mesh) else self.mesh

    @property
    def num_slots(self) -> int:
        """The number of all slots, k * m, with padding."""
        return self.per_device * self.devices

    @property
    def spmd_axes(self) -> tuple[str, ...] | None:
        """The `spmd_axis_name` to pass to a `jax.vmap` over all groups of a partition.

        None if one of the partition's axes is Explicit: `vmap` then reads the axes in
        the types of operands.
        """
        return None if self.spec_entry else self.axes

    @property
    def spec_entry(self) -> SpecEntry:
        """The `PartitionSpec` entry of the group axis, in a partitioned value's type.

        It has those axes of the partition that are Explicit, as only these are in
        types. None if there are none, or if the layout is not sharded.
        """
        if self.mesh is None or not self.sharded:
            return None
        types = _axis_types(self.mesh)
        entry = tuple(a for a in self.axes if types[a] == AxisType.Explicit)
        return entry[0] if len(entry) == 1 else entry or None

    def group_indices(self) -> Array:
        """Make an array of the group indices of this device's slots, int32 `[k]`.

        That of padding is n or more. If the layout has mesh axes, they must be Manual
        where this is called: it uses `lax.axis_index`.
        """
        local = lax.iota(jnp.int32, self.per_device)
        if not self.axes:
            return local
        return lax.axis_index(self.axes) * self.per_device + local

    def mask_padding(
        self, x: DeviceArray, indices: Array | None, fill: ArrayLike
    ) -> DeviceArray:
        """Replace the slices of padded slots, so that a reduction ignores them.

        `x` has the slices of some of a device's slots, `[slots, *s]`, and `indices`
        their group indices, int32 `[slots]`, n or more for padding; None: no slot is
        padding. `fill` is the identity of the reduction, such as 0 for a sum.
        """
        if indices is None:
            return x
        valid = lax.broadcast_in_dim(indices < self.partition.size, x.shape, (0,))
        return jnp.where(valid, x, jnp.asarray(fill, x.dtype))


@functools.lru_cache(maxsize=1024)
def make_layout(partition: Partition, mesh: Mesh | AbstractMesh | None) -> Layout:
    """Make the layout of a partition on a mesh that has all of its axes; cached.

    Without a mesh, the layout is local. A `MeshError` says why there is none.
    """
    if mesh is None:
        return Layout(partition, None, (), 1, False)
    types = _axis_types(mesh)
    axes, sizes = partition.mesh_axes, dict(mesh.shape_tuple)
    kinds = {types[a] for a in axes}
    if AxisType.Manual in kinds and len(kinds) > 1:
        manual = [a for a in axes if types[a] == AxisType.Manual]
        raise MeshError(
            f"Partition {partition} lies on mesh axes {axes}, of which only {manual} "
            "are Manual here. Make all of them Manual in the surrounding "
            "jax.shard_map, or none."
        )
    devices = 1
    for axis in axes:
        devices *= sizes[axis]
    result = Layout(partition, mesh, axes, devices, AxisType.Manual in kinds)
    if result.uneven and result.manual:
        raise MeshError(
            f"Inside jax.shard_map over {axes}, each of the {devices} devices needs "
            f"the same number of groups, but {partition.size} groups are not divisible "
            f"by {devices}. Use a partition size that is a multiple of {devices}."
        )
    if result.uneven and AxisType.Explicit in kinds:
        fit = result.per_device * devices
        raise MeshError(
            f"Partition {partition} does not divide evenly over the {devices} devices "
            f"of mesh axes {axes}, and these axes are Explicit: JAX's types cannot "
            "express uneven shards. Either make the axes Auto: jax.make_mesh(..., "
            f"axis_types=(jax.sharding.AxisType.Auto, ...)); or use {fit} groups and "
            "leave the last ones out with where= or a weight of zero."
        )
    return result


def axes_of_groups(layout: Layout) -> tuple[str, ...]:
    """Return the mesh axes over which the groups will be sharded when the program runs.

    They are the axes of the layout. But while `drjax.jit` traces a plan under the mesh
    in context, layouts have no mesh: then they are those of the partition's axes that
    the mesh in context has and that are not Manual.
    """
    if layout.axes or not planned.value:
        return layout.axes
    mesh = jax.sharding.get_abstract_mesh()
    axes = set(mesh.axis_names).difference(mesh.manual_axes)
    return tuple(axis for axis in layout.partition.mesh_axes if axis in axes)


def other_axes(layout: Layout) -> list[str]:
    """Return the Auto mesh axes, larger than one, that are not the partition's.

    A model may be sharded over them inside a group. They are in the order of the mesh.
    """
    if layout.mesh is None:
        return []
    sizes, types = dict(layout.mesh.shape_tuple), _axis_types(layout.mesh)
    return [
        axis
        for axis in layout.mesh.axis_names
        if axis not in layout.axes and types[axis] == AxisType.Auto and sizes[axis] > 1
    ]


def _axis_types(mesh: Mesh | AbstractMesh) -> dict[str, AxisType]:
    """Map the name of each axis of a mesh to its type: Auto, Explicit or Manual."""
    return dict(zip(mesh.axis_names, mesh.axis_types, strict=True))


def host_sharding(
    partition: Partition, mesh: Mesh | AbstractMesh | None
) -> NamedSharding | None:
    """Choose the sharding in which `drjax.shard` places data `[n, ...]` on the devices.

    It divides axis 0 over the partition's mesh axes. It is replicated if the devices do
    not divide the groups, as JAX stores no uneven shards, and inside a user's
    `shard_map` over these axes. None if there is no mesh with the partition's axes.
    `mesh` is the one that the user passed, or None for the one in context.
    """
    if (mesh := find_mesh(partition, mesh)) is None:
        return None
    layout = make_layout(partition, mesh)
    if layout.uneven and not layout.manual:
        _log_copies(partition, layout.devices)
    spec = P() if layout.uneven or layout.manual else P(layout.axes)
    if isinstance(mesh, AbstractMesh) and not _compat.under_trace():
        concrete = jax.sharding.get_mesh()  # the context's, with its devices
        if concrete.empty:
            raise MeshError(
                "drjax.shard needs devices, but the mesh in context, "
                f"{_show(mesh)}, is abstract. Use jax.set_mesh, or pass mesh=."
            )
        mesh = concrete
    return NamedSharding(mesh, spec)
