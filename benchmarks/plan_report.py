"""From measurements of plans to tables and goals; see `report.py` for the rest.

`drjax.jit, k` works on k of a device's groups at once. The hand-written
baselines are loops that add up k groups a step (`scan, k`, `slices, k`), and all groups
at once (`shard_map, vmap`); a planned program must meet the faster of two baselines.
"""

import statistics
from typing import Any

from benchmarks import report
from benchmarks.report import (
    AGAIN,
    BASELINE,
    HAND_WRITTEN,
    Goal,
    Row,
    cases,
    compared,
    ratio,
    table,
    worst,
)

TASKS = ("MAML value and gradient", "round of local SGD", "gradient through 5 rounds")
MANY = "regression"
PLAIN, ALL_AT_ONCE = "drjax", "drjax.jit, all"
CHUNKS = ("1", "8")
_CROSSING = {"gradient through 5 rounds"}  # one round needs residuals of another

# What implementations are called in the tables, in their order there.
_NAMES = {
    PLAIN: "jax.jit of the program",
    ALL_AT_ONCE: ALL_AT_ONCE,
    **{f"drjax.jit, {k}": f"drjax.jit, {k}" for k in (*CHUNKS, "1000")},
    **{
        f"{how}, {k}": f"{HAND_WRITTEN}, {how}, {k}"
        for k in CHUNKS
        for how in ("scan", "slices")
    },
    BASELINE: f"{HAND_WRITTEN}, vmap",
    "google drjax": "google drjax",
}


def goals(results: dict[str, Any]) -> list[Goal]:
    """Whether each goal of plans is met."""
    timed = cases(results["rows"])
    chunked = [(case, k) for case in timed for k in CHUNKS if f"scan, {k}" in case]
    whole = [c for c in timed if c[PLAIN]["task"] not in _CROSSING]
    whole += cases(results["many"])
    noise = round(max(1.0, *report.again(timed, "run_s")), 3)
    long = [row for row in results["planning"] if "program" in row]
    return [
        worst(
            "temp bytes / temp bytes for few groups",
            1.1,
            _larger(results["memory"]),
            lambda pair: pair[1]["temp_bytes"] / pair[0]["temp_bytes"],
        ),
        report.everywhere(
            "all-reduces, and no other collective",
            f"≤ {HAND_WRITTEN}",
            chunked,
            lambda case: _collectives_fit(*case),
        ),
        worst(
            f"run time / faster {HAND_WRITTEN}, same chunk",
            1.05,
            chunked,
            lambda case: ratio(*_times(*case)),
        ),
        worst(
            f"run time all at once / jax.jit (noise: {noise})",
            noise,
            whole,
            lambda case: ratio(case[ALL_AT_ONCE]["run_s"], case[PLAIN]["run_s"]),
        ),
        worst(
            "plan and lower / trace, and lower by jax.jit: tasks",
            2.0,
            [r for r in results["planning"] if "task" in r],
            lambda row: ratio(*_times_to_plan(row)),
        ),
        worst(
            "plan and lower / trace, and lower by jax.jit: long programs",
            2.0,
            long,
            lambda row: ratio(*_times_to_plan(row)),
        ),
        worst(
            "seconds per equation / those of the shortest program",
            1.1,
            [row for row in long if row is not _shortest(results, row)],
            lambda row: _per_equation(row) / _per_equation(_shortest(results, row)),
        ),
        worst(
            f"temp bytes / data bytes, {results['many'][0]['n']:,} groups",
            1.0,
            [row for row in results["many"] if row["implementation"] == _MANY_OURS],
            lambda row: row["temp_bytes"] / row["data_bytes"],
        ),
    ]


_MANY_OURS = "drjax.jit, 1000"


def _larger(rows: list[Row]) -> list[tuple[Row, Row]]:
    """Each planned row with the row of few groups that it is compared with."""
    result = []
    for row in rows:
        base = base_of(rows, row)
        if base is not None and base is not row:
            result.append((base, row))
    return result


