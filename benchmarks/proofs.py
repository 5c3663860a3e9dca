"""Draw the figures of the README and of the benchmarks' page from the committed tables.

    python -m benchmarks.proofs

Nothing in them is measured here: `benchmarks.run` measured times, `benchmarks.plans`
memory and planning, `benchmarks.combinations` the collectives, `benchmarks.ledgers` the
bytes of algorithms, `benchmarks.overlap` what is hidden, `benchmarks.plan_files` files,
`benchmarks.engines` and `benchmarks.same_numbers` the engines. Text and lines have
colors that can be read on white and on black, and the background is transparent.
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
OVERLAP = "overlap.md"
TIMES = "summary.md"
PLAN_FILES = "plan_files-jax-0.12.0.1.md"
LOADED = "load, and lower what is loaded / plan and lower"
ROUNDS = {  # of an engine and of the reference loop
    "Ray": "engines-ray-jax-0.12.0.1.md",
    "Beam": "engines-beam-jax-0.12.0.1.md",
    "Flower": "engines-flower-jax-0.12.0.1.md",
}
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


def hidden() -> dict[str, float]:
    """The hidden share of the bytes between two slices, by program, by `drjax.jit`."""
    names = {
        "a round a call, 2 slices, data, drjax.jit": "a round",
        "a round a call, 2 slices, model, drjax.jit": "divided model",
        "a step a call, 2 slices, model, jax.jit": "a step",
    }
    shares = {tuple(line[:2]): float(line[4].rstrip("%")) for line in lines(OVERLAP, 6)}
    return {
        f"{name}, {dtype}": shares[program, dtype]
        for program, name in names.items()
        for dtype in ("float32", "int8")
        if (program, dtype) in shares
    }


def differences() -> dict[str, dict[str, float]]:
    """The relative difference from the reference, by plan and engine."""
    engines = ("xla", "ray", "beam", "flower")
    return {
        line[0]: dict(zip(engines, map(float, line[1:]), strict=True))
        for line in lines(ENGINES, 5)
    }


def run_times() -> dict[str, dict[str, float]]:
    """Run time relative to hand-written code, by task and implementation."""
    result: dict[str, dict[str, float]] = {}
    for line in lines(TIMES, 6, "| task | implementation | run / hand-written |"):
        result.setdefault(line[0], {})[line[1]] = number(line[2])
    return result


def planning() -> dict[str, float]:
    """Time of `drjax.jit` relative to `jax.jit`, to trace and lower, by program."""
    cells = lines(MEMORY, 6, "## Time to plan and lower")
    return {line[0]: number(line[4]) for line in cells}


def plan_files() -> dict[str, list[float]]:
    """Milliseconds to plan, lower, save, load, and lower what is loaded, by program."""
    return {x[0]: [*map(number, x[1:])] for x in lines(PLAN_FILES, 6, "## Times")}


def engine_rounds() -> dict[str, dict[str, float]]:
    """Seconds of the last warm run, of each engine and of the reference loop."""
    result = {}
    for name, file in ROUNDS.items():
        text = (RESULTS / file).read_text()
        table = next(x for x in text.splitlines() if x.startswith("| seconds"))
        cells = lines(file, table.count("|") - 1, table)
        result[name] = {line[0]: number(line[-1]) for line in cells}
    return result


def _memory(ax: Axes) -> None:
    measured, n = memory(), (8, 64, 512, 4096)
    ax.loglog(
        n, measured["jax.jit of the program"], "o-", color=ORANGE, label="jax.jit"
    )
    ax.loglog(
        n, measured["google drjax"], "x", color=GRAY, ms=8, label="Google's drjax"
    )
    # Equal values: an open square around a point.
    ax.loglog(n, measured["hand-written shard_map, scan, 1"], "s", color=GREEN,
              ms=10, mfc="none", label="hand-written scan")  # fmt: skip
    ax.loglog(n, measured["drjax.jit, 1"], "o-", color=BLUE, label="drjax.jit")
    ax.set_xticks(n, map(str, n))
    ax.minorticks_off()
    ax.set(xlabel="groups on one device", ylabel="temporary memory, MB")
    ax.set_title("Memory of a gradient through 5 rounds", loc="left")
    ax.set_ylim(bottom=0.8)
    ax.legend(loc="center right", bbox_to_anchor=(1, 0.42))


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
    x, y = exception["shard_map"] * 1.2, exception["drjax"]
    ax.text(x, y, "logsumexp", ha="left", va="center")  # there is no other point
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


def _times(ax: Axes) -> None:
    measured = run_times()
    ways = {"drjax": BLUE, "google drjax": GRAY, "jit(vmap)": ORANGE}
    for i, (way, color) in enumerate(ways.items()):
        y = [j + 0.25 * (i - 1) for j in range(len(measured))]
        ax.barh(y, [x[way] for x in measured.values()], 0.22, color=color, label=way)
    ax.set_yticks(range(len(measured)), [*measured])
    ax.axvline(1, color=GRAY, lw=1, ls="--")
    ax.invert_yaxis()
    ax.set(xlabel="run time / hand-written shard_map with vmap")
    ax.set_title("Run time on 8 devices", loc="left")
    ax.legend()


def _planning(ax: Axes) -> None:
    measured = {k: v for k, v in planning().items() if k.startswith("10,000")}
    ax.barh([*measured], [*measured.values()], 0.6, color=BLUE)
    ax.axvline(1, color=GRAY, lw=1, ls="--")
    ax.invert_yaxis()
    ax.set(xlabel="drjax.jit / jax.jit, time to trace, plan and lower")
    ax.set_title("Planning of long programs", loc="left")


def _plan_files(ax: Axes) -> None:
    steps = ("plan", "lower", "save", "load", "lower loaded")
    for i, (name, values) in enumerate(plan_files().items()):
        y = [j + 0.35 * (i - 0.5) for j in range(len(steps))]
        ax.barh(y, values, 0.32, color=(ORANGE, BLUE)[i], label=name)
    ax.set_yticks(range(len(steps)), steps)
    ax.set_xscale("log")
    ax.set_xlim(left=10)
    ax.invert_yaxis()
    ax.set(xlabel="CPU time, ms, with cold caches")
    ax.set_title("Plan files", loc="left")
    ax.legend()


def _engine_rounds(ax: Axes) -> None:
    measured = {k: v for k, v in engine_rounds().items() if k != "Flower"}
    for i, way in enumerate(("engine", "reference")):
        y = [j + 0.35 * (i - 0.5) for j in range(len(measured))]
        label = "two workers" if way == "engine" else "reference loop"
        values = [x[way] for x in measured.values()]
        ax.barh(y, values, 0.32, color=(BLUE, GRAY)[i], label=label)
    ax.set_yticks(range(len(measured)), [*measured])
    ax.invert_yaxis()
    ax.set(xlabel="seconds, 10,000 tiny groups, warm")
    ax.set_title("Rounds of engines", loc="left")
    ax.legend()


def _hidden(ax: Axes) -> None:
    shares = hidden()
    left = [0.0] * len(shares)
    for name, color in (("hidden", BLUE), ("exposed", GRAY)):
        hides = name == "hidden"
        values = [x if hides else 100 - x for x in shares.values()]
        ax.barh([*shares], values, 0.6, left, color=color)
        ax.text(50, 0 if hides else 4, name, color="white", ha="center", va="center")
        left = values
    ax.invert_yaxis()
    ax.set(xlabel="% of Streaming DiLoCo's bytes between slices")
    ax.set_title("Hidden behind inner steps", loc="left")


def schedules() -> dict[str, list[tuple[str, int]]]:
    """What a chip does in a round, in order: `(event, number of inner steps)`."""
    result = {}
    for name, cell in lines(OVERLAP, 2, "What a chip does"):
        events = [x.split(" ") for x in cell.split(", ")]
        result[name] = [(x[-1], int(x[0]) if x[-1] == "steps" else 0) for x in events]
    return result


def _schedule(ax: Axes) -> None:
    """Inner steps of a round, and below them what is under way between slices."""
    wait = 1.5  # of an exposed exchange, in inner steps: its time is not known
    names = [*schedules()]
    for y, events in enumerate(schedules().values()):
        if not any(event == "steps" for event, _ in events):  # of one step's program
            exchange = [(event, 0) for event in ("send", "receive")]
            events = [("steps", 5), *exchange, ("steps", 10), *exchange, ("steps", 5)]
        time, sent = 0.0, 0.0
        for event, steps in events:
            if event == "steps":
                ax.barh(y, steps - 0.15, 0.3, time, color=BLUE)
                time += steps
            elif event == "send":
                sent = time
            else:
                hidden = time > sent
                time += 0 if hidden else wait
                color = GREEN if hidden else ORANGE
                ax.barh(y + 0.3, time - sent - 0.3, 0.2, sent, color=color)
    for label, color in (
        ("inner steps", BLUE), ("exchange, hidden", GREEN), ("exposed", ORANGE)
    ):  # fmt: skip
        ax.barh(0, 0, color=color, label=label)
    ax.set_yticks(range(len(names)), names)
    ax.invert_yaxis()
    ax.set(xlabel="inner steps of a round")
    ax.set_title("What a chip does", loc="left")
    ax.legend(ncols=3, loc="upper center", bbox_to_anchor=(0.4, -0.25))


PANELS = {  # of the page of benchmarks
    "times": _times,
    "collectives": _collectives,
    "memory": _memory,
    "planning": _planning,
    "ledgers": _ledgers,
    "hidden": _hidden,
    "schedule": _schedule,
    "plan_files": _plan_files,
    "engine_rounds": _engine_rounds,
    "engines": _engines,
}


def summary() -> str:
    """A sentence and a figure for each result, in Markdown, from the tables."""
    times = run_times()
    ours = [x["drjax"] for x in times.values()]
    sent = collective_bytes().values()
    equal = sum(x["drjax"] == x["shard_map"] for x in sent)
    temp = memory()
    flat, whole = temp["drjax.jit, 1"], temp["jax.jit of the program"]
    slow = max(planning().items(), key=lambda x: x[1])
    load = {x[0]: x[2] for x in lines(PLAN_FILES, 4, "## Goals")}
    load_share = number(load[LOADED].removeprefix("median ").replace(",", " "))
    rounds = {k: x["engine"] / x["reference"] for k, x in engine_rounds().items()}
    worst = max(max(x.values()) for x in differences().values())
    model = ledgers()
    sgd, local = (model[x][1] for x in ("SGD, averaged each step",
                                        "local SGD, FedAvg, DiLoCo"))  # fmt: skip
    results = {
        "times": (
            "Run time",
            f"Three tasks of 64 groups take {min(ours):.2f} to {max(ours):.2f} times "
            "as long as hand-written `shard_map` ([table](#the-blocks)).",
        ),
        "collectives": (
            "Communication",
            f"{equal} of {len(sent)} [operations](#ways-to-move-and-combine-groups) "
            "under `jax.jit` send the bytes of hand-written `shard_map`.",
        ),
        "memory": (
            "Memory",
            f"A gradient through five rounds takes {flat[0]:.1f} MB for 8 groups on a "
            f"device and {flat[-1]:.1f} MB for 4096 by `drjax.jit`, and "
            f"{whole[-1]:,.0f} MB by `jax.jit` ([plans](#plans)).",
        ),
        "planning": (
            "Planning",
            f"It costs {min(planning().values()):.1f} to {slow[1]:.1f} times what "
            f"`jax.jit` takes to trace and lower, most for {slow[0]} "
            "([times](#time-to-plan-and-lower)).",
        ),
        "ledgers": (
            "Bytes of algorithms",
            f"For 8 gradients of a 4 MB model a group sends {sgd:.0f} MB by SGD and "
            f"{local:.0f} MB by DiLoCo, [as their plans say](#bytes-of-algorithms).",
        ),
        "hidden": (
            "Hidden communication",
            "Of Streaming DiLoCo in one program the TPU compiler hides "
            f"{hidden()['a round, float32']:.0f} % of the float32 bytes between "
            f"slices, and {hidden()['a round, int8']:.0f} % of int8; where each "
            f"step is a program {hidden()['a step, float32']:.0f} % "
            "([schedules](#communication-behind-inner-steps)).",
        ),
        "schedule": (
            "What a chip does",
            "A fragment is under way while inner steps run, of int8 each exchange "
            "in half of the delay; where a step is a program, between steps "
            "([schedules](#communication-behind-inner-steps)).",
        ),
        "plan_files": (
            "Plan files",
            f"To load a [file](#plan-files) and lower it takes {load_share:.2f} of the "
            "time to plan and lower the program, in the median.",
        ),
        "engine_rounds": (
            "Engines",
            f"10,000 tiny groups in two workers take {rounds['Ray']:.2f} of the time "
            f"of a loop over groups on Ray, and {rounds['Beam']:.2f} on Beam "
            "([engines](#engines)).",
        ),
        "engines": (
            "The same numbers",
            f"One plan file on four engines differs by at most {worst:.0e} "
            "([table](#the-same-numbers)).",
        ),
    }
    return "\n\n".join(
        f"**{title}.** {sentence}\n\n![{title}](images/benchmark_{name}.svg)"
        for name, (title, sentence) in results.items()
    )


def draw() -> Figure:
    """The figure with its panels, one for each claim, and one of engines."""
    panels = _memory, _collectives, _ledgers, _hidden, _engines, _engine_rounds
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.2, 9.4), layout="constrained")
        for ax, panel in zip(figure.subplots(3, 2).flat, panels, strict=True):
            panel(ax)
        return figure


def draw_panel(name: str) -> Figure:
    """One panel of the benchmarks' page."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(6.4, 2.8), layout="constrained")
        PANELS[name](figure.subplots())
        return figure


def main() -> None:
    """Writes the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs/images")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    figures = {f"benchmark_{name}": draw_panel(name) for name in PANELS}
    with matplotlib.rc_context(STYLE):
        for name, figure in {"proofs": draw(), **figures}.items():
            path = out / f"{name}.svg"
            figure.savefig(path, transparent=True, metadata={"Date": None})


if __name__ == "__main__":
    main()
