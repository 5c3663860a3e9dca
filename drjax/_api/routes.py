"""The building blocks that move slices between groups: `take`, `put` and `shift`.

Input: a tree of partitioned leaves `[n, *s]`, and for each group another group. Output:
a tree of partitioned leaves. Invariants: an index that is known without running the
program, and a permutation, is a static permutation. Sharp edges: a known index out of
bounds is an error; a traced one is clamped by `take` and dropped by `put`, as by JAX
indexing.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from drjax._api.levels import Over, over_levels
from drjax._api.reductions import check_numeric
from drjax._api.resolve import (
    MeshLike,
    PartitionLike,
    PyTree,
    bind_global,
    bind_partitioned,
    map_leaves,
    resolve,
)
from drjax._api.validate import flatten_partitioned
from drjax._errors import DrjaxTypeError, DrjaxValueError
from drjax._primitives.collectives import scatter_p
from drjax._primitives.routes import (
    inverse,
    last_writer,
    permute_p,
    put_add_p,
    take_p,
)
from drjax._primitives.select_slice import as_int32, count_from_end
from drjax._sharding.execute import as_operand
from drjax._sharding.layout import make_layout


@over_levels("x")
def take(
    x: PyTree,
    index: ArrayLike | Sequence[int],
    *,
    over: Over = None,
    mesh: MeshLike = None,
    partition: PartitionLike = None,
) -> PyTree:
    """Give group j the slice of group `index[j]`: `x[index]`, partitioned.

    On a mesh, a permutation that is known without running the program is one or more
    `ppermute`s, of the slices that change their device. Another index is one
    reduce-scatter, with temporary memory of n slices on each device.

    Args:
      x: Tree of partitioned arrays `[n, *s]`, any dtype, typed keys included.
      index: Integers `[n]`: for each group, the group whose slice it gets. Negative
        ones count from the end. A sequence, a NumPy array, or a global value; a traced
        index out of bounds is clamped, as by JAX indexing.
      over: As for `drjax.broadcast`.
      mesh: As for `drjax.broadcast`.
      partition: As for `drjax.broadcast`.

    Returns:
      The same tree, partitioned leaves `[n, *s]`. The transpose is
      `drjax.put(..., index, add=True)`.

    Raises:
      ScopeError, DrjaxValueError, DrjaxTypeError: As for `drjax.reduce_sum`; and
        `index` is no array of n integers, or one that is known is out of bounds.

    Example:
      >>> import drjax, jax.numpy as jnp
      >>> f = drjax.program(partition_size=3)(lambda x: drjax.take(x, [2, 0, 0]))
      >>> print(f(jnp.array([5.0, 6.0, 7.0])))
      [7. 5. 5.]
    """
    params = resolve("take", mesh, partition)
    n = params["partition"].size
    index = _check_index("take", index, n)
    sources = _permutation(index)
    if sources is not None:
        return _permute("take", x, sources, mesh, partition)
    return _take("take", x, count_from_end(index, n), params)


@over_levels("x", "into")
def put(
    x: PyTree,
    index: ArrayLike | Sequence[int],
    into: PyTree = None,
    *,
    add: bool = False,
    over: Over = None,
    mesh: MeshLike = None,
    partition: PartitionLike = None,
) -> PyTree:
    """Write the slice of group j to group `index[j]`: `into.at[index].set(x)`.

    On a mesh as `drjax.take`.

    Args:
      x: Tree of partitioned arrays `[n, *s]`. With `add`, of dtypes with arithmetic.
      index: Integers `[n]`: for each group, the group that gets its slice. Negative
        ones count from the end. A sequence, a NumPy array, or a global value; a traced
        index out of bounds is dropped, as by JAX's `.at[]`.
      into: The tree of partitioned arrays to write to, with the structure, shapes and
        dtypes of `x`. Default: zeros.
      add: Whether slices are added to `into`, and those with equal indices to each
        other. Otherwise they replace it, and of those with equal indices the last one
        does.
      over: As for `drjax.broadcast`.
      mesh: As for `drjax.broadcast`.
      partition: As for `drjax.broadcast`.

    Returns:
      The same tree, partitioned leaves `[n, *s]`.

    Raises:
      ScopeError, DrjaxValueError, DrjaxTypeError: As for `drjax.take`; and `into` has
        another structure, shape or dtype than `x`, or a key is added.

    Example:
      >>> import drjax, jax.numpy as jnp
      >>> @drjax.program(partition_size=3)
      ... def f(x):
      ...     return drjax.put(x, [1, 1, 2]), drjax.put(x, [1, 1, 2], add=True)
      >>> last, added = f(jnp.array([5.0, 6.0, 7.0]))
      >>> print(last, added)
      [0. 6. 7.] [ 0. 11.  7.]
    """
    params = resolve("put", mesh, partition)
    n = params["partition"].size
    index = _check_index("put", index, n)
    base = None if into is None else _check_into(x, into, params)
    sources = _permutation(index)
    if sources is not None and not add:
        return _permute("put", x, inverse(sources), mesh, partition)
    index = count_from_end(index, n)
    index = jnp.where((index >= 0) & (index < n), index, n)  # n: dropped
    index = as_operand(index, make_layout(**params), False)
    if not add:
        return _put_last(x, index, base, params)

    def bind(leaf, **params):
        check_numeric("put", leaf)
        if sources is not None:
            return permute_p.bind(leaf, sources=inverse(sources), **params)
        return put_add_p.bind(leaf, index, **params)

    moved = bind_partitioned("put", x, mesh, partition, bind)
    return moved if base is None else _combine(lax.add, moved, base, params)


@over_levels("x")
def shift(
    x: PyTree,
    k: int,
    *,
    over: Over = None,
    mesh: MeshLike = None,
    partition: PartitionLike = None,
) -> PyTree:
    """Move slices by k groups around a ring: `jnp.roll(x, k, axis=0)`.

    On a mesh, one or two `ppermute`s; for |k| groups or fewer on a device, of k slices.

    Args:
      x: Tree of partitioned arrays `[n, *s]`, any dtype, typed keys included.
      k: How far: group j gets the slice of group j - k, modulo n. A Python integer.
      over: As for `drjax.broadcast`.
      mesh: As for `drjax.broadcast`.
      partition: As for `drjax.broadcast`.

    Returns:
      The same tree, partitioned leaves `[n, *s]`. The transpose is a shift by -k.

    Raises:
      ScopeError, DrjaxValueError, DrjaxTypeError: As for `drjax.reduce_sum`; and `k` is
        no Python integer.

    Example:
      >>> import drjax, jax.numpy as jnp
      >>> f = drjax.program(partition_size=3)(lambda x: drjax.shift(x, 1))
      >>> print(f(jnp.array([5.0, 6.0, 7.0])))
      [7. 5. 6.]
    """
    params = resolve("shift", mesh, partition)
    if not isinstance(k, int | np.integer) or isinstance(k, bool):
        raise DrjaxTypeError(
            f"drjax.shift needs a Python integer, got {type(k).__name__}: {k!r}. For a "
            "distance that the program computes, use drjax.take(x, index)."
        )
    n = params["partition"].size
    sources = tuple((j - int(k)) % n for j in range(n))
    return _permute("shift", x, sources, mesh, partition)


def _take(block: str, x: PyTree, index, params: dict[str, Any]) -> PyTree:
    """Bind `take_p` for each leaf of a tree.

    Args:
      block: The name of the building block, for errors.
      x: The tree of partitioned arrays.
      index: For each group the group whose slice it gets, int32 `[n]`; clamped.
      params: The parameters `partition` and `mesh`, as `resolve` returns them.
    """
    index = index.clip(0, params["partition"].size - 1)
    index = as_operand(index, make_layout(**params), False)
    bind = lambda leaf, **params: take_p.bind(leaf, index, **params)
    return bind_partitioned(block, x, params["mesh"], params["partition"], bind)


def _put_last(x: PyTree, index, base: PyTree | None, params: dict[str, Any]) -> PyTree:
    """Write slices to other groups; of several for one group, the last one stays.

    Args:
      x: The tree of partitioned arrays.
      index: For each group the group that gets its slice, int32 `[n]`; n: it is
        dropped.
      base: The tree to write to, like `x`; None: zeros.
      params: The parameters `partition` and `mesh`, as `resolve` returns them.
    """
    writer = last_writer(index, params["partition"].size)
    moved = _take("put", x, writer, params)
    (written,) = bind_global([writer >= 0], params, scatter_p.bind)
    if base is None:
        base = jax.tree.map(jnp.zeros_like, moved)
    keep = lambda moved, base, written: lax.select(
        lax.broadcast_in_dim(written, moved.shape, ()), moved, base
    )
    return _combine(keep, moved, base, params, written)


def _permute(block: str, x: PyTree, sources: tuple[int, ...], mesh, partition):
    """Bind `permute_p` for each leaf of a tree.

    Args:
      block: The name of the building block, for errors.
      x: The tree of partitioned arrays.
      sources: For each group the group whose slice it gets, a permutation.
      mesh: The block's argument, a mesh or None.
      partition: The block's argument, or None for the program's partition.
    """

    def bind(leaf, **params):
        return permute_p.bind(leaf, sources=sources, **params)

    return bind_partitioned(block, x, mesh, partition, bind)


def _combine(fn, x: PyTree, y: PyTree, params, *others):
    """Map a function of slices over the leaves of two partitioned trees.

    Args:
      fn: `fn(leaf of x, leaf of y, *others)` of one group, which returns an array.
      x, y: Trees of the same structure.
      params: The parameters `partition` and `mesh`, as `resolve` returns them.
      *others: Partitioned values, the same for all leaves.
    """
    layout = make_layout(**params)

    def combine(a, b):
        a, b = as_operand(a, layout, True), as_operand(b, layout, True)
        return map_leaves(fn, a, b, *others, **params)

    return jax.tree.map(combine, x, y)


def _check_index(block: str, index, n: int):
    """Check the index of `take` or `put`: integers `[n]`, in bounds if they are known.

    Args:
      block: The name of the building block, for errors.
      index: The argument.
      n: The number of groups.

    Returns:
      An int32 array `[n]`: of NumPy if its numbers are known without running the
      program, and counted from 0; else of JAX.

    Raises:
      DrjaxTypeError: It is no array of integers.
      DrjaxValueError: Its shape is not `[n]`, or a known number is not in -n to n - 1.
    """
    if not isinstance(index, jax.Array):
        try:
            index = np.asarray(index)
        except (TypeError, ValueError):
            index = np.asarray(None)
    if index.ndim == 0 or not jnp.issubdtype(index.dtype, jnp.integer):
        raise DrjaxTypeError(
            f"drjax.{block} needs as index [{n}] integers, one for each group, got "
            f"{index.dtype}[{','.join(map(str, index.shape))}]."
        )
    if index.shape != (n,):
        raise DrjaxValueError(
            f"drjax.{block} needs as index [{n}] integers, one for each group, got "
            f"shape {list(index.shape)}."
        )
    if isinstance(index, jax.Array):
        return as_int32(index, -n - 1, n)  # what is out of bounds stays so
    if wrong := [int(i) for i in index if not -n <= i < n]:
        raise DrjaxValueError(
            f"drjax.{block} needs groups between {-n} and {n - 1}, got {wrong[0]}."
        )
    return (index % n).astype(np.int32)


def _permutation(index) -> tuple[int, ...] | None:
    """The index as a tuple, if it is known and a permutation; else None."""
    if isinstance(index, jax.Array) or len({*index.tolist()}) < len(index):
        return None
    return tuple(index.tolist())


def _check_into(x: PyTree, into: PyTree, params) -> PyTree:
    """Check that `into` has the structure, shapes and dtypes of `x`; return its arrays.

    Args:
      x: The argument `x` of `put`.
      into: The argument `into`.
      params: The parameters `partition` and `mesh`, as `resolve` returns them.

    Raises:
      DrjaxTypeError, DrjaxValueError: It does not, or a leaf is not partitioned.
    """
    layout = make_layout(**params)
    size = layout.group_axis_size
    leaves, tree = flatten_partitioned("put", x, layout.partition, size)
    bases, base_tree = flatten_partitioned("put", into, layout.partition, size, "into")
    if tree != base_tree:
        raise DrjaxValueError(
            "drjax.put needs x and into of one structure, got:\n"
            f"  x:    {tree}\n  into: {base_tree}"
        )
    for leaf, base in zip(leaves, bases, strict=True):
        if leaf.shape != base.shape or leaf.dtype != base.dtype:
            raise DrjaxValueError(
                "drjax.put needs x and into of the same shapes and dtypes, got "
                f"{leaf.dtype}{list(leaf.shape)} and {base.dtype}{list(base.shape)}."
            )
    return tree.unflatten(bases)
