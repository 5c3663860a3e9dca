"""A driver whose workers are killed at a steady rate, and that kills itself at times.

    python -m tests.helpers.soak FOLDER ADDRESS FAILURES SEED

It trains with state that stays with the workers, of the Ray cluster at ADDRESS, from
what the checkpoint in FOLDER has, until so many failures are in the file `failures`
of FOLDER. Then it prints how many calls have ended, and the bits of the state.
"""

import os
import random
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import drjax
from tests.helpers.dying_driver import later
from tests.helpers.dying_trainer import bits

N, D, WORKERS, BLOCK = 8, 6, 2, 1
STEPS = 1_000_000  # of work in each group that changes no value: some 50 ms
KEEP = {1: 1}
EVERY = 0.5  # seconds between failures, on average, if the workers are back by then
DRIVERS = 16  # one of so many failures is that of the driver
# Ray starts a worker with variables of its own in twice the time.
OPTIONS = {"runtime_env": {}}


def plan_and_start():
    """Steps with a momentum of each group, and the state before the first."""

    @drjax.program(clients=N)
    def train(model, own, x, steps):
        def work(model, own, x, steps):
            gradient = jnp.sin(model + x) + 0.1 * model
            return later(0.9 * own + gradient, steps)

        own = drjax.map_fn(
            work, (drjax.broadcast(model), own, x, drjax.broadcast(steps))
        )
        return model - 0.3 * drjax.reduce_mean(own), own

    start = np.zeros(D, np.float32), np.zeros((N, D), np.float32)
    return drjax.make_plan(train)(*start, data(), np.int32(0)), start


def data():
    return np.random.default_rng(0).normal(size=(N, D)).astype(np.float32)


def expected_bits(calls):
    """The bits after so many calls, without a failure."""
    from drjax.backends import in_process

    plan, state = plan_and_start()
    run = in_process.compile(plan, block_size=BLOCK, keep=KEEP)
    for _ in range(calls):
        state = run(*state, data(), np.int32(0))
    return bits(state)


class Killer:
    """Kills a worker of those that have done blocks, or this process, now and then.

    Each worker has done a block before it is killed, so that calls end.
    """

    def __init__(self, folder, seed):
        self.path, self.processes = Path(folder, "failures"), set()
        # Another course after each failure of a driver.
        self.random = random.Random(f"{seed} {self.count()}")
        threading.Thread(target=self._run, daemon=True).start()

    def count(self):
        return len(self.path.read_text().split()) if self.path.exists() else 0

    def observe(self, event):
        if getattr(event, "process", 0):
            self.processes.add(event.process)

    def _run(self):
        while True:
            time.sleep(self.random.expovariate(1 / EVERY))
            while not self.processes:
                time.sleep(0.01)
            if self.count() % DRIVERS == 3:
                self._write("driver")
                os.kill(os.getpid(), signal.SIGKILL)
            process = self.random.choice(sorted(self.processes))
            self.processes.discard(process)
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
                self._write("worker")

    def _write(self, what):
        with self.path.open("a") as file:
            print(what, file=file, flush=True)


def train(folder, address, failures, seed):
    from drjax.backends import Retry, ray

    plan, start = plan_and_start()
    killer = Killer(folder, seed)
    with ray.compile(
        plan,
        workers=(1, WORKERS),
        address=address,
        ray_options=OPTIONS,
        block_size=BLOCK,
        keep=KEEP,
        checkpoint=Path(folder, "run"),
        retries={"worker": Retry(1000)},
        observers=[killer.observe],
    ) as run:
        calls, state = run.restore() or (0, start)
        print("restored", calls, flush=True)
        while killer.count() < failures:
            state = run(*state, data(), np.int32(STEPS))
            calls += 1
            print("ended", calls, run.report.busy, flush=True)
        print("bits", calls, bits(state), flush=True)
        os._exit(0)  # before the killer does


if __name__ == "__main__":
    folder, address, failures, seed = sys.argv[1:]
    jax.config.update("jax_platforms", "cpu")
    train(folder, address, int(failures), seed)
