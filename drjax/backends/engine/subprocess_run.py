"""A function in a process of its own, with a log: what hangs can be ended.

An error in any of its threads ends the process: Beam's local runner, for one, waits for
ever when a worker dies.

It ends with the process that started it, also if that is killed.

    python -m drjax.backends.engine.subprocess_run FILE PARENT
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
from typing import Any

import cloudpickle

# So that the next process need not compile again what this one did.
_COMPILED = {
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}


class Own:
    """A function that runs there: a `drjax.backends.engine.file_exchange.Run`."""

    def __init__(self, fn: Callable[[], None], folder: Path):
        path, self._log = folder / "function", folder / "log"
        self._why = folder / "error"
        self._why.unlink(missing_ok=True)
        path.write_bytes(cloudpickle.dumps(fn))
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, path, str(os.getpid())],
                stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={"JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"), **_COMPILED,
                     **os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )  # fmt: skip

    def wait(self, seconds: float) -> bool:
        """Wait so long; whether it has ended."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def error(self) -> str | None:
        """Why it failed; None if it did not."""
        if self._process.returncode == 0:
            return None
        if self._why.exists():
            return self._why.read_text()
        log = self._log.read_text(errors="replace")
        return f"exit status {self._process.returncode}: {log[-2000:]}"

    def end(self) -> None:
        """End it and its workers."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()


class Here:
    """The same in a thread of this process, for what can neither die nor hang."""

    def __init__(self, fn: Callable[[], None], folder: Path):
        self._failed: Exception | None = None
        self._fn = fn
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._fn()
        except Exception as error:
            self._failed = error

    def wait(self, seconds: float) -> bool:
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def error(self) -> str | None:
        return None if self._failed is None else str(self._failed)

    def end(self) -> None:
        self._thread.join()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(0, signal.SIGKILL)  # and the workers


def _main(path: Path, parent: int) -> None:
    threading.Thread(target=_end_with, args=[parent], daemon=True).start()
    told: list[str] = []

    def failed(kind: type, error: BaseException | None, trace: Any) -> None:
        traceback.print_exception(kind, error, trace)
        told.append(f"{kind.__name__}: {error}".strip(": "))
        if len(told) > 1:  # the first waits for what others have to say
            return
        time.sleep(2)
        path.with_name("error").write_text("; ".join(told))
        sys.stderr.flush()
        os._exit(1)  # Beam would wait for a worker that is gone

    sys.excepthook = failed
    threading.excepthook = lambda args: failed(*args[:3])
    cloudpickle.loads(path.read_bytes())()


if __name__ == "__main__":
    _main(Path(sys.argv[1]), int(sys.argv[2]))
