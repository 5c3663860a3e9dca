"""A tree in which workers add up partial reductions, so that the driver gets one.

Input: references to partial reductions, in the order of their blocks. Output: the
reference to the total.

Invariants: which are added to which depends on their order alone, and so do the bits of
the total. At most three references of each level wait.
"""

from collections.abc import Callable, Sequence
from typing import Any

MOST = 4  # that are added up at once


class TreeOfSums:
    """Collects references; `add` has a worker add up some, and returns a reference."""

    def __init__(self, add: Callable[[Sequence[Any]], Any]):
        self._add = add
        self._levels: list[list[Any]] = []

    def append(self, reference: Any, level: int = 0) -> None:
        """Add a partial reduction, or at a higher level a sum of some."""
        if level == len(self._levels):
            self._levels.append([])
        waiting = self._levels[level]
        waiting.append(reference)
        if len(waiting) == MOST:
            self._levels[level] = []
            self.append(self._add(waiting), level + 1)

    def total(self) -> Any:
        """Return the reference to the total; None: there is nothing to add up."""
        total: list[Any] = []
        for waiting in self._levels:
            total = [*waiting, *total]
            if len(total) > 1:
                total = [self._add(total)]
        return total[0] if total else None
