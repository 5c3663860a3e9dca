"""Checkpoints: the results of a call so far, on disk, to resume after a crash.

Input: entries, by their place in the plan, and the fingerprint of the call. Output: a
folder of files, and after a crash the entries that it holds.

The unit is an *entry*: the results of one round's groups, or how far a loop is. Entries
of rounds inside a loop are dropped when the step is done, so that what is saved does
not grow with the number of rounds, except by what a loop stacks. Server stages run
again: they are cheap, and deterministic. `driver` asks for the entry of each round, and
runs the groups only if there is none. `checkpoint_files` writes all entries of a
moment as one file, a *step*.

Invariants: one driver at a time has the folder. A checkpoint of another call is an
error, never overwritten.

`saved_calls` has the results of calls that have ended, if slices stay between them.

Sharp edges: a step is written in the background, so that a full disk is reported one
round late. Of an iterable of groups the fingerprint knows nothing.
"""

import hashlib
import os
import warnings
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any

import numpy as np

from drjax import _storage
from drjax._errors import EngineError
from drjax.engines.core import folder_lock
from drjax.engines.core.checkpoint_files import Entry, StepFiles
from drjax.engines.core.options import EngineOptions
from drjax.engines.core.saved_calls import SavedCalls, SliceFiles
from drjax.engines.slices.constant import once
from drjax.engines.slices.groups import Lazy
from drjax.engines.slices.slices import Slices
from drjax.engines.slices.worker_slices import WorkerSlices
from drjax.plan import Value

_OF_SLICES = "/slices/"  # in the key of an entry that names files, before its index


class Checkpoint:
    """The checkpoint of one call of a plan on an engine. This class stores nothing.

    Calls without the option `checkpoint` use it; the subclass `FolderCheckpoint` stores
    entries in a folder. An entry is a list of arrays: the results of one round's
    groups, the progress of a loop, or the indices of dropped groups. Its key is its
    location in the plan, such as `2.groups` for the groups of round 2, or `3.scan` for
    a loop in round 3.

    Attributes:
      resumed: The number of entries that were restored from an earlier, interrupted
        call.
    """

    resumed = 0

    def get(self, key: str, values: Sequence[Value | None] = ()) -> list[Any] | None:
        """Return the entry of a key; None if there is none, as always in this class.

        A `FolderCheckpoint` has the entries that `put` has set in this call, and those
        that it has read from its folder when it was created. `values` are those of the
        entry, in order, if some of it may be slices that workers have.
        """

    def put(self, key: str, entry: list[Any], over: str | None = None) -> None:
        """Set the entry of a key, and drop entries that are not needed any more.

        Of slices that workers have, it has the names of files with them. Dropped are
        those whose keys start with `over`, such as `3.scan.`: after a step of a loop,
        those of the rounds inside the loop. None: no entry is dropped.
        """

    def write(self) -> None:
        """Begin to save the entries, if any has changed since they were saved.

        The driver calls it before each stage of the groups. Saving continues in the
        background. An `EngineError` is raised if the previous save failed, or another
        driver has locked the folder in the meantime.
        """

    def close(self) -> None:
        """Save the entries that are not saved yet, and unlock the folder.

        It is called when the call has returned or raised. If the entries cannot be
        saved, the folder is unlocked, and an `EngineError` is raised.
        """

    def end(self, outputs: Entry, staying: Sequence[Slices]) -> None:
        """Remove the saved entries: the call has all of its results.

        If they cannot be removed, a `RuntimeWarning` is issued. Where the results of
        calls are saved, `outputs` are, and the slices of those that stay.
        """

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except EngineError as failure:
            if error is None:
                raise
            error.add_note(str(failure))  # what failed first is what is raised


