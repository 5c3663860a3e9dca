"""The results of calls in the folder of a checkpoint, with slices that stay in files.

Input: the results of a call that has ended, of which some stay with the groups for the
next call. Output: files, and in a new process the results of the latest call that the
folder has.

    call-NUMBER        the results of a call, and which files have the slices that stay
    slices-DIGEST      arrays of slices, named by the SHA-256 of the file

Invariants: a `call` is written when all files that it names are on disk. Those of two
calls are kept, so that a damaged one costs one call. A file of slices is written by the
process that has them, in the format of `checkpoint_files`.

Sharp edges: the folder is not locked from here: `checkpoint` does that. Workers write
into it, so it must be one for all of them, as a URL is, or a shared disk.
"""

import re
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from drjax import _storage
from drjax._errors import EngineError
from drjax.engines.core.checkpoint_files import Entry, decoded, encoded
from drjax.engines.slices.slices import HostSlices, Slices
from drjax.engines.slices.worker_slices import Pieces, WorkerSlices
from drjax.plan import Value

_CALL = re.compile(r"call-(\d+)")
_SLICES = re.compile(r"slices-[0-9a-f]{64}")
_KEPT = 2
_AT_ONCE = 16  # files that are removed


def write_slices(folder: str, arrays: Sequence[np.ndarray]) -> str:
    """Write a file with arrays into a folder, also a URL; return its digest."""
    chunks = [*encoded("", {"": [*arrays]})]
    digest = bytes(chunks[-1]).hex()
    try:
        _storage.folder(_storage.locate(folder)).write(f"slices-{digest}", chunks)
    except OSError as error:
        raise OSError(
            f"the slices that stay cannot be written to the checkpoint's folder: "
            f"{error}. Free space there, or make it writable from the workers"
        ) from error
    return digest


def read_slices(folder: str, digest: str) -> list[np.ndarray]:
    """Read the arrays of such a file; `ValueError`: it is gone, or damaged.

    They are read-only views of one buffer.
    """
    name = f"slices-{digest}"
    try:
        data = _storage.folder(_storage.locate(folder)).read(name)
        _, entries = decoded(data)
        # The file agrees with its own hash: it may still be another one.
        if not data.endswith(bytes.fromhex(digest)):
            raise ValueError("it has other slices than its name says")
        return entries[""]
    except (LookupError, OSError, TypeError, ValueError) as error:
        raise ValueError(f"{name}: {error}") from error


class SliceFiles:
    """Slices of a call as entries of a checkpoint, which name the files that have them.

    `engine` is that of the call; if its workers have slices, it is a `Keeping`.
    """

    def __init__(self, folder: str, engine: Any):
        self.folder, self._engine = folder, engine

    def entry(self, x: Slices) -> Entry:
        """Save the slices, unless a file has them already; return what names them.

        It is the digests of the files, uint8 `[k, 32]`, which array of each it is, int
        `[k]`, and the `piece` and `position` of a `Pieces`.
        """
        if isinstance(x, WorkerSlices):
            table = x.table
        else:
            own = np.zeros(x.n, int), np.arange(x.n)
            table = Pieces([([x.whole()], 0)], *own)
        digests = [self._digest(piece) for piece, _ in table.pieces]
        return [
            np.frombuffer(bytes.fromhex("".join(digests)), np.uint8).reshape(-1, 32),
            np.array([leaf for _, leaf in table.pieces], int),
            table.piece,
            table.position,
        ]

    def _digest(self, piece: Any) -> str:
        if isinstance(piece, list):
            try:
                return write_slices(self.folder, piece)
            except OSError as error:
                raise EngineError(f"A call cannot be saved: {error}.") from error
        return self._engine.saved_as(piece)

    def slices(self, value: Value, entry: Entry) -> Slices:
        """Return the slices that an entry names, as what stages take.

        `ValueError`: a file is gone, or damaged.
        """
        digests, leaves, piece, position = entry
        names = digests_of(entry)
        if self._engine.stays:
            pieces = self._engine.load(self.folder, names)
        else:
            pieces = [read_slices(self.folder, name) for name in names]
        pairs = zip(pieces, map(int, leaves), strict=True)
        table = Pieces([*pairs], np.array(piece), np.array(position))
        x = WorkerSlices(value, table, self._engine if self._engine.stays else None)
        return x if self._engine.stays else HostSlices(value, x.whole())


def digests_of(entry: Entry) -> list[str]:
    """Return the digests of the files that an entry of `SliceFiles` names."""
    return [bytes(x).hex() for x in entry[0]]


