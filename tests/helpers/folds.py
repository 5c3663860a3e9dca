"""Associative functions of two states, and programs that fold by them."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import drjax
from tests.helpers.meshes import groups_and_meshes

# The number of groups, and the mesh.
MESHES = groups_and_meshes(
    "none",
    "two each",
    "uneven",
    "three each, uneven",
    "empty devices",
    "model",
    "explicit",
    "explicit model",
    "other axis",
)


def chan(a, b):
    """The count, mean and sum of squares of two samples together (Chan et al. 1979)."""
    n = a["n"] + b["n"]
    share = b["n"] / jnp.maximum(n, 1)
    delta = b["mean"] - a["mean"]
    return {
        "n": n,
        "mean": a["mean"] + delta * share,
        "m2": a["m2"] + b["m2"] + delta**2 * a["n"] * share,
    }


def best(a, b):
    """The larger score, with its payload."""
    return jax.tree.map(lambda x, y: jnp.where(a["score"] >= b["score"], x, y), a, b)


def affine(a, b):
    """The composition of two affine maps, which does not commute."""
    (m, v), (k, w) = a, b
    return m @ k, jnp.einsum("ij,j->i", m, w) + v


def logsumexp(a, b):
    """The maximum, and the sum of exponentials below it; NaN for two neutral states."""
    top = jnp.maximum(a[0], b[0])
    return top, a[1] * jnp.exp(a[0] - top) + b[1] * jnp.exp(b[0] - top)


# The function, the neutral state, and the states of the groups from arrays [n, 3].
FOLDS: dict[str, Any] = {
    "chan": (
        chan,
        {"n": 0.0, "mean": 0, "m2": 0.0},
        lambda x: {"n": x[:, 0] ** 2 + 1, "mean": x, "m2": jnp.sin(x) + 1},
    ),
    "best": (
        best,
        {"score": -jnp.inf, "model": 0.0, "index": -1},
        lambda x: {
            "score": x[:, 0],
            "model": x**2,
            "index": (9 * x[:, 1]).astype(jnp.int32),
        },
    ),
    "affine": (
        affine,
        (np.eye(3, dtype=np.float32), 0.0),
        lambda x: (x[:, :, None] * jnp.cos(x)[:, None] + jnp.eye(3)[None], jnp.sin(x)),
    ),
    "logsumexp": (logsumexp, (-jnp.inf, 0.0), lambda x: (x, jnp.ones_like(x))),
}


def plainly(combine, states):
    """The fold by `functools.reduce`, without the neutral state."""
    n = len(jax.tree.leaves(states)[0])
    each = [jax.tree.map(lambda x: x[i], states) for i in range(n)]  # noqa: B023
    return functools.reduce(combine, each)


def program_of(name: str, n: int):
    combine, init, states = FOLDS[name]

    @drjax.program(clients=n)
    def f(x):
        return drjax.reduce(combine, states(x), init)

    return f


def direct_of(name: str):
    combine, _, states = FOLDS[name]
    return lambda x: plainly(combine, states(x))


def loss_of(f):
    def loss(x):
        leaves = [y for y in jax.tree.leaves(f(x)) if y.dtype == jnp.float32]
        return sum(jnp.sum(jnp.sin(y / 4)) for y in leaves)

    return loss


def data(n: int, *shape: int):
    return np.random.RandomState(n).randn(n, *shape).astype(np.float32)


close = functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-5)
