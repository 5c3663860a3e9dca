"""Checkpoints: the results of a call so far, on disk, to resume after a crash.

Input: entries, by their place in the plan, and the fingerprint of the call. Output: a
folder of files, and after a crash the entries that it holds.

The unit is an *entry*: the results of one round's groups, or how far a loop is. Entries
of rounds inside a loop are dropped when the step is done, so that what is saved does
not grow with the number of rounds, except by what a loop stacks. Server stages run
again: they are cheap, and deterministic.

A checkpoint is a folder of *steps*, files that each hold all entries of a moment:

    text "drjax checkpoint 1\\n" | header: length as 8 bytes, JSON | arrays | SHA-256

The header has the fingerprint of the call, and names, dtypes and shapes of the entries.

Invariants: the hash is that of all before it, so that a step that was damaged or cut
off is recognized, and the one before it is used. Two steps are kept, and the older goes
only when the newer is on disk. One driver at a time has the folder. A checkpoint of
another call is an error, never overwritten.

Sharp edges: a step is written in the background, so that a full disk is reported one
round late. Of an iterable of groups the fingerprint knows nothing.
"""

import hashlib
import json
import os
import re
import warnings
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np

from drjax import _storage
from drjax._errors import EngineError
from drjax.backends.engine import folder_lock
from drjax.backends.engine.options import EngineOptions
from drjax.backends.groups import Lazy

Entry = list[np.ndarray]

_MAGIC = b"drjax checkpoint 1\n"
_STEP = re.compile(r"step-(\d+)")
_PART = re.compile(_storage.part_name(_STEP.pattern).replace(".", r"\."))
_KEPT = 2
_HASH = hashlib.sha256().digest_size


class Checkpoint:
    """Entries by the place in the plan; these live as long as the call."""

    resumed = 0

    def get(self, key: str) -> Entry | None:
        """The entry of a place."""

    def put(self, key: str, entry: Entry, over: str | None = None) -> None:
        """Add an entry, and forget those of places that begin with `over`."""

    def write(self) -> None:
        """Called before the groups work: write what is new."""

    def close(self) -> None:
        """The call has come to its end, or to an error."""

    def clear(self) -> None:
        """The call has come to its end."""

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            self.close()
        except EngineError as failure:
            if error is None:
                raise
            error.add_note(str(failure))  # what failed first is what is raised


