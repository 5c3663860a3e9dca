"""A client that was written for Google's package is satisfied with this one.

Covers: pyproject.toml, docs/howto/install.md.
"""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import drjax

REQUIREMENT = "drjax>=0.1.4"
METADATA = f"""Metadata-Version: 2.1
Name: stub-client
Version: 1.0
Requires-Dist: {REQUIREMENT}
"""
WHEEL = (
    "Wheel-Version: 1.0\nGenerator: stub\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
)
CLIENT = """
import drjax


@drjax.program(placements={"clients": 3})
def total(x):
    y = drjax.map_fn(lambda a: 2 * a, drjax.broadcast(x))
    return drjax.reduce_sum(y), drjax.reduce_mean(y), drjax.reduce_weighted_mean(y, y)
"""


@pytest.fixture
def client(tmp_path) -> Path:
    """The wheel of the client."""
    path = tmp_path / "stub_client-1.0-py3-none-any.whl"
    files = {
        "stub_client.py": CLIENT,
        "stub_client-1.0.dist-info/METADATA": METADATA,
        "stub_client-1.0.dist-info/WHEEL": WHEEL,
    }
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
        record = "".join(f"{name},,\n" for name in files)
        wheel.writestr("stub_client-1.0.dist-info/RECORD", record)
    return path


def test_the_version_satisfies_the_requirement():
    assert Requirement(REQUIREMENT).specifier.contains(drjax.__version__)


def test_pip_installs_no_other_package(client):
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--no-index",
        "--dry-run",
        client,
    ]
    done = subprocess.run(
        [*command, "--disable-pip-version-check"],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"Requirement already satisfied: {REQUIREMENT}" in done.stdout
    assert done.stdout.strip().endswith("Would install stub-client-1.0")


def test_the_client_runs(client, monkeypatch):
    monkeypatch.syspath_prepend(client)
    import stub_client  # type: ignore[import-not-found]

    assert [float(x) for x in stub_client.total(1.0)] == [6.0, 2.0, 2.0]
