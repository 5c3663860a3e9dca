"""The launcher by Ray Train: two workers train as one process does.

Covers: examples.
"""

import re

import pytest

from tests.helpers.run_python import run

pytestmark = [pytest.mark.engines, pytest.mark.slow]


def losses(*command: str) -> tuple[str, list[float]]:
    """How many processes and devices a launcher says that it has, and its losses."""
    done = run("-m", *command, "--rounds", "3")
    printed = done.stdout + done.stderr  # Ray shows what a worker prints among its logs
    line = re.search(r"(\d process\w+, \d devices), losses ([\d. ]+)", printed)
    assert line, printed
    return line[1], [float(x) for x in line[2].split()]


def test_two_workers_train_as_one_process_does():
    _, expected = losses("examples.launch.train")
    size, result = losses("examples.launch.ray_train", "--workers", "2")
    assert size == "2 processes, 2 devices"
    assert result == pytest.approx(expected, rel=1e-5) and result[-1] < result[0]
