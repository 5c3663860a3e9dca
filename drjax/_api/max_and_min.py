"""Maxima and minima over the groups, and the groups that attain them, over pytrees.

Input: a tree of partitioned leaves `[n, *s]`, of real numbers or bools. Output: the
tree with global leaves. Invariants: NaN wins; of equals, the first group.
"""

import functools
from collections.abc import Callable
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from drjax._api.fold import reduce
from drjax._api.levels import Outer, Over, mesh_argument, over_levels
from drjax._api.participation import (
    Mask,
    Participation,
    Segments,
    check_default,
    keep_slices,
    or_default,
    participation,
)
from drjax._api.reductions import check_numeric
from drjax._api.resolve import (
    BlockParams,
    MeshLike,
    PartitionLike,
    bind_partitioned,
    map_leaves,
    resolve,
)
from drjax._compat.types import Array, GlobalArray, PartitionedArray, PyTree, Tree
from drjax._context import in_chunks
from drjax._errors import DrjaxTypeError
from drjax._partition import Partition
from drjax._primitives.collectives import broadcast_p, reduce_sum_p
from drjax._primitives.extrema import highest, lowest, reduce_max_p, reduce_min_p
from drjax._primitives.partition_index import partition_index_p
from drjax._primitives.segments import slice_of_segment
from drjax._sharding.execute import as_operand
from drjax._sharding.layout import make_layout


def _extremum_outwards(block: str) -> Outer:
    """Make the function that runs `reduce_max` or `reduce_min` over several levels.

    It reduces over the inner levels, and then over the outermost. `default=` replaces
    extrema over no group at all, so it is applied once, at the end: another reduction,
    of bools, finds where no group takes part.
    """

    def outer(
        arguments: Any, inner: Callable[..., PyTree], over: tuple[str, ...]
    ) -> PyTree:
        default = check_default(block, arguments.pop("default", None))
        mesh = mesh_argument(arguments)
        reduction = reduce_max if block == "reduce_max" else reduce_min
        extrema = reduction(inner(**arguments), over=over[0], **mesh)
        where, by, num = (arguments.get(k) for k in ("where", "by", "num"))
        if default is None or (where is None and by is None):
            return extrema
        taken = jnp.ones(jnp.shape(by), bool) if where is None else where
        left_out = ~jnp.asarray(taken)
        empty = reduce_min(left_out, by=by, num=num, over=over, **mesh)
        return jax.tree.map(lambda y: or_default(block, y, empty, default), extrema)

    return outer


@over_levels("x", "where", "by", outer=_extremum_outwards("reduce_max"))
def reduce_max(
    x: Tree,
    *,
    where: Mask = None,
    by: Segments = None,
    num: int | None = None,
    default: ArrayLike | None = None,
    over: Over = None,
    mesh: MeshLike = None,
    partition: PartitionLike = None,
) -> Tree:
    """Maximum over the groups, elementwise. One all-reduce on a mesh.

    Args:
      x: Tree of partitioned real or bool arrays `[n, *s]`.
      where: Optional bool `[n]`: the groups that take part.
      by: As for `drjax.reduce_sum`.
      num: As for `drjax.reduce_sum`.
      default: The maximum over no group, a number for all leaves, with a gradient of
        0. Default: -inf; without infinities, the lowest number of the dtype.
      over: As for `drjax.broadcast`.
      mesh: As for `drjax.broadcast`.
      partition: As for `drjax.broadcast`.

    Returns:
      The same tree with global leaves `[*s]`, with `by` `[num, *s]`, and unchanged
      dtypes. NaN wins, and in the gradient ties share equally, as for `jnp.max`.

    Raises:
      ScopeError, DrjaxValueError, DrjaxTypeError: As for `drjax.reduce_mean`; and a
        leaf is complex.

    Example:
      >>> import drjax, jax.numpy as jnp
      >>> print(drjax.program(partition_size=3)(drjax.reduce_max)(jnp.arange(3.0)))
      2.0
      >>> f = drjax.program(partition_size=3)(
      ...     lambda x: drjax.reduce_max(x, by=[0, 1, 1], num=2)
      ... )
      >>> print(f(jnp.array([5.0, 6.0, 7.0])))
      [5. 7.]
    """
    return _reduce_extremum("reduce_max", x, where, by, num, default, mesh, partition)


