"""Temporary folders of a driver that is asked to end.

Covers: drjax.engines.beam.temporary_folders, drjax.engines.beam.file_exchange.
"""

import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from drjax.engines.beam import temporary_folders
from drjax.engines.beam.file_exchange import FileExchange

TERMINATED = """
import os, signal, sys, time
from drjax.engines.beam.file_exchange import FileExchange

own = sys.argv[1] == "own"
if own:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
first, second = (FileExchange(1, files=None) for _ in range(2))
for each in (first, second):
    each.open()
second.close()
print(first._own_folder, flush=True)
try:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
finally:
    assert first._own_folder.exists()
"""


@pytest.mark.sampled
@pytest.mark.parametrize("handler, status", [("none", 143), ("own", 7)])
def test_temporary_folders_are_removed_after_sigterm(handler, status):
    done = subprocess.run(
        [sys.executable, "-c", TERMINATED, handler], capture_output=True, text=True
    )
    assert done.returncode == status, done.stderr
    folder = Path(done.stdout.strip())
    assert folder.name.startswith("drjax-") and not folder.exists()


def test_the_handler_of_sigterm_is_there_while_a_folder_is():
    before = signal.getsignal(signal.SIGTERM)
    files: Any = None
    engine = FileExchange(1, files)
    engine.open()
    if before is signal.SIG_DFL:
        assert signal.getsignal(signal.SIGTERM) is not before
    engine.close()
    assert signal.getsignal(signal.SIGTERM) is before


FORKED = """
import os, sys
from drjax.engines.beam import temporary_folders

folder = temporary_folders.make()
if os.fork() == 0:
    own = temporary_folders.make()
    print(own, flush=True)
    sys.exit(0)
os.wait()
assert folder.exists()
"""


def test_a_forked_process_removes_only_its_own_folders():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKED], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert not Path(done.stdout.strip()).exists()


def test_sigterm_removes_folders_of_other_threads_too():
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        pytest.skip("SIGTERM has a handler")
    folders = []
    thread = threading.Thread(target=lambda: folders.append(temporary_folders.make()))
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    folders.append(temporary_folders.make())
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    for folder in folders:
        temporary_folders.remove(folder)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
