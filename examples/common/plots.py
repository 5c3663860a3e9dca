"""Plots of a run, as PNG files."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from PIL import Image

DPI = 120
Values = np.ndarray | jax.Array


def save(figure: Figure, path: Path) -> None:
    """Writes a figure, and makes its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI)


def save_card(figure: Figure, path: Path) -> None:
    """Writes what can be read on a card: the first panel of several, or the figure."""
    save(figure, path)
    panels = [x for x in figure.axes if x.get_label() != "<colorbar>"]
    box = panels[0].get_tightbbox()
    if len(panels) == 1 or box is None:
        return
    # What is cut is the picture: `bbox_inches` moves the legends of a figure.
    left, low, right, top = np.array(box.extents) * DPI / figure.dpi
    with Image.open(path) as image:
        width, height = image.size
        corners = left - 6, height - top - 6, right + 6, height - low + 6
        x0, y0, x1, y1 = np.clip(corners, 0, (width, height) * 2).astype(int).tolist()
        card = image.crop((x0, y0, x1, y1))
    card.save(path)


def group_spread(
    path: Path,
    rounds: Sequence[int],
    losses: Sequence[Sequence[float]],
    names: Sequence[str],
    ours: np.ndarray,
    baseline: np.ndarray,
) -> None:
    """Plots how loss spreads over groups.

    Args:
        losses: the loss of each group of each round.
        names, ours, baseline: held-out groups and their losses under two models.
    """
    figure = Figure(figsize=(11, 5.5), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    array = np.asarray(losses)
    low, middle, high = np.quantile(array, (0.1, 0.5, 0.9), axis=1)
    x = np.repeat(rounds, array.shape[1])
    left.scatter(x, array.ravel(), s=6, color="0.5", alpha=0.5, label="one group")
    left.fill_between(rounds, low, high, alpha=0.25, label="10 % to 90 %")
    left.plot(rounds, middle, color="tab:blue", label="median")
    left.set(
        xlabel="round",
        ylabel="loss (nats per byte)",
        title=f"The {array.shape[1]} training groups of each round",
    )
    left.grid(alpha=0.3)
    left.legend()
    order = np.argsort(ours)
    y = np.arange(len(order))
    right.hlines(y, ours[order], baseline[order], color="0.8", zorder=1)
    right.scatter(ours[order], y, color="tab:orange", label="transformer")
    right.scatter(baseline[order], y, color="0.35", marker="|", s=80, label="bigram")
    right.set_yticks(y, [names[i] for i in order], fontsize=8)
    right.set(xlabel="loss (nats per byte)", title="Held-out modules")
    right.grid(axis="x", alpha=0.3)
    right.legend()
    save(figure, path)


def sharding_of(
    path: Path, array: jax.Array, names: Sequence[str], title: str, xlabel: str
) -> None:
    """Draws a partitioned array [n, columns, width], each shard in its device's color.

    A cell is the norm over `width`: pale for a row's smallest, full for its largest.
    """
    colors = matplotlib.color_sequences["tab10"]
    picture = np.ones((*array.shape[:2], 3))
    devices = {}
    for shard in array.addressable_shards:
        if shard.replica_id:
            continue
        norms = np.linalg.norm(np.asarray(shard.data), axis=-1, keepdims=True)
        low, high = norms.min(1, keepdims=True), norms.max(1, keepdims=True)
        ink = (norms - low) / np.maximum(high - low, 1e-12)
        color = np.array(colors[len(devices) % len(colors)])
        picture[shard.index[0]] = 1 - (0.15 + 0.85 * ink) * (1 - color)
        devices[str(shard.device)] = (color, shard.data.shape)
    figure = Figure(figsize=(11, 5), layout="constrained")
    axes = figure.subplots()
    axes.imshow(picture, aspect="auto", interpolation="nearest")
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set(xlabel=xlabel, ylabel="group", title=title)
    handles = [
        Patch(color=color, label=f"{device}\n{list(shape)}")
        for device, (color, shape) in devices.items()
    ]
    title = "device and shard\n(full color: largest\nnorm in the row)"
    figure.legend(handles=handles, title=title, loc="outside right center", fontsize=8)
    save(figure, path)


def fitted_curves(
    x: Values,
    tasks: Sequence[tuple[tuple[Values, Values], tuple[Values, Values]]],
    curves: Mapping[tuple[str, int], Sequence[Values]],
    steps: Sequence[int],
) -> Figure:
    """Plots fits of sinusoids, one row per initialization and one column per task.

    Args:
        x: where the curves are given.
        tasks: (points to fit, points of the truth), each a pair (x, y).
        curves: by (initialization, number of the task), one curve for each of `steps`.
    """
    names = list(dict.fromkeys(name for name, _ in curves))
    shape = len(names), len(tasks)
    figure = Figure(figsize=(3.2 * shape[1], 2.4 * shape[0]), layout="constrained")
    grid = figure.subplots(*shape, sharex=True, sharey="col", squeeze=False)
    shades = matplotlib.colormaps["viridis"](np.linspace(0.7, 0.1, len(steps)))
    for row, name in zip(grid, names, strict=True):
        row[0].set_ylabel(name)
        for i, (axes, (support, query)) in enumerate(zip(row, tasks, strict=True)):
            order = np.argsort(query[0])
            truth = query[0][order], query[1][order]
            axes.plot(*truth, color="0.75", linewidth=4, label="truth")
            for step, curve, shade in zip(steps, curves[name, i], shades, strict=True):
                axes.plot(x, curve, color=shade, label=f"steps: {step}")
            axes.plot(*support, "^", color="tab:red", label="points to fit")
            axes.grid(alpha=0.3)
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(handles))
    return figure
