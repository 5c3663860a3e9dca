"""Two processes with four devices each train as one process with eight devices.

Covers: drjax._sharding.layout.
"""

import os
import pathlib
import socket
import subprocess
import sys

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[2]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def train(processes: int, devices: int, folder: pathlib.Path) -> list[dict]:
    """Run the worker in so many processes; returns what each of them saved."""
    port = free_port()
    env = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    outputs = [folder / f"{processes}-{i}.npz" for i in range(processes)]
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.helpers.distributed_worker"]
            + [str(v) for v in (i, processes, port, devices, output)],
            cwd=ROOT,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )  # fmt: skip
        for i, output in enumerate(outputs)
    ]
    try:
        for worker in workers:
            text, _ = worker.communicate(timeout=200)
            assert worker.returncode == 0, text.decode()
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
    result = []
    for output in outputs:
        with np.load(output) as file:
            result.append(dict(file))
    return result


@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path):
    [one] = train(1, 8, tmp_path)
    assert one["losses"][-1] < one["losses"][0]
    assert one["total"] == 45.0
    for result in train(2, 4, tmp_path):
        assert result.keys() == one.keys()
        for name in one:
            np.testing.assert_allclose(result[name], one[name], rtol=1e-6, atol=1e-6)
