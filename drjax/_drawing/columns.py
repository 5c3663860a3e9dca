"""The texts of a plan's picture: a column for each round, a frame for each loop.

Input: a `drjax.plan.Plan`. Output of `columns_of`: columns and frames, without
positions.

Texts are short: of many values the largest are named, and long names lose their
middle. All text is set in a font of fixed width, so its size is known here.
"""

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, Union

from drjax._plan.as_text import bytes_as_text
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

SHOWN = 4  # of more values than one more than this, the largest
LONGEST = 34  # letters in one line
LETTER, LINE = 4.9, 11.0  # size of a letter and of a line of 8 points
PAD, BUS, STEP = 6.0, 24.0, 9.0

Lines = tuple[str, ...]  # of one text
Item: TypeAlias = Union["Column", "Frame"]


@dataclass(frozen=True)
class Column:
    """The texts of one column of a plan's picture: a round, or its inputs or outputs.

    Attributes:
      location: The round, such as `round 1` or, in a loop, `round 1, scan, branch 0,
        round 2`; or `inputs`, `outputs`, or `end` for the last server stage.
      head: The lines above the column: its name, and the bytes sent and received.
      server: The lines in the box of the server; () for no box.
      down: For each value that is sent to the groups its lines.
      up: For each value that the groups send its lines.
      local: The lines in the box of each group; () for no box.
      kind: `stage` for a round, `value` for inputs and outputs.
    """

    location: str
    head: Lines
    server: Lines = ()
    down: tuple[Lines, ...] = ()
    up: tuple[Lines, ...] = ()
    local: Lines = ()
    kind: str = "stage"

    @property
    def width(self) -> float:
        """The width of the column in points, that of its widest part."""
        sides = [stairs(side) for side in (self.down, self.up) if side]
        between = 20 * (len(sides) - 1)
        bus = 2 * BUS if self.kind == "stage" else 0
        boxes = map(text_width, (self.head, self.server))
        return max(sum(sides) + between, text_width(self.local) + bus, *boxes)


@dataclass(frozen=True)
class Frame:
    """A frame around columns: a loop, or one of its bodies.

    `lines` are those of its title; `items` are the `Column`s and `Frame`s inside, from
    left to right.
    """

    lines: Lines
    items: list


def text_width(lines: Lines) -> float:
    """Return the width of a box around lines of text, in points; 0 without lines."""
    return 2 * PAD + LETTER * max(map(len, lines)) if lines else 0.0


def text_height(lines: Lines) -> float:
    """Return the height of a box around lines of text, in points; 0 without lines."""
    return 2 * PAD + LINE * len(lines) - 2 if lines else 0.0


def stairs(side: tuple[Lines, ...]) -> float:
    """Return the width of a staircase of boxes, one or more, in points.

    Each next box is shifted by `STEP`, and all are as wide as the widest.
    """
    return max(map(text_width, side)) + STEP * (len(side) - 1)


def _short(text: str) -> str:
    """Shorten a text to at most `LONGEST` letters, by an ellipsis in its middle."""
    half = LONGEST // 2
    return text if len(text) <= LONGEST else f"{text[: half - 1]}…{text[-half:]}"


def _type(value: Value) -> str:
    """Format the dtype and the shape of a value, such as `float32[3]`."""
    return str(value)[len(value.name) + 2 :]


def _few(named: Iterable[tuple[str, Value]]) -> tuple[list[tuple[str, Value]], Lines]:
    """Choose the `(label, value)` pairs to show, in order, and summarize the others.

    Of at most `SHOWN + 1` pairs, all of them, and (). Of more pairs, those of the
    `SHOWN` largest values, and two lines of text: the number of the other values, and
    the bytes of these.
    """
    pairs = list(named)
    if len(pairs) <= SHOWN + 1:
        return pairs, ()
    order = sorted(range(len(pairs)), key=lambda i: -pairs[i][1].nbytes)
    rest = sum(pairs[i][1].nbytes for i in order[SHOWN:])
    more = f"+ {len(pairs) - SHOWN} more", f"{bytes_as_text(rest)} in all"
    return [pairs[i] for i in sorted(order[:SHOWN])], more


