"""Recipes for Ray clusters: what KubeRay and Slurm need is there, and fits together.

`tests/engines/ray/test_ray_cluster.py` runs them.

Covers: examples.
"""

import re
import shlex
import subprocess
from pathlib import Path

import numpy as np
import tyro
import yaml

import drjax
from examples.cluster import train

CLUSTER = Path(train.__file__).parent


def test_kuberay():
    """The fields that KubeRay's RayJob requires, and GPUs for all workers."""
    job = yaml.safe_load((CLUSTER / "kuberay.yaml").read_text())
    assert job["apiVersion"] == "ray.io/v1" and job["kind"] == "RayJob"
    assert re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", job["metadata"]["name"])
    python, flag, module, *arguments = shlex.split(job["spec"]["entrypoint"])
    assert (python, flag, module) == ("python", "-m", "examples.cluster.train")
    config = tyro.cli(train.Config, args=arguments)
    cluster = job["spec"]["rayClusterSpec"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", cluster["rayVersion"])
    gpus, images = 0, set()
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        # A map of texts: a number is refused by Kubernetes.
        params = group["rayStartParams"]
        assert all(type(x) is str for x in params.values())
        (container,) = group["template"]["spec"]["containers"]
        assert {"name", "image", "resources"} <= container.keys()
        limits = container["resources"]["limits"]
        assert limits == container["resources"]["requests"]
        assert all(type(x) is str for x in limits.values())
        images.add(container["image"])
        gpus += int(limits.get("nvidia.com/gpu", 0)) * group.get("replicas", 1)
    assert len(images) == 1  # of one Python, Ray and drjax
    for group in cluster["workerGroupSpecs"]:
        assert group["groupName"]
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    assert gpus == config.workers * config.devices


def test_slurm():
    """Its directives come before any command; shellcheck is part of the lint."""
    path = CLUSTER / "slurm.sh"
    subprocess.run(["bash", "-n", str(path)], check=True)
    first, *lines = path.read_text().splitlines()
    assert first == "#!/usr/bin/env bash"
    commands = [i for i, x in enumerate(lines) if not x.startswith("#")]
    assert lines[commands[0]] == "set -euo pipefail"
    directives = [i for i, x in enumerate(lines) if x.startswith("#SBATCH --")]
    assert directives and max(directives) < commands[0]
    flags = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", "\n".join(lines), re.M))
    assert flags["ntasks-per-node"] == "1"  # one node of Ray on each host
    gpus = int(flags["nodes"]) * int(flags["gpus-per-node"])
    (usage,) = [x for x in lines if "sbatch examples" in x]
    arguments = usage.split("slurm.sh ")[1].split("  #")[0]
    config = tyro.cli(train.Config, args=shlex.split(arguments))
    assert gpus == config.workers * config.devices


def test_the_run_on_one_device_and_on_several():
    expected, model = [], train.first_model()
    results = []
    for devices in (1, 4):
        plan = train.make_plan(train.Config(devices=devices, groups=4))
        assert plan.group_mesh == ((("model", 4),) if devices > 1 else ())
        with drjax.backends.in_process.compile(plan) as run:
            results.append(run(model))
    expected, sharded = results
    np.testing.assert_allclose(sharded[0]["up"], expected[0]["up"], atol=1e-6)
    np.testing.assert_allclose(sharded[1], expected[1], rtol=1e-5)
