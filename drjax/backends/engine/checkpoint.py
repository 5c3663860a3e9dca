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

Sharp edges: a step is written in the background, so that a full disk is reported one
round late. Of an iterable of groups the fingerprint knows nothing.
"""

import hashlib
import os
import warnings
from contextlib import suppress
from typing import Any

import numpy as np

from drjax import _storage
from drjax._errors import EngineError
from drjax.backends.engine import folder_lock
from drjax.backends.engine.checkpoint_files import Entry, StepFiles
from drjax.backends.engine.options import EngineOptions
from drjax.backends.groups import Lazy


class Checkpoint:
    """The entries of a call by their place in the plan. This class saves nothing.

    It is for calls without the option; `FolderCheckpoint` saves. A place is a text, as
    `2.groups`.

    Attributes:
      resumed: How many entries an earlier call has left.
    """

    resumed = 0

    def get(self, key: str) -> Entry | None:
        """The entry of a place, of this call or an earlier one; None if it has none."""

    def put(self, key: str, entry: Entry, over: str | None = None) -> None:
        """Set the entry of a place, and forget those of places that begin with `over`.

        Args:
          key: The place in the plan.
          entry: Its arrays.
          over: What the places begin with whose entries are not needed any more, as
            those of rounds inside a loop once its step is done; None: no place.
        """

    def write(self) -> None:
        """Save entries that are not saved yet; called before the groups work."""

    def close(self) -> None:
        """Save entries that are not saved yet, and unlock the folder.

        Called when the call has ended or failed.
        """

    def clear(self) -> None:
        """Forget all entries, also saved ones: the call has all of its results."""

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
    """Entries in a folder, which this driver locks.

    Args:
      folder: The folder: a path, or a URL that fsspec knows.
      fingerprint: The fingerprint of the call, from `call_fingerprint`.

    Raises:
      EngineError: The folder cannot be used, is in use, holds entries of another call,
        or has steps of which none is whole.
    """

    def __init__(self, folder: str | os.PathLike[str], fingerprint: str):
        self._is_new = False  # whether there are entries that no step has
        self._folder, self._lock = _locked_folder(folder)
        self._files = StepFiles(self._folder, fingerprint)
        try:
            self._entries = self._files.restore()
        except BaseException:
            self._release()
            raise
        self.resumed = len(self._entries)

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
        # The previous step is on disk then: at most one is in memory besides this.
        self._files.wait()
        if self._lock.lost:
            raise EngineError(
                f"The checkpoint folder {self._folder.location('')} was taken by "
                "another driver, as this one did not renew its lock in "
                f"{folder_lock.EXPIRY:.0f} s. Let one of them end, and make its call "
                "again with another folder."
            )
        self._files.save(self._entries)

    def close(self) -> None:
        try:
            self.write()
            self._files.wait()
        finally:
            self._release()

    def _release(self) -> None:
        """Unlock the folder, and end the thread that writes; save nothing."""
        self._files.close()
        self._lock.release()

    def clear(self) -> None:
        self._is_new = False
        with suppress(EngineError):  # the call has its results: nothing is lost
            self._files.wait()
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


def _locked_folder(
    path: str | os.PathLike[str],
) -> tuple[_storage.Folder, "folder_lock.Lock | folder_lock.Lease"]:
    """Make the folder of a path or URL, and lock it for this driver: `(folder, lock)`.

    Raises:
      EngineError: It cannot be used, or another driver has locked it.
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


def call_fingerprint(plan_key: str, inputs: list[Any], options: EngineOptions) -> str:
    """The fingerprint of a call: a hash of what determines its results.

    Arrays are hashed by content, files by their names and sizes; iterables not at all.

    Args:
      plan_key: The hash of the plan file.
      inputs: The inputs of the plan, as `flat_slices` returns them.
      options: The options: which groups fail depends on some of them.
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