class FolderCheckpoint(Checkpoint):
    """A `Checkpoint` that saves its entries as files in a folder, which it locks.

    The folder is a local path, or a URL of a file system that fsspec supports. The
    constructor raises an `EngineError` if it cannot be used, if another driver has
    locked it, if all of its files are damaged, or if they have another `fingerprint`, a
    hash from `call_fingerprint`: then they are of another call. With `calls`, it saves
    the results of the call there at its end; `slices` has what stays.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        fingerprint: str,
        calls: SavedCalls | None = None,
        slices: SliceFiles | None = None,
    ):
        self._is_new = False  # whether there are entries that no step has
        self._fingerprint, self._calls, self._slices = fingerprint, calls, slices
        self._folder, self._lock = locked_folder(folder)
        self._files = StepFiles(self._folder, fingerprint)
        try:
            ended = "" if calls is None else calls.check(self._folder)
            self._entries = self._files.restore(ended)
        # A folder that cannot be restored must not stay locked by this process.
        except BaseException:
            self._release()
            raise
        self.resumed = sum(_OF_SLICES not in key for key in self._entries)

    def get(self, key: str, values: Sequence[Value | None] = ()) -> list[Any] | None:
        entry: list[Any] | None = self._entries.get(key)
        if entry is None or self._slices is None:
            return entry
        entry = [*entry]
        for i, value in enumerate(values):
            names = self._entries.get(f"{key}{_OF_SLICES}{i}")
            if value is not None and names is not None:
                try:
                    entry[i] = self._slices.slices(value, names)
                except ValueError as error:
                    raise EngineError(
                        f"The checkpoint in {self._folder.location('')} lacks slices "
                        f"that it names: {error}. Copy the file again from where it is "
                        "whole, or remove the files step-* to start the call again."
                    ) from error
        return entry

    def put(self, key: str, entry: list[Any], over: str | None = None) -> None:
        # A finished loop step replaces the entries of the rounds inside it.
        gone = tuple(filter(None, (f"{key}{_OF_SLICES}", over)))
        self._entries = {
            k: x for k, x in self._entries.items() if not k.startswith(gone)
        }
        entry = [*entry]
        for i, x in enumerate(entry):
            if isinstance(x, WorkerSlices):
                assert self._slices is not None  # without `keep`, workers have none
                self._entries[f"{key}{_OF_SLICES}{i}"] = self._slices.entry(x)
                entry[i] = np.zeros(0)
        self._entries[key], self._is_new = entry, True

    def write(self) -> None:
        if not self._is_new:
            return
        # Before anything raises: `close` must then neither save nor fail once more.
        self._is_new = False
        # The previous step is on disk then: at most one is in memory besides this.
        self._files.wait()
        # After the wait, in which the lease may be lost: a step of this driver could
        # replace one of the other driver, as the names may be the same.
        self._check_lock()
        self._files.save(self._entries)

    def _check_lock(self) -> None:
        if self._lock.lost:
            raise EngineError(
                f"The checkpoint folder {self._folder.location('')} was taken by "
                "another driver, as this one did not renew its lock in "
                f"{folder_lock.EXPIRY:.0f} s. Let one of them end, and make its call "
                "again with another folder."
            )

    def close(self) -> None:
        try:
            self.write()
            self._files.wait()
        finally:
            self._release()

    def _release(self) -> None:
        """End the thread that writes files, and unlock the folder; save nothing."""
        # First: no step may be written once another driver can have the lock.
        self._files.close()
        self._lock.release()

    def end(self, outputs: Entry, staying: Sequence[Slices]) -> None:
        if self._calls is not None and self._slices is not None:
            self._check_lock()
            entries = [*map(self._slices.entry, staying)]
            # Before the entries go, or a crash between the two would lose the call.
            self._calls.save(self._folder, self._fingerprint, outputs, entries)
        # Unsaved entries are not needed: `close` must not leave a step behind.
        self._is_new = False
        with suppress(EngineError):  # the call has its results: nothing is lost
            self._files.wait()
        # The steps in the folder may be those of the driver that has the lock now.
        if self._lock.lost:
            return
        try:
            self._files.remove()
        except OSError as error:
            warnings.warn(
                f"The checkpoint of a call that is done cannot be removed: {error}. "
                "Remove it, or the same call would find it.",
                RuntimeWarning,
                stacklevel=2,
            )


def location(path: str | os.PathLike[str]) -> str:
    """Return a path or URL of a folder as text that means the same to any process."""
    try:
        return _storage.folder(_storage.locate(path)).location("").rstrip("/")
    except (ImportError, OSError, TypeError, ValueError):
        return str(path)  # `locked_folder` refuses it


def locked_folder(
    path: str | os.PathLike[str],
) -> tuple[_storage.Folder, "folder_lock.Lock | folder_lock.Lease"]:
    """Create a folder, unless it exists, and lock it for this process.

    The path is local, or a URL of a file system that fsspec supports. The caller ends
    the lock by its `release()`. An `EngineError` is raised if the folder cannot be
    used, or another driver has locked it.
    """
    try:
        folder = _storage.folder(_storage.locate(path))
        # Before the call computes anything: an unusable folder must not cost an hour.
        folder.make()
        return folder, folder_lock.acquire(folder)
    except folder_lock.LockedError as error:
        raise EngineError(
            f"The checkpoint folder {path} is in use by {error}. Wait until that "
            "call has ended, or give another folder as checkpoint=."
        ) from error
    except (ImportError, OSError, TypeError, ValueError) as error:
        raise EngineError(
            "checkpoint= needs a folder that can be written, or a URL that fsspec "
            f"knows, got {str(path)!r}: {error}. Give another folder, or remove "
            "what is in its place."
        ) from error


def call_fingerprint(
    plan_key: str,
    inputs: list[Any],
    options: EngineOptions,
    slices: SliceFiles | None = None,
) -> str:
    """Return a SHA-256 of what determines the results of one call, in hexadecimal.

    `plan_key` is the hash of the plan file. Of the inputs, arrays are hashed by
    content, dtype and shape, Parquet files by their paths and sizes; the data of other
    `Groups`, such as an iterable, is not hashed. Of slices that workers have, the names
    of files with them are; those that the driver has are arrays.
    """
    # Only options that change results: a resumed call may have other workers, block
    # sizes or time limits.
    policy = f"{options.on_error} {options.check_nans}"
    digest = hashlib.sha256(f"{plan_key} {policy}".encode())
    for x in inputs:
        if isinstance(x, Lazy):
            digest.update(x.source.groups.identity().encode())
            continue
        arrays = [x]
        if isinstance(x, WorkerSlices) and slices is not None:
            arrays = slices.entry(x)
        elif isinstance(x, Slices):
            arrays = [x.whole()]
        for y in arrays:
            # Equal bytes of another shape or dtype are other arguments.
            digest.update(f"{y.dtype}{y.shape}".encode())
            digest.update(once(_hash, y))
    return digest.hexdigest()


def _hash(x: np.ndarray) -> bytes:
    data = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
    return hashlib.sha256(data).digest()
