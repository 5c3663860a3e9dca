"""Draw the README's figure from the committed tables of the benchmarks.

    python -m benchmarks.proofs

Four panels, and nothing in them is measured here: `benchmarks.plans` measured memory,
`benchmarks.combinations` the collectives, `benchmarks.ledgers` the bytes of algorithms
and `benchmarks.same_numbers` the engines. Text and lines have colors that can be read
on white and on black, and the background is transparent.
"""

import argparse
import re
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
MEMORY = "plans-jax-0.12.0.1.md"
COLLECTIVES = "combinations-jax-0.12.0.1.md"
LEDGERS = "ledgers.md"
ENGINES = "same-numbers.md"
TASK, DEVICES = "gradient through 5 rounds", "1"

GRAY, BLUE, ORANGE, GREEN = "#768390", "#2f81f7", "#d4762c", "#3d9a50"
STYLE: dict[Any, Any] = {
    **dict.fromkeys(
        ("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), GRAY
    ),
    "axes.edgecolor": GRAY,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "font.size": 9,
    "legend.frameon": False,
    "svg.hashsalt": "drjax",  # the same file from the same tables
}


def lines(name: str, columns: int, section: str = "") -> list[list[str]]:
    """The cells of the table with so many columns, in a section of a file."""
    text = (RESULTS / name).read_text()
    text = text[text.index(section) :].partition("\n## ")[0]
    cells = [x.strip("| ").split(" | ") for x in text.splitlines() if x[:1] == "|"]
    cells = [[cell.strip() for cell in line] for line in cells]
    return [line for line in cells if len(line) == columns and "--" not in line[1]][1:]


def number(cell: str) -> float:
    """The first number in a cell: of `1,573.9 (1.000)`, 1573.9."""
    return float(re.split(r"[ (]", cell.replace(",", ""))[0])


def memory() -> dict[str, list[float]]:
    """Temporary megabytes for n = 8, 64, 512 and 4096, by implementation."""
    # Wide tables are split: the last number of groups has a table of its own.
    section, result = "## Temporary memory", {}
    for line in lines(MEMORY, 6, section) + lines(MEMORY, 4, section):
        if line[:2] == [TASK, DEVICES]:
            result.setdefault(line[2], []).extend(number(x) / 1e3 for x in line[3:])
    return result


def collective_bytes() -> dict[str, dict[str, float]]:
    """Bytes of each task's collectives, by how it is written."""
    result: dict[str, dict[str, float]] = {}
    task = ""
    text = (RESULTS / COLLECTIVES).read_text()
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 5 and re.search(r"\d", cells[2]):
            task = cells[0] or task
            counts = re.findall(r" ([\d,]+)", f" {cells[2]}")
            result.setdefault(task, {})[cells[1]] = sum(map(number, counts))
    return result


def ledgers() -> dict[str, list[float]]:
    """Megabytes down, up and between groups, by algorithm."""
    return {line[0]: [number(x) / 1e6 for x in line[1:4]] for line in lines(LEDGERS, 5)}


def differences() -> dict[str, dict[str, float]]:
    """The relative difference from the reference, by plan and engine."""
    engines = ("xla", "ray", "beam", "flower")
    return {
        line[0]: dict(zip(engines, map(float, line[1:]), strict=True))
        for line in lines(ENGINES, 5)
    }


def _memory(ax: Axes) -> None:
    measured, n = memory(), (8, 64, 512, 4096)
    ax.loglog(
        n, measured["jax.jit of the program"], "o-", color=ORANGE, label="jax.jit"
    )
    ax.loglog(
        n, measured["google drjax"], "x", color=GRAY, ms=8, label="Google's drjax"
    )
    ax.loglog(n, measured["hand-written shard_map, scan, 1"], "s-", color=GREEN,
              ms=4, label="hand-written scan, groups checkpointed")  # fmt: skip
    ax.loglog(n, measured["drjax.jit, 1"], "o-", color=BLUE, label="drjax.jit")
    ax.set_xticks(n, map(str, n))
    ax.minorticks_off()
    ax.set(xlabel="groups on one device", ylabel="temporary memory, MB")
    ax.set_title("Temporary memory of a gradient through 5 rounds", loc="left")
    ax.legend()


def _collectives(ax: Axes) -> None:
    named = collective_bytes()
    tasks = named.values()
    hand_written = [task["shard_map"] for task in tasks]
    limits = min(hand_written) / 2, 2 * max(task["jax.numpy"] for task in tasks)
    ax.loglog(limits, limits, color=GRAY, lw=1)
    for way, marker, color in (("jax.numpy", "x", ORANGE), ("drjax", "o", BLUE)):
        sent = [task[way] for task in tasks]
        ax.loglog(hand_written, sent, marker, color=color, mfc="none", label=way)
    exception = named["logsumexp"]
    x, y = exception["shard_map"] * 0.85, exception["drjax"]
    ax.text(x, y, "logsumexp", ha="right", va="center")
    ax.set(xlabel="bytes, hand-written shard_map", ylabel="bytes that a device sends")
    ax.set_title(f"Communication of {len(hand_written)} operations", loc="left")
    ax.legend()


def _ledgers(ax: Axes) -> None:
    measured = ledgers()
    kinds = (
        ("server to group", BLUE),
        ("group to server", ORANGE),
        ("group to group", GREEN),
    )
    left = [0.0] * len(measured)
    for i, (label, color) in enumerate(kinds):
        values = [counts[i] for counts in measured.values()]
        ax.barh([*measured], values, left=left, color=color, height=0.6, label=label)
        left = [a + b for a, b in zip(left, values, strict=True)]
    ax.invert_yaxis()
    ax.set(xlabel="MB a group, for 8 gradients of a 4 MB model")
    ax.set_title("Bytes of algorithms, from their plans", loc="left")
    ax.legend(loc="lower right")


def _engines(ax: Axes) -> None:
    shapes = zip(differences().items(), (("o", BLUE), ("s", ORANGE)), strict=True)
    for (plan, values), (marker, color) in shapes:
        # Equal bits have no place on a logarithmic axis: they are at its left end.
        shown = [max(x, 1e-9) for x in values.values()]
        ax.semilogx(
            shown,
            [*values],
            marker,
            color=color,
            mfc="none",
            label=plan.replace("_", " "),
        )
    ax.axvline(6e-8, color=GRAY, lw=1, ls="--")
    ax.text(5e-8, 2.5, "float32 rounding ", ha="right", va="center")
    ax.set_xticks([1e-9, 1e-8, 1e-7, 1e-6], ["equal", "1e-8", "1e-7", "1e-6"])
    ax.set(xlim=(5e-10, 2e-6), ylim=(3.5, -0.5))
    ax.minorticks_off()
    ax.set(xlabel="largest relative difference from the reference")
    ax.set_title("One plan file on four engines", loc="left")
    ax.legend(loc="upper left")


def draw() -> Figure:
    """The figure with its four panels."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.2, 6.6), layout="constrained")
        axes = figure.subplots(2, 2).flat
        for ax, panel in zip(axes, (_memory, _collectives, _ledgers, _engines),
                             strict=True):  # fmt: skip
            panel(ax)
        return figure


def main() -> None:
    """Writes the figure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs/images/proofs.svg")
    out = parser.parse_args().out
    out.parent.mkdir(parents=True, exist_ok=True)
    figure = draw()
    with matplotlib.rc_context(STYLE):
        figure.savefig(out, transparent=True, metadata={"Date": None})


if __name__ == "__main__":
    main()
