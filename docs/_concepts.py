"""The pictures of `concepts.md`."""

import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, Rectangle

BLUE, ORANGE, GRAY, INK = "#9ecae1", "#fdae6b", "#d9d9d9", "#374151"
GROUPS = ("#9ecae1", "#a1d99b", "#fdae6b", "#bcbddc", "#fa9fb5", "#d9d9d9")


def _canvas(width: float, height: float):
    figure, axes = plt.subplots(figsize=(width, height))
    axes.set_xlim(0, width)
    axes.set_ylim(0, height)
    axes.axis("off")
    axes.set_aspect("equal")
    return figure, axes


def _box(axes, x, y, width, height, color, text=""):
    axes.add_patch(
        Rectangle((x, y), width, height, facecolor=color, edgecolor=INK)
    )
    axes.text(
        x + width / 2,
        y + height / 2,
        text,
        ha="center",
        va="center",
        color=INK,
    )


def _arrow(axes, start, end):
    style = {"arrowstyle": "-|>", "mutation_scale": 12, "color": INK}
    axes.add_patch(FancyArrowPatch(start, end, **style))


def groups():
    """An array with a slice for each group."""
    figure, axes = _canvas(7, 2.4)
    axes.text(
        1.2, 2.2, "data  [4, 3]", ha="center", color=INK, family="monospace"
    )
    for i in range(4):
        y = 1.6 - 0.5 * i
        for j in range(3):
            _box(axes, 0.6 + 0.4 * j, y, 0.4, 0.4, GROUPS[i])
        _arrow(axes, (2.0, y + 0.2), (3.6, y + 0.2))
        _box(axes, 3.8, y, 2.6, 0.4, GROUPS[i], f"group {i}: slice {i}")
    return figure


def kinds():
    """A global value, once; a partitioned value, a slice for each group."""
    figure, axes = _canvas(7, 2.4)
    axes.text(
        1.4, 2.2, "global  [3]", ha="center", color=INK, family="monospace"
    )
    for j in range(3):
        _box(axes, 0.8 + 0.4 * j, 1.2, 0.4, 0.4, GRAY)
    axes.text(
        1.4,
        0.7,
        "one value,\nthe server's",
        ha="center",
        va="center",
        color=INK,
    )
    axes.text(
        4.9,
        2.2,
        "partitioned  [4, 3]",
        ha="center",
        color=INK,
        family="monospace",
    )
    for i in range(4):
        for j in range(3):
            _box(axes, 4.3 + 0.4 * j, 1.6 - 0.5 * i, 0.4, 0.4, GROUPS[i])
        axes.text(
            5.7, 1.8 - 0.5 * i, f"group {i}'s", va="center", color=INK
        )
    return figure


def blocks():
    """broadcast, map_fn and reduce_sum, from the server to the groups and back."""
    figure, axes = _canvas(9, 3.2)
    _box(axes, 0.1, 1.3, 1.0, 0.5, GRAY, "x")
    for i in range(4):
        y = 2.5 - 0.75 * i
        _arrow(axes, (1.1, 1.55), (2.6, y + 0.2))
        _box(axes, 2.6, y, 1.0, 0.4, GROUPS[i], "x")
        _arrow(axes, (3.6, y + 0.2), (5.3, y + 0.2))
        _box(axes, 5.3, y, 1.2, 0.4, GROUPS[i], f"f(x, d{i})")
        _arrow(axes, (6.5, y + 0.2), (7.8, 1.55))
    _box(axes, 7.8, 1.3, 1.1, 0.5, GRAY, "Σ f(x, dᵢ)")
    for x, name in (
        (1.7, "broadcast"),
        (4.45, "map_fn"),
        (7.2, "reduce_sum"),
    ):
        axes.text(x, 3.05, name, ha="center", color=INK, family="monospace")
    return figure


def transposes():
    """Each block and its transpose."""
    figure, axes = _canvas(9, 2.2)
    lines = (
        (1.5, "forward", "broadcast", "map_fn(f)", "reduce_sum"),
        (0.3, "backward", "reduce_sum", "map_fn(fᵀ)", "broadcast"),
    )
    for y, name, *steps in lines:
        axes.text(0.1, y + 0.25, name, va="center", color=INK)
        for i, step in enumerate(steps):
            reduces = step == "reduce_sum"
            _box(
                axes,
                1.6 + 2.5 * i,
                y,
                2.0,
                0.5,
                ORANGE if reduces else BLUE,
                step,
            )
            if i:
                ends = (1.1 + 2.5 * i, y + 0.25), (1.6 + 2.5 * i, y + 0.25)
                _arrow(axes, *(ends if name == "forward" else ends[::-1]))
    axes.text(
        5.1, 1.15, "orange: an all-reduce. blue: no communication between devices",
        ha="center", va="center", color=INK,
    )  # fmt: skip
    return figure


def devices():
    """Six groups on three devices."""
    figure, axes = _canvas(8, 2.0)
    for device in range(3):
        x = 0.3 + 2.6 * device
        _box(axes, x, 0.2, 2.2, 1.6, "white")
        axes.text(
            x + 1.1,
            1.6,
            f"device {device}",
            ha="center",
            va="center",
            color=INK,
        )
        for k in range(2):
            i = 2 * device + k
            _box(
                axes,
                x + 0.2,
                0.85 - 0.5 * k,
                1.8,
                0.4,
                GROUPS[i],
                f"group {i}",
            )
    return figure
