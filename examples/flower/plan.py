"""The plan that the Flower app runs: least squares by gradient steps of the clients.

python -m examples.flower.plan 3 runs/flower/step.drjax
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp

import drjax

POINTS, FEATURES = 20, 3


def step(n: int):
    """A round `(model, data) -> (model, loss)` of n clients."""

    @drjax.program(clients=n)
    def step(model, data):
        def work(model, x, y):
            loss = lambda m: jnp.mean((x @ m - y) ** 2)
            value, grad = jax.value_and_grad(loss)(model)
            return model - 0.2 * grad, value

        models, losses = drjax.map_fn(work, (drjax.broadcast(model), *data))
        return drjax.reduce_mean(models), drjax.reduce_mean(losses)

    return step


def save(n: int, path: Path) -> None:
    """Save the plan of a round of n clients."""
    kind = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    data = kind(n, POINTS, FEATURES), kind(n, POINTS)
    drjax.make_plan(step(n))(kind(FEATURES), data).save(path)


if __name__ == "__main__":
    save(int(sys.argv[1]), Path(sys.argv[2]))
