"""Measure plans: `drjax.jit`, `jax.jit`, hand-written code and Google's drjax.

    python -m benchmarks.plans                 # all cases, with Google's drjax 0.2.1
    python -m benchmarks.plans --quick         # small cases, about a minute
    python -m benchmarks.plans --no-peer       # without Google's drjax

What is measured: temporary memory as the number of groups n grows, compiled only;
run time, in interleaved rounds; the time to plan and lower, as programs grow; and a
million groups on one device. With `--out` the tables go to `plans-jax-VERSION.md`.
"""

import itertools
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from benchmarks import peer, run
from benchmarks import plan_report as report
from benchmarks.long_programs import LONG_PROGRAMS

TIMED = (
    report.PLAIN,
    "drjax.jit, 1",
    "drjax.jit, 8",
    report.ALL_AT_ONCE,
    "scan, 1",
    "slices, 1",
    "scan, 8",
    "slices, 8",
    report.BASELINE,
    report.BASELINE + report.AGAIN,
    "slices, 1" + report.AGAIN,
)
_MANY = ("drjax.jit, 1000", "drjax.jit, all", "drjax")


@dataclass(frozen=True)
class Settings(run.Settings):
    """How much to measure.

    Attributes:
      sizes: The partition sizes n for memory.
      devices: The numbers of devices.
      timed: The partition size for run time.
      equations: The lengths of programs to plan.
      plans: How often each program is planned.
      many: The number of groups that stands for a million.
      tasks: What is compiled and timed.
    """

    sizes: tuple[int, ...] = (8, 64, 512, 4096)
    devices: tuple[int, ...] = (1, 8)
    builds: int = 1
    compiles: int = 1
    rounds: int = 15
    seconds: float = 0.1
    timed: int = 64
    equations: tuple[int, ...] = (100, 1000, 10_000)
    plans: int = 3
    many: int = 1_000_000
    implementations: tuple[str, ...] = TIMED
    tasks: tuple[str, ...] = report.TASKS


QUICK = Settings(
    (64, 128),
    small=True,
    rounds=3,
    seconds=0.01,
    devices=(8,),
    equations=(10, 100),
    plans=1,
    many=10_000,
)


def measure_memory(workers: dict, settings: Settings, case: dict) -> list[report.Row]:
    """What the compiler says of each implementation of one case; nothing runs."""
    return [
        {
            "implementation": name,
            **case,
            **worker.build(
                slot=name,
                implementation=name,
                small=settings.small,
                until="compile",
                **case,
            ),
        }
        for name, worker in workers.items()
    ]


def measure_planning(worker: run.Worker, settings: Settings) -> list[report.Row]:
    """CPU seconds of tracing, of lowering with and without a plan; caches are cold."""
    asked: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        (
            "plan",
            {"task": task, "chunk": chunk},
            {"n": settings.timed, "small": settings.small},
        )
        for task, chunk in itertools.product(settings.tasks, (None, 1))
    ]
    asked += [
        ("plan_long", {"program": program, "equations": size}, {})
        for program, size in itertools.product(LONG_PROGRAMS, settings.equations)
    ]
    for program in LONG_PROGRAMS:  # imports, and the first use of primitives
        worker.ask("plan_long", program=program, equations=settings.equations[0])
    rows: list[report.Row] = [dict(about) for _, about, _ in asked]
    for _ in range(settings.plans):
        for row, (command, about, others) in zip(rows, asked, strict=True):
            for key, seconds in worker.ask(command, **about, **others).items():
                row.setdefault(key, []).append(seconds)
    return rows


def measure_digits(worker: run.Worker, n: int) -> list[report.Row]:
    """The error of a float32 mean of n numbers, and what it costs, by chunk."""
    asked = itertools.product((False, True), (0, None, 1000, 100, 10, 1))
    return [
        {
            "n": n,
            "chunk": chunk,
            "equal": equal,
            **worker.ask("digits", n=n, chunk=chunk, equal=equal),
        }
        for equal, chunk in asked
    ]


def measure(
    settings: Settings, peer_python: str | None, show_progress: bool = True
) -> dict[str, Any]:
    """All measurements of one run, as JSON; arguments as for `run.measure`."""
    timed = settings.implementations
    compiled = [
        name
        for name in timed
        if name != report.ALL_AT_ONCE and not name.endswith(report.AGAIN)
    ]
    with (
        run.started(dict.fromkeys([*timed, *_MANY]), peer_python) as workers,
        tqdm(disable=not show_progress) as progress,
    ):
        ours = workers[report.PLAIN]
        results: dict[str, Any] = {
            "machine": run.machine(ours),
            "rounds": settings.rounds,
            "planning": measure_planning(ours, settings),
            "memory": [],
            "rows": [],
        }
        of = lambda names: {k: w for k, w in workers.items() if k in names}
        for devices, task in itertools.product(settings.devices, settings.tasks):
            case = {"task": task, "devices": devices, "arrival": "sharded"}
            progress.set_description(f"time, {task}, {devices} devices")
            results["rows"] += run.measure_case(
                of([*timed, peer.NAME]), settings, {"n": settings.timed, **case}
            )
            progress.update()
            for n in settings.sizes:
                if n == settings.timed:
                    continue
                progress.set_description(f"memory, {task}, n = {n}")
                # A chunk of 8 is more than the groups of a device.
                few = n // devices < 8
                names = [k for k in compiled if not (few and k.endswith(", 8"))]
                results["memory"] += measure_memory(
                    of([*names, peer.NAME]), settings, {"n": n, **case}
                )
                progress.update()
        results["memory"] += [
            row
            for row in results["rows"]
            if row["implementation"] in (*compiled, peer.NAME)
        ]
        progress.set_description(f"digits of {settings.many:,} groups")
        results["digits"] = measure_digits(ours, settings.many)
        progress.set_description(f"{settings.many:,} groups")
        many = {"n": settings.many, "devices": 1, "arrival": "sharded"}
        results["many"] = run.measure_case(
            of(_MANY), settings, {"task": report.MANY, **many}
        )
    return results


def main() -> None:
    options = run.parse(__doc__)
    with run.peer_of(options) as peer:
        results = measure(QUICK if options.quick else Settings(), peer)
    tables = report.markdown(results)
    print(tables)
    if options.out:
        name = f"plans-jax-{results['machine']['jax']}"
        run.write(options.out, results, name, {name: tables})


if __name__ == "__main__":
    main()
