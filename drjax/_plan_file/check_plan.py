"""Whether a decoded plan is well-typed: what each step takes, another one gave it.

Input: a plan, or that of a loop's body. Output: nothing, or a `ValueError`, which
`decode` converts to `PlanFileError`. Invariant: a plan that passes can be printed and
drawn, and no backend meets a value of another kind, shape or dtype than it expects.
"""

import math
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any

import numpy as np

from drjax._compat.types import Aval
from drjax._jaxprs.prng_keys import raw_type
from drjax._plan_file.exported_stage import ExportedStage
from drjax._primitives.reduce_ops import REDUCE_OPS
from drjax.plan import Loop, Plan, Reduce, Round, Stage, Value


def check_plan(plan: Plan) -> None:
    """Check the order and the types of all steps of a plan; bodies are plans."""
    check_order(plan)
    for a_round in plan.rounds:
        _check_round(a_round, plan)
    _check_server(plan.server)


def _check_round(a_round: Round, plan: Plan) -> None:
    _check_server(a_round.server)
    _all_global(a_round.broadcast, "a broadcast")
    for whole, slices in a_round.scatter:
        sent = (slices.whole_shape(plan.size), slices.dtype)
        if whole.partitioned or (whole.shape, whole.dtype) != sent:
            raise ValueError("a scatter has slices of another type than its value")
        _all_partitioned([slices], "a scatter")
    local = a_round.local
    _all_partitioned(local.outputs, "the work of a group")
    copies = {v.name for v in a_round.broadcast}
    check_known([v.name for v in local.inputs if not v.partitioned], copies)
    sources = [r.source for r in a_round.reduces]
    sources += [v for fold in a_round.folds for v in fold.sources]
    check_known([v.name for v in sources], {v.name for v in local.outputs})
    for reduce in a_round.reduces:
        _check_reduce(reduce, plan.size)
    for loop in a_round.loops:
        _LOOPS[loop.op](loop)
        if loop.op in ("scan", "while", "cond"):
            for body in loop.bodies:
                if body.partition != plan.partition:
                    raise ValueError("the body of a loop has other groups than it")


def _check_server(stage: Stage) -> None:
    _all_global((*stage.inputs, *stage.outputs), "the server")


def _all_global(values: Iterable[Value], what: str) -> None:
    if any(v.partitioned for v in values):
        raise ValueError(f"{what} has a value that is partitioned")


def _all_partitioned(values: Iterable[Value], what: str) -> None:
    if not all(v.partitioned for v in values):
        raise ValueError(f"{what} gives a value that is not partitioned")


def _check_reduce(reduce: Reduce, size: int) -> None:
    source, result = reduce.source, reduce.result
    shape = (size, *source.shape) if reduce.op == "gather" else source.shape
    reduced = (result.shape, result.dtype, result.partitioned)
    if reduced != (shape, source.dtype, False) or not source.partitioned:
        raise ValueError(f"a {reduce.op} gives another type than that of slices")


# -------------------------------------------------------------------------------------
# Loops


def _type(value: Value) -> tuple[Any, ...]:
    return value.shape, value.dtype, value.partitioned, value.axis


def _same(outer: Sequence[Value], inner: Sequence[Value], what: str) -> None:
    if [*map(_type, outer)] != [*map(_type, inner)]:
        raise ValueError(f"{what} has other types than its bodies")


def _steps(stacks: Sequence[Value], steps: Sequence[Value], length: int) -> None:
    """Check that stacks have the types of the steps' values, and so many of them."""
    if len(stacks) != len(steps):
        raise ValueError("a scan has other stacks than its body")
    for stack, step in zip(stacks, steps, strict=True):
        axis = step.axis + step.partitioned
        if _type(stack) != ((length, *step.shape), step.dtype, step.partitioned, axis):
            raise ValueError("a scan has stacks of another type than its steps")


def _check_scan(loop: Loop) -> None:
    (body,), (consts,) = loop.bodies, loop.consts
    if loop.length is None:
        raise ValueError("a scan has no number of steps")
    first = consts + loop.carry
    _same(loop.inputs[:first], body.inputs[:first], "a scan")
    _same(loop.inputs[consts:first], loop.outputs[: loop.carry], "a scan")
    _same(loop.outputs[: loop.carry], body.outputs[: loop.carry], "a scan")
    if min(len(loop.inputs) - first, len(loop.outputs) - loop.carry) < 0:
        raise ValueError("a scan has fewer values than it is said to")
    _steps(loop.inputs[first:], body.inputs[first:], loop.length)
    _steps(loop.outputs[loop.carry :], body.outputs[loop.carry :], loop.length)


def _check_while(loop: Loop) -> None:
    (condition, body), (of_condition, of_body) = loop.bodies, loop.consts
    first = of_condition + of_body
    carried = loop.inputs[first:]
    if len(carried) != loop.carry or loop.length is not None:
        raise ValueError("a while has other values than it is said to")
    _same((*loop.inputs[:of_condition], *carried), condition.inputs, "a while")
    _same((*loop.inputs[of_condition:first], *carried), body.inputs, "a while")
    _same(carried, loop.outputs, "a while")
    _same(carried, body.outputs, "a while")
    (again,) = condition.outputs
    if _type(again) != ((), np.dtype(bool), False, 0):
        raise ValueError("a while has a condition that is no bool")


