"""Run configs: compile rounds, measure what one device does, and write it down.

    python -m experiments.run configs/tiny.toml
    python -m experiments.run configs/fig4/*.toml --variants drjax

TPUs are compiled for by libtpu (`pip install libtpu`), which needs none. On CPUs,
`execute` rounds are run too, in as many processes as the config says. Each variant of
each file becomes one JSON record with all settings and versions, made by a process of
its own; `python -m experiments.plot` draws them.
"""

import json
import socket
import subprocess
import sys
from typing import Any

from tqdm import tqdm

from experiments.config import Config, from_command_line, settings

Record = dict[str, Any]


def main() -> None:
    out, configs = from_command_line()
    out.mkdir(parents=True, exist_ok=True)
    runs = [(f, c, v) for f, c in configs.items() for v in c.variants]
    with tqdm(runs) as progress:
        for file, config, variant in progress:
            progress.set_description(f"{file.stem}, {variant}")
            record = {
                "figure": file.parent.name, "run": file.stem, "variant": variant,
                "settings": settings(config), **measured(config, variant),
            }  # fmt: skip
            name = f"{file.parent.name}-{file.stem}-{variant.replace(' ', '-')}.json"
            (out / name).write_text(json.dumps(record, indent=1) + "\n")
            progress.write(f"{file.stem}, {summary(record)}")


def measured(config: Config, variant: str) -> Record:
    """What the processes of a run say.

    Raises:
      RuntimeError: One of them failed; with the end of what it wrote.
    """
    count = config.machine.processes
    of_many = [str(count), str(_free_port())] if count > 1 else []
    command = [sys.executable, "-m", "experiments.worker", variant]
    started = [
        subprocess.Popen(
            [*command, *([str(i), *of_many] if of_many else [])], text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for i in range(count)
    ]  # fmt: skip
    try:
        for process in started:
            assert process.stdin
            process.stdin.write(json.dumps(settings(config)))
            process.stdin.close()
            process.stdin = None
        told = [process.communicate() for process in started]
    finally:
        for process in started:
            process.kill()
    for process, (_, errors) in zip(started, told, strict=True):
        if process.returncode:
            raise RuntimeError(f"{variant} failed: {errors[-3000:]}")
    return json.loads(told[0][0].splitlines()[-1])


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
        f"{c['in a round']} {c['kind']} over {'+'.join(c['axes'])} of "
        f"{c['bytes in a round'] / 1e9:.3g} GB"
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
