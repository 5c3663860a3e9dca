"""Whether a decoded plan is well-typed: what each step takes, another one gave it.

Input: a plan, or that of a loop's body. Output: nothing, or a `ValueError`, which
`decode` converts to `PlanFileError`. Invariant: a plan that passes can be printed and
drawn, and no backend meets a value of another kind, shape or dtype than it expects.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from drjax._compat.types import Aval
from drjax._jaxprs.prng_keys import raw_type
from drjax._plan.uses import check_defined, check_order
from drjax._plan_file.exported_stage import batched_of, exported_of
from drjax._primitives.reduce_ops import REDUCE_OPS
from drjax.plan import (
    Broadcast,
    Columns,
    Cond,
    Exchange,
    Fold,
    Gather,
    Loop,
    Move,
    Plan,
    Program,
    Reduce,
    Round,
    Rules,
    Scan,
    Scatter,
    Stage,
    Step,
    Value,
    While,
)


def check_plan(plan: Plan) -> None:
    """Check the order, the form and the types of all steps of a plan."""
    _check_form(plan)
    check_order(plan)
    for a_round in plan.rounds:
        for step in a_round.steps:
            check_step(step, plan, a_round)
    _check_server(plan.server)


def _check_form(plan: Plan) -> None:
    """Check that the steps of each round are in the order that `Round` says.

    After the last round comes one stage of the server.
    """
    if not plan.steps or not isinstance(plan.steps[-1], Stage):
        raise ValueError("a plan does not end with a stage")
    if isinstance(plan.steps[0], Stage) and plan.steps[0].local:
        raise ValueError("a plan begins in the groups")
    for a_round in plan.rounds:
        ranks = [*map(_rank, a_round.steps)]
        if ranks != sorted(ranks) or ranks.count(0) != 1 or ranks.count(2) != 1:
            raise ValueError("a round has its steps in another order")
    if sum(len(a_round.steps) for a_round in plan.rounds) + 1 != len(plan.steps):
        raise ValueError("a plan has steps that are in no round")


def _rank(step: Step) -> int:
    if isinstance(step, Stage):
        return 2 if step.local else 0
    if isinstance(step, Exchange):
        return 1 if step.direction == "down" else 3
    return 4


# -------------------------------------------------------------------------------------
# Steps

# The check of a step in a plan and a round: `ValueError` if no plan could have it.
check_step: Rules[None] = Rules("a plan file")


@check_step.rule(Stage)
def _check_stage(stage: Stage, plan: Plan, a_round: Round) -> None:
    if not stage.local:
        _check_server(stage)
        return
    _all_partitioned(stage.outputs, "the work of a group")
    copies = {v.name for v in a_round.broadcast}
    check_defined([v.name for v in stage.inputs if not v.partitioned], copies)
    from_groups = [x for x in a_round.all(Exchange) if x.direction == "up"]
    sources = [v for step in from_groups for v in step.inputs if v.partitioned]
    check_defined([v.name for v in sources], {v.name for v in stage.outputs})
    if stage.inner is not None:
        _check_inner(stage.inner, stage)


def _check_inner(inner: Plan, stage: Stage) -> None:
    """Check that the plan of an inner level has the types of its stage.

    Its inputs must have the types of a group index, int32 `[]`, and then of the stage's
    inputs; its outputs those of the stage's outputs. `stage` is the local stage of the
    outer level, in each of whose groups the plan runs.
    """

    def types(values: Sequence[Value]) -> list[tuple[tuple[int, ...], Any]]:
        return [(v.whole_shape(inner.size), v.dtype) for v in values]

    of_stage = lambda values: [(v.shape, v.dtype) for v in values]
    index = ((), np.dtype(np.int32))
    if types(inner.inputs) != [index, *of_stage(stage.inputs)]:
        raise ValueError("the plan of an inner level takes other values")
    if types(inner.outputs) != of_stage(stage.outputs):
        raise ValueError("the plan of an inner level gives other values")


def _check_server(stage: Stage) -> None:
    _all_global((*stage.inputs, *stage.outputs), "the server")


@check_step.rule(Broadcast)
def _check_broadcast(step: Broadcast, *_: Any) -> None:
    _all_global([step.source], "a broadcast")


@check_step.rule(Scatter)
def _check_scatter(step: Scatter, plan: Plan, a_round: Round) -> None:
    whole, slices = step.source, step.result
    sent = (slices.whole_shape(plan.size), slices.dtype)
    if whole.partitioned or (whole.shape, whole.dtype) != sent:
        raise ValueError("a scatter has slices of another type than its value")
    _all_partitioned([slices], "a scatter")


def _all_global(values: Iterable[Value], what: str) -> None:
    if any(v.partitioned for v in values):
        raise ValueError(f"{what} has a value that is partitioned")


def _all_partitioned(values: Iterable[Value], what: str) -> None:
    if not all(v.partitioned for v in values):
        raise ValueError(f"{what} gives a value that is not partitioned")


def _check_global_result(step: Reduce | Gather, shape: tuple[int, ...]) -> None:
    source, result = step.source, step.result
    reduced = (result.shape, result.dtype, result.partitioned)
    if reduced != (shape, source.dtype, False) or not source.partitioned:
        raise ValueError(f"a {step.op} gives another type than that of slices")


@check_step.rule(Reduce)
def _check_reduce(step: Reduce, *_: Any) -> None:
    if step.op not in REDUCE_OPS:
        raise ValueError(f"{step.op[:60]} is none of {', '.join(REDUCE_OPS)}")
    _check_global_result(step, step.source.shape)
    additive = REDUCE_OPS[step.op].additive
    floats = jnp.issubdtype(step.source.dtype, jnp.floating)
    if step.wire is not None and not (additive and floats):
        raise ValueError(f"a {step.op} of {step.source} cannot be encoded")
    if step.secure and (not additive or step.secure < 2):
        raise ValueError(f"a {step.op} of {step.secure} groups cannot be secure")
    bound = step.bound
    if bound is not None and not (step.secure and 0 < bound < math.inf):
        raise ValueError(f"{str(bound)[:60]} is no bound of a secure sum")


@check_step.rule(Gather)
def _check_gather(step: Gather, plan: Plan, a_round: Round) -> None:
    _check_global_result(step, (plan.size, *step.source.shape))
    if step.sharded not in (False, True, "auto"):
        raise ValueError(f"{str(step.sharded)[:60]} is no layout of a result")


@check_step.rule(Fold)
def _check_fold(step: Fold, *_: Any) -> None:
    types = lambda xs: [(v.shape, v.dtype) for v in xs]
    state, combine = types(step.results), step.combine
    sides = combine.inputs[max(0, len(combine.inputs) - 2 * len(state)) :]
    if not state or any(
        types(xs) != state for xs in (step.init, step.sources, combine.outputs)
    ):
        raise ValueError("a fold has states of different types")
    if types(sides) != state * 2:
        raise ValueError("a fold has no function of two states")
    global_ones = (*step.init, *step.results, *combine.inputs, *combine.outputs)
    if any(v.partitioned for v in global_ones):
        raise ValueError("a fold has a neutral state or a result that is partitioned")
    if not all(v.partitioned for v in step.sources):
        raise ValueError("a fold has states that are not partitioned")


@check_step.rule(Move)
def _check_move(step: Move, plan: Plan, a_round: Round) -> None:
    step.check()


# -------------------------------------------------------------------------------------
# Loops


def _type(value: Value) -> tuple[Any, ...]:
    return value.shape, value.dtype, value.over, value.axis


def _same(outer: Sequence[Value], inner: Sequence[Value], what: str) -> None:
    if [*map(_type, outer)] != [*map(_type, inner)]:
        raise ValueError(f"{what} has other types than its bodies")


def _steps(stacks: Sequence[Value], steps: Sequence[Value], length: int) -> None:
    """Check that stacks have the types of the steps' values, and so many of them."""
    if len(stacks) != len(steps):
        raise ValueError("a scan has other stacks than its body")
    for stack, step in zip(stacks, steps, strict=True):
        axis = step.axis + step.partitioned
        if _type(stack) != ((length, *step.shape), step.dtype, step.over, axis):
            raise ValueError("a scan has stacks of another type than its steps")


