"""Measure everything and print the tables.

    python -m benchmarks.run                 # all cases, with Google's drjax 0.2.1
    python -m benchmarks.run --quick         # small cases, under a minute
    python -m benchmarks.run --no-peer       # without Google's drjax

Google's library has the same import name, so it runs in an environment of its own:
`--peer-python` names its Python, or a temporary one is made with pip. One worker
process for each environment answers commands (see `worker.py`); all rounds of timing
go through the implementations in turn.
"""

import argparse
import contextlib
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks import peer, report
from drjax.compiled import read_hlo, totals

LOCAL = (
    report.OURS,
    report.BASELINE,
    report.BASELINE + report.AGAIN,
    "shard_map, scan",
    "jit(vmap)",
)
TASKS = ("local SGD", "MAML gradient", "large array")
_DEVICES = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}


@dataclass(frozen=True)
class Settings:
    """How much to measure.

    Attributes:
      sizes: The partition sizes n.
      small: Whether each group's problem is tiny.
      builds: How often each program is traced and lowered.
      compiles: How often it is compiled too.
      rounds: How often each program, and each probe, is timed.
      seconds: How long one timing should take.
      leaks: How many programs are made, and how many more are made and traced.
      implementations: What runs in our own environment.
    """

    sizes: tuple[int, ...] = (8, 64, 256)
    small: bool = False
    builds: int = 4
    compiles: int = 2
    rounds: int = 9
    seconds: float = 0.02
    leaks: tuple[int, int] = (1000, 100)
    implementations: tuple[str, ...] = LOCAL


QUICK = Settings((8,), True, 2, 1, 5, 0.01, (1000, 20))


class Worker:
    """A process that answers commands; see `worker.py`."""

    def __init__(self, python: str, directory: Path, **environment: str):
        self._process = subprocess.Popen(
            [python, "-m", "benchmarks.worker"],
            cwd=directory,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **_DEVICES, **environment},
        )
        self.about = self.ask("hello")

    def ask(self, do: str, **arguments: Any) -> Any:
        assert self._process.stdin and self._process.stdout
        print(json.dumps({"do": do, **arguments}), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(
                f"The worker ended with code {self._process.wait()} during {do!r} "
                f"{arguments}. Run `python -m benchmarks.worker` to see why."
            )
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"{do} {arguments}: {answer['error']}")
        return answer["result"]

    def build(self, **arguments: Any) -> dict[str, Any]:
        """What the command `build` answers, with collectives in place of HLO text.

        For each kind: how many there are, and the bytes that a device sends in them,
        each counted once.
        """
        answer = self.ask("build", **arguments)
        if text := answer.pop("hlo", None):
            kinds = totals(read_hlo(text), lambda c: c.kind)
            sent = {k: [x.count, x.bytes] for k, x in sorted(kinds.items())}
            answer["collectives"] = sent
        return answer

    def close(self) -> None:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


# ---------------------------------------------------------------------------------
# Measuring


def measure_case(
    workers: dict[str, Worker], settings: Settings, case: dict[str, Any]
) -> list[report.Row]:
    """One row for each implementation of one case."""
    names = list(workers)
    rows: dict[str, report.Row] = {name: {**case, "run_s": []} for name in names}
    for turn in range(settings.builds):
        run = turn >= settings.builds - settings.compiles
        for name in shuffled(names, turn):
            built = workers[name].build(
                slot=name,
                implementation=_source(name),
                small=settings.small,
                until="run" if run else "lower",
                **case,
            )
            for key, value in built.items():
                if key in ("trace_s", "lower_s", "compile_s"):
                    rows[name].setdefault(key, []).append(value)
                else:
                    rows[name][key] = value
    _check_same_result(rows)
    calls = {}
    for name in names:
        once = min(workers[name].ask("run", slot=name, calls=1) for _ in range(3))
        calls[name] = max(1, min(500, round(settings.seconds / once)))
    for turn in range(settings.rounds):
        for name in shuffled(names, turn):
            taken = workers[name].ask("run", slot=name, calls=calls[name])
            rows[name]["run_s"].append(taken)
    for name in names:
        workers[name].ask("drop", slot=name)
    return [{"implementation": name, **row} for name, row in rows.items()]


def measure_probes(
    workers: dict[str, Worker], settings: Settings, progress: tqdm
) -> list[dict[str, Any]]:
    """The overhead of calls, by probe and number of devices."""
    every = {
        (who, name, devices): []
        for name in PROBES
        for devices in (None, 8)
        for who in ((report.OURS, peer.NAME) if _is_drjax(name) else (report.OURS,))
        if who in workers
        if not (devices is None and "shard_map" in name)
        if not (devices == 8 and name.startswith("enter"))
    }
    calls = {}
    for who, name, devices in every:
        ask = lambda n, who=who, name=name, devices=devices: workers[who].ask(
            "probe", name=name, devices=devices, calls=n
        )
        calls[who, name, devices] = max(1, round(settings.seconds / ask(3)))
    for turn in range(settings.rounds):
        for key in shuffled(every, turn):
            who, name, devices = key
            taken = workers[who].ask(
                "probe", name=name, devices=devices, calls=calls[key]
            )
            every[key].append(taken)
        progress.update()
    return [
        {
            "implementation": who,
            "name": name,
            "devices": devices,
            "call_s": taken,
            **workers[who].ask("compiles", name=name, devices=devices),
        }
        for (who, name, devices), taken in every.items()
    ]


PROBES = (
    "eager drjax",
    "eager vmap",
    "eager drjax, closure",
    "eager vmap, closure",
    "eager shard_map",
    "jit drjax",
    "jit vmap",
    "jit shard_map",
    "enter program",
    "enter context",
)


