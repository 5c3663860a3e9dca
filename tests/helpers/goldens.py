"""What planning and compilation gave when it was frozen: every later commit compares.

    python -m tests.helpers.goldens                  # compare: a minute or two
    python -m tests.helpers.goldens --all            # on all meshes
    python -m tests.helpers.goldens --all --write    # freeze
    python -m tests.helpers.goldens --show NAME      # print what is hashed

For each program of the case table and its gradient: the printed plan and its ledger;
and, for each mesh and runner, the compiled collectives, the temporary bytes, how often
JAX traces and compiles, and the bits of the results. Of random programs the plan and
the ledger. A record is kept by JAX version; bits are compared on the kind of CPU on
which they were frozen only, as XLA's code depends on it. `.ci/run` compares.
"""

import argparse
import functools
import hashlib
import json
import platform
import re
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

import drjax
from tests.helpers import random_programs, random_run
from tests.helpers.cases import CASES, MESHES, MODES, Case, on_mesh
from tests.helpers.compiled import compilations
from tests.helpers.meshes import in_mesh

FILE = Path(__file__).with_name("kept") / f"goldens-jax-{jax.__version__}.json"
RANDOM, SEED = 200, 7  # how many random programs, and their seed
EVERY = 12  # one of so many compiled programs is compared by default
RUNNERS = {name: MODES[name] for name in ("jit", "drjax.jit", "by chunks")}
Record = dict[str, Any]


def digest(x: str | bytes) -> str:
    return hashlib.sha256(x.encode() if isinstance(x, str) else x).hexdigest()[:16]


def uses(case: Case) -> dict[str, Callable]:
    """The program, and the gradient of the sum of its results."""
    total = lambda *args: sum(jnp.sum(x) for x in jax.tree.leaves(case.fn(*args)))
    every = tuple(range(len(case.args)))
    return {"value": case.fn, "grad": jax.value_and_grad(total, every)}


def planned(fn: Callable, args: tuple[Any, ...], devices: int) -> str:
    plan = drjax.make_plan(fn)(*args)
    return f"{plan}\n\n{plan.communication(devices=devices)}"


def plans() -> Iterator[tuple[str, Callable[[], str]]]:
    """By name what prints the plan and the ledger of a program."""
    for case in CASES:
        for use, fn in uses(case).items():

            def text(case: Case = case, fn: Callable = fn) -> str:
                with on_mesh(case, "none") as args:
                    return planned(fn, args, 4)

            yield f"plan/{case.name}/{use}", text
    for number in range(RANDOM):
        yield f"random/{number}", functools.partial(random_plan, number)


def random_plan(number: int) -> str:
    program = random_programs.draw(SEED, number)
    mesh = program.make_mesh()
    with random_run.strict(program.dtype == "float64"), in_mesh(mesh):
        args = random_run._placed(program, mesh)
        fn, args = random_programs.used(program, random_programs.make(program), args)
        try:
            return planned(fn, args, 1 if mesh is None else mesh.size)
        except Exception as error:  # a program that is refused has that as its golden
            return f"{type(error).__name__}: {error}"


def compiled() -> Iterator[tuple[str, Callable[[], Record]]]:
    """By name what compiles and runs a program on a mesh."""
    for case in CASES:
        for use, fn in uses(case).items():
            for mesh in MESHES:
                if mesh.startswith("explicit") and not case.on_explicit:
                    continue
                for runner in RUNNERS:
                    run = functools.partial(compile_one, case, fn, mesh, runner)
                    yield f"compiled/{case.name}/{use}/{mesh}/{runner}", run


def compile_one(case: Case, fn: Callable, mesh: str, runner: str) -> Record:
    traces = 0

    def counted(*args):
        nonlocal traces
        traces += 1
        return fn(*args)

    with on_mesh(case, mesh) as args, compilations() as names:
        step = RUNNERS[runner](counted)
        results = [np.asarray(x) for x in jax.tree.leaves(step(*args))]
        step(*args)
        compiles = names.count("counted")
        report = drjax.collectives(step)(*args)
    sent = [(x.kind, x.axes, x.bytes, x.times) for x in report.collectives]
    return {
        "collectives": digest(repr(sent)),
        "temp": report.temp_bytes,
        "traces": [traces, compiles],
        "bits": digest(b"".join(x.tobytes() for x in results)),
    }


def kind_of_cpu() -> str:
    """What XLA compiles for: the model, and the instructions that it may use."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().split("\n\n")[0].splitlines() if info.exists() else []
    named = [line.split(":", 1) for line in lines if ":" in line]
    fields = {name.strip(): value.split() for name, value in named}
    model = [fields.get(x, []) for x in ("vendor_id", "cpu family", "model")]
    of_vectors = re.compile("s?sse|avx|fma|f16c|bmi|amx|asimd|sve")
    flags = fields.get("flags", fields.get("Features", []))
    used = sorted(x for x in flags if of_vectors.match(x))
    return " ".join([platform.machine(), *sum(model, []), digest(" ".join(used))])


def measure(everything: bool) -> Record:
    """All records, or those that a run by default compares."""
    records: Record = {"cpu": kind_of_cpu()}
    chosen = [
        (name, run)
        for name, run in compiled()
        if everything or zlib.crc32(name.encode()) % EVERY == 0
    ]
    for name, text in tqdm([*plans()], "plans", disable=None):
        records[name] = digest(text())
    for i, (name, run) in enumerate(tqdm(chosen, "compiled programs", disable=None)):
        records[name] = run()
        if i % 50 == 49:
            jax.clear_caches()
    return records


def differences(old: Record, new: Record) -> list[str]:
    """Where new records differ from those that were frozen, a line each."""
    lines, same_cpu = [], old["cpu"] == new["cpu"]
    for name, record in new.items():
        if name == "cpu" or old.get(name) == record:
            continue
        if isinstance(record, dict) and name in old:
            fields = [x for x in record if x != "bits" or same_cpu]
            pairs = {x: (old[name][x], record[x]) for x in fields}
            pairs = {x: pair for x, pair in pairs.items() if pair[0] != pair[1]}
            if not pairs:
                continue
            lines.append(f"{name}: " + ", ".join(f"{x} {p}" for x, p in pairs.items()))
        else:
            lines.append(f"{name}: {old.get(name, 'not frozen')} -> {record}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--all", action="store_true", help="on all meshes")
    parser.add_argument("--write", action="store_true", help="freeze the records")
    parser.add_argument("--show", help="print the text of a plan that is hashed")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    if options.show:
        print(dict(plans())[options.show]())
        return
    if not (options.write or FILE.exists()):
        print(f"no goldens of JAX {jax.__version__}: freeze them with --all --write")
        return
    began = time.process_time()
    records = measure(options.all)
    print(f"{len(records) - 1} records, {time.process_time() - began:.0f} CPU-seconds")
    if options.write:
        FILE.write_text(json.dumps(records, indent=0) + "\n")
        return
    old = json.loads(FILE.read_text())
    if old["cpu"] != records["cpu"]:
        print(f"frozen on {old['cpu']}, this is {records['cpu']}: without bits")
    lines = differences(old, records)
    print("\n".join(lines) or "all equal")
    sys.exit(bool(lines))


if __name__ == "__main__":
    main()
