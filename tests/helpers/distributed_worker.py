"""One process of `test_distributed`: trains some rounds and saves the parameters.

python -m tests.helpers.distributed_worker PROCESS PROCESSES PORT DEVICES OUTPUT
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np

import drjax

GROUPS = 16


@drjax.program(clients=GROUPS)
def local_sgd_round(params, inputs, targets):
    def train(params, inputs, targets):
        def loss(params, x, y):
            hidden = jnp.tanh(x @ params["w"] + params["b"])
            return jnp.mean((hidden @ params["v"] - y) ** 2)

        def step(params, batch):
            value, grad = jax.value_and_grad(loss)(params, *batch)
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, grad), value

        new, losses = jax.lax.scan(step, params, (inputs, targets))
        return jax.tree.map(jnp.subtract, new, params), losses[0]

    args = (drjax.broadcast(params), inputs, targets)
    deltas, losses = drjax.map_fn(train, args)
    mean = drjax.reduce_mean(deltas)
    return jax.tree.map(jnp.add, params, mean), drjax.reduce_mean(losses)


def start(process: int, processes: int, port: int, devices: int):
    """Start JAX as one of some processes on this machine, if there are several."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    if processes > 1:
        jax.distributed.initialize(
            f"127.0.0.1:{port}", processes, process, initialization_timeout=60
        )


def main(process: int, processes: int, port: int, devices: int, output: str):
    start(process, processes, port, devices)
    assert jax.device_count() == processes * devices
    rng = np.random.default_rng(0)
    params = {
        "w": rng.normal(size=(5, 7)).astype(np.float32),
        "b": np.zeros(7, np.float32),
        "v": rng.normal(size=7).astype(np.float32),
    }
    inputs = rng.normal(size=(GROUPS, 3, 8, 5)).astype(np.float32)
    targets = np.sin(inputs.sum(-1))
    mesh = jax.make_mesh(
        (jax.device_count(),), ("clients",), axis_types=(jax.sharding.AxisType.Auto,)
    )
    with jax.set_mesh(mesh):
        # Every process passes the whole array, and keeps its own slices.
        inputs, targets = drjax.shard((inputs, targets), partition=local_sgd_round)
        assert inputs.addressable_shards[0].data.shape[0] == GROUPS // mesh.size
        keys = jax.random.split(jax.random.key(0), GROUPS)
        drjax.shard(keys, partition=local_sgd_round)
        odd = drjax.shard(np.arange(10.0), partition={"clients": 10})
        total = drjax.reduce_sum(odd, partition={"clients": 10})
        step = jax.jit(local_sgd_round)
        losses = []
        for _ in range(3):
            params, loss = step(params, inputs, targets)
            losses.append(float(loss))
    np.savez(output, losses=losses, total=total, **jax.tree.map(np.asarray, params))


if __name__ == "__main__":
    process, processes, port, devices = map(int, sys.argv[1:5])
    main(process, processes, port, devices, sys.argv[5])
