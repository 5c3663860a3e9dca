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
    """Combine totals with the partial reductions of a block; returns the new totals.

    Args:
      ops: The operation of each reduction.
      totals: The totals so far, whose buffers are reused; None where no group took
        part.
      partials: The partial reductions of the block, likewise.
    """
    return [_add(*x) for x in zip(ops, totals, partials, strict=True)]


def _add(op: str, total: np.ndarray | None, partial: Any) -> np.ndarray | None:
    """Combine a total with one more partial reduction; returns the new total.

    Either may be None if no group took part; then the other is the new total. The first
    partial reduction is copied, in 64 bits unless it is a maximum or minimum.
    """
    # No group of the block takes part: its identity must not enter a max or min.
    if partial is None:
        return total
    reduce_op, partial = REDUCE_OPS[op], np.asarray(partial)
    partial = partial.astype(reduce_op.wide(partial.dtype), copy=False)
    if total is None:
        # A copy, as later blocks are added in place and this one may be read-only.
        return np.array(partial)
    return reduce_op.ufunc(total, partial, out=total)


def result(reduce: Reduce, total: np.ndarray | None, groups: int) -> np.ndarray:
    """The reduced value `[*s]`, in the dtype of the program.

    Args:
      reduce: The reduction.
      total: Its total; None if no group took part.
      groups: The number of groups that took part.
    """
    op, source = REDUCE_OPS[reduce.op], reduce.source
    if total is None:  # no group takes part
        return np.full(source.shape, op.if_no_group, source.dtype)
    # Groups that took part: a mean with dropped groups is that of survivors.
    return np.asarray(op.finish(total, groups)).astype(source.dtype)
