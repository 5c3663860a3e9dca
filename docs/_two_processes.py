"""One of two processes; `python docs/_two_processes.py PORT NUMBER`."""

import sys

import jax
import jax.numpy as jnp
import numpy as np

import drjax


@drjax.program(clients=8)
def mean_of_squares(x):
    return drjax.reduce_mean(drjax.map_fn(jnp.square, x))


port, number = sys.argv[1:]
jax.distributed.initialize(
    f"127.0.0.1:{port}", num_processes=2, process_id=int(number)
)
mesh = jax.make_mesh(
    (jax.device_count(),),
    ("clients",),
    axis_types=(jax.sharding.AxisType.Auto,),
)
with jax.set_mesh(mesh):
    x = drjax.shard(jnp.arange(8.0), partition=mean_of_squares)
    mine = [
        int(np.asarray(shard.data)[0]) for shard in x.addressable_shards
    ]
    result = jax.jit(mean_of_squares)(x)
print(
    f"process {number}: first groups of my devices {mine}, result {result}"
)
