"""Import, planning and first calls of two checkouts, in one interleaved run.

    python -m tests.helpers.compare_versions OLD NEW [--repeats 9]

Each measurement is of a new process, in CPU seconds, and the two versions take turns.
Printed are the medians, the ratio NEW / OLD of them, and the quartiles of the ratios of
neighbors in time: a ratio within the spread of those of OLD to itself is noise.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tqdm import tqdm


def measure() -> dict[str, float]:
    """The CPU seconds of each step, of the version that is imported first here."""
    import jax
    import jax.numpy as jnp

    jax.config.update("jax_num_cpu_devices", 8)
    jax.block_until_ready(jnp.zeros(3) + 1)  # the backend starts
    seconds: dict[str, float] = {}

    def timed(name: str, fn: Callable, *args: object) -> None:
        start = time.process_time()
        jax.block_until_ready(fn(*args))
        seconds[name] = time.process_time() - start

    timed("import", lambda: __import__("drjax") and None)
    import drjax

    def local_sgd(w, xs):
        loss = lambda w, x: jnp.mean((jnp.tanh(x @ w["a"]) @ w["b"]) ** 2)

        def step(w, x):
            grads = jax.grad(loss)(w, x)
            return jax.tree.map(lambda p, g: p - 0.1 * g, w, grads), None

        return jax.lax.scan(step, w, xs)[0]

    def loss_after_rounds(w, xs):
        for _ in range(3):
            w = drjax.reduce_mean(drjax.map_fn(local_sgd, (drjax.broadcast(w), xs)))
        return sum(jnp.sum(p) for p in jax.tree.leaves(w))

    grad = drjax.program(clients=16)(jax.value_and_grad(loss_after_rounds))
    w = {"a": jnp.ones((8, 16)), "b": jnp.ones((16, 4))}
    xs = jnp.ones((16, 5, 4, 8))
    planned = drjax.make_plan(grad, partitioned=(False, True))
    timed("plan", lambda: planned(w, xs) and None)
    timed("first call of drjax.jit", drjax.jit(grad), w, xs)
    one = drjax.jit(grad, groups_per_step=1)
    timed("first call of drjax.jit, one group at a time", one, w, xs)
    timed("first call of jax.jit", jax.jit(grad), w, xs)
    auto = (jax.sharding.AxisType.Auto,)
    with jax.set_mesh(jax.make_mesh((8,), ("clients",), axis_types=auto)):
        timed("first call of jax.jit, 8 devices", jax.jit(grad), w, xs)
    return seconds


def measure_in(checkout: Path) -> dict[str, float]:
    """The same in a new process, of the version in a checkout."""
    env = {**os.environ, "PYTHONPATH": str(checkout), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(Path(__file__).resolve()), "--measure"]
    out = subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE).stdout
    return json.loads(out.splitlines()[-1])


def ratios(new: Sequence[float], old: Sequence[float]) -> str:
    """The ratio of the medians, and the quartiles of those of neighbors in time."""
    ratio = statistics.median(new) / statistics.median(old)
    low, _, high = statistics.quantiles(x / y for x, y in zip(new, old, strict=True))
    return f"{ratio:.3f} ({low:.2f} to {high:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("old", type=Path, nargs="?")
    parser.add_argument("new", type=Path, nargs="?")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        return print(json.dumps(measure()))
    runs = [
        [measure_in(path) for path in (args.old, args.new, args.old)]
        for _ in tqdm(range(args.repeats))
    ]
    for name in runs[0][0]:
        old, new, again = ([x[name] for x in side] for side in zip(*runs, strict=True))
        print(
            f"{name}: {statistics.median(old):.3f} s, then "
            f"{statistics.median(new):.3f} s: {ratios(new, old)}; "
            f"old again {ratios(again, old)}"
        )


if __name__ == "__main__":
    main()
