"""The steps of a checkpoint: files in a folder, written in the background.

Input: entries by their place in the plan, and the fingerprint of the call. Output: a
file for each step, and after a crash the entries of the newest step that is whole. A
step holds all entries of a moment:

    text "drjax checkpoint 1\\n" | header: length as 8 bytes, JSON | arrays | SHA-256

The header has the fingerprint of the call, by `checkpoint.call_fingerprint`, and names,
dtypes and shapes of the entries.

Invariants: the hash is that of all before it, so that a step that was damaged or cut
off is recognized, and the one before it is used. Two steps are kept, and the older goes
only when the newer is on disk.

Sharp edges: a step is written in the background, so that a full disk is reported one
step late, by `wait`.
"""

import hashlib
import json
import re
import warnings
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np

from drjax import _storage
from drjax._errors import EngineError

Entry = list[np.ndarray]

_MAGIC = b"drjax checkpoint 1\n"
_STEP = re.compile(r"step-(\d+)")
_PART = re.compile(_storage.part_name(_STEP.pattern).replace(".", r"\."))
_KEPT = 2
_HASH = hashlib.sha256().digest_size


class StepFiles:
    """The steps of one call in a folder.

    Args:
      folder: The folder.
      fingerprint: The fingerprint of the call: steps of another call are an error.
    """

    def __init__(self, folder: _storage.Folder, fingerprint: str):
        self._folder, self._fingerprint = folder, fingerprint
        self._steps: list[str] = []  # that are whole, the newest last
        self._damaged: list[str] = []
        self._number, self._saving = 0, None
        # One thread, so that steps are written in order.
        self._thread = ThreadPoolExecutor(1, "drjax-checkpoint")

    def restore(self) -> dict[str, Entry]:
        """Read the entries of the newest step that is whole; {} if there is no step.

        Damaged newer steps cause a warning.

        Raises:
          EngineError: The folder cannot be read, or no step of it is whole, or they are
            of another call.
        """
        steps = sorted(
            (int(m[1]), m[0]) for m in map(_STEP.fullmatch, self._names()) if m
        )
        # Numbers go on behind damaged steps too, so that no name is used twice.
        self._number = steps[-1][0] if steps else 0
        reasons: list[str] = []
        entries: dict[str, Entry] = {}
        # The newest whole step has all entries: older ones add nothing.
        for _, name in reversed(steps):
            try:
                fingerprint, entries = _parse(self._folder.read(name))
            except (LookupError, OSError, TypeError, ValueError) as error:
                reasons.append(f"{self._folder.location(name)} ({error})")
                self._damaged.append(name)
                continue
            if fingerprint != self._fingerprint:
                raise EngineError(
                    f"The checkpoint in {self._folder.location('').rstrip('/')} is of "
                    "another call: of another plan or of other arguments. Give another "
                    "folder, or remove it."
                )
            self._steps = [name]
            break
        if reasons:
            self._report_damage(reasons)
        return entries

    def _names(self) -> list[str]:
        """Remove unfinished files from the folder; returns the names that it had.

        Raises:
          EngineError: The folder cannot be read.
        """
        try:
            names = self._folder.names()
            for name in names:
                if _PART.fullmatch(name):  # what a driver that died was writing
                    self._folder.remove(name)
        except OSError as error:
            raise self._error(
                "", "cannot be read", error, "Make it readable, or give another folder."
            ) from error
        return names

    def _report_damage(self, reasons: list[str]) -> None:
        """Warn of damaged steps; raise `EngineError` if no step is whole.

        `reasons` are texts: a file and why it cannot be used.
        """
        text = f"The checkpoint has files that cannot be used: {', '.join(reasons)}. "
        if not self._steps:
            raise EngineError(
                f"{text}No step before them is left to go on from. Copy them again "
                "from where they are whole, or remove them to start the call from the "
                "beginning."
            )
        name = self._folder.location(self._steps[0])
        warnings.warn(
            f"{text}The call goes on from the step before, {name}: what was "
            "computed after it is repeated.",
            RuntimeWarning,
            stacklevel=2,
        )

    def save(self, entries: dict[str, Entry]) -> None:
        """Begin to write a step with these entries, in a thread; call `wait` before."""
        self._number += 1
        # A copy of the dict, not of the arrays: entries are never changed in place.
        self._saving = self._thread.submit(
            self._write, f"step-{self._number:09}", dict(entries)
        )

    def _write(self, name: str, entries: dict[str, Entry]) -> None:
        """Write a step, then remove older ones; runs in the thread.

        Args:
          name: The name of the step's file.
          entries: All entries of the call, by their place in the plan.
        """
        self._folder.write(name, _chunks(self._fingerprint, entries))
        self._steps.append(name)
        # Removed only after the new step is whole, damaged ones included.
        old = [*self._damaged, *self._steps[:-_KEPT]]
        self._damaged, self._steps = [], self._steps[-_KEPT:]
        for step in old:
            with suppress(OSError):  # it is removed with the folder's others
                self._folder.remove(step)

    def wait(self) -> None:
        """Wait until the step that `save` began is written; return if there is none.

        Raises:
          EngineError: The step cannot be written.
        """
        saving: Future | None = self._saving
        self._saving = None
        if saving is None:
            return
        try:
            saving.result()
        except Exception as error:
            # The user must know whether the time so far is lost.
            kept = "What was saved before is kept. " if self._steps else ""
            raise self._error(
                f"step-{self._number:09}",
                "cannot be written",
                error,
                f"{kept}Free space there, or make it writable, and make the same call "
                "again.",
            ) from error

    def remove(self) -> None:
        """Remove all steps from the folder; other files stay.

        Raises:
          OSError: A step cannot be removed.
        """
        # Other files stay, such as the lock's: others may be waiting for it.
        for name in self._folder.names():
            if _STEP.fullmatch(name):
                self._folder.remove(name)

    def close(self) -> None:
        """End the thread that writes."""
        self._thread.shutdown()

    def _error(self, name: str, what: str, error: Exception, fix: str) -> EngineError:
        """An `EngineError` to raise for a file: what is wrong, why, and how to fix it.

        `name` is the file's name in the folder; empty for the folder itself.
        """
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return EngineError(
            f"The checkpoint file {self._folder.location(name)} {what}: {why}. {fix}"
        )


