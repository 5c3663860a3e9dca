"""Local SGD on the workers of a Ray cluster, each group on one device or on several.

    python -m examples.cluster.train                  # Ray on this machine
    python -m examples.cluster.train --address auto --workers 16 --devices 4

This process is the driver: it needs no accelerator. Workers make the data of their
groups from the groups' indices.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import drjax


@dataclasses.dataclass(frozen=True)
class Config:
    """A run on a Ray cluster."""

    address: str | None = None
    """Of the cluster; `auto` on one of its nodes. Default: Ray on this machine."""
    workers: int = 2
    """Processes that run groups."""
    devices: int = 1
    """Devices of a worker, which share the model of a group."""
    groups: int = 8
    """Groups of data."""
    rounds: int = 3
    """Rounds of communication."""


SPECS = {"up": P(None, "model"), "down": P("model", None)}


def make_plan(config: Config) -> drjax.plan.Plan:
    """The plan of a round `model -> (model, loss)`; it names no host and no device."""
    mesh = None
    if config.devices > 1:
        auto = (AxisType.Auto,)
        mesh = AbstractMesh((config.devices,), ("model",), axis_types=auto)

    def shard(w, spec):
        return w if mesh is None else lax.with_sharding_constraint(w, spec)

    def loss(model, x):
        model = jax.tree.map(shard, model, SPECS)
        return jnp.mean((jnp.tanh(x @ model["up"]) @ model["down"] - x) ** 2)

    @drjax.program(groups=config.groups)
    def local_sgd(model):
        def work(model, group):
            x = jax.random.normal(jax.random.fold_in(jax.random.key(0), group), (16, 8))
            first = loss(model, x)
            for _ in range(4):
                grads = jax.grad(loss)(model, x)
                model = jax.tree.map(lambda w, g: w - 0.1 * g, model, grads)
            return model, first

        results = drjax.map_fn(work, (drjax.broadcast(model), drjax.partition_index()))
        return drjax.reduce_mean(results)

    return drjax.make_plan(local_sgd, group_mesh=mesh)(first_model())


def first_model() -> dict[str, np.ndarray]:
    """The model before the first round."""
    draw = np.random.default_rng(0).normal
    shapes = {"up": (8, 32), "down": (32, 8)}
    return {k: (0.1 * draw(size=s)).astype(np.float32) for k, s in shapes.items()}


def main(config: Config) -> list[float]:
    """Train, and print the loss of each round."""
    plan, model, losses = make_plan(config), first_model(), []
    with drjax.backends.ray.compile(
        plan, workers=config.workers, address=config.address
    ) as run:
        for _ in range(config.rounds):
            model, loss = run(model)
            losses.append(float(loss))
        workers = len(run.report.workers)
    print(f"{workers} workers, losses", *(f"{x:.6f}" for x in losses))
    return losses


if __name__ == "__main__":
    main(tyro.cli(Config))
