"""Compile the rounds of a config, measure what one device does, and write it down.

    python -m experiments.run configs/tiny.toml
    python -m experiments.run configs/fig4/*.toml --variants drjax

TPUs are compiled for by libtpu (`pip install libtpu`), which needs none. Each variant
becomes one JSON record, with all settings and versions; `python -m experiments.plot`
draws them. On CPUs, `execute` rounds are run too.
"""

import json
import re
import time
from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pydantic
from tqdm import tqdm

from experiments import machine, model, variants
from experiments.config import Config, from_command_line
from experiments.hlo import Message, Module

Record = dict[str, Any]
PACKAGES = ("drjax", "jax", "jaxlib", "libtpu", "flax")


def measure(config: Config, variant: Any) -> Record:
    """What the compiler says of one variant, and what became of running it."""
    mesh = machine.mesh_of(config.machine)
    graphdef, shapes = model.shapes(config.model)
    laid, rows = machine.shardings(config, mesh, shapes)
    tokens = jax.ShapeDtypeStruct(_tokens_shape(config), jnp.int32, sharding=rows)
    params = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, laid
    )
    work = model.local_sgd(graphdef, config.round)
    n, k = config.round.groups, config.groups_per_step
    begin = time.process_time()
    with jax.set_mesh(mesh):
        round_ = jax.jit(
            variants.make(variant, work, n, k), out_shardings=(laid, None),
            donate_argnums=(0,) if config.donate else (),
        )  # fmt: skip
        found: Record = {"devices": mesh.size}
        try:
            compiled = round_.lower(params, tokens).compile()
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            return found | {"out of memory": _first_line(error)}
        found["compile CPU s"] = time.process_time() - begin
        found |= _read(compiled, dict(mesh.shape))
        if config.execute:
            found["losses"], found["round s"] = _execute(compiled, config, laid, rows)
    return found


def _read(compiled: Any, mesh: dict[str, int]) -> Record:
    memory, module = compiled.memory_analysis(), Module(compiled.as_text(), mesh)
    return {
        "argument bytes": memory.argument_size_in_bytes,
        "temp bytes": memory.temp_size_in_bytes,
        "peak bytes": memory.peak_memory_in_bytes,
        "flops": module.flops,
        "collectives": collectives(module.messages),
    }


def collectives(messages: list[Message]) -> list[Record]:
    """Messages by kind and axes: how many in the program, how many in a run, bytes."""
    static, dynamic, size = Counter(), Counter(), Counter()
    for x in messages:
        key = x.kind, x.axes
        static[key] += 1
        dynamic[key] += x.times
        size[key] += x.times * x.bytes
    return [
        {"kind": kind, "axes": list(axes), "in the program": static[kind, axes],
         "in a round": dynamic[kind, axes], "bytes in a round": size[kind, axes]}
        for kind, axes in sorted(static)
    ]  # fmt: skip


def _tokens_shape(config: Config) -> tuple[int, ...]:
    r = config.round
    return (r.groups, r.steps, r.batch, r.length + 1)


def _execute(compiled: Any, config: Config, laid: Any, rows: Any) -> tuple[list, list]:
    """The loss of each round, and its seconds; the text is random."""
    params = jax.device_put(model.initial(config.model, 0), laid)
    losses, seconds = [], []
    for number in range(config.execute):
        draw = np.random.default_rng(number)
        tokens = draw.integers(0, config.model.vocab, _tokens_shape(config), np.int32)
        tokens = jax.device_put(tokens, rows)
        begin = time.perf_counter()
        params, loss = jax.block_until_ready(compiled(params, tokens))
        seconds.append(time.perf_counter() - begin)
        losses.append(float(loss))
    return losses, seconds


def _first_line(error: Exception) -> str:
    """The compiler's sentence about memory."""
    found = re.search(r"Ran out of memory.*?\(\S+\) exceeds[^.]*\.\S*", str(error))
    return found[0] if found else str(error).splitlines()[0]


def versions() -> dict[str, str]:
    """Of the packages that decide what is compiled."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def main() -> None:
    out, configs = from_command_line()
    out.mkdir(parents=True, exist_ok=True)
    runs = [(f, c, v) for f, c in configs.items() for v in c.variants]
    with tqdm(runs) as progress:
        for file, config, variant in progress:
            progress.set_description(f"{file.stem}, {variant}")
            record = {
                "figure": file.parent.name, "run": file.stem, "variant": variant,
                "settings": settings(config), "versions": versions(),
                **measure(config, variant),
            }  # fmt: skip
            name = f"{file.parent.name}-{file.stem}-{variant.replace(' ', '-')}.json"
            (out / name).write_text(json.dumps(record, indent=1) + "\n")
            progress.write(f"{file.stem}, {summary(record)}")


def settings(config: Config) -> Record:
    """All of them, as JSON."""
    return pydantic.TypeAdapter(Config).dump_python(config, mode="json")


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
