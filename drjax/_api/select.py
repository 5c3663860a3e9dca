"""`select`: the slices of one group as global values, over pytrees.

Input: a tree of partitioned leaves `[n, *s]`, and a group's index. Output: the tree
with global leaves. Invariants: the slices of other groups do not reach the result.
"""

import functools
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from drjax._api.levels import Over, over_levels
from drjax._api.participation import Mask, check_where
from drjax._api.resolve import (
    BlockParams,
    MeshLike,
    PartitionLike,
    bind_partitioned,
    map_leaves,
    resolve,
)
from drjax._compat.types import Array, GlobalArray, PartitionedArray, Tree
from drjax._errors import DrjaxTypeError, DrjaxValueError
from drjax._primitives.collectives import broadcast_p, gather_p, scatter_p
from drjax._primitives.select_slice import (
    as_int32,
    count_from_end,
    index_pair,
    select_slice,
    show_index,
)
from drjax._sharding.execute import as_operand
from drjax._sharding.layout import make_layout


@over_levels("x", "where")
def select(
    x: Tree,
    i: ArrayLike,
    *,
    where: Mask = None,
    over: Over = None,
    mesh: MeshLike = None,
    partition: PartitionLike = None,
) -> Tree:
    """One group's values as global values. One all-reduce on a mesh.

    Args:
      x: Tree of partitioned arrays `[n, *s]`, any dtype, typed keys included.
      i: The group, an integer; negative counts from the end. A JAX array is data: out
        of bounds it is clamped, as by JAX indexing, eagerly and under `jax.jit`. A
        Python or NumPy integer out of bounds is an error.
      where: Optional bool `[n]`: the groups to select from, by a gather of n bools.
        `i` counts these groups only, in the order of their indices, and is clamped to
        their number.
      over: As for `drjax.broadcast`.
      mesh: As for `drjax.broadcast`.
      partition: As for `drjax.broadcast`.

    Returns:
      The same tree with global leaves `[*s]`. Infinities and NaNs of other groups
      do not leak in. If `where` is False for all groups: zeros.

    Raises:
      ScopeError, DrjaxValueError, DrjaxTypeError: As for `drjax.reduce_sum`; and
        `i` is not an integer, or is a Python or NumPy integer out of bounds.

    Example:
      >>> import drjax, jax.numpy as jnp
      >>> f = drjax.program(partition_size=3)(lambda x: drjax.select(x, 1))
      >>> print(f(jnp.array([5.0, 6.0, 7.0])))
      6.0
      >>> f = drjax.program(partition_size=3)(
      ...     lambda x: drjax.select(x, 0, where=x > 6)
      ... )
      >>> print(f(jnp.array([5.0, 6.0, 7.0])))
      7.0
    """
    params = resolve("select", mesh, partition)
    n = params["partition"].size
    i = _check_index(i, n)
    if where is None:
        if isinstance(n, int):
            show_index(count_from_end(i, n), n)
        indices = index_pair(i, **params)
    else:
        indices = _rank_pair(i, check_where("select", where, params), params)

    def bind(leaf: PartitionedArray, **params: Unpack[BlockParams]) -> GlobalArray:
        map_one = functools.partial(map_leaves, "select", **params)
        return select_slice(leaf, indices, map_one, **params)

    return bind_partitioned("select", x, mesh, partition, bind)


def _rank_pair(
    i: Array | np.integer, where: PartitionedArray, params: BlockParams
) -> tuple[PartitionedArray, PartitionedArray]:
    """Rank the groups of a mask, for the selection of the group with the rank `i`.

    The rank of a group of the mask is the number of groups of the mask before it. The
    mask is gathered. `i` is int32 `[]`; it counts from the end if negative, and is
    clamped.

    `select_slice` selects the group whose two numbers are equal, both int32 `[n]`. The
    first is the rank of each group; n for groups that are not in the mask. The second
    is the rank of the selected group, the same for each group; -1, which no group has,
    if the mask is empty.
    """
    layout = make_layout(**params)
    taken = gather_p.bind(as_operand(where, layout, True), **params)
    ranks = jnp.cumsum(taken, dtype=jnp.int32) - 1
    ranks = jnp.where(taken, ranks, params["partition"].size)
    count = jnp.sum(taken, dtype=jnp.int32)
    # jnp.clip lets the upper bound win: -1 if no group takes part.
    selected = count_from_end(i, count)
    n = params["partition"].size
    show_index(jnp.where(selected < count, selected, n), n)
    selected = selected.clip(0, count - 1)
    ranks, selected = (as_operand(x, layout, False) for x in (ranks, selected))
    return scatter_p.bind(ranks, **params), broadcast_p.bind(selected, **params)


def _check_index(i: Any, n: int) -> Array | np.integer:
    """Check the group index that is passed to `drjax.select`, and cast it to int32.

    A negative index stays negative. A JAX array is data, and not checked, whether or
    not its value is known. It stays the same if int32 holds all numbers of its dtype;
    else it is clamped to -n to n - 1.
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
    if isinstance(i, jax.Array):
        return as_int32(i, -n, n - 1)
    # A symbol, in the check of a plan for any number of groups, has no bounds.
    if not isinstance(n, int):
        return np.int32(i)
    if not -n <= int(i) < n:
        raise DrjaxValueError(
            f"drjax.select needs a group between {-n} and {n - 1}, got {int(i)}. To "
            "have it clamped, pass a JAX array."
        )
    return jnp.asarray(i, jnp.int32)
