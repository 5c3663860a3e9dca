"""Small programs for what a call costs besides its arithmetic.

A probe is made from a scalar and an array `[8]` and is a function without arguments.
The program is `sum_i (x * data_i + 1)`; its mapped function is defined again in each
call, as it is in the body of a user's program.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec as P

import drjax
from benchmarks.implementations import AXIS

_Make = Callable[[jax.Array, jax.Array], Callable[[], Any]]


def entered(mesh: jax.sharding.Mesh | None) -> Any:
    """The context of a mesh, or without one."""
    return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)


@drjax.program(placements={AXIS: 8})
def _program(x, data):
    y = drjax.map_fn(lambda a, b: a * b + 1, (drjax.broadcast(x), data))
    return drjax.reduce_sum(y)


@drjax.program(placements={AXIS: 8})
def _closing_program(x, data):
    return drjax.reduce_sum(drjax.map_fn(lambda b: x * b + 1, data))


def _vmap(x, data):
    return jax.vmap(lambda a, b: a * b + 1, (None, 0))(x, data).sum(0)


def _closing_vmap(x, data):
    return jax.vmap(lambda b: x * b + 1)(data).sum(0)


def _shard_map(x, data):
    @jax.shard_map(in_specs=(P(), P(AXIS)), out_specs=P())
    def total(x, data):
        x = lax.pcast(x, AXIS, to="varying")
        y = jax.vmap(lambda a, b: a * b + 1, (None, 0))(x, data)
        return lax.psum(y.sum(0), AXIS)

    return total(x, data)


@drjax.program(placements={AXIS: 8})
def _empty_program(x):
    return x


_context, _token = jax.make_user_context(None), object()


def _bare_context(x):
    with _context(_token):
        return x


def _eager(fn: Callable) -> _Make:
    return lambda x, data: lambda: fn(x, data).block_until_ready()


def _jitted(fn: Callable) -> _Make:
    def make(x, data):
        compiled = jax.jit(fn)
        return lambda: compiled(x, data).block_until_ready()

    return make


def _entering(fn: Callable) -> _Make:
    return lambda x, data: lambda: fn(x)


PROBES: dict[str, _Make] = {
    "eager drjax": _eager(_program),
    "eager drjax, closure": _eager(_closing_program),
    "eager vmap": _eager(_vmap),
    "eager vmap, closure": _eager(_closing_vmap),
    "eager shard_map": _eager(_shard_map),
    "jit drjax": _jitted(_program),
    "jit vmap": _jitted(_vmap),
    "jit shard_map": _jitted(_shard_map),
    "enter program": _entering(_empty_program),
    "enter context": _entering(_bare_context),
}


def leak_makers() -> dict[str, Callable[[], Any]]:
    """Functions that make a program, perhaps trace it, and forget it."""

    def program():
        @drjax.program(placements={AXIS: 8})
        def total(x):
            y = drjax.map_fn(lambda a: a * 2, drjax.broadcast(x))
            return drjax.reduce_sum(y)

        return total

    def hand_written():
        mesh = jax.make_mesh((1,), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))

        @jax.shard_map(mesh=mesh, in_specs=P(), out_specs=P())
        def total(x):
            y = lax.pcast(x, AXIS, to="varying")
            y = jax.vmap(lambda a: a * 2, in_axes=None, axis_size=8)(y)
            return lax.psum(y.sum(0), AXIS)

        return total

    def traced(make):
        return lambda: jax.make_jaxpr(jax.grad(make()))(1.0)

    return {
        "program": program,
        "program, traced": traced(program),
        "hand-written shard_map": hand_written,
        "hand-written shard_map, traced": traced(hand_written),
    }