def base_of(rows: list[Row], row: Row) -> Row | None:
    """The row with 8 groups on each device; None for rows with fewer."""
    same = ("implementation", "task", "devices")
    if not row["implementation"].startswith("drjax.jit") or row["n"] < _base(row):
        return None
    [base] = [
        r for r in rows if r["n"] == _base(row) and all(r[k] == row[k] for k in same)
    ]
    return base


def _base(row: Row) -> int:
    return 8 * row["devices"]


def _baselines(case: dict[str, Row], chunk: str) -> list[Row]:
    return [case[f"{how}, {chunk}"] for how in ("scan", "slices")]


def _collectives_fit(case: dict[str, Row], chunk: str) -> bool:
    ours = case[f"drjax.jit, {chunk}"]["collectives"]
    counts = [r["collectives"]["all-reduce"][0] for r in _baselines(case, chunk)]
    return set(ours) == {"all-reduce"} and ours["all-reduce"][0] <= min(counts)


def _times(case: dict[str, Row], chunk: str) -> tuple[list[float], list[float]]:
    """Our times and those of the faster hand-written loop."""
    faster = min(_baselines(case, chunk), key=lambda r: statistics.median(r["run_s"]))
    return case[f"drjax.jit, {chunk}"]["run_s"], faster["run_s"]


def _times_to_plan(row: Row) -> tuple[list[float], list[float]]:
    plain = [a + b for a, b in zip(row["jaxpr_s"], row["plain_s"], strict=True)]
    return row["planned_s"], plain


def _per_equation(row: Row) -> float:
    return statistics.median(row["planned_s"]) / row["equations"]


def _shortest(results: dict[str, Any], row: Row) -> Row:
    same = [r for r in results["planning"] if r.get("program") == row["program"]]
    return min(same, key=lambda r: r["equations"])


# ---------------------------------------------------------------------------------
# Tables


def markdown(results: dict[str, Any]) -> str:
    who = results["machine"]
    rows = _in_order(results["rows"])
    noise = report.again(cases(results["rows"]), "run_s")
    many = _in_order(results["many"])
    return "\n\n".join(
        [
            f"JAX {who['jax']}, Python {who['python']}, {who['cores']} CPU cores, "
            f"{results['rounds']} interleaved rounds; times are medians, ratios with "
            "their quartiles.",
            "## Goals",
            report.goal_table(goals(results)),
            "Few groups are 8 on each device: one group on a device needs no loop and "
            "no running sums. All at once is compared where no round needs residuals "
            f"of another, and for {many[0]['n']:,} groups. The noise "
            f"floor, {HAND_WRITTEN} measured twice, is "
            f"{min(noise):.2f} to {max(noise):.2f}.",
            "## Temporary memory on one device, kB",
            _memory_table(results["memory"]),
            "In brackets: the ratio to 8 groups on each device. Compiled, not run.",
            f"## Run time, n = {rows[0]['n']}",
            table(
                _TIME_HEADER,
                [_time_cells(row, results["rows"]) for row in rows],
                keys=3,
            ),
            "## Time to plan and lower",
            table(
                _PLAN_HEADER,
                [_plan_cells(r, results) for r in results["planning"]],
                keys=1,
            ),
            "CPU time with cold caches. The ratio is to `jax.make_jaxpr(f)` and "
            "`jax.jit(f).lower()` together; the last column to the shortest program.",
            f"## {many[0]['n']:,} groups on one device",
            table(_MANY_HEADER, [_many_cells(row, many) for row in many]),
            *digits_table(results["digits"]),
        ]
    )


def digits_table(rows: list[Row]) -> list[str]:
    """The digits of running sums: a title and a table."""
    names = {0: "jax.jit", None: "drjax.jit, all"}
    body = [
        [
            "0.1" if row["equal"] else "random",
            names.get(row["chunk"], f"drjax.jit, {row['chunk']}"),
            f"{row['error']:.1e}",
            f"{row['temp_bytes'] / 1e3:,.1f}",
            _milliseconds(row["run_s"]),
        ]
        for row in rows
    ]
    header = ["numbers", "implementation", "relative error", "temp kB", "run ms"]
    return [
        f"## Float32 mean of {rows[0]['n']:,} numbers, one a group",
        table(header, body),
    ]


