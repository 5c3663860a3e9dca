"""The moves of slices between groups, on the host: for the reference and the driver.

Input: a `drjax.plan.Move`, all slices `[n, *s]` of its source, and an index. Output:
those of its result.

Invariants: as the primitives in `drjax._primitives.moves`, but floats are added in
float64. Where an index is out of bounds, a take gives zeros, and a put_add drops the
slice.
"""

from typing import Any

import numpy as np

from drjax._compat.types import Array
from drjax._jaxprs.prng_keys import on_raw
from drjax._primitives.reduce_ops import REDUCE_OPS
from drjax.plan import Move, Permute, PutAdd, Rules, Take


def move_slices(
    move: Move,
    slices: np.ndarray | Array,
    index: np.ndarray | Array | None = None,
) -> np.ndarray | Array:
    """Move all groups' slices by a permute, a take or a put_add.

    A permute has `result[i] = slices[move.sources[i]]`, and a take
    `result[i] = slices[index[i]]`, or zeros. A put_add starts from zeros; for each i it
    adds `slices[i]` to `result[index[i]]`.

    Slices are along axis 0 and may be random keys; they are not changed. `index` is
    int32, and None for a permute. The result has the dtype of `slices`, and may be of
    numpy where these are of JAX.
    """
    return _MOVES(move, slices, np.asarray(index))


_MOVES: Rules[np.ndarray | Array] = Rules("A move of slices on the host")


@_MOVES.rule(Permute)
def _permute(move: Permute, slices: np.ndarray | Array, *_: Any) -> np.ndarray | Array:
    return slices[np.asarray(move.sources, np.int32)]


@_MOVES.rule(Take)
def _take(
    move: Take, slices: np.ndarray | Array, index: np.ndarray
) -> np.ndarray | Array:
    return on_raw(lambda x: _slices_at(x, index), slices)


@_MOVES.rule(PutAdd)
def _put_add(move: PutAdd, slices: np.ndarray | Array, index: np.ndarray) -> np.ndarray:
    host, n = np.asarray(slices), move.over(move.result).size
    totals = np.zeros((n, *host.shape[1:]), REDUCE_OPS["sum"].wide(host.dtype))
    known = (index >= 0) & (index < n)
    np.add.at(totals, index[known], host[known].astype(totals.dtype))
    return totals.astype(host.dtype)


def _slices_at(x: np.ndarray | Array, index: np.ndarray) -> np.ndarray | Array:
    """Return `x[index]`, with zeros where an index is negative or beyond the end."""
    inside = (index >= 0) & (index < len(x))
    if inside.all():
        return x[index]
    result = np.zeros((len(index), *x.shape[1:]), x.dtype)
    result[inside] = np.asarray(x)[index[inside]]
    return result