@over_levels("x", "where", "by", outer=_extremum_outwards("reduce_min"))
def reduce_min(
    x: Tree,
    *,
    where: Mask = None,
    by: Segments = None,
    num: int | None = None,
    default: ArrayLike | None = None,
    over: Over = None,
    mesh: MeshLike = None,
    partition: PartitionLike = None,
) -> Tree:
    """Minimum over the groups, elementwise. One all-reduce on a mesh.

    Args:
      x: Tree of partitioned real or bool arrays `[n, *s]`.
      where: Optional bool `[n]`: the groups that take part.
      by: As for `drjax.reduce_sum`.
      num: As for `drjax.reduce_sum`.
      default: The minimum over no group, a number for all leaves, with a gradient of
        0. Default: inf; without infinities, the highest number of the dtype.
      over: As for `drjax.broadcast`.
      mesh: As for `drjax.broadcast`.
      partition: As for `drjax.broadcast`.

    Returns:
      The same tree with global leaves `[*s]`, with `by` `[num, *s]`, and unchanged
      dtypes. NaN wins, and in the gradient ties share equally, as for `jnp.min`.

    Raises:
      ScopeError, DrjaxValueError, DrjaxTypeError: As for `drjax.reduce_mean`; and a
        leaf is complex.

    Example:
      >>> import drjax, jax.numpy as jnp
      >>> print(drjax.program(partition_size=3)(drjax.reduce_min)(jnp.arange(3.0)))
      0.0
      >>> f = drjax.program(partition_size=3)(
      ...     lambda x: drjax.reduce_min(x, by=[0, 1, 1], num=2)
      ... )
      >>> print(f(jnp.array([5.0, 6.0, 7.0])))
      [5. 6.]
    """
    return _reduce_extremum("reduce_min", x, where, by, num, default, mesh, partition)


@over_levels("x", "where")
def reduce_argmax(
    x: Tree,
    *,
    where: Mask = None,
    over: Over = None,
    mesh: MeshLike = None,
    partition: PartitionLike = None,
) -> Tree:
    """The index of the group with the maximum, elementwise.

    Two all-reduces on a mesh, two rounds of a plan: of the maximum, and of the indices
    of the groups that attain it. Nothing is gathered. Where `drjax.jit` runs a
    few groups at a time, one fold of both, in one pass over the groups.

    Args:
      x: Tree of partitioned real or bool arrays `[n, *s]`.
      where: Optional bool `[n]`: the groups that take part.
      over: As for `drjax.broadcast`.
      mesh: As for `drjax.broadcast`.
      partition: As for `drjax.broadcast`.

    Returns:
      The same tree with global int32 leaves `[*s]`. Of equals, the first group; NaN
      wins, as for `jnp.argmax`. If no group takes part: n. Without gradient.

    Raises:
      ScopeError, DrjaxValueError, DrjaxTypeError: As for `drjax.reduce_max`.

    Example:
      >>> import drjax, jax.numpy as jnp
      >>> f = drjax.program(partition_size=3)(drjax.reduce_argmax)
      >>> print(f(jnp.array([5.0, 7.0, 7.0])))
      1
    """
    return _reduce_arg("reduce_argmax", x, where, mesh, partition)


@over_levels("x", "where")
def reduce_argmin(
    x: Tree,
    *,
    where: Mask = None,
    over: Over = None,
    mesh: MeshLike = None,
    partition: PartitionLike = None,
) -> Tree:
    """The index of the group with the minimum, elementwise.

    Two all-reduces on a mesh, two rounds of a plan: of the minimum, and of the indices
    of the groups that attain it. Nothing is gathered. Where `drjax.jit` runs a
    few groups at a time, one fold of both, in one pass over the groups.

    Args:
      x: Tree of partitioned real or bool arrays `[n, *s]`.
      where: Optional bool `[n]`: the groups that take part.
      over: As for `drjax.broadcast`.
      mesh: As for `drjax.broadcast`.
      partition: As for `drjax.broadcast`.

    Returns:
      The same tree with global int32 leaves `[*s]`. Of equals, the first group; NaN
      wins, as for `jnp.argmin`. If no group takes part: n. Without gradient.

    Raises:
      ScopeError, DrjaxValueError, DrjaxTypeError: As for `drjax.reduce_min`.

    Example:
      >>> import drjax, jax.numpy as jnp
      >>> f = drjax.program(partition_size=3)(drjax.reduce_argmin)
      >>> print(f(jnp.array([5.0, 7.0, 7.0])))
      0
    """
    return _reduce_arg("reduce_argmin", x, where, mesh, partition)


