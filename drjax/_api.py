"""The building blocks over pytrees: checks at the edge, then one bind per leaf."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from drjax import _compat
from drjax._errors import DrjaxTypeError, DrjaxValueError
from drjax._extrema import reduce_max_p, reduce_min_p
from drjax._index import partition_index_p
from drjax._mapping import call_mapped
from drjax._partition import Partition, as_partition
from drjax._primitives import (
    broadcast_p,
    gather_p,
    reduce_mean_p,
    reduce_sum_p,
    scatter_p,
)
from drjax._scope import current_scope, resolve_partition
from drjax._sharding import as_operand, find_mesh, host_sharding, layout
from drjax._trees import check_weights, flatten, flatten_partitioned

PyTree = Any
MeshLike = jax.sharding.Mesh | jax.sharding.AbstractMesh | None
PartitionLike = Any


def _resolve(block: str, mesh, partition) -> dict[str, Any]:
    found, mesh = resolve_partition(block, mesh, partition)
    return {"partition": found, "mesh": find_mesh(found, mesh)}


def _rows(where: dict[str, Any]) -> int:
    return layout(**where).rows


def _each_row(block: str, x: PyTree, mesh, partition, bind: Callable) -> PyTree:
    """Apply `bind(leaf, **where)` to the leaves of a partitioned tree."""
    where = _resolve(block, mesh, partition)
    leaves, tree = flatten_partitioned(block, x, where["partition"], _rows(where))
    at = layout(**where)
    return tree.unflatten([bind(as_operand(x, at, True), **where) for x in leaves])


def _each_global(leaves, where: dict[str, Any], bind: Callable) -> list:
    """Apply `bind(leaf, **where)` to global leaves."""
    at = layout(**where)
    return [bind(as_operand(x, at, False), **where) for x in leaves]


def broadcast(
    x: PyTree, *, mesh: MeshLike = None, partition: PartitionLike = None
) -> PyTree:
    """Give each of the n groups a copy of a global value. No communication.

    Args:
      x: Tree of global arrays `[*s]` (numbers too), any dtype, typed keys included.
      mesh: The mesh. Default: the program's, then the one in context.
      partition: Where to broadcast. Default: the program's partition.

    Returns:
      The same tree with leaves `[n, *s]`, partitioned.

    Raises:
      ScopeError: No partition in force. DrjaxTypeError: a leaf is not an array.

    Example:
      >>> import drjax
      >>> print(drjax.program(partition_size=3)(drjax.broadcast)(2.0))
      [2. 2. 2.]

    Source: Rush et al. 2024, section 3.
    """
    where = _resolve("broadcast", mesh, partition)
    leaves, tree = flatten("broadcast", x)
    return tree.unflatten(_each_global(leaves, where, broadcast_p.bind))


def map_fn(
    fn: Callable,
    arg: PyTree,
    *,
    mesh: MeshLike = None,
    partition: PartitionLike = None,
) -> PyTree:
    """Apply a function to each group's values. No communication.

    Args:
      fn: Called once, by tracing, with one group's values. It may close over
        arrays and tracers (which are then broadcast) and use all of JAX except
        collectives over the partition's own axis.
      arg: Tree of partitioned arrays `[n, *s]`. A plain tuple is unpacked into the
        arguments of `fn`; a list or a NamedTuple is one argument.
      mesh: As for `drjax.broadcast`.
      partition: As for `drjax.broadcast`.

    Returns:
      What `fn` returns, with leaves `[n, *t]`, partitioned.

    Raises:
      ScopeError: No partition in force.
      DrjaxValueError: A leaf has another leading axis than n.
      DrjaxTypeError: A leaf of the argument or of the result is not an array.
      MeshError: `fn` closes over arrays on a mesh with Explicit axes.

    Example:
      >>> import drjax, jax.numpy as jnp
      >>> @drjax.program(partition_size=2)
      ... def f(x, y):
      ...     return drjax.map_fn(lambda a, b: a * b, (x, y))
      >>> print(f(jnp.array([1.0, 2.0]), jnp.array([3.0, 4.0])))
      [3. 8.]

    Source: Rush et al. 2024, section 3.
    """
    if not callable(fn):
        raise DrjaxTypeError(
            "drjax.map_fn needs a function and then its argument, "
            f"drjax.map_fn(fn, arg), got {type(fn).__name__} as the function: {fn!r}."
        )
    where = _resolve("map_fn", mesh, partition)
    args = arg if type(arg) is tuple else (arg,)
    leaves, tree = flatten_partitioned(
        "map_fn", args, where["partition"], _rows(where), "args"
    )
    return call_mapped(fn, leaves, tree, **where)


def reduce_sum(
    x: PyTree,
    where: jax.Array | None = None,
    *,
    mesh: MeshLike = None,
    partition: PartitionLike = None,
) -> PyTree:
    """Sum a partitioned value over the groups. One all-reduce on a mesh.

    Args:
      x: Tree of partitioned arrays `[n, *s]`. Integers and bools are promoted as by
        `jnp.sum`. 16-bit floats are added in float32 on each device; what travels
        between devices has the dtype of the input.
      where: Optional bool `[n]`: the groups to sum. Of none the sum is 0.
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
    x = _chosen("reduce_sum", x, where, mesh, partition)

    def bind(leaf, **where):
        _check_numeric("reduce_sum", leaf)
        return reduce_sum_p.bind(_promote_sum(leaf), **where)

    return _each_row("reduce_sum", x, mesh, partition, bind)


