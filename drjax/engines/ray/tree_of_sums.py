"""A tree in which workers add up partial reductions, so that the driver gets one.

Input: references to partial reductions, in the order of their blocks. Output: the
reference to the total.

Invariants: which are added to which depends on their order alone, and so do the bits of
the total. At most three references of each height wait.
"""

from collections.abc import Callable, Sequence
from typing import Any

MOST = 4  # that are added up at once


class TreeOfSums:
    """Collects references; `add` has a worker add up some, and returns a reference."""

    def __init__(self, add: Callable[[Sequence[Any]], Any]):
        self._add = add
        self._waiting: list[list[Any]] = []  # by height

    def append(self, reference: Any, height: int = 0) -> None:
        """Add a partial reduction, or a sum of 4 to the power of `height` of them."""
        if height == len(self._waiting):
            self._waiting.append([])
        waiting = self._waiting[height]
        waiting.append(reference)
        if len(waiting) == MOST:
            self._waiting[height] = []
            self.append(self._add(waiting), height + 1)

    def total(self) -> Any:
        """Return the reference to the total; None: there is nothing to add up."""
        total: list[Any] = []
        for waiting in self._waiting:
            total = [*waiting, *total]
            if len(total) > 1:
                total = [self._add(total)]
        return total[0] if total else None
