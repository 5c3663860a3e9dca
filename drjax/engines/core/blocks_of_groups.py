"""Groups cut into blocks, each read when a worker can take it.

Input: the partitioned inputs of a stage, as stacks of slices or `Lazy`, and which
groups take part. Output: `Block`s of consecutive groups, each with the groups that
could not be read and why.

Invariants: blocks are read one at a time and in order, so that memory holds a few
blocks and not all groups. A group that cannot be read is masked out; its slot holds the
slices of another group, and no result of it is used.

Sharp edges: more groups than the plan has are an error only once the last block is
read, as an iterable does not tell its length.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from drjax._errors import DrjaxError, DrjaxValueError
from drjax.engines.core.messages import Block
from drjax.engines.slices.coordinates import WorkerColumns
from drjax.engines.slices.groups import Lazy
from drjax.engines.slices.worker_slices import WorkerSlices

LoadedBlock = tuple[Block, dict[int, str]]


def blocks_of_groups(
    slices: list[Any], alive: np.ndarray, size: int, start: int = 0
) -> Iterator[LoadedBlock]:
    """Read the data of c consecutive groups, those from index `start` on, in blocks.

    `slices` are the partitioned inputs of a stage, in order. Each is an array
    `[c, ...]`; a `Lazy`, which reads slices one by one from a file or an iterable; or
    `WorkerSlices` or `WorkerColumns`, whose slices workers have. `alive`, bool `[c]`,
    says which groups take part.

    The blocks come in the order of groups; each has `size` groups, the last may have
    fewer. With each comes a dict from group index to reason, with the groups that take
    part but whose data cannot be read; the block masks them. While iterating, too few
    or too many groups of an iterable raise a `DrjaxValueError`, and an iterator that
    raises, an `EngineError`.
    """
    # Several inputs may come from one source, as leaves of a pytree: it is read once.
    sources = list(
        {id(x.source): x.source for x in slices if isinstance(x, Lazy)}.values()
    )
    items = [source.between(start, start + len(alive)) for source in sources]
    for low in range(0, len(alive), size):
        valid = alive[low : low + size]
        read = [list(itertools.islice(item, len(valid))) for item in items]
        failed = {
            g: str(e) for part in read for g, e in part if isinstance(e, Exception)
        }
        # int32 is the type of the group index for which stages are exported.
        groups = np.arange(len(valid), dtype=np.int32) + np.int32(start + low)
        # A group that was dropped before is read too, as iterators cannot skip, but its
        # failure is not news.
        known = {g: why for g, why in failed.items() if valid[g - start - low]}
        valid = valid & ~np.isin(groups, list(failed))
        arrays = []
        for x in slices:
            if isinstance(x, Lazy):
                leaves = read[sources.index(x.source)]
                arrays.append(_stack(x, leaves, valid))
            elif isinstance(x, WorkerSlices | WorkerColumns):
                arrays.append(x.block(start + low, start + low + len(valid)))
            else:
                # A view: workers that share this memory read it without a copy.
                arrays.append(x[low : low + size])
        yield Block(groups, valid, arrays), known
    for item in items:
        next(item, None)  # too many groups are an error


def block_of_pairs(
    pairs: Sequence[tuple[int, Any]], lazy: Sequence[Lazy]
) -> LoadedBlock:
    """Make a block from the data of some groups, in any order.

    Beam's `MapReduce` calls it with elements of the user's pipeline: pairs
    `(group index, data)`. The data of a group is its slice of the one argument that the
    pipeline provides, a pytree of arrays; each of `lazy`, the partitioned inputs of the
    stage, refers to one leaf of it. The dict has the reasons for groups whose data does
    not fit the plan, which the block masks.
    """
    leaves, n = [], lazy[0].n
    for group, item in pairs:
        # Pipelines of users make these numbers, so they are checked here.
        # Whether each group comes once is not visible in one block: the number of
        # groups in the totals is checked at the end.
        if not 0 <= group < n:
            raise DrjaxValueError(f"The plan has groups 0 to {n - 1}, got {group}.")
        try:
            leaves.append((group, lazy[0].source.leaves(item)))
        except DrjaxError as error:
            leaves.append((group, error))
    failed = {g: str(e) for g, e in leaves if isinstance(e, Exception)}
    groups = np.array([g for g, _ in pairs], np.int32)
    valid = ~np.isin(groups, list(failed))
    return Block(groups, valid, [_stack(x, leaves, valid) for x in lazy]), failed


def _stack(x: Lazy, leaves: list[tuple[int, Any]], valid: np.ndarray) -> np.ndarray:
    """Stack the slices of c groups of one partitioned value into one array `[c, ...]`.

    `leaves` are pairs `(group index, leaves of the group's data)`: a list of arrays, or
    an exception if the data cannot be read, and then `valid`, bool `[c]`, is false for
    the group. Groups that do not take part have a copy of another group's slice; if
    none takes part, the result is zeros `[c]`. If `x` is a leaf of a `Remote`, whose
    data only workers have, the leaves are [] and the result is an empty array `[c, 0]`.
    """
    pairs = zip(leaves, valid, strict=True)
    slices = [x.slice_of(part) if ok else None for (_, part), ok in pairs]
    # A masked slot needs some slice of the right shape; another group's is free of
    # surprises such as a division by zero.
    example = next((part for part in slices if part is not None), None)
    if example is None:
        return np.zeros(len(slices))  # no group takes part
    return np.stack([example if part is None else part for part in slices])
