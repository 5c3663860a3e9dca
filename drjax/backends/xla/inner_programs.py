"""The programs inside the groups' stage, planned and streamed as the plan itself.

Input: the jaxpr of a local stage, which may hold building blocks of programs inside
mapped functions, and how many groups run at once. Output: a function of one group that
runs the plan of that jaxpr.

The stage of a group is a program over the inner partition, so the passes of the planner
apply to it: its rounds are scans over chunks of inner groups, with running
accumulators. So the memory of a group's work does not grow with their number.

Invariants: values are those of the stage. Sharp edges: a stage that has no plan (an
inner program that is sharded over a mesh axis of its own, effects, two partitions) runs
as it is, with all inner groups at once.
"""

from collections.abc import Callable

from drjax import _compat
from drjax._errors import PlanError
from drjax._jaxprs.eval_jaxpr import as_arrays
from drjax._planner.inline import uses_blocks
from drjax._planner.make_plan import plan_of_jaxpr
from drjax.plan import Plan, Stage


@_compat.weakref_lru_cache
def plan_of_stage(jaxpr) -> Plan | None:
    """The plan of a local stage over the partition of its inner programs.

    Args:
      jaxpr: The closed jaxpr of the stage.

    Returns:
      The plan; None if the stage has no inner programs, effects, or no plan.
    """
    if _compat.effects_of(jaxpr) or not uses_blocks(jaxpr):
        return None
    count = len(jaxpr.in_avals)
    names = [f"argument {i}" for i in range(count)]
    try:
        return plan_of_jaxpr(jaxpr, "stage", names, [None] * count)
    except PlanError:
        return None


def run_inner_programs(
    stage: Stage, run_flat: Callable, step: int | None
) -> Callable | None:
    """Make the function that streams the inner programs of a local stage.

    Args:
      stage: The stage; one from a plan file has no jaxpr to plan.
      run_flat: `run_flat(plan, inputs, step)` runs a plan on flat inputs, on no mesh.
      step: How many groups run at once; None: all, and nothing is streamed.

    Returns:
      `run(*args)`, from the arguments of the stage's jaxpr to the list of its outputs;
      None if the stage runs as it is.
    """
    if step is None or stage.exported is not None:
        return None
    plan = plan_of_stage(stage.jaxpr)
    if plan is None:
        return None

    def run(*args):
        outs = run_flat(plan, list(args), step)
        return as_arrays(outs, [value.dtype for value in stage.outputs])

    return run
