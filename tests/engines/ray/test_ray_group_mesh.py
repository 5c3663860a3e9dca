"""Groups on several devices of Ray's workers.

Covers: drjax.engines.ray.adapter, drjax.engines.ray.actor.
"""

import numpy as np
import pytest

import drjax
from drjax.backends import ray
from drjax.engines.ray.adapter import _devices
from tests.engines.ray.conftest import MARKS
from tests.helpers import tensor_parallel
from tests.helpers.cases import some
from tests.helpers.raising import raises

pytestmark = MARKS


@pytest.fixture(scope="module")
def actors(cluster):
    """Two workers of four virtual devices each."""
    with ray.compile(tensor_parallel.plan("auto"), workers=2) as run:
        yield run.engine


@pytest.mark.parametrize("how", some(tensor_parallel.HOW, "auto"))
def test_a_transformer_equals_that_of_one_device(how, actors, tmp_path):
    tensor_parallel.plan(how).save(tmp_path / "plan.drjax")
    run = ray.compile(drjax.load_plan(tmp_path / "plan.drjax"), workers=actors)
    args = tensor_parallel.parameters(), tensor_parallel.data()
    for _ in range(2):
        tensor_parallel.check(run(*args))
    assert len(run.report.workers) == 2


def test_what_workers_lack_is_said_when_a_plan_is_compiled(cluster, actors):
    plan = tensor_parallel.plan("auto")
    text = (
        "The plan runs each group on a mesh of model=4, which needs 4 devices, and "
        "each worker has 2. Pass devices_per_group=4."
    )
    raises(drjax.MeshError, text, ray.compile, plan, devices_per_group=2)
    few = ray.Actors(1)
    raises(drjax.MeshError, text.replace("2.", "1."), ray.compile, plan, workers=few)
    options = {"num_cpus": 0, "runtime_env": {"env_vars": {"JAX_NUM_CPU_DEVICES": "3"}}}
    text = (
        "which needs 4 devices, and a worker on cpu has 3. Give it more: by "
        'ray_options, as {"num_gpus": 4}, with a JAX that uses GPUs; on CPUs by '
        "JAX_NUM_CPU_DEVICES in the env_vars of its runtime_env."
    )
    raises(drjax.MeshError, text, ray.compile, plan, workers=1, ray_options=options)
    text = "devices_per_group must be an integer from 1, got 0."
    raises(drjax.DrjaxValueError, text, ray.compile, plan, devices_per_group=0)
    mean = drjax.program(clients=4)(drjax.reduce_mean)
    plan = drjax.make_plan(mean)(np.zeros(4, np.float32))
    text = "mean runs each group on one device, got devices_per_group=4. Shard the work"
    text = text.replace("mean", plan.name)
    raises(drjax.DrjaxValueError, text, ray.compile, plan, devices_per_group=4)


def test_devices_are_those_of_the_cluster():
    assert _devices(4, {"CPU": 2.0, "GPU": 8.0}) == ({"num_gpus": 4}, {})
    assert _devices(4, {"TPU": 8.0}) == ({"resources": {"TPU": 4}}, {})
    assert _devices(4, {"CPU": 8.0}) == ({}, {"JAX_NUM_CPU_DEVICES": "4"})
