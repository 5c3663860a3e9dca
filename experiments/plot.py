"""Tables of the records of `experiments.run`, and figures of the tables.

    python -m experiments.plot                           # in runs/experiments
    python -m experiments.plot --out docs/experiments    # the committed tables again

The figures are the counterparts of the paper's. They show the compiler's results for
one device; no time on a chip is measured. The title of each figure has the result of
Rush et al. 2024 (arXiv 2403.07128, section 4). A model has a color and an
implementation has a marker, which is open, so that points that coincide can be seen.
"""

import dataclasses
import json
import re
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from benchmarks import report
from examples.common import plots
from experiments import links, variants
from experiments.run import Record

PAPER = {
    "fig4": "Paper, figure 4: with as many more chips as groups, the time of a round "
    "of local SGD stays nearly the same.",
    "fig5": "Paper, figure 5: a Python loop over the groups takes time that grows "
    "with their number.",
    "fig6": "Paper, figure 6: without annotations of sharding the time of a round "
    "grows with the number of groups.",
    "groups_per_device": "Not in the paper: more groups than devices.",
    "8b_float32": "Not in the paper: what makes 8B in float32 fit a core of TPU v2.",
    "chips": "Not in the paper: newer chips.",
    "h100": "Not in the paper: GPUs, by their compiler.",
    "fsdp_tensor": "Not in the paper: a group's model over two axes, FSDP and tensor.",
    "executed": "Rounds on CPU devices that share a machine's cores.",
}
PANELS = (
    ("flops, 10¹² per device", lambda r: r["flops"] / 1e12),
    ("temporary memory, GB per device", lambda r: r["temp bytes"] / 1e9),
    ("peak memory, GB per device", lambda r: r["peak bytes"] / 1e9),
    (
        "sent over groups, GB per device",
        lambda r: sent(r, variants.GROUPS) / 1e9,
    ),
)
MARKERS = {  # and their sizes: smaller ones inside larger ones
    "drjax": ("o", 13),
    "drjax jit": ("s", 8),
    "google drjax": ("D", 4),
    "shard_map": ("+", 12),
    "shard_map, scan": ("x", 8),
    "no annotations": ("^", 8),
    "python loop": ("v", 8),
    "rolled loop": ("<", 8),
}
Style = dict[str, Any]
Row = dict[str, str]  # the cells of a line of a table, by column


@dataclasses.dataclass(frozen=True)
class Options:
    """Write the tables of all records, and draw all tables."""

    records: Path = Path("runs/experiments")
    """Folder of the records; there may be none."""
    out: Path = Path("runs/experiments")
    """Folder of the tables and figures."""


def sent(record: Record, axis: str) -> int:
    """Bytes that a device sends in collectives over a mesh axis, in a round."""
    return sum(
        c["bytes sent in a round"] for c in record["collectives"] if axis in c["axes"]
    )


def formula(record: Record) -> float:
    """Operations of a device by 6 N T (Kaplan et al. 2020, arXiv 2001.08361, 2.1).

    N parameters and T tokens of a group's round, whose devices share the work. Not
    included: rematerialization, the products of attention, and what a device computes
    for other groups.
    """
    settings, mesh = record["settings"]["round"], record["mesh"]
    devices = record["devices"] // mesh["groups"]
    tokens = settings["steps"] * settings["batch"] * settings["length"]
    groups = settings["groups"] / mesh["groups"]
    return 6 * record["parameters"] * tokens * groups / devices


def on_links(record: Record) -> str:
    """Modeled milliseconds of the collectives over the group axis, or nothing."""
    machine = record["settings"]["machine"]
    chip = links.CHIPS.get(machine["topology"].split(":")[0])
    if machine["platform"] != "tpu" or chip is None:
        return ""
    axes = {variants.GROUPS}
    times = []
    for network in ("ici", "dcn")[: 1 if chip.dcn is None else 2]:
        took = links.seconds(record["collectives"], axes, chip, network)
        times.append(f"{1e3 * took:.3g} {network.upper()}")
    return ", ".join(times)


def load(folder: Path) -> dict[str, list[Record]]:
    """The records by figure, in order of the number of groups."""
    result = defaultdict(list)
    for path in sorted(folder.glob("*.json")):
        record = json.loads(path.read_text())
        result[record["figure"]].append(record)
    for records in result.values():
        records.sort(key=_groups)
    return dict(result)


def _groups(record: Record) -> int:
    return record["settings"]["round"]["groups"]


