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

import numpy as np

from drjax import _storage
from drjax._errors import EngineError

Entry = list[np.ndarray]

_MAGIC = b"drjax checkpoint 1\n"
_STEP = re.compile(r"step-(\d+)")
# Exactly the names that `LocalFolder.write` uses: other programs' .part files stay.
# What `saved_calls` writes is here as well.
_PART = _storage.part_names(rf"{_STEP.pattern}|call-\d+|slices-[0-9a-f]+")
_KEPT = 2
_HASH = hashlib.sha256().digest_size


class StepFiles:
    """The checkpoint files of one call, in one folder.

    Each file, a *step*, holds all entries of the call at one moment, and the
    fingerprint that identifies the call. Files are written in a background thread.
    """

    def __init__(self, folder: _storage.Folder, fingerprint: str):
        self._folder, self._fingerprint = folder, fingerprint
        self._steps: list[str] = []  # that are whole, the newest last
        self._damaged: list[str] = []
        self._number, self._saving = 0, None
        # One thread, so that steps are written in order.
        self._thread = ThreadPoolExecutor(1, "drjax-checkpoint")

    def restore(self, ended: str = "") -> dict[str, Entry]:
        """Read the entries, by key, from the newest file that is not damaged.

        There are none if the folder has no checkpoint file. Unfinished files are
        removed, and damaged newer files cause a `RuntimeWarning`. An `EngineError` is
        raised if the folder cannot be read, all checkpoint files are damaged, or the
        newest undamaged one has the fingerprint of another call; unless that is
        `ended`, of a call whose results are saved.
        """
        steps = sorted(
            (int(m[1]), m[0])
            for m in map(_STEP.fullmatch, self._remove_unfinished_and_list())
            if m
        )
        # Numbers go on behind damaged steps too, so that no name is used twice.
        self._number = steps[-1][0] if steps else 0
        reasons: list[str] = []
        entries: dict[str, Entry] = {}
        # The newest whole step has all entries: older ones add nothing.
        for _, name in reversed(steps):
            try:
                fingerprint, entries = decoded(self._folder.read(name))
            except (LookupError, OSError, TypeError, ValueError) as error:
                reasons.append(f"{self._folder.location(name)} ({error})")
                self._damaged.append(name)
                continue
            if fingerprint == ended:
                entries, reasons = {}, []
                self.remove()
                break
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

    def _remove_unfinished_and_list(self) -> list[str]:
        """Remove unfinished checkpoint files of an earlier driver, and list the folder.

        The list has the names of all files, including the removed ones.
        """
        try:
            names = self._folder.names()
            # The folder is locked, so that no live driver is writing any of them.
            for name in names:
                if _PART.fullmatch(name):  # what a driver that died was writing
                    self._folder.remove(name)
        except OSError as error:
            raise self._error(
                "", "cannot be read", error, "Make it readable, or give another folder."
            ) from error
        return names

    def _report_damage(self, reasons: list[str]) -> None:
        """Warn that checkpoint files are damaged, or raise an `EngineError` if all are.

        `self._steps` has the name of the older file to use, if there is one; `reasons`
        has for each damaged file its path and why it cannot be used.
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
        """Begin to write a checkpoint file of all entries, in the background thread.

        Call `wait` before the next `save`: it reports whether the file was written. The
        dict may be changed afterwards, its arrays may not.
        """
        self._number += 1
        # A copy of the dict, not of the arrays: entries are never changed in place.
        self._saving = self._thread.submit(
            self._write, f"step-{self._number:09}", dict(entries)
        )

    def _write(self, name: str, entries: dict[str, Entry]) -> None:
        """Write a checkpoint file, then remove older ones except the one before it.

        Damaged ones are removed, too. It runs in the background thread. `name` is that
        of the new file, such as `step-000000001`.
        """
        self._folder.write(name, encoded(self._fingerprint, entries))
        self._steps.append(name)
        # Removed only after the new step is whole, damaged ones included.
        old = [*self._damaged, *self._steps[:-_KEPT]]
        self._damaged, self._steps = [], self._steps[-_KEPT:]
        for step in old:
            with suppress(OSError):  # it is removed with the folder's others
                self._folder.remove(step)

    def wait(self) -> None:
        """Wait until the file that `save` began, if any, is on disk.

        If it could not be written, an `EngineError` is raised, once.
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
            # Other errors are no matter of the disk.
            disk = isinstance(error, OSError)
            fix = "Free space there, or make it writable, and make" if disk else "Make"
            raise self._error(
                f"step-{self._number:09}",
                "cannot be written",
                error,
                f"{kept}{fix} the same call again.",
            ) from error

    def remove(self) -> None:
        """Remove all checkpoint files from the folder, and no others."""
        # Other files stay, such as the lock's: others may be waiting for it.
        for name in self._folder.names():
            if _STEP.fullmatch(name):
                self._folder.remove(name)

    def close(self) -> None:
        """Wait for a file that is being written, then end the background thread."""
        self._thread.shutdown()

    def _error(self, name: str, what: str, error: Exception, fix: str) -> EngineError:
        """Make, but not raise, an `EngineError` about a file in the folder.

        Without a `name` it is about the folder itself. `what` is the end of a sentence,
        such as "cannot be written", `error` the cause, and `fix` what the user can do,
        in sentences.
        """
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return EngineError(
            f"The checkpoint file {self._folder.location(name)} {what}: {why}. {fix}"
        )


# ---------------------------------------------------------------------------------
# A step as bytes


def encoded(
    fingerprint: str, entries: dict[str, Entry]
) -> Iterator[bytes | memoryview]:
    """Serialize entries to the bytes of a checkpoint file, in parts.

    These are `bytes` and `memoryview`s of arrays; only arrays that are not contiguous
    are copied.
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


def decoded(data: bytes) -> tuple[str, dict[str, Entry]]:
    """Deserialize the fingerprint and the entries of a checkpoint file.

    Arrays are read-only views of `data`. A `LookupError`, `TypeError` or `ValueError`
    is raised if the file is damaged, or is no checkpoint file.
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
    """Return the bytes of an array of any dtype, in C order.

    The array is copied only if it is not contiguous.
    """
    # Flat and as bytes: a memoryview has no format for bfloat16, and an array `[]`
    # cannot be viewed with another item size.
    return memoryview(np.ascontiguousarray(x).reshape(-1).view(np.uint8))
