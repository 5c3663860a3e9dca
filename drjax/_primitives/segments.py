"""Slices at the place of a segment, and the reductions of them by segment.

Input: the segment of one group, int32 `[]` from 0 to num, and its slice `[*s]`. Output:
`[num, *s]`, the slice at its segment and a number elsewhere, by `place_in_segment`; its
transpose, `slice_of_segment`, reads the slice of a segment out of `[num, *s]`. Of
segment num there is no place: nothing is placed, and zeros are read.

A reduction by segment, as `jax.ops.segment_sum`, is in programs and plans the reduction
over the groups of what each has placed. So it needs no rules of its own, and one
all-reduce. What runs it on a device recognizes the placement (`placements`), and
reduces the k slices of the device into one array `[num, *s]` (`reduce_segments`):

    sum_i place(g_i, x_i)[j] = sum {x_i : g_i = j}

The work is that of k slices and not of num k, and there is no array `[k, num, *s]`.
With num = 0 there is one place, `[*s]`, and at most one group is in it, that of segment
0: `drjax.select`. Then a device reads one of its slices. Batched, there are several, of
segments `[*b]`, and slices `[*b, *s]`, of size 1 where the batch shares one. A
scatter adds one number after another, with an error that grows as k. So sums of many
floats are added in r buckets of the groups, `[r, num, *s]`, and then these: each bucket
has k / r numbers, and the buckets have at most an eighth of the memory of the slices.

Invariants: infinities and NaNs reach their own segment only. Sharp edges: XLA aborts
for a scatter or gather in an array that is sharded over two other mesh axes, and JAX
asks for types on Explicit ones: there (`scatters`) all num places are written.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad, batching
from jax.interpreters.mlir import LoweringRuleContext
from jax.sharding import AxisType, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from drjax import _compat
from drjax._compat import UndefinedPrimal
from drjax._compat.jax_types import Literal
from drjax._compat.types import Array, Atom, Aval, ClosedJaxpr, DeviceArray
from drjax._jaxprs import walk
from drjax._primitives import registration
from drjax._primitives.lowered_equations import (
    MlirValue,
    PlacedResult,
    map_of,
)
from drjax._primitives.registration import Tangent
from drjax._sharding.execute import vary
from drjax._sharding.layout import Layout, Placement, other_axes

place_in_segment_p = registration.new_primitive("place_in_segment")
slice_of_segment_p = registration.new_primitive("slice_of_segment")


def place_in_segment(segment: Array, slice_: Array, num: int, fill: ArrayLike) -> Array:
    """Place one group's slice, `[*s]`, in its segment of `[num, *s]`; `fill` others.

    `fill` is a Python number. With `num` 0 the result is `[*s]`, the slice in segment 0
    and `fill` in another one. The caller knows that at most one group is in segment 0.
    """
    return place_in_segment_p.bind(segment, slice_, num=num, fill=fill)


def slice_of_segment(segment: Array, table: Array) -> Array:
    """Read the slice of one group's segment from `[num, *s]`; zeros of segment num."""
    return slice_of_segment_p.bind(segment, table)


# ---------------------------------------------------------------------------------
# Rules


def _may_index() -> bool:
    """Whether arrays of one group may be indexed on the mesh in context.

    XLA aborts only where some axes are Manual, as those of the partition mostly are.
    """
    mesh = jax.sharding.get_abstract_mesh()
    sizes = zip(mesh.axis_types, mesh.axis_sizes, strict=True)
    auto = [size for kind, size in sizes if kind == AxisType.Auto and size > 1]
    if AxisType.Explicit in mesh.axis_types:
        return False
    return AxisType.Manual not in mesh.axis_types or len(auto) <= 1


def _hits(segment: Array, num: int) -> Array:
    """Mark the place of a segment: bool `[..., num]` of segments `[...]`."""
    if not num:
        return segment == 0
    shape = (*segment.shape, num)
    places = lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1)
    return lax.broadcast_in_dim(segment, shape, range(segment.ndim)) == places


def _where(hits: Array, x: Array, fill: ArrayLike) -> Array:
    """Choose `x` where a leading part of its shape is marked, else a number."""
    hits = lax.expand_dims(hits, range(hits.ndim, x.ndim))
    return jnp.where(hits, x, jnp.asarray(fill, x.dtype))


def _execute_place(
    segment: Array, slice_: Array, *, num: int, fill: ArrayLike
) -> Array:
    place = lambda hit: _where(hit, slice_, fill)
    return (jax.vmap(place) if num else place)(_hits(segment, num))


def _execute_slice(segment: Array, table: Array) -> Array:
    num = table.shape[0]
    if not _may_index():
        # One term is not zero, and it is not multiplied: nothing leaks.
        kept = _where(_hits(segment, num), table, 0)
        return _sum(kept, axis=0)
    own = lax.dynamic_index_in_dim(table, jnp.minimum(segment, num - 1), 0, False)
    return _where(segment < num, own, 0)


