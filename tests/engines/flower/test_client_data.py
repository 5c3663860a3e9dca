"""Requests to clients, which do not trust the server: no engine needed.

Covers: drjax.engines.flower.client_data.
"""

import numpy as np
import pytest

import drjax
from drjax.backends import in_process
from drjax.engines.core import worker
from drjax.engines.core.job import Job
from drjax.engines.flower import client_data
from drjax.engines.flower.records import Request
from tests.helpers.plan_files import forged_with, read_members, saved_sgd_plan
from tests.helpers.raising import raises


def test_clients_are_groups_of_one_partition():
    @drjax.program(clients=4)
    def f(x):
        total = drjax.reduce_sum(x)
        return total, drjax.reduce_max(total + x[:2], partition={"clients": 2})

    plan = drjax.make_plan(f)(np.zeros(4, np.float32))
    text = "two partitions side by side, clients:4 and clients:2. A client is a group"
    raises(drjax.DrjaxValueError, text, client_data.refuse_other_partitions, plan)


def test_clients_make_no_custom_calls(tmp_path_factory, tmp_path, monkeypatch):
    """Workers of an engine may call what the driver may, clients may not."""
    members = read_members(saved_sgd_plan(tmp_path_factory))
    path = forged_with("mine", members, tmp_path / "plan.drjax")
    file = in_process.compile(drjax.load_plan(path, custom_calls=["mine"])).file
    seen = []
    monkeypatch.setattr(Job, "run", lambda job, *_: seen.append(job.file) or 1 / 0)
    about = {"tree": None, "slices": [], "stored": [], "initial": None, "group": 0}
    about |= {"where": "", "check_nans": False, "drop": False, "x64": False}
    with pytest.raises(ZeroDivisionError):
        code = file.key, file.data
        client_data.answer(Request(about, [], []), lambda: None, code)
    worker.LoadedPlan(file)
    raises(drjax.PlanFileError, "may make: 'mine'", worker.LoadedPlan, seen[0])
