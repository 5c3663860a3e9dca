"""A pipeline in a process of its own, with a log: a runner that hangs can be ended.

Beam's local runner waits for ever when one of its workers dies; here that ends it.

    python -m drjax.backends.beam.process FILE
"""

# pyright: reportMissingImports=false

import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import cloudpickle


class Run:
    """A pipeline that runs; `error`: why it failed, in the end."""

    def __init__(self, pipeline: Any, folder: Path):
        path, self._log = folder / "pipeline", folder / "log"
        self._why = folder / "error"
        self._why.unlink(missing_ok=True)
        path.write_bytes(cloudpickle.dumps(pipeline))
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "drjax.backends.beam.process", path],
                stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
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
    """The same in this process, by a runner that has no workers which could die."""

    def __init__(self, pipeline: Any, folder: Path):
        self._failed: Exception | None = None
        self._pipeline = pipeline
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._pipeline.run()
        except Exception as error:
            self._failed = error

    def wait(self, seconds: float) -> bool:
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def error(self) -> str | None:
        return None if self._failed is None else str(self._failed)

    def end(self) -> None:
        self._thread.join()


def _main(path: Path) -> None:
    told: list[str] = []

    def failed(kind: type, error: BaseException | None, trace: Any) -> None:
        traceback.print_exception(kind, error, trace)
        told.append(f"{kind.__name__}: {error}".strip(": "))
        if len(told) > 1:  # the first waits for what others have to say
            return
        time.sleep(1)
        path.with_name("error").write_text("; ".join(told))
        sys.stderr.flush()
        os._exit(1)  # Beam would wait for a worker that is gone

    sys.excepthook = failed
    threading.excepthook = lambda args: failed(*args[:3])
    cloudpickle.loads(path.read_bytes()).run()


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
