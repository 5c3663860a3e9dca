"""The building blocks that move slices between groups: `take`, `put` and `shift`.

Input: a tree of partitioned leaves `[n, *s]`, and for each group another group. Output:
a tree of partitioned leaves. `take` and `put` also move slices between the n groups and
a population `[N, *s]`, or a cohort `[k, *s]`, whose partition has the same name and
mesh axes. Invariants: an index of Python or NumPy that is a permutation is a static
permutation. A JAX array is data, whether it is traced or concrete, so that a program
means the same eagerly and under `jax.jit`. Sharp edges: out of bounds, an index of
Python or NumPy is an error; data is clamped by `take` and dropped by `put`, as by JAX
indexing. Of a population all other building blocks need `partition=`.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from drjax._api.levels import Over, over_levels
from drjax._api.reductions import check_numeric
from drjax._api.resolve import (
    BlockParams,
    MeshLike,
    PartitionLike,
    bind_global,
    bind_partitioned,
    map_leaves,
    resolve,
)
from drjax._api.validate import check_flag, flatten_partitioned
from drjax._compat.types import Array, GlobalArray, PartitionedArray, PyTree, Tree
from drjax._error_texts import brief
from drjax._errors import DrjaxTypeError, DrjaxValueError
from drjax._plan.schedule_moves import Sources
from drjax._primitives.collectives import scatter_p
from drjax._primitives.moves import (
    inverse,
    is_permutation,
    last_writer,
    permute_p,
    put_add_p,
    take_p,
)
from drjax._primitives.select_slice import as_int32, count_from_end, show_index
from drjax._sharding.execute import as_operand
from drjax._sharding.layout import make_layout


@over_levels("x", own_axes=True)
def take(
    x: Tree,
    index: ArrayLike | Sequence[int],
    *,
    over: Over = None,
    mesh: MeshLike = None,
    partition: PartitionLike = None,
) -> Tree:
    """Give group j the slice of group `index[j]`: `x[index]`, partitioned.

    With an index of n groups, x may be of a population, `[N, *s]`: the groups are a
    cohort of it. With x of n groups, the index may have any length. The population, or
    the cohort, is a partition of the same name, over the same mesh axes.

    On a mesh, an index that is known without running the program sends each slice once
    to each device that needs it: by few `ppermute`s, or one all-to-all padded to the
    most slices that a pair of devices exchanges, whichever costs less. An index that is
    data is one reduce-scatter, or on TPUs a ragged all-to-all, with temporary memory of
    a slice for each element of the index on each device; or, if it has more elements
    than x has slices, an all-gather of x.

    Args:
      x: Tree of partitioned arrays `[n, *s]`, any dtype, typed keys included; or of
        `[N, *s]`, with the same N for all leaves.
      index: Integers `[n]`: for each group, the group whose slice it gets; or `[k]`
        for any k, if x has n slices. Negative ones count from the end. A JAX array, a
        global value, is data: out of bounds it is clamped, as by JAX indexing, eagerly
        and under `jax.jit`. Of a sequence or a NumPy array, it is an error.
      over: As for `drjax.broadcast`.
      mesh: As for `drjax.broadcast`.
      partition: As for `drjax.broadcast`.

    Returns:
      The same tree, partitioned leaves with one slice for each element of `index`. The
      transpose is `drjax.put(..., index, add=True)`.

    Raises:
      ScopeError, DrjaxValueError, DrjaxTypeError: As for `drjax.reduce_sum`; and
        `index` is no array `[k]` of integers, neither it nor `x` has n elements, or it
        is a sequence or a NumPy array, and out of bounds.

    Example:
      >>> import drjax, jax.numpy as jnp
      >>> f = drjax.program(partition_size=3)(lambda x: drjax.take(x, [2, 0, 0]))
      >>> print(f(jnp.array([5.0, 6.0, 7.0])))
      [7. 5. 5.]
    """
    params = resolve("take", mesh, partition)
    index = _check_index("take", index)
    params = _params_of_size(params, _size_of("take", x, params, index.shape[0]))
    n = params["partition"].size
    index = _in_bounds("take", index, n)
    sources = _permutation(index, n)
    if sources is not None:
        return _permute("take", x, sources, params)
    if isinstance(index, jax.Array):
        index = count_from_end(index, n)
        show_index(index, n)
        index = index.clip(0, n - 1)
    return _take("take", x, index, params)


@over_levels("x", "into", own_axes=True)
def put(
    x: Tree,
    index: ArrayLike | Sequence[int],
    into: PyTree = None,
    *,
    add: bool = False,
    over: Over = None,
    mesh: MeshLike = None,
    partition: PartitionLike = None,
) -> Tree:
    """Write the slice of group j to group `index[j]`: `into.at[index].set(x)`.

    The groups may be a cohort of a population, `into` of `[N, *s]`; or x, of `[k, *s]`,
    may be a cohort of the groups. See `drjax.take`.

    On a mesh as `drjax.take`, the other way around: it sends the slices of the cohort.

    Args:
      x: Tree of partitioned arrays `[n, *s]`; or of `[k, *s]`, with the same k for all
        leaves, if `into` has n slices. With `add`, of dtypes with arithmetic.
      index: Integers, one for each slice of x: the group that gets it. Negative ones
        count from the end. A JAX array, a global value, is data: out of bounds the
        slice is dropped, as by JAX's `.at[]`, eagerly and under `jax.jit`, and gets no
        cotangent. Of a sequence or a NumPy array, it is an error.
      into: The tree of partitioned arrays to write to, `[n, *s]`, or of a population
        `[N, *s]`, with the structure and dtypes of `x`. Default: n slices of zeros.
      add: Whether slices are added to `into`, and those with equal indices to each
        other. Otherwise they replace it, and of those with equal indices the last one
        does.
      over: As for `drjax.broadcast`.
      mesh: As for `drjax.broadcast`.
      partition: As for `drjax.broadcast`.

    Returns:
      A tree with the structure, shapes and dtypes of `into`.

    Raises:
      ScopeError, DrjaxValueError, DrjaxTypeError: As for `drjax.take`; and `into` has
        another structure, or slices of another shape or dtype, than `x`, or a key is
        added.

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
    check_flag("put", "add", add)
    index = _check_index("put", index)
    groups = params
    if into is not None:
        groups = _params_of_size(
            params, _size_of("put", into, params, index.shape[0], "into")
        )
    n, k = groups["partition"].size, index.shape[0]
    cohort = _params_of_size(params, k)
    index = _in_bounds("put", index, n)
    base = None if into is None else _check_into(x, into, cohort, groups)
    sources = _permutation(index, n)
    if sources is not None and not add:
        return _permute("put", x, inverse(sources), params)
    if isinstance(index, jax.Array):
        index = count_from_end(index, n)
        show_index(index, n)
        index = jnp.where((index >= 0) & (index < n), index, n)  # n: dropped
    if not add:
        return _put_last(x, index, base, cohort, groups)

    known = Sources.of(index)
    operand = as_operand(jnp.asarray(index), make_layout(**groups), False)

    def bind(leaf: PartitionedArray, **_: Any) -> PartitionedArray:
        check_numeric("put", leaf)
        if sources is not None:
            return permute_p.bind(leaf, sources=inverse(sources), **groups)
        return put_add_p.bind(leaf, operand, sources=known, **groups)

    moved = bind_partitioned("put", x, cohort["mesh"], cohort["partition"], bind)
    return moved if base is None else _combine(lax.add, moved, base, cohort, groups)


