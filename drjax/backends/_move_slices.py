"""The moves of slices between groups, on the host: for the reference and the driver.

Input: a `drjax.plan.Move`, all groups' slices `[n, *s]`, and an index. Output: the
slices after the move, `[n, *s]`.

Invariants: as the primitives in `drjax._primitives.routes`, but floats are added in
float64. Sharp edges: an index of a loaded plan may be out of bounds; a take clamps it,
and a put_add drops its slice.
"""

from typing import Any

import numpy as np

from drjax._primitives.reduce_ops import REDUCE_OPS
from drjax.plan import Move


def move_slices(move: Move, slices: Any, index: Any = None) -> Any:
    """Move all groups' slices.

    Args:
      move: The move.
      slices: An array `[n, *s]`, of numpy or JAX, random keys included.
      index: Of a take or put_add, int32 `[n]`.

    Returns:
      An array of the shape and dtype of `slices`; of numpy if they are added.
    """
    if move.op == "permute":
        return slices[np.asarray(move.sources, np.int32)]
    index, n = np.asarray(index), len(slices)
    if move.op == "take":
        return slices[index.clip(0, n - 1)]
    host = np.asarray(slices)
    totals = np.zeros(host.shape, REDUCE_OPS["sum"].wide(host.dtype))
    known = (index >= 0) & (index < n)
    np.add.at(totals, index[known], host[known].astype(totals.dtype))
    return totals.astype(host.dtype)
