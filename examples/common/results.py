"""What a run of the gallery leaves: a table, a figure and `results.json`."""

import dataclasses
import json
import os
import re
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from examples.common import plots

# Behind a published number that was not compared with the paper, as its text was not
# within reach.
UNCHECKED = "†"
STARTED = time.perf_counter()
Badge = Literal["number reached", "order reached", "exact", "no published number"]


@dataclasses.dataclass
class Results:
    """The numbers of a run next to the paper's; docs/gallery/index.md shows them."""

    title: str
    """Of the table."""
    columns: Sequence[str]
    table: Sequence[Sequence[Any]]
    measured: str
    """The result in one short sentence, which the gallery's card shows."""
    paper: str
    """Its published counterpart."""
    numbers: Mapping[str, Sequence[float]]
    """What is the same on any devices, to rounding; the figure has it."""
    badge: Badge | None = None
    """How the result compares with the published one, in the words of the gallery."""
    verdict: str = ""
    """Whether the claim of the example holds in this run."""
    remarks: Sequence[str] = ()
    """What differs from the paper, and where its numbers are not reached."""

    def write(self, folder: Path, config: Any, figure: Figure) -> None:
        """Prints it, and writes `results.json`, `figure.png` and `card.png`."""
        settings = dataclasses.asdict(config)
        del settings["output"]
        cores = len(os.sched_getaffinity(0))
        about = {
            "settings": {name: str(x) for name, x in settings.items()},
            "seconds": round(time.perf_counter() - STARTED),
            "cpu_seconds": round(time.process_time()),
            "machine": f"JAX {jax.__version__}, {cores} cores",
        }
        plots.save(figure, folder / "figure.png")
        plots.save_card(figure, folder / "card.png")
        text = json.dumps(dataclasses.asdict(self) | about, indent=1)
        (folder / "results.json").write_text(text + "\n")

        shown = Table(title=self.title)
        for i, column in enumerate(self.columns):
            shown.add_column(column, justify="right" if i else "left")
        for cells in self.table:
            shown.add_row(*map(str, cells))
        console = Console(highlight=False, soft_wrap=True)
        if self.verdict:
            console.print(f"Verdict: {self.verdict}")
        console.print(shown)
        for line in (self.measured, f"Published: {self.paper}", *self.remarks):
            console.print(line)
        seconds = f"{about['seconds']} s, {about['cpu_seconds']} s of the CPU"
        console.print(f"{seconds}. Results and figure: {folder}")


def show_spread(values: np.ndarray | Sequence[float], digits: str = ".3f") -> str:
    """The mean and the standard deviation of some values, each in this format."""
    return f"{np.mean(values):{digits}} ± {np.std(values):{digits}}"


def show_counts(counts: Sequence[float], limit: int) -> str:
    """The median, the least and the most of some counts; infinite: above a limit."""
    middle, least, most = (
        f"> {limit}" if x == float("inf") else f"{x:.0f}"
        for x in (statistics.median_low(counts), min(counts), max(counts))
    )
    return middle if least == most else f"{middle} ({least} to {most})"


def read_counts(cell: str) -> list[float]:
    """The median, the least and the most of the counts that `show_counts` wrote."""
    numbers = re.findall(r"(> )?(\d+)", cell)
    counts = [float("inf") if above else int(count) for above, count in numbers]
    return counts if len(counts) == 3 else 3 * counts


def is_less(
    one: Sequence[float] | np.ndarray,
    other: Sequence[float] | np.ndarray,
    *,
    paired: bool = False,
) -> bool:
    """Whether the runs of one are less than those of another by more than seeds do.

    All runs of the one are below all of the other. A badge counts no other order.

    Args:
        paired: a seed is that of the data and the start of both, so that what it does
            to both cancels: each run is below the other's with the same seed.
    """
    if paired:
        return all(a < b for a, b in zip(one, other, strict=True))
    return max(one) < min(other)


def lines(
    curves: Mapping[str, Sequence[float]],
    panels: Sequence[str] = ("",),
    *,
    target: float | None = None,
    first: int = 1,
    scale: Mapping[str, float] | None = None,
    xlabel: str,
    ylabel: str,
    log: str = "",
) -> Figure:
    """Plots curves by round, in one panel for each prefix of their names.

    The rest of a name is its label, which has the same color in all panels.

    Args:
        target: where to draw a dashed line.
        first: the number of the first round.
        scale: what a round of each curve counts, if not one.
        log: the axes that are logarithmic: "x", "y" or "xy".
    """
    columns = 2 if len(panels) == 4 else min(len(panels), 3)
    rows = -(-len(panels) // columns)
    size = (min(4 * columns + 1.6, 9.6), 3.6 if rows == 1 else 2.9 * rows)
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    grid = grid.ravel()
    colors: dict[str, str] = {}
    for ax, panel in zip(grid, panels, strict=False):
        for name, values in curves.items():
            if name.startswith(panel):
                label = name.removeprefix(panel).lstrip(": ")
                x = np.arange(first, len(values) + first) * (scale or {}).get(name, 1)
                color = colors.setdefault(label, f"C{len(colors)}")
                ax.plot(x, values, color, label=label)
        if target is not None:
            ax.axhline(target, color="0.35", linestyle="--", linewidth=1)
        ax.set(title=panel, xlabel=xlabel, ylabel=ylabel)
        for axis in log:
            ax.set(**{f"{axis}scale": "log"})
        ax.label_outer()
        ax.grid(alpha=0.3)
    for ax in grid[len(panels) :]:
        ax.set_axis_off()
    legends = [ax.get_legend_handles_labels() for ax in grid[: len(panels)]]
    if all(labels == legends[0][1] for _, labels in legends):
        figure.legend(*legends[0], loc="outside right upper")
    else:
        for ax in grid[: len(panels)]:
            ax.legend()
    return figure
