"""Groups cut into blocks, each made when a worker can take it."""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from drjax.backends.engine.groups import Lazy
from drjax.backends.engine.work import Block

Cut = tuple[Block, dict[int, str]]


def blocks(rows: list[Any], n: int, size: int, alive: np.ndarray) -> Iterator[Cut]:
    """Blocks of consecutive groups, and why groups in them cannot take part.

    Args:
      rows: The partitioned inputs of a stage, arrays or `Lazy`.
      n: The number of groups.
      size: The number of groups of a block.
      alive: Which groups still take part, bool `[n]`.
    """
    sources = list(
        {id(x.source): x.source for x in rows if isinstance(x, Lazy)}.values()
    )
    items = [iter(source) for source in sources]
    for start in range(0, n, size):
        stop = min(start + size, n)
        read = [list(itertools.islice(item, stop - start)) for item in items]
        failed = {
            g: str(e) for part in read for g, e in part if isinstance(e, Exception)
        }
        groups = np.arange(start, stop, dtype=np.int32)
        valid = alive[start:stop] & ~np.isin(groups, list(failed))
        made = []
        for x in rows:
            if isinstance(x, Lazy):
                leaves = read[sources.index(x.source)]
                made.append(_stack(x, leaves, valid))
            else:
                made.append(x[start:stop])
        failed = {g: why for g, why in failed.items() if alive[g]}
        yield Block(groups, valid, made), failed
    for item in items:
        next(item, None)  # too many groups are an error


def _stack(x: Lazy, leaves: list, valid: np.ndarray) -> np.ndarray:
    found = [
        x.row(part) if ok else None for (_, part), ok in zip(leaves, valid, strict=True)
    ]
    example = next((row for row in found if row is not None), None)
    if example is None:
        return np.zeros(len(found))  # no group takes part
    return np.stack([example if row is None else row for row in found])
