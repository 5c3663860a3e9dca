"""How a partition lies on a mesh. The only file that looks at meshes.

A partition of n groups over m devices gives each device k = ceil(n / m) rows. The
primitives are written once, as functions of the rows that one device holds, and run
through `on_devices`, in one of three modes:

* local: no mesh, or a mesh without the partition's axes. One device holds all rows.
* manual: inside a user's `shard_map` over those axes. The rows are there already.
* sharded: a variance-tracking `jax.shard_map` over the partition's axes only. Other
  mesh axes stay as they are, so models may be sharded over them inside a group.

Sharp edges:

* n not divisible by m: rows are padded with zeros to k * m by `lax.pad` (padding by
  a concatenation or a gather costs collectives), and every reduction masks them. The
  work of groups never sees these zeros; see `padding.py`. JAX's types cannot express
  uneven shards, so Explicit axes refuse this.
* A concrete `Mesh` that is not JAX's context mesh is invisible to jit, so operands
  are constrained to it outside the primitives.
"""

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from drjax import _compat
from drjax._context import current_scope, planned
from drjax._errors import MeshError
from drjax._partition import Partition

_logger = logging.getLogger("drjax")


# ---------------------------------------------------------------------------------
# Finding the mesh


def find_mesh(partition: Partition, mesh: Any = None) -> Mesh | AbstractMesh | None:
    """The mesh that carries the partition: argument, else context, else None."""
    context = jax.sharding.get_abstract_mesh()
    if planned.value and not current_scope().mapped:
        return None
    if mesh is None:
        mesh = context if not context.empty else _compat.legacy_mesh()
        if mesh is None:
            return None
    elif not isinstance(mesh, Mesh | AbstractMesh):
        raise MeshError(
            "mesh= needs a jax.sharding.Mesh or AbstractMesh, got "
            f"{type(mesh).__name__}: {mesh!r}."
        )
    elif not context.empty:
        if mesh.shape_tuple != context.shape_tuple:
            raise MeshError(
                f"mesh= is {_show(mesh)}, but the mesh in context is "
                f"{_show(context)}; JAX needs them to be the same. Leave out mesh=, "
                "or leave the jax.set_mesh context."
            )
        mesh = context  # it knows which axes are Manual here
    present = [axis for axis in partition.mesh_axes if axis in mesh.axis_names]
    if not present:
        _log_missing_axis(partition.mesh_axes, mesh.axis_names)
        return None
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
    layout(partition, mesh)  # checks
    return mesh


@functools.lru_cache(maxsize=1024)
def _log_missing_axis(wanted, axis_names) -> None:
    _logger.info(
        "mesh with axes %s has no axis %s: the program runs locally", axis_names, wanted
    )


def _show(mesh) -> str:
    return "(" + ", ".join(f"{k}: {v}" for k, v in mesh.shape_tuple) + ")"


# ---------------------------------------------------------------------------------
# Layouts


