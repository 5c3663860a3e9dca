"""Four groups, and trees of values for them, that several tests use."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import drjax

N = 4
four = drjax.program(clients=N)


class Pair(NamedTuple):
    first: Any
    second: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
    params: Any
    step: Any
    name: str = dataclasses.field(metadata={"static": True}, default="static")


def slices(*shape, dtype: Any = np.float32, seed=0):
    """Random `[N, *shape]` numbers that 16-bit floats hold exactly."""
    return np.random.RandomState(seed).randint(-8, 8, (N, *shape)).astype(dtype)


def nnx_state():
    return jax.tree.map(
        lambda x: jnp.asarray(slices()), nnx.state(nnx.Dict(a=nnx.Param(0.0)))
    )


TREES = {
    "array": lambda: slices(2),
    "dict": lambda: {"a": slices(), "b": {"c": slices(2, 3)}},
    "list": lambda: [slices(), [slices(2)]],
    "tuple": lambda: (slices(), slices(2)),
    "named tuple": lambda: Pair(slices(), slices(3)),
    "dataclass": lambda: State(slices(2), slices(dtype=np.int32)),
    "nnx.State": nnx_state,
    "None leaves": lambda: {"a": None, "b": slices()},
    "None": lambda: None,
    "empty": lambda: {},
    "empty array": lambda: slices(0, 2),
    "jax array": lambda: jnp.asarray(slices(2)),
}
MESHES = [None, {"clients": 2}]


def assert_trees_equal(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)