def _same_groups(loop: Loop, plan: Plan) -> None:
    for body in loop.bodies:
        if body.partition != plan.partition:
            raise ValueError("the body of a loop has other groups than it")


@check_step.rule(Scan)
def _check_scan(loop: Scan, plan: Plan, a_round: Round) -> None:
    _same_groups(loop, plan)
    (body,), (consts,) = loop.bodies, loop.consts
    first = consts + loop.carry
    _same(loop.inputs[:first], body.inputs[:first], "a scan")
    _same(loop.inputs[consts:first], loop.outputs[: loop.carry], "a scan")
    _same(loop.outputs[: loop.carry], body.outputs[: loop.carry], "a scan")
    if min(len(loop.inputs) - first, len(loop.outputs) - loop.carry) < 0:
        raise ValueError("a scan has fewer values than it is said to")
    _steps(loop.inputs[first:], body.inputs[first:], loop.length)
    _steps(loop.outputs[loop.carry :], body.outputs[loop.carry :], loop.length)


@check_step.rule(While)
def _check_while(loop: While, plan: Plan, a_round: Round) -> None:
    _same_groups(loop, plan)
    (condition, body), (of_condition, of_body) = loop.bodies, loop.consts
    first = of_condition + of_body
    carried = loop.inputs[first:]
    if len(carried) != loop.carry:
        raise ValueError("a while has other values than it is said to")
    _same((*loop.inputs[:of_condition], *carried), condition.inputs, "a while")
    _same((*loop.inputs[of_condition:first], *carried), body.inputs, "a while")
    _same(carried, loop.outputs, "a while")
    _same(carried, body.outputs, "a while")
    (again,) = condition.outputs
    if _type(again) != ((), np.dtype(bool), (), 0):
        raise ValueError("a while has a condition that is no bool")