def reduce_mean(
    x: PyTree,
    where: jax.Array | None = None,
    *,
    mesh: MeshLike = None,
    partition: PartitionLike = None,
) -> PyTree:
    """Average a partitioned value over the groups. One all-reduce on a mesh.

    Args:
      x: Tree of partitioned arrays `[n, *s]`. Integers and bools become float32, as
        by `jnp.mean`.
      where: Optional bool `[n]`: the groups to average. Of none the mean is NaN, as
        by `jnp.mean`.
      mesh: As for `drjax.broadcast`.
      partition: As for `drjax.broadcast`.

    Returns:
      The same tree with global leaves `[*s]`.

    Raises:
      As `drjax.reduce_sum`.

    Example:
      >>> import drjax, jax.numpy as jnp
      >>> print(drjax.program(partition_size=3)(drjax.reduce_mean)(jnp.arange(3.0)))
      1.0

    Source: Rush et al. 2024, section 3.
    """
    if where is not None:
        weights = _check_where("reduce_mean", where, mesh, partition)
        x = _chosen("reduce_mean", x, where, mesh, partition)
        return _weighted_mean("reduce_mean", x, weights, mesh, partition)

    def bind(leaf, **where):
        _check_numeric("reduce_mean", leaf)
        return reduce_mean_p.bind(leaf.astype(_mean_dtype(leaf.dtype)), **where)

    return _each_row("reduce_mean", x, mesh, partition, bind)


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
        float32 throughout, also between devices; integers become float32.
      w: Real weights: one array `[n]`, or a tree with the structure of `x` whose
        leaves have the leading axes of the leaves of `x`. If they add up to zero
        the result is NaN. A NaN in a group of weight zero makes the result NaN; to
        leave groups out, use `drjax.reduce_mean(x, where=...)`.
      mesh: As for `drjax.broadcast`.
      partition: As for `drjax.broadcast`.

    Returns:
      The same tree with global leaves `[*s]`.

    Raises:
      As `drjax.reduce_sum`; DrjaxValueError if the trees or shapes do not match.

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
      As `drjax.reduce_sum`.

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
      As `drjax.reduce_sum`.

    Example:
      >>> import drjax, jax.numpy as jnp
      >>> print(drjax.program(partition_size=3)(drjax.reduce_min)(jnp.arange(3.0)))
      0.0
    """
    return _reduce_extremum("reduce_min", reduce_min_p, x, mesh, partition)


def select(
    x: PyTree,
    i: int | jax.Array,
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
      As `drjax.reduce_sum`; DrjaxTypeError if `i` is not an integer, and
      DrjaxValueError if it is a known number out of bounds.

    Example:
      >>> import drjax, jax.numpy as jnp
      >>> f = drjax.program(partition_size=3)(lambda x: drjax.select(x, 1))
      >>> print(f(jnp.array([5.0, 6.0, 7.0])))
      6.0
    """
    resolved = _resolve("select", mesh, partition)
    n = resolved["partition"].size
    i = _check_index(i, n)
    index = partition_index_p.bind(**resolved, per_group=False)
    wanted = broadcast_p.bind(jnp.where(i < 0, i + n, i).clip(0, n - 1), **resolved)

    def bind(leaf, **where):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            data = bind(_map(jax.random.key_data, leaf, **where), **where)
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
        kept = _map(_keep_chosen_group, index, wanted, leaf, **where)
        if leaf.dtype == jnp.bool_:
            return reduce_max_p.bind(kept, **where)
        return reduce_sum_p.bind(kept, **where)

    return _each_row("select", x, mesh, partition, bind)


def gather(
    x: PyTree, *, mesh: MeshLike = None, partition: PartitionLike = None
) -> PyTree:
    """All groups' rows as a global value. One all-gather on a mesh.

    Args:
      x: Tree of partitioned arrays `[n, *s]`.
      mesh: As for `drjax.broadcast`.
      partition: As for `drjax.broadcast`.

    Returns:
      The same tree, global leaves `[n, *s]`.

    Raises:
      As `drjax.reduce_sum`.

    Example:
      >>> import drjax, jax.numpy as jnp
      >>> f = drjax.program(partition_size=3)(lambda x: drjax.gather(x).cumsum())
      >>> print(f(jnp.arange(3.0)))
      [0. 1. 3.]

    Source: `all_gather_invariant` of JAX note 17111.
    """
    return _each_row("gather", x, mesh, partition, gather_p.bind)


