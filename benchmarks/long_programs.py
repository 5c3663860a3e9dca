"""Programs of as many equations as asked for, to see how the time to plan them grows.

Each is made from the number of equations (about: a few more begin and end it) and is
`(program, types of its arguments)`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import drjax
from benchmarks.implementations import AXIS

_N = 8
_VECTOR = jax.ShapeDtypeStruct((_N,), jnp.float32)
_SCALAR = jax.ShapeDtypeStruct((), jnp.float32)
Program = tuple[Callable[..., Any], tuple]


def _chain(x: jax.Array, equations: int) -> jax.Array:
    for _ in range(equations // 2):
        x = lax.mul(lax.sin(x), x)
    return x


def _in_one_map(equations: int) -> Program:
    """One mapped function that holds all equations."""

    @drjax.program(placements={AXIS: _N})
    def program(x):
        return drjax.reduce_sum(drjax.map_fn(lambda y: _chain(y, equations), x))

    return program, (_VECTOR,)


def _between_maps(equations: int) -> Program:
    """Pointwise equations on partitioned values, as derivatives leave them."""

    @drjax.program(placements={AXIS: _N})
    def program(x):
        y = _chain(drjax.map_fn(lax.cos, x), equations)
        return drjax.reduce_sum(drjax.map_fn(lax.cos, y))

    return program, (_VECTOR,)


def _many_maps(equations: int) -> Program:
    """Mapped functions of ten equations, one after the other."""

    @drjax.program(placements={AXIS: _N})
    def program(x):
        for _ in range(equations // 10):
            x = drjax.map_fn(lambda y: _chain(y, 10), x)
        return drjax.reduce_sum(x)

    return program, (_VECTOR,)


def _on_the_server(equations: int) -> Program:
    """Equations on global values between two rounds."""

    @drjax.program(placements={AXIS: _N})
    def program(x):
        y = _chain(drjax.reduce_sum(drjax.map_fn(lax.cos, x)), equations)
        return drjax.reduce_sum(drjax.map_fn(lax.cos, drjax.broadcast(y)))

    return program, (_VECTOR,)


def _in_rounds(equations: int) -> Program:
    """Rounds of ten equations in the groups, written one after the other."""

    @drjax.program(placements={AXIS: _N})
    def program(x):
        for _ in range(equations // 10):
            slices = drjax.map_fn(lambda y: _chain(y, 10), drjax.broadcast(x))
            x = drjax.reduce_mean(slices)
        return x

    return program, (_SCALAR,)


LONG_PROGRAMS: dict[str, Callable[[int], Program]] = {
    "in one map": _in_one_map,
    "in maps of ten": _many_maps,
    "in rounds of ten": _in_rounds,
    "between maps": _between_maps,
    "on the server": _on_the_server,
}
