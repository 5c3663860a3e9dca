"""The moves of slices between groups, on the host: for the reference and the driver.

Input: a `drjax.plan.Move`, all slices `[n, *s]` of its source, and an index. Output:
those of its result.

Invariants: as the primitives in `drjax._primitives.routes`, but floats are added in
float64. Where an index is out of bounds, a take gives zeros, and a put_add drops the
slice.
"""

from typing import Any

import numpy as np

from drjax._jaxprs.prng_keys import on_raw
from drjax._primitives.reduce_ops import REDUCE_OPS
from drjax.plan import Move


def move_slices(move: Move, slices: Any, index: Any = None, groups: int = 0) -> Any:
    """Move all groups' slices by a permute, a take or a put_add.

    A permute has `result[i] = slices[move.sources[i]]`, and a take
    `result[i] = slices[index[i]]`, or zeros. A put_add starts from zeros; for each i it
    adds `slices[i]` to `result[index[i]]`.

    Args:
      move: The move. Its source or result may be a population: a global value `[N, *s]`
        of more slices than the plan has groups.
      slices: All slices of the source along axis 0, an array of numpy or JAX, random
        keys included; it is not changed.
      index: int32, one for each slice of the result of a take, or for each of `slices`
        of a put_add. None for a permute, which does not use it.
      groups: n, the number of groups of the plan. Only a put_add to a partitioned value
        uses it, as the number of slices of the result.

    Returns:
      An array of the dtype of `slices`, with the slices of the result along axis 0: as
      many as in `slices` for a permute, as many as in `index` for a take, and n, or N
      for a population, for a put_add. The result of a put_add is a numpy array.
    """
    if move.op == "permute":
        return slices[np.asarray(move.sources, np.int32)]
    index = np.asarray(index)
    if move.op == "take":
        return on_raw(lambda x: _slices_at(x, index), slices)
    host = np.asarray(slices)
    n = groups if move.result.partitioned else move.result.shape[0]
    totals = np.zeros((n, *host.shape[1:]), REDUCE_OPS["sum"].wide(host.dtype))
    known = (index >= 0) & (index < n)
    np.add.at(totals, index[known], host[known].astype(totals.dtype))
    return totals.astype(host.dtype)


def _slices_at(x: Any, index: np.ndarray) -> Any:
    """Return `x[index]`, with zeros where an index is negative or beyond the end."""
    inside = (index >= 0) & (index < len(x))
    if inside.all():
        return x[index]
    result = np.zeros((len(index), *x.shape[1:]), x.dtype)
    result[inside] = np.asarray(x)[index[inside]]
    return result
