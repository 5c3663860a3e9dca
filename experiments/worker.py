"""One process of a run: compile a round, measure what one device does, and run it.

    python -m experiments.worker VARIANT [NUMBER PROCESSES PORT] < settings.json

The last line that it prints is the record, as JSON. `experiments.run` starts it.
"""

import json
import re
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax
import numpy as np

import drjax
from experiments import machine, model, text, variants
from experiments.config import Config, Variant, read

Record = dict[str, Any]
PACKAGES = ("drjax", "jax", "jaxlib", "libtpu", "flax")


def measure(config: Config, variant: Variant) -> Record:
    """What the compiler says of one variant, and what became of running it.

    Raises:
      ValueError: Rounds are to be executed on TPUs or GPUs, or `machine.mesh_of`
        raises it.
    """
    if config.execute and config.machine.platform != "cpu":
        raise ValueError("Nothing runs on TPUs or GPUs here: leave execute at 0.")
    mesh = machine.mesh_of(config.machine)
    graphdef, shapes = model.shapes(config.model)
    laid, data_sharding = machine.shardings(config, mesh, shapes)
    typed = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
    params = jax.tree.map(typed, shapes, laid)
    windows = jax.tree.map(lambda x: typed(x, data_sharding), text.shapes(config.round))
    work = model.local_sgd(graphdef, config.round)
    n, k = config.round.groups, config.groups_per_step
    begin = time.process_time()
    with jax.set_mesh(mesh):
        round_ = jax.jit(
            variants.make(variant, work, n, k, config.round.average),
            out_shardings=(laid, None), donate_argnums=(0,) if config.donate else (),
        )  # fmt: skip
        result: Record = {
            "devices": mesh.size,
            "mesh": dict(mesh.shape),
            "parameters": sum(x.size for x in jax.tree.leaves(shapes)),
        }
        try:
            compiled = round_.lower(params, windows).compile()
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            return result | {"out of memory": _memory(error)}
        result["compile CPU s"] = time.process_time() - begin
        memory: Any = compiled.memory_analysis()
        result |= {
            "argument bytes": memory.argument_size_in_bytes,
            "temp bytes": memory.temp_size_in_bytes,
            "peak bytes": memory.peak_memory_in_bytes,
            "hlo": compiled.as_text(),  # read by `counts`, where drjax is our own
        }
        if config.execute:
            result["losses"], result["round s"] = _execute(
                compiled, config, laid, data_sharding
            )
    return result


def _execute(
    compiled: Any, config: Config, laid: Any, data_sharding: Any
) -> tuple[list, list]:
    """The loss of each round, and its seconds."""
    params = jax.tree.map(_placed, model.initial(config.model, 0), laid)
    losses, seconds = [], []
    for windows in text.rounds(config):
        windows = jax.tree.map(lambda x: _placed(x, data_sharding), windows)
        begin = time.perf_counter()
        params, loss = jax.block_until_ready(compiled(params, windows))
        seconds.append(time.perf_counter() - begin)
        losses.append(float(loss))
    return losses, seconds


def _placed(x: Any, sharding: Any) -> Any:
    """An array that all processes have, laid out over the devices of all."""
    x = np.asarray(x)
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def _memory(error: Exception) -> str:
    """What the compiler says of the memory needed and available, in short."""
    result = re.search(r"\((\S+)\) exceeds[^(]*\((\S+)\)", str(error))
    if result is None:
        return str(error).splitlines()[0]
    return f"too large: {result[1]} of {result[2]}"


def versions() -> dict[str, str]:
    """Of the packages that decide what is compiled."""
    result = {}
    for name in PACKAGES:
        try:
            result[name] = version(name)
        except PackageNotFoundError:
            continue
    return result


def main(variant: Any, number: str = "0", processes: str = "1", port: str = "") -> None:
    """Print the record.

    Raises:
      RuntimeError: The `drjax` that is imported is not the variant's.
    """
    if (variant == "google drjax") == hasattr(drjax, "make_plan"):
        raise RuntimeError(f"{variant!r} was given {drjax.__file__}.")
    config = read(sys.stdin.read())
    if port:
        address = f"127.0.0.1:{port}"
        jax.config.update("jax_num_cpu_devices", config.machine.local_devices)
        jax.distributed.initialize(address, int(processes), int(number))
    record = {"versions": versions(), **measure(config, variant)}
    record["CPU s"] = time.process_time()
    if number != "0":
        # The same program, and more than a pipe holds: the driver reads one at a time.
        record.pop("hlo", None)
    print("\n" + json.dumps(record), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
