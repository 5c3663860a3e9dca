"""The reductions, and `select`, over pytrees.

Input: a tree of partitioned leaves `[n, *s]`. Output: the tree with global leaves.
Invariants: all but the sum, mean, maximum and minimum are compositions of primitives.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from drjax import _compat
from drjax._api.resolve import (
    MeshLike,
    PartitionLike,
    PyTree,
    bind_partitioned,
    group_axis_size,
    map_leaves,
    resolve,
)
from drjax._api.validate import check_weights, flatten_partitioned
from drjax._errors import DrjaxTypeError, DrjaxValueError
from drjax._primitives.collectives import broadcast_p, reduce_mean_p, reduce_sum_p
from drjax._primitives.extrema import reduce_max_p, reduce_min_p
from drjax._primitives.partition_index import partition_index_p
from drjax._sharding.execute import as_operand
from drjax._sharding.layout import make_layout


def reduce_sum(
    x: PyTree,
    where: ArrayLike | Sequence[bool] | None = None,
    *,
    mesh: MeshLike = None,
    partition: PartitionLike = None,
) -> PyTree:
    """Sum a partitioned value over the groups. One all-reduce on a mesh.

    Args:
      x: Tree of partitioned arrays `[n, *s]`. Integers and bools are promoted as by
        `jnp.sum`. 16-bit floats are added in float32 on each device; the
        communication between devices has the dtype of the input.
      where: Optional bool `[n]`: the groups to sum. If no group takes part: 0.
      mesh: As for `drjax.broadcast`.
      partition: As for `drjax.broadcast`.

    Returns:
      The same tree with global leaves `[*s]`.

    Raises:
      ScopeError: No partition in force.
      DrjaxValueError: A leaf, or `where`, has another leading axis than n.
      DrjaxTypeError: A leaf is not a numeric array, or `where` is not bool.

    Example:
      >>> import drjax, jax.numpy as jnp
      >>> print(drjax.program(partition_size=3)(drjax.reduce_sum)(jnp.arange(3.0)))
      3.0

    Source: Rush et al. 2024, section 3.
    """
    x = _zero_left_out("reduce_sum", x, where, mesh, partition)

    def bind(leaf, **params):
        _check_numeric("reduce_sum", leaf)
        return reduce_sum_p.bind(_promote_sum(leaf), **params)

    return bind_partitioned("reduce_sum", x, mesh, partition, bind)


def reduce_mean(
    x: PyTree,
    where: ArrayLike | Sequence[bool] | None = None,
    *,
    mesh: MeshLike = None,
    partition: PartitionLike = None,
) -> PyTree:
    """Average a partitioned value over the groups. One all-reduce on a mesh.

    Args:
      x: Tree of partitioned arrays `[n, *s]`. Integers and bools become float32 (of 64
        bits: float64), as by `jnp.mean`. 16-bit floats are added in float32 on each
        device and communicated, divided by n, in 16 bits; with `where=`, in float32.
      where: Optional bool `[n]`: the groups to average. If no group takes part: NaN, as
        by `jnp.mean`.
      mesh: As for `drjax.broadcast`.
      partition: As for `drjax.broadcast`.

    Returns:
      The same tree with global leaves `[*s]`.

    Raises:
      ScopeError, DrjaxValueError, DrjaxTypeError: As for `drjax.reduce_sum`.

    Example:
      >>> import drjax, jax.numpy as jnp
      >>> print(drjax.program(partition_size=3)(drjax.reduce_mean)(jnp.arange(3.0)))
      1.0

    Source: Rush et al. 2024, section 3.
    """
    if where is not None:
        weights = _check_where("reduce_mean", where, mesh, partition)
        x = _zero_left_out("reduce_mean", x, where, mesh, partition)
        return _weighted_mean("reduce_mean", x, weights, mesh, partition)

    def bind(leaf, **params):
        _check_numeric("reduce_mean", leaf)
        return reduce_mean_p.bind(leaf.astype(_mean_dtype(leaf.dtype)), **params)

    return bind_partitioned("reduce_mean", x, mesh, partition, bind)


def reduce_weighted_mean(
    x: PyTree,
    w: PyTree,
    *,
    mesh: MeshLike = None,
    partition: PartitionLike = None,
) -> PyTree:
    """Weighted average over the groups: sum_i w_i x_i / sum_i w_i.

    Args:
      x: Tree of partitioned arrays `[n, *s]`. 16-bit floats are accumulated in
        float32 throughout, also between devices; integers become floats as by
        `jnp.mean`.
      w: Real weights: one array `[n]`, or a tree with the structure of `x` whose
        leaves have the leading axes of the leaves of `x`. If they add up to zero
        the result is NaN. A NaN in a group of weight zero makes the result NaN; to
        leave groups out, use `drjax.reduce_mean(x, where=...)`.
      mesh: As for `drjax.broadcast`.
      partition: As for `drjax.broadcast`.

    Returns:
      The same tree with global leaves `[*s]`.

    Raises:
      ScopeError, DrjaxValueError, DrjaxTypeError: As for `drjax.reduce_sum`; and the
        trees or shapes do not match.

    Example:
      >>> import drjax, jax.numpy as jnp
      >>> mean = drjax.program(partition_size=2)(drjax.reduce_weighted_mean)
      >>> print(mean(jnp.array([0.0, 4.0]), jnp.array([3.0, 1.0])))
      1.0

    Source: McMahan et al. 2017, "Federated averaging", algorithm 1.
    """
    return _weighted_mean("reduce_weighted_mean", x, w, mesh, partition)


def reduce_max(
    x: PyTree, *, mesh: MeshLike = None, partition: PartitionLike = None
) -> PyTree:
    """Maximum over the groups, elementwise. One all-reduce on a mesh.

    Args:
      x: Tree of partitioned real or bool arrays `[n, *s]`.
      mesh: As for `drjax.broadcast`.
      partition: As for `drjax.broadcast`.

    Returns:
      The same tree with global leaves `[*s]` and unchanged dtypes. NaN wins, and in
      the gradient ties share equally, as for `jnp.max`.

    Raises:
      ScopeError, DrjaxValueError, DrjaxTypeError: As for `drjax.reduce_sum`.

    Example:
      >>> import drjax, jax.numpy as jnp
      >>> print(drjax.program(partition_size=3)(drjax.reduce_max)(jnp.arange(3.0)))
      2.0
    """
    return _reduce_extremum("reduce_max", reduce_max_p, x, mesh, partition)


def reduce_min(
    x: PyTree, *, mesh: MeshLike = None, partition: PartitionLike = None
) -> PyTree:
    """Minimum over the groups, elementwise. One all-reduce on a mesh.

    Args:
      x: Tree of partitioned real or bool arrays `[n, *s]`.
      mesh: As for `drjax.broadcast`.
      partition: As for `drjax.broadcast`.

    Returns:
      As `drjax.reduce_max`.

    Raises:
      ScopeError, DrjaxValueError, DrjaxTypeError: As for `drjax.reduce_sum`.

    Example:
      >>> import drjax, jax.numpy as jnp
      >>> print(drjax.program(partition_size=3)(drjax.reduce_min)(jnp.arange(3.0)))
      0.0
    """
    return _reduce_extremum("reduce_min", reduce_min_p, x, mesh, partition)


def select(
    x: PyTree,
    i: ArrayLike,
    *,
    mesh: MeshLike = None,
    partition: PartitionLike = None,
) -> PyTree:
    """One group's values as global values. One all-reduce on a mesh.

    Args:
      x: Tree of partitioned arrays `[n, *s]`, any dtype, typed keys included.
      i: The group, an integer; negative counts from the end. A traced index out of
        bounds is clamped, as by JAX indexing.
      mesh: As for `drjax.broadcast`.
      partition: As for `drjax.broadcast`.

    Returns:
      The same tree with global leaves `[*s]`. Infinities and NaNs of other groups
      do not leak in.

    Raises:
      ScopeError, DrjaxValueError, DrjaxTypeError: As for `drjax.reduce_sum`; and
        `i` is not an integer, or is a known number out of bounds.

    Example:
      >>> import drjax, jax.numpy as jnp
      >>> f = drjax.program(partition_size=3)(lambda x: drjax.select(x, 1))
      >>> print(f(jnp.array([5.0, 6.0, 7.0])))
      6.0
    """
    params = resolve("select", mesh, partition)
    n = params["partition"].size
    i = _check_index(i, n)
    index = partition_index_p.bind(**params, per_group=False)
    selected = broadcast_p.bind(jnp.where(i < 0, i + n, i).clip(0, n - 1), **params)

    def bind(leaf, **params):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            data = bind(map_leaves(jax.random.key_data, leaf, **params), **params)
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
        kept = map_leaves(_keep_chosen_group, index, selected, leaf, **params)
        if leaf.dtype == jnp.bool_:
            return reduce_max_p.bind(kept, **params)
        return reduce_sum_p.bind(kept, **params)

    return bind_partitioned("select", x, mesh, partition, bind)


# ---------------------------------------------------------------------------------
# What several blocks need


def _zero_left_out(block: str, x: PyTree, where, mesh, partition) -> PyTree:
    """Set the slices of the groups that the mask `where` leaves out to zero.

    Args:
      block: The name of the building block, for errors.
      x: A tree of partitioned leaves, `[n, *s]`.
      where: Bool `[n]`, which is checked; None: `x` is returned as it is.
      mesh: The block's argument, a mesh or None.
      partition: The block's argument, or None for the program's partition.
    """
    if where is None:
        return x
    where = _check_where(block, where, mesh, partition)

    def bind(leaf, **params):
        return map_leaves(_zero_unless, where, leaf, **params)

    return bind_partitioned(block, x, mesh, partition, bind)


def _check_where(block: str, where, mesh, partition):
    """Check the argument `where=` of a reduction, and return it as a bool `[n]`.

    Args:
      block: The name of the reduction, for errors.
      where: The argument, an array or what `jnp.asarray` takes.
      mesh: The reduction's argument, a mesh or None.
      partition: The reduction's argument, or None for the program's partition.

    Raises:
      DrjaxTypeError: It is no array of bools.
      DrjaxValueError: Its shape is not `[n]`.
    """
    params = resolve(block, mesh, partition)
    size = group_axis_size(params)
    if not isinstance(where, jax.Array):
        try:
            where = jnp.asarray(where)
        except (TypeError, ValueError):
            raise DrjaxTypeError(
                f"drjax.{block} needs where= as bool [{size}], got "
                f"{type(where).__name__}: {where!r}."
            ) from None
    if where.dtype != jnp.bool_:
        raise DrjaxTypeError(
            f"drjax.{block} needs where= as bool [{size}], got dtype {where.dtype}. "
            "Write for instance where=counts > 0."
        )
    if where.shape != (size,):
        raise DrjaxValueError(
            f"drjax.{block} needs where= as bool [{size}], one for each group of "
            f"{params['partition']}, got shape {where.shape}."
        )
    return jnp.asarray(where)


def _weighted_mean(block: str, x: PyTree, w: PyTree, mesh, partition) -> PyTree:
    """`sum_i w_i x_i / sum_i w_i`, over the groups i; accumulated in at least float32.

    Args:
      block: The name of the reduction, for errors.
      x: A tree of partitioned arrays, `[n, *s]`.
      w: One array of weights, or a tree of them like `x`; they are checked.
      mesh: The reduction's argument, a mesh or None.
      partition: The reduction's argument, or None for the program's partition.

    Returns:
      The tree of means, `[*s]`.
    """
    params = resolve(block, mesh, partition)
    leaves, tree = flatten_partitioned(
        block, x, params["partition"], group_axis_size(params)
    )
    weights = check_weights(w, tree, leaves, params["partition"])
    layout = make_layout(**params)
    totals: dict[Any, jax.Array] = {}  # one sum for each weight, not for each leaf
    means = []
    for leaf, weight in zip(leaves, weights, strict=True):
        _check_numeric(block, leaf)
        real = jnp.finfo(_wide(leaf.dtype)).dtype
        key = (id(weight), real)
        if key not in totals:
            wide_weight = lax.convert_element_type(
                as_operand(weight, layout, True), real
            )
            totals[key] = reduce_sum_p.bind(wide_weight, **params)
        share = reduce_sum_p.bind(map_leaves(_weigh, weight, leaf, **params), **params)
        total = lax.expand_dims(totals[key], range(totals[key].ndim, share.ndim))
        # 0 / 0, a NaN, if no group takes part.
        means.append(lax.convert_element_type(share / total, _mean_dtype(leaf.dtype)))
    return tree.unflatten(means)


def _wide(dtype):
    """The dtype, float32 or wider, in which a weighted mean of `dtype` accumulates."""
    dtype = _mean_dtype(dtype)
    return dtype if dtype.itemsize >= 4 else jnp.dtype(jnp.float32)


def _weigh(weight, leaf):
    """One group's `weight * leaf`, in the dtype in which a weighted sum accumulates.

    The shape of `weight` is the leading part of the shape of `leaf`, `[*s]`.
    """
    wide = _wide(leaf.dtype)
    weight = lax.expand_dims(weight, range(weight.ndim, leaf.ndim))
    return weight.astype(jnp.finfo(wide).dtype) * leaf.astype(wide)


def _zero_unless(condition, leaf):
    """One group's slice `leaf` if `condition`, a bool scalar, holds; else zeros."""
    return jnp.where(condition, leaf, jnp.zeros((), leaf.dtype))


