"""The plans of the levels inside: programs in the work of one group.

Input: a plan. Output: the plan, in which `Stage.inner` of a local stage that runs
building blocks is the plan of that work.

The stage of a group is a program over the inner level, so that the planner is applied
to its jaxpr: its rounds are those of the inner level, inside the round of the outer
one. A program with three levels has plans at three depths.

Levels are nested plans, and not steps over `(outer, inner)` of one flat plan, as an
outer group is the server of its inner ones: it has its own stages, loops with a number
of steps of its own, and values between its rounds. Backends stream outer groups, a few
at a time, through all inner rounds. A flat plan would run each inner round for all
outer groups, and hold what these compute between two of them.

Invariants: the plan inside computes the outputs of the stage from its arguments. Sharp
edges: a stage without such a plan (two inner programs side by side) stays as it is, and
so does one with blocks over mesh axes that are Manual around the whole program.
"""

from collections.abc import Callable
from dataclasses import replace

from drjax import _compat
from drjax._compat.types import ClosedJaxpr
from drjax._errors import PlanError
from drjax._jaxprs.walk import deep_equations
from drjax._plan.map_stages import map_stages
from drjax._planner.inline import uses_blocks
from drjax._primitives.registration import BLOCKS
from drjax._sharding.layout import make_layout
from drjax.plan import Plan, Program, Stage


def with_inner_plans(plan: Plan, make: Callable[..., Plan]) -> Plan:
    """Add plans to the local stages whose mapped functions run programs of their own.

    Such an inner program has groups inside each group, so the work of one group has
    rounds, too. Its plan becomes `Stage.inner`, also in the plan's loops. `make`,
    called as `make(jaxpr, name, names, declared, results=results)`, is `plan_of_jaxpr`:
    it makes the plan of a closed jaxpr, or raises `PlanError`.
    """
    return map_stages(lambda stage: _with_inner(stage, make), plan)


def _with_inner(stage: Stage, make: Callable[..., Plan]) -> Stage:
    """Return a copy of a stage that runs building blocks with the plan of these.

    `stage` itself in each of these cases:

    * it is of the server: only groups have groups inside of them;
    * it runs no building blocks, or no output depends on one;
    * one of them is inside a user's `shard_map`, over Manual mesh axes;
    * `make` raises `PlanError`;
    * the plan would be over several partitions, side by side.
    """
    if not uses_blocks(stage.jaxpr) or _is_manual(stage.jaxpr):
        return stage
    names = ["group index", *(value.name for value in stage.inputs)]
    if len(stage.jaxpr.in_avals) < len(names):  # of a server, which has no index
        return stage
    results = [value.name for value in stage.outputs]
    undeclared = [None] * len(names)
    try:
        inner = make(stage.jaxpr, stage.name, names, undeclared, results=results)
    except PlanError:
        return stage
    side_by_side = any(type(loop) is Program for loop in inner.loops())
    # Without a partition, the blocks had no use.
    if inner.partition is None or side_by_side:
        return stage
    return replace(stage, inner=inner)


def _is_manual(jaxpr: ClosedJaxpr) -> bool:
    """Whether a jaxpr has a building block over mesh axes that are Manual.

    Such a block is inside a user's `shard_map` and acts on the groups of one device,
    which no plan can express.
    """
    outside = lambda eqn: eqn.primitive not in BLOCKS
    for eqn in deep_equations(_compat.open_jaxpr(jaxpr), outside):
        if eqn.primitive in BLOCKS and eqn.params.get("mesh") is not None:
            if make_layout(eqn.params["partition"], eqn.params["mesh"]).manual:
                return True
    return False