def _sum(x: Array, axis: int) -> Array:
    """Add up numbers of which at most one is not zero, in their own dtype."""
    if x.dtype == jnp.bool_:
        return jnp.any(x, axis=axis)
    return jnp.sum(x, axis=axis, dtype=x.dtype)


def placed_aval(segment: Aval, slice_: Aval, num: int) -> Aval:
    """Return the type of a slice in its segment, `[num, *s]`, or `[*b, *s]` with 0."""
    if not num:
        lead = segment.ndim
        spec = PartitionSpec(*[None] * lead, *slice_.sharding.spec[lead:])
        shape = *segment.shape, *slice_.shape[lead:]
        return _compat.replace_aval(
            slice_, shape, slice_.sharding.update(spec=spec), _compat.varying(slice_)
        )
    spec = PartitionSpec(None, *slice_.sharding.spec)
    sharding, varying = slice_.sharding.update(spec=spec), _compat.varying(slice_)
    return _compat.replace_aval(slice_, (num, *slice_.shape), sharding, varying)


def _place_abstract_eval(
    segment: Aval, slice_: Aval, *, num: int, fill: ArrayLike
) -> Aval:
    return _typed(placed_aval(segment, slice_, num), segment)


def _slice_abstract_eval(segment: Aval, table: Aval) -> Aval:
    spec = PartitionSpec(*table.sharding.spec[1:])
    sharding, varying = table.sharding.update(spec=spec), _compat.varying(table)
    aval = _compat.replace_aval(table, table.shape[1:], sharding, varying)
    return _typed(aval, segment)


def _typed(aval: Aval, segment: Aval) -> Aval:
    """Let a type vary where that of a segment does."""
    varying = _compat.varying(aval) | _compat.varying(segment)
    aval = _compat.replace_aval(aval, aval.shape, aval.sharding, varying)
    return aval.update(weak_type=False)


def _batch_place(
    args: Sequence[Array], dims: Sequence[int | None], *, num: int, fill: ArrayLike
) -> tuple[Array, int]:
    (segment, slice_), (dim, slice_dim) = args, dims
    if slice_dim is not None:
        to = segment.ndim if dim is None else 0
        slice_ = _compat.moveaxis(slice_, slice_dim, to)
    if dim is None:
        return place_in_segment(segment, slice_, num, fill), to + (num > 0)
    if slice_dim is None:
        slice_ = slice_[None]
    if not num:
        segment = _compat.moveaxis(segment, dim, 0)
        return place_in_segment(segment, slice_, 0, fill), 0
    hits = lax.expand_dims(_hits(segment, num), range(2, slice_.ndim + 1))
    x = jnp.expand_dims(slice_, 1)
    return jnp.where(hits, x, jnp.asarray(fill, x.dtype)), 0


def _batch_slice(
    args: Sequence[Array], dims: Sequence[int | None]
) -> tuple[Array, int]:
    (segment, table), (dim, table_dim) = args, dims
    if dim is None:
        assert table_dim is not None
        table = _compat.moveaxis(table, table_dim, 1)
        return slice_of_segment(segment, table), 0
    axes = 0, table_dim
    if _may_index() and table_dim is None:
        num = table.shape[0]
        own = jnp.take(table, jnp.minimum(segment, num - 1), axis=0, mode="clip")
        return _where(segment < num, own, 0), 0
    return jax.vmap(_execute_slice, axes)(segment, table), 0


def _place_jvp(
    primals: tuple[Array, Array],
    tangents: tuple[Any, Any],
    *,
    num: int,
    fill: ArrayLike,
) -> tuple[Array, Tangent]:
    segment, _ = primals
    placed = place_in_segment(*primals, num, fill)
    t = tangents[1]
    if type(t) is _compat.Zero:
        return placed, _compat.Zero(_compat.typeof(placed).to_tangent_aval())
    return placed, place_in_segment(segment, t, num, 0)


def _slice_jvp(
    primals: tuple[Array, Array], tangents: tuple[Any, Any]
) -> tuple[Array, Tangent]:
    segment, _ = primals
    own, t = slice_of_segment(*primals), tangents[1]
    if type(t) is _compat.Zero:
        return own, _compat.Zero(_compat.typeof(own).to_tangent_aval())
    return own, slice_of_segment(segment, t)