def scatter(
    x: PyTree, *, mesh: MeshLike = None, partition: PartitionLike = None
) -> PyTree:
    """Hand row i of a global value to group i. No communication.

    Args:
      x: Tree of global arrays `[n, *s]`.
      mesh: As for `drjax.broadcast`.
      partition: As for `drjax.broadcast`.

    Returns:
      The same tree, partitioned leaves `[n, *s]`. The transpose of `drjax.gather`.

    Raises:
      As `drjax.reduce_sum`.

    Example:
      >>> import drjax, jax.numpy as jnp
      >>> @drjax.program(partition_size=3)
      ... def f(x):
      ...     return drjax.map_fn(jnp.square, drjax.scatter(x))
      >>> print(f(jnp.arange(3.0)))
      [0. 1. 4.]

    Source: `pscatter` of JAX note 17111.
    """
    where = _resolve("scatter", mesh, partition)
    found = where["partition"]
    leaves, tree = flatten_partitioned("scatter", x, found, found.size)
    return tree.unflatten(_each_global(leaves, where, scatter_p.bind))


def partition_index(
    *, mesh: MeshLike = None, partition: PartitionLike = None
) -> jax.Array:
    """The numbers of the groups, 0 to n - 1. No communication.

    Args:
      mesh: As for `drjax.broadcast`.
      partition: Default: the program's; inside a mapped function, the one mapped over.

    Returns:
      In a program: partitioned int32 `[n]`. Inside the function given to
      `drjax.map_fn`: this group's number, int32 `[]`. It depends on the group only,
      never on devices, so `jax.random.fold_in(key, drjax.partition_index())` gives
      each group its own reproducible randomness.

    Raises:
      ScopeError: No partition in force.

    Example:
      >>> import drjax
      >>> print(drjax.program(partition_size=3)(drjax.partition_index)())
      [0 1 2]
    """
    mapped = _mapped_partition(partition)
    if mapped is not None:
        return partition_index_p.bind(partition=mapped, mesh=None, per_group=True)
    where = _resolve("partition_index", mesh, partition)
    index = partition_index_p.bind(**where, per_group=False)
    return as_operand(index, layout(**where), True)


def partition_size(*, partition: PartitionLike = None) -> int:
    """The number n of groups, a Python int.

    Args:
      partition: Default: the program's; inside a mapped function, the one mapped over.

    Raises:
      ScopeError: No partition in force.

    Example:
      >>> import drjax
      >>> drjax.program(partition_size=3)(drjax.partition_size)()
      3
    """
    mapped = _mapped_partition(partition)
    if mapped is not None:
        return mapped.size
    return resolve_partition("partition_size", None, partition)[0].size


def shard(
    tree: PyTree, mesh: MeshLike = None, *, partition: PartitionLike = None
) -> PyTree:
    """Place host data `[n, ...]` over the mesh axes that carry the partition.

    Args:
      tree: Tree of arrays `[n, *s]`. With several processes, each passes the whole
        array and keeps only its own rows.
      mesh: The mesh. Default: the program's, then the one in context.
      partition: A `drjax.Partition`, a mapping `{"clients": n}`, or a program.
        Default: the program's partition.

    Returns:
      The tree, with each leaf divided over the devices by groups. If n is not a
      multiple of the number of devices, JAX cannot store uneven shards: the leaf is
      replicated, and divided once inside a jitted program. Without a mesh that
      carries the partition, the leaves are placed on the default device.

    Raises:
      As `drjax.reduce_sum`.

    Example:
      >>> import drjax, numpy as np
      >>> x = drjax.shard(np.zeros((8, 2)), partition={"clients": 8})
      >>> x.shape
      (8, 2)
    """
    found, mesh = resolve_partition("shard", mesh, partition)
    leaves, treedef = flatten_partitioned("shard", tree, found, found.size, "tree")
    sharding = host_sharding(found, mesh)
    return treedef.unflatten([_place(leaf, sharding) for leaf in leaves])


# ---------------------------------------------------------------------------------
# What several blocks need


def _place(leaf, sharding):
    if sharding is None:
        return leaf
    return jax.device_put(leaf, sharding)


def _map(fn, *leaves, partition, mesh):
    """`map_fn` of a function of arrays with one result."""
    tree = jax.tree_util.tree_structure((0,) * len(leaves))
    return call_mapped(fn, list(leaves), tree, partition=partition, mesh=mesh)


