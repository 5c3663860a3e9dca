"""Partial reductions of blocks, combined on the host.

Input: for each reduction its operation, and the partial reduction of each block, or
None. Output: totals, and from these the reduced values.

Invariants: floats are added up in float64 and integers exactly, in the order in which
blocks are given. A block in which no group takes part has None: no identity of max or
min ever mixes in. If no group takes part at all, a mean is NaN and everything else
zero.

Sharp edges: `add` reuses the buffers of `totals`, so its argument must not be read
again. What each reduction does is in `_primitives/reduce_ops.py`; a mean is a sum of
sums, divided once by the number of groups that took part.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from drjax._primitives.reduce_ops import REDUCE_OPS
from drjax.plan import Reduce

Totals = list[np.ndarray | None]  # None: no group took part


def add(ops: Sequence[str], totals: Totals, partials: Sequence[Any]) -> Totals:
    """Combine the partial reductions over earlier blocks with those of one more block.

    Args:
      ops: For each reduction its operation: sum, mean, max or min.
      totals: For each reduction the partial reduction over all earlier blocks; None if
        no group took part. The arrays are overwritten, so do not use them afterwards.
      partials: For each reduction the partial reduction over the new block; None if no
        group took part.

    Returns:
      For each reduction the partial reduction over all of these blocks; None if no
      group took part. For a mean it is the sum. Floats are added in float64.
    """
    return [_add(*x) for x in zip(ops, totals, partials, strict=True)]


def _add(op: str, total: np.ndarray | None, partial: Any) -> np.ndarray | None:
    """Combine two partial reductions of one reduction, over disjoint sets of groups.

    Args:
      op: The operation: sum, mean, max or min.
      total: The partial reduction over all earlier blocks, which is overwritten; None
        if no group took part.
      partial: The partial reduction over the new block, an array; None if no group took
        part.

    Returns:
      The partial reduction over both; None if no group took part. It shares no memory
      with `partial`. Floats are added in float64.
    """
    # No group of the block takes part: its identity must not enter a max or min.
    if partial is None:
        return total
    reduce_op, partial = REDUCE_OPS[op], np.asarray(partial)
    # Before it is added: in float32 the error of a running sum grows with the number
    # of blocks.
    partial = partial.astype(reduce_op.wide(partial.dtype), copy=False)
    if total is None:
        # A copy, as later blocks are added in place and this one may be read-only.
        return np.array(partial)
    return reduce_op.ufunc(total, partial, out=total)


def result(reduce: Reduce, total: np.ndarray | None, groups: int) -> np.ndarray:
    """The result of a reduction, from its partial reduction over all groups.

    Args:
      reduce: The reduction, as in the plan.
      total: The partial reduction over all groups, as `add` returns it; None if no
        group took part.
      groups: The number of groups that took part, by which a mean divides.

    Returns:
      An array of the planned shape and dtype. If no group took part, it is NaN for a
      mean and zero for other reductions.
    """
    op, source = REDUCE_OPS[reduce.op], reduce.source
    if total is None:  # no group takes part
        return np.full(source.shape, op.if_no_group, source.dtype)
    # Groups that took part: a mean with dropped groups is that of survivors.
    return np.asarray(op.finish(total, groups)).astype(source.dtype)
