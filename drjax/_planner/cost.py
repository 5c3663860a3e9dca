"""What a plan saves between its rounds, and rematerializes, in bytes and operations.

Input: a plan. Output: a `Cost` of one group, and one of the server.

Sharp edges: bytes are those of the plan, without those that a stage needs while it
runs. Operations are estimates (see `work.py`), which a plan file has, too.
"""

from dataclasses import dataclass, replace
from functools import reduce
from math import prod

from drjax import _compat
from drjax._plan import uses
from drjax._plan.as_text import bytes_as_text
from drjax._planner.work import operations
from drjax.plan import Cond, Loop, Plan, Program, Stage, Step


@dataclass(frozen=True)
class Cost:
    """What one group, or the server, saves and computes in a plan.

    Attributes:
      saved: The most bytes that it saves at once for later rounds, without arguments
        and results of the plan.
      operations: What it computes, in floating-point operations, as estimated. A loop
        with an unknown number of steps counts as one step.
      rematerialized: Those of the operations that it has done before.
    """

    saved: int = 0
    operations: float = 0
    rematerialized: float = 0

    def then(self, other: "Cost", times: int = 1) -> "Cost":
        """Add the operations of a cost, `times`; the bytes of both are not at once."""
        return Cost(
            max(self.saved, other.saved),
            self.operations + times * other.operations,
            self.rematerialized + times * other.rematerialized,
        )

    @property
    def rematerializes(self) -> bool:
        """Whether it does again at least a hundredth of its operations.

        Indices and zeros are rematerialized everywhere.
        """
        return 100 * self.rematerialized >= max(1, self.operations)

    def rematerialized_as_text(self) -> str:
        """Format what is done again: `4.2 Mflop of 16 Mflop`."""
        again = self.rematerialized if self.rematerializes else 0
        numbers = map(round, (again, self.operations))
        return " of ".join(bytes_as_text(number, "flop") for number in numbers)


def saved_as_text(server: Cost, group: Cost) -> str:
    """Format the bytes that a group and the server save, if any."""
    parts = [(group, "in each group"), (server, "on the server")]
    texts = (f"{bytes_as_text(x.saved)} {where}" for x, where in parts if x.saved)
    return " and ".join(texts) or "nothing"


def cost_of_stage(stage: Stage) -> Cost:
    """Count what a stage computes, inner levels included."""
    if stage.inner is not None:
        server, group = costs(stage.inner)
        # What waits between the inner rounds does while the stage runs.
        return replace(server.then(group, stage.inner.size), saved=0)
    if stage.work is not None:
        return Cost(0, *stage.work)
    if stage.jaxpr is None:
        return Cost()
    every = [(e, operations(e)) for e in _compat.open_jaxpr(stage.jaxpr).eqns]
    again = (n for e, n in every if _compat.is_rematerialized(e))
    return Cost(0, round(sum(n for _, n in every)), round(sum(again)))


def costs(plan: Plan) -> tuple[Cost, Cost]:
    """Count what the server of a plan and one of its groups save and compute."""
    return _cost(plan, False), _cost(plan, True)


def _cost(plan: Plan, of_groups: bool) -> Cost:
    cost, held = Cost(), dict[str, int]()
    outside = {v.name for v in (*plan.inputs, *plan.outputs)}
    waits = uses.last_reads(plan).keys() - outside
    # Of what groups compute, combinations alone may be needed, not the slices.
    waits &= uses.kept(plan) if of_groups else waits
    # After the last round nothing waits for a later one.
    ends = {id(a_round.steps[-1]) for a_round in plan.rounds[:-1]}
    for step, dropped in zip(plan.steps, uses.read_last(plan), strict=True):
        inside = _cost_of_step(step, of_groups)
        # While a loop runs, its rounds save values, and others wait for its end.
        waiting = inside.saved and sum(held.values()) + inside.saved
        cost = cost.then(replace(inside, saved=waiting))
        for name in dropped:
            held.pop(name, None)
        for v in step.outputs:
            # A symbolic dimension is not counted.
            if v.partitioned == of_groups and v.name in waits:
                held[v.name] = v.nbytes if isinstance(v.nbytes, int) else 0
        if id(step) in ends:
            cost = cost.then(Cost(sum(held.values())))
    return cost


def _cost_of_step(step: Step, of_groups: bool) -> Cost:
    if isinstance(step, Stage):
        return cost_of_stage(step) if step.local == of_groups else Cost()
    if isinstance(step, Program):
        # Groups of another partition are no groups of this one.
        server, group = costs(step.body)
        return Cost() if of_groups else server.then(group, step.body.size)
    bodies = [_cost(body, of_groups) for body in step.bodies]
    if isinstance(step, Cond):
        return max(bodies, key=lambda cost: cost.operations)
    times = step.times if isinstance(step, Loop) else ()
    known = prod(t for t in times if isinstance(t, int))
    return reduce(lambda cost, body: cost.then(body, known), bodies, Cost())
