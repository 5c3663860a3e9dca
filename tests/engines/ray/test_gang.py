"""Groups on the devices of several processes, on Ray.

Covers: drjax.engines.ray.gang, drjax.engines.ray.adapter.
"""

import importlib
import os
import signal
import time
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

import drjax
from drjax.backends import Parquet, in_process, ray
from drjax.backends.engine import events
from drjax.engines.ray import adapter
from drjax.engines.ray.gang import Gangs, MemberLost, _resources
from tests.engines.ray.conftest import MARKS
from tests.helpers import tensor_parallel
from tests.helpers.cases import some
from tests.helpers.raising import raises
from tests.helpers.run_python import HANGS
from tests.helpers.sharded_integers import N, equal, integers, plan_of_integers

pytestmark = MARKS

LITTLE = {"num_cpus": 0.25}


@pytest.fixture(scope="module")
def gangs(cluster):
    """Two workers, each of two processes with two virtual devices."""
    result = ray.Actors(2, None, LITTLE, 4, 2)
    yield result
    result.close()


@pytest.fixture
def actors(gangs):
    """Both workers: another test may have ended one, and its successor starts."""
    gangs.open()
    while gangs._starting:
        gangs._watch([], 1.0)
    return gangs


def pids(actors):
    """The process ids of all members, by worker; the leader's first."""
    engine, processes = importlib.import_module("ray"), []
    for leader in actors._placement.workers:
        others, _ = actors._gangs._gangs[leader]
        asked = [adapter._ask(x.state) for x in (leader, *others)]
        processes.append([x.pid for x in engine.get(asked)])
    return processes


def all_end(processes):
    end = time.monotonic() + HANGS
    while any(os.path.exists(f"/proc/{pid}") for pid in processes):
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.parametrize("how", some(tensor_parallel.HOW, "auto"))
def test_a_transformer_equals_that_of_one_device(how, actors):
    run = ray.compile(tensor_parallel.plan(how), workers=actors)
    for _ in range(2):
        tensor_parallel.check(run(tensor_parallel.parameters(), tensor_parallel.data()))
    assert len(run.report.workers) == 2


@pytest.mark.parametrize("how", ["auto", "explicit"])
@pytest.mark.parametrize("size", [1, 2])
def test_the_bits_are_those_of_one_process(how, size, actors):
    plan, (w, state, x, steps) = plan_of_integers(how), integers()
    one = in_process.compile(plan)
    run = ray.compile(plan, workers=actors, block_size=size, keep={2: 1})
    kept = state
    for _ in range(3):
        grads, largest, state = one(w, state, x, steps)
        *results, kept = run(w, kept, x, steps)
        equal((*results, kept.fetch()), (grads, largest, state))
        w = jax.tree.map(lambda w, g: np.sign(w + g), w, grads)


@pytest.mark.parametrize("member", ["leader", "follower"])
def test_a_member_is_killed_in_a_call(member, actors):
    plan, args, killed = plan_of_integers(), integers(steps=3_000_000), []
    before = pids(actors)

    def observe(event):
        if isinstance(event, events.BlockDone) and not killed:
            killed.append(before[0][member == "follower"])
            os.kill(killed[0], signal.SIGKILL)

    options = {"block_size": 1, "observers": [observe]}
    run = ray.compile(plan, workers=actors, **options)
    equal(run(*args), in_process.compile(plan)(*args))
    assert killed and "a worker died" in run.report.lost[0]
    all_end(before[0])
    while actors._starting:
        actors._watch([], 1.0)
    assert before[1] in pids(actors) and actors.working == 2
    equal(run(*args), in_process.compile(plan)(*args))
    assert not run.report.lost


def test_a_group_that_fails(actors):
    (w, state, x, steps), good = integers(), np.arange(N) != 2
    x[2] = np.nan
    options = {"workers": actors, "check_nans": True, "block_size": 3}
    with pytest.raises(drjax.EngineError, match="Group 2 failed.*yields NaN"):
        ray.compile(plan_of_integers(), **options)(w, state, x, steps)
    run = ray.compile(plan_of_integers(), on_error="drop", **options)
    _, largest, kept = run(w, state, x, steps)
    assert [*run.report.dropped] == [2] and not run.report.lost
    np.testing.assert_array_equal(np.isnan(kept), ~good)
    assert largest == np.max((kept - state)[good])


def test_a_member_cannot_read_what_the_leader_reads(actors, tmp_path):
    class PartlyRead(Parquet):
        bad: tuple[int, ...] = ()

        def starting(self, group):
            for i, record in enumerate(super().starting(group), group):
                yield record[:1] if i in self.bad and jax.process_index() else record

    arrow, parquet = map(importlib.import_module, ("pyarrow", "pyarrow.parquet"))
    w, state, x, steps = integers()
    table = arrow.table({"x": [*x.reshape(N, -1)]})
    parquet.write_table(table, tmp_path / "x.parquet", row_group_size=2)
    files = PartlyRead(tmp_path / "*.parquet", lambda record: record["x"].reshape(3, 8))
    plan, options = plan_of_integers(), {"on_error": "drop", "block_size": 2}
    run = ray.compile(plan, workers=actors, **options)
    for bad in ((), (4,)):
        files.bad = bad
        x[[*bad]] = np.nan
        expected = in_process.compile(plan, check_nans=True, **options)
        equal(run(w, state, files, steps), expected(w, state, x, steps))
    text = "another process of the worker cannot read it"
    assert [*run.report.dropped] == [4] and text in run.report.dropped[4]
    assert not run.report.lost