class FolderCheckpoint(Checkpoint):
    """Entries in a folder, written in the background.

    Args:
      folder: The folder: a path, or a URL that fsspec knows.
      fingerprint: That of the call: entries of another call are an error.

    Raises:
      EngineError: The folder cannot be used, is in use, or no step of it is whole.
    """

    def __init__(self, folder: str | os.PathLike[str], fingerprint: str):
        self._fingerprint, self._entries, self._is_new = (
            fingerprint,
            dict[str, Entry](),
            False,
        )
        self._steps: list[str] = []  # that are whole, the newest last
        self._others: list[str] = []
        self._step, self._saving = 0, None
        try:
            self._folder = _storage.folder(_storage.locate(folder))
            # Before the call computes anything: an unusable folder must not cost an
            # hour.
            self._folder.make()
            self._lock = folder_lock.acquire(self._folder)
        except folder_lock.LockedError as error:
            raise EngineError(
                f"The checkpoint folder {folder} is in use by {error}. Wait until that "
                "call has ended, or give another folder as checkpoint=."
            ) from error
        except (ImportError, OSError, TypeError, ValueError) as error:
            raise EngineError(
                "checkpoint= needs a folder that can be written, or a URL that fsspec "
                f"knows, got {str(folder)!r}: {error}. Give another folder, or remove "
                "what is in its place."
            ) from error
        # One thread, so that steps are written in order.
        self._thread = ThreadPoolExecutor(1, "drjax-checkpoint")
        try:
            self._restore()
        except BaseException:
            self._release()
            raise
        self.resumed = len(self._entries)

    def _restore(self) -> None:
        """Take the entries of the newest step that is whole."""
        try:
            names = self._folder.names()
            for name in names:
                if _PART.fullmatch(name):  # what a driver that died was writing
                    self._folder.remove(name)
        except OSError as error:
            raise self._error(
                "", "cannot be read", error, "Make it readable, or give another folder."
            ) from error
        steps = sorted((int(m[1]), m[0]) for m in map(_STEP.fullmatch, names) if m)
        # Numbers go on behind damaged steps too, so that no name is used twice.
        self._step = steps[-1][0] if steps else 0
        damaged: list[str] = []
        # The newest whole step has all entries: older ones add nothing.
        for _, name in reversed(steps):
            try:
                fingerprint, entries = _parse(self._folder.read(name))
            except (LookupError, OSError, TypeError, ValueError) as error:
                damaged.append(f"{self._folder.location(name)} ({error})")
                self._others.append(name)
                continue
            if fingerprint != self._fingerprint:
                raise EngineError(
                    f"The checkpoint in {self._folder.location('').rstrip('/')} is of "
                    "another call: of another plan or of other arguments. Give another "
                    "folder, or remove it."
                )
            self._entries, self._steps = entries, [name]
            break
        text = f"The checkpoint has files that cannot be used: {', '.join(damaged)}. "
        if damaged and not self._steps:
            raise EngineError(
                f"{text}No step before them is left to go on from. Copy them again "
                "from where they are whole, or remove them to start the call from the "
                "beginning."
            )
        if damaged:
            name = self._folder.location(self._steps[0])
            warnings.warn(
                f"{text}The call goes on from the step before, {name}: what was "
                "computed after it is repeated.",
                RuntimeWarning,
                stacklevel=2,
            )

    def get(self, key: str) -> Entry | None:
        return self._entries.get(key)

    def put(self, key: str, entry: Entry, over: str | None = None) -> None:
        if over is not None:
            # A finished loop step replaces the entries of the rounds inside it.
            gone = [k for k in self._entries if k.startswith(over)]
            for k in gone:
                del self._entries[k]
        self._entries[key], self._is_new = entry, True

    def write(self) -> None:
        if not self._is_new:
            return
        self._is_new = False
        self._wait()
        if self._lock.lost:
            raise EngineError(
                f"The checkpoint folder {self._folder.location('')} was taken by "
                "another driver, as this one did not renew its lock in "
                f"{folder_lock.EXPIRY:.0f} s. Let one of them end, and make its call "
                "again with another folder."
            )
        # The previous step is on disk by now: at most one is in memory besides this.
        self._step += 1
        # A copy of the dict, not of the arrays: entries are never changed in place.
        self._saving = self._thread.submit(
            self._save, f"step-{self._step:09}", dict(self._entries)
        )

    def _save(self, name: str, entries: dict[str, Entry]) -> None:
        self._folder.write(name, _chunks(self._fingerprint, entries))
        self._steps.append(name)
        # Removed only after the new step is whole, damaged ones included.
        old = [*self._others, *self._steps[:-_KEPT]]
        self._others, self._steps = [], self._steps[-_KEPT:]
        for step in old:
            with suppress(OSError):  # it is removed with the folder's others
                self._folder.remove(step)

    def _wait(self) -> None:
        """Until all that was to be written is.

        Raises:
          EngineError: It cannot be written.
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
                f"step-{self._step:09}",
                "cannot be written",
                error,
                f"{kept}Free space there, or make it writable, and make the same call "
                "again.",
            ) from error

    def _error(self, name: str, what: str, error: Exception, fix: str) -> EngineError:
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return EngineError(
            f"The checkpoint file {self._folder.location(name)} {what}: {why}. {fix}"
        )

    def close(self) -> None:
        try:
            self.write()
            self._wait()
        finally:
            self._release()

    def _release(self) -> None:
        self._thread.shutdown()
        self._lock.release()

    def clear(self) -> None:
        self._is_new = False
        with suppress(EngineError):  # the call has its results: nothing is lost
            self._wait()
        if self._lock.lost:
            return
        try:
            # The lock's file stays: others may be waiting for it.
            for name in self._folder.names():
                if _STEP.fullmatch(name):
                    self._folder.remove(name)
        except OSError as error:
            warnings.warn(
                f"The checkpoint of a call that is done cannot be removed: {error}. "
                "Remove it, or the same call would find it.",
                RuntimeWarning,
                stacklevel=2,
            )


# ---------------------------------------------------------------------------------
# A step as bytes


def _chunks(fingerprint: str, entries: dict[str, Entry]) -> Iterator[Any]:
    """A step, in parts, none of them a copy."""
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
    """`(fingerprint, entries)` of a step.

    Raises:
      LookupError, TypeError, ValueError: It is not a whole step.
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
    """Any array as bytes, those of dtypes that numpy does not know too."""
    return memoryview(np.ascontiguousarray(x).reshape(-1).view(np.uint8))


def call_fingerprint(plan_key: str, inputs: list[Any], options: EngineOptions) -> str:
    """The fingerprint of a call: the plan, its arguments, and what fails a group.

    Arrays are known by what is in them, files by their names and sizes; of iterables
    nothing is known.
    """
    # Only options that change results: a resumed call may have other workers, block
    # sizes or time limits.
    policy = f"{options.on_error} {options.check_nans}"
    digest = hashlib.sha256(f"{plan_key} {policy}".encode())
    for x in inputs:
        if isinstance(x, Lazy):
            digest.update(x.source.groups.identity().encode())
        else:
            # Equal bytes of another shape or dtype are other arguments.
            digest.update(f"{x.dtype}{x.shape}".encode())
            digest.update(np.ascontiguousarray(x).reshape(-1).view(np.uint8))
    return digest.hexdigest()