def _check_cond(loop: Loop) -> None:
    index, *operands = loop.inputs
    if not loop.bodies or loop.consts or loop.carry or loop.length is not None:
        raise ValueError("a cond has other values than it is said to")
    if _type(index) != ((), np.dtype(np.int32), False, 0):
        raise ValueError("a cond has an index that is no int32")
    for branch in loop.bodies:
        _same(operands, branch.inputs, "a cond")
        _same(loop.outputs, branch.outputs, "a cond")


def _check_program(loop: Loop) -> None:
    (body,) = loop.bodies
    _all_global((*loop.inputs, *loop.outputs), "a program over other groups")
    if body.partition is None:
        raise ValueError("a program over other groups has none")
    for outer, inner in ((loop.inputs, body.inputs), (loop.outputs, body.outputs)):
        types = [(v.whole_shape(body.size), v.dtype) for v in inner]
        if [(v.shape, v.dtype) for v in outer] != types:
            raise ValueError("a program over other groups has other types")


def check_columns(loop: Loop) -> None:
    """Check that the body of a `columns` loop is of the types of the loop.

    Its body has one round, whose groups are the coordinates; its inputs and outputs
    have the sizes of those of the loop.
    """
    (body,) = loop.bodies
    (a_round,) = body.rounds
    others = (*a_round.scatter, *a_round.moves, *a_round.loops, *a_round.folds)
    gathers = any(r.op == "gather" for r in a_round.reduces)
    if others or gathers or not a_round.server.empty or not body.server.empty:
        raise ValueError("columns are computed by more than one stage")
    if body.partition is None or body.inputs != a_round.local.inputs:
        raise ValueError("the stage of a column takes other values than its plan")
    for outer, inner in ((loop.inputs, body.inputs), (loop.outputs, body.outputs)):
        sizes = [(math.prod(v.whole_shape(body.size)), v.dtype) for v in inner]
        if [(math.prod(v.shape), v.dtype) for v in outer] != sizes:
            raise ValueError("the columns have other sizes than the slices")
    _all_global((*loop.inputs, *loop.outputs), "work on columns")


_LOOPS: dict[str, Callable[[Loop], None]] = {
    "scan": _check_scan,
    "while": _check_while,
    "cond": _check_cond,
    "program": _check_program,
    "columns": check_columns,
}

LOOPS = tuple(_LOOPS)

# -------------------------------------------------------------------------------------
# The order


def check_order(plan: Plan) -> None:
    """Check that each value of a plan is produced before it is used.

    Bodies of loops and inner levels are left out, as they are plans of their own.
    """
    known = {v.name for v in plan.inputs}

    def use(values: Iterable[Value]) -> None:
        check_known([v.name for v in values], known)

    def produce(values: Iterable[Value]) -> None:
        known.update(v.name for v in values)

    for a_round in plan.rounds:
        use(a_round.server.inputs)
        produce(a_round.server.outputs)
        use((*a_round.broadcast, *(whole for whole, _ in a_round.scatter)))
        produce(slices for _, slices in a_round.scatter)
        use(a_round.local.inputs)
        produce(a_round.local.outputs)
        use(reduce.source for reduce in a_round.reduces)
        produce(reduce.result for reduce in a_round.reduces)
        for folded in a_round.folds:
            use(folded.inputs)
            produce(folded.results)
        for moved in a_round.moves:
            use(moved.inputs)
            produce([moved.result])
        for loop in a_round.loops:
            use(loop.inputs)
            produce(loop.outputs)
    use(plan.server.inputs)
    produce(plan.server.outputs)
    use(plan.outputs)


def check_known(names: Iterable[str], known: Set[str]) -> None:
    """Raise `ValueError` if one of `names` is not among those `known`."""
    if unknown := set(names) - known:
        shown = [name[:60] for name in sorted(unknown)[:5]]
        raise ValueError(f"{shown} are used before they are made")


# -------------------------------------------------------------------------------------
# The code of batches of groups


def check_batches(plan: Plan) -> None:
    """Check the types of the batched functions of a plan's local stages.

    Their operands and results are identified by position alone.
    """
    kept = plan.kept()
    for a_round in plan.rounds:
        stage = a_round.local
        if not isinstance(stage.exported, ExportedStage):
            continue
        assert stage.exported.batched is not None
        function = stage.exported.batched.function
        takes = [(x.shape, x.dtype) for x in stage.exported.consts]
        takes += [((None,), np.dtype(bool)), ((None,), np.dtype(np.int32))]
        takes += map(_of_batch, stage.inputs)
        gives = [
            (r.source.shape, np.dtype(REDUCE_OPS[r.op].accumulator(r.source.dtype)))
            for r in a_round.partials
        ]
        gives += [_raw(v) for fold in a_round.folds for v in fold.sources]
        gives += [_of_batch(v) for v in stage.outputs if v.name in kept]
        for avals, types in ((function.in_avals, takes), (function.out_avals, gives)):
            if [*map(_with_open_batch, avals)] != types:
                raise ValueError("a batch has other types than the round needs")


def _raw(value: Value) -> tuple[tuple[int, ...], Any]:
    raw = raw_type(value)
    return raw.shape, raw.dtype


def _of_batch(value: Value) -> tuple[tuple[int | None, ...], Any]:
    """The type that a batched function has for a value; None: the number of groups."""
    shape, dtype = _raw(value)
    return ((None, *shape) if value.partitioned else shape), dtype


def _with_open_batch(aval: Aval) -> tuple[tuple[int | None, ...], Any]:
    """The type of an operand or result, with None for a symbolic dimension."""
    return tuple(d if isinstance(d, int) else None for d in aval.shape), aval.dtype
