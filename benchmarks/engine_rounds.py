"""Rounds on Ray: small ones and a hand-written loop, many groups, large results.

    python -m benchmarks.engine_rounds --out benchmarks/results      # needs '.[ray]'

*Small rounds*: 1000 groups take five steps of gradient descent on 2.6 MB of data. The
hand-written baseline keeps each half of the data in an actor and sends the model; in
both, data are put once. *Many groups*: a million of eight numbers. *Sums in the
workers*: results of the groups are added up, from 100 bytes to 100 MB each; actors of
the baseline add up their own groups in a loop. The memory of a worker is what is its
own, at most, without the object store's, of which both have the same arrays.
"""

import argparse
import importlib
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import drjax
from benchmarks import report, run
from benchmarks.engines import reduced
from benchmarks.measured import HAND_WRITTEN, Own, Received, seconds_of
from benchmarks.report import Goal, spread
from benchmarks.worker import hello
from drjax.backends import ray as backend

SMALL, FEATURES, TURNS, ROUNDS = 1000, 16, 10, 20
# Groups, floats of a result, groups that the baseline adds up at once, rounds.
LARGE = (
    (8, 25_000_000, 1, 10),
    (64, 6_250_000, 1, 10),
    (1_000_000, 25, 500_000, 50),
)
SLOWER, SECONDS, ADDED_UP, BYTES = 1.5, 1.0, 1.2, 1.0  # the goals


def work(model, x, y):
    def loss(m, batch):
        return jnp.mean((batch[0] @ m["w"] + m["b"] - batch[1]) ** 2)

    def step(m, batch):
        grads = jax.grad(loss)(m, batch)
        return jax.tree.map(lambda p, g: p - 0.05 * g, m, grads), None

    return jax.lax.scan(step, model, (x, y))[0]


class Baseline:
    """An actor with a part of the data; `run` gives the partial sum of its groups."""

    def __init__(self, x, y):
        self.data = jnp.asarray(x), jnp.asarray(y)
        batch = jax.vmap(work, (None, 0, 0))
        add_up = lambda *args: jax.tree.map(lambda a: a.sum(0), batch(*args))
        self.total = jax.jit(add_up)

    def run(self, model):
        return jax.tree.map(np.asarray, self.total(model, *self.data))