def _chosen(block: str, x: PyTree, chosen, mesh, partition) -> PyTree:
    """`x` with zeros in the groups that are left out."""
    if chosen is None:
        return x
    chosen = _check_where(block, chosen, mesh, partition)

    def bind(leaf, **where):
        return _map(_zero_unless, chosen, leaf, **where)

    return _each_row(block, x, mesh, partition, bind)


def _check_where(block: str, chosen, mesh, partition):
    resolved = _resolve(block, mesh, partition)
    rows = _rows(resolved)
    if not isinstance(chosen, jax.Array):
        try:
            chosen = jnp.asarray(chosen)
        except (TypeError, ValueError):
            raise DrjaxTypeError(
                f"drjax.{block} needs where= as bool [{rows}], got "
                f"{type(chosen).__name__}: {chosen!r}."
            ) from None
    if chosen.dtype != jnp.bool_:
        raise DrjaxTypeError(
            f"drjax.{block} needs where= as bool [{rows}], got dtype {chosen.dtype}. "
            "Write for instance where=counts > 0."
        )
    if chosen.shape != (rows,):
        raise DrjaxValueError(
            f"drjax.{block} needs where= as bool [{rows}], one for each group of "
            f"{resolved['partition']}, got shape {chosen.shape}."
        )
    return jnp.asarray(chosen)


def _weighted_mean(block: str, x: PyTree, w: PyTree, mesh, partition) -> PyTree:
    where = _resolve(block, mesh, partition)
    leaves, tree = flatten_partitioned(block, x, where["partition"], _rows(where))
    weights = check_weights(w, tree, leaves, where["partition"])
    at = layout(**where)
    totals: dict[Any, jax.Array] = {}  # one sum for each weight, not for each leaf
    means = []
    for leaf, weight in zip(leaves, weights, strict=True):
        _check_numeric(block, leaf)
        real = jnp.finfo(_wide(leaf.dtype)).dtype
        key = (id(weight), real)
        if key not in totals:
            wide_weight = lax.convert_element_type(as_operand(weight, at, True), real)
            totals[key] = reduce_sum_p.bind(wide_weight, **where)
        share = reduce_sum_p.bind(_map(_weigh, weight, leaf, **where), **where)
        total = lax.expand_dims(totals[key], range(totals[key].ndim, share.ndim))
        means.append(lax.convert_element_type(share / total, _mean_dtype(leaf.dtype)))
    return tree.unflatten(means)


def _wide(dtype):
    """The dtype in which a weighted mean accumulates: float32 or wider."""
    return jnp.promote_types(dtype, jnp.float32)


def _weigh(weight, leaf):
    wide = _wide(leaf.dtype)
    weight = lax.expand_dims(weight, range(weight.ndim, leaf.ndim))
    return weight.astype(jnp.finfo(wide).dtype) * leaf.astype(wide)


def _zero_unless(chosen, leaf):
    return jnp.where(chosen, leaf, jnp.zeros((), leaf.dtype))


def _keep_chosen_group(index, wanted, leaf):
    return _zero_unless(index == wanted, leaf)


def _reduce_extremum(block: str, primitive, x: PyTree, mesh, partition) -> PyTree:
    def bind(leaf, **where):
        _check_numeric(block, leaf)
        if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
            raise DrjaxTypeError(
                f"drjax.{block} needs leaves with an order, got dtype {leaf.dtype}. "
                "Reduce the magnitude, or the real and imaginary part."
            )
        return primitive.bind(leaf, **where)

    return _each_row(block, x, mesh, partition, bind)


def _check_numeric(block: str, leaf) -> None:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        raise DrjaxTypeError(
            f"drjax.{block} needs leaves that are numbers, got dtype {leaf.dtype}. To "
            "take one group's key, use drjax.select."
        )


def _promote_sum(leaf):
    """`leaf` in the dtype in which `jnp.sum` would add it up."""
    if jnp.issubdtype(leaf.dtype, jnp.inexact):
        return leaf
    return leaf.astype(_sum_dtype(leaf.dtype))


@_compat.cache()
def _sum_dtype(dtype):
    return jax.eval_shape(jnp.sum, jax.ShapeDtypeStruct((), dtype)).dtype


def _mean_dtype(dtype):
    """The dtype that `jnp.mean` would return."""
    inexact = jnp.issubdtype(dtype, jnp.inexact)
    return dtype if inexact else jnp.promote_types(dtype, jnp.float32)


def _check_index(i, n: int):
    """`i` as an int32 scalar; a known number is checked against the bounds."""
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


def _mapped_partition(partition: PartitionLike) -> Partition | None:
    """The partition of a surrounding map_fn that is meant, if one is."""
    scope = current_scope()
    if partition is None:
        return scope.mapped[-1] if scope.mapped and scope.partition is None else None
    wanted = as_partition(partition)
    return wanted if wanted in scope.mapped else None