@dataclass(frozen=True)
class Layout:
    """Where the rows of a partition are.

    Attributes:
      partition: The partition, n groups.
      mesh: The mesh that carries it, or None (local).
      axes: The mesh axes in use, () when local.
      devices: m, the number of devices along those axes.
      manual: Whether the axes are already Manual (inside a user's shard_map).
    """

    partition: Partition
    mesh: Mesh | AbstractMesh | None
    axes: tuple[str, ...]
    devices: int
    manual: bool

    @property
    def per_device(self) -> int:
        """k, the number of rows on each device, padding included."""
        return -(-self.partition.size // self.devices)

    @property
    def rows(self) -> int:
        """The leading axis of a partitioned value as the caller sees it."""
        return self.per_device if self.manual else self.partition.size

    @property
    def uneven(self) -> bool:
        return self.per_device * self.devices != self.partition.size

    @property
    def has_empty_devices(self) -> bool:
        """Whether some device has no group at all."""
        return self.partition.size <= self.per_device * (self.devices - 1)

    @property
    def few(self) -> int:
        """The number of groups on the one device that has fewer than k, but some."""
        return self.partition.size % self.per_device

    @property
    def sharded(self) -> bool:
        return bool(self.axes) and not self.manual

    @property
    def partly_manual(self) -> bool:
        """Whether code for a device's rows is Manual over only some mesh axes."""
        if self.mesh is None:
            return False
        types = _axis_types(self.mesh)
        manual = {a for a, kind in types.items() if kind == AxisType.Manual}
        return not set(types) <= manual.union(self.axes)

    @property
    def abstract_mesh(self) -> AbstractMesh:
        """The context in which code for the whole partition is traced."""
        if self.mesh is None:
            return jax.sharding.get_abstract_mesh()
        return self.mesh.abstract_mesh if isinstance(self.mesh, Mesh) else self.mesh

    @property
    def padded(self) -> int:
        """k * m, the number of rows on all devices, padding included."""
        return self.per_device * self.devices

    @property
    def spmd_axes(self) -> tuple[str, ...] | None:
        """The axes to name to `vmap`, which finds Explicit ones in types by itself."""
        return None if self.spec_entry else self.axes

    @property
    def spec_entry(self):
        """The leading entry of the type of a partitioned value (Explicit axes)."""
        if not self.sharded:
            return None
        types = _axis_types(self.mesh)
        entry = tuple(a for a in self.axes if types[a] == AxisType.Explicit)
        return entry[0] if len(entry) == 1 else entry or None

    def row_numbers(self):
        """int32 [k]: the global numbers of this device's rows, inside `on_devices`."""
        local = lax.iota(jnp.int32, self.per_device)
        if not self.axes:
            return local
        return lax.axis_index(self.axes) * self.per_device + local

    def mask_padding(self, x, numbers, fill):
        """`x` with `fill` in the rows that are only padding, given the row numbers."""
        if numbers is None:
            return x
        valid = lax.broadcast_in_dim(numbers < self.partition.size, x.shape, (0,))
        return jnp.where(valid, x, jnp.asarray(fill, x.dtype))


@functools.lru_cache(maxsize=1024)
def layout(partition: Partition, mesh: Mesh | AbstractMesh | None) -> Layout:
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


def axes_of_groups(where: Layout) -> tuple[str, ...]:
    """The axes along which each device will have groups of its own."""
    if where.axes or not planned.value:
        return where.axes
    mesh = jax.sharding.get_abstract_mesh()
    axes = set(mesh.axis_names).difference(mesh.manual_axes)
    return tuple(axis for axis in where.partition.mesh_axes if axis in axes)


def other_axes(where: Layout) -> list[str]:
    """The Auto axes of the mesh, larger than one, that do not carry the partition."""
    if where.mesh is None:
        return []
    sizes, types = dict(where.mesh.shape_tuple), _axis_types(where.mesh)
    return [
        axis
        for axis in where.mesh.axis_names
        if axis not in where.axes and types[axis] == AxisType.Auto and sizes[axis] > 1
    ]


def _axis_types(mesh) -> dict[str, AxisType]:
    return dict(zip(mesh.axis_names, mesh.axis_types, strict=True))


# ---------------------------------------------------------------------------------
# Types of values


def _without(spec_entry, axes):
    if spec_entry is None or spec_entry is P.UNCONSTRAINED:
        return None
    entry = spec_entry if isinstance(spec_entry, tuple) else (spec_entry,)
    left = tuple(a for a in entry if a not in axes)
    return left[0] if len(left) == 1 else left or None


def _inner_spec(aval, layout: Layout, skip: int):
    spec = (*aval.sharding.spec, *[None] * aval.ndim)[: aval.ndim]
    return [_without(entry, layout.axes) for entry in spec[skip:]]


def _typed(aval, layout, mesh, shape, spec, varying):
    if layout.mesh is None:  # keep the operand's own mesh, if it has one
        mesh = aval.sharding.mesh
    sharding = NamedSharding(mesh, P(*spec))
    return _compat.group_aval(aval, shape, sharding, varying)


@_compat.cache()
def partitioned_aval(aval, layout: Layout):
    """Type of `[rows, *s]` from the type of a global or per-group `[*s]`."""
    varying = _compat.varying(aval) - set(layout.axes)
    if layout.manual and _compat.check_vma():
        varying |= set(layout.axes)
    return _typed(
        aval, layout, layout.abstract_mesh, (layout.rows, *aval.shape),
        (layout.spec_entry, *_inner_spec(aval, layout, 0)), varying,
    )  # fmt: skip


@_compat.cache()
def global_aval(aval, layout: Layout):
    """Type of `[*s]` from the type of a partitioned `[rows, *s]`."""
    return _typed(
        aval, layout, layout.abstract_mesh, aval.shape[1:],
        _inner_spec(aval, layout, 1), _compat.varying(aval) - set(layout.axes),
    )  # fmt: skip


@_compat.cache()
def group_aval(aval, layout: Layout):
    """Type of one group's `[*s]` from the type of a partitioned `[rows, *s]`."""
    varying = _compat.varying(aval)
    if layout.manual and _compat.check_vma():
        varying |= set(layout.axes)
    return _typed(
        aval, layout, layout.abstract_mesh, aval.shape[1:],
        _inner_spec(aval, layout, 1), varying,
    )  # fmt: skip


def number_aval(partition: Partition | None):
    """Type of an int32 scalar; if of a partition, the number of one of its groups."""
    mesh = jax.sharding.get_abstract_mesh()
    scalar = _compat.ShapedArray((), jnp.int32, sharding=NamedSharding(mesh, P()))
    if partition is None or not _compat.check_vma():
        return scalar
    manual = set(partition.mesh_axes) & set(mesh.manual_axes)
    return _compat.group_aval(scalar, (), scalar.sharding, manual)


# ---------------------------------------------------------------------------------
# Running on devices


def on_devices(
    layout: Layout,
    body: Callable[..., Sequence[Any]],
    args: Sequence[Any],
    partitioned_in: Sequence[bool],
    partitioned_out: Sequence[bool],
    check_vma: bool = True,
    numbered: bool = False,
    first: bool = False,
) -> list[Any]:
    """Run `body` on each device's rows; `body` takes and returns a flat sequence.

    With `numbered`, `body` takes as last argument the numbers of its rows, int32 [k];
    with `first`, that of the first one, int32 [1].
    """
    if not layout.sharded:
        last = [layout.row_numbers()] if numbered or first else []
        return list(body(*args, *(x[:1] if first else x for x in last)))
    args = [
        _pad_rows(as_operand(x, layout, p), layout) if p else x
        for x, p in zip(args, partitioned_in, strict=True)
    ]
    if numbered or first:  # an operand: lax.axis_index costs a nested shard_map each
        numbers = first_row_numbers(layout) if first else all_row_numbers(layout)
        args.append(numbers)
        partitioned_in = (*partitioned_in, True)
    in_specs = tuple(P(layout.axes) if p else P() for p in partitioned_in)
    out_specs = tuple(P(layout.axes) if p else P() for p in partitioned_out)
    run = lambda *xs: tuple(body(*xs))
    outs = shard_map(layout, run, in_specs, out_specs, check_vma)(*args)
    n = layout.partition.size  # what has fewer rows has one for each device
    return [
        lax.slice_in_dim(y, 0, n) if p and y.shape[0] > n else y
        for y, p in zip(outs, partitioned_out, strict=True)
    ]


def on_all_devices(
    layout: Layout, run: Callable, args: Sequence[Any], partitioned_in: Sequence[bool]
) -> list[Any]:
    """Run `run`, which the compiler partitions, on the rows of all devices at once.

    Args:
      layout: A sharded layout.
      run: From operands, padded to k * m rows, to partitioned results.
      args: The operands.
      partitioned_in: Which of them are partitioned.
    """
    n = layout.partition.size

    def operand(x):
        padded = _laid_out(_pad_rows(as_operand(x, layout, True), layout), layout)
        if not layout.uneven:
            return padded
        real = lax.iota(jnp.int32, layout.padded) < n  # the others hold group 0's row
        real = lax.broadcast_in_dim(real, padded.shape, (0,))
        return _laid_out(jnp.where(real, padded, padded[:1]), layout)

    pairs = zip(args, partitioned_in, strict=True)
    args = [operand(x) if p else x for x, p in pairs]
    # What has fewer rows has one for each device.
    outs = [_laid_out(y, layout) for y in run(*args)]
    return [lax.slice_in_dim(y, 0, n) if y.shape[0] > n else y for y in outs]


def all_row_numbers(layout: Layout):
    """int32 [k * m]: the numbers of all rows, laid out over the partition's axes."""
    return as_operand(lax.iota(jnp.int32, layout.padded), layout, True)


def first_row_numbers(layout: Layout):
    """int32 [m]: the number of each device's first row, laid out over the axes."""
    numbers = lax.iota(jnp.int32, layout.devices) * layout.per_device
    return as_operand(numbers, layout, True)


def _laid_out(x, layout: Layout):
    """Padded rows, laid out over the partition's axes; Explicit ones are in types."""
    if layout.spec_entry is not None:
        return x
    assert layout.mesh is not None
    spec = P(layout.axes, *[P.UNCONSTRAINED] * (x.ndim - 1))
    return lax.with_sharding_constraint(x, NamedSharding(layout.mesh, spec))


def shard_map(
    layout: Layout, fn: Callable, in_specs: Any, out_specs: Any, check_vma: bool = True
) -> Callable:
    """`jax.shard_map` over the partition's axes only."""
    mesh = layout.mesh if isinstance(layout.mesh, Mesh) else None
    return jax.shard_map(
        fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs,
        axis_names=set(layout.axes), check_vma=check_vma,
    )  # fmt: skip


def vary(x, axes):
    """`pcast(x, to="varying")` over those of `axes` on which `x` does not vary yet.

    This is pbroadcast, the twin of psum under transposition: it costs no
    communication (JAX note 17111, "Efficient transposition of replication-inducing
    collectives").
    """
    if not _compat.check_vma():
        return x
    missing = tuple(a for a in axes if a not in _compat.varying(_compat.typeof(x)))
    return lax.pcast(x, missing, to="varying") if missing else x


def as_operand(x, layout: Layout, partitioned: bool):
    """`x` with the type that a primitive's operand needs, and visible on the mesh.

    Resharding on Explicit axes here, outside the primitive, lets JAX transpose it: a
    global array used as a partitioned one gets its cotangent back as a global array.
    For a concrete mesh that is not in JAX's context, a constraint that says nothing
    else tells the surrounding jit which devices it runs on; it does not look into our
    primitives for that.
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
        spec = P(*lead, *_inner_spec(aval, layout, len(lead)))
        if aval.sharding != NamedSharding(layout.abstract_mesh, spec):
            x = jax.sharding.reshard(x, NamedSharding(mesh, spec))
    return x


def _pad_rows(x, layout: Layout):
    extra = layout.per_device * layout.devices - layout.partition.size
    if not extra:
        return x
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = _pad_rows(jax.random.key_data(x), layout)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    zero = jnp.zeros((), x.dtype)
    return lax.pad(x, zero, [(0, extra, 0)] + [(0, 0, 0)] * (x.ndim - 1))


def host_sharding(partition: Partition, mesh: Any) -> NamedSharding | None:
    """Where `drjax.shard` puts `[n, ...]` data; None if there is no mesh to use."""
    if (mesh := find_mesh(partition, mesh)) is None:
        return None
    where = layout(partition, mesh)
    spec = P() if where.uneven or where.manual else P(where.axes)
    if isinstance(mesh, AbstractMesh) and not _compat.under_trace():
        mesh = jax.sharding.get_mesh()  # the context's, with its devices
        if mesh.empty:
            raise MeshError(
                "drjax.shard needs devices, but the mesh in context, "
                f"{_show(where.mesh)}, is abstract. Use jax.set_mesh, or pass mesh=."
            )
    return NamedSharding(mesh, spec)


def sharding_of_product(dimension_numbers, x, y) -> NamedSharding | None:
    """The sharding of a product, if both operands contract sharded dimensions."""
    (lc, rc), (lb, rb) = dimension_numbers
    (left, right) = (jax.typeof(v).sharding for v in (x, y))
    contracted = zip(lc, rc, strict=True)
    if not any(left.spec[a] and right.spec[b] for a, b in contracted):
        return None
    parts = [left.spec[a] or right.spec[b] for a, b in zip(lb, rb, strict=True)]
    parts += [s for d, s in enumerate(left.spec) if d not in (*lc, *lb)]
    parts += [s for d, s in enumerate(right.spec) if d not in (*rc, *rb)]
    return NamedSharding(left.mesh, P(*parts))
