"""Temporary folders that end with the process, also when it gets SIGTERM.

Input: nothing. Output: a new folder, registered for removal.

Python's own reaction to SIGTERM is to end at once: neither `finally` nor `atexit` runs.
While there is a folder, the signal raises SystemExit instead, as it does where Ray is
used.

Invariants: a handler that the program has set itself is left alone, and the default one
is back when the last folder is gone. A forked process removes its own folders only.

Sharp edges: signal handlers can be set in the main thread only: a folder that another
thread makes is removed on SIGTERM only while the main thread has made one too. SIGKILL
leaves it in any case.
"""

import atexit
import os
import shutil
import signal
import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType

_folders = set[Path]()


def make() -> Path:
    """Make a new temporary folder, which is removed when the process ends.

    So that SIGTERM removes it, too, a handler that raises `SystemExit` is set, if this
    is the main thread and the signal has its default handler.
    """
    # Also if there is a folder: another thread may have made it, without a handler.
    if threading.current_thread() is threading.main_thread():
        # A program's own handler knows better what to do.
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, _exit)
    path = Path(tempfile.mkdtemp(prefix="drjax-"))
    _folders.add(path)
    return path


def remove(path: Path) -> None:
    """Remove a folder that `make` returned, with all files in it.

    After the last folder, SIGTERM has its default handler again.
    """
    # Workers that are just ending may still write there.
    shutil.rmtree(path, ignore_errors=True)
    _folders.discard(path)
    if not _folders and threading.current_thread() is threading.main_thread():
        if signal.getsignal(signal.SIGTERM) is _exit:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _exit(number: int, frame: FrameType | None) -> None:
    """Handle SIGTERM: raise `SystemExit`, so that `atexit` removes the folders."""
    sys.exit(128 + number)  # as a shell reports a process that a signal ended


@atexit.register
def _remove_all() -> None:
    """Remove all folders that `make` returned."""
    for path in [*_folders]:
        remove(path)


# The folders are the parent's, which goes on using them; Windows cannot fork.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_folders.clear)
