"""Groups cut into blocks, each read when a worker can take it.

Input: the partitioned inputs of a stage, as `Slices`, and which groups take part.
Output: `Block`s of consecutive groups, each with the groups that could not be read and
why.

Invariants: blocks are read one at a time and in order, so that memory holds a few
blocks and not all groups. A group that cannot be read is masked out; its slot holds the
slices of another group, and no result of it is used.

Sharp edges: more groups than the plan has are an error only once the last block is
read, as an iterable does not tell its length.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from drjax._errors import DrjaxError, DrjaxValueError
from drjax.engines.core.messages import Block, range_of_groups
from drjax.engines.slices.groups import Cursor, Lazy
from drjax.engines.slices.slices import Slices

LoadedBlock = tuple[Block, dict[int, str]]


def blocks_of_groups(
    slices: Sequence[Slices], alive: np.ndarray, size: int, start: int = 0
) -> Iterator[LoadedBlock]:
    """Read the data of c consecutive groups, those from index `start` on, in blocks.

    `slices` are the partitioned inputs of a stage, in order. `alive`, bool `[c]`, says
    which groups take part.

    The blocks come in the order of groups; each has `size` groups, the last may have
    fewer. With each comes a dict from group index to reason, with the groups that take
    part but whose data cannot be read; the block masks them. While iterating, too few
    or too many groups of an iterable raise a `DrjaxValueError`, and an iterator that
    raises, an `EngineError`.
    """
    # Several inputs may come from one source, as leaves of a pytree: it is read once.
    sources = {id(x.source): x.source for x in slices if x.source is not None}
    stop = start + len(alive)
    cursors = {key: Cursor(source, start) for key, source in sources.items()}
    items: dict[int, Iterator[Any]] = {}
    for low in range(start, stop, size):
        high = min(low + size, stop)
        known = alive[low - start : high - start]
        masked = None if known.all() else known.copy()
        if not items:
            batches = _batches(cursors, high - low)
            if batches is not None:
                arrays = [
                    x.of_batch(batches[id(x.source)])
                    if isinstance(x, Lazy)
                    else x.block(low, high)
                    for x in slices
                ]
                yield Block.of_range(low, high, arrays, masked), {}
                continue
            # From here on one by one, which tells the groups that cannot be read.
            items = {key: x.between(low, stop) for key, x in sources.items()}
        read = {k: list(itertools.islice(x, high - low)) for k, x in items.items()}
        failed = _failures(itertools.chain.from_iterable(read.values()))
        valid = known & ~np.isin(range_of_groups(low, high), list(failed))
        leaves = {k: _that_count(part, valid) for k, part in read.items()}
        arrays = [x.block(low, high, leaves.get(id(x.source), ())) for x in slices]
        # A group that was dropped before is read too, as iterators cannot skip, but its
        # failure is not news.
        news = {g: why for g, why in failed.items() if known[g - low]}
        yield Block.of_range(low, high, arrays, valid), news
    for item in items.values():
        next(item, None)  # too many groups are an error


def _batches(
    cursors: dict[int, Cursor], count: int
) -> dict[int, list[np.ndarray]] | None:
    """Read the next groups of all sources at once; None: some only one by one."""
    batches = {}
    for key, cursor in cursors.items():
        batch = cursor.batch(count)
        if batch is None:
            return None
        batches[key] = batch
    return batches


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
    failed = _failures(leaves)
    groups = np.array([g for g, _ in pairs], np.int32)
    valid = ~np.isin(groups, list(failed))
    arrays = [x.stacked(_that_count(leaves, valid)) for x in lazy]
    return Block(groups, valid, arrays), failed


def _failures(leaves: Iterable[tuple[int, Any]]) -> dict[int, str]:
    """Return why the data of groups could not be read, by group index."""
    return {g: str(e) for g, e in leaves if isinstance(e, Exception)}


def _that_count(leaves: Sequence[tuple[int, Any]], valid: np.ndarray) -> list[Any]:
    """Return the data of the groups, with None for one that does not take part."""
    return [x if ok else None for (_, x), ok in zip(leaves, valid, strict=True)]
