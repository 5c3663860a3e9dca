"""The texts of a plan's picture: a column for each round, a frame for each loop.

Input: a `drjax.plan.Plan`. Output of `columns_of`: columns and frames, without
positions.

Texts are short: of many values the largest are named, and long names lose their
middle. All text is set in a font of fixed width, so its size is known here.
"""

import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from drjax._drawing.text import size
from drjax.plan import Loop, Plan, Value

SHOWN = 4  # of more values than one more than this, the largest
LONGEST = 34  # letters in one line
LETTER, LINE = 4.9, 11.0  # size of a letter and of a line of 8 points
PAD, BUS, STEP = 6.0, 24.0, 9.0

Lines = tuple[str, ...]


@dataclass(frozen=True)
class Column:
    """The texts of one round; the inputs and outputs of the plan are columns too.

    Attributes:
      location: The round, as `round 1`; or `inputs`, `outputs`, `end`.
      head: Its name and total sizes.
      server: Text in the box of the server, empty without a box.
      down: Text of each value that is sent to the groups.
      up: Text of each value that is sent by the groups.
      local: Text in the box of each group.
      kind: `stage` or `value` (inputs, outputs).
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
        """The width of the column in points: that of its widest part."""
        sides = [stairs(side) for side in (self.down, self.up) if side]
        between = 20 * (len(sides) - 1)
        bus = 2 * BUS if self.kind == "stage" else 0
        boxes = map(text_width, (self.head, self.server))
        return max(sum(sides) + between, text_width(self.local) + bus, *boxes)


@dataclass(frozen=True)
class Frame:
    """A loop, or one of its bodies.

    Attributes:
      lines: Its title.
      items: The `Column`s and `Frame`s inside, from left to right.
    """

    lines: Lines
    items: list


def text_width(lines: Lines) -> float:
    """The width of a box around lines of text, in points; 0 without lines."""
    return 2 * PAD + LETTER * max(map(len, lines)) if lines else 0.0


def text_height(lines: Lines) -> float:
    """The height of a box around lines of text, in points; 0 without lines."""
    return 2 * PAD + LINE * len(lines) - 2 if lines else 0.0


def stairs(side: tuple[Lines, ...]) -> float:
    """The width in points of a staircase of boxes; `side` has the lines of each box."""
    return max(map(text_width, side)) + STEP * (len(side) - 1)


def _short(text: str) -> str:
    """A text of at most `LONGEST` letters: a longer one loses its middle."""
    half = LONGEST // 2
    return text if len(text) <= LONGEST else f"{text[: half - 1]}…{text[-half:]}"


def _type(value: Value) -> str:
    """The dtype and the shape of a value as text: `float32[3]`."""
    return str(value)[len(value.name) + 2 :]


def _few(named: Iterable[tuple[str, Value]]) -> tuple[list[tuple[str, Value]], Lines]:
    """The values to show, in their order, and a summary of the others.

    Args:
      named: Pairs of a text and a value.

    Returns:
      `(pairs, summary)`: all pairs and (), or the `SHOWN` largest values and two lines
      on the number and the bytes of the others.
    """
    pairs = list(named)
    if len(pairs) <= SHOWN + 1:
        return pairs, ()
    order = sorted(range(len(pairs)), key=lambda i: -pairs[i][1].nbytes)
    rest = sum(pairs[i][1].nbytes for i in order[SHOWN:])
    more = f"+ {len(pairs) - SHOWN} more", f"{size(rest)} in all"
    return [pairs[i] for i in sorted(order[:SHOWN])], more


def _messages(named: Iterable[tuple[str, Value]]) -> tuple[Lines, ...]:
    """The lines of text of each value that is sent: its name, type and size.

    The last are a summary, if there are more values than are shown. `named` are pairs
    of a text and a value.
    """
    shown, more = _few(named)
    lines = [(_short(name), f"{_type(v)}  {size(v.nbytes)}") for name, v in shown]
    return (*lines, more) if more else tuple(lines)


def listed(title: Lines, values: Iterable[Value]) -> Lines:
    """The lines of a box: a title, then the largest of the values; () if none."""
    shown, more = _few((v.name, v) for v in values)
    room = [LONGEST - len(_type(v)) for _, v in shown]
    lines = [
        f"{_short(name) if len(name) > most else name}: {_type(v)}"
        for most, (name, v) in zip(room, shown, strict=True)
    ]
    return (*title, *lines, *([", ".join(more)] if more else [])) if shown else ()


def _column(plan: Plan, number: int, location: str) -> Column:
    """The `Column` of a round; `number` is that of the round in the plan, from 1."""
    a_round = plan.rounds[number - 1]
    # Values that are live after this round are saved in the groups.
    live = {v.name for v in plan.outputs}
    for r in plan.rounds[number:]:
        live |= {v.name for v in r.local.inputs} | {r.source.name for r in r.reduces}
    for r in plan.rounds[number - 1 :]:
        live |= {v.name for loop in r.loops for v in loop.inputs}
    down = [(v.name, v) for v in a_round.broadcast]
    down += [(f"slice i of {whole.name}", part) for whole, part in a_round.scatter]
    up = [(f"{r.op} of {r.source.name}", r.source) for r in a_round.reduces]
    local: Lines = ()
    if not a_round.local.empty:
        local = tuple(textwrap.wrap(a_round.local.name, LONGEST)[:3])
        kept = (v for v in a_round.local.outputs if v.name in live)
        local += listed(("keeps",), kept)
    elif down or up:
        local = ("no work",)
    sums = [
        f"{sign} {size(sum(v.nbytes for _, v in side))}"
        for sign, side in (("↓", down), ("↑", up))
        if side
    ]
    head = (f"round {number}", *([f"{'  '.join(sums)} a group"] if sums else []))
    server = listed(("server computes",), a_round.server.outputs)
    return Column(location, head, server, _messages(down), _messages(up), local)


def items_of(plan: Plan, prefix: str = "") -> list:
    """The `Column`s and `Frame`s of a plan or of a loop's body, from left to right.

    `prefix` is what the locations of its rounds begin with: empty, or of a body the
    location of the loop.
    """
    items: list = []
    for number, a_round in enumerate(plan.rounds, 1):
        location = f"{prefix}round {number}"
        column = _column(plan, number, location)
        if column.server or column.local:
            items.append(column)
        items += [_frame(loop, number, location) for loop in a_round.loops]
    if not plan.server.empty:
        server = listed(("server computes",), plan.server.outputs)
        items.append(Column(f"{prefix}end", ("at the end",), server))
    return items


def _frame(loop: Loop, number: int, location: str) -> Frame:
    """The `Frame` of a loop, around the columns of its bodies.

    Args:
      loop: The loop.
      number: The number of its round in the plan, from 1.
      location: The location of its round.
    """
    title = f"round {number}: {loop.op}"
    if loop.length is not None:
        title += f", {loop.length:,} step{'s' * (loop.length != 1)}"
        title += ", last to first" if loop.reverse else ""
    first = sum(loop.consts)
    carried = [v.name for v in loop.inputs[first : first + loop.carry]]
    shown = _short("carries " + ", ".join(carried)) if carried else ""
    parts = [f"branch {i}" for i in range(len(loop.bodies))]
    if loop.op == "while":
        parts = ["condition", "body"]
    bodies = [
        items_of(body, f"{location}, {loop.name}, {part}, ")
        for body, part in zip(loop.bodies, parts, strict=True)
    ]
    if loop.op == "scan":
        return Frame((title, shown), bodies[0])
    return Frame(
        (title, shown),
        [
            Frame((part, "" if items else "nothing to do"), items)
            for part, items in zip(parts, bodies, strict=True)
        ],
    )


def columns_of(plan: Plan) -> list:
    """All `Column`s and `Frame`s of a picture, with the plan's inputs and outputs."""
    ends = []
    for name, values in (("inputs", plan.inputs), ("outputs", plan.outputs)):
        server = listed((), (v for v in values if not v.partitioned))
        local = listed((), (v for v in values if v.partitioned))
        ends.append(Column(name, (name,), server, local=local, kind="value"))
    return [ends[0], *items_of(plan), ends[1]]


def every(items: list) -> Iterator[tuple[Column | Frame, int]]:
    """All columns and frames, also those inside frames, each with its depth.

    The depth is the number of frames around.
    """
    for item in items:
        yield item, 0
        if isinstance(item, Frame):
            yield from ((inner, depth + 1) for inner, depth in every(item.items))
