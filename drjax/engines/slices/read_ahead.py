"""The data of groups by chunks, each read by a thread while the one before is in use.

Input: a `Groups`, and the types of a group's leaves. Output: for a range of groups the
stacks of their leaves.

Invariants: one thread reads, so that the user's loader needs no locks. Of each device
one chunk is read ahead at most, and no group that the device does not have. An
iterable is iterated once for each device and pass, where chunks come in order.

Sharp edges: an iterable that is not indexed is skipped up to the first group of each
device.
"""

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from drjax._extras import needed
from drjax.engines.slices.groups import Cursor, Source
from drjax.engines.slices.slices import empty_slices

_log = logging.getLogger(__name__)
_OPEN = 64  # cursors that are kept to go on, and chunks that nobody has asked for


class ReadAhead:
    """Reads ranges of groups, and the next range of each device ahead.

    A group that cannot be read is NaN or zero, and so are all later ones: an error here
    would let other devices wait for this one forever. If `raises`, it is an error where
    there is one device, and else logged, for the end of the program (`raise_error`).

    Attributes:
      error: The error of a range that could not be read; None if there was none.
    """

    def __init__(self, source: Source, raises: bool, progress: bool = False):
        self._source, self._raises = source, raises
        self._bar = _progress_bar(source.n) if progress else None
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, "drjax-read-groups")
        # By range: what is read, and how many devices have yet to ask for it.
        self._chunks: dict[tuple[int, int], tuple[Future, int]] = {}
        self._open: dict[int, Cursor] = {}  # by the next group of each
        self._copied: list[np.ndarray] | None = None
        self.error: Exception | None = None
        self._failed: int | None = None  # the first group of that range

    def __call__(
        self, low: int, high: int, slots: int, copies: int
    ) -> Sequence[np.ndarray]:
        """Read the groups from `low` to before `high`, for a device.

        A device has `slots` groups, and as many as `copies` have these, and ask for
        them. Returns the leaves of their data, `[high - low, *s]`, random keys as key
        data.
        """
        n = self._source.n
        # The first group of the device that has fewer: its padding has copies.
        copied = bool(n % slots) and low == n - n % slots
        if copied and high - low == 1 and self._copied is not None:
            return self._copied
        try:
            if self.error is not None and not self._raises:
                raise self.error
            end = min(n, (low // slots + 1) * slots)
            leaves = self._chunk(low, high, end, copies).result()
            if self._failed == low:  # it can be read again
                self.error = self._failed = None
            if copied:
                self._copied = [x[:1].copy() for x in leaves]
            return leaves
        except Exception as error:
            self.error, self._failed = error, low
            if self._raises:
                if slots >= n:
                    raise
                _log.exception("Groups cannot be read, so that results are wrong.")
            return [empty_slices(v, high - low) for v in self._source.values]

    def _chunk(self, low: int, high: int, end: int, copies: int) -> Future:
        """Return what reads a range; if it is new, the next one is read after it."""
        with self._lock:
            chunk, left = self._chunks.pop((low, high), (None, copies))
            chunk = chunk or self._thread.submit(self._read, low, high)
            if left > 1:
                self._chunks[low, high] = chunk, left - 1
            after = high, high + (high - low)
            # A shorter last chunk is left out: the compiler may run it first.
            if after[1] <= end and after not in self._chunks:
                if left == copies:
                    read = self._thread.submit(self._read, *after)
                    self._chunks[after] = read, copies
                    _drop_oldest(self._chunks)
            return chunk

    def raise_error(self) -> None:
        """Raise the error of a range that could not be read, if it `raises`."""
        if self._raises and self.error is not None:
            raise self.error

    def close(self) -> None:
        """End the thread, once it has read what it is reading."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._bar is not None:
            self._bar.close()

    def _read(self, low: int, high: int) -> list[np.ndarray]:
        cursor = self._open.pop(low, None) or Cursor(self._source, low)
        leaves = cursor.take(high - low)
        if self._bar is not None:
            if self._bar.n + high - low > self._source.n:  # the next pass
                self._bar.reset()
            self._bar.update(high - low)
        self._open[high] = cursor
        _drop_oldest(self._open)
        return leaves


def _progress_bar(n: int) -> Any:
    tqdm = needed("tqdm", "examples", "progress=True").tqdm
    return tqdm(total=n, desc="groups read", unit="group", leave=False)


def _drop_oldest(items: dict[Any, Any]) -> None:
    while len(items) > _OPEN:
        del items[next(iter(items))]
