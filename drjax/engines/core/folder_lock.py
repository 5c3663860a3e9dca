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
from typing import Any, Literal

from drjax._storage import Folder, LocalFolder

NAME = ".drjax-lock"
RENEWAL = 10.0  # seconds between two writings of a lease
EXPIRY = 60.0  # seconds without one, after which a lease has ended

_own_tokens: set[str] = set()  # of the leases of this process
_open_files: set[int] = set()  # of the locks of this process


class LockedError(Exception):
    """Another driver has the lock; the text says which process."""


class Lock:
    """A lock of the operating system (`flock`) on a folder's lock file.

    It is held from construction until `release`, or until this process ends. `number`
    is the descriptor of the lock file, which is open and locked.

    Attributes:
      lost: Always False: unlike a `Lease`, it cannot be lost to another driver.
    """

    lost = False

    def __init__(self, folder: Folder, number: int):
        self._folder, self._number = folder, number
        _open_files.add(number)

    def release(self) -> None:
        """Unlock the folder: remove the lock file, then unlock and close it."""
        with contextlib.suppress(OSError):
            # Before it is unlocked: whoever gets the lock then sees that it is gone.
            self._folder.remove(NAME)
        _open_files.discard(self._number)
        os.close(self._number)


def _close_in_child() -> None:
    """Close the lock files that a forked process has inherited; runs in that process.

    A lock of the operating system ends when all descriptors of its file are closed:
    without this the locks would outlive the parent. The parent's leases are forgotten.
    """
    # Closed, not unlocked: both processes share one lock, and `LOCK_UN` in the child
    # would release the parent's.
    for number in _open_files:
        with contextlib.suppress(OSError):
            os.close(number)
    _open_files.clear()
    _own_tokens.clear()


# Ray and multiprocessing fork; Windows cannot.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


def acquire(folder: Folder) -> "Lock | Lease":
    """Lock a folder for this process, without waiting for another live driver.

    If a `Lease` of a driver on another machine is in the folder, this waits for up to
    `EXPIRY` seconds to see whether that driver renews it. The result is a `Lock` for a
    local folder; a `Lease` if it is remote, or if its file system has no file locks. A
    `LockedError` is raised if another driver has locked it, and an `OSError` if it
    cannot be used.
    """
    if isinstance(folder, LocalFolder):
        number = _locked_file(folder.path / NAME)
        if number is not None:
            return Lock(folder, number)
    return Lease(folder)


