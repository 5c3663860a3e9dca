"""Plan files of single local stages: the code that a client of others' plans gets.

Input: rounds of an exported plan. Output: for each a plan of that round alone, whose
arguments are the inputs of the local stage, and its file.

Invariants: the file has no server stage, so nothing that one closes over; equal stages
have equal files, whatever plan they are in. Sharp edges: the function of a fold, which
the server runs, is part of its round, and so of the file.
"""

import jax

from drjax._plan.map_stages import without_inner
from drjax._plan.normal_form import rounds_of
from drjax._plan_file import container
from drjax._plan_file.encode import encode
from drjax._plan_file.export_plan import export_plan
from drjax.plan import Broadcast, Plan, Round, Stage


def file_of_stage(owner: Plan, a_round: Round) -> bytes:
    """Return the plan file of the local stage of a round, whose stages are exported.

    `owner` is the plan, or body of a loop, that has the round.
    """
    local, kept = a_round.local, owner.kept()
    # The gathers of the round are slices that are kept.
    slices = [v for v in local.outputs if v.name in kept]
    known = {v.name for v in local.inputs}
    others = [v for fold in a_round.folds for v in (*fold.consts, *fold.init)]
    unique = {v.name: v for v in others if v.name not in known}
    copies = [Broadcast(v) for v in local.inputs if not v.partitioned]
    combined = (*a_round.partials, *a_round.folds)
    steps = (_nothing(), *copies, local, *combined, _nothing())
    inputs, outputs = (*local.inputs, *unique.values()), (*a_round.combined, *slices)
    plan = Plan(
        local.name,
        owner.partition,
        steps,
        inputs,
        outputs,
        jax.tree.structure((inputs, {})),
        jax.tree.structure(outputs),
    )
    return container.to_bytes(*encode(plan))


def bytes_of_code(plan: Plan) -> int:
    """Return the size of the files of all local stages; equal ones count once."""
    plan = export_plan(without_inner(plan))
    rounds = [each for each in rounds_of(plan) if not each[1].local.empty]
    files = {file_of_stage(*each) for each in rounds}
    return sum(map(len, files))


def _nothing() -> Stage:
    """Make a server stage without inputs and outputs."""
    return Stage("", (), (), jax.make_jaxpr(lambda: ())())
