"""Execution of a function of one device's slices on all devices.

Input: a function of the slices of a device's k groups, and operands for the whole
partition. Output: its results for the whole partition, or one for each device.

`shard_map_over_devices` calls it inside a `shard_map` over the partition's axes with
varying-manual-axes checking; on local and manual layouts, directly. `auto_partition`
leaves the distribution to the compiler.

Invariants: operands are on the mesh of the layout, and padded to k * m slices; results
are cut to n slices. Sharp edges: the function sees padding, and has to mask it.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike

from drjax import _compat
from drjax._compat.types import (
    Array,
    Aval,
    Flags,
    GlobalArray,
    PartitionedArray,
    PyTree,
    PyTreeDef,
)
from drjax._jaxprs.prng_keys import on_raw
from drjax._sharding.avals import inner_spec
from drjax._sharding.layout import Layout


def shard_map_over_devices(
    layout: Layout,
    body: Callable[..., Sequence[Array]],
    args: Sequence[Array],
    partitioned_in: Sequence[bool | P],
    partitioned_out: Sequence[bool | P | None],
    check_vma: bool = True,
    with_indices: bool = False,
    with_first_index: bool = False,
    result_layout: Layout | None = None,
) -> list[Array]:
    """Run a function of one device's slices on all devices of the partition.

    A partition of n groups on m devices gives each device k slots, of one group each;
    if m does not divide n, the last slots are padding. On a sharded layout the function
    runs in a `jax.shard_map` over the partition's mesh axes. On a local layout (one
    device has all groups) and in a user's `shard_map` over those axes it is called
    directly, with operands and results of the current device.

    `body` takes the operands and returns a flat sequence of results: of partitioned
    values the slices of the current device, `[k, *s]`, global values whole, `[*s]`.
    Padded slots of operands hold zeros; what it returns in them is dropped.

    * `partitioned_in` says how the devices divide each operand. True: it is
      partitioned, `[n, *s]`. False: it is global. A `PartitionSpec`: it is global, and
      `body` takes the current device's part; the devices must divide it evenly.
    * `partitioned_out` says the same of each result. None: each device returns a value
      of its own, `[1, *s]`, and the result is `[m, *s]`.
    * `with_indices`: `body` takes one more argument, the last one: the group indices of
      the device's slots, int32 `[k]`; of padding, n or more.
    * `with_first_index`: `body` takes, in place of these, the group index of the
      device's first slot, int32 `[1]`.
    * `result_layout` is that of partitioned results, if they have another number of
      groups on the same devices; None: `layout`.
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


def shard_map_over_levels(
    layout: Layout,
    axes: tuple[str, ...],
    body: Callable[..., GlobalArray],
    x: PartitionedArray,
) -> GlobalArray:
    """Reduce the partial reductions of two levels of groups, in one `shard_map`.

    Each group of the outer level has already reduced its inner groups on each of m
    devices, which lie along the mesh axes `axes` of the inner level: `x` is
    `[n, m, *s]`. The `shard_map` is over the mesh axes of both levels. `layout` is that
    of the outer level, which is sharded, with k slots on each device.

    `body` takes the partial reductions of one device, `[k, 1, *s]`, zeros for padding.
    If some slots are padding, it also takes the group indices of the slots, int32
    `[k]`, which are n or more for padding. It returns a value that is equal on all
    devices.
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
    """Return how a global value is divided, as an entry of `partitioned_out`.

    Each device of the partition has a part along `axis`; None: each has all of it.
    """
    return False if axis is None else P(*[None] * axis, layout.axes)


def auto_partition(
    layout: Layout,
    run: Callable[..., tuple[Sequence[Array], Sequence[Array]]],
    args: Sequence[Array],
    partitioned_in: Flags,
) -> tuple[list[Array], list[PartitionedArray]]:
    """Run a function of all devices' slices, and leave it to the compiler to divide it.

    It replaces `shard_map_over_devices` for work that cannot run in a `shard_map`, such
    as indexing inside groups on a mesh with several other axes, or a map inside a
    user's `shard_map` over other axes with varying-manual-axes checking. Sharding
    constraints on the operands and results tell the compiler which device has which
    slots. The layout is sharded.

    `run` takes the operands for all slots: partitioned ones as `[k * m, *s]`, whose
    padded slots hold copies of the slice of group 0, and global ones as `[*s]`. It
    returns a pair of lists: values with one slice for each device, `[m, *s]`, and
    partitioned results, `[k * m, *s]`. Both are returned, the latter without padding,
    `[n, *s]`.
    """
    n = layout.partition.size

    def operand(x: PartitionedArray) -> Array:
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


def all_group_indices(layout: Layout) -> Array:
    """Make an array of the group indices of all slots, int32 `[k * m]`.

    Slot i has group i; it is padding if that is n or more. On a mesh, the array has the
    type of a partitioned operand, so that each device gets the indices of its own
    slots.
    """
    return as_operand(lax.iota(jnp.int32, layout.num_slots), layout, True)


def first_group_indices(layout: Layout) -> Array:
    """Make an array of the group index of each device's first slot, int32 `[m]`.

    A device whose index is n or more has no group. On a mesh, the array has the type of
    a partitioned operand with one slice for each device.
    """
    indices = lax.iota(jnp.int32, layout.devices) * layout.per_device
    return as_operand(indices, layout, True)


def _laid_out(x: Array, layout: Layout) -> Array:
    """Constrain axis 0 of `x` to be sharded over the partition's mesh axes.

    If these are Explicit, `x` is returned as it is: its type has the sharding already,
    and JAX refuses constraints on such axes. `x` is `[k * m, *s]` or `[m, *s]`. The
    other dimensions stay unconstrained. The layout is sharded.
    """
    if layout.spec_entry is not None:
        return x
    return _constrained(x, layout, layout.axes, *[P.UNCONSTRAINED] * (x.ndim - 1))


def _constrained(x: Array, layout: Layout, *entries: Any) -> Array:
    """Constrain an array by the entries of a `PartitionSpec` for the layout's mesh."""
    assert layout.mesh is not None
    return lax.with_sharding_constraint(x, NamedSharding(layout.mesh, P(*entries)))


