"""A new kind of exchange: refused by each consumer in one way, until it has its rules.

Covers: drjax._plan.steps, drjax._plan.rules, drjax._plan.exchanges, drjax._plan.loops,
drjax._plan.uses, drjax._plan.normal_form, drjax._plan.methods,
drjax._planner.exchanges, drjax._plan_file.step_fields.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import drjax
from drjax._drawing import columns, print_plan
from drjax._plan_file import check_plan, export_plan
from drjax._planner import open_groups
from drjax.backends import in_process, reference
from drjax.backends.xla import mesh_interpreter
from drjax.contrib import federated_language
from drjax.engines.core import driver
from drjax.plan import Exchange, Permute, Value
from tests.helpers.raising import raises


@dataclass(frozen=True)
class Halved(Exchange):
    """Each group gets half of its own slice."""

    source: Value
    result: Value

    op = "halved"
    direction = "between"

    @property
    def inputs(self):
        return (self.source,)

    @property
    def outputs(self):
        return (self.result,)


@drjax.program(clients=4)
def moved(x):
    return drjax.reduce_sum(drjax.map_fn(jnp.sin, drjax.shift(x, 1)))


X = jnp.arange(4.0)


@pytest.fixture
def plan():
    plan = drjax.make_plan(moved)(X)

    def halved(step):
        if not isinstance(step, Permute):
            return step
        return Halved(step.source, step.result)

    return replace(plan, steps=tuple(map(halved, plan.steps)))


CONSUMERS = {
    "print(plan)": str,
    "Plan.draw": lambda plan: columns.columns_of(plan),
    "Plan.communication": lambda plan: plan.communication(2).reduced_per_device(),
    "a plan file": drjax.backends.in_process.compile,
    "The reference backend": lambda plan: reference.compile(plan)(X),
    "The XLA backend": lambda plan: drjax.backends.xla.compile(plan)(X),
    "open_groups=True": open_groups.fixed_by,
    "plan.save": lambda plan: [
        export_plan._exported(step, None, None, None, "") for step in plan.steps[2:]
    ],
    "federated-language": lambda plan: [
        federated_language._check(plan, a_round) for a_round in plan.rounds
    ],
}


@pytest.mark.parametrize("consumer", CONSUMERS)
def test_it_is_refused(consumer, plan):
    what = "no count" if consumer == "Plan.communication" else "no rule"
    text = f"{consumer} has {what} for Halved"
    raises(drjax.PlanError, text, CONSUMERS[consumer], plan)


def half(step, run, index, env):
    env[step.result] = env[step.source] / 2


def test_it_passes_through_all_with_rules(plan, monkeypatch, tmp_path):
    for table, rule in {
        print_plan._lines: lambda step, *_: iter([f"  {step.source} is halved"]),
        columns._labels: lambda step: [(step.op, step.source)],
        export_plan._exported: lambda step, *_: step,
        check_plan.check_step: lambda step, *_: None,
        open_groups._fixed: lambda step: None,
        reference._GroupByGroup.rules: half,
        mesh_interpreter.MeshInterpreter.rules: half,
        driver._DriverInterpreter.rules: half,
        federated_language._unsayable: lambda step: f"what is {step.op}",
    }.items():
        monkeypatch.setitem(table._tables[0], Halved, rule)
    one = lambda self, size, devices: 1
    monkeypatch.setattr(Halved, "slices_per_device", one)
    assert "x: float32[] is halved" in str(plan)
    assert "halved" in str(plan.communication(2))
    plan.draw(tmp_path / "plan.svg")
    plan.save(tmp_path / "plan.drjax")
    loaded = drjax.load_plan(tmp_path / "plan.drjax")
    assert str(loaded) == str(plan)
    want = np.sin(np.asarray(X) / 2).sum()
    for run in (
        reference.compile(plan),
        drjax.backends.xla.compile(plan),
        jax.jit(drjax.backends.xla.compile(loaded)),
        in_process.compile(loaded, block_size=2),
    ):
        np.testing.assert_allclose(run(X), want, rtol=1e-6)
    with pytest.raises(ValueError, match="cannot say what moved has: what is halved"):
        CONSUMERS["federated-language"](plan)
