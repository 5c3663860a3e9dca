"""Programs as plans: print them, count what they send, draw them.

    python -m examples.plans

A plan is the normal form of a program (Rush et al. 2024, arXiv 2403.07128, section 5):
server work, what is sent to the groups, the groups' work, what is reduced, round by
round. This prints the plans of a round of local SGD, of MAML and of its gradient, with
their ledgers, and draws each in the manner of the paper's Figure 3.
"""

import dataclasses
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import tyro
from jax import Array

import drjax
from drjax.plan import Plan
from examples.algorithms import maml
from examples.common.sinusoid import Model, Points, init, loss, sample_task

CLIENTS = 64
LOCAL_STEPS = 4
LR = 0.01


@dataclasses.dataclass(frozen=True)
class Config:
    """Print and draw the plans of three programs."""

    output: Path = Path("runs/plans")
    """Folder of the pictures."""
    format: Literal["svg", "png"] = "svg"
    """Format of the pictures."""
    devices: int = 8
    """Devices over which the ledgers divide the groups."""


@drjax.program(clients=CLIENTS)
def local_sgd(model: Model, batches: Points) -> tuple[Model, Array]:
    """One round: some steps of SGD in each group, then the mean of the models."""

    def train(model: Model, batches: Points) -> tuple[Model, Array]:
        def step(model, points):
            value, grads = jax.value_and_grad(loss)(model, points)
            return jax.tree.map(lambda p, g: p - LR * g, model, grads), value

        model, losses = jax.lax.scan(step, model, batches)
        return model, jnp.mean(losses)

    models, losses = drjax.map_fn(train, (drjax.broadcast(model), batches))
    return drjax.reduce_mean(models), drjax.reduce_mean(losses)


def plans() -> dict[str, Plan]:
    """The plans by name; they need the shapes of the arguments, not the values."""
    shape = jax.eval_shape
    model = shape(init, jax.random.key(0))
    keys = shape(lambda: jax.random.split(jax.random.key(0), maml.META_BATCH))
    tasks = shape(jax.vmap(sample_task), keys)
    lr = jax.ShapeDtypeStruct((), jnp.float32)
    points = jax.ShapeDtypeStruct((CLIENTS, LOCAL_STEPS, 10), jnp.float32)
    gradients = jax.grad(maml.meta_loss, argnums=(0, 1))
    return {
        "local_sgd": drjax.make_plan(local_sgd)(model, (points, points)),
        "maml": drjax.make_plan(maml.meta_loss)(model, lr, tasks),
        "maml_gradients": drjax.make_plan(gradients)(model, lr, tasks),
    }


def main(config: Config) -> None:
    """Prints and draws all plans."""
    for name, plan in plans().items():
        path = config.output / f"{name}.{config.format}"
        plan.draw(path)
        print(plan, plan.communication(config.devices), sep="\n\n")
        print(f"picture: {path}\n")


if __name__ == "__main__":
    main(tyro.cli(Config))