# The primitive of each building block, and its identity for a dtype.
_EXTREMA: dict[str, tuple[Any, Any]] = {
    "reduce_max": (reduce_max_p, lowest),
    "reduce_min": (reduce_min_p, highest),
    "reduce_argmax": (reduce_max_p, lowest),
    "reduce_argmin": (reduce_min_p, highest),
}


def _reduce_extremum(
    block: str,
    x: PyTree,
    where: Mask,
    by: Segments,
    num: int | None,
    default: ArrayLike | None,
    mesh: MeshLike,
    partition: PartitionLike,
) -> PyTree:
    """Run `reduce_max` or `reduce_min` on each leaf of a tree."""
    params = resolve(block, mesh, partition)
    part = participation(block, where, by, num, params)
    default = check_default(block, default)
    primitive, identity = _EXTREMA[block]
    empty = None
    if default is not None and part is not None:
        empty = ~_some_group(block, part, params)

    def bind(leaf: PartitionedArray, **params: Unpack[BlockParams]) -> GlobalArray:
        _check_ordered(block, leaf)
        if part is None or part.num is None or not _has_gradient(leaf):
            kept = keep_slices(block, part, leaf, identity(leaf.dtype), **params)
            extremum = primitive.bind(kept, **params)
        else:
            own = as_operand(part.of_groups, make_layout(**params), True)
            extremum = _extremum_by_segment(
                block, part.num, params["partition"], params["mesh"], own, leaf
            )
        return or_default(block, extremum, empty, default)

    return bind_partitioned(block, x, mesh, partition, bind)


def _some_group(block: str, part: Participation, params: BlockParams) -> GlobalArray:
    """Whether some group takes part: bool `[]`, or `[num]` with segments."""
    taken = as_operand(part.of_groups, make_layout(**params), True)
    if part.num is not None:
        one = lambda own: part.place(own, jnp.bool_(True), False)
        taken = map_leaves("by", one, taken, **params)
    return reduce_max_p.bind(taken, **params)


def _has_gradient(x: Array) -> bool:
    """Whether an array is of floats, of which derivatives are taken."""
    return jnp.issubdtype(x.dtype, jnp.inexact)


# As the JVP rule in `_primitives/extrema.py`, for the groups of each segment. That rule
# would compare all num places of each group; here each compares its own slice only.
@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2, 3))
def _extremum_by_segment(
    block: str,
    num: int,
    partition: Partition,
    mesh: MeshLike,
    own: PartitionedArray,
    x: PartitionedArray,
) -> GlobalArray:
    """Bind `reduce_max` or `reduce_min` of floats by segment: `[num, *s]`.

    `own` has the segment of each group, `num` for one that takes no part.
    """
    primitive, identity = _EXTREMA[block]
    params = {"partition": partition, "mesh": mesh}
    kept = keep_slices(block, Participation(own, num), x, identity(x.dtype), **params)
    return primitive.bind(kept, **params)


@_extremum_by_segment.defjvp
def _(
    block: str,
    num: int,
    partition: Partition,
    mesh: MeshLike,
    primals: tuple[PartitionedArray, PartitionedArray],
    tangents: tuple[Any, PartitionedArray],
) -> tuple[GlobalArray, GlobalArray]:
    (own, x), (_, dx) = primals, tangents
    params = {"partition": partition, "mesh": mesh}
    map_one = functools.partial(map_leaves, **params)

    def total(x: PartitionedArray) -> GlobalArray:
        kept = keep_slices(block, Participation(own, num), x, 0, **params)
        return reduce_sum_p.bind(kept, **params)

    def is_extremum(own: Array, slice_: Array, extremum: Array) -> Array:
        hit = (slice_ == slice_of_segment(own, extremum)) & (own < num)
        return jnp.where(hit, 1, 0).astype(slice_.dtype)

    def weight(own: Array, hit: Array, share: Array) -> Array:
        return hit * slice_of_segment(own, share)

    # The comparison needs bitwise the slices of which the extremum was taken.
    x = lax.optimization_barrier(x)
    y = _extremum_by_segment(block, num, partition, mesh, own, x)
    extremum = broadcast_p.bind(y, **params)
    hit = map_one("is_extremum", is_extremum, own, x, extremum)
    count = total(hit)
    # A segment without groups has no share; that of NaN is NaN.
    count = jnp.where((count == 0) & (y == y), jnp.ones_like(count), count)
    share = broadcast_p.bind(lax.reciprocal(count), **params)
    weights = map_one("weight", weight, own, hit, share)
    return y, total(map_one("mul", jnp.multiply, dx, weights))


