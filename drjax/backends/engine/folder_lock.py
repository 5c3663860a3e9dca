"""A lock, so that one driver at a time uses a folder.

Input: a folder. Output: a `Lock` or a `Lease`, or a `LockedError` that names the
holder.

In a local folder it is a lock of the operating system on a file, which ends with its
process however that ends. Elsewhere (an object store, or a shared disk without locks)
it is a *lease*: a file that its holder writes again every few seconds.

Invariants: the file of a dead process does not block: on the same machine the process
is looked up; of another machine the lease has ended if it is not written for a while.
Clocks of machines are never compared.

Sharp edges: a lease is no lock. A driver that stops for longer than `EXPIRY` may lose
it to another; it finds out at its next renewal, which sets `lost`. A forked child must
not hold the parent's lock, so it closes the file.
"""

import contextlib
import json
import os
import platform
import signal
import threading
import time
import uuid
from pathlib import Path
from typing import Any

from drjax._storage import Folder, LocalFolder

NAME = ".drjax-lock"
RENEWAL = 10.0  # seconds between two writings of a lease
EXPIRY = 60.0  # seconds without one, after which a lease has ended

_own_tokens: set[str] = set()  # of the leases of this process
_open_files: set[int] = set()  # of the locks of this process


class LockedError(Exception):
    """Another driver has the lock; the text says which process."""


class Lock:
    """A lock of the operating system on a file, until `release`.

    Args:
      folder: The folder that is locked.
      number: The descriptor of the locked file, open.
    """

    lost = False

    def __init__(self, folder: Folder, number: int):
        self._folder, self._number = folder, number
        _open_files.add(number)

    def release(self) -> None:
        """Remove the file, then unlock and close it."""
        with contextlib.suppress(OSError):
            # Before it is unlocked: whoever gets the lock then sees that it is gone.
            self._folder.remove(NAME)
        _open_files.discard(self._number)
        os.close(self._number)


def _close_in_child() -> None:
    """Close the files of the parent's locks, in a process that was forked from it.

    Else the locks would outlive the parent.
    """
    for number in _open_files:
        with contextlib.suppress(OSError):
            os.close(number)
    _open_files.clear()
    _own_tokens.clear()


# Ray and multiprocessing fork; Windows cannot.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


def acquire(folder: LocalFolder | Any) -> "Lock | Lease":
    """Lock a folder for this process: by a `Lease` where files cannot be locked.

    Raises:
      LockedError: Another driver has locked it.
      OSError: The folder cannot be used.
    """
    if isinstance(folder, LocalFolder):
        number = _locked_file(folder.path / NAME)
        if number is not None:
            return Lock(folder, number)
    return Lease(folder)


