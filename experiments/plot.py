"""Draw the records of `experiments.run`: the counterparts of the paper's figures.

    python -m experiments.plot                 # records to PNGs, in runs/experiments

The figures show the compiler's results for one device; no time on a chip is measured.
The title of each figure has the result of Rush et al. 2024 (arXiv 2403.07128,
section 4).
"""

import dataclasses
import json
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import tyro

from benchmarks import report
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
    "fsdp_tensor": "Not in the paper: a group's model over two axes, FSDP and tensor.",
}
PANELS = (
    ("flops, 10¹² per device", lambda r: r["flops"] / 1e12),
    ("temporary memory, GB per device", lambda r: r["temp bytes"] / 1e9),
    ("peak memory, GB per device", lambda r: r["peak bytes"] / 1e9),
    (
        "communication over groups, GB per device",
        lambda r: sent(r, variants.GROUPS) / 1e9,
    ),
)


@dataclasses.dataclass(frozen=True)
class Options:
    """Draw all figures of which there are records."""

    records: Path = Path("runs/experiments")
    """Folder of the records."""
    out: Path = Path("runs/experiments")
    """Folder of the figures."""


def sent(record: Record, axis: str) -> int:
    """Bytes of the results of collectives over a mesh axis, in a round."""
    return sum(
        c["bytes in a round"] for c in record["collectives"] if axis in c["axes"]
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
    axes = {variants.GROUPS: record["mesh"]["groups"]}
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


def _line(record: Record) -> str:
    """What is drawn as one line: a model in one variant."""
    name = re.sub(r"-n\d+", "", record["run"])
    return f"{name}, {record['variant']}"


def draw(figure: str, records: Sequence[Record]) -> plt.Figure:
    """A panel for each quantity: against the number of groups, or as bars.

    Where the compiler says that memory is too small there is a cross on the axis.
    """
    lines: dict[str, list[Record]] = {}
    for record in sorted(records, key=lambda r: (_line(r), _groups(r))):
        lines.setdefault(_line(record), []).append(record)
    height = max(4, 0.3 * len(lines))
    picture, axes = plt.subplots(1, len(PANELS), figsize=(17, height))
    one_each = all(len({_groups(r) for r in mine}) == 1 for mine in lines.values())
    for (title, value), axis in zip(PANELS, axes, strict=True):
        (_bars if one_each else _curves)(axis, lines, value)
        axis.set_title(title)
    if not one_each:
        axes[-1].legend(loc="center left", bbox_to_anchor=(1.02, 0.5), fontsize=8)
    picture.suptitle(f"{PAPER.get(figure, '')}\nHere: the compiler's figures.", y=1.1)
    return picture


def _curves(axis: Any, lines: dict[str, list[Record]], value: Callable) -> None:
    """A line for each model in each variant."""
    every = [value(r) for mine in lines.values() for r in mine if "flops" in r]
    for i, (line, mine) in enumerate(lines.items()):
        fits = [r for r in mine if "flops" in r]
        # Equal lines lie upon each other: the later ones are thinner.
        above = 1 - (i + 1) / len(lines)
        axis.plot(
            [_groups(r) for r in fits], [value(r) for r in fits], f"C{i}", label=line,
            marker="os^vDP"[i % 6], lw=1.5 + 6 * above, markersize=5 + 7 * above,
        )  # fmt: skip
        out = [_groups(r) for r in mine if "flops" not in r]
        axis.plot(
            out, [0] * len(out), "x", color=f"C{i}", markersize=10, clip_on=False,
            transform=axis.get_xaxis_transform(),
        )  # fmt: skip
    axis.set(xscale="log", xlabel="groups")
    axis.set_xticks(sorted({_groups(r) for mine in lines.values() for r in mine}))
    axis.get_xaxis().set_major_formatter("{x:g}")
    axis.minorticks_off()
    if max(every) > 50 * min(every):
        axis.set_yscale("log")
    else:
        axis.set_ylim(0, 1.15 * max(every))


def _bars(axis: Any, lines: dict[str, list[Record]], value: Callable) -> None:
    """A bar for each model in each variant, the first on top."""
    for i, (record,) in enumerate(lines.values()):
        if "flops" in record:
            axis.barh(i, value(record), color="C0")
        else:
            axis.plot(0, i, "xC3", clip_on=False, markersize=10)
    first = axis.get_subplotspec().is_first_col()
    axis.set_yticks(range(len(lines)), list(lines) if first else [""] * len(lines))
    axis.invert_yaxis()
    axis.set_xlim(0, None)


def table(records: Sequence[Record]) -> str:
    """The records as a table in Markdown."""
    titles = [
        "run", "variant", "devices", "groups", *(title for title, _ in PANELS),
        "of it by 6NT", "on links, ms (model)",
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


def draw_executed(records: Sequence[Record]) -> plt.Figure:
    """Losses, work and time of rounds that were run, by devices and processes."""
    picture, axes = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    names = sorted({(_model(r), r["variant"]) for r in records})
    ticks = [lies for _, lies in sorted({(r["devices"], _lies(r)) for r in records})]
    for i, name in enumerate(names):
        mine = [r for r in records if (_model(r), r["variant"]) == name]
        for r in mine:
            axes[0].plot(range(1, 1 + len(r["losses"])), r["losses"], f"C{i}")
        style = {"color": f"C{i}", "marker": "os^v"[i % 4], "lw": 2 * (len(names) - i)}
        for axis, value in ((axes[1], lambda r: r["flops"]), (axes[2], seconds)):
            relative = [value(r) / value(mine[0]) for r in mine]
            positions = [ticks.index(_lies(r)) for r in mine]
            axis.plot(positions, relative, label=", ".join(name), **style)
    axes[0].set(title="loss, all runs", xlabel="round")
    axes[0].get_xaxis().get_major_locator().set_params(integer=True)
    axes[1].set(title="work of a device / that of the first run", ylim=(0, None))
    axes[2].set(title="time of a round / that of the first run", ylim=(0, None))
    for axis in axes[1:]:
        axis.set_xlabel("devices, in processes")
        axis.set_xticks(range(len(ticks)), ticks)
    axes[1].legend(fontsize=8)
    picture.suptitle("Rounds on CPU devices that share a machine's cores.")
    return picture


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


def main(options: Options) -> None:
    """Writes a PNG and a table for each figure."""
    result = load(options.records)
    if not result:
        raise SystemExit(f"There are no records in {options.records}: run experiments.")
    options.out.mkdir(parents=True, exist_ok=True)
    for figure, records in result.items():
        path = options.out / f"{figure}.png"
        if executed := all("losses" in r for r in records):
            records.sort(
                key=lambda r: (_model(r), r["devices"], _lies(r), r["variant"])
            )
        picture = draw_executed(records) if executed else draw(figure, records)
        picture.savefig(path, dpi=100, bbox_inches="tight")
        plt.close(picture)
        text = table_executed(records) if executed else table(records)
        (options.out / f"{figure}.md").write_text(text + "\n")
        minutes = sum(r["CPU s"] for r in records) / 60
        print(f"{path}: {len(records)} records, {minutes:.1f} CPU minutes")


if __name__ == "__main__":
    main(tyro.cli(Options))
