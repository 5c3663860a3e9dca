"""Rewrite the stages of a plan; its exchanges and values stay.

The planner adds plans of inner levels so, and backends replace or remove them.

Input: a plan, and a function of one stage. Output: the plan with the results of the
function. Invariants: the order of the stages and what they exchange stay. Sharp edges:
the plan of an inner level, `Stage.inner`, is the function's own concern.
"""

from collections.abc import Callable
from dataclasses import replace

from drjax.plan import Fold, Plan, Stage, Step


def map_stages(fn: Callable[[Stage], Stage], plan: Plan) -> Plan:
    """Copy a plan with each stage replaced by `fn(stage)`, also in bodies of loops.

    A stage is of the server, of the groups, or the function of a fold; `fn` keeps its
    inputs and outputs. Exchanges and values stay. The plan of an inner
    level, `stage.inner`, is not visited: `fn` may replace it.
    """

    def mapped(step: Step) -> Step:
        if isinstance(step, Stage):
            return fn(step)
        if isinstance(step, Fold):
            return replace(step, combine=fn(step.combine))
        if not step.bodies:
            return step
        return replace(step, bodies=tuple(map_stages(fn, b) for b in step.bodies))

    return replace(plan, steps=tuple(map(mapped, plan.steps)))


def without_inner(plan: Plan) -> Plan:
    """Copy a plan without the plans of inner levels in its stages.

    For backends that run the work of an outer group as one jaxpr: the jaxpr of a stage
    computes the inner rounds, too. A plan of one level is returned itself.
    """
    if len(plan.levels) < 2:
        return plan
    return map_stages(lambda stage: replace(stage, inner=None), plan)
