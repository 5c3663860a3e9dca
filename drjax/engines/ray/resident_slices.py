"""Slices that stay where workers can read them, so that they are sent once.

Input: the slices of a block, and the key of that block. Output: a reference that a
worker can read; the same as before if the slices are, also if they were those of
another key with the same place.

Invariants: whether data is the same is not believed but compared, bit by bit, with what
was stored, which takes a tenth of the time of storing it again. A caller may thus
change an array between calls. A `Constant` cannot change, and is not compared. At most
`limit` bytes stay stored.

Sharp edges: NaNs with equal bits are the same, and -0.0 and 0.0 are not. `get` must
return a view of the store: a copy would double the memory.
"""

import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from drjax.engines.slices.constant import identity

_OLD = 16  # runs of a stage after which slices that none of them has used may go


@dataclass
class _Entry:
    """The slices of a block in the store that all workers read.

    Attributes:
      slices: Views of the store, `[c, ...]`.
      size: In bytes.
      used: The count of stage runs when they were last used.
      keys: How many keys have these slices.
      identities: Of the arrays that were stored, or found to be the same, last.
    """

    reference: Any
    slices: list[np.ndarray]
    size: int
    used: int
    keys: int = 1
    identities: Sequence[Hashable] = ()

    def has(self, slices: list[np.ndarray]) -> bool:
        """Return whether these are the stored slices: equal shapes, dtypes and bits."""
        identities = [*map(identity, slices)]
        if None not in identities and identities == self.identities:
            return True
        if len(self.slices) != len(slices) or not all(map(_same, self.slices, slices)):
            return False
        self.identities = identities
        return True


class ResidentSlices:
    """A cache of blocks' slices in a store that all workers read: each is sent once.

    `put` stores a list of arrays and returns a reference to it, from which `get`
    returns the arrays as views of the store. At most `limit` bytes stay stored.

    Attributes:
      numbers: By reference the number of what stays stored, which nothing else gets.
      removed: How many references do not stay any more.
    """

    def __init__(
        self,
        put: Callable[[list[np.ndarray]], Any],
        get: Callable[[Any], list[np.ndarray]],
        limit: float,
    ):
        self._put, self._get, self._limit = put, get, limit
        self._entries: dict[Hashable, _Entry] = {}
        self._keys: dict[Hashable, set[Hashable]] = {}  # by place
        self._size = self._runs = self.removed = 0
        self.numbers: dict[Any, int] = {}
        self._count = itertools.count()

    def begin(self) -> None:
        """Count one more run of a stage.

        Slices that were last used more than 16 runs ago may be removed to make room.
        """
        self._runs += 1

    def reference(
        self, key: Hashable, slices: list[np.ndarray], place: Hashable = None
    ) -> Any:
        """Store the slices of a block, unless the same ones are stored already.

        The result is the reference to them that `put` returned, now or earlier. `key`
        identifies the block, whatever the values of its slices are: slices that were
        stored for this key before, and differ, are removed. `place` is what several
        keys share, such as the groups of the block: the same slices are also looked for
        under the other keys with this place, as rounds and inputs may share them; None:
        only under `key`. Slices that do not fit into the `limit` are stored for this
        call alone.
        """
        # Compared in full: hashing would be slower than comparing, and an identity
        # check would miss a change in place.
        entry = self._entries.get(key)
        if entry is not None and entry.has(slices):
            entry.used = self._runs
            return entry.reference
        self._remove(key)
        keys = self._keys.setdefault(place, set()) if place is not None else set()
        for other in keys - {key}:
            entry = self._entries.get(other)
            if entry is not None and entry.has(slices):
                self._entries[key], entry.keys = entry, entry.keys + 1
                keys.add(key)
                entry.used = self._runs
                return entry.reference
        # Plain arrays, which Ray stores without a copy on the way.
        reference = self._put([*map(np.asarray, slices)])
        size = sum(x.nbytes for x in slices)
        # Old entries go only when there is no room: a plan may run stages in turn.
        if self._size + size > self._limit:
            for other, entry in [*self._entries.items()]:
                if self._runs - entry.used > _OLD:
                    self._remove(other)
        # What does not fit is sent each time, as without this class.
        if self._size + size <= self._limit:
            stored = self._get(reference)
            entry = _Entry(reference, stored, size, self._runs)
            entry.identities = [*map(identity, slices)]
            self._entries[key] = entry
            self.numbers[reference] = next(self._count)
            keys.add(key)
            self._size += size
        return reference

    def _remove(self, key: Hashable) -> None:
        """Remove the slices of this key from the cache, if there are any.

        If another key has the same slices, they stay for that one, and count toward the
        limit.
        """
        if (entry := self._entries.pop(key, None)) is not None:
            entry.keys -= 1
            if not entry.keys:
                self._size -= entry.size
                del self.numbers[entry.reference]
                self.removed += 1


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    """Return whether two arrays have equal shapes, dtypes and bits.

    NaNs with equal bits are the same; 0.0 and -0.0 are not.
    """
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    # As unsigned integers: NaN equals itself, and dtypes unknown to numpy compare.
    bits = np.dtype(f"u{min(a.itemsize, 8)}")
    # complex128: numpy views smaller items only if the last axis is contiguous.
    if a.itemsize > 8:
        a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)
    a, b = a.view(bits), b.view(bits)
    # The first group decides most differences at once.
    return np.array_equal(a[:1], b[:1]) and np.array_equal(a, b)