def _memory_table(rows: list[Row]) -> str:
    sizes = sorted({row["n"] for row in rows})
    lines: dict[tuple, dict[int, str]] = {}
    for row in _in_order(rows):
        kilobytes, base = f"{row['temp_bytes'] / 1e3:,.1f}", base_of(rows, row)
        if base is not None and base is not row:
            kilobytes += f" ({row['temp_bytes'] / base['temp_bytes']:.3f})"
        name = _named(row)
        key = row["task"], str(row["devices"]), name
        lines.setdefault(key, {})[row["n"]] = kilobytes
    body = [[*key, *(line.get(n, "") for n in sizes)] for key, line in lines.items()]
    header = ["task", "devices", "implementation", *(f"n = {n}" for n in sizes)]
    return table(header, body, keys=3)


_TIME_HEADER = [
    "task",
    "devices",
    "implementation",
    "run ms",
    f"/ faster {HAND_WRITTEN}, same chunk",
    "/ jax.jit",
    "collectives",
]


def _time_cells(row: Row, rows: list[Row]) -> list[str]:
    [case] = [c for c in cases(rows) if any(r is row for r in c.values())]
    name = row["implementation"]
    chunk = name.rpartition(", ")[2]
    to_baseline = ""
    if name.startswith("drjax.jit"):
        to_baseline = (
            compared(*_times(case, chunk))
            if chunk in CHUNKS
            else compared(row["run_s"], case[BASELINE]["run_s"])
        )
    result = ", ".join(
        f"{count} {kind} ({size / 1e3:.1f} kB)"
        for kind, (count, size) in row["collectives"].items()
    )
    return [
        row["task"],
        str(row["devices"]),
        _named(row),
        _milliseconds(row["run_s"]),
        to_baseline,
        compared(row["run_s"], case[PLAIN]["run_s"]),
        result or "none",
    ]


_PLAN_HEADER = [
    "program",
    "make_jaxpr ms",
    "jax.jit ms",
    "drjax.jit ms",
    "ratio",
    "µs per equation",
    "over shortest",
]


def _plan_cells(row: Row, results: dict[str, Any]) -> list[str]:
    times = [_milliseconds(row[key]) for key in ("jaxpr_s", "plain_s", "planned_s")]
    times.append(compared(*_times_to_plan(row)))
    if "task" in row:
        chunk = "all" if row["chunk"] is None else str(row["chunk"])
        return [f"{row['task']}, {chunk}", *times, "", ""]
    per, first = _per_equation(row), _per_equation(_shortest(results, row))
    name = f"{row['equations']:,} equations {row['program']}"
    return [name, *times, f"{1e6 * per:.0f}", f"{per / first:.2f}"]


_MANY_HEADER = [
    "implementation",
    "data MB",
    "temp MB",
    "temp / data",
    "run ms",
    "/ jax.jit",
]


def _many_cells(row: Row, rows: list[Row]) -> list[str]:
    temp, data = row["temp_bytes"], row["data_bytes"]
    [plain] = [r for r in rows if r["implementation"] == PLAIN]
    name = _named(row)
    return [
        name,
        f"{data / 1e6:.1f}",
        f"{temp / 1e6:.3f}",
        f"{temp / data:.3f}",
        _milliseconds(row["run_s"]),
        compared(row["run_s"], plain["run_s"]),
    ]


def _in_order(rows: list[Row]) -> list[Row]:
    names = list(_NAMES)
    shown = [row for row in rows if not row["implementation"].endswith(AGAIN)]
    return sorted(
        shown,
        key=lambda r: (
            r["devices"],
            r["task"] != MANY and TASKS.index(r["task"]),
            names.index(r["implementation"]),
        ),
    )


def _named(row: Row) -> str:
    return _NAMES[row["implementation"]]


def _milliseconds(taken: list[float]) -> str:
    return f"{1e3 * statistics.median(taken):.2f}"