def _reduce_arg(
    block: str, x: PyTree, where: Mask, mesh: MeshLike, partition: PartitionLike
) -> PyTree:
    """Run `reduce_argmax` or `reduce_argmin` on each leaf of a tree.

    One reduction finds the extremum y, and another one the minimum of the indices i of
    groups with x_i = y. A NaN counts as attaining the extremum. The index is n if no
    group takes part.

    Where a few groups run at a time, it is a fold of pairs of a number and an index:
    the second reduction would need the bits that the first one has compared, of all
    groups, and what is rematerialized may have others.
    """
    params = resolve(block, mesh, partition)
    part = participation(block, where, None, None, params)
    primitive, identity = _EXTREMA[block]
    n = params["partition"].size
    group = partition_index_p.bind(**params, per_group=False)

    def index_if_attained(
        index: Array, slice_: Array, extremum: Array, taken: Array | bool = True
    ) -> Array:
        hit = (slice_ == extremum) | (slice_ != slice_)  # NaN wins, if there is one
        return jnp.where(hit & taken, index, jnp.full((), n, jnp.int32))

    def index_for_each(
        index: Array, slice_: Array, taken: Array | bool = True
    ) -> Array:
        own = jnp.where(taken, index, jnp.full((), n, jnp.int32))
        return jnp.broadcast_to(own, slice_.shape)

    def bind(leaf: PartitionedArray, **params: Unpack[BlockParams]) -> GlobalArray:
        _check_ordered(block, leaf)
        kept = keep_slices(block, part, leaf, identity(leaf.dtype), **params)
        kept, taken = lax.stop_gradient(kept), [] if part is None else [part.of_groups]
        if in_chunks.value:
            own = map_leaves(block, index_for_each, group, kept, *taken, **params)
            first = functools.partial(_first, _IS_BETTER[block])
            init = jnp.full(leaf.shape[1:], identity(leaf.dtype), leaf.dtype), n
            return reduce(first, (kept, own), init, commutative=True, **params)[1]
        # The comparison needs bitwise the slices of which the extremum was taken.
        kept = lax.optimization_barrier(kept)
        extremum = broadcast_p.bind(primitive.bind(kept, **params), **params)
        operands = [group, kept, extremum, *taken]
        indices = map_leaves(block, index_if_attained, *operands, **params)
        return reduce_min_p.bind(indices, **params)

    return bind_partitioned(block, x, mesh, partition, bind)


_IS_BETTER = {"reduce_argmax": jnp.greater, "reduce_argmin": jnp.less}


def _first(
    is_better: Callable[[Array, Array], Array],
    a: tuple[Array, Array],
    b: tuple[Array, Array],
) -> tuple[Array, Array]:
    """Choose, elementwise, the better number with its index; of equals, the first."""
    (x, i), (y, j) = a, b
    equal = (x == y) | ((x != x) & (y != y))
    better = is_better(x, y) | ((x != x) & (y == y))  # NaN wins
    chosen = jnp.where(equal, i < j, better)
    return jnp.where(chosen, x, y), jnp.where(chosen, i, j)


def _check_ordered(block: str, leaf: Array) -> None:
    """Raise `DrjaxTypeError` if an array has a dtype without an order.

    Such dtypes are complex numbers, typed random keys, and float0.
    """
    check_numeric(block, leaf)
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        raise DrjaxTypeError(
            f"drjax.{block} needs leaves with an order, got dtype {leaf.dtype}. "
            "Reduce the magnitude, or the real and imaginary part."
        )