@check_step.rule(Cond)
def _check_cond(loop: Cond, plan: Plan, a_round: Round) -> None:
    _same_groups(loop, plan)
    index, *operands = loop.inputs
    if not loop.bodies:
        raise ValueError("a cond has no branches")
    if _type(index) != ((), np.dtype(np.int32), (), 0):
        raise ValueError("a cond has an index that is no int32")
    for branch in loop.bodies:
        _same(operands, branch.inputs, "a cond")
        _same(loop.outputs, branch.outputs, "a cond")


@check_step.rule(Program)
def _check_program(loop: Program, *_: Any) -> None:
    (body,) = loop.bodies
    _all_global((*loop.inputs, *loop.outputs), "a program over other groups")
    if body.partition is None:
        raise ValueError("a program over other groups has none")
    for outer, inner in ((loop.inputs, body.inputs), (loop.outputs, body.outputs)):
        types = [(v.whole_shape(body.size), v.dtype) for v in inner]
        if [(v.shape, v.dtype) for v in outer] != types:
            raise ValueError("a program over other groups has other types")


@check_step.rule(Columns)
def _check_columns(loop: Columns, *_: Any) -> None:
    """Check that the body of work on columns has its types.

    Its body has one round, whose groups are the coordinates; its inputs and outputs
    have the sizes of those of the loop.
    """
    (body,) = loop.bodies
    (a_round,) = body.rounds
    known = (Stage, Broadcast, Reduce)
    others = [step for step in a_round.steps if not isinstance(step, known)]
    if others or not a_round.server.empty or not body.server.empty:
        raise ValueError("columns are computed by more than one stage")
    if body.partition is None or body.inputs != a_round.local.inputs:
        raise ValueError("the stage of a column takes other values than its plan")
    for outer, inner in ((loop.inputs, body.inputs), (loop.outputs, body.outputs)):
        sizes = [(math.prod(v.whole_shape(body.size)), v.dtype) for v in inner]
        if [(math.prod(v.shape), v.dtype) for v in outer] != sizes:
            raise ValueError("the columns have other sizes than the slices")
    _all_global((*loop.inputs, *loop.outputs), "work on columns")


# -------------------------------------------------------------------------------------
# The code of batches of groups


def check_batches(plan: Plan) -> None:
    """Check the types of the batched functions of a plan's local stages.

    Their operands and results are identified by position alone.
    """
    kept = plan.kept()
    for a_round in plan.rounds:
        stage = a_round.local
        if stage.empty:
            continue
        function = batched_of(stage).function
        # On a mesh, one group runs at a time.
        b = 1 if stage.mesh else None
        takes = [(x.shape, x.dtype) for x in exported_of(stage).consts]
        takes += [((b,), np.dtype(bool)), ((b,), np.dtype(np.int32))]
        takes += [_of_batch(v, b) for v in stage.inputs]
        gives = [
            (r.source.shape, np.dtype(REDUCE_OPS[r.op].accumulator(r.source.dtype)))
            for r in a_round.partials
        ]
        gives += [_raw(v) for fold in a_round.folds for v in fold.sources]
        gives += [_of_batch(v, b) for v in stage.outputs if v.name in kept]
        for avals, types in ((function.in_avals, takes), (function.out_avals, gives)):
            if [*map(_with_open_batch, avals)] != types:
                raise ValueError("a batch has other types than the round needs")


def _raw(value: Value) -> tuple[tuple[int, ...], Any]:
    raw = raw_type(value)
    return raw.shape, raw.dtype


def _of_batch(value: Value, b: int | None) -> tuple[tuple[int | None, ...], Any]:
    """The type that a batched function has for a value of b groups; None: of any b."""
    shape, dtype = _raw(value)
    return ((b, *shape) if value.partitioned else shape), dtype


def _with_open_batch(aval: Aval) -> tuple[tuple[int | None, ...], Any]:
    """The type of an operand or result, with None for a symbolic dimension."""
    return tuple(d if isinstance(d, int) else None for d in aval.shape), aval.dtype