def computed_in_parts(x: GlobalArray, layout: Layout) -> GlobalArray:
    """Let devices compute the parts of a global value that they have, and gather these.

    Without a constraint, the compiler takes the last equation of a value that is whole
    in a `shard_map` for one of whole values, too. Of a server that is divided, it would
    gather what that equation takes, as numbers before they are rounded to 16 bits.
    """
    if not layout.sharded or layout.explicit or not x.ndim:
        return x
    return _constrained(x, layout, *[P.UNCONSTRAINED] * x.ndim)


def undivided_if_uneven(x: GlobalArray, layout: Layout, axis: int) -> GlobalArray:
    """Keep XLA from dividing a global value along an axis, if that would be uneven.

    The value is about to be scattered: each group gets its slice along `axis`. XLA's
    partitioner aborts the process if it divides the result of a `scatter-add` unevenly
    (`PadBaseShapeBeforeUnevenTiledSharding`), and the gradient of a global value may be
    such a result. All devices have a global value, so the constraint costs nothing.
    """
    if not (layout.sharded and layout.uneven):
        return x
    entries: list[Any] = [P.UNCONSTRAINED] * x.ndim
    entries[axis] = None
    return _constrained(x, layout, *entries)


def divided_coordinates(x: GlobalArray, layout: Layout, count: int) -> GlobalArray:
    """Divide `[n, *s, *t]`, of `count` coordinates `s`, as the devices computed it.

    They have gathered parts of the coordinates, in their flat order. If XLA were to
    choose, it might send operands of the last operation.
    """
    if not layout.sharded or layout.explicit or count % layout.devices:
        return x
    flat = x.reshape(len(x), count, -1)
    flat = _constrained(flat, layout, P.UNCONSTRAINED, layout.axes, P.UNCONSTRAINED)
    return flat.reshape(x.shape)


def shard_map(
    layout: Layout,
    fn: Callable[..., Any],
    in_specs: P | Sequence[P],
    out_specs: PyTree,
    check_vma: bool = True,
) -> Callable[..., Any]:
    """Map `fn` by `jax.shard_map` over the partition's mesh axes only.

    The layout is sharded. If its mesh is abstract, the mesh in context is used.
    """
    mesh = layout.mesh if isinstance(layout.mesh, Mesh) else None
    mapped = jax.shard_map(
        fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs,
        axis_names=set(layout.axes), check_vma=check_vma,
    )  # fmt: skip
    # Eagerly, JAX fails to nest shard_maps over different axes.
    return mapped if _compat.under_trace() else jax.jit(mapped)


def on_own_shards(
    layout: Layout, fn: Callable[[list[Any]], list[Array]], xs: list[Any]
) -> list[Array]:
    """Run a function on a device's own shards of values that Explicit axes shard.

    It is called in the code of one device of the partition. `fn` takes and returns a
    list of arrays, of which each result is sharded as the value in its place; so it may
    reshape values, which JAX's types do not allow where Explicit axes shard them.
    """
    return on_explicit_shards(fn, xs) if layout.other_explicit_axes else fn(xs)


