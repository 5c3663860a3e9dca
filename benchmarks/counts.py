"""What benchmarks of compiled code have in common: meshes, bytes, options, tables.

Input: how many devices, or which TPU chips; a report of compiled collectives; a table.
Output: a mesh; bytes by kind of collective, also as text; the table, printed, and in a
file if the user names a folder.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies

from drjax.compiled import Report


def mesh_of(axis: str, count: int, topology: str | None = None) -> jax.sharding.Mesh:
    """A mesh with one axis, of so many devices.

    Args:
      axis: The name of the axis, which is Auto.
      count: The number of devices.
      topology: TPU chips, as "v5e:2x4", which need not be there: the first of them.
        Default: the devices of this process.
    """
    devices = jax.devices()[:count]
    if topology:
        chips = topologies.get_topology_desc(platform="tpu", topology_name=topology)
        devices = chips.devices[:count]
    auto = (jax.sharding.AxisType.Auto,)
    return jax.sharding.Mesh(np.array(devices).reshape(count), (axis,), axis_types=auto)


def place_of(count: int, topology: str | None) -> str:
    """What tables say of the devices of `mesh_of`."""
    if topology:
        return f"compiled for {count} TPU chips"
    return f"{count} devices of the CPU"


def times_in_turn(
    runs: dict[str, Callable], baseline: str, args: Callable[[], Any], rounds: int
) -> dict[str, np.ndarray]:
    """Time functions in interleaved rounds, each with new arguments.

    Returns:
      By name the ratios to the baseline of the same round, `[rounds]`; of the baseline
      those of a second run.
    """
    items = [*runs.items(), ("", runs[baseline])]
    seconds: dict[str, list[float]] = {name: [] for name, _ in items}
    for i in range(rounds):
        first = i % len(items)  # the first one may find colder caches
        for name, run in items[first:] + items[:first]:
            inputs = jax.block_until_ready(args())
            begin = time.perf_counter()
            jax.block_until_ready(run(*inputs))
            seconds[name].append(time.perf_counter() - begin)
    taken = {name: seconds["" if name == baseline else name] for name in runs}
    return {name: np.divide(x, seconds[baseline]) for name, x in taken.items()}


def bytes_by_kind(report: Report) -> dict[str, int]:
    """The bytes that one device sends, by kind of collective."""
    return {kind: x.bytes for kind, x in sorted(report.by_kind.items())}


def as_text(sizes: dict[str, int]) -> str:
    """The same, for a table."""
    return ", ".join(f"{kind} {size:,}" for kind, size in sizes.items()) or "none"


def parser(description: str | None, quick: str, tpu: bool = False) -> Any:
    """The options of these benchmarks.

    Args:
      description: The docstring of the module.
      quick: What `--quick` does.
      tpu: Whether there is `--tpu`.
    """
    result = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument("--quick", action="store_true", help=quick)
    result.add_argument("--out", type=Path, help="the folder for the table")
    if tpu:
        result.add_argument(
            "--tpu", metavar="TOPOLOGY", help="compile for these chips only: v5e:2x4"
        )
    return result


def write(table: str, out: Path | None, kind: str) -> None:
    """Print a table, and write it to `KIND-jax-VERSION.md` in a folder, if any."""
    print(table)
    if out:
        out.mkdir(parents=True, exist_ok=True)
        (out / f"{kind}-jax-{jax.__version__}.md").write_text(table)
