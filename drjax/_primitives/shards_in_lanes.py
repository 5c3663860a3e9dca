"""All numbers of a tree as one array, of which each device ravels its own shards.

Input: a tree of arrays, and the mesh axes that may divide them, those inside a group.
Output: one array, whose blocks share scales when a `wire` encodes them; and the tree.

`jax.flatten_util.ravel_pytree` would gather what the axes divide. So each leaf is
divided along its largest axis, as is usual for parameters, and each device joins its
shards. The compiler for TPUs takes minutes to flatten a shard. Where its last axis is a
multiple of a register's 128 lanes, an array of these lanes is the same memory.

Invariants: `unravel_shards` is the inverse of `ravel_shards`, but for rounding to
float32.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from drjax._compat.types import Array, PyTree
from drjax._primitives.wire_codes import LANES

_ALIGNED = 2**15


def ravel_shards(
    tree: PyTree, parts: int, block: int, axes: Mapping[str, int]
) -> Array:
    """All numbers of a tree, and zeros behind them: float32 `[parts, d, n, 128]`.

    Each of d devices, along these mesh axes and their sizes, has whole blocks for each
    part.
    """
    leaves, devices = jax.tree.leaves(tree), math.prod(axes.values())
    in_lanes, others = _by_lanes(leaves, devices)
    shards = lambda i: _shards(leaves[i].astype("float32"), axes)
    lanes = [shards(i).reshape(devices, -1, LANES) for i in in_lanes]
    if others:
        x = jnp.concatenate([shards(i).reshape(devices, -1) for i in others], axis=1)
        x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % LANES)))
        lanes.append(x.reshape(devices, -1, LANES))
    x = jnp.concatenate(lanes, axis=1)
    unit = math.lcm(block, LANES)
    while 2 * unit <= min(_ALIGNED, x.shape[1] * LANES // (64 * parts)):
        unit *= 2
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % (parts * unit // LANES)), (0, 0)))
    x = x.reshape(devices, parts, -1, LANES).swapaxes(0, 1)
    return _divided(x, None, tuple(axes))


def unravel_shards(x: Array, like: PyTree) -> PyTree:
    """The tree from which `ravel_shards` has made `x`; `like` has its types."""
    leaves, treedef = jax.tree.flatten(like)
    devices, out = x.shape[1], list(leaves)
    x = x.swapaxes(0, 1).reshape(devices, -1, LANES)
    for unit, members in zip((LANES, 1), _by_lanes(leaves, devices), strict=True):
        counts = [-(-leaves[i].size // (unit * devices)) for i in members]
        *values, x = jnp.split(x, np.cumsum(counts), axis=1) if members else [x]
        for i, value in zip(members, values, strict=True):
            out[i] = _of_shards(value, leaves[i])
        x = x.reshape(devices, -1)
    return treedef.unflatten(out)


def _by_lanes(leaves: list[Array], devices: int) -> tuple[list[int], list[int]]:
    """The leaves whose shards have whole registers on their last axis; and others."""
    lanes, others = [], []
    for i, x in enumerate(leaves):
        axis = _divided_axis(x.shape, devices)
        last = x.shape[-1] // (devices if axis == x.ndim - 1 else 1) if x.ndim else 1
        (others if axis is None or last % LANES else lanes).append(i)
    return lanes, others


def _divided_axis(shape: tuple[int, ...], devices: int) -> int | None:
    """The largest axis that devices divide evenly, of several the first."""
    fits = [i for i, size in enumerate(shape) if size and size % devices == 0]
    return max(fits, key=lambda i: shape[i], default=None)


def _divided(x: Array, *spec: Any) -> Array:
    """The same, which devices divide along the last entry of a spec, if not empty."""
    return jax.lax.with_sharding_constraint(x, jax.P(*spec)) if spec[-1] else x


def _shards(x: Array, axes: Mapping[str, int]) -> Array:
    """The shard of each device, `[d, *s]`."""
    devices = math.prod(axes.values())
    axis = _divided_axis(x.shape, devices)
    if axis is None:
        return jnp.pad(x.ravel(), (0, -x.size % devices)).reshape(devices, -1)
    before, after = x.shape[:axis], x.shape[axis + 1 :]
    x = x.reshape(*before, devices, x.shape[axis] // devices, *after)
    return _divided(jnp.moveaxis(x, axis, 0), tuple(axes))


def _of_shards(x: Array, like: Array) -> Array:
    """The leaf that `_shards` has divided, from all numbers of each shard in order."""
    devices = len(x)
    axis = _divided_axis(like.shape, devices)
    if axis is None:
        return x.ravel()[: like.size].reshape(like.shape).astype(like.dtype)
    before, after = like.shape[:axis], like.shape[axis + 1 :]
    x = x.reshape(devices, *before, like.shape[axis] // devices, *after)
    return jnp.moveaxis(x, 0, axis).reshape(like.shape).astype(like.dtype)