# <place(g, x), y> = <x, y[g]>: with zeros around x, each is the other's transpose; and
# with one place, it is its own.
def _place_transpose(
    ct: Tangent, segment: Array, slice_: UndefinedPrimal, *, num: int, fill: ArrayLike
) -> list[Any]:
    if isinstance(ct, _compat.Zero):
        return [None, _compat.Zero(slice_.aval)]
    if not num:
        own, shape = place_in_segment(segment, ct, 0, 0), slice_.aval.shape
        shared = [i for i, size in enumerate(shape) if size != own.shape[i]]
        return [None, jnp.sum(own, axis=shared, keepdims=True) if shared else own]
    return [None, slice_of_segment(segment, ct)]


def _slice_transpose(ct: Tangent, segment: Array, table: UndefinedPrimal) -> list[Any]:
    if isinstance(ct, _compat.Zero):
        return [None, _compat.Zero(table.aval)]
    return [None, place_in_segment(segment, ct, table.aval.shape[0], 0)]


registration.register_execution(place_in_segment_p, _execute_place)
registration.register_execution(slice_of_segment_p, _execute_slice)
place_in_segment_p.def_abstract_eval(_place_abstract_eval)
slice_of_segment_p.def_abstract_eval(_slice_abstract_eval)
ad.primitive_jvps[place_in_segment_p] = _place_jvp
ad.primitive_jvps[slice_of_segment_p] = _slice_jvp
ad.primitive_transposes[place_in_segment_p] = _place_transpose
ad.primitive_transposes[slice_of_segment_p] = _slice_transpose
batching.primitive_batchers[place_in_segment_p] = _batch_place
batching.primitive_batchers[slice_of_segment_p] = _batch_slice


# ---------------------------------------------------------------------------------
# Reductions of what the groups of a device have placed


@dataclass(frozen=True)
class PlacedOutput:
    """A result of a jaxpr of one group that is a slice in its segment.

    Attributes:
      segment: The variable or literal of the segment.
      slice_: That of the slice, `[*s]`.
      num: The number of segments.
      fill: The number in all other places.
    """

    segment: Atom
    slice_: Atom
    num: int
    fill: ArrayLike


@_compat.weakref_lru_cache
def placements(jaxpr: ClosedJaxpr) -> dict[int, PlacedOutput]:
    """Find the results of a jaxpr of one group that are slices in their segments.

    They are by the positions of the results. Barriers behind a placement are left out:
    they keep bits, which a placement does not change.
    """
    raw = _compat.open_jaxpr(jaxpr)
    defined = walk.definitions(raw.eqns)
    placed = {}
    for i, result in enumerate(raw.outvars):
        eqn = None if isinstance(result, Literal) else defined.get(result)
        while eqn is not None and eqn.primitive is lax.optimization_barrier_p:
            eqn = defined.get(eqn.invars[0]) if len(eqn.invars) == 1 else None
        if eqn is not None and eqn.primitive is place_in_segment_p:
            placed[i] = PlacedOutput(*eqn.invars, **eqn.params)
    return placed


