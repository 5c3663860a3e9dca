"""Draw the records of `experiments.run`: the counterparts of the paper's figures.

    python -m experiments.plot                 # runs/experiments, PNGs beside them

What is drawn is what the compiler says of one device; no time on a chip is measured.
Beside each figure stands, in words, what Rush et al. 2024 (arXiv 2403.07128, section 4)
report for theirs.
"""

import dataclasses
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import tyro

from experiments.run import Record

PAPER = {
    "fig4": "Paper, figure 4: with as many more chips as groups, the time of a round "
    "of local SGD stays nearly the same.",
    "fig5": "Paper, figure 5: a Python loop over the groups takes time that grows "
    "with their number.",
    "fig6": "Paper, figure 6: without annotations of sharding the time of a round "
    "grows with the number of groups.",
    "groups_per_device": "Not in the paper: more groups than devices.",
}
PANELS = (
    ("flops, 10¹² per device", lambda r: r["flops"] / 1e12),
    ("temporary memory, GB per device", lambda r: r["temp bytes"] / 1e9),
    ("peak memory, GB per device", lambda r: r["peak bytes"] / 1e9),
    ("sent over the groups' axis, GB per device", lambda r: sent(r, "groups") / 1e9),
)


@dataclasses.dataclass(frozen=True)
class Options:
    """Draw all figures of which there are records."""

    records: Path = Path("runs/experiments")
    """Folder of the records."""
    out: Path = Path("runs/experiments")
    """Folder of the figures."""


def sent(record: Record, axis: str) -> int:
    """Bytes of collectives that go over a mesh axis, in a round."""
    return sum(
        c["bytes in a round"] for c in record["collectives"] if axis in c["axes"]
    )


def load(folder: Path) -> dict[str, list[Record]]:
    """The records by figure, in order of the number of groups."""
    found = defaultdict(list)
    for path in sorted(folder.glob("*.json")):
        record = json.loads(path.read_text())
        found[record["figure"]].append(record)
    for records in found.values():
        records.sort(key=_groups)
    return dict(found)


def _groups(record: Record) -> int:
    return record["settings"]["round"]["groups"]


def _line(record: Record) -> str:
    """What is drawn as one line: a model in one variant."""
    name = record["run"].rsplit("-", 1)[0]
    return f"{name}, {record['variant']}"


def draw(figure: str, records: Sequence[Record]) -> plt.Figure:
    """A panel for each quantity, against the number of groups.

    Where the compiler says that memory is too small there is a cross on the axis.
    """
    picture, axes = plt.subplots(1, len(PANELS), figsize=(16, 4), layout="constrained")
    lines = sorted({_line(r) for r in records})
    for (title, value), axis in zip(PANELS, axes, strict=True):
        for i, line in enumerate(lines):
            mine = [r for r in records if _line(r) == line]
            fits = [r for r in mine if "flops" in r]
            # Equal lines lie upon each other: the later ones are thinner.
            style = {
                "color": f"C{i}",
                "marker": "os^vDP"[i % 6],
                "lw": 2 * len(lines) - 2 * i,
                "markersize": 5 + 2 * (len(lines) - i),
            }
            xs, ys = [_groups(r) for r in fits], [value(r) for r in fits]
            axis.plot(xs, ys, label=line, **style)
            out = [_groups(r) for r in mine if "flops" not in r]
            axis.plot(out, [0] * len(out), "x", color=f"C{i}", markersize=10)
        axis.set(xscale="log", xlabel="groups", title=title)
        axis.set_xticks(sorted({_groups(r) for r in records}), minor=False)
        axis.get_xaxis().set_major_formatter("{x:g}")
        axis.minorticks_off()
        axis.set_ylim(0, 1.15 * axis.get_ylim()[1])
    axes[0].legend(fontsize=8)
    picture.suptitle(f"{PAPER.get(figure, '')}\nHere: the compiler's figures.", y=1.12)
    return picture


def table(records: Sequence[Record]) -> str:
    """The records as a table in Markdown."""
    titles = ["run", "variant", "devices", "groups", *(title for title, _ in PANELS)]
    rows = [titles, ["---"] * len(titles)]
    for r in records:
        told = [f"{value(r):.4g}" for _, value in PANELS] if "flops" in r else [
            r["out of memory"], *[""] * (len(PANELS) - 1)
        ]  # fmt: skip
        rows.append([r["run"], r["variant"], str(r["devices"]), str(_groups(r)), *told])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def main(options: Options) -> None:
    """Writes a PNG and a table for each figure."""
    found = load(options.records)
    if not found:
        raise SystemExit(f"There are no records in {options.records}: run experiments.")
    options.out.mkdir(parents=True, exist_ok=True)
    for figure, records in found.items():
        path = options.out / f"{figure}.png"
        draw(figure, records).savefig(path, dpi=120, bbox_inches="tight")
        (options.out / f"{figure}.md").write_text(table(records) + "\n")
        print(f"{path}: {len(records)} records")


if __name__ == "__main__":
    main(tyro.cli(Options))
