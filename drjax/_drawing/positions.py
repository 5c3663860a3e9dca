"""The layout of a plan's picture: time from left to right, server above groups.

Input: a `drjax.plan.Plan`. Output: a `Picture`, boxes and arrows with their positions.

    plan -> columns and frames -> `Picture`

A `Picture` is pure data, in points from the top left: boxes with their text, and
arrows. All text is set in a font of fixed width, so the layout knows how wide it is
without matplotlib. The values that one round sends form a staircase: the arrow of
each enters at the top left and leaves at the bottom right, so no arrow crosses another
value. A loop is a frame around the columns of its bodies.
"""

from dataclasses import dataclass

from drjax._drawing.columns import (
    BUS,
    LETTER,
    PAD,
    STEP,
    Column,
    Frame,
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
    """Lines of text at a position.

    Attributes:
      kind: `title`, `label`, `band` (the server, a group), `frame` (a loop), `server`
        and `local` (stages), `value` (inputs, outputs), `down` and `up` (values sent).
      x, y, width, height: Its position and size.
      lines: Its text.
      location: The round that it belongs to, such as `round 1`.
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
    """A line through points, with a head at its end.

    Attributes:
      kind: `down` and `up` for values sent, `fan down` and `fan up` for their
        branches to all groups, `time` along the server and the groups.
      points: Its corners.
      location: The round that it belongs to.
    """

    kind: str
    points: tuple[tuple[float, float], ...]
    location: str = ""


@dataclass(frozen=True)
class Picture:
    """Boxes and arrows, in points from the top left, and the size of the whole."""

    width: float
    height: float
    boxes: tuple[Box, ...]
    arrows: tuple[Arrow, ...]


def layout(plan: Plan) -> Picture:
    """The picture of a plan: boxes and arrows with their positions."""
    items = columns_of(plan)
    n = plan.partition.size if plan.partition else 0
    groups = f"partition {plan.partition}" if plan.partition else "no groups"
    return _Layout(items, n, plan.name, groups).picture()


class _Layout:
    """Places the columns and frames of a plan, and collects boxes and arrows.

    Heights are computed first, over all columns; then columns are placed from left to
    right.

    Args:
      items: The `Column`s and `Frame`s of the picture.
      n: The number of groups; 0 without a partition.
      name: The name of the plan.
      groups: The line under it, on the partition.
    """

    def __init__(self, items: list, n: int, name: str, groups: str):
        self.items, self.boxes, self.arrows = items, [], []
        columns = [item for item, _ in every(items) if isinstance(item, Column)]
        depth = max((d + 1 for i, d in every(items) if isinstance(i, Frame)), default=0)
        self.depth, self.frames_y = depth, MARGIN + 44
        self.head_y = self.frames_y + 32 * depth
        self.server_y = self.head_y + text_height(("", "")) + 2
        tallest = max([24.0, *(text_height(c.server) for c in columns)])
        self.server_end = self.server_y + tallest + 12
        sides = [side for c in columns for side in (c.down, c.up)]
        self.row = text_height(("", "")) + 6
        self.rows = max(map(len, sides)) * self.row
        self.bus_y = self.server_end + 18 + self.rows + (24 if self.rows else 0)
        self.lane = max([24.0, *(text_height(c.local) for c in columns)]) + 12
        self.lanes = {}
        y = self.bus_y + (12 if self.rows else 0)
        for group in sorted({*range(min(n, 2)), *range(max(n - 1, 0), n)}):
            y += 22 if n > 3 and group == n - 1 else 0
            self.lanes[group] = y
            y += self.lane + 6
        self.bottom, self.n = max(y, self.server_end), n
        self.name, self.groups = name, groups

    def add(self, kind, x, y, lines, location="", width=None, height=None) -> Box:
        """Add a box of this kind, as large as its text by default, and return it."""
        size = width or text_width(lines), height or text_height(lines)
        self.boxes.append(Box(kind, x, y, *size, lines, location))
        return self.boxes[-1]

    def picture(self) -> Picture:
        """Place everything, and return the picture. To be called once."""
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
        """Text on the number of groups, if not all of them are drawn; else empty."""
        return f"… {self.n:,} in all" if self.n > 3 else ""

    def legend(self, y: float) -> None:
        """Add the legend; `y` is its top."""
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

    def place(self, items: list, x: float, depth: int) -> float:
        """Add the boxes and arrows of columns and frames; return the x of the next.

        Args:
          items: The `Column`s and `Frame`s, from left to right.
          x: The left edge of the first.
          depth: The number of frames around them.
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
        """Add the boxes and arrows of a column; `x` is its left edge."""
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

    def messages(self, kind, side, left, x, width, location) -> None:
        """Add the values that a round sends, as a staircase, with arrows to all groups.

        Args:
          kind: `"down"`, from the server to the groups, or `"up"`.
          side: The text of each value, as in `Column`.
          left: The left edge of the staircase.
          x: The left edge of the column.
          width: The width of the column.
          location: The round.
        """
        wide, ends = max(map(text_width, side)), []
        top = self.server_end + 18 + (self.rows - len(side) * self.row) / 2
        for i, lines in enumerate(side):
            box_x, y = left + (len(side) - 1 - i) * STEP, top + i * self.row
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
