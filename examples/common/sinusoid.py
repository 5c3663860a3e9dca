"""Sinusoids from five points: Finn et al. 2017 (arXiv 1703.03400, section 5.1).

The tasks, the paper's network and its loss.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

SHOTS = 5  # points in a task

Model = list[dict[str, Array]]
Points = tuple[Array, Array]


class Task(NamedTuple):
    """Points of one sinusoid to adapt on, and others to judge the result by."""

    support: Points
    query: Points


def init(key: Array, widths: tuple[int, ...] = (1, 40, 40, 1)) -> Model:
    """Makes the paper's network: two hidden layers of 40 rectified linear units."""
    scale = jax.nn.initializers.normal(0.1)
    keys = jax.random.split(key, len(widths) - 1)
    return [
        {"w": scale(key, (m, n)), "b": jnp.zeros(n)}
        for key, m, n in zip(keys, widths[:-1], widths[1:], strict=True)
    ]


def predict(model: Model, x: Array) -> Array:
    """Maps inputs [points] to outputs [points]."""
    y = x[:, None]
    for layer in model[:-1]:
        y = jax.nn.relu(y @ layer["w"] + layer["b"])
    return (y @ model[-1]["w"] + model[-1]["b"])[:, 0]


def loss(model: Model, points: Points) -> Array:
    """Mean squared error."""
    x, y = points
    return jnp.mean((predict(model, x) - y) ** 2)


def sample_task(key: Array, queries: int = SHOTS) -> Task:
    """Draws a sinusoid: amplitude in [0.1, 5], phase in [0, pi], x in [-5, 5]."""
    keys = jax.random.split(key, 3)
    amplitude = jax.random.uniform(keys[0], minval=0.1, maxval=5.0)
    phase = jax.random.uniform(keys[1], minval=0.0, maxval=jnp.pi)
    x = jax.random.uniform(keys[2], (SHOTS + queries,), minval=-5.0, maxval=5.0)
    y = amplitude * jnp.sin(x - phase)
    return Task((x[:SHOTS], y[:SHOTS]), (x[SHOTS:], y[SHOTS:]))
