"""Select one group's slice as a global value: a sum to which others add zeros.

Input: a partitioned array `[n, *s]` of any dtype, and a group's index. Output: that
group's slice, `[*s]`, in one all-reduce on a mesh, to which each device adds the one of
its slices that may be the group's, or zeros. `drjax.select` and the planner, for an
index into a group axis, both call this.

Invariants: infinities and NaNs of other groups do not leak in.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from drjax import _compat
from drjax._compat.types import Array, GlobalArray, Mesh, PartitionedArray
from drjax._context import OF_LIBRARY
from drjax._partition import Partition
from drjax._primitives.collectives import broadcast_p, reduce_sum_p
from drjax._primitives.extrema import reduce_max_p
from drjax._primitives.partition_index import partition_index_p
from drjax._primitives.segments import place_in_segment


def as_int32(index: jax.Array, low: int, high: int) -> jax.Array:
    """Cast an index to int32; a number of a wider dtype is clamped to bounds first.

    A cast alone drops the upper bits: of int64, 2**32 would become 0, in bounds. If
    int32 holds all numbers of the dtype, numbers out of bounds stay. The bounds,
    inclusive, must be int32 numbers.
    """
    limits = jnp.iinfo(index.dtype)
    if limits.max > jnp.iinfo(jnp.int32).max:
        bounds = max(low, limits.min), high
        lowest, highest = (np.asarray(bound, index.dtype) for bound in bounds)
        index = lax.clamp(lowest, index, highest)
    return index.astype(jnp.int32)


def count_from_end(
    index: Array | np.ndarray | np.integer | int, n: Array | int
) -> Array:
    """Add n to negative group indices, array-like; one below -n stays negative."""
    return jnp.where(jnp.asarray(index) < 0, index + n, index)


def show_index(index: Array, n: int) -> None:
    """Read at a traced index, so that checkify's index checks see what is clamped.

    Nothing uses what is read: compiled code and plans have none of it.
    """
    if not _compat.under_trace() or _compat.check_vma():
        return
    for i in (index,) if index.ndim == 0 else (index.min(), index.max()):
        lax.dynamic_slice(np.arange(n, dtype=np.int32), (i,), (1,))


def index_pair(
    i: Array | np.integer, *, partition: Partition, mesh: Mesh | None
) -> tuple[PartitionedArray, PartitionedArray]:
    """Compute the two partitioned values of indices by which a group is selected.

    `i` is the index of the group to select, int32 `[]`. It counts from the end if it is
    negative, and is clamped, as by JAX indexing. The values are int32 `[n]`: the index
    of each group, and the index of the selected group, the same for each group.
    """
    params, n = {"partition": partition, "mesh": mesh}, partition.size
    own = partition_index_p.bind(**params, per_group=False)
    if not isinstance(n, int) and _compat.is_concrete(i) and i >= 0:
        # A symbol, in the check of a plan for any number: nothing is out of bounds.
        return own, broadcast_p.bind(jnp.asarray(i), **params)
    return own, broadcast_p.bind(count_from_end(i, n).clip(0, n - 1), **params)


def select_slice(
    x: PartitionedArray,
    indices: tuple[PartitionedArray, PartitionedArray],
    map_one: Callable[..., PartitionedArray],
    *,
    partition: Partition,
    mesh: Mesh | None,
) -> GlobalArray:
    """Select the slice of one group of a partitioned value, as a global value.

    A map replaces the slices of all other groups by zeros (`place_in_segment`); a
    `reduce_sum` (of bools, a `reduce_max`) adds up those of the devices. `x` may be of
    any dtype, random keys included. `indices` is what `index_pair` returns; if no group
    has the selected index, the result is zeros. `map_one(fn, *partitioned)` binds
    `map_fn` for `fn`, a function of one group from arrays to one array.
    """
    # Keys cannot be added, their raw data can.
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    slices = map_one(key_data, x) if is_key else x
    kept = map_one(keep_chosen_group, *indices, slices)
    # A sum of bools would be an integer.
    primitive = reduce_max_p if kept.dtype == jnp.bool_ else reduce_sum_p
    slice_ = primitive.bind(kept, partition=partition, mesh=mesh)
    if is_key:
        return jax.random.wrap_key_data(slice_, impl=jax.random.key_impl(x))
    return slice_


# Functions of one group, under the names that plans show.


def keep_chosen_group(index: Array, selected: Array, own: Array) -> Array:
    """Return a group's slice, `[*s]`, if its index is the selected one, else zeros.

    The slice is no random key.
    """
    segment = jnp.where(index == selected, jnp.int32(0), jnp.int32(1))
    return place_in_segment(segment, own, 0, 0)


keep_chosen_group.__name__ = OF_LIBRARY + "select"


def key_data(key: Array) -> Array:
    """Convert a group's slice of typed random keys, `[*s]`, to raw data, `[*s, words]`.

    The data are unsigned integers, which can be added.
    """
    return jax.random.key_data(key)