def _locked_file(path: Path) -> int | None:
    """Open and lock a file; returns its descriptor, None where files have no locks.

    Raises:
      LockedError: Another process has locked it.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        return None
    while True:
        number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            # Never waiting: the user must hear at once that another driver has it.
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Its holder may have removed the file between our open and our lock: then
            # we have locked a file that nobody else can find.
            is_same = os.path.samestat(os.fstat(number), os.stat(path))
        except BlockingIOError:
            owner = _parse(os.read(number, 4096))
            os.close(number)
            raise LockedError(_describe(owner)) from None
        except FileNotFoundError:  # its holder removed it when it was done
            is_same = False
        except OSError:  # a file system without locks
            os.close(number)
            return None
        if is_same:
            break
        os.close(number)
    with contextlib.suppress(OSError):  # a full disk; the text is only for people
        os.ftruncate(number, 0)
        os.write(number, json.dumps(_owner("")).encode())
    return number


class Lease:
    """A lock that its holder renews, until `release`: for folders without file locks.

    Args:
      folder: The folder that is locked.

    Attributes:
      lost: Whether another driver has taken the lease.

    Raises:
      LockedError: Another driver has the lease.
      OSError: The folder cannot be used.
    """

    lost = False

    def __init__(self, folder: Folder):
        self._folder, self._renewals = folder, 0
        self._owner = _owner(uuid.uuid4().hex)
        self._acquire()
        _own_tokens.add(self._owner["token"])
        self._released = threading.Event()
        # In a thread, as a round may take longer than the lease.
        self._thread = threading.Thread(target=self._renew, daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Stop renewing, and remove the lease unless another driver has taken it."""
        self._released.set()
        self._thread.join()
        _own_tokens.discard(self._owner["token"])
        with contextlib.suppress(OSError):
            # Another driver's lease must not be removed.
            if not self.lost and self._is_own():
                self._folder.remove(NAME)

    def _acquire(self) -> None:
        """Write the lease to the folder, once no other driver has one.

        Raises:
          LockedError: Another driver has one.
        """
        try:
            self._folder.create(NAME, self._text())
        except FileExistsError:
            self._wait_for_expiry()
            self._folder.write(NAME, [self._text()])
        # Object stores have no locks: the last writer wins, and both read who it was.
        if not self._is_own():  # another driver was as fast
            raise LockedError(_describe(self._read()))

    def _wait_for_expiry(self) -> None:
        """Wait until the lease of another driver has ended, which may be so already.

        Raises:
          LockedError: That driver lives.
        """
        seen = self._read()
        state = _state(seen)
        if state == "alive":
            raise LockedError(_describe(seen))
        # By this machine's clock alone: it only watches whether the file changes.
        end = time.monotonic() + EXPIRY
        while state == "unknown" and time.monotonic() < end:
            time.sleep(RENEWAL / 4)
            now = self._read()
            if now is None:
                return
            # It was renewed, so its holder lives.
            if now != seen:
                raise LockedError(_describe(now))

    def _renew(self) -> None:
        """Write the lease every `RENEWAL` seconds; runs in a thread until `release`.

        It ends, and sets `lost`, if another driver has taken the lease.
        """
        while not self._released.wait(RENEWAL):
            with contextlib.suppress(OSError):  # the next one may succeed
                if self._is_own():
                    self._renewals += 1
                    self._folder.write(NAME, [self._text()])
                else:
                    self.lost = True
                    return

    def _is_own(self) -> bool:
        """Whether the lease that is in the folder is this one."""
        owner = self._read()
        return owner is not None and owner.get("token") == self._owner["token"]

    def _read(self) -> dict[str, Any] | None:
        """The owner of the lease in the folder; None if there is no lease."""
        try:
            return _parse(self._folder.read(NAME))
        except FileNotFoundError:
            return None

    def _text(self) -> bytes:
        """The content of the lease's file."""
        return json.dumps({**self._owner, "renewals": self._renewals}).encode()


# ---------------------------------------------------------------------------------
# Who has a lock


def _owner(token: str) -> dict[str, Any]:
    """This process as the owner of a lock, JSON data for the lock's file.

    `token` identifies a lease; it is empty for a lock of the operating system.
    """
    pid = os.getpid()
    return {
        "process": pid,
        "host": platform.node(),
        "machine": _machine(),
        "start": _start_time(pid),
        "token": token,
    }


def _parse(data: bytes) -> dict[str, Any]:
    """The owner in the content of a lock's file; {} if that is no JSON object."""
    try:
        owner = json.loads(data)
    except ValueError:
        return {}
    return owner if isinstance(owner, dict) else {}


def _describe(owner: dict[str, Any] | None) -> str:
    """The process that owns a lock, as text for errors."""
    if not owner:
        return "another process"
    return f"process {owner.get('process')} on {owner.get('host')}"


def _machine() -> str:
    """What process ids are unique in: the host, its boot and its container, as text."""
    # Process ids are unique in one boot of one container only.
    parts = [platform.node()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


def _start_time(pid: int) -> str | None:
    """When a process started, as text of the system; None if that is not known."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return text.rpartition(")")[2].split()[19]  # names of programs may hold spaces


def _state(owner: dict[str, Any] | None) -> str:
    """Whether the driver that has a lease lives: `"alive"`, `"dead"` or `"unknown"`.

    `owner` is what is in the lease's file; None, if there is no lease any more, counts
    as dead. Of a process on another machine the state is unknown.
    """
    if owner is None:
        return "dead"  # released just now
    pid = owner.get("process")
    if owner.get("machine") != _machine() or type(pid) is not int:
        return "unknown"
    # This process: another call of it may hold the lease, or have left it.
    if pid == os.getpid() and owner.get("start") == _start_time(pid):
        return "alive" if owner.get("token") in _own_tokens else "dead"
    # With the start time, as ids of processes are used again.
    if Path("/proc/self/stat").exists():
        return "alive" if _start_time(pid) == owner.get("start") else "dead"
    if not hasattr(signal, "SIGKILL"):  # Windows, where os.kill would end it
        return "unknown"
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return "dead"
    except OSError:
        pass
    return "alive"
