"""Locks of folders: of live and dead processes, on this machine and on others.

Covers: drjax.engines.core.folder_lock.
"""

import json
import signal
import subprocess
import sys
import threading
import time
import uuid

import fsspec
import pytest

from drjax import _storage
from drjax.engines.core import folder_lock

HOLD = """
import os, signal, sys, pathlib
from drjax import _storage
from drjax.engines.core import folder_lock
if sys.argv[2] == "lease":
    folder_lock._locked_file = lambda path: None
lock = folder_lock.acquire(_storage.LocalFolder(pathlib.Path(sys.argv[1])))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("kind", ["lock", "lease"])
def test_locks_of_processes(kind, tmp_path, monkeypatch):
    """A lock of a live process holds; that of a dead one does not, at once."""
    if kind == "lease":  # as on a disk that knows no locks
        monkeypatch.setattr(folder_lock, "_locked_file", lambda path: None)
    command = [sys.executable, "-c", HOLD, str(tmp_path), kind]
    location = _storage.LocalFolder(tmp_path)
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with pytest.raises(folder_lock.LockedError, match=f"process {process.pid} on"):
            folder_lock.acquire(location)
        process.send_signal(signal.SIGKILL)
    assert (tmp_path / folder_lock.NAME).exists()
    start = time.monotonic()
    lock = folder_lock.acquire(location)
    assert time.monotonic() - start < folder_lock.EXPIRY / 4
    lock.release()
    assert not [*tmp_path.iterdir()]


FORK = """
import os, signal, sys, pathlib
from drjax import _storage
from drjax.engines.core import folder_lock
lock = folder_lock.acquire(_storage.LocalFolder(pathlib.Path(sys.argv[1])))
if os.fork():
    signal.pause()
print("forked", flush=True)
sys.stdin.read()
"""


def test_a_forked_process_does_not_keep_the_lock_of_a_dead_one(tmp_path):
    command, pipe = [sys.executable, "-c", FORK, str(tmp_path)], subprocess.PIPE
    location = _storage.LocalFolder(tmp_path)
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "forked\n"
        with pytest.raises(folder_lock.LockedError):
            folder_lock.acquire(location)
        process.kill()
        process.wait()
        folder_lock.acquire(location).release()  # though the child lives


@pytest.fixture
def fast(monkeypatch):
    monkeypatch.setattr(folder_lock, "RENEWAL", 0.02)
    monkeypatch.setattr(folder_lock, "EXPIRY", 0.5)


OTHER = {"process": 1, "host": "elsewhere", "machine": "elsewhere", "token": "x"}


@pytest.mark.usefixtures("fast")
def test_a_lease_of_another_machine_ends_when_nobody_renews_it():
    location = _storage.RemoteFolder(f"memory://{uuid.uuid4().hex}")
    location.create(folder_lock.NAME, json.dumps(OTHER).encode())
    lock = folder_lock.acquire(location)
    lock.release()
    assert location.names() == []
    location.create(folder_lock.NAME, b"not what a lock writes")
    folder_lock.acquire(location).release()


@pytest.mark.usefixtures("fast")
def test_a_lease_of_another_machine_holds_while_it_is_renewed():
    location, done = (
        _storage.RemoteFolder(f"memory://{uuid.uuid4().hex}"),
        threading.Event(),
    )
    location.create(folder_lock.NAME, json.dumps(OTHER).encode())

    def renew():
        count = 0
        while not done.wait(0.02):
            count += 1
            location.write(
                folder_lock.NAME, [json.dumps({**OTHER, "renewals": count}).encode()]
            )

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        with pytest.raises(folder_lock.LockedError, match="process 1 on elsewhere"):
            folder_lock.acquire(location)
    finally:
        done.set()
        thread.join()


def test_a_file_system_that_cannot_create_a_file_only_if_it_is_new(monkeypatch):
    memory = fsspec.get_filesystem_class("memory")
    whole = memory.pipe_file
    monkeypatch.setattr(
        memory, "pipe_file", lambda self, path, value: whole(self, path, value)
    )
    folder = _storage.RemoteFolder(f"memory://{uuid.uuid4().hex}")
    lock = folder_lock.acquire(folder)
    with pytest.raises(folder_lock.LockedError):
        folder_lock.acquire(folder)
    lock.release()
    assert folder.names() == []
