"""The loop over rounds that backends share: what it holds, and when it drops it.

Covers: drjax.backends._interpret_plan.
"""

import jax.numpy as jnp

import drjax
from drjax._plan.uses import read_last
from drjax.backends._interpret_plan import RULES, Environment, PlanInterpreter


@drjax.program(clients=3)
def centered_twice(x, scale):
    first = drjax.reduce_mean(x)
    moved = drjax.shift(x, 1)
    second = drjax.reduce_max(drjax.map_fn(lambda x: (x - first) * scale, moved))
    return drjax.reduce_sum(drjax.map_fn(lambda x: x / second, x)) + first


class Names(PlanInterpreter):
    """Arrays are the names of their values; `live` has those at each round's start."""

    rules = RULES

    def __init__(self, plan):
        self.plan, self.live = plan, []

    def run_server(self, stage, env):
        assert env.read(stage.inputs) == [v.name for v in stage.inputs]
        env.write(stage.outputs, [v.name for v in stage.outputs])

    def scatter(self, slices, whole):
        return slices.name

    def run_groups(self, index, env):
        a_round = self.plan.rounds[index]
        self.live.append({*env.arrays})
        assert env.read(a_round.local.inputs) == [v.name for v in a_round.local.inputs]
        for reduce in a_round.reduces:
            env[reduce.result] = reduce.result.name

    def move(self, move, slices, index=None):
        assert (slices, index) == (move.source.name, None)
        return move.result.name

    def run_loop(self, index, loop, inputs):
        raise AssertionError("the plan has no loop")


def test_values_are_dropped_after_the_round_that_reads_them_last():
    plan = drjax.make_plan(centered_twice)(jnp.arange(3.0), 2.0)
    run = Names(plan)
    x, scale = (v.name for v in plan.inputs)
    assert run([x, scale]) == [v.name for v in plan.outputs]
    first, second, third = run.live
    mean, largest = (r.reduces[0].result.name for r in plan.rounds[:2])
    assert {x, scale} <= first and mean not in first
    (move,) = plan.rounds[0].moves
    assert move.source.name == x and move.result.name not in first
    assert {x, scale, mean, move.result.name} <= second
    assert {x, mean, largest} <= third and scale not in third
    dropped = read_last(plan)
    last = lambda name: next(i for i, names in enumerate(dropped) if name in names)
    second, third = (plan.steps.index(r.local) for r in plan.rounds[1:])
    assert last(scale) == last(move.result.name) == second and last(x) == third
    assert not any(
        mean in names for names in dropped[:-1]
    )  # the last server stage reads it


def test_a_copy_of_an_environment_has_more_values():
    plan = drjax.make_plan(centered_twice)(jnp.arange(3.0), 2.0)
    x, scale = plan.inputs
    env = Environment()
    env.write(plan.inputs, [1, 2])
    copy = env.updated({scale.name: 5})
    assert copy.read(plan.inputs) == [1, 5] and env.read(plan.inputs) == [1, 2]
    assert x in env and plan.outputs[0] not in env
