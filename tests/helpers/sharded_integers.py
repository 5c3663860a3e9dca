"""Groups over several devices whose numbers are integers, so that sums are exact.

    python -m tests.helpers.sharded_integers PROCESS PROCESSES PORT DEVICES OUTPUT

runs them as one of so many processes with so many devices each, and saves the results.
"""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, reshard
from jax.sharding import PartitionSpec as P

import drjax
from drjax._sharding import group_mesh
from drjax.backends import in_process
from tests.helpers.distributed_worker import start
from tests.helpers.dying_driver import later

N = 6


def constraint(how, w, *spec):
    change = reshard if how == "explicit" else lax.with_sharding_constraint
    return change(w, P(*spec))


def plan_of_integers(how="auto"):
    """A gradient, a maximum and slices, all of them integers: sums are exact."""

    def loss(w, x):
        up = constraint(how, w["up"], None, "model")
        down = constraint(how, w["down"], "model", None)
        place: Any = {"out_sharding": P()} if how == "explicit" else {}
        return jnp.sum(jnp.einsum("bh,hd->bd", jnp.abs(x @ up), down, **place))

    def local(w, state, x, steps):
        x = x.at[0, 0].set(later(x[0, 0], steps))
        value, grads = jax.value_and_grad(loss)(w, x)
        return grads, value, state + value

    @drjax.program(clients=N)
    def train(w, state, x, steps):
        shared = drjax.broadcast((w, steps))
        grads, values, state = drjax.map_fn(local, (shared[0], state, x, shared[1]))
        return drjax.reduce_sum(grads), drjax.reduce_max(values), state

    kind = AxisType.Explicit if how == "explicit" else AxisType.Auto
    mesh = AbstractMesh((4,), ("model",), axis_types=(kind,))
    return drjax.make_plan(train, group_mesh=mesh)(*integers())


def integers(steps=1):
    rng = np.random.default_rng(0)
    array = lambda *shape: rng.integers(-4, 5, shape).astype(np.float32)
    w = {"up": array(8, 16), "down": array(16, 8)}
    return w, array(N), array(N, 3, 8), np.int32(steps)


def equal(results, others):
    jax.tree.map(np.testing.assert_array_equal, results, others)


def main(process: int, processes: int, port: int, devices: int, output: str):
    start(process, processes, port, devices)
    if processes > 1:
        group_mesh.span_processes()
    w, state, x, steps = integers()
    x[2] = np.nan
    for size in (1, 3):
        options = {"on_error": "drop", "check_nans": True, "block_size": size}
        run = in_process.compile(plan_of_integers(), **options)
        results = jax.tree.leaves(run(w, state, x, steps))
        assert [*run.report.dropped] == [2]
    np.savez(output, *results)


if __name__ == "__main__":
    process, processes, port, devices = map(int, sys.argv[1:5])
    main(process, processes, port, devices, sys.argv[5])
