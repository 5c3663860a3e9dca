"""Two processes compute what one process with as many devices does.

Covers: drjax._sharding.layout, drjax._sharding.group_mesh.
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


def results_of(
    module: str, processes: int, devices: int, folder: pathlib.Path
) -> list[dict]:
    """Run a module in so many processes; returns what each of them saved."""
    port = free_port()
    env = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    outputs = [folder / f"{processes}-{i}.npz" for i in range(processes)]
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", f"tests.helpers.{module}"]
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
    [one] = results_of("distributed_worker", 1, 8, tmp_path)
    assert one["losses"][-1] < one["losses"][0]
    assert one["total"] == 45.0
    for result in results_of("distributed_worker", 2, 4, tmp_path):
        assert result.keys() == one.keys()
        for name in one:
            np.testing.assert_allclose(result[name], one[name], rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_two_processes_work_on_a_group(tmp_path):
    """The bits are the same, and so is the group that is found to have failed."""
    [one] = results_of("sharded_integers", 1, 4, tmp_path)
    for result in results_of("sharded_integers", 2, 2, tmp_path):
        assert result.keys() == one.keys()
        for name in one:
            np.testing.assert_array_equal(result[name], one[name])
