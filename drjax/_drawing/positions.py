"""The layout of a plan's picture: time from left to right, server above groups.

Input: a `drjax.plan.Plan`. Output: a `Picture`, boxes and arrows with their positions.

    plan -> columns and frames -> `Picture`

A `Picture` is pure data, in points from the top left: boxes with their text, and
arrows. All text is set in a font of fixed width, so the layout knows how wide it is
without matplotlib. The values that one round sends form a staircase: the arrow of
each enters at the top left and leaves at the bottom right, so no arrow crosses another
value. A loop is a frame around the columns of its bodies.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from drjax._drawing.columns import (
    BUS,
    LETTER,
    PAD,
    STEP,
    Column,
    Frame,
    Item,
    Lines,
    columns_of,
    every,
    stairs,
    text_height,
    text_width,
)
from drjax.plan import Plan

MARGIN, GAP, INSET = 16.0, 30.0, 12.0
TITLE = 1.6  # times larger than other text


@dataclass(frozen=True)
class Box:
    """Lines of text at a position, with or without a rectangle around them.

    Attributes:
      kind: `title`, `label`, `band` (the server, a group), `frame` (a loop), `server`
        and `local` (stages), `value` (inputs, outputs), `down` and `up` (values sent).
      x, y: The position of its top left corner, in points from the picture's.
      width, height: Its size in points.
      lines: Its lines of text.
      location: The round that it belongs to, such as `round 1`; of a band its name.
    """

    kind: str
    x: float
    y: float
    width: float
    height: float
    lines: tuple[str, ...] = ()
    location: str = ""


@dataclass(frozen=True)
class Arrow:
    """A line through points; most kinds have an arrowhead at the last one.

    Attributes:
      kind: `down` and `up` for values sent, `fan down` and `fan up` for the branches of
        these to each group, `fan down bar` and `fan up bar` for the lines that connect
        the branches, `time` along the server and the groups, `key down` and `key up` in
        the legend. `fan up` and the bars have no head.
      points: The `(x, y)` of its corners, in points from the picture's top left.
      location: The round that it belongs to, such as `round 1`.
    """

    kind: str
    points: tuple[tuple[float, float], ...]
    location: str = ""


@dataclass(frozen=True)
class Picture:
    """A picture as data: boxes and arrows with positions, independent of matplotlib.

    Attributes:
      width, height: The size of the picture in points.
      boxes: The boxes; their positions are in points from the top left.
      arrows: The arrows, in the same unit.
    """

    width: float
    height: float
    boxes: tuple[Box, ...]
    arrows: tuple[Arrow, ...]


def layout(plan: Plan) -> Picture:
    """Lay out the picture of a plan: boxes and arrows with their positions."""
    items = columns_of(plan)
    n = plan.partition.size if plan.partition else 0
    groups = f"partition {plan.partition}" if plan.partition else "no groups"
    return _Layout(items, n, plan.name, groups).picture()


class _Layout:
    """Places the columns and frames of a plan, and collects boxes and arrows.

    Heights are computed first, over all columns; then columns are placed from left to
    right. All positions and sizes are in points, and y grows downwards. `n` is the
    number of groups, 0 without a partition; `name` is the title, and `groups` the line
    under it.

    Attributes:
      boxes, arrows: The `Box`es and `Arrow`s that were added so far.
      depth: The largest number of nested frames.
      frames_y, head_y: The tops of the outermost frame and of the columns' heads.
      server_y, server_end: The top and the bottom of the server's band.
      value_height: The height of one value that is sent, with the space to the next.
      values_height: The height of all values of the round that sends most of them.
      bus_y: The y of the lines that connect sent values to the groups' branches.
      lane: The height of a group's band.
      lanes: A dict from the index of each group that is drawn to the top of its band.
      bottom: The bottom of the lowest band.
    """

    def __init__(self, items: Sequence[Item], n: int, name: str, groups: str) -> None:
        self.items, self.boxes, self.arrows = items, [], []
        columns = [item for item, _ in every(items) if isinstance(item, Column)]
        depth = max((d + 1 for i, d in every(items) if isinstance(i, Frame)), default=0)
        self.depth, self.frames_y = depth, MARGIN + 44
        self.head_y = self.frames_y + 32 * depth
        self.server_y = self.head_y + text_height(("", "")) + 2
        tallest = max([24.0, *(text_height(c.server) for c in columns)])
        self.server_end = self.server_y + tallest + 12
        sides = [side for c in columns for side in (c.down, c.up)]
        self.value_height = text_height(("", "")) + 6
        self.values_height = max(map(len, sides)) * self.value_height
        self.bus_y = (
            self.server_end
            + 18
            + self.values_height
            + (24 if self.values_height else 0)
        )
        self.lane = max([24.0, *(text_height(c.local) for c in columns)]) + 12
        self.lanes = {}
        y = self.bus_y + (12 if self.values_height else 0)
        for group in sorted({*range(min(n, 2)), *range(max(n - 1, 0), n)}):
            y += 22 if n > 3 and group == n - 1 else 0
            self.lanes[group] = y
            y += self.lane + 6
        self.bottom, self.n = max(y, self.server_end), n
        self.name, self.groups = name, groups

    def add(
        self,
        kind: str,
        x: float,
        y: float,
        lines: Lines,
        location: str = "",
        width: float | None = None,
        height: float | None = None,
    ) -> Box:
        """Add a box to `boxes`, and return it.

        The location of a band is its name. The size is that of the text, unless given.
        """
        size = width or text_width(lines), height or text_height(lines)
        self.boxes.append(Box(kind, x, y, *size, lines, location))
        return self.boxes[-1]

    def picture(self) -> Picture:
        """Place all boxes and arrows, and return the picture; to be called once."""
        names = ["server", *(f"group {i}" for i in self.lanes)]
        left = MARGIN + text_width((max([*names, self.count], key=len),)) + 8
        right = self.place(self.items, left + 10, 0) - GAP + 10
        title = (self.name, self.groups)
        wide = PAD * 2 + LETTER * max(TITLE * len(self.name), len(self.groups))
        self.add("title", MARGIN, MARGIN - 4, title, width=wide, height=40)
        self.legend(self.bottom + 8 * self.depth + 14)
        bands = [(self.server_y, self.server_end - self.server_y)]
        bands += [(y, self.lane) for y in self.lanes.values()]
        for name, (y, height) in zip(names, bands, strict=True):
            self.add("band", left, y, (), name, right - left, height)
            middle = y + height / 2
            self.add("label", MARGIN, middle - text_height((name,)) / 2, (name,))
            self.arrows.append(Arrow("time", ((left, middle), (right + 8, middle))))
        if self.n > 3:
            y = self.lanes[self.n - 1] - 25
            self.add("label", MARGIN, y, (self.count,))
        width = max(right, *(b.x + b.width for b in self.boxes)) + MARGIN
        height = max(b.y + b.height for b in self.boxes) + MARGIN
        return Picture(width, height, tuple(self.boxes), tuple(self.arrows))

    @property
    def count(self) -> str:
        """The text on how many groups there are, such as `… 1,000 in all`.

        It is empty if all groups are drawn.
        """
        return f"… {self.n:,} in all" if self.n > 3 else ""

    def legend(self, y: float) -> None:
        """Add the legend at the top `y`, which explains the arrows down and up."""
        x = MARGIN + PAD
        for kind, text in (
            ("down", "to every group, bytes for each"),
            ("up", "from every group, bytes of each"),
        ):
            line = (text,)
            self.add("label", x + 26, y, line)
            middle = y + text_height(line) / 2
            self.arrows.append(Arrow("key " + kind, ((x, middle), (x + 26, middle))))
            x += text_width(line) + 50

    def place(self, items: Sequence[Item], x: float, depth: int) -> float:
        """Add the boxes and arrows of columns and frames, from left to right.

        `x` is the left edge of the first one, and `depth` the number of frames around
        them. Returns the left edge of what comes next, to the right of them.
        """
        for item in items:
            if isinstance(item, Frame):
                end = self.place(item.items, x + INSET, depth + 1) - GAP + INSET
                end = max(end, x + text_width(item.lines))
                y = self.frames_y + 32 * depth
                low = self.bottom + 8 * (self.depth - depth)
                self.add("frame", x, y, item.lines, "", end - x, low - y)
                x = end + GAP
            elif isinstance(item, Column):
                self.column(item, x)
                x += item.width + GAP
        return x

    def column(self, column: Column, x: float) -> None:
        """Add the boxes and arrows of a column, whose left edge is `x`."""
        kinds = ("server", "local") if column.kind == "stage" else ("value", "value")
        width, location = column.width, column.location
        self.add("label", x, self.head_y, column.head, location)
        if column.server:
            middle = (self.server_y + self.server_end) / 2
            y = middle - text_height(column.server) / 2
            self.add(kinds[0], x, y, column.server, location)
        inset = BUS if column.kind == "stage" else 0
        for lane in self.lanes.values() if column.local else ():
            y = lane + (self.lane - text_height(column.local)) / 2
            self.add(
                kinds[1], x + inset, y, column.local, location, width=width - 2 * inset
            )
        for kind, side in (("down", column.down), ("up", column.up)):
            if side:
                left = x if kind == "down" else x + width - stairs(side)
                self.messages(kind, side, left, x, width, location)

    def messages(
        self,
        kind: str,
        side: tuple[Lines, ...],
        left: float,
        x: float,
        width: float,
        location: str,
    ) -> None:
        """Add the values that a round sends, as a staircase, with arrows to all groups.

        `kind` is "down", from the server to the groups, or "up", from them to the
        server. `side` has for each value, one or more, its lines. `left` is the left
        edge of the staircase; `x` and `width` are those of the column.
        """
        wide, ends = max(map(text_width, side)), []
        top = (
            self.server_end
            + 18
            + (self.values_height - len(side) * self.value_height) / 2
        )
        for i, lines in enumerate(side):
            box_x, y = left + (len(side) - 1 - i) * STEP, top + i * self.value_height
            box = self.add(kind, box_x, y, lines, location, width=wide)
            middle = y + box.height / 2
            alone = len(side) == 1
            above = box_x + (wide / 2 if alone else STEP / 2)
            ends.append(box_x + (wide / 2 if alone else wide - STEP / 2))
            x_in, x_out = above, ends[-1]
            points = (
                (x_in, self.server_end),
                (x_in, middle),
                (x_out, middle),
                (x_out, self.bus_y),
            )
            points = points if kind == "down" else points[::-1]
            self.arrows.append(Arrow(kind, points, location))
        down = kind == "down"
        bus_x = x + STEP / 2 if down else x + width - STEP / 2
        edge = x + BUS if down else x + width - BUS
        middles = [y + self.lane / 2 for y in self.lanes.values()]
        for far in (max(ends), min(ends)):
            bar = ((far, self.bus_y), (bus_x, self.bus_y), (bus_x, middles[-1]))
            self.arrows.append(Arrow(f"fan {kind} bar", bar, location))
        for middle in middles:
            ways = ((bus_x, middle), (edge, middle))
            self.arrows.append(
                Arrow(f"fan {kind}", ways if down else ways[::-1], location)
            )
