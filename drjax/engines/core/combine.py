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

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from jax.typing import DTypeLike

from drjax._primitives.reduce_ops import REDUCE_OPS
from drjax.engines.core.encoded_partials import decoded
from drjax.plan import Fold, Reduce, Round

# None: no group took part. Of a fold a list of stacks, `[blocks, *s]`.
Totals = list[Any]
# The operation of what blocks return for folds: the group index, and states.
FOLD = "fold"
_PART = 1 << 16  # elements
_FEW = 1 << 10  # bytes, which go through none of the steps for large arrays
_ALIGNED = 64  # bytes: XLA reads an array of the host in place if it begins there


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


def add(
    ops: Sequence[str], totals: Totals, partials: Sequence[Any], *more: Sequence[Any]
) -> Totals:
    """Combine the partial reductions over earlier blocks with those of further blocks.

    All are parallel to `ops`; None: no group took part. The arrays of `totals` are
    overwritten, those of `partials` and `more`, one sequence for each block, are not. A
    mean is still a sum, and the total of a fold is the list of the blocks' arrays,
    `[1, *s]`, in the order in which blocks were added.
    """
    return [
        _add(*x)
        for x in zip(ops, totals, zip(partials, *more, strict=True), strict=True)
    ]


def _add(op: str, total: Any, partials: Iterable[Any]) -> Any:
    """Combine partial reductions of one reduction; None: no group took part.

    Of a fold each of `partials` may also be a list of arrays, and the result is a new
    list.
    """
    # No group of such a block takes part: its identity must not enter a max or min.
    partials = [x for x in partials if x is not None]
    if op == FOLD and partials:
        lists = [x if isinstance(x, list) else [x] for x in partials]
        return list(itertools.chain(total or [], *lists))
    if not partials:
        return total
    like, out = decoded(partials[0]), total
    if out is None:
        out = np.empty(like.shape, REDUCE_OPS[op].wide(like.dtype))
    for part, x in _by_parts(op, total, partials):
        out.reshape(-1)[part] = x
    return out


def _by_parts(
    op: str, total: Any, partials: Sequence[Any]
) -> Iterator[tuple[slice, np.ndarray]]:
    """Combine flat parts, in the wide dtype, which stay in the processor's cache.

    One array has all of them in turn. Totals are wide, as in float32 the error of a
    running sum grows with the number of blocks.
    """
    reduce_op = REDUCE_OPS[op]
    arrays = [np.ravel(decoded(x)) for x in (total, *partials) if x is not None]
    wide = np.dtype(reduce_op.wide(arrays[0].dtype))
    scratch = np.empty(min(arrays[0].size, _PART), wide)
    for low in range(0, arrays[0].size, _PART):
        first, *rest = (x[low : low + _PART] for x in arrays)
        combined = scratch[: first.size]
        combined[...] = first
        for x in rest:
            # NumPy itself casts what it knows.
            x = x if x.dtype.kind in "fiuc" else x.astype(wide)
            reduce_op.ufunc(combined, x, out=combined)
        yield slice(low, low + first.size), combined


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
    waiting: Sequence[Sequence[Any]] = (),
) -> list[np.ndarray]:
    """Compute the results of a round's reductions but gathers, and of its folds.

    `totals` is what `add` has returned for all blocks but those whose partial
    reductions are `waiting`; the blocks are of `groups` groups, by which a mean is
    divided. `fold(fold, states)` folds states, each a list of leaves `[*s]`, in their
    order, which is that of their blocks' first groups; its result is the neutral state
    if there are none. The list has the leaves of the results of folds last.
    """
    reduces = a_round.partials
    results = [
        result(reduce, totals[i], groups, [x[i] for x in waiting])
        for i, reduce in enumerate(reduces)
    ]
    if not a_round.folds:
        return results
    states_of_blocks = [
        _add(FOLD, totals[i], [x[i] for x in waiting])
        for i in range(len(reduces), len(totals))
    ]
    first, *leaves = stacked(states_of_blocks)
    order = [] if first is None else np.argsort(first, kind="stable")
    remaining = iter(leaves)
    for one in a_round.folds:
        states = [next(remaining) for _ in one.sources]
        results += fold(one, [[x[i] for x in states] for i in order])
    return results


def result(
    reduce: Reduce,
    total: np.ndarray | None,
    groups: int,
    waiting: Sequence[np.ndarray | None] = (),
) -> np.ndarray:
    """Compute the result of a reduction but gather from its total over all groups.

    Partial reductions that `waiting` has are not in the total: they are combined part
    by part, without an array that has all of it. The result has the planned shape and
    dtype. If no group took part, nothing is given, and the result NaN for a mean and
    zero for other reductions.
    """
    op, source = REDUCE_OPS[reduce.op], reduce.source
    partials = [x for x in (total, *waiting) if x is not None]
    if not partials:  # no group takes part
        return np.full(source.shape, op.if_no_group, source.dtype)
    if source.nbytes <= _FEW:
        first, *rest = map(decoded, partials)
        combined = first.astype(op.wide(first.dtype))
        for x in rest:
            combined = op.ufunc(combined, x.astype(combined.dtype))
        return np.asarray(op.finish(combined, groups)).astype(source.dtype)
    done = aligned(np.shape(decoded(partials[0])), source.dtype)
    for part, x in _by_parts(reduce.op, None, partials):
        # Groups that took part: a mean with dropped groups is that of survivors.
        done.reshape(-1)[part] = op.finish(x, groups)
    return done


def aligned(shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
    """Make an array without values, which `jax.device_put` takes without a copy."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(size + _ALIGNED, np.uint8)
    low = -memory.ctypes.data % _ALIGNED
    return memory[low : low + size].view(dtype).reshape(shape)
