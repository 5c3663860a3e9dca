"""Run configs: compile rounds, measure what one device does, and write it down.

    python -m experiments.run configs/tiny.toml
    python -m experiments.run configs/fig4/*.toml --variants drjax

TPUs are compiled for by libtpu (`pip install libtpu`), which needs none. On CPUs,
`execute` rounds are run too, in as many processes as the config says. Each variant of
each file becomes one JSON record with all settings and versions, made by a process of
its own; `python -m experiments.plot` draws them. Google's drjax has the import name of
this library and runs in an environment of its own: `--peer-python` names its Python.
"""

import contextlib
import dataclasses
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks import peer
from experiments import counts
from experiments.config import Config, changes, from_command_line, load, settings

Record = dict[str, Any]


def main() -> None:
    """Runs all, whichever of them fail; any that did end it with an error."""
    command, configs = from_command_line()
    command.out.mkdir(parents=True, exist_ok=True)
    runs = [(f, c, v) for f, c in configs.items() for v in c.variants]
    failed = []
    with contextlib.ExitStack() as stack, tqdm(runs) as progress:
        others = any(v == peer.NAME for _, _, v in runs)
        with_peer = stack.enter_context(_peer(command.peer_python)) if others else {}
        for file, config, variant in progress:
            figure, name = file.resolve().parent.name, _name(file, config)
            progress.set_description(f"{name}, {variant}")
            options = with_peer if variant == peer.NAME else {}
            begin = time.perf_counter()
            try:
                measures = measured(config, variant, **options)
            except RuntimeError as error:
                failed.append(f"{name}, {variant}")
                progress.write(f"{failed[-1]}: {error}")
                continue
            record = {
                "figure": figure, "run": name, "variant": variant,
                "settings": settings(config), **measures,
                "wall s": time.perf_counter() - begin,
            }  # fmt: skip
            whole = re.sub(r"[^\w.=-]+", "-", f"{figure}-{name}-{variant}")
            path = command.out / f"{whole}.json"
            path.write_text(json.dumps(record, indent=1) + "\n")
            progress.write(f"{name}, {summary(record)}")
    if failed:
        raise SystemExit(f"{len(failed)} of {len(runs)} failed: {'; '.join(failed)}")


def _name(file: Path, config: Config) -> str:
    """A file's name, and what flags changed."""
    changed = changes(settings(load(file)), settings(config))
    return file.stem + "".join(f",{key}={value}" for key, value in changed.items())


@contextlib.contextmanager
def _peer(python: str | None) -> Iterator[dict[str, Any]]:
    """Where Google's drjax runs, as keywords of `measured`."""
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory) / "sources"
        peer.copy_sources(folder, "benchmarks", "examples", "experiments")
        if python is None:
            python = peer.make(Path(directory) / "environment", *_needed())
        yield {"python": os.path.abspath(python), "folder": folder}


def _needed() -> list[str]:
    """Packages of `experiments.worker`, those that are here."""
    result = []
    for name in ("datasets", "flax", "optax", "pydantic", "tyro", "tqdm", "libtpu"):
        with contextlib.suppress(PackageNotFoundError):
            result += [name] if version(name) else []
    return result


def measured(
    config: Config, variant: str, python: str = sys.executable,
    folder: Path | None = None,
) -> Record:  # fmt: skip
    """What the processes of a run say.

    Args:
      config: The run.
      variant: How its round is written.
      python: What runs it.
      folder: Where it finds the sources.

    Raises:
      RuntimeError: One of them failed; with the end of what it wrote.
    """
    if os.path.exists(config.text):  # they run in another folder
        config = dataclasses.replace(config, text=os.path.abspath(config.text))
    count = config.machine.processes
    of_many = [str(count), str(_free_port())] if count > 1 else []
    command = [python, "-m", "experiments.worker", variant]
    started = [
        subprocess.Popen(
            [*command, *([str(i), *of_many] if of_many else [])], text=True, cwd=folder,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=os.environ | ({"PYTHONPATH": ""} if folder else {}),
        )
        for i in range(count)
    ]  # fmt: skip
    try:
        for process in started:
            assert process.stdin
            process.stdin.write(json.dumps(settings(config)))
            process.stdin.close()
            process.stdin = None
        outputs = [process.communicate() for process in started]
    finally:
        for process in started:
            process.kill()
    for process, (_, errors) in zip(started, outputs, strict=True):
        if process.returncode:
            raise RuntimeError(f"{variant} failed: {errors[-3000:]}")
    records = [json.loads(out.splitlines()[-1]) for out, _ in outputs]
    return counts.counted(records[0]) | {
        "CPU s": sum(record["CPU s"] for record in records)
    }


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def summary(record: Record) -> str:
    """A record in a line."""
    n, start = record["settings"]["round"]["groups"], f"{record['variant']}, n = "
    if "out of memory" in record:
        return f"{start}{n}: {record['out of memory']}"
    sent = ", ".join(
        f"{c['in a round']} {c['kind']} over {'+'.join(c['axes'])} send "
        f"{c['bytes sent in a round'] / 1e9:.3g} GB"
        for c in record["collectives"]
    )
    losses = f", losses {record['losses']}" if "losses" in record else ""
    return (
        f"{start}{n}: {record['flops']:.4g} flops, "
        f"temp {record['temp bytes'] / 1e9:.3g} GB, "
        f"peak {record['peak bytes'] / 1e9:.3g} GB, {sent}{losses}"
    )


if __name__ == "__main__":
    main()
