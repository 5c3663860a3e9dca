"""Paint a plan with matplotlib.

Input: a `drjax.plan.Plan` and a path. Output: an SVG or PNG file.

plan -> `Picture` -> figure -> file
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from drjax._drawing.columns import LINE, PAD
from drjax._drawing.positions import TITLE, Arrow, Box, Picture, layout
from drjax._errors import DrjaxValueError
from drjax._planner.arguments import check_known_shapes
from drjax.plan import Plan

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SETTINGS: Any = {
    "font.family": "DejaVu Sans Mono",
    "svg.hashsalt": "drjax",
    "text.hinting": "none",
}
# Colors of Okabe and Ito 2008, which color-blind people tell apart, and tints.
_DOWN, _UP, _LOOP = "#0072B2", "#D55E00", "#8A4B75"
_STYLES = {  # fill, edge, line width
    "band": ("#F3F4F6", "none", 0.0),
    "frame": ("none", _LOOP, 1.2),
    "server": ("#FFF6DC", "#B07D00", 0.9),
    "local": ("#DDF3EB", "#007A58", 0.9),
    "value": ("#FFFFFF", "#6B7280", 0.8),
    "down": ("#FFFFFF", _DOWN, 0.9),
    "up": ("#FFFFFF", _UP, 0.9),
}


def draw(plan: Plan, path: str | Path) -> None:
    """Write a picture of a plan to a file."""
    path = Path(path)
    if path.suffix.lower() not in (".svg", ".png"):
        raise DrjaxValueError(
            "Plan.draw needs a path that ends in .svg or .png, the two formats that it "
            f"writes, got {str(path)!r}."
        )
    check_known_shapes(plan, "drawn")
    _paint(layout(plan), path)


def _paint(picture: Picture, path: Path) -> None:
    """Write a picture to a file; `ImportError` if matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError(
            "Plan.draw paints with matplotlib, which is not installed: "
            "pip install matplotlib, or pip install '.[examples]' for all examples."
        ) from error
    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(SETTINGS):
        # A PNG may be 2**16 pixels wide. An SVG is the same whenever it is written.
        dpi = min(160, 60_000 * 72 / max(picture.width, picture.height))
        dated = {"Date": None} if path.suffix.lower() == ".svg" else {}
        figure_of(picture).savefig(path, dpi=dpi, metadata=dated)


def figure_of(picture: Picture) -> Any:
    """Draw a picture as a `matplotlib.figure.Figure`, whose axes are in points."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(picture.width / 72, picture.height / 72))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, picture.width), ylim=(picture.height, 0))
    axes.axis("off")
    for arrow in picture.arrows:
        _paint_arrow(axes, arrow)
    for box in picture.boxes:
        _paint_box(axes, box)
    return figure


def _paint_arrow(axes: "Axes", arrow: Arrow) -> None:
    """Draw an arrow into `matplotlib.axes.Axes` in points.

    Its kind determines its color, and whether it has a head.
    """
    words = arrow.kind.split()
    color = _DOWN if "down" in words else _UP if "up" in words else "#B8BDC6"
    x, y = zip(*arrow.points, strict=True)
    order = 1.5 if arrow.kind == "time" else 2
    axes.plot(x, y, color=color, lw=1.1, zorder=order, solid_joinstyle="round")
    if "bar" not in arrow.kind and arrow.kind != "fan up":
        style = {"arrowstyle": "-|>", "color": color, "lw": 1.1, "mutation_scale": 9}
        style |= {"shrinkA": 0, "shrinkB": 0}
        axes.annotate(
            "", arrow.points[-1], arrow.points[-2], arrowprops=style, zorder=order + 0.2
        )


def _paint_box(axes: "Axes", box: Box) -> None:
    """Draw a box with its text into `matplotlib.axes.Axes` in points.

    Its kind determines its colors, and the size of its text.
    """
    from matplotlib.patches import FancyBboxPatch

    order = {"band": 0, "frame": 1}.get(box.kind, 3)
    if box.kind in _STYLES:
        fill, edge, width = _STYLES[box.kind]
        shape = f"round,pad=0,rounding_size={3 if order == 3 else 5}"
        bounds = (box.x, box.y), box.width, box.height
        axes.add_patch(
            FancyBboxPatch(
                *bounds, boxstyle=shape, fc=fill, ec=edge, lw=width, zorder=order
            )
        )
    y = box.y + PAD
    for i, line in enumerate(box.lines):
        large = box.kind == "title" and i == 0
        strong = i == 0 and box.kind != "value"
        size = 8 if i == 0 or box.kind == "value" else 7.5
        color = "#111827" if i == 0 else "#374151"
        axes.text(
            box.x + PAD,
            y,
            line,
            parse_math=False,  # names of values may contain dollar signs
            va="top",
            zorder=4,
            size=8 * TITLE if large else size,
            weight="bold" if strong else "normal",
            color=_LOOP if box.kind == "frame" else color,
        )
        y += LINE * (TITLE if large else 1)