def test_a_plan_of_groups_on_one_device(actors):
    mean = drjax.program(clients=N)(drjax.reduce_mean)
    run = ray.compile(drjax.make_plan(mean)(np.zeros(N, np.float32)), workers=actors)
    assert run(np.arange(N, dtype=np.float32)) == 2.5


def test_what_processes_lack_is_said_when_a_plan_is_compiled(actors):
    plan, few = plan_of_integers(), {"JAX_NUM_CPU_DEVICES": "1"}
    options = {"workers": 1, "processes_per_group": 2}
    text = "which needs 4 devices, and each worker has 2. Pass devices_per_group=4."
    raises(drjax.MeshError, text, ray.compile, plan, devices_per_group=2, **options)
    actor = {**LITTLE, "runtime_env": {"env_vars": few}}
    text = (
        "which needs 4 devices, and a worker on cpu has 2. Give it more: by "
        'ray_options, as {"num_gpus": 2}, with a JAX that uses GPUs;'
    )
    raises(drjax.MeshError, text, ray.compile, plan, ray_options=actor, **options)
    text = (
        "The plan runs each group on a mesh of model=4, and 4 devices are not the same "
        "number in each of 3 processes. Pass another processes_per_group."
    )
    options = {"processes_per_group": 3, "devices_per_group": 6}
    raises(drjax.MeshError, text, ray.compile, plan, **options)


def test_numbers_of_processes_that_are_none():
    plan, wrong = plan_of_integers(), drjax.DrjaxValueError
    for value in (0, True, "2"):
        text = f"processes_per_group must be an integer from 1, got {value!r}."
        raises(wrong, text, ray.compile, plan, processes_per_group=value)
    text = "devices_per_group must be a multiple of processes_per_group=3, got 4."
    raises(wrong, text, ray.compile, plan, processes_per_group=3)
    mean = drjax.program(clients=4)(drjax.reduce_mean)
    plan = drjax.make_plan(mean)(np.zeros(4, np.float32))
    text = "runs each group on one device, got processes_per_group=2. Shard the work"
    raises(wrong, text, ray.compile, plan, processes_per_group=2)
    text = "processes_per_group must be an integer from 1, got 0."
    raises(wrong, text, ray.compile, plan, processes_per_group=0)
    text = "ray_options has a scheduling_strategy, and the processes of a worker have"
    options = {"scheduling_strategy": "SPREAD"}
    raises(wrong, text, ray.Actors, 1, None, options, 2, 2)


def test_nothing_is_left(actors, monkeypatch):
    table = importlib.import_module("ray.util").placement_group_table
    processes = sum(pids(actors), [])
    actors.close()
    all_end(processes)
    monkeypatch.setattr(adapter, "_START", 2)
    options = {"workers": 1, "ray_options": {"num_cpus": 1.5}}
    text = "1 workers did not start on Ray within 2 s. Its resources are"
    raises(
        drjax.EngineError,
        text,
        ray.compile,
        plan_of_integers(),
        processes_per_group=2,
        **options,
    )
    assert {x["state"] for x in table().values()} == {"REMOVED"}


def test_processes_get_what_ray_is_asked_for():
    options = {"num_cpus": 2, "num_gpus": 4, "accelerator_type": "H100"}
    assert _resources({**options, "resources": {"a": 1}, "memory": None}) == {
        "CPU": 2, "GPU": 4, "accelerator_type:H100": 0.001, "a": 1
    }  # fmt: skip
    assert _resources({"num_cpus": 0}) == {"CPU": 0.001}


class Died(Exception):
    pass


OUTCOMES = {
    "all are right": ((1, None), 1),
    "a follower ended": ((None, Died()), Died),
    "the leader ended": ((Died(), None), Died),
    "the leader failed as a follower ended": ((OSError(), Died()), Died),
    "all failed": ((OSError(), ValueError()), OSError),
    "a follower failed, the leader waits": (("late", ValueError("no")), MemberLost),
    "a follower failed alone": ((1, ValueError("no")), MemberLost),
    "the leader failed, a follower waits": ((OSError(), "late"), MemberLost),
}


@pytest.mark.parametrize("name", OUTCOMES)
def test_a_task_is_lost_if_members_differ(name):
    outcomes, expected = OUTCOMES[name]
    results = dict(zip(("leader's", "follower's"), outcomes, strict=True))

    def get(task):
        if isinstance(results[task], Exception):
            raise results[task]
        assert results[task] != "late"
        return results[task]

    def wait(tasks, count, seconds):
        late = [x for x in tasks if results[x] == "late"]
        return [x for x in tasks if x not in late], late

    follow = SimpleNamespace(remote=lambda *_: "follower's")
    errors = {"RayActorError": Died, "OutOfMemoryError": Died, "RayError": Exception}
    engine: Any = SimpleNamespace(get=get, exceptions=SimpleNamespace(**errors))
    gangs = Gangs(engine, 2, wait)
    gangs._gangs["leader"] = [SimpleNamespace(follow=follow)], None
    gangs.submitted("leader's", "leader", b"", [])
    assert gangs.running(["leader's"]) == ["follower's"]
    assert not gangs.running(["other"])
    if results["follower's"] != "late":
        failed = isinstance(results["follower's"], Exception)
        # Until the result is asked for.
        for _ in range(2):
            done = gangs.failed(["leader's", "follower's"])
            assert done == ["leader's"] * failed
    if expected == 1:
        assert gangs.result("leader's", get) == 1
    else:
        with pytest.raises(expected):
            gangs.result("leader's", get)
    assert not gangs._tasks and not gangs._running
    assert gangs.result("leader's", len) == len("leader's")  # no task of a gang