def small_rounds() -> dict[str, Any]:
    """Milliseconds of a round, by who runs it, in turn."""
    ray = importlib.import_module("ray")
    draw = np.random.default_rng(0)
    data = (
        draw.normal(size=(SMALL, 5, 8, FEATURES)).astype(np.float32),
        draw.normal(size=(SMALL, 5, 8)).astype(np.float32),
    )
    model = {"w": np.zeros(FEATURES, np.float32), "b": np.zeros((), np.float32)}

    @drjax.program(clients=SMALL)
    def train(model, data):
        return drjax.reduce_mean(drjax.map_fn(work, (drjax.broadcast(model), *data)))

    plan, half = drjax.make_plan(train)(model, data), SMALL // 2
    alone = {"env_vars": {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"}}
    with backend.compile(plan, workers=2, ray_options={"num_cpus": 0}) as on_ray:
        stored = on_ray.put(data)  # as the actors of the baseline get theirs
        on_ray(model, stored)
        actor = ray.remote(Baseline).options(num_cpus=0, runtime_env=alone)
        actors = [actor.remote(*(a[i : i + half] for a in data)) for i in (0, half)]

        def actor_loop(model):
            parts = ray.get([actor.run.remote(model) for actor in actors])
            return jax.tree.map(lambda a, b: (a + b) / SMALL, *parts)

        loops = {"drjax": lambda model: on_ray(model, stored), HAND_WRITTEN: actor_loop}
        times: dict[str, list[float]] = {name: [] for name in loops}
        result = {}
        for turn in range(TURNS + 1):
            for name, loop in loops.items():
                now = model
                for _ in range(ROUNDS):
                    begin = time.perf_counter()
                    now = jax.block_until_ready(loop(now))
                    if turn:
                        times[name].append(1e3 * (time.perf_counter() - begin))
                result[name] = now
        blocks = on_ray.report.stages[0].blocks
    far = np.max(np.abs(result["drjax"]["w"] - result[HAND_WRITTEN]["w"]))
    return {"times": times, "difference": float(far), "blocks": blocks}


def many_groups(n: int = 1_000_000, runs: int = 6) -> list[dict[str, Any]]:
    """Seconds of a round of tiny groups, by the size of blocks."""
    data = np.random.default_rng(0).normal(size=(n, 8)).astype(np.float32)
    plan = drjax.make_plan(reduced(n))(np.float32(1), data)
    result = []
    for size in (None, 8192, 256):
        with backend.compile(plan, workers=2, block_size=size) as on_ray:
            seconds = seconds_of(lambda: on_ray(np.float32(1), data), runs)
            blocks = on_ray.report.stages[0].blocks
        result.append({"size": size, "seconds": seconds, "blocks": blocks})
    return result


class Scaled:
    """An actor with numbers of some groups; `run` gives their scaled models' sum."""

    def __init__(self, x, at_once):
        self.x = jnp.asarray(x).reshape(-1, at_once)

        def total(model, x):
            add = lambda sum_, x: (sum_ + (model * x[:, None]).sum(0), None)
            return jax.lax.scan(add, jnp.zeros_like(model), x)[0]

        self.total = jax.jit(total)

    def run(self, model):
        return np.asarray(self.total(model, self.x))

    def pid(self):
        return os.getpid()


def large_results() -> list[dict[str, Any]]:
    """Rounds that add up results of groups, and hand-written loops, in turn."""
    return [_added_up(*each) for each in LARGE]


def _added_up(n: int, floats: int, at_once: int, rounds: int) -> dict[str, Any]:
    """Times, the most memory of a worker, and bytes that the driver gets in a round."""
    ray = importlib.import_module("ray")

    @drjax.program(clients=n)
    def scaled(model, x):
        data = drjax.map_fn(lambda m, x: m * x, (drjax.broadcast(model), x))
        return drjax.reduce_mean(data)

    model, x = np.ones(floats, np.float32), np.linspace(0.5, 1, n, dtype=np.float32)
    plan = drjax.make_plan(scaled)(model, x)
    alone = {"env_vars": {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"}}
    with backend.compile(plan, workers=2, ray_options={"num_cpus": 0}) as on_ray:
        stored = on_ray.put(x)
        on_ray(model, stored)
        actor = ray.remote(Scaled).options(num_cpus=0, runtime_env=alone)
        actors = [
            actor.remote(half, at_once) for half in np.array_split(np.asarray(x), 2)
        ]

        def actor_loop(model):
            model = ray.put(model)
            parts = ray.get([actor.run.remote(model) for actor in actors])
            return (parts[0] + parts[1]) / n

        engine: Any = on_ray.engine
        loops = {"drjax": lambda model: on_ray(model, stored), HAND_WRITTEN: actor_loop}
        pids = {
            "drjax": [state.pid for state in engine.states()],
            HAND_WRITTEN: ray.get([actor.pid.remote() for actor in actors]),
        }
        out: dict[str, Any] = {name: {"seconds": []} for name in loops}
        for name, loop in loops.items():
            loop(model)  # compiles
            with Own(pids[name]) as memory:
                seconds_of(partial(loop, model), 3)
            out[name]["peak"] = memory.peak
            with Received() as received:
                loop(model)
            out[name]["bytes"] = received.bytes
        for i in range(rounds):
            for name, loop in loops.items():
                now = model + np.float32(i)
                out[name]["seconds"] += seconds_of(partial(loop, now), 1)
        blocks = on_ray.report.stages[0].blocks
        far = np.max(np.abs(actor_loop(model) - on_ray(model, stored)))
        for one in actors:
            ray.kill(one)
    return {"n": n, "floats": floats, "blocks": blocks, "difference": float(far)} | out


def markdown(small: dict, many: list[dict], large: list[dict]) -> str:
    who, ray = hello(), importlib.import_module("ray")
    times = small["times"]
    medians = {name: float(np.median(t)) for name, t in times.items()}
    slower = report.ratio(times["drjax"], times[HAND_WRITTEN])
    warm = min(many[0]["seconds"][2:])
    goals: list[Goal] = [
        (
            f"a small round, drjax / {HAND_WRITTEN}",
            f"≤ {SLOWER:g}",
            f"{slower:.2f}",
            slower <= SLOWER,
        ),
        (
            "a round of 1,000,000 groups, s",
            f"≤ {SECONDS:g}",
            f"{warm:.2f}",
            warm <= SECONDS,
        ),
        *(
            (
                f"{x['n']:,} results of {4e-6 * x['floats']:g} MB, {what}",
                f"≤ {most:g}",
                f"{value:.2f}",
                value <= most,
            )
            for x in large
            for what, most, value in (
                ("time", ADDED_UP, float(np.median(_slower(x)))),
                ("memory", ADDED_UP, _share(x, "peak")),
                ("to the driver", BYTES, _share(x, "bytes")),
            )
        ),
    ]
    parts = [
        f"JAX {who['jax']}, Python {who['python']}, Ray {ray.__version__}, "
        f"{os.cpu_count()} CPU cores, 2 workers.",
        report.goal_table(goals),
        f"## Small rounds\n\n{SMALL:,} groups, 2.6 MB, {TURNS * ROUNDS} rounds of each "
        f"in turn; {small['blocks']} blocks. Largest difference: "
        f"{small['difference']:.1g}. Of the ratio the quartiles: "
        f"{spread(np.array(times['drjax']) / np.array(times[HAND_WRITTEN]))}.",
        report.table(
            ["a round", "median, ms", "p90, ms"],
            [
                [name, f"{medians[name]:.1f}", f"{np.percentile(t, 90):.1f}"]
                for name, t in times.items()
            ],
        ),
        "## Many groups\n\n1,000,000 groups of eight numbers.",
        report.table(
            ["block_size", "blocks", "first round, s", "third, s", "best, s"],
            [
                [
                    str(x["size"] or "default"),
                    str(x["blocks"]),
                    *(f"{t:.2f}" for t in (x["seconds"][0], x["seconds"][2])),
                    f"{min(x['seconds'][2:]):.2f}",
                ]
                for x in many
            ],
        ),
        "## Sums in the workers\n\nThe time is how many times as long a round takes as "
        f"one of the {HAND_WRITTEN}, median and quartiles of 10 rounds in turn, or "
        "50 of the shortest. In parentheses: the baseline.",
        report.table(
            [
                *("groups", "result, MB", "time", "s"),
                *("memory of a worker, MB", "to the driver, MB"),
            ],
            [_large_line(x) for x in large],
        ),
    ]
    return "\n\n".join(parts)


def _slower(x: dict[str, Any]) -> np.ndarray:
    """How many times as long as the baseline's each round took."""
    return np.array(x["drjax"]["seconds"]) / np.array(x[HAND_WRITTEN]["seconds"])


def _share(x: dict[str, Any], of: str) -> float:
    return x["drjax"][of] / x[HAND_WRITTEN][of]


def _large_line(x: dict[str, Any]) -> list[str]:
    ours, hand = x["drjax"], x[HAND_WRITTEN]
    seconds = np.median(ours["seconds"]), np.median(hand["seconds"])
    return [
        *(f"{x['n']:,}", f"{4e-6 * x['floats']:g}"),
        spread(_slower(x)),
        "{:.2g} ({:.2g})".format(*seconds),
        f"{ours['peak'] / 1e6:,.0f} ({hand['peak'] / 1e6:,.0f})",
        f"{ours['bytes'] / 1e6:,.4g} ({hand['bytes'] / 1e6:,.4g})",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    small, many, large = small_rounds(), many_groups(), large_results()
    tables = markdown(small, many, large)
    print(tables)
    if options.out:
        name = f"engine-rounds-jax-{jax.__version__}"
        result = {"small": small, "many": many, "large": large}
        run.write(options.out, result, name, {name: tables})


if __name__ == "__main__":
    main()
