"""Plans of programs with levels: rounds of the inner level in those of the outer one.

Covers: drjax._planner.inner_plans, drjax._plan.ledger, drjax._plan.map_stages,
    drjax._plan.value.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import drjax
from drjax.backends.reference import GroupError
from tests.helpers.levels import MODEL, PROGRAMS, X, loss, steps, three
from tests.helpers.raising import raises


@pytest.mark.parametrize("name", PROGRAMS)
def test_values_on_reference(name):
    fn, args = PROGRAMS[name]
    plan = drjax.make_plan(fn)(*args)
    result = drjax.backends.reference.compile(plan)(*args)
    for a, b in zip(*map(jax.tree.leaves, (result, jax.jit(fn)(*args))), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def inner_of(plan):
    return [r.local.inner for r in plan.rounds if r.local.inner is not None]


def test_rounds_of_the_inner_level_are_inside_those_of_the_outer_one():
    plan = drjax.make_plan(jax.value_and_grad(loss))(MODEL, X)
    assert list(map(str, plan.levels)) == ["pods:2", "groups:3"]
    assert len(plan.rounds) == 1
    (inner,) = inner_of(plan)
    assert [r.op for a_round in inner.rounds for r in a_round.reduces] == [
        "mean",
        "sum",
    ]
    assert inner.inputs[1:] != () and inner.inputs[0].name == "group index"
    assert not inner_of(inner)


def test_levels_of_loops_and_of_three_levels():
    plan = drjax.make_plan(three)(X.reshape(2, 3, 2, 2))
    assert list(map(str, plan.levels)) == ["a:2", "b:3", "c:2"]
    plan = drjax.make_plan(steps)(MODEL, X)
    assert list(map(str, plan.levels)) == ["pods:2", "groups:3"]
    (loop,) = plan.rounds[0].loops
    (inner,) = inner_of(loop.bodies[0])
    assert [loop.op for r in inner.rounds for loop in r.loops] == ["scan"]


def test_a_plan_prints_its_levels():
    text = str(drjax.make_plan(loss)(MODEL, X))
    assert text == (
        "loss: a plan over partition pods:2 in 1 round\n"
        "  takes    model: float32[4], data: float32[3,4] in each group\n"
        "  returns  result: float32[]\n"
        "\n"
        "round 1\n"
        "  to every group       model: float32[4]   16 B\n"
        "  each group computes  broadcast + map_fn + reduce_mean + log\n"
        "    in each, over partition groups:3 in 1 round\n"
        "\n"
        "    round 1\n"
        "      to every group       model: float32[4]   16 B\n"
        "      each group computes  function\n"
        "      mean over groups     function: float32[]   4 B a group"
        " -> mean(function)\n"
        "\n"
        "    at the end\n"
        "      outer group computes log_2: float32[]\n"
        "  mean over pods       log: float32[]   4 B a group -> result"
    )


def test_the_ledger_has_totals_for_each_level():
    plan = drjax.make_plan(jax.value_and_grad(loss))(MODEL, X)
    ledger = plan.communication({"pods": 2, "groups": 3})
    assert ledger.levels == ("pods", "groups")
    assert (ledger.down(), ledger.up()) == (16, 20)
    assert (ledger.down(over="groups"), ledger.up(over="groups")) == (36, 20)
    assert ledger.up("1.groups.2", over="groups") == 16
    assert ledger.reduced_per_device(over="pods") == 20
    assert ledger.reduced_per_device(over="groups") == 20
    # Both pods are on one device, which reduces over the groups of each.
    ledger = plan.communication({"groups": 3})
    assert ledger.reduced_per_device() == 0
    assert ledger.reduced_per_device(over="groups") == 2 * 20
    assert ledger.between(over="groups") == 0
    lines = str(ledger).splitlines()
    assert lines[3] == "1.groups.1  mean                   4  function.0: float32[]"
    assert lines[-2].startswith("total over pods: 16 bytes down and 20 up for each")
    assert lines[-1].endswith("on 3 devices 40 bytes reduced per device")


def test_the_ledger_of_a_loop_in_a_level():
    ledger = drjax.make_plan(steps)(MODEL, X).communication()
    times = [m.times for m in ledger.messages if m.round == "1.scan.1.groups.1.scan.1"]
    assert set(times) == {(2, 2)} and len(times) == 3
    assert ledger.up(over="groups") == 2 * 2 * 16 and ledger.up() == 2 * 16


def test_errors_of_the_ledger():
    plan = drjax.make_plan(loss)(MODEL, X)
    text = "communication needs devices of the levels ['pods', 'groups'], got ['x']"
    raises(drjax.DrjaxValueError, text, plan.communication, {"x": 2})
    text = "communication needs devices as a positive int, got 'two'"
    raises(drjax.DrjaxTypeError, text, plan.communication, {"pods": "two"})
    text = "over= needs one of ['pods', 'groups'], got 'x'"
    raises(drjax.DrjaxValueError, text, plan.communication().up, None, "x")


def test_work_without_a_plan_of_its_own_runs_as_it_is():
    one, two = (drjax.program(inner=n)(drjax.reduce_sum) for n in (2, 3))
    outer = drjax.program(pods=2)
    fn = outer(lambda x: drjax.map_fn(lambda a: one(a[:2]) + two(a[2:]), x))
    plan = drjax.make_plan(fn)(jnp.arange(10.0).reshape(2, 5))
    assert inner_of(plan) == [] and len(plan.levels) == 1
    result = drjax.backends.reference.compile(plan)(jnp.arange(10.0).reshape(2, 5))
    np.testing.assert_array_equal(result, [10.0, 35.0])


def test_a_failure_in_a_group_of_a_group_names_both():
    def check(x):
        if x[0] == X[1, 2, 0]:
            raise ValueError("of this group")
        return x

    def fail(x):
        return jax.pure_callback(check, jax.ShapeDtypeStruct((4,), x.dtype), x)

    two = drjax.program(pods=2, groups=3)
    fn = two(lambda x: drjax.reduce_sum(drjax.map_fn(fail, x)))
    run = drjax.backends.reference.compile(drjax.make_plan(fn)(X))
    message = raises(GroupError, "Group 1 failed in round 1", run, X)
    assert "Group 2 failed in round 1" in message
