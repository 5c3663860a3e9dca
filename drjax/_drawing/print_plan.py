"""What `print(plan)` prints: a plan as text, its signature and then round by round.

Input: a `drjax.plan.Plan`. Output: its text.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from drjax._plan.as_text import bytes_as_text
from drjax._planner.cost import cost_of_stage, costs, saved_as_text
from drjax._primitives.reduce_ops import REDUCE_OPS
from drjax._sharding.group_mesh import as_text
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
    Value,
    While,
)


def _phrase(step: Reduce | Gather | Move, groups: str) -> str:
    """Return the words for a communication in a plan, such as `mean over groups`.

    `groups` is what the groups are called, such as `groups` or `pods`.
    """
    phrase = step.phrase or REDUCE_OPS[step.op].phrase
    return phrase.replace("groups", groups)


def printed(plan: Plan) -> str:
    """Return the text of `print(plan)`."""
    return "\n".join(_plan_lines(plan))


def _plan_lines(plan: Plan) -> Iterator[str]:
    """Yield the lines of text: name, partition, inputs, outputs, rounds."""
    over = "calls no building block"
    if plan.partition is not None:
        rounds = _count(len(plan.rounds), "round")
        any_number = " (or any number of groups)" * plan.open_groups
        over = f"a plan over partition {plan.partition}{any_number} in {rounds}"
    yield f"{plan.name}: {over}"
    yield f"  takes    {_signature(plan.inputs)}"
    yield f"  returns  {_signature(plan.outputs)}"
    if plan.group_mesh:
        yield f"  needs    {as_text(plan.group_mesh)} devices for each group"
    server, group = costs(plan)
    if server.saved or group.saved:
        yield f"  saves    {saved_as_text(server, group)}, at most, for later rounds"
    if group.rematerializes:
        yield f"  rematerializes {group.rematerialized_as_text()} of each group"
    yield from _rounds(plan)


def _count(number: int, noun: str) -> str:
    """Format a number and a noun, with `s` for the plural: `2 rounds`."""
    return f"{number} {noun}{'s' * (number != 1)}"


def _signature(values: tuple[Value, ...]) -> str:
    """Format the names and types of a plan's inputs or outputs, as one line of text.

    Such as `model: float32[3], x: float32[5] in each group`; `nothing` without values.
    """
    shown = (f"{v}{' in each group' * v.partitioned}" for v in values)
    return ", ".join(shown) or "nothing"


def _sent(x: Reduce | Fold | Gather | Move) -> str:
    """Format what one group sends in a `Reduce`, `Fold` or `Move`: `40 B a group`.

    For a reduction, its options follow: how it is encoded, and whether its result is
    sharded or the sum secure.
    """
    text = f"{bytes_as_text(x.nbytes)} a group"
    if (wire := getattr(x, "wire", None)) is not None:
        text += f" as {wire}"
    text += ", sharded" * (getattr(x, "sharded", False) is True)
    secure = getattr(x, "secure", 0)
    text += f", secure, of {secure} groups at least" if secure else ""
    bound = getattr(x, "bound", None)
    return text + ("" if bound is None else f", numbers up to {bound:g}")


def _rounds(plan: Plan, inside: bool = False) -> Iterator[str]:
    """Yield the lines of text on the rounds of a plan, and on its last server stage.

    The plan is that of a program, a loop's body, or an inner level. If it runs
    `inside`, in each group of an outer level, lines on server stages begin `outer group
    computes` in place of `server computes`, and the groups have the name of their
    partition, as in a plan with several levels, in place of `groups`.
    """
    # With several levels, each has its name.
    own = plan.partition if inside or len(plan.levels) > 1 else None
    groups = "groups" if own is None else own.name
    for number, a_round in enumerate(plan.rounds, 1):
        yield from ("", f"round {number}")
        for step in a_round.steps:
            yield from _lines(step, a_round, groups, inside)
    if not plan.server.empty:
        yield from ("", "at the end", *_server_lines(plan.server, inside))


# The lines of a step in its round, whose groups are called `groups`; `inside` is that
# of `_rounds`.
_lines: Rules[Iterator[str]] = Rules("print(plan)")


@_lines.rule(Stage)
def _stage_lines(
    stage: Stage, a_round: Round, groups: str, inside: bool
) -> Iterator[str]:
    if not stage.local:
        yield from _server_lines(stage, inside)
    elif not stage.empty:
        yield f"  each group computes  {stage.name}"
        yield from _inner_lines(stage)
        if (cost := cost_of_stage(stage)).rematerializes:
            yield f"    rematerializes  {cost.rematerialized_as_text()}"
        for value in _saved(a_round):
            yield f"    keeps  {value}   {bytes_as_text(value.nbytes)}"


@_lines.rule(Broadcast)
def _broadcast_lines(step: Broadcast, *_: Any) -> Iterator[str]:
    value = step.source
    yield f"  to every group       {value}   {bytes_as_text(value.nbytes)}"


@_lines.rule(Scatter)
def _scatter_lines(step: Scatter, *_: Any) -> Iterator[str]:
    source = f"{bytes_as_text(step.result.nbytes)}, of {step.source.name}"
    yield f"  slice i to group i   {step.result}   {source}"


@_lines.rule(Reduce, Gather, Move)
def _exchange_lines(
    step: Reduce | Gather | Move, a_round: Round, groups: str, inside: bool
) -> Iterator[str]:
    how = f"  {_phrase(step, groups):<19}  {step.source}"
    yield f"{how}   {_sent(step)} -> {step.result.name}"


@_lines.rule(Fold)
def _fold_lines(fold: Fold, *_: Any) -> Iterator[str]:
    order = "in any order" if fold.commutative else "in order"
    states = ", ".join(map(str, fold.sources))
    results = ", ".join(v.name for v in fold.results)
    sent = f"{_sent(fold)} by {fold.combine.name}"
    yield f"  {f'fold {order}':<19}  {states}   {sent} -> {results}"


@_lines.rule(Columns)
def _columns_lines(
    loop: Columns, a_round: Round, groups: str, inside: bool
) -> Iterator[str]:
    who = "outer group computes" if inside else "server computes"
    function = loop.body.rounds[0].local.name
    results = ", ".join(map(str, loop.outputs))
    yield f"  {who:<21}{results} by {function} of each coordinate"


@_lines.rule(Scan)
def _scan_lines(loop: Scan, a_round: Round, groups: str, inside: bool) -> Iterator[str]:
    backwards = ", backwards" if loop.reverse else ""
    yield f"  {loop.name} of {_count(loop.length, 'step')}{backwards}"
    yield from _body_lines(loop, ["each step"], inside)


@_lines.rule(While)
def _while_lines(
    loop: While, a_round: Round, groups: str, inside: bool
) -> Iterator[str]:
    yield f"  {loop.name}"
    yield from _body_lines(loop, ["while", "do"], inside)


@_lines.rule(Cond)
def _cond_lines(loop: Cond, a_round: Round, groups: str, inside: bool) -> Iterator[str]:
    yield f"  {loop.name}"
    branches = [f"branch {i}" for i in range(len(loop.bodies))]
    yield from _body_lines(loop, branches, inside)


@_lines.rule(Program)
def _program_lines(
    loop: Program, a_round: Round, groups: str, inside: bool
) -> Iterator[str]:
    yield f"  {loop.name}"
    over = f"over partition {loop.bodies[0].partition}"
    yield from _body_lines(loop, [over], inside)


def _body_lines(loop: Loop, titles: Sequence[str], inside: bool) -> Iterator[str]:
    """Yield the lines on the bodies of a loop, each with its title."""
    for title, body in zip(titles, loop.bodies, strict=True):
        yield f"    {title}: {_signature(body.outputs)}"
        yield from (f"    {line}".rstrip() for line in _rounds(body, inside))


def _inner_lines(stage: Stage) -> Iterator[str]:
    """Yield the lines of text on the inner level, if any, that runs in each group."""
    if stage.inner is None:
        return
    rounds = _count(len(stage.inner.rounds), "round")
    yield f"    in each, over partition {stage.inner.partition} in {rounds}"
    yield from (f"    {line}".rstrip() for line in _rounds(stage.inner, True))


def _server_lines(stage: Stage, inside: bool) -> list[str]:
    """Format a server stage as a line of text, in a list; [] if it has no outputs.

    `inside` is that of `_rounds`.
    """
    who = "outer group computes" if inside else "server computes"
    line = f"  {who:<21}" + ", ".join(map(str, stage.outputs))
    return [] if stage.empty else [line]


def _saved(a_round: Round) -> list[Value]:
    """List the outputs of a round's local stage that the round does not communicate.

    The groups save these slices for later rounds or loops, or the plan returns them.
    """
    communicated = {v.name for step in a_round.all(Exchange) for v in step.inputs}
    return [v for v in a_round.local.outputs if v.name not in communicated]
