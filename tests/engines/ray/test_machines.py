"""Machines that come and go: nodes of a cluster that are lost, and that join.

Covers: drjax.engines.ray.adapter, drjax.engines.ray.gang.
"""

import importlib
import time

import jax.numpy as jnp
import numpy as np
import pytest

import drjax
from drjax.backends import in_process, ray
from drjax.backends.engine import events
from drjax.engines.ray import adapter
from tests.engines.ray.conftest import MARKS
from tests.helpers.dying_driver import later
from tests.helpers.raising import raises
from tests.helpers.run_python import HANGS
from tests.helpers.sharded_integers import equal, integers, plan_of_integers

pytestmark = MARKS

N = 8
NODE = {"num_cpus": 1, "object_store_memory": 200 << 20}


@pytest.fixture
def cluster(new_cluster):
    """A cluster of one node with one CPU, to which this process is connected."""
    engine = importlib.import_module("ray")
    head = {**NODE, "include_dashboard": False}
    result = new_cluster(initialize_head=True, head_node_args=head)
    engine.init(address=result.address, log_to_driver=False)
    yield result
    engine.shutdown()
    result.shutdown()


@pytest.fixture(scope="module")
def plan():
    @drjax.program(clients=N)
    def mean(model, x):
        work = lambda model, x: model * later(jnp.sqrt(x), 3_000_000)
        return drjax.reduce_mean(drjax.map_fn(work, (drjax.broadcast(model), x)))

    return drjax.make_plan(mean)(*args())


def args():
    return np.float32(2), np.arange(1, N + 1, dtype=np.float32)


def right(result):
    np.testing.assert_allclose(result, np.mean(2 * np.sqrt(args()[1])), rtol=1e-6)


def test_a_lost_node_is_not_waited_for(cluster, plan):
    """Its worker's blocks run on the other node, in that call and in later ones."""
    seen, changes = [], []

    def observe(event):
        seen.append(event)
        # In the main thread, as a node of the tests' cluster needs.
        if changes and isinstance(event, events.BlockDone):
            changes.pop()()

    def call_until(numbers):
        end = time.monotonic() + HANGS / 4
        while time.monotonic() < end:
            right(run(*args()))
            if [x.workers for x in seen if isinstance(x, events.WorkersChanged)] == (
                numbers
            ):
                return
        raise AssertionError(seen)

    other = cluster.add_node(**NODE)
    options = {"block_size": 1, "observers": [observe]}
    with ray.compile(plan, workers=2, **options) as run:
        right(run(*args()))
        assert len(run.report.workers) == 2
        begin = time.monotonic()
        changes.append(lambda: cluster.remove_node(other))
        call_until([1])
        right(run(*args()))
        assert len(run.report.workers) == 1 and not run.report.lost
        assert time.monotonic() - begin < adapter._START / 2
        # A node joins during a call, and the worker that waits for room with it.
        changes.append(lambda: cluster.add_node(**NODE))
        call_until([1, 2])
        assert not changes


def test_a_dataset_outlives_the_machine_that_had_it(cluster):
    """Ray computes again what only the lost node had."""
    data = importlib.import_module("ray.data")
    node = {**NODE, "num_cpus": 2, "resources": {"there": 1}}

    def read(batch):
        x = np.repeat(batch["id"].astype(np.float32)[:, None], 50_000, 1)
        return {"x": x}

    numbers = data.range(N, override_num_blocks=4)
    records = numbers.map_batches(read, resources={"there": 0.01})
    total = drjax.program(clients=N)(drjax.reduce_sum)
    plan = drjax.make_plan(total)(np.zeros((N, 50_000), np.float32))
    options = {"workers": 1, "ray_options": {"resources": {"there": 0.5}}}
    other = cluster.add_node(**node)
    with ray.compile(plan, block_size=2, **options) as run:
        for lost in (False, True):
            if lost:
                cluster.remove_node(other)
                cluster.add_node(**node)
            np.testing.assert_array_equal(run(records), np.full(50_000, 28))
        assert run.report.lost


def test_a_call_begins_with_the_least(cluster, plan):
    seen = []
    options = {"block_size": 1, "observers": [seen.append]}
    with ray.compile(plan, workers=(1, 3), **options) as run:
        right(run(*args()))
        assert len(run.report.workers) == 1
        cluster.add_node(**NODE)
        end = time.monotonic() + HANGS
        while len(run.report.workers) < 2 and time.monotonic() < end:
            right(run(*args()))
        assert len(run.report.workers) == 2
        counts = [x.workers for x in seen if isinstance(x, events.WorkersChanged)]
        assert counts == [1, 2]


@pytest.mark.slow
@pytest.mark.grid
def test_a_worker_on_two_nodes_loses_one(cluster):
    """Its other process is ended, and it starts again when a node joins."""
    plan, args = plan_of_integers(), integers(steps=3_000_000)
    table = importlib.import_module("ray.util").placement_group_table
    nodes, changes = [cluster.add_node(**NODE)], []

    def observe(event):
        if changes and isinstance(event, events.BlockDone):
            changes.pop()()

    def change():
        cluster.remove_node(nodes.pop())
        nodes.append(cluster.add_node(**NODE))

    options = {"block_size": 1, "observers": [observe]}
    with ray.compile(plan, workers=1, processes_per_group=2, **options) as run:
        (group,) = table().values()
        assert len({*group["bundles_to_node_id"].values()}) == 2
        expected = in_process.compile(plan)(*args)
        equal(run(*args), expected)
        changes.append(change)
        equal(run(*args), expected)
        assert run.report.lost
        equal(run(*args), expected)
        assert not run.report.lost
    assert {x["state"] for x in table().values()} == {"REMOVED"}


@pytest.mark.parametrize("workers", [(0, 2), (3, 2), (1, 2, 3), ("1", 2)])
def test_numbers_of_workers_that_are_none(plan, workers):
    text = "workers must be an integer"
    raises(drjax.DrjaxValueError, text, lambda: ray.compile(plan, workers=workers))