def table(records: Sequence[Record]) -> str:
    """The records as a table in Markdown."""
    titles = [
        "run", "variant", "devices", "groups", *(title for title, _ in PANELS),
        "flops by 6NT", "on links, ms (model)",
    ]  # fmt: skip
    rows = []
    for r in records:
        about = [r["run"], r["variant"], str(r["devices"]), str(_groups(r))]
        if "flops" in r:
            cells = [f"{value(r):.4g}" for _, value in PANELS]
            cells += [f"{formula(r) / r['flops']:.0%}", on_links(r)]
        else:
            cells = [r["out of memory"], *[""] * (len(PANELS) + 1)]
        rows.append([*about, *cells])
    return report.table(titles, rows, keys=2)


def _lies(record: Record) -> str:
    machine = record["settings"]["machine"]
    return f"{machine['devices']} in {machine['processes']}"


def seconds(record: Record) -> float:
    """Of a round, without the first one if there are more."""
    return statistics.median(record["round s"][1:] or record["round s"])


def _model(record: Record) -> str:
    return record["run"].split("-")[0]


def table_executed(records: Sequence[Record]) -> str:
    """The records of executed rounds as a table in Markdown."""
    titles = [
        "model, variant", "devices, in processes", "10⁹ operations of a device",
        "seconds of a round", "last loss", "largest difference of a loss",
    ]  # fmt: skip
    first = {_model(r): r["losses"] for r in reversed(records)}
    far = lambda r: max(map(abs, np.subtract(r["losses"], first[_model(r)])))
    rows = [
        [f"{_model(r)}, {r['variant']}", _lies(r), f"{r['flops'] / 1e9:.4g}",
         f"{seconds(r):.3g}", f"{r['losses'][-1]:.6f}", f"{far(r):.1e}"]
        for r in records
    ]  # fmt: skip
    return report.table(titles, rows)


# ---------------------------------------------------------------------------------
# Figures


def read(path: Path) -> list[Row]:
    """The lines of a table, which may be split into tables of fewer columns."""
    rows: dict[tuple[str, ...], Row] = {}
    for text in path.read_text().split("\n\n"):
        lines = [[x.strip() for x in x.split("|")[1:-1]] for x in text.splitlines()]
        header, _, *body = lines
        for cells in body:
            rows.setdefault(tuple(cells[:2]), {}).update(
                zip(header, cells, strict=True)
            )
    return list(rows.values())


def number(row: Row, column: str) -> float | None:
    """The number in a cell; None where memory was too small."""
    try:
        return float(row[column])
    except ValueError:
        return None


def draw(figure: str, rows: Sequence[Row]) -> Figure:
    """A panel for each quantity, by the number of groups or else by the model.

    A marker above or right of a panel: the compiler says that memory is too small.
    """
    lines: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        lines[re.sub(r"-n\d+", "", row["run"]), row["variant"]].append(row)
    models = sorted({model for model, _ in lines})
    by_model = all(len(mine) == 1 for mine in lines.values())
    picture = Figure(figsize=(9.6, 7), layout="constrained")
    grid = picture.subplots(2, 2, sharex=not by_model, sharey=by_model)
    for axis, (column, _) in zip(grid.flat, PANELS, strict=True):
        for (model, variant), mine in lines.items():
            style = _style([model] if by_model else models, model, variant)
            place = models.index(model)
            (_point if by_model else _curve)(axis, mine, column, place, style)
        every = [x for row in rows if (x := number(row, column)) is not None]
        if by_model:
            axis.set(xlim=(0, 1.1 * max(every)), ylim=(len(models) - 0.5, -0.5))
            axis.set_yticks(range(len(models)), models)
        else:
            ticks = sorted({int(row["groups"]) for row in rows})
            axis.set(xscale="log", xlabel="groups" if axis in grid[-1] else "")
            axis.set_xticks(ticks, map(str, ticks))
            axis.minorticks_off()
            if max(every) > 50 * min(every):
                axis.set_yscale("log")
            else:
                axis.set_ylim(0, 1.15 * max(every))
        axis.set_title(column, pad=16)
        axis.grid(alpha=0.3)
    _legend(picture, [] if by_model else models, {variant for _, variant in lines})
    picture.suptitle(f"{PAPER[figure]}\nHere: the compiler's figures.", fontsize=10)
    return picture


