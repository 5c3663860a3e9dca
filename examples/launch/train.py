"""Local SGD in one process or many: what every launcher of this folder starts.

    python -m examples.launch.train                      # one process
    python -m examples.launch.train --cluster auto       # of Slurm, GKE or a Cloud TPU
    python -m examples.launch.train --coordinator HOST:PORT --processes 2 --process 0

Each process runs this program on its own devices, and all of them together one mesh. A
process makes the data of its own groups only, from their indices, so the numbers do not
depend on how many processes there are. The first one prints the losses.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import drjax


@dataclasses.dataclass(frozen=True)
class Config:
    """Train a linear model by local SGD."""

    cluster: Literal["none", "auto"] = "none"
    """`auto`: JAX asks the cluster for the other processes, and waits for them."""
    coordinator: str | None = None
    """Where the first process listens, if no cluster says so: HOST:PORT."""
    processes: int = 1
    """How many there are, with a coordinator."""
    process: int = 0
    """Which of them this is, with a coordinator."""
    groups: int = 32
    """Groups of the partition; a multiple of all devices."""
    rounds: int = 5
    """Rounds of communication."""


def connect(config: Config) -> None:
    """Finds the other processes; before anything else uses a device."""
    if config.coordinator is not None:
        place = config.coordinator, config.processes, config.process
        jax.distributed.initialize(*place, cluster_detection_method="deactivate")
    elif config.cluster == "auto":
        jax.distributed.initialize()


def train(config: Config) -> list[float]:
    """Trains on all devices of all processes; the loss of each round."""

    @drjax.program(groups=config.groups)
    def local_sgd(model, x, y):
        def work(model, x, y):
            loss = lambda model: jnp.mean((x @ model - y) ** 2)
            first = loss(model)
            for _ in range(4):
                model = model - 0.05 * jax.grad(loss)(model)
            return model, first

        models = drjax.map_fn(work, (drjax.broadcast(model), x, y))
        return drjax.reduce_mean(models)

    mesh = jax.make_mesh(
        (jax.device_count(),), ("groups",), axis_types=(AxisType.Auto,)
    )
    sharding = NamedSharding(mesh, PartitionSpec("groups"))

    def own(index: Any) -> np.ndarray:
        """Examples of the groups of a device, each drawn from the group's index."""
        groups = range(*index[0].indices(config.groups))
        draw = lambda i: np.random.default_rng(i).normal(size=(16, 8))
        return np.stack([draw(i) for i in groups]).astype(np.float32)

    x = jax.make_array_from_callback((config.groups, 16, 8), sharding, own)
    with jax.set_mesh(mesh):
        y = jax.jit(lambda x: jnp.sin(x).sum(-1))(x)
        step, model, losses = jax.jit(local_sgd), jnp.zeros(8), []
        for _ in range(config.rounds):
            model, loss = step(model, x, y)
            losses.append(float(loss))
    return losses


def main(config: Config) -> None:
    """Connects, trains, and prints in the first process."""
    connect(config)
    losses = train(config)
    if jax.process_index() == 0:
        size = f"{jax.process_count()} processes, {jax.device_count()} devices"
        print(f"{size}, losses", *(f"{loss:.6f}" for loss in losses), flush=True)


if __name__ == "__main__":
    main(tyro.cli(Config))
