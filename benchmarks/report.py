"""From measurements to tables and goals, as text and as Markdown.

All times are compared as ratios within one run: the median over the rounds of ours
divided by the reference of the same round. Rounds are interleaved, so that what else
the machine does falls on both.
"""

import itertools
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

OURS, BASELINE = "drjax", "shard_map, vmap"
HAND_WRITTEN = "hand-written shard_map"  # what tables call it
AGAIN = " (again)"  # added to a name: the same program, to see how noisy times are

Row = dict[str, Any]
Goal = tuple[str, str, str, bool]  # what, its limit, what was measured, whether met


def ratio(ours: Sequence[float], reference: Sequence[float]) -> float:
    """Median over the rounds of ours / reference."""
    return float(np.median(np.divide(ours, reference)))


def spread(values: np.ndarray | Sequence[float], digits: int = 2) -> str:
    """The median and the quartiles."""
    low, middle, high = (f"{x:.{digits}f}" for x in np.percentile(values, [25, 50, 75]))
    return f"{middle} ({low} to {high})"


def compared(ours: Sequence[float], reference: Sequence[float]) -> str:
    """The same, with the quartiles."""
    return spread(np.divide(ours, reference))


def cases(rows: list[Row]) -> list[dict[str, Row]]:
    """The rows of each case, by implementation."""
    grouped: dict[tuple, dict[str, Row]] = {}
    for row in rows:
        case = (row["task"], row["n"], row["devices"], row["arrival"])
        grouped.setdefault(case, {})[row["implementation"]] = row
    return list(grouped.values())


# ---------------------------------------------------------------------------------
# Goals


def goals(results: dict[str, Any]) -> list[Goal]:
    """Whether each goal of the project is met."""
    grouped = cases(results["rows"])
    result = [
        everywhere(
            "collectives and their bytes",
            f"as {HAND_WRITTEN}",
            grouped,
            lambda case: case[OURS]["collectives"] == case[BASELINE]["collectives"],
        ),
        worst(f"temp bytes / {HAND_WRITTEN}", 1.0, grouped, temp_ratio),
        worst(f"flops / {HAND_WRITTEN}", 1.0, grouped, _flops_ratio),
        worst(f"run time / {HAND_WRITTEN}", 1.1, grouped, _time_ratio("run_s")),
        worst(f"trace CPU time / {HAND_WRITTEN}", 1.5, grouped, _time_ratio("trace_s")),
        worst(
            f"trace and lower CPU time / {HAND_WRITTEN}",
            1.5,
            grouped,
            _time_ratio("trace_s", "lower_s"),
        ),
    ]
    probes = {
        (p["name"], p["devices"]): p
        for p in results["probes"]
        if p["implementation"] == OURS
    }
    for name, reference, devices, limit in (
        ("eager drjax", "eager vmap", None, 1.0),
        ("eager drjax, closure", "eager vmap, closure", None, 1.0),
        ("eager drjax", "eager vmap", 8, 2.0),
        ("enter program", "enter context", None, 2.0),
    ):
        value = ratio(
            probes[name, devices]["call_s"], probes[reference, devices]["call_s"]
        )
        devices_text = "" if devices is None else f" on {devices} devices"
        title = f"{name} / {reference}{devices_text}"
        result.append((title, f"≤ {limit:g}", f"{value:.2f}", value <= limit))
    for name, devices in itertools.product(
        ("eager drjax", "eager drjax, closure"), (None, 8)
    ):
        devices_text = "" if devices is None else f" on {devices} devices"
        count = probes[name, devices]["compiled"]
        result.append(
            (
                f"compiled by warm calls, {name}{devices_text}",
                "0",
                f"{count}",
                count == 0,
            )
        )
    leaks = results["leaks"][OURS]
    for how in ("", ", traced"):
        ours, baseline = leaks[f"program{how}"], leaks[f"{HAND_WRITTEN}{how}"]
        same = all(ours[k] <= max(baseline[k], 0) for k in ("objects", "entries"))
        result.append(
            (
                f"leaks of {ours['count']} programs{how}",
                f"as {HAND_WRITTEN}",
                f"{_leak(ours)}; {HAND_WRITTEN} {_leak(baseline)}",
                same,
            )
        )
    return result


def noise(results: dict[str, Any]) -> str:
    """The noise floor: ratios of one hand-written program measured twice."""
    parts = []
    for name, key in (("run", "run_s"), ("trace", "trace_s")):
        if values := again(cases(results["rows"]), key):
            parts.append(f"{name} {min(values):.2f} to {max(values):.2f}")
    if not parts:
        return ""
    return (
        f"Noise floor, {HAND_WRITTEN} measured twice, over all cases: "
        f"{', '.join(parts)}."
    )


def again(grouped: list[dict[str, Row]], key: str) -> list[float]:
    """The ratio of each program that was measured twice to itself."""
    return [
        ratio(row[key], case[name.removesuffix(AGAIN)][key])
        for case in grouped
        for name, row in case.items()
        if name.endswith(AGAIN)
    ]


def temp_ratio(case: dict[str, Row]) -> float:
    """Our temporary bytes on one device / those of the hand-written program."""
    ours, baseline = case[OURS]["temp_bytes"], case[BASELINE]["temp_bytes"]
    return ours / baseline if baseline else 1.0 + ours


def _flops_ratio(case: dict[str, Row]) -> float:
    return case[OURS]["flops"] / case[BASELINE]["flops"]


def _time_ratio(*keys: str) -> Callable[[dict[str, Row]], float]:
    def total(row: Row) -> list[float]:
        return [sum(taken) for taken in zip(*(row[k] for k in keys), strict=True)]

    return lambda case: ratio(total(case[OURS]), total(case[BASELINE]))