def _locked_file(path: Path) -> int | None:
    """Open and lock a file without waiting, and write this process to it as the owner.

    It is created if it does not exist. The result is its descriptor; None if the
    operating system or the file system has no file locks. A `LockedError` is raised if
    another process has locked it.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        return None
    while True:
        number, created = _open_or_create(path)
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
            if created:  # a lease would wait for whoever has it
                path.unlink(missing_ok=True)
            return None
        if is_same:
            break
        os.close(number)
    with contextlib.suppress(OSError):  # a full disk; the text is only for people
        os.ftruncate(number, 0)
        os.write(number, json.dumps(_owner("")).encode())
    return number


def _open_or_create(path: Path) -> tuple[int, bool]:
    """Open a file to read and write; return its descriptor, and whether it is new.

    It is created if it does not exist. It is not truncated before it is locked: its
    text names the holder, for the error.
    """
    flags = os.O_RDWR | os.O_CLOEXEC
    while True:  # another driver may create or remove it in between
        with contextlib.suppress(FileExistsError):
            return os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o644), True
        with contextlib.suppress(FileNotFoundError):
            return os.open(path, flags), False


class Lease:
    """A lock file that its holder renews every `RENEWAL` seconds, until `release`.

    It locks folders whose file system has no file locks. The constructor acquires it,
    which may take up to `EXPIRY` seconds, and starts a thread that renews it; it raises
    a `LockedError` if another driver has the lease.

    Attributes:
      lost: Whether another driver has taken the lease.
    """

    lost = False

    def __init__(self, folder: Folder):
        self._folder, self._renewals = folder, 0
        self._owner = _owner(uuid.uuid4().hex)
        # Before the file is there: a thread that reads it asks whether its owner lives.
        _own_tokens.add(self._owner["token"])
        try:
            self._acquire()
        except BaseException:
            _own_tokens.discard(self._owner["token"])
            raise
        self._released = threading.Event()
        # In a thread, as a round may take longer than the lease.
        self._thread = threading.Thread(target=self._renew, daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Stop renewing, and remove the lease unless another driver has taken it."""
        self._released.set()
        # Else the thread could write the file once more after it was removed.
        self._thread.join()
        _own_tokens.discard(self._owner["token"])
        with contextlib.suppress(OSError):
            # Another driver's lease must not be removed.
            if not self.lost and self._is_own():
                self._folder.remove(NAME)

    def _acquire(self) -> None:
        """Write the file of this lease to the folder, once no other driver has a lease.

        A `LockedError` is raised if another driver has one, or has written one at the
        same time.
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
        """Wait until another driver's lease on the folder has ended.

        It has ended already if its process on this machine is dead, or if the file is
        gone. If the state of its process is unknown, as on another machine, the lease
        ends when its file has not changed for `EXPIRY` seconds, or is removed. A
        `LockedError` is raised if the other driver lives: its process does, or the file
        has changed.
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
        """Write the lease file every `RENEWAL` seconds; runs in a thread of its own.

        It returns after `release`. If the file is gone or is another driver's, it sets
        `lost` to True and returns. A file that cannot be read or written is tried again
        later.
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
        """Return whether the folder's lease file is there, and is this lease's."""
        owner = self._read()
        return owner is not None and owner.get("token") == self._owner["token"]

    def _read(self) -> dict[str, Any] | None:
        """Read the lease file: `_owner` and `renewals` in a dict; None if it is gone.

        It is {} if the content is no JSON object.
        """
        try:
            return _parse(self._folder.read(NAME))
        except FileNotFoundError:
            return None

    def _text(self) -> bytes:
        """Return the content of this lease's file, JSON: its owner and its renewals."""
        # The count changes the content: by that other drivers notice a renewal, without
        # comparing clocks.
        return json.dumps({**self._owner, "renewals": self._renewals}).encode()


# ---------------------------------------------------------------------------------
# Who has a lock


def _owner(token: str) -> dict[str, Any]:
    """Describe this process as the owner of a lock, as JSON data for the lock file.

    `process` is the process id, `host` the host name, `machine` a text for the scope in
    which process ids are unique, `start` the time at which the process started, as text
    or None if not known, and `token` a unique text for a lease, empty for a lock of the
    operating system.
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
    """Parse the content of a lock file; {} if it is no JSON object."""
    try:
        owner = json.loads(data)
    except ValueError:
        return {}
    return owner if isinstance(owner, dict) else {}


def _describe(owner: dict[str, Any] | None) -> str:
    """Return the process id and host name of a lock's owner, as text for errors.

    It is "another process" if `owner`, the content of the lock file, is None or {}.
    """
    if not owner:
        return "another process"
    return f"process {owner.get('process')} on {owner.get('host')}"


def _machine() -> str:
    """Return text that identifies the scope in which process ids are unique.

    It has the host name and, on Linux, the id of the boot and the PID namespace, which
    differs between containers.
    """
    # Process ids are unique in one boot of one container only.
    parts = [platform.node()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


def _start_time(pid: int) -> str | None:
    """Return the time at which a process started, to tell apart processes with one id.

    It is in clock ticks since boot, as text from `/proc`; None if there is no such
    process, or the system has no `/proc`.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # `starttime`, field 22 of proc(5), counted from field 3 behind the program's name,
    # which may have spaces.
    return text.rpartition(")")[2].split()[19]


def _state(owner: dict[str, Any] | None) -> Literal["alive", "dead", "unknown"]:
    """Return the state of the process that has a lease, from the content of its file.

    If the file is gone, `owner` is None and the process counts as dead. The state is
    unknown for a process on another machine. A lease of this process itself is alive
    until its `release`, and dead afterwards.
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
        # The process exists, but belongs to another user.
        pass
    return "alive"
