"""Partial reductions of blocks, combined on the host.

What each reduction does, such as that a mean is a sum divided once by the number of
groups that took part, is in the table of `_primitives/reduce_ops.py`.

Input: for each reduction its operation, and the partial reduction of each block, or
None. Output: totals, and from these the reduced values.

Blocks may arrive in any order, and a fold has one. So of a fold, totals are the states
of all blocks, each with its first group; they are sorted and folded in the end.

Invariants: floats are added up in float64 and integers exactly, in the order in which
blocks are given. A block in which no group takes part has None: no identity of max or
min ever mixes in. If no group takes part at all, a mean is NaN and everything else
zero.

Sharp edges: `add` reuses the buffers of `totals`, so its argument must not be read
again.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from drjax._primitives.reduce_ops import REDUCE_OPS
from drjax.engines.core.encoded_partials import decoded
from drjax.plan import Fold, Reduce, Round

# None: no group took part. Of a fold a list of stacks, `[blocks, *s]`.
Totals = list[Any]
# The operation of what blocks return for folds: the group index, and states.
FOLD = "fold"
_PART = 1 << 16  # elements


def ops_of(a_round: Round) -> tuple[str, ...]:
    """Return the operation of each array that a block returns for a round's reductions.

    The result is parallel to `BlockResult.partials`: the operation of each reduction
    but gathers, such as "sum". If the round has folds, `FOLD` follows several times:
    once for the index of the block's first group, `[1]`, and once for each leaf of the
    block's states, `[1, *s]`.
    """
    ops = [op for op, _ in a_round.sources]
    if FOLD in ops:
        ops.insert(ops.index(FOLD), FOLD)
    return tuple(ops)


def add(ops: Sequence[str], totals: Totals, partials: Sequence[Any]) -> Totals:
    """Combine the partial reductions over earlier blocks with those of one more block.

    All are parallel to `ops`; None: no group took part. The arrays of `totals` are
    overwritten, those of `partials` are not. A mean is still a sum, and the total of a
    fold is the list of the blocks' arrays, `[1, *s]`, in the order in which blocks were
    added.
    """
    return [_add(*x) for x in zip(ops, totals, partials, strict=True)]


def _add(op: str, total: Any, partial: Any) -> Any:
    """Combine two partial reductions of one reduction; None: no group took part.

    Of a fold `partial` may also be a list of arrays, and the result is a new list.
    """
    # No group of the block takes part: its identity must not enter a max or min.
    if partial is None:
        return total
    if op == FOLD:
        return [*(total or []), *(partial if isinstance(partial, list) else [partial])]
    reduce_op, partial = REDUCE_OPS[op], decoded(partial)
    # Totals are wide: in float32 the error of a running sum grows with the number of
    # blocks.
    wide = np.dtype(reduce_op.wide(partial.dtype))
    if total is None:
        # A copy, as later blocks are added in place and this one may be read-only.
        return partial.astype(wide)
    # NumPy itself casts what it knows, part by part.
    if partial.dtype.kind not in "fiuc":
        partial = partial.astype(wide)
    return reduce_op.ufunc(total, partial, out=total)


def stacked(totals: Totals) -> Totals:
    """Join the arrays `[1, *s]` that each total of a fold has into one, `[blocks, *s]`.

    Other totals, and those that were joined before, are returned as they are. Beam's
    pipelines return joined totals, and `finish` takes either.
    """
    join = lambda x: np.concatenate(x) if isinstance(x, list) else x
    return list(map(join, totals))


def finish(
    a_round: Round,
    totals: Totals,
    groups: int,
    fold: Callable[[Fold, list[list[np.ndarray]]], list[np.ndarray]],
) -> list[np.ndarray]:
    """Compute the results of a round's reductions but gathers, and of its folds.

    `totals` is what `add` has returned for all blocks; they are of `groups` groups, by
    which a mean is divided. `fold(fold, states)` folds states, each a list of leaves
    `[*s]`, in their order, which is that of their blocks' first groups; its result is
    the neutral state if there are none. The list has the leaves of the results of folds
    last.
    """
    reduces = a_round.partials
    pairs = zip(reduces, totals, strict=False)
    results = [result(reduce, total, groups) for reduce, total in pairs]
    if not a_round.folds:
        return results
    first, *leaves = stacked(totals[len(reduces) :])
    order = [] if first is None else np.argsort(first, kind="stable")
    remaining = iter(leaves)
    for one in a_round.folds:
        states = [next(remaining) for _ in one.sources]
        results += fold(one, [[x[i] for x in states] for i in order])
    return results


def result(reduce: Reduce, total: np.ndarray | None, groups: int) -> np.ndarray:
    """Compute the result of a reduction but gather from its total over all groups.

    It has the planned shape and dtype. If no group took part, `total` is None, and the
    result NaN for a mean and zero for other reductions.
    """
    op, source = REDUCE_OPS[reduce.op], reduce.source
    if total is None:  # no group takes part
        return np.full(source.shape, op.if_no_group, source.dtype)
    done = np.empty(np.shape(total), source.dtype)
    # By parts, which stay in the processor's cache.
    for low in range(0, done.size, _PART):
        part = np.ravel(total)[low : low + _PART]
        # Groups that took part: a mean with dropped groups is that of survivors.
        done.reshape(-1)[low : low + _PART] = op.finish(part, groups)
    return done
