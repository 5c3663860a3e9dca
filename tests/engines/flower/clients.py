"""Flower's clients for tests: in this process, and as real processes on loopback."""

# pyright: reportMissingImports=false

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from drjax.backends import flower
from tests.helpers.conformance import free_ports, wait_for
from tests.helpers.run_python import HANGS

ROOT = Path(__file__).parents[3]
BIN = Path(sys.executable).parent


class Grid:
    """Flower's grid, with clients in this process; node i + 100 has group i.

    Attributes:
      silent: Groups whose clients answer queries only.
      mute: Groups whose clients never answer.
      contexts: Of each group that answered its client's Flower context.
    """

    def __init__(self, load, n, silent=(), mute=(), initial=None):
        self.app, self.nodes = (
            flower.client(load, initial),
            [i + 100 for i in range(n)],
        )
        self.silent, self.mute = silent, mute
        self.replies: dict[str, Any] = {}
        self.contexts: dict[int, Any] = {}
        self.sent = 0

    def get_node_ids(self):
        return self.nodes

    def push_messages(self, messages):
        for message in messages:
            self.sent += 1
            number, group = f"m{self.sent}", message.metadata.dst_node_id - 100
            message.metadata.__dict__["_message_id"] = number
            query = message.metadata.message_type == "query"
            if group not in self.mute and (query or group not in self.silent):
                self.replies[number] = self.answer(message, group, query)
            yield number

    def answer(self, message, group, query):
        """The reply of the client of a group."""
        from flwr.app import Error, Message, RecordDict

        config = {"partition-id": group}
        new = SimpleNamespace(node_config=config, state=RecordDict())
        context = self.contexts.setdefault(group, new)
        try:
            return self.app(message, context)
        except Exception as error:
            return Message(Error(2, str(error)), reply_to=message)

    def pull_messages(self, numbers):
        return [self.replies.pop(x) for x in numbers if x in self.replies]

    def send_and_receive(self, messages, timeout):
        return self.pull_messages([*self.push_messages(messages)])


@pytest.fixture(autouse=True, scope="module")
def as_in_a_server_app():
    """Flower makes messages only within a run."""
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity._run_id, TaskIdentity._node_id, TaskIdentity._task_id = 1, 1, 1


class Federation:
    """A SuperLink and what connects to it, as processes that end with `close`.

    Args:
      folder: For its configuration and its logs.
      connection: Of Flower's `config.toml`, how to connect: `insecure = true`.

    Attributes:
      address: Where the SuperLink is to be.
    """

    def __init__(self, folder: Path, connection: str):
        (self.port,) = free_ports(1)
        self.address = f"127.0.0.1:{self.port}"
        (folder / "config.toml").write_text(
            f'[superlink]\ndefault = "here"\n\n[superlink.here]\n'
            f'address = "{self.address}"\n{connection}\n'
        )
        self.env = os.environ | {
            "FLWR_HOME": str(folder), "FLWR_TELEMETRY_ENABLED": "0",
            "PATH": f"{BIN}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT),
        }  # fmt: skip
        self._folder, self._logs, self._started = folder, [], []

    def start(self, *command: Any, cwd: Path | None = None) -> subprocess.Popen:
        """Start a process, with a log of its own."""
        path = self._folder / f"{len(self._started)}-{command[0]}.log"
        self._logs.append(path.open("wb"))
        process = subprocess.Popen(
            [*map(str, command)], env=self.env, cwd=cwd, stdout=self._logs[-1],
            stderr=self._logs[-1], start_new_session=True,
        )  # fmt: skip
        self._started.append(process)
        return process

    def link(self, *flags: Any, cwd: Path | None = None) -> None:
        """Start the SuperLink."""
        offline = "--disable-runtime-dependency-installation"
        self.start("flower-superlink", offline, "--port", self.port, *flags, cwd=cwd)
        wait_for(lambda: socket.socket().connect_ex(("127.0.0.1", self.port)) == 0)

    def node(self, *flags: Any, group: int, cwd: Path | None = None):
        """Start a SuperNode."""
        (port,) = free_ports(1)
        return self.start(
            "flower-supernode", "--superlink", self.address, "--port", port,
            "--node-config", f"partition-id={group}", *flags, cwd=cwd,
        )  # fmt: skip

    def run(self, *command: Any, cwd: Path | None = None) -> str:
        """What a command prints."""
        done = subprocess.run(
            [*map(str, command)], env=self.env, cwd=cwd, check=True,
            capture_output=True, text=True, timeout=HANGS,
        )  # fmt: skip
        return done.stdout

    def run_example(self, **config: Any) -> None:
        """Start a run of the example."""
        self.run_app(ROOT / "examples" / "flower", **config)

    def run_app(self, app: Path, **config: Any) -> None:
        """Start a run of the app in a folder."""
        text = " ".join(f"{k}={json.dumps(v)}" for k, v in config.items())
        self.run("flwr", "run", app, "here", "-c", text)

    def close(self) -> None:
        for process in self._started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for log in self._logs:
            log.close()


@contextlib.contextmanager
def federation(folder: Path, connection: str) -> Iterator[Federation]:
    """A `Federation` that ends with the block."""
    result = Federation(folder, connection)
    try:
        yield result
    finally:
        result.close()