@_compat.weakref_lru_cache
def with_segments(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """Let a jaxpr also return segment and slice of each of its `placements`, last."""
    placed = placements(jaxpr).values()
    more = [x for each in placed for x in (each.segment, each.slice_)]
    return _compat.with_outputs(jaxpr, [*_compat.open_jaxpr(jaxpr).outvars, *more])


def scatters(layout: Layout) -> bool:
    """Whether code of one device of a layout may scatter its slices to segments.

    If the mesh has two Auto axes larger than one, or an Explicit one, besides those of
    the partition, it may not: see the module.
    """
    return not layout.other_explicit_axes and len(other_axes(layout)) <= 1


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True)
class InSegments:
    """The slices of c groups, `[c, *s]`, and their segments, int32 `[c]`.

    They stand for an array `[c, num, *s]`.
    """

    segments: Array
    slices: Array
    num: int

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the slices."""
        return self.slices.dtype

    def tree_flatten(self) -> tuple[tuple[Array, Array], int]:
        return (self.segments, self.slices), self.num

    @classmethod
    def tree_unflatten(cls, num: int, children: tuple[Array, Array]) -> "InSegments":
        return cls(*children, num)

    def without_padding(self, layout: Layout, indices: Array | None) -> "InSegments":
        """Leave out the slots whose group indices are n or more."""
        if indices is None:
            return self
        real = indices < layout.partition.size
        nowhere = jnp.int32(max(self.num, 1))
        real = lax.expand_dims(real, range(1, self.segments.ndim))
        segments = jnp.where(real, self.segments, nowhere)
        return InSegments(segments, self.slices, self.num)

    def only_in(self, empty: Array) -> Array:
        """Put the slice in the only place there is; `empty` if no group is in it."""
        chosen, slice_ = _only(self.segments, self.slices)
        chosen = lax.expand_dims(chosen, range(chosen.ndim, slice_.ndim))
        return jnp.where(chosen, slice_.astype(empty.dtype), empty)


def _only(segments: Array, slices: Array) -> tuple[Array, Array]:
    """Find the slice in segment 0 among `[c, *b, *s]`, if there is one, bool `[*b]`."""
    if segments.ndim == 1:
        own = lax.iota(jnp.int32, segments.shape[0])
        position = jnp.max(jnp.where(segments == 0, own, -1))
        first = jnp.maximum(position, 0)
        return position >= 0, lax.dynamic_index_in_dim(slices, first, 0, False)
    if segments.shape[1] == 1:  # no gather for one index
        squeezed = (lax.squeeze(x, (1,)) for x in (segments, slices))
        chosen, slice_ = _only(*squeezed)
        return chosen[None], slice_[None]
    if slices.shape[1] == 1:
        return jax.vmap(_only, (1, None))(segments, lax.squeeze(slices, (1,)))
    return jax.vmap(_only, (1, 1))(segments, slices)


_MANY_GROUPS = 1024  # of which sums are added in buckets
_MEMORY = 1 / 8  # of that of the slices, which the buckets may have

# The method of `jnp.ndarray.at` that combines by a ufunc.
_METHODS: dict[np.ufunc, str] = {np.add: "add", np.maximum: "max", np.minimum: "min"}


def is_neutral(ufunc: np.ufunc, fill: ArrayLike, identity: ArrayLike) -> bool:
    """Whether what is around a slice has no effect in a reduction by a ufunc."""
    return ufunc in _METHODS and bool(fill == identity)


def placed_of(
    ctx: LoweringRuleContext,
    value: MlirValue,
    placement: Placement,
    ufunc: np.ufunc,
    identity: ArrayLike,
) -> PlacedResult | None:
    """Return the slices that a map has placed in a value, to reduce these by a ufunc.

    None if the value is no such result, or if what is around a slice has an effect.
    """
    a_map, index = map_of(ctx, value, placement)
    placed = None if a_map is None else a_map.placed.get(index)
    neutral = placed is not None and is_neutral(ufunc, placed.fill, identity)
    return placed if neutral else None


def operand_of_device(
    layout: Layout, xs: Sequence[DeviceArray], num: int | None
) -> tuple[DeviceArray | InSegments, Array | None]:
    """Return what a device reduces, and the group indices of its slots if uneven.

    `xs` are the slices, or with `num` the segments and the slices; and the indices.
    """
    indices = xs[-1] if layout.uneven else None
    return xs[0] if num is None else InSegments(xs[0], xs[1], num), indices


def reduce_segments(
    ufunc: np.ufunc, x: InSegments, identity: ArrayLike, dtype: DTypeLike
) -> DeviceArray:
    """Reduce slices by segment, to `[num, *s]` of a dtype that holds theirs."""
    if not x.num:
        return x.only_in(jnp.asarray(identity, dtype))
    buckets = buckets_of_groups(ufunc, x)
    lead = () if buckets == 1 else (buckets,)
    empty = lax.full((*lead, x.num, *x.slices.shape[1:]), identity, dtype)
    types = map(_compat.typeof, (x.segments, x.slices))
    axes = frozenset().union(*map(_compat.varying, types))
    total = combine_segments(ufunc, vary(empty, axes), x, buckets)
    return jnp.sum(total, axis=0, dtype=dtype) if lead else total


def buckets_of_groups(ufunc: np.ufunc, x: InSegments) -> int:
    """In how many buckets to add up slices by segment; 1 where a scatter will do.

    The slices that are added one after another are as many as the buckets, if memory
    allows.
    """
    k = x.slices.shape[0]  # unknown with symbolic dimensions
    if ufunc is not np.add or not jnp.issubdtype(x.dtype, jnp.inexact):
        return 1
    if not isinstance(k, int) or k < _MANY_GROUPS:
        return 1
    return max(1, min(math.isqrt(k), int(k * _MEMORY / x.num)))


def combine_segments(
    ufunc: np.ufunc, total: Array, x: InSegments, buckets: int = 1
) -> Array:
    """Combine slices with those of their segments in `total`, `[num, *s]`.

    With several buckets it is `[buckets, num, *s]`. No other place of it is read or
    written.
    """
    # Compilers cannot scatter all types of one byte, or less.
    wide = total.dtype
    if wide == jnp.bool_ or wide.itemsize == 1:
        wide = jnp.float32 if jnp.issubdtype(wide, jnp.floating) else jnp.int32
    place: Any = x.segments
    if buckets > 1:
        k = x.slices.shape[0]
        bucket = lax.div(lax.iota(jnp.int32, k), jnp.int32(-(-k // buckets)))
        place = (bucket, x.segments)
    of_segments = total.astype(wide).at[place]
    new = getattr(of_segments, _METHODS[ufunc])(x.slices.astype(wide), mode="drop")
    return new.astype(total.dtype)