def _keep_chosen_group(index, selected, leaf):
    """One group's slice `leaf` if the group's `index` is `selected`, else zeros."""
    return _zero_unless(index == selected, leaf)


def _reduce_extremum(block: str, primitive, x: PyTree, mesh, partition) -> PyTree:
    """Run `reduce_max` or `reduce_min` over a tree.

    Args:
      block: The name of the reduction, for errors.
      primitive: `reduce_max_p` or `reduce_min_p`.
      x: A tree of partitioned arrays, `[n, *s]`.
      mesh: The reduction's argument, a mesh or None.
      partition: The reduction's argument, or None for the program's partition.

    Raises:
      DrjaxTypeError: A leaf is complex, or no array of numbers.
    """

    def bind(leaf, **params):
        _check_numeric(block, leaf)
        if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
            raise DrjaxTypeError(
                f"drjax.{block} needs leaves with an order, got dtype {leaf.dtype}. "
                "Reduce the magnitude, or the real and imaginary part."
            )
        return primitive.bind(leaf, **params)

    return bind_partitioned(block, x, mesh, partition, bind)


def _check_numeric(block: str, leaf) -> None:
    """Raise `DrjaxTypeError` for a leaf that has no arithmetic.

    That is a tangent of integers (dtype float0), or an array of typed keys.
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


def _promote_sum(leaf):
    """Cast `leaf` to the dtype in which `jnp.sum` would add it up."""
    if jnp.issubdtype(leaf.dtype, jnp.inexact):
        return leaf
    return leaf.astype(_sum_dtype(leaf.dtype))


@_compat.cache()
def _sum_dtype(dtype):
    """The dtype that `jnp.sum` of an array of `dtype` has."""
    return jax.eval_shape(jnp.sum, jax.ShapeDtypeStruct((), dtype)).dtype


def _mean_dtype(dtype):
    """The dtype that `jnp.mean` of an array of `dtype` has."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return dtype
    return jnp.dtype(jnp.float64 if dtype.itemsize == 8 else jnp.float32)


def _check_index(i, n: int):
    """Check the group index given to `select`, and return it as an int32 scalar.

    Args:
      i: The index, a Python or NumPy integer or a scalar JAX array.
      n: The number of groups.

    Raises:
      DrjaxTypeError: It is no integer scalar.
      DrjaxValueError: It is known, and not in -n to n - 1.
    """
    if isinstance(i, jax.Array | np.ndarray | np.generic):
        is_number = jnp.issubdtype(i.dtype, jnp.integer) and i.ndim == 0
    else:
        is_number = isinstance(i, int) and not isinstance(i, bool)
    if not is_number:
        raise DrjaxTypeError(
            "drjax.select needs the number of one group, an integer scalar, got "
            f"{type(i).__name__}: {i!r}."
        )
    if _compat.is_concrete(i) and not -n <= int(i) < n:
        raise DrjaxValueError(
            f"drjax.select needs a group between {-n} and {n - 1}, got {int(i)}."
        )
    return jnp.asarray(i, jnp.int32)
