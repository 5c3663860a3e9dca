"""A function in a process of its own, with a log: a run that hangs can be ended.

Input: a function and a folder. Output: `wait`, `error` and `end` of a
`drjax.engines.beam.file_exchange.Run`.

Invariants: an error in any of its threads ends the process: Beam's local runner, for
one, waits for ever when a worker dies. The process ends with the one that started it,
also if that is killed.

Sharp edges: the function is pickled by cloudpickle, so modules are imported again
there. A `ThreadRun` cannot be ended, only waited for.

    python -m drjax.engines.beam.subprocess_run FILE PARENT
"""

# pyright: reportMissingImports=false

import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import cloudpickle

# So that the next process need not compile again what this one did.
# By default JAX stores only what takes at least a second to compile.
_CACHE_SETTINGS = {
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}


class SubprocessRun:
    """A function that runs in a new process, which can be killed with its workers.

    It is a `drjax.engines.beam.file_exchange.Run`; the constructor starts it. The
    local folder gets the pickled function, the log, the text of an error and compiled
    code.
    """

    def __init__(self, fn: Callable[[], None], folder: Path):
        path, self._log = folder / "function", folder / "log"
        self._error_file = folder / "error"
        # Of an earlier run in this folder.
        self._error_file.unlink(missing_ok=True)
        path.write_bytes(cloudpickle.dumps(fn))
        environment = {
            "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
            **_CACHE_SETTINGS,
            # Later than the settings above: those of the user replace them.
            **os.environ,
            # What the driver can import, the process can: the function is pickled by
            # the names of its modules.
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, path, str(os.getpid())],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # so that `end` can kill the workers with it
                env=environment,
            )

    def wait(self, seconds: float) -> bool:
        """Wait for the process for at most `seconds`; return whether it has ended."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def error(self) -> str | None:
        """Return why the function failed, as text; None if it did not.

        The process must have ended. The text is what the function raised, or the exit
        status and the end of the log.
        """
        if self._process.returncode == 0:
            return None
        if self._error_file.exists():
            return self._error_file.read_text()
        # It was killed, or ended before it could write the reason.
        log = self._log.read_text(errors="replace")
        return f"exit status {self._process.returncode}: {log[-2000:]}"

    def end(self) -> None:
        """Kill the process and its workers, and wait until it has ended."""
        try:
            # The whole group: workers of the runner would outlive its process.
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()


class ThreadRun:
    """A function that runs in a thread of this process; it can only be waited for.

    It is a `drjax.engines.beam.file_exchange.Run`, whose `end` waits; the
    constructor starts it. The folder is not used: `SubprocessRun` needs it.
    """

    def __init__(self, fn: Callable[[], None], folder: Path):
        self._error: Exception | None = None
        self._fn = fn
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        """Call the function in the new thread, and store its exception for `error`."""
        try:
            self._fn()
        except Exception as error:
            self._error = error

    def wait(self, seconds: float) -> bool:
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def error(self) -> str | None:
        return None if self._error is None else str(self._error)

    def end(self) -> None:
        self._thread.join()


def _end_with(parent: int) -> None:
    """Wait for the end of the parent process, then kill this one and its workers."""
    # A process whose parent dies gets another parent, without a signal.
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(0, signal.SIGKILL)  # and the workers


def _main(path: Path, parent: int) -> None:
    """Run the pickled function in the file `path`: entry point of a `SubprocessRun`.

    If the function or one of its threads raises, the process ends with status 1, and
    the reason is written to the file `error` in the folder of `path`. It is killed when
    the process `parent` ends.
    """
    threading.Thread(target=_end_with, args=[parent], daemon=True).start()
    messages: list[str] = []

    def failed(
        kind: type[BaseException],
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        traceback.print_exception(kind, error, trace)
        messages.append(f"{kind.__name__}: {error}".strip(": "))
        if len(messages) > 1:  # the first waits for what others have to say
            return
        # Errors of workers come within moments of each other: all are of interest.
        time.sleep(2)
        path.with_name("error").write_text("; ".join(messages))
        sys.stderr.flush()
        os._exit(1)  # Beam would wait for a worker that is gone

    sys.excepthook = failed
    threading.excepthook = lambda args: failed(*args[:3])
    cloudpickle.loads(path.read_bytes())()


if __name__ == "__main__":
    _main(Path(sys.argv[1]), int(sys.argv[2]))
