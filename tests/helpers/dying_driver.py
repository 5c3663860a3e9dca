"""A driver that is killed in its second round, while a stage of the groups runs.

    python -m tests.helpers.dying_driver ray FOLDER

FOLDER is that of the checkpoint. `tests.helpers.conformance.check_resume` starts it,
and makes the same call again.
"""

import importlib
import os
import signal
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np

import drjax

N, ROUNDS, BLOCK = 6, 3, 1


def later(y, steps: int):
    """y, after that many steps of work: 20 million take about a second on one core."""
    step = lambda i, y: jnp.where(jnp.sin(y + i) > 2, 0.0, y)
    return jax.lax.fori_loop(0, steps, step, y)


def plan_of_rounds():
    """Rounds of a mean over work that takes a while, and its arguments."""

    @drjax.program(clients=N)
    def train(model, data):
        def work(model, x):
            return later(jnp.sin(model + x), 8_000_000)

        def step(model, _):
            mean = drjax.reduce_mean(drjax.map_fn(work, (drjax.broadcast(model), data)))
            return 0.5 * model + mean, mean

        return jax.lax.scan(step, model, length=ROUNDS)

    args = np.float32(2), np.linspace(0, 1, N, dtype=np.float32)
    return drjax.make_plan(train)(*args), args


def compiled(engine: str, folder: str):
    backend = importlib.import_module(f"drjax.backends.{engine}")
    plan, _ = plan_of_rounds()
    return backend.compile(plan, workers=2, block_size=BLOCK, checkpoint=folder)


def die_in_the_second(run) -> None:
    while not (len(run.report.stages) == 2 and run.report.stages[-1].blocks > 2):
        time.sleep(0.01)
    assert run.report.stages[-1].blocks < N
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    run = compiled(*sys.argv[1:])
    threading.Thread(target=die_in_the_second, args=[run], daemon=True).start()
    run(*plan_of_rounds()[1])