def everywhere(title: str, limit: str, grouped: list, test: Callable) -> Goal:
    good = sum(test(case) for case in grouped)
    return title, limit, f"{good} of {len(grouped)} cases", good == len(grouped)


def worst(title: str, limit: float, grouped: Sequence, value: Callable) -> Goal:
    values = [value(case) for case in grouped]
    good = sum(v <= limit for v in values)
    text = (
        f"median {statistics.median(values):.3g}, worst {max(values):.4g}; "
        f"{good} of {len(values)} cases"
    )
    return title, f"≤ {limit}", text, good == len(values)


def _leak(result: dict[str, int]) -> str:
    return f"{result['objects']} objects, {result['entries']} entries"


# ---------------------------------------------------------------------------------
# Tables

COLUMNS = 6  # that fit a page of the site


def markdown(results: dict[str, Any], everything: bool) -> str:
    """The tables; if not `everything`, only n = 64 (or the largest) on 8 devices."""
    rows = [row for row in results["rows"] if not row["implementation"].endswith(AGAIN)]
    if not everything:
        sizes = {row["n"] for row in rows}
        n = 64 if 64 in sizes else max(sizes)
        rows = [
            row
            for row in rows
            if (row["n"], row["devices"], row["arrival"]) == (n, 8, "sharded")
        ]
    who = results["machine"]
    return "\n".join(
        [
            f"JAX {who['jax']}, Python {who['python']}, {who['cores']} CPU cores, "
            f"{results['rounds']} interleaved rounds; times are medians, ratios with "
            "their quartiles.",
            "",
            _cases_table(rows, results["rows"], everything),
            "",
            table(_PROBE_HEADER, _probe_cells(results)),
            "",
            table(_LEAK_HEADER, _leak_cells(results)),
            "",
            goal_table(goals(results)),
            "",
            noise(results),
        ]
    )


def _cases_table(rows: list[Row], every: list[Row], everything: bool) -> str:
    cells = [_cells(row, every) for row in rows]
    if everything:
        return table(_HEADER, cells)
    n, devices, data = cells[0][1:4]
    narrow = [[line[0], *line[4:]] for line in (_HEADER, *cells)]
    about = f"n = {n} groups on {devices} devices, with {data} data."
    return f"{about}\n\n{table(narrow[0], narrow[1:], keys=2)}"


def write(text: str, out: Path | None) -> None:
    """Write a table to a file; None: print it."""
    if out is None:
        print(text)
    else:
        out.write_text(text)


def goal_table(result: list[Goal]) -> str:
    body = [[*goal[:3], "met" if goal[3] else "missed"] for goal in result]
    return table(["goal", "limit", "measured", "result"], body)


def table(header: list[str], body: list[list[str]], keys: int = 0) -> str:
    """A Markdown table; with `keys`, tables of at most six columns, as pages need.

    The first `keys` columns, which tell the lines apart, are the first of each table.
    """
    size, width = (COLUMNS - keys, len(header)) if keys else (len(header), len(header))
    tables = []
    for start in range(keys, width, size):
        lines = [
            [*line[:keys], *line[start : start + size]]
            for line in (header, ["---"] * width, *body)
        ]
        tables.append("\n".join("| " + " | ".join(line) + " |" for line in lines))
    return "\n\n".join(tables)


_HEADER = [
    "task",
    "n",
    "devices",
    "data",
    "implementation",
    "trace ms",
    "lower ms",
    "compile ms",
    "run ms",
    "run / hand-written",
    "temp kB",
    "Mflop",
    "collectives",
]


def _cells(row: Row, rows: list[Row]) -> list[str]:
    same = ("task", "n", "devices", "arrival")
    [baseline] = [
        r
        for r in rows
        if r["implementation"] == BASELINE and all(r[k] == row[k] for k in same)
    ]
    result = ", ".join(
        f"{count} {kind} ({size / 1e3:.1f} kB)"
        for kind, (count, size) in row["collectives"].items()
    )
    median = lambda key: f"{1e3 * statistics.median(row[key]):.1f}"
    return [
        row["task"],
        str(row["n"]),
        str(row["devices"]),
        row["arrival"],
        row["implementation"],
        median("trace_s"),
        median("lower_s"),
        median("compile_s"),
        f"{1e3 * statistics.median(row['run_s']):.2f}",
        compared(row["run_s"], baseline["run_s"]),
        f"{row['temp_bytes'] / 1e3:.1f}",
        f"{row['flops'] / 1e6:.2f}",
        result or "none",
    ]


_PROBE_HEADER = ["call", "no mesh, µs", "8 devices, µs", "compiled when warm"]


def _probe_cells(results: dict[str, Any]) -> list[list[str]]:
    names = dict.fromkeys((p["implementation"], p["name"]) for p in results["probes"])
    body = []
    for who, name in names:
        by_devices = {
            p["devices"]: p
            for p in results["probes"]
            if (p["implementation"], p["name"]) == (who, name)
        }
        times = [
            f"{1e6 * statistics.median(by_devices[d]['call_s']):.2f}"
            if d in by_devices
            else ""
            for d in (None, 8)
        ]
        compiled = sorted({str(p["compiled"]) for p in by_devices.values()})
        body.append([_named(who, name), *times, " / ".join(compiled)])
    return body


def _named(who: str, name: str) -> str:
    return name if who == OURS else f"{name} ({who})"


_LEAK_HEADER = ["made, used and forgotten", "count", "objects", "table entries"]


def _leak_cells(results: dict[str, Any]) -> list[list[str]]:
    return [
        [_named(who, name), *(str(x[k]) for k in ("count", "objects", "entries"))]
        for who, result in results["leaks"].items()
        for name, x in result.items()
    ]
