"""Training under a steady rate of failures ends with the right bits.

Covers: drjax.engines.ray.adapter, drjax.engines.core.saved_calls.
"""

import subprocess
import sys
import time

import pytest

from tests.engines.ray.conftest import MARKS
from tests.helpers import soak
from tests.helpers.cases import some
from tests.helpers.conformance import ROOT
from tests.helpers.run_python import HANGS

pytestmark = MARKS


@pytest.fixture
def address(new_cluster, monkeypatch, tmp_path_factory):
    """That of a cluster, which outlives the drivers."""
    if sys.dont_write_bytecode:
        # Else each process that starts would compile all modules of JAX: 3 seconds.
        monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
        folder = str(tmp_path_factory.mktemp("bytecode"))
        monkeypatch.setenv("PYTHONPYCACHEPREFIX", folder)
    head = {"num_cpus": soak.WORKERS, "include_dashboard": False}
    cluster = new_cluster(initialize_head=True, head_node_args=head)
    yield cluster.address
    cluster.shutdown()


@pytest.mark.parametrize("failures", some([6, 200], 6))
def test_failures_at_a_steady_rate(address, tmp_path, failures, capsys):
    command = [sys.executable, "-m", "tests.helpers.soak", tmp_path, address]
    begin, busy, ended, bits = time.monotonic(), 0.0, 0, ""
    while not bits:
        driver = subprocess.Popen(
            [*map(str, command), str(failures), "7"],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        out, err = driver.communicate(timeout=HANGS)
        assert driver.returncode in (0, -9), err
        for line in out.splitlines():
            match line.split():
                case "restored", calls:
                    # What has returned is not lost, and nothing ends twice.
                    assert int(calls) - ended in (0, 1)
                    ended = int(calls)
                case "ended", calls, seconds:
                    assert int(calls) == ended + 1
                    busy, ended = busy + float(seconds), int(calls)
                case "bits", _, bits:
                    pass
    assert bits == soak.expected_bits(ended)
    kinds = (tmp_path / "failures").read_text().split()
    assert len(kinds) >= failures and "driver" in kinds
    took = time.monotonic() - begin
    of_drivers, possible = kinds.count("driver"), soak.WORKERS * took
    with capsys.disabled():
        print(
            f"\n{len(kinds)} failures, {of_drivers} of drivers, in {took:.0f} s. "
            f"Goodput of {ended} calls: {busy / possible:.2f}, as {busy:.0f} seconds "
            f"of work in {possible:.0f} that the workers have"
        )