# ---------------------------------------------------------------------------------
# A step as bytes


def _chunks(fingerprint: str, entries: dict[str, Entry]) -> Iterator[Any]:
    """The bytes of a step in parts; contiguous arrays are not copied.

    Args:
      fingerprint: The fingerprint of the call.
      entries: The entries, by their place in the plan.
    """
    # The names in the header are those of the file format: "key" is the fingerprint.
    types = {
        name: [[str(x.dtype), [*x.shape]] for x in entry]
        for name, entry in entries.items()
    }
    header = json.dumps({"key": fingerprint, "entries": types}).encode()
    digest = hashlib.sha256()
    # A generator of views: a step may be as large as the memory that is left.
    arrays = (_bytes(x) for entry in entries.values() for x in entry)
    for chunk in (_MAGIC, len(header).to_bytes(8, "little"), header, *arrays):
        digest.update(chunk)
        yield chunk
    yield digest.digest()


def _parse(data: bytes) -> tuple[str, dict[str, Entry]]:
    """Parse the bytes of a step: `(fingerprint, entries)`, entries as read-only views.

    Raises:
      LookupError, TypeError, ValueError: They are not a whole step.
    """
    if len(data) < len(_MAGIC) + _HASH or not data.startswith(_MAGIC):
        raise ValueError("it is no step of a checkpoint, or was cut off")
    # Views, as a slice of bytes would copy the whole step.
    content = memoryview(data)[:-_HASH]
    # Before anything is parsed: a header that is cut off could name any length.
    if hashlib.sha256(content).digest() != data[-_HASH:]:
        raise ValueError("it was cut off or changed")
    start = len(_MAGIC) + 8
    offset = start + int.from_bytes(data[len(_MAGIC) : start], "little")
    header = json.loads(data[start:offset])
    entries = {}
    for name, kinds in header["entries"].items():
        entries[name] = []
        for kind, shape in kinds:
            dtype, count = np.dtype(kind), int(np.prod(shape))
            flat = np.frombuffer(content, dtype, count, offset)
            entries[name].append(flat.reshape(shape))
            offset += flat.nbytes
    return header["key"], entries


def _bytes(x: np.ndarray) -> memoryview:
    """The bytes of an array, of any dtype; a view if the array is contiguous."""
    return memoryview(np.ascontiguousarray(x).reshape(-1).view(np.uint8))