def _messages(named: Iterable[tuple[str, Value]]) -> tuple[Lines, ...]:
    """Format the values that a round sends, each as lines of text for a box.

    The lines are its label, and its type with its bytes. Of many values only the
    largest are shown; one more box, the last, summarizes the others.
    """
    shown, more = _few(named)
    lines = [
        (_short(name), f"{_type(v)}  {bytes_as_text(v.nbytes)}") for name, v in shown
    ]
    return (*lines, more) if more else tuple(lines)


def listed(title: Lines, values: Iterable[Value]) -> Lines:
    """Format a box: a title, then the names and types of the largest values.

    () if there is no value. If values are left out, a last line says how many, and
    their bytes.
    """
    shown, more = _few((v.name, v) for v in values)
    room = [LONGEST - len(_type(v)) for _, v in shown]
    lines = [
        f"{_short(name) if len(name) > most else name}: {_type(v)}"
        for most, (name, v) in zip(room, shown, strict=True)
    ]
    return (*title, *lines, *([", ".join(more)] if more else [])) if shown else ()


def _column(plan: Plan, number: int, location: str) -> Column:
    """Collect the texts of a round for its column in the plan's picture.

    `number` is that of the round in this plan, which may be the body of a loop, from 1;
    `location` is that in the whole plan (`Column.location`).
    """
    a_round = plan.rounds[number - 1]
    up, down, between = _arrows(a_round)
    # Values that are live after this round are saved in the groups.
    sent = [id(step) for step in a_round.all(Exchange) if step.direction == "up"]
    live = {v.name for v in plan.outputs}
    for step in plan.steps:
        if id(step) not in sent:
            live |= {v.name for v in step.inputs}
    local: Lines = ()
    if not a_round.local.empty:
        local = tuple(textwrap.wrap(a_round.local.name, LONGEST)[:3])
        local += _inner_lines(a_round.local)
        kept = (v for v in a_round.local.outputs if v.name in live)
        local += listed(("keeps",), kept)
        local += listed(("to other groups",), (v for _, v in between))
    elif down or up or between:
        local = ("no work",)
    sums = _bytes_of(a_round)
    head = (f"round {number}", *([f"{sums} a group"] if sums else []))
    server = listed(("server computes",), a_round.server.outputs)
    return Column(location, head, server, _messages(down), _messages(up), local)


# Values that a round communicates, each after the text at its arrow: `w` of a
# broadcast, `slice i of x` of a scatter, and else with the operation, as `sum of y`.
Labeled: TypeAlias = list[tuple[str, Value]]


def _arrows(a_round: Round) -> tuple[Labeled, Labeled, Labeled]:
    """List what a round communicates up, down and between groups."""
    sides: dict[str, Labeled] = {"up": [], "down": [], "between": []}
    for step in a_round.all(Exchange):
        sides[step.direction] += _labels(step)
    return sides["up"], sides["down"], sides["between"]


# What one exchange communicates.
_labels: Rules[Labeled] = Rules("Plan.draw")


@_labels.rule(Broadcast)
def _of_broadcast(step: Broadcast) -> Labeled:
    return [(step.source.name, step.source)]


@_labels.rule(Scatter)
def _of_scatter(step: Scatter) -> Labeled:
    return [(f"slice i of {step.source.name}", step.result)]


@_labels.rule(Reduce, Gather, Move, Fold)
def _of_groups(step: Exchange) -> Labeled:
    # Of an encoded value the bytes are those of its codes.
    return [
        (f"{step.op} of {value.name}", replace(value, nbytes=nbytes))
        for value, nbytes in step.messages()
    ]


def _bytes_of(a_round: Round) -> str:
    """Format the bytes that one group communicates in a round: `↓ 16 B  ↑ 4 B  ↔ 8 B`.

    They come from the server, go to it, and go to other groups. A direction in which
    nothing is communicated is left out.
    """
    up, down, between = _arrows(a_round)
    return "  ".join(
        f"{sign} {bytes_as_text(sum(v.nbytes for _, v in side))}"
        for sign, side in (("↓", down), ("↑", up), ("↔", between))
        if side
    )


def _inner_lines(stage: Stage) -> Lines:
    """Format the inner level, if any, of a local stage: partition and rounds."""
    if stage.inner is None:
        return ()
    lines = [f"over {stage.inner.partition}, inside"]
    for number, a_round in enumerate(stage.inner.rounds, 1):
        lines.append(f"  round {number}  {_bytes_of(a_round)}".rstrip())
        lines += [f"    {line}" for line in _inner_lines(a_round.local)]
        for loop in a_round.loops:
            steps = f", {loop.length:,} steps" if isinstance(loop, Scan) else ""
            what = "of each coordinate" if isinstance(loop, Columns) else "of rounds"
            lines.append(f"  {loop.op} {what}{steps}")
    return tuple(lines)


