"""Sums and means over the groups, over pytrees.

Input: a tree of partitioned leaves `[n, *s]`. Output: the tree with global leaves.
Invariants: all but the plain sum and mean are compositions of primitives.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from drjax import _compat
from drjax._api.collective_options import (
    WireLike,
    bind_sums,
    check_encodable,
    collective_options,
    secure_options,
)
from drjax._api.levels import Over, mesh_argument, over_levels, reduce_parts
from drjax._api.participation import (
    Mask,
    Participation,
    Segments,
    check_default,
    keep_slices,
    or_default,
    participation,
)
from drjax._api.resolve import (
    BlockParams,
    MeshLike,
    PartitionLike,
    group_axis_size,
    map_leaves,
    partitioned_leaves,
    resolve,
)
from drjax._api.trace_map import call_mapped
from drjax._api.validate import check_weights, flatten, flatten_partitioned
from drjax._compat.types import Array, GlobalArray, PartitionedArray, PyTree, Tree
from drjax._context import OF_LIBRARY, current_scope
from drjax._errors import DrjaxTypeError
from drjax._primitives.collectives import (
    reduce_mean_p,
    reduce_sum_p,
)
from drjax._sharding.execute import as_operand
from drjax._sharding.layout import make_layout

# ---------------------------------------------------------------------------------
# Over several levels


def _between_outer(arguments: dict[str, Any]) -> dict[str, Any]:
    """Remove `wire` and `result` from the arguments of a reduction, and return them.

    In a reduction over several levels, these options are for the communication between
    the groups of the outermost level only.
    """
    names = ("wire", "result")
    return {k: arguments.pop(k) for k in names if k in arguments}


_NO_OPTIONS: dict[str, Any] = {"wire": None, "result": None}


def _sum_outwards(
    arguments: dict[str, Any], inner: Callable[..., PyTree], over: tuple[str, ...]
) -> PyTree:
    """Sum over several levels: over the inner ones first, then over the outermost."""
    options = _between_outer(arguments)
    options |= mesh_argument(arguments)
    return reduce_sum(inner(**arguments), over=over[0], **options)


def _mean_outwards(
    arguments: dict[str, Any], inner: Callable[..., PyTree], over: tuple[str, ...]
) -> PyTree:
    """Average over several levels: one sum over all of them, divided once.

    A mean of means would round more often, and weigh pods equally with `where=`.
    """
    if not {"where", "by", "num"}.isdisjoint(arguments):
        return _weighted_mean_outwards(arguments, inner, over)
    leaves, tree = flatten("reduce_mean", arguments["x"])
    for leaf in leaves:
        check_numeric("reduce_mean", leaf)
    check_default("reduce_mean", arguments.get("default"))
    options = _between_outer(arguments)
    checked = collective_options("reduce_mean", **{**_NO_OPTIONS, **options})
    wide = [leaf.astype(_wide(leaf.dtype)) for leaf in leaves]
    for leaf in wide:
        check_encodable("reduce_mean", leaf, checked)
    options |= mesh_argument(arguments)
    sums = reduce_sum(tree.unflatten(wide), over=over, **options)
    n = math.prod(p.size for p in current_scope().open_levels if p.name in over)
    dtypes = tree.unflatten([_mean_dtype(leaf.dtype) for leaf in leaves])
    return jax.tree.map(lambda x, dtype: (x / n).astype(dtype), sums, dtypes)


def _weighted_mean_outwards(
    arguments: dict[str, Any], inner: Callable[..., PyTree], over: tuple[str, ...]
) -> PyTree:
    """Average over several levels with weights, or with `where=`, `by=` or `num=`.

    Both sums, of weighted values and of weights, are over all of the levels, and
    divided once.
    """
    block = "reduce_weighted_mean" if "w" in arguments else "reduce_mean"
    if "w" in arguments:
        _check_given(arguments["w"])
    default = check_default(block, arguments.pop("default", None))
    options = _between_outer(arguments)
    checked = collective_options(block, **{**_NO_OPTIONS, **options})
    mesh = mesh_argument(arguments)

    def parts(
        x: PyTree,
        w: PyTree = None,
        where: Mask = None,
        by: Segments = None,
        num: int | None = None,
        mesh: MeshLike = None,
    ) -> tuple[list[GlobalArray], list[GlobalArray]]:
        params = resolve(block, mesh, None)
        part = participation(block, where, by, num, params)
        sums = _weighted_sums(block, x, w, part, {}, params)
        for share in sums[0]:
            check_encodable(block, share, checked)
        return sums

    def combine(sums: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
        shares, totals = sums
        outermost = current_scope().open_levels[0].name
        totals = reduce_sum(totals, over=outermost, **mesh)
        return reduce_sum(shares, over=outermost, **options, **mesh), totals

    names = ("x", "w", "where", "by")
    shares, totals = reduce_parts(block, over, names, arguments, parts, combine)
    return _quotients(block, arguments["x"], shares, totals, default)


# ---------------------------------------------------------------------------------
# The building blocks


@over_levels("x", "where", "by", outer=_sum_outwards)
def reduce_sum(
    x: Tree,
    where: Mask = None,
    *,
    by: Segments = None,
    num: int | None = None,
    wire: WireLike = None,
    result: str | None = None,
    secure: bool = False,
    min_groups: int | None = None,
    bound: float | None = None,
    over: Over = None,
    mesh: MeshLike = None,
    partition: PartitionLike = None,
) -> Tree:
    """Sum a partitioned value over the groups. One all-reduce on a mesh.

    The transpose is `drjax.broadcast`: each group's cotangent is that of the sum.

    Args:
      x: Tree of partitioned arrays `[n, *s]`. Integers and bools are promoted as by
        `jnp.sum`. 16-bit floats are added in float32 on each device; the
        communication between devices has the dtype of the input.
      where: Optional bool `[n]`: the groups to sum. If no group takes part: 0.
      by: Optional integers `[n]`: the segment of each group, as for
        `jax.ops.segment_sum`. Groups whose segment is not in 0 to num - 1 do not take
        part. The work on a device is that of its groups' slices, for any `num`; the
        workers of engines reduce `num` slices of each group.
      num: The number of segments, a positive Python integer; given if `by` is.
      wire: How the devices encode floats that they exchange: "bfloat16", "int8",
        "float8_e4m3fn" or "float4_e2m1fn", or a pair of it and a block size, as
        `("int8", 128)`. Devices add in float32; each block of consecutive numbers has a
        float32 scale, but for bfloat16. Both the devices' sums and their total are
        rounded. Derivatives are those of the plain sum. Nothing is encoded on one
        device. Workers of Ray and clients of Flower encode the sums of their blocks of
        groups, once. Default: the dtype of the leaf.
      result: "sharded": on a mesh each device has a part of the result, by a
        reduce-scatter, along the first axis of each leaf whose size the devices divide.
        Leaves without such an axis, and results without a mesh, are returned whole, as
        by default: each device has the whole result.
      secure: A demand on engines: no process but a group's own may see its slice of
        `x`. The plan records it. Flower meets it by secure aggregation; an engine that
        cannot refuses the plan. It is about this sum and its derivatives: in a plan,
        sums and means of its tangents and cotangents are secure too. What else is
        computed from `x` is not.
      min_groups: With `secure=True`, the least number of groups, from 2: the sum of
        fewer is not revealed. Default: 2.
      bound: With `secure=True`, the largest magnitude of a number of one group's slice.
        Secure sums add integers, so that it decides their precision: give a gradient
        and a count sums, and bounds, of their own. A group with a larger number has
        failed. Sums of tangents and cotangents do not inherit it. Default: that of the
        engine, `secure_range` of `drjax.backends.flower.compile`.
      over: As for `drjax.broadcast`.
      mesh: As for `drjax.broadcast`.
      partition: As for `drjax.broadcast`.

    Returns:
      The same tree with global leaves `[*s]`; with `by`, `[num, *s]`.

    Raises:
      ScopeError: No partition in force.
      DrjaxValueError: A leaf, `where` or `by` has another leading axis than n, or `num`
        is not positive; or `secure` comes with `where` or `by`, or `min_groups` is not
        from 2 to n, or `bound` not positive.
      DrjaxTypeError: A leaf is not a numeric array, `where` is not bool, `by` or `num`
        is not an integer, or only one of `by` and `num` is given; or with `wire` a
        leaf has no real floats.

    Example:
      >>> import drjax, jax.numpy as jnp
      >>> print(drjax.program(partition_size=3)(drjax.reduce_sum)(jnp.arange(3.0)))
      3.0
      >>> f = drjax.program(partition_size=3)(
      ...     lambda x: drjax.reduce_sum(x, by=[0, 1, 1], num=2)
      ... )
      >>> print(f(jnp.array([5.0, 6.0, 7.0])))
      [ 5. 13.]

    Source: Rush et al. 2024, section 3. The encoded sum: Dettmers et al. 2022, "8-bit
    optimizers via block-wise quantization", section 2. The secure sum: Bell et al.
    2020, "Secure single-server aggregation with (poly)logarithmic overhead".
    """
    params = resolve("reduce_sum", mesh, partition)
    part = participation("reduce_sum", where, by, num, params)
    options = collective_options("reduce_sum", wire, result)
    n = params["partition"].size
    options |= secure_options(secure, min_groups, part, n, wire, bound)

    def summand(leaf: PartitionedArray) -> PartitionedArray:
        check_numeric("reduce_sum", leaf)
        leaf = promote_sum("reduce_sum", leaf)
        leaf = keep_slices("reduce_sum", part, leaf, 0, **params)
        check_encodable("reduce_sum", leaf, options)
        return leaf

    leaves, tree = partitioned_leaves("reduce_sum", x, params)
    sums = bind_sums(reduce_sum_p, [*map(summand, leaves)], options, params)
    return tree.unflatten(sums)


@over_levels("x", "where", "by", outer=_mean_outwards)
def reduce_mean(
    x: Tree,
    where: Mask = None,
    *,
    by: Segments = None,
    num: int | None = None,
    default: ArrayLike | None = None,
    wire: WireLike = None,
    result: str | None = None,
    over: Over = None,
    mesh: MeshLike = None,
    partition: PartitionLike = None,
) -> Tree:
    """Average a partitioned value over the groups. One all-reduce on a mesh.

    Args:
      x: Tree of partitioned arrays `[n, *s]`. Integers and bools become float32 (of 64
        bits: float64), as by `jnp.mean`. 16-bit floats are added in float32 on each
        device and communicated, divided by n, in 16 bits; with `where=` or `by=`, in
        float32.
      where: Optional bool `[n]`: the groups to average. If no group takes part:
        `default`.
      by: As for `drjax.reduce_sum`. The mean of a segment without groups is `default`.
      num: As for `drjax.reduce_sum`.
      default: The mean over no group, a number for all leaves. Its derivatives with
        respect to `x` are 0. Default: NaN, as by `jnp.mean`.
      wire: As for `drjax.reduce_sum`.
      result: As for `drjax.reduce_sum`.
      over: As for `drjax.broadcast`.
      mesh: As for `drjax.broadcast`.
      partition: As for `drjax.broadcast`.

    Returns:
      The same tree with global leaves `[*s]`; with `by`, `[num, *s]`.

    Raises:
      ScopeError, DrjaxValueError, DrjaxTypeError: As for `drjax.reduce_sum`; and
        `default` is not a number that the dtypes of the result hold.

    Example:
      >>> import drjax, jax.numpy as jnp
      >>> print(drjax.program(partition_size=3)(drjax.reduce_mean)(jnp.arange(3.0)))
      1.0
      >>> f = drjax.program(partition_size=3)(
      ...     lambda x: drjax.reduce_mean(x, where=x > 9, default=0)
      ... )
      >>> print(f(jnp.arange(3.0)))
      0.0

    Source: Rush et al. 2024, section 3.
    """
    params = resolve("reduce_mean", mesh, partition)
    part = participation("reduce_mean", where, by, num, params)
    default = check_default("reduce_mean", default)
    options = collective_options("reduce_mean", wire, result)
    if part is not None:
        return _weighted_mean("reduce_mean", x, None, part, default, options, params)

    def summand(leaf: PartitionedArray) -> PartitionedArray:
        check_numeric("reduce_mean", leaf)
        dtype = _mean_dtype(leaf.dtype)
        if leaf.dtype != dtype or getattr(leaf, "weak_type", False):
            leaf = leaf.astype(dtype)
        check_encodable("reduce_mean", leaf, options)
        return leaf

    leaves, tree = partitioned_leaves("reduce_mean", x, params)
    means = bind_sums(reduce_mean_p, [*map(summand, leaves)], options, params)
    means = [or_default("reduce_mean", mean, None, default) for mean in means]
    return tree.unflatten(means)


@over_levels("x", "w", "where", "by", outer=_weighted_mean_outwards)
def reduce_weighted_mean(
    x: Tree,
    w: PyTree,
    *,
    where: Mask = None,
    by: Segments = None,
    num: int | None = None,
    default: ArrayLike | None = None,
    wire: WireLike = None,
    result: str | None = None,
    over: Over = None,
    mesh: MeshLike = None,
    partition: PartitionLike = None,
) -> Tree:
    """Weighted average over the groups: sum_i w_i x_i / sum_i w_i.

    Args:
      x: Tree of partitioned arrays `[n, *s]`. 16-bit floats are accumulated in
        float32 throughout, also between devices; integers become floats as by
        `jnp.mean`.
      w: Real weights: one array `[n]`, or a tree with the structure of `x` whose
        leaves have the leading axes of the leaves of `x`. If they add up to zero
        the result is `default`. A NaN in a group of weight zero makes the result NaN;
        to leave groups out, use `where`.
      where: Optional bool `[n]`: the groups to average.
      by: As for `drjax.reduce_mean`.
      num: As for `drjax.reduce_sum`.
      default: The mean if the weights add up to zero, a number for all leaves. Its
        derivatives with respect to `x` and `w` are 0. Default: NaN.
      wire: As for `drjax.reduce_sum`, for the weighted sums; sums of weights are exact.
      result: As for `drjax.reduce_sum`.
      over: As for `drjax.broadcast`.
      mesh: As for `drjax.broadcast`.
      partition: As for `drjax.broadcast`.

    Returns:
      The same tree with global leaves `[*s]`; with `by`, `[num, *s]`.

    Raises:
      ScopeError, DrjaxValueError, DrjaxTypeError: As for `drjax.reduce_mean`; and the
        trees or shapes do not match.

    Example:
      >>> import drjax, jax.numpy as jnp
      >>> mean = drjax.program(partition_size=2)(drjax.reduce_weighted_mean)
      >>> print(mean(jnp.array([0.0, 4.0]), jnp.array([3.0, 1.0])))
      1.0

    Source: McMahan et al. 2017, "Federated averaging", algorithm 1.
    """
    block = "reduce_weighted_mean"
    _check_given(w)
    params = resolve(block, mesh, partition)
    part = participation(block, where, by, num, params)
    default = check_default(block, default)
    options = collective_options(block, wire, result)
    return _weighted_mean(block, x, w, part, default, options, params)


# ---------------------------------------------------------------------------------
# What several building blocks need


def _weighted_mean(
    block: str,
    x: PyTree,
    w: PyTree | None,
    part: Participation | None,
    default: GlobalArray | None,
    options: dict[str, Any],
    params: BlockParams,
) -> PyTree:
    """Compute `sum_i w_i x_i / sum_i w_i` over the groups i, for each leaf of a tree.

    The sums are those of `_weighted_sums`. If the weights add up to zero, the mean is
    the default; None: NaN.
    """
    sums = _weighted_sums(block, x, w, part, options, params)
    return _quotients(block, x, *sums, default)


def _weighted_sums(
    block: str,
    x: PyTree,
    w: PyTree | None,
    part: Participation | None,
    options: dict[str, Any],
    params: BlockParams,
) -> tuple[list[GlobalArray], list[GlobalArray]]:
    """Compute the sums `sum_i w_i x_i` and `sum_i w_i`, for each leaf of a tree.

    The weights are as `check_weights` takes them; None: each group that takes part has
    the weight 1, and some may take no part, so that there is a `Participation`.
    `options` are the parameters `wire` and `sharded` of the sums of products.

    A weighted sum is `[*s]`, or with segments `[num, *s]`; the shape of a sum of
    weights is a leading part of that. Both are in the dtypes in which they are
    accumulated, float32 or wider. Leaves with the same weights have the same sum of
    weights.
    """
    leaves, tree = flatten_partitioned(
        block, x, params["partition"], group_axis_size(params)
    )
    weights = [None] * len(leaves)
    if w is not None:
        weights = check_weights(w, tree, leaves, params["partition"])
    layout = make_layout(**params)
    weigh = lambda own, weight, leaf: _weigh(part, own, weight, leaf)
    weigh.__name__ = OF_LIBRARY + block  # plans and profiles show it
    own = None if part is None else part.of_groups
    totals: dict[Any, jax.Array] = {}  # one sum for each weight, not for each leaf
    keys, products = [], []
    for leaf, weight in zip(leaves, weights, strict=True):
        check_numeric(block, leaf)
        real = jnp.finfo(_wide(leaf.dtype)).dtype
        key = (id(weight), real)
        if key not in totals:
            kept = _weights_to_add(block, part, weight, real, params)
            totals[key] = reduce_sum_p.bind(as_operand(kept, layout, True), **params)
        # A tree, as a mapped function has no argument None.
        operands, structure = jax.tree.flatten((own, weight, leaf))
        products.append(call_mapped(weigh, operands, structure, **params))
        check_encodable(block, products[-1], options)
        keys.append(key)
    shares = bind_sums(reduce_sum_p, products, options, params)
    return shares, [totals[key] for key in keys]


def _weights_to_add(
    block: str,
    part: Participation | None,
    weight: PartitionedArray | None,
    real: jnp.dtype,
    params: BlockParams,
) -> PartitionedArray:
    """Return the weights of the groups that take part, each in its segment, to add."""
    if weight is not None:
        weight = lax.convert_element_type(weight, real)
        return keep_slices(block, part, weight, 0, **params)
    assert part is not None
    if part.num is None:
        return lax.convert_element_type(part.of_groups, real)
    one = lambda own: part.place(own, jnp.ones((), real), 0)
    return map_leaves("by", one, part.of_groups, **params)


def _quotients(
    block: str,
    x: PyTree,
    shares: Sequence[GlobalArray],
    totals: Sequence[GlobalArray],
    default: GlobalArray | None,
) -> PyTree:
    """Divide weighted sums by the sums of the weights, for each leaf of `x`.

    The means are in the dtypes that `jnp.mean` of the leaves has.
    """
    leaves, tree = flatten(block, x)
    return tree.unflatten(
        lax.convert_element_type(
            _divide(block, share, total, default), _mean_dtype(leaf.dtype)
        )
        for leaf, share, total in zip(leaves, shares, totals, strict=True)
    )


def _wide(dtype: jnp.dtype) -> jnp.dtype:
    """Return the dtype in which a weighted mean of arrays of `dtype` is accumulated.

    It is the dtype that `jnp.mean` has, but at least float32.
    """
    dtype = _mean_dtype(dtype)
    return dtype if dtype.itemsize >= 4 else jnp.dtype(jnp.float32)


def _weigh(
    part: Participation | None, own: Array | None, weight: Array | None, leaf: Array
) -> Array:
    """Multiply one group's slice by its weight, in float32 or wider.

    `own` is the group's element of `part.of_groups`. The product is `[*s]`, or with
    segments `[num, *s]`, with zeros where the group takes no part. The shape of the
    weight is a leading part of `[*s]`.
    """
    wide = _wide(leaf.dtype)
    if part is None or own is None:
        return leaf.astype(wide) if weight is None else _times(weight, leaf, wide)
    if weight is None:
        return part.place(own, leaf.astype(wide), 0)
    # Also the factors: 0 * NaN would spread in the derivative of the product.
    taken = part.takes(own)
    keep = lambda x: jnp.where(taken, x, jnp.zeros((), x.dtype))
    weight, leaf = keep(weight), keep(leaf)
    return part.place(own, _times(weight, leaf, wide), 0)


def _times(weight: Array, leaf: Array, dtype: jnp.dtype) -> Array:
    """Multiply a slice by a weight whose shape is a leading part of its own."""
    weight = lax.expand_dims(weight, range(weight.ndim, leaf.ndim))
    return weight.astype(jnp.finfo(dtype).dtype) * leaf.astype(dtype)


def _divide(
    block: str, share: GlobalArray, total: GlobalArray, default: GlobalArray | None
) -> GlobalArray:
    """Divide a sum by the sum of the weights; by zero, return the default.

    The shape of `total` is a leading part of that of `share`. Without a default, the
    result is the quotient, NaN for 0 / 0.
    """
    empty = None
    if default is not None:
        empty = total == 0
        # In the derivative, too, nothing is divided by zero.
        total = jnp.where(empty, jnp.ones((), total.dtype), total)
    total = lax.expand_dims(total, range(total.ndim, share.ndim))
    return or_default(block, share / total, empty, default)


def _check_given(w: PyTree | None) -> None:
    """Raise `DrjaxTypeError` if the weights of a weighted mean are None."""
    if w is None:
        raise DrjaxTypeError(
            "drjax.reduce_weighted_mean needs weights, got None. Without them it is "
            "drjax.reduce_mean(x)."
        )


def check_numeric(block: str, leaf: Array) -> None:
    """Raise `DrjaxTypeError` if an array has a dtype without arithmetic.

    Such dtypes are float0, of the tangents of integers, and those of typed keys.
    """
    if leaf.dtype == jax.dtypes.float0:
        raise DrjaxTypeError(
            f"drjax.{block} needs leaves that are numbers, got dtype float0, JAX's "
            "tangent of an integer. Leave integers out of what is differentiated."
        )
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        raise DrjaxTypeError(
            f"drjax.{block} needs leaves that are numbers, got dtype {leaf.dtype}. To "
            "take one group's key, use drjax.select."
        )


def promote_sum(block: str, leaf: Array) -> Array:
    """Cast an array to the dtype of its `jnp.sum`, which promotes ints and bools."""
    if jnp.issubdtype(leaf.dtype, jnp.inexact):
        return leaf
    try:
        return leaf.astype(_sum_dtype(leaf.dtype))
    except ValueError:  # of jnp.sum, for integers of less than 8 bits
        raise DrjaxTypeError(
            f"drjax.{block} needs numbers that jnp.sum adds up, got {leaf.dtype}. Cast "
            "them, as by x.astype('int8')."
        ) from None


@_compat.cache()
def _sum_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """Return the dtype of the result of `jnp.sum` for an array of dtype `dtype`."""
    return jax.eval_shape(jnp.sum, jax.ShapeDtypeStruct((), dtype)).dtype


@functools.lru_cache(maxsize=64)
def _mean_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """Return the dtype of the result of `jnp.mean` for an array of dtype `dtype`."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return dtype
    return jnp.dtype(jnp.float64 if dtype.itemsize == 8 else jnp.float32)
