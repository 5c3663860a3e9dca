"""Data that workers read themselves, so that the driver sends only which groups.

Input: an input of a stage whose data processes can read without the driver, such as
Parquet files. Output: an `Unread`, whose blocks have numbers of groups; and in the
worker the block with its slices.

Invariants: groups that cannot be read are masked, and reported with the reason, as
where the driver reads.

Sharp edges: files are stored by parts of many groups: a block that begins within a part
reads it from the start.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import numpy as np

from drjax.engines.core.blocks_of_groups import LoadedBlock, blocks_of_groups
from drjax.engines.core.messages import Block
from drjax.engines.slices.groups import Lazy
from drjax.engines.slices.slices import Slices


@dataclass(frozen=True)
class UnreadPart:
    """The slices of some groups, int `[c]`, that a worker reads.

    Attributes:
      index: The index of the value among the `Lazy` inputs that the worker gets.
    """

    index: int
    groups: np.ndarray

    def __len__(self) -> int:
        return len(self.groups)

    def __getitem__(self, index: np.ndarray | slice) -> "UnreadPart":
        return replace(self, groups=self.groups[index])


class Unread(Slices):
    """In the place of a `Lazy`, for the blocks of a stage."""

    def __init__(self, lazy: Lazy, index: int):
        self.value, self.n, self._lazy, self._index = lazy.value, lazy.n, lazy, index

    def block(self, low: int, high: int, leaves: Sequence[Any] = ()) -> UnreadPart:
        return UnreadPart(self._index, np.arange(low, high))

    def whole(self) -> np.ndarray:
        return self._lazy.whole()


def readable(x: np.ndarray | Slices) -> TypeGuard[Lazy]:
    """Return whether workers can read an input of a stage."""
    return isinstance(x, Lazy) and x.source.groups.bounds() is not None


def read(block: Block, inputs: Sequence[Lazy]) -> LoadedBlock:
    """Read those slices of a block that are an `UnreadPart`, in a worker.

    The dict has the reasons for groups that cannot be read, which the block masks.
    """
    low, high = int(block.groups.min()), int(block.groups.max()) + 1
    positions, alive = block.groups - low, np.zeros(high - low, bool)
    alive[positions] = block.valid
    ((whole, failed),) = blocks_of_groups(inputs, alive, high - low, low)
    slices = [
        whole.slices[x.index][positions] if isinstance(x, UnreadPart) else x
        for x in block.slices
    ]
    return Block(block.groups, whole.valid[positions], slices), failed