def on_explicit_shards(
    fn: Callable[[list[Any]], list[Array]], xs: list[Any]
) -> list[Array]:
    """Run a function on a device's own shards of values on a mesh with Explicit axes.

    `fn` and its results are as those of `on_own_shards`.
    """
    mesh = jax.sharding.get_abstract_mesh()
    specs = tuple(_compat.typeof(x).sharding.spec for x in xs)
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    axes = {axis for axis, kind in kinds if kind == AxisType.Explicit}
    run = lambda *xs: tuple(fn(list(xs)))
    vma = _compat.check_vma()
    return [
        *jax.shard_map(
            run, in_specs=specs, out_specs=specs, axis_names=axes, check_vma=vma
        )(*xs)
    ]


def vary(x: Any, axes: Iterable[str]) -> Any:
    """Cast an array to vary over these Manual mesh axes, by `lax.pcast(to="varying")`.

    The cast communicates nothing. JAX calls it pbroadcast; its transpose is a psum, a
    sum over the devices along these axes (JAX note 17111, "Efficient transposition of
    replication-inducing collectives").
    """
    if not _compat.check_vma():
        return x
    missing = tuple(a for a in axes if a not in _compat.varying(_compat.typeof(x)))
    return lax.pcast(x, missing, to="varying") if missing else x


def types_of(fn: Callable[..., PyTree], *args: Array) -> PyTree:
    """Return the types of what a function returns, a tree, for `full_of_type`.

    `jax.eval_shape` has shardings only where all mesh axes are Explicit.
    """
    trees: list[PyTreeDef] = []

    def flat(*args: Array) -> list[Array]:
        leaves, tree = jax.tree.flatten(fn(*args))
        trees.append(tree)
        return leaves

    avals = [*map(_compat.typeof, args)]
    types = _compat.trace_to_jaxpr(flat, avals, "types")[0].out_avals
    return trees[0].unflatten(types)


def full_of_type(like: Aval, fill: ArrayLike) -> Array:
    """Make an array of the type of `like`, with the number `fill` in each element.

    It has the shape and dtype of `like`, such as `types_of` returns, its sharding on
    Explicit axes, and varies over the Manual mesh axes over which `like` varies. So it
    can be the carry of a loop or the result of a branch: JAX requires equal types of
    these.
    """
    explicit = AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types
    sharding = like.sharding if explicit else None
    x = lax.full(like.shape, fill, like.dtype, sharding=sharding)
    return vary(x, _compat.varying(like)) if _compat.check_vma() else x


def as_operand(x: Array, layout: Layout, partitioned: bool) -> Array:
    """Give an array the type that the operand of a building block needs on a mesh.

    It is called outside the primitive, so that JAX transposes what it does: a global
    array that is used as a partitioned one gets its cotangent as a global array again.

    * On Explicit axes, the array is resharded: only its group axis, if it is
      partitioned, is sharded over the partition's axes.
    * If the layout has a concrete mesh that is not JAX's mesh in context, an array
      under a trace gets a sharding constraint that names no axes. `jit` finds the
      devices in it, as it does not look for them in drjax's primitives.
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


def with_sharding_of(x: Array | _compat.Zero, aval: Aval) -> Any:
    """Reshard an array to the sharding of a type, on Explicit axes.

    Elsewhere the array is returned unchanged; a symbolic zero always is. On Explicit
    axes, a sharding is a part of a type. JAX checks that a cotangent has that of its
    primal value, that a loop's step keeps those of the carry, and that the branches of
    a `cond` return the same ones.
    """
    if type(x) is _compat.Zero:
        return x
    mesh = aval.sharding.mesh
    explicit = not mesh.empty and AxisType.Explicit in mesh.axis_types
    if not explicit or _compat.typeof(x).sharding == aval.sharding:
        return x
    return jax.sharding.reshard(x, aval.sharding)


def with_shardings_of(xs: Sequence[Array], like: Sequence[Array]) -> list[Array]:
    """Reshard arrays to the shardings of as many others, on Explicit axes."""
    pairs = zip(xs, like, strict=True)
    return [with_sharding_of(x, _compat.typeof(y)) for x, y in pairs]


def _pad_slices(x: PartitionedArray, layout: Layout) -> Array:
    """Pad a partitioned value `[n, *s]` with slices of zeros to `[k * m, *s]`.

    Of typed random keys, they are zeros of key data. Before the work of groups runs,
    `copy_slice_to_padding` (in `padding.py`) replaces these zeros by copies of a
    group's slice.
    """
    extra = layout.per_device * layout.devices - layout.partition.size
    if not extra:
        return x

    def padded(x: Array) -> Array:
        zero = jnp.zeros((), x.dtype)
        return lax.pad(x, zero, [(0, extra, 0)] + [(0, 0, 0)] * (x.ndim - 1))

    return on_raw(padded, x)