def items_of(plan: Plan, prefix: str = "") -> list[Item]:
    """Collect columns of a plan's rounds and frames of its loops, left to right.

    A round that neither computes nor communicates has no column. `prefix` is the common
    one of its rounds' locations, for a loop's body such as `round 1, scan, branch 0, `.
    """
    items: list = []
    for number, a_round in enumerate(plan.rounds, 1):
        location = f"{prefix}round {number}"
        column = _column(plan, number, location)
        if column.server or column.local:
            items.append(column)
        for loop in a_round.loops:
            items.append(_loop_item(loop, number, location))
    if not plan.server.empty:
        server = listed(("server computes",), plan.server.outputs)
        items.append(Column(f"{prefix}end", ("at the end",), server))
    return items


# The column or the frame of a loop. `number` and `location` are those of its round: see
# `_column`.
_loop_item: Rules[Item] = Rules("Plan.draw")


@_loop_item.rule(Columns)
def _of_coordinates(loop: Columns, number: int, location: str) -> Column:
    """Collect the texts of work on each coordinate, for the server."""
    function = loop.body.rounds[0].local.name
    head = f"round {number}: {function}", "of each coordinate"
    server = listed(("server computes",), loop.outputs)
    return Column(f"{location}, {loop.name}", head, server)


@_loop_item.rule(Scan)
def _of_scan(loop: Scan, number: int, location: str) -> Frame:
    steps = f", {loop.length:,} step{'s' * (loop.length != 1)}"
    steps += ", last to first" if loop.reverse else ""
    (items,) = _bodies(loop, ["branch 0"], location)
    carried = _carried(loop.split(loop.inputs)[1])
    return Frame((f"round {number}: scan{steps}", carried), items)


@_loop_item.rule(While)
def _of_while(loop: While, number: int, location: str) -> Frame:
    carried = _carried(loop.split(loop.inputs)[2])
    return _parts(loop, ["condition", "body"], number, location, carried)


@_loop_item.rule(Cond)
def _of_cond(loop: Cond, number: int, location: str) -> Frame:
    branches = [f"branch {i}" for i in range(len(loop.bodies))]
    return _parts(loop, branches, number, location)


@_loop_item.rule(Program)
def _of_program(loop: Program, number: int, location: str) -> Frame:
    return _parts(loop, [f"over {loop.bodies[0].partition}"], number, location)


def _carried(values: Sequence[Value]) -> str:
    return _short("carries " + ", ".join(v.name for v in values)) if values else ""


def _bodies(loop: Loop, parts: Sequence[str], location: str) -> list[list[Item]]:
    return [
        items_of(body, f"{location}, {loop.name}, {part}, ")
        for body, part in zip(loop.bodies, parts, strict=True)
    ]


def _parts(
    loop: Loop, parts: Sequence[str], number: int, location: str, carried: str = ""
) -> Frame:
    """Make a frame with one more inside for each body, of the name in `parts`."""
    frames = [
        Frame((part, "" if items else "nothing to do"), items)
        for part, items in zip(parts, _bodies(loop, parts, location), strict=True)
    ]
    return Frame((f"round {number}: {loop.op}", carried), frames)


def columns_of(plan: Plan) -> list[Item]:
    """Collect the columns and frames of a plan's whole picture, from left to right.

    The first is the column of the plan's inputs, the last that of its outputs.
    """
    ends = []
    for name, values in (("inputs", plan.inputs), ("outputs", plan.outputs)):
        server = listed((), (v for v in values if not v.partitioned))
        local = listed((), (v for v in values if v.partitioned))
        ends.append(Column(name, (name,), server, local=local, kind="value"))
    return [ends[0], *items_of(plan), ends[1]]


def every(items: Sequence[Item]) -> Iterator[tuple[Item, int]]:
    """Iterate over all columns and frames, also those inside frames, with their depths.

    A frame comes before what it has inside. The depth is the number of frames around
    the item, 0 for `items`.
    """
    for item in items:
        yield item, 0
        if isinstance(item, Frame):
            yield from ((inner, depth + 1) for inner, depth in every(item.items))
