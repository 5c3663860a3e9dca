"""Ray clusters of several nodes, on this machine: the recipes of examples/cluster.

Covers: drjax.engines.ray.adapter, examples.
"""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from drjax.backends import in_process
from examples.cluster import train
from tests.engines.ray.conftest import MARKS
from tests.helpers.conformance import ROOT
from tests.helpers.run_python import HANGS

pytestmark = [*MARKS, pytest.mark.filterwarnings("ignore::ResourceWarning")]


def losses(config):
    """Those of this process."""
    model, result = train.first_model(), []
    with in_process.compile(train.make_plan(config)) as run:
        for _ in range(config.rounds):
            model, loss = run(model)
            result.append(float(loss))
    return result


def test_workers_on_two_nodes_each_with_several_devices():
    """The code of the page."""
    engine = importlib.import_module("ray")
    page = (ROOT / "docs" / "engines" / "where_it_ends.md").read_text()
    (block,) = re.findall(r"```python cluster\n(.*?)```", page, re.S)
    config = train.Config(devices=2)
    scope: dict[str, Any] = {"plan": train.make_plan(config)}
    try:
        exec(compile(block, "where_it_ends.md", "exec"), scope)
        run, model = scope["run"], train.first_model()
        for expected in losses(config):
            model, loss = run(model)
            np.testing.assert_allclose(loss, expected, rtol=1e-5)
        where = lambda _: importlib.import_module("ray").get_runtime_context()
        nodes = engine.get(
            [
                actor.__ray_call__.remote(lambda self: where(self).get_node_id())
                for actor in run.engine._placement.workers
            ]
        )
        assert len(set(nodes)) == 2 and len(run.report.workers) == 2
        run.close()
        assert engine.is_initialized()  # the driver stays connected
    finally:
        engine.shutdown()
        if "cluster" in scope:
            scope["cluster"].shutdown()


SRUN = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do shift; done
exec "$@"
"""
SCONTROL = """#!/usr/bin/env bash
[[ "$*" == "show hostnames here" ]] && echo first
"""
# Ray's own command ends all Ray on the machine, that of other tests too.
RAY = f"""#!{sys.executable}
import os, subprocess, sys
from ray.cluster_utils import Cluster
address, nodes, words = sys.argv[3], int(sys.argv[5]), sys.argv[7:]
assert sys.argv[1:7] == [
    "symmetric-run", "--address", "first:6379", "--min-nodes", str(nodes), "--"
]
cluster = Cluster(initialize_head=True, head_node_args={{"num_cpus": 1}})
for _ in range(nodes - 1):
    cluster.add_node(num_cpus=1)
env = os.environ | {{"RAY_ADDRESS": cluster.address}}
code = subprocess.run(words, env=env, check=False).returncode
cluster.shutdown()
sys.exit(code)
"""


def test_slurm(tmp_path):
    """Stubs of Slurm's and Ray's commands start two nodes on this machine."""
    for name, text in {"srun": SRUN, "scontrol": SCONTROL, "ray": RAY}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o700)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    env |= {"PATH": f"{tmp_path}:{env['PATH']}", "PYTHON": sys.executable}
    env |= {"SLURM_JOB_NODELIST": "here", "SLURM_JOB_NUM_NODES": "2"}
    env |= {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        ["bash", "examples/cluster/slurm.sh", "--workers", "2", "--devices", "2"],
        cwd=ROOT, env=env, capture_output=True, text=True, timeout=HANGS, check=False,
    )  # fmt: skip
    line = re.search(r"^2 workers, losses (.*)$", done.stdout, re.M)
    assert line, (done.stdout, done.stderr)
    printed = [float(x) for x in line[1].split()]
    np.testing.assert_allclose(printed, losses(train.Config(devices=2)), atol=2e-6)


def test_the_command_is_that_of_ray():
    command = Path(sys.executable).with_name("ray")
    done = subprocess.run(
        [command, "symmetric-run", "--help"], capture_output=True, text=True, check=True
    )
    assert "--address ADDRESS" in done.stdout and "--min-nodes" in done.stdout