def _is_drjax(name: str) -> bool:
    return "drjax" in name or "program" in name


def measure_leaks(
    workers: dict[str, Worker], settings: Settings
) -> dict[str, dict[str, Any]]:
    result: dict[str, dict[str, Any]] = {}
    untraced, traced = settings.leaks
    for who in (report.OURS, peer.NAME):
        names = ("program", report.HAND_WRITTEN) if who == report.OURS else ("program",)
        for name in names if who in workers else ():
            for full, count in ((name, untraced), (f"{name}, traced", traced)):
                counted = workers[who].ask("leaks", name=full, count=count)
                result.setdefault(who, {})[full] = {"count": count, **counted}
    return result


def shuffled(names: Iterable, turn: int) -> list:
    """In another order at each turn: a program also pays for what ran before it."""
    names = list(names)
    random.Random(turn).shuffle(names)
    return names


def _source(name: str) -> str:
    return name.removesuffix(report.AGAIN)


def _check_same_result(rows: dict[str, report.Row]) -> None:
    reference, *others = rows
    expected = rows[reference]["checksum"]
    for name in others:
        result = rows[name]["checksum"]
        if abs(result - expected) > 1e-3 * abs(expected):
            raise RuntimeError(
                f"{name} computes something else than {reference}: {result} instead of "
                f"{expected}."
            )


@contextlib.contextmanager
def started(
    names: Iterable[str], peer_python: str | None
) -> Iterator[dict[str, Worker]]:
    """A worker for each implementation: two processes at most.

    Args:
      names: The implementations that run in this environment.
      peer_python: The Python of an environment with Google's drjax, or None.
    """
    with tempfile.TemporaryDirectory() as directory:
        processes = [Worker(sys.executable, peer.ROOT)]
        workers = dict.fromkeys(names, processes[0])
        try:
            if peer_python is not None:
                processes.append(_start_peer(peer_python, Path(directory)))
                workers[peer.NAME] = processes[-1]
            _check_workers(processes)
            yield workers
        finally:
            for worker in processes:
                worker.close()


def machine(worker: Worker) -> dict[str, Any]:
    """Where and with what all this is measured."""
    return {**worker.about, "cores": os.cpu_count()}


def measure(
    settings: Settings, peer_python: str | None, show_progress: bool = True
) -> dict[str, Any]:
    """All measurements of one run, as JSON.

    Args:
      settings: How much to measure.
      peer_python: The Python of an environment with Google's drjax, or None.
      show_progress: Whether to show a progress bar on stderr.
    """
    shapes = [(1, "sharded"), (8, "sharded"), (8, "replicated")]
    every = [
        {"task": task, "n": n, "devices": devices, "arrival": arrival}
        for task, n, (devices, arrival) in itertools.product(
            TASKS, settings.sizes, shapes
        )
    ]
    with started(settings.implementations, peer_python) as workers:
        total = len(every) + settings.rounds
        with tqdm(total=total, disable=not show_progress) as progress:
            # First the overheads: later, thousands of entries fill the caches.
            probes = measure_probes(workers, settings, progress)
            leaks = measure_leaks(workers, settings)
            rows = []
            for case in every:
                progress.set_description(f"{case['task']}, n = {case['n']}")
                rows += measure_case(workers, settings, case)
                progress.update()
        about = machine(workers[report.OURS])
    return {
        "machine": about,
        "rounds": settings.rounds,
        "rows": rows,
        "probes": probes,
        "leaks": leaks,
    }


# ---------------------------------------------------------------------------------
# Google's drjax


def _start_peer(python: str, directory: Path) -> Worker:
    peer.copy_sources(directory, "benchmarks")
    return Worker(python, directory, PYTHONPATH="")


def _check_workers(processes: list[Worker]) -> None:
    ours, *peers = (worker.about for worker in processes)
    if ours["drjax"] != report.OURS:
        raise RuntimeError(f"This environment has {ours['drjax']} instead of drjax.")
    for other in peers:
        if (other["drjax"], other["jax"]) != (peer.NAME, ours["jax"]):
            raise RuntimeError(
                f"--peer-python needs Google's drjax and JAX {ours['jax']}, got "
                f"{other['drjax']} {other['version']} and JAX {other['jax']}."
            )


@contextlib.contextmanager
def peer_of(options: argparse.Namespace) -> Iterator[str | None]:
    """The Python with Google's drjax that a command line asks for."""
    if options.no_peer or options.peer_python:
        yield None if options.no_peer else options.peer_python
        return
    with tempfile.TemporaryDirectory() as directory:
        print("Installing Google's drjax in a temporary environment ...")
        yield peer.make(Path(directory))


def parse(description: str | None) -> argparse.Namespace:
    """The command line of a benchmark."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small cases only")
    parser.add_argument("--no-peer", action="store_true", help="no Google drjax")
    parser.add_argument("--peer-python", help="Python with Google's drjax 0.2.1")
    parser.add_argument("--out", type=Path, help="a folder for the results")
    return parser.parse_args()


def write(out: Path, results: dict[str, Any], name: str, texts: dict[str, str]) -> None:
    """Write the measurements as `name`.json, and the tables as Markdown."""
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps(results))
    for title, text in texts.items():
        (out / f"{title}.md").write_text(text + "\n")


def main() -> None:
    options = parse(__doc__)
    with peer_of(options) as python:
        results = measure(QUICK if options.quick else Settings(), python)
    tables = report.markdown(results, everything=True)
    print(tables)
    if options.out:
        summary = report.markdown(results, everything=False)
        write(options.out, results, "results", {"results": tables, "summary": summary})


if __name__ == "__main__":
    main()
