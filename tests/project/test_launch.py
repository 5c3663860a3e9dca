"""Launchers of several processes: each starts the same run, with the same losses.

Slurm and XPK are replaced by stubs, which start two processes on this machine as these
do on two hosts.

Covers: examples.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "examples" / "launch"
SCRIPTS = sorted(LAUNCH.glob("*.sh"))
# Two tasks on one node, and the variables by which JAX finds them.
SRUN = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do shift; done
export SLURM_JOB_ID=$$ SLURM_STEP_NODELIST=localhost SLURM_NTASKS=2
export SLURM_STEP_NUM_NODES=1
SLURM_PROCID=0 SLURM_LOCALID=0 "$@" &
SLURM_PROCID=1 SLURM_LOCALID=1 "$@"
wait $!
"""
# The command of a workload, on two local processes instead of on a cluster's hosts.
XPK = """#!/usr/bin/env bash
[[ "$1 $2" == "workload create" ]] || exit 1
while [[ $1 != --command ]]; do shift; done
run=${2#*&& }
[[ $run == "python -m examples.launch.train --cluster auto"* ]] || exit 1
exec bash examples/launch/local.sh ${run#*--cluster auto}
"""


def launch(script: str, folder: Path, **variables: str) -> str:
    """What a launcher prints, with stubs of its tools."""
    for name, text in {"srun": SRUN, "xpk": XPK}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o700)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    env |= {"PATH": f"{folder}:{env['PATH']}", "PYTHON": sys.executable}
    env |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"} | variables
    done = subprocess.run(
        ["bash", str(LAUNCH / script), "--rounds", "3"],
        cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.name)
def test_scripts_parse_and_start_the_same_module(path):
    subprocess.run(["bash", "-n", str(path)], check=True)
    text = path.read_text()
    assert text.startswith("#!/usr/bin/env bash\n") and "\nset -euo pipefail\n" in text
    assert "-m examples.launch.train" in text


@pytest.mark.slow
def test_all_launchers_train_alike(tmp_path):
    outputs = {
        "one process": launch("local.sh", tmp_path, PROCESSES="1", DEVICES="4"),
        "local": launch("local.sh", tmp_path),
        "slurm": launch("slurm.sh", tmp_path),
        "xpk": launch("xpk.sh", tmp_path, CLUSTER="a", WORKLOAD="b"),
    }
    losses = {}
    for name, text in outputs.items():
        processes = 1 if name == "one process" else 2
        line = re.search(
            rf"^{processes} processes, 4 devices, losses (.*)$", text, re.M
        )
        assert line, (name, text)
        losses[name] = [float(x) for x in line[1].split()]
    first = losses.pop("one process")
    assert len(first) == 3 and first[-1] < first[0]
    for name, values in losses.items():
        assert values == pytest.approx(first, rel=1e-5), name