def _curve(axis: Axes, rows: list[Row], column: str, _: int, style: Style) -> None:
    """A model in one variant, by the number of groups."""
    points = [(int(row["groups"]), number(row, column)) for row in rows]
    axis.plot(*zip(*[x for x in points if x[1] is not None], strict=True), **style)
    out = [groups for groups, value in points if value is None]
    above: Style = {"transform": axis.get_xaxis_transform(), "linestyle": "none"}
    outside: Style = {"clip_on": False, "in_layout": False}
    axis.plot(out, [1.05] * len(out), **style | above | outside)


def _point(axis: Axes, rows: list[Row], column: str, place: int, style: Style) -> None:
    """A model in one variant, on the line of the model."""
    value = number(rows[0], column)
    if value is not None:
        axis.plot(value, place, **style)
    else:
        right: Style = {"transform": axis.get_yaxis_transform(), "clip_on": False}
        axis.plot(1.03, place, **style | right)


def _style(models: Sequence[str], model: str, variant: str) -> Style:
    """Color and marker; what is drawn first is larger, and seen below the others."""
    marker, size = MARKERS[variant]
    place = models.index(model)
    below = len(models) - 1 - place
    return {
        "color": f"C{place}", "marker": marker, "markersize": size + 4 * below,
        "fillstyle": "none", "linewidth": 1 + 2 * below,
    }  # fmt: skip


def _legend(picture: Figure, models: Sequence[str], present: set[str]) -> None:
    """The colors of the models, if they differ by color, and the markers."""
    handles = [Line2D([], [], color=f"C{i}", label=x) for i, x in enumerate(models)]
    for variant in MARKERS:
        if variant in present:
            style = _style([""], "", variant)
            style |= {"color": "0.35", "linestyle": "none"}
            handles.append(Line2D([], [], label=variant, **style))
    picture.legend(handles=handles, loc="outside lower center", ncols=6)


def draw_executed(rows: Sequence[Row]) -> Figure:
    """Work, time and losses of rounds that were run, by devices and processes."""
    picture = Figure(figsize=(9.6, 3.8), layout="constrained")
    lies, lines = "devices, in processes", defaultdict(list)
    for row in rows:
        lines[row["model, variant"]].append(row)
    ticks = sorted(
        {row[lies] for row in rows}, key=lambda x: [*map(int, x.split(" in "))]
    )
    models = list(dict.fromkeys(name.partition(", ")[0] for name in lines))
    panels = {
        "work of a device\n/ of the first run": "10⁹ operations of a device",
        "time of a round\n/ of the first run": "seconds of a round",
        "largest difference\nof a loss, 1e-7": "largest difference of a loss",
    }
    axes = picture.subplots(1, len(panels))
    for axis, (title, column) in zip(axes, panels.items(), strict=True):
        for name, mine in lines.items():
            model, _, variant = name.partition(", ")
            values = [float(row[column]) for row in mine]
            unit = values[0] or 1e-7  # the first run differs from itself by nothing
            places = [ticks.index(row[lies]) for row in mine]
            style = _style(models, model, variant)
            axis.plot(places, [x / unit for x in values], **style)
        axis.set(title=title, xlabel=lies, ylim=(-0.1, None))
        axis.set_xticks(range(len(ticks)), ticks)
        axis.grid(alpha=0.3)
    _legend(picture, models, {name.partition(", ")[2] for name in lines})
    picture.suptitle(PAPER["executed"], fontsize=10)
    return picture


def draw_table(path: Path) -> Figure:
    """The figure of a table, by the name of its file."""
    rows = read(path)
    return draw_executed(rows) if path.stem == "executed" else draw(path.stem, rows)


def main(options: Options) -> None:
    """Writes a table for each figure of which there are records, and a PNG for each."""
    options.out.mkdir(parents=True, exist_ok=True)
    for figure, records in load(options.records).items():
        if executed := all("losses" in r for r in records):
            records.sort(
                key=lambda r: (_model(r), r["devices"], _lies(r), r["variant"])
            )
        text = table_executed(records) if executed else table(records)
        (options.out / f"{figure}.md").write_text(text + "\n")
        minutes = sum(r["CPU s"] for r in records) / 60
        print(f"{figure}: {len(records)} records, {minutes:.1f} CPU minutes")
    tables = [options.out / f"{name}.md" for name in PAPER]
    tables = [path for path in tables if path.exists()]
    if not tables:
        raise SystemExit(f"There are no records in {options.records}: run experiments.")
    for path in tables:
        plots.save(draw_table(path), path.with_suffix(".png"))


if __name__ == "__main__":
    main(tyro.cli(Options))