@over_levels("x")
def shift(
    x: Tree,
    k: int,
    *,
    over: Over = None,
    mesh: MeshLike = None,
    partition: PartitionLike = None,
) -> Tree:
    """Move slices by k groups around a ring: `jnp.roll(x, k, axis=0)`.

    On a mesh, let d be the shorter way around the ring, d <= n / 2. If each device has
    n / m groups, and d is not more than that, it is one `ppermute`, in which each
    device sends d slices; for a longer d it is one or two, of all slices. If the m
    devices do not divide n, it is as of `drjax.take`.

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
    sources = Sources(np.roll(np.arange(n), int(k) % n))
    return _permute("shift", x, sources, params)


def _take(
    block: str, x: PyTree, index: GlobalArray | np.ndarray, params: BlockParams
) -> PyTree:
    """Give group j the slice of group `index[j]`, for each leaf of a tree; or zeros.

    The leaves are checked. The index, int32 `[k]`, is of the n groups of `x`, of which
    `params` are.
    """
    known = Sources.of(index)
    index = as_operand(jnp.asarray(index), make_layout(**params), False)
    bind = lambda leaf, **params: take_p.bind(leaf, index, sources=known, **params)
    return bind_partitioned(block, x, params["mesh"], params["partition"], bind)


def _put_last(
    x: PyTree,
    index: GlobalArray | np.ndarray,
    base: PyTree | None,
    cohort: BlockParams,
    groups: BlockParams,
) -> PyTree:
    """Write slices to other groups; of several for one group, the last one stays.

    For each of the k groups of `x`, the cohort, `index`, int32 `[k]`, is the one of the
    n groups that gets its slice; n: it is dropped. `base` has the slices that stay
    where nothing is written; None: zeros.
    """
    writer = last_writer(index, groups["partition"].size)
    moved = _take("put", x, writer, cohort)
    writer = jnp.asarray(writer)
    if base is None:
        base = jax.tree.map(jnp.zeros_like, moved)
    if cohort == groups:
        (written,) = bind_global([writer >= 0], groups, scatter_p.bind)
    else:
        written = as_operand(writer >= 0, make_layout(**groups), True)
    keep = lambda moved, base, written: lax.select(written, moved, base)
    return _combine(keep, moved, base, cohort, groups, written)


def _permute(block: str, x: PyTree, sources: Sources, params: BlockParams) -> PyTree:
    """Give group j the slice of group `sources[j]`, for each leaf of a tree.

    The leaves are checked; the sources are a permutation.
    """

    def bind(leaf: PartitionedArray, **params: Unpack[BlockParams]) -> PartitionedArray:
        return permute_p.bind(leaf, sources=sources, **params)

    return bind_partitioned(block, x, params["mesh"], params["partition"], bind)


def _combine(
    fn: Callable[..., Array],
    x: PyTree,
    y: PyTree,
    cohort: BlockParams,
    groups: BlockParams,
    *others: PartitionedArray,
) -> PyTree:
    """Map a function of slices over the leaves of two partitioned trees of n groups.

    If `cohort` and `groups` are equal, it binds one `map_fn` for each leaf. Else slices
    of `x` were moved between a population and a cohort of it, and a plan may have maps
    over one of these two partitions only; so it is a `jax.vmap` for each leaf. The
    function also takes the slices of `others`, which are the same for all leaves.
    """
    layout = make_layout(**groups)

    def combine(a: PartitionedArray, b: PartitionedArray) -> PartitionedArray:
        a, b = as_operand(a, layout, True), as_operand(b, layout, True)
        if cohort != groups:
            # No map_fn: a plan has those of one of the two partitions only.
            return jax.vmap(fn)(a, b, *others)
        return map_leaves("put", fn, a, b, *others, **groups)

    return jax.tree.map(combine, x, y)


def _check_index(block: str, index: object) -> Array | np.ndarray:
    """Check the index of `take` or `put`, and return it as an array `[k]` of integers.

    It is of NumPy if its numbers are known without running the program; else of JAX.
    """
    if not isinstance(index, jax.Array):
        try:
            index = np.asarray(index)
        except (TypeError, ValueError):
            index = np.asarray(None)
    shape = f"[{','.join(map(str, index.shape))}]"
    needs = f"drjax.{block} needs as index [k] integers, one for each slice"
    if index.ndim == 0 or not jnp.issubdtype(index.dtype, jnp.integer):
        raise DrjaxTypeError(f"{needs}, got {index.dtype}{shape}.")
    if index.ndim != 1 or not index.size:
        raise DrjaxValueError(f"{needs}, got shape {shape}.")
    return index


def _in_bounds(block: str, index: Array | np.ndarray, n: int) -> Array | np.ndarray:
    """Check that the known elements of an index are groups, and cast it to int32.

    Groups are from -n to n - 1. The elements of a NumPy array are known, and negative
    ones are counted from the end. In a JAX array they stay, and what is out of bounds
    stays out of bounds.
    """
    if isinstance(index, jax.Array):
        return as_int32(index, -n - 1, n)  # what is out of bounds stays so
    wrong = index[(index < -n) | (index >= n)]
    if wrong.size:
        raise DrjaxValueError(
            f"drjax.{block} needs groups between {-n} and {n - 1}, got {wrong[0]}. To "
            f"have it {'clamped' if block == 'take' else 'dropped'}, pass a JAX array."
        )
    # n may be more than the index's own dtype holds.
    return (index.astype(np.int64) % n).astype(np.int32)


def _permutation(index: Array | np.ndarray, n: int) -> Sources | None:
    """Return an index if it is known, and a permutation of 0 to n - 1."""
    if isinstance(index, jax.Array):
        return None
    return Sources(index) if is_permutation(index, n) else None


def _params_of_size(params: BlockParams, size: int) -> BlockParams:
    """Return the parameters of a building block for another number of groups.

    `take` and `put` move slices between the groups of a population and a cohort of it.
    The partitions of both differ in size only: they have one name, and the same mesh
    axes.
    """
    return {**params, "partition": replace(params["partition"], size=size)}


def _size_of(
    block: str, x: PyTree, params: BlockParams, k: int, name: str = "x"
) -> int:
    """Return the number of groups that a tree has a slice of: n, or N of a population.

    It is N if all leaves have the leading axis N, not n, and the index has k = n
    elements, so that the n groups are a cohort of N. Else it is n; whether the leaves
    have n slices is checked later.
    """
    layout = make_layout(**params)
    n, size = layout.partition.size, layout.group_axis_size
    sizes = {leaf.shape[0] for leaf in jax.tree.leaves(x) if jnp.ndim(leaf)}
    if len(sizes) != 1 or size in sizes:
        return n
    (other,) = sizes
    # Inside a user's shard_map, values have the slices of one device.
    other = other * layout.devices if layout.manual else other
    if k == n and other:
        return other
    raise DrjaxValueError(
        f"drjax.{block} moves slices between the {n} groups of {layout.partition} and "
        f"a population, but {name} has {other} slices, and the index shape [{k}]. One "
        f"of the two needs {n}."
    )


def _check_into(
    x: PyTree, into: PyTree, cohort: BlockParams, groups: BlockParams
) -> PyTree:
    """Check that `into` has the structure, slice shapes and dtypes of `x`; return it.

    The k groups of `x` are the cohort, and `groups` those of `into`. The leaves that
    are returned are JAX arrays.
    """
    flat = []
    for value, params, name in ((x, cohort, "x"), (into, groups, "into")):
        size = make_layout(**params).group_axis_size
        flat.append(flatten_partitioned("put", value, params["partition"], size, name))
    (leaves, tree), (bases, base_tree) = flat
    if tree != base_tree:
        raise DrjaxValueError(
            "drjax.put needs x and into of one structure, got:\n"
            f"  x:    {brief(tree)}\n  into: {brief(base_tree)}"
        )
    for leaf, base in zip(leaves, bases, strict=True):
        if leaf.shape[1:] != base.shape[1:] or leaf.dtype != base.dtype:
            raise DrjaxValueError(
                "drjax.put needs x and into of the same shapes and dtypes, got "
                f"{leaf.dtype}{list(leaf.shape)} and {base.dtype}{list(base.shape)}."
            )
    return tree.unflatten(bases)
