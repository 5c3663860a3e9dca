"""What `print(plan)` prints: a plan as text, its signature and then round by round.

Input: a `drjax.plan.Plan`. Output: lines of text, by `lines`. `bytes_as_text` is for
other texts, too. At run time, nothing is imported from `drjax.plan`, which imports this
module when it prints a plan.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from drjax._primitives.reduce_ops import REDUCE_OPS

if TYPE_CHECKING:
    from drjax.plan import Fold, Loop, Plan, Round, Stage, Value

# The words for communication that is no reduction in a printed plan.
_PHRASES = {
    "gather": "all groups' slices",
    "permute": "permuted slices",
    "take": "slices of others",
    "put_add": "added to others",
}


def _phrase(op: str, groups: str) -> str:
    """Return the words for a communication in a plan, such as `mean over groups`.

    `op` is the name of a reduction or a move, or `gather`; `groups` is what the groups
    are called, such as `groups` or `pods`.
    """
    phrase = _PHRASES[op] if op in _PHRASES else REDUCE_OPS[op].phrase
    return phrase.replace("groups", groups)


def lines(plan: "Plan") -> Iterator[str]:
    """Yield the lines of `print(plan)`: name, partition, inputs, outputs, rounds."""
    over = "calls no building block"
    if plan.partition is not None:
        rounds = _count(len(plan.rounds), "round")
        any_number = " (or any number of groups)" * plan.open_groups
        over = f"a plan over partition {plan.partition}{any_number} in {rounds}"
    yield f"{plan.name}: {over}"
    yield f"  takes    {_signature(plan.inputs)}"
    yield f"  returns  {_signature(plan.outputs)}"
    yield from _rounds(plan)


def _count(number: int, noun: str) -> str:
    """Format a number and a noun, with `s` for the plural: `2 rounds`."""
    return f"{number} {noun}{'s' * (number != 1)}"


def bytes_as_text(nbytes: int) -> str:
    """Format a number of bytes for humans: `812 B`, `12.3 kB`.

    A symbolic expression is not rounded.
    """
    if not isinstance(nbytes, int):  # a symbolic dimension
        return f"{nbytes} B"
    units = ("B", "kB", "MB", "GB", "TB")
    power = 0 if nbytes < 10_000 else min(4, (len(str(nbytes)) - 2) // 3)
    return f"{nbytes / 1000**power:.4g} {units[power]}"


def _signature(values: "tuple[Value, ...]") -> str:
    """Format the names and types of a plan's inputs or outputs, as one line of text.

    Such as `model: float32[3], x: float32[5] in each group`; `nothing` without values.
    """
    shown = (f"{v}{' in each group' * v.partitioned}" for v in values)
    return ", ".join(shown) or "nothing"


def _sent(x: Any) -> str:
    """Format what one group sends in a `Reduce`, `Fold` or `Move`: `40 B a group`.

    For a reduction, its options follow: how it is encoded, and whether its result is
    sharded or the sum secure.
    """
    text = f"{bytes_as_text(x.nbytes)} a group"
    if getattr(x, "wire", None) is not None:
        text += f" as {x.wire}"
    text += ", sharded" * (getattr(x, "sharded", False) is True)
    secure = getattr(x, "secure", 0)
    text += f", secure, of {secure} groups at least" if secure else ""
    bound = getattr(x, "bound", None)
    return text + ("" if bound is None else f", numbers up to {bound:g}")


def _rounds(plan: Any, inside: bool = False) -> Iterator[str]:
    """Yield the lines of text on the rounds of a plan, and on its last server stage.

    The plan is that of a program, a loop's body, or an inner level. If it runs
    `inside`, in each group of an outer level, lines on server stages begin `outer group
    computes` in place of `server computes`, and the groups have the name of their
    partition, as in a plan with several levels, in place of `groups`.
    """
    # With several levels, each has its name.
    named = inside or len(plan.levels) > 1
    groups = plan.levels[0].name if named else "groups"
    for number, a_round in enumerate(plan.rounds, 1):
        yield from ("", f"round {number}", *_server_lines(a_round.server, inside))
        for value in a_round.broadcast:
            yield f"  to every group       {value}   {bytes_as_text(value.nbytes)}"
        for whole, scattered in a_round.scatter:
            source = f"{bytes_as_text(scattered.nbytes)}, of {whole.name}"
            yield f"  slice i to group i   {scattered}   {source}"
        if not a_round.local.empty:
            yield f"  each group computes  {a_round.local.name}"
            yield from _inner_lines(a_round.local)
            yield from (f"    keeps  {value}" for value in _saved(a_round))
        for x in (*a_round.reduces, *a_round.moves):
            how = f"  {_phrase(x.op, groups):<19}  {x.source}"
            yield f"{how}   {_sent(x)} -> {x.result.name}"
        yield from map(_fold_line, a_round.folds)
        for loop in a_round.loops:
            if loop.op == "columns":
                yield _columns_line(loop, inside)
            else:
                yield from _loop_lines(loop, inside)
    if not plan.server.empty:
        yield from ("", "at the end", *_server_lines(plan.server, inside))


def _inner_lines(stage: "Stage") -> Iterator[str]:
    """Yield the lines of text on the inner level, if any, that runs in each group."""
    if stage.inner is None:
        return
    rounds = _count(len(stage.inner.rounds), "round")
    yield f"    in each, over partition {stage.inner.partition} in {rounds}"
    yield from (f"    {line}".rstrip() for line in _rounds(stage.inner, True))


def _fold_line(fold: "Fold") -> str:
    """Format a fold as a line of text: its function, its states and its results."""
    order = "in any order" if fold.commutative else "in order"
    states = ", ".join(map(str, fold.sources))
    results = ", ".join(v.name for v in fold.results)
    sent = f"{_sent(fold)} by {fold.combine.name}"
    return f"  {f'fold {order}':<19}  {states}   {sent} -> {results}"


def _columns_line(loop: "Loop", inside: bool) -> str:
    """Format work on each coordinate, a loop `columns`, as a line of text.

    `inside` is that of `_rounds`.
    """
    who = "outer group computes" if inside else "server computes"
    function = loop.bodies[0].rounds[0].local.name
    results = ", ".join(map(str, loop.outputs))
    return f"  {who:<21}{results} by {function} of each coordinate"


def _loop_lines(loop: "Loop", inside: bool) -> Iterator[str]:
    """Yield the lines of text on a loop: its name, its steps, and its bodies' rounds.

    `inside` is that of `_rounds`.
    """
    steps = "" if loop.length is None else f" of {_count(loop.length, 'step')}"
    backwards = ", backwards" if loop.reverse else ""
    yield f"  {loop.name}{steps}{backwards}"
    titles = {"while": ("while", "do")}.get(loop.op, ("each step",))
    if loop.op == "program":
        titles = (f"over partition {loop.bodies[0].partition}",)
    if loop.op == "cond":
        titles = tuple(f"branch {i}" for i in range(len(loop.bodies)))
    for title, body in zip(titles, loop.bodies, strict=True):
        yield f"    {title}: {_signature(body.outputs)}"
        yield from (f"    {line}".rstrip() for line in _rounds(body, inside))


def _server_lines(stage: "Stage", inside: bool) -> list[str]:
    """Format a server stage as a line of text, in a list; [] if it has no outputs.

    `inside` is that of `_rounds`.
    """
    who = "outer group computes" if inside else "server computes"
    line = f"  {who:<21}" + ", ".join(map(str, stage.outputs))
    return [] if stage.empty else [line]


def _saved(a_round: "Round") -> "list[Value]":
    """List the outputs of a round's local stage that the round does not communicate.

    The groups save these slices for later rounds or loops, or the plan returns them.
    """
    communicated = (*a_round.reduces, *a_round.moves)
    sources = {x.source.name for x in communicated}
    sources |= {v.name for fold in a_round.folds for v in fold.sources}
    return [v for v in a_round.local.outputs if v.name not in sources]
