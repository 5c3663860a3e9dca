"""The moves of slices between groups, on the host: for the reference and the driver.

Input: a `drjax.plan.Move`, all slices `[n, *s]` of its source, and an index. Output:
those of its result.

Invariants: as the primitives in `drjax._primitives.routes`, but floats are added in
float64. Sharp edges: an index of a loaded plan may be out of bounds; a take clamps it,
and a put_add drops its slice.
"""

from typing import Any

import numpy as np

from drjax._primitives.reduce_ops import REDUCE_OPS
from drjax.plan import Move


def move_slices(move: Move, slices: Any, index: Any = None, groups: int = 0) -> Any:
    """Move all groups' slices.

    Args:
      move: The move.
      slices: All slices of the source, an array of numpy or JAX, random keys included:
        `[n, *s]`; of a put_add `[k, *s]`.
      index: int32 `[k]`. A take has one for each slice of its result, clamped to the
        bounds. A put_add has one for each of `slices`, and drops slices whose index is
        out of bounds. A permute has none.
      groups: Of a put_add the number of groups of the plan.

    Returns:
      An array of the dtype of `slices`: of a permute `[n, *s]`, and of a take
      `[k, *s]`. Of a put_add a numpy array of `groups` slices; if the result is a
      population of N, of N slices.
    """
    if move.op == "permute":
        return slices[np.asarray(move.sources, np.int32)]
    index = np.asarray(index)
    if move.op == "take":
        return slices[index.clip(0, len(slices) - 1)]
    host = np.asarray(slices)
    n = groups if move.result.partitioned else move.result.shape[0]
    totals = np.zeros((n, *host.shape[1:]), REDUCE_OPS["sum"].wide(host.dtype))
    known = (index >= 0) & (index < n)
    np.add.at(totals, index[known], host[known].astype(totals.dtype))
    return totals.astype(host.dtype)