@dataclass
class SavedCall:
    """A call that has ended.

    Attributes:
      number: How many calls had ended with it.
      fingerprint: That of the checkpoint of the call.
      outputs: The plan's outputs, except for those that stay.
      staying: The entries of the outputs that stay, in order.
    """

    number: int
    fingerprint: str
    outputs: Entry
    staying: list[Entry]


class SavedCalls:
    """The calls of one `Runner` in a folder, whose plan has the hash `plan`.

    Attributes:
      number: How many calls have ended, by what this process knows.
    """

    def __init__(self, plan: str):
        self._plan, self.number, self._fingerprint = plan, 0, ""
        self._named: dict[int, set[str]] = {}  # files of slices, by call

    def latest(
        self, folder: _storage.Folder, use: Callable[[SavedCall], Any]
    ) -> tuple[SavedCall, Any] | None:
        """Return the latest call that is whole, with `use(call)`; None: there is none.

        A damaged call, or one with a file for which `use` raises an error of files, is
        passed over with a `RuntimeWarning`. `EngineError`: no call is whole, or they
        are of another plan.
        """
        names, reasons = self._names(folder), []
        for number in sorted(names, reverse=True):
            try:
                call = self._read(folder, names[number])
                result = use(call)
            except (LookupError, OSError, TypeError, ValueError) as error:
                reasons.append(f"{folder.location(names[number])} ({error})")
                continue
            if reasons:
                warnings.warn(
                    f"The results of calls cannot be used: {', '.join(reasons)}. What "
                    f"call {number} returned is used.",
                    RuntimeWarning,
                    stacklevel=3,
                )
            self._ended(call)
            return call, result
        if reasons:
            raise EngineError(
                f"The results of no call can be used: {', '.join(reasons)}. Copy the "
                "files again from where they are whole, or remove them to start from "
                "the beginning."
            )
        return None

    def check(self, folder: _storage.Folder) -> str:
        """Return the fingerprint of the latest call of this runner; none: "".

        `EngineError`: the folder has calls that are not those of this runner.
        """
        names = self._names(folder)
        if (latest := max(names, default=0)) > self.number:
            where = folder.location("").rstrip("/")
            raise EngineError(
                f"The checkpoint in {where} has the results of {latest} calls, and "
                f"this driver has made or restored {self.number}. Begin with what "
                "run.restore() returns, or give another folder, or remove this one."
            )
        return self._fingerprint

    def save(
        self,
        folder: _storage.Folder,
        fingerprint: str,
        outputs: Entry,
        staying: list[Entry],
    ) -> None:
        """Write the results of a call, then remove what only older calls name."""
        entries = {"plan": [np.frombuffer(self._plan.encode(), np.uint8)]}
        entries["outputs"] = outputs
        entries |= {f"staying.{i}": entry for i, entry in enumerate(staying)}
        call = SavedCall(self.number + 1, fingerprint, outputs, staying)
        name = f"call-{call.number:09}"
        try:
            folder.write(name, encoded(fingerprint, entries))
            self._ended(call)
            self._clean(folder)
        except OSError as error:
            raise EngineError(
                f"The results of a call cannot be saved in {folder.location(name)}: "
                f"{error}. Free space there, or make it writable, and make the same "
                "call again."
            ) from error

    def _ended(self, call: SavedCall) -> None:
        self.number, self._fingerprint = call.number, call.fingerprint
        names = {f"slices-{x}" for entry in call.staying for x in digests_of(entry)}
        self._named[call.number] = names

    def _clean(self, folder: _storage.Folder) -> None:
        calls = self._names(folder)
        kept: set[str] = set()
        for number in sorted(calls)[-_KEPT:]:
            # One that this process has not used, as it was damaged, names nothing.
            kept |= {calls[number], *self._named.get(number, ())}
        self._named = {i: x for i, x in self._named.items() if calls.get(i) in kept}
        ours = lambda name: _CALL.fullmatch(name) or _SLICES.fullmatch(name)
        gone = [x for x in folder.names() if x not in kept and ours(x)]
        # At once: of an object store each takes a while, and workers have left many.
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            list(pool.map(folder.remove, gone))

    def _names(self, folder: _storage.Folder) -> dict[int, str]:
        return {int(m[1]): m[0] for m in map(_CALL.fullmatch, folder.names()) if m}

    def _read(self, folder: _storage.Folder, name: str) -> SavedCall:
        fingerprint, entries = decoded(folder.read(name))
        if bytes(entries.pop("plan")[0]).decode() != self._plan:
            raise EngineError(
                f"{folder.location(name)} has the results of another plan. Give "
                "another folder, or remove it."
            )
        outputs = entries.pop("outputs")
        staying = [entries[f"staying.{i}"] for i in range(len(entries))]
        number = int(name.rpartition("-")[2])
        return SavedCall(number, fingerprint, outputs, staying)
