"""How it is computed: the mean over the groups, written in several ways.

Each function takes `(fn, n, gradient)` and returns `program(params, data)`, to be
called under `jax.set_mesh` of a mesh with the axis "clients". `with_drjax` is the same
source for this library and for Google's: which one runs depends on the environment.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import drjax

AXIS = "clients"
Program = Callable[[Any, Any], Any]


def with_drjax(fn: Callable, n: int, gradient: bool) -> Program:
    @drjax.program(placements={AXIS: n})
    def program(params, data):
        return drjax.reduce_mean(drjax.map_fn(fn, (drjax.broadcast(params), data)))

    return jax.grad(program) if gradient else program


def with_shard_map(fn: Callable, n: int, gradient: bool) -> Program:
    """Each device runs a vmap over its groups, then one psum of all results.

    The parameters are not batched: where a group does not change them, all groups of
    a device share one copy.
    """

    @jax.shard_map(in_specs=(P(), P(AXIS)), out_specs=P())
    def program(params, data):
        params = lax.pcast(params, AXIS, to="varying")
        rows = jax.vmap(fn, (None, 0))(params, data)
        total = lax.psum(jax.tree.map(lambda y: y.sum(0), rows), AXIS)
        return jax.tree.map(lambda y: y / n, total)

    return jax.grad(program) if gradient else program


def with_local_scan(fn: Callable, n: int, gradient: bool) -> Program:
    """Each device adds up its groups one by one, then one psum of all results."""
    fn = jax.grad(fn) if gradient else fn

    @jax.shard_map(in_specs=(P(), P(AXIS)), out_specs=P())
    def program(params, data):
        params = lax.pcast(params, AXIS, to="varying")
        add = lambda total, row: (jax.tree.map(jnp.add, total, fn(params, row)), None)
        result = jax.eval_shape(fn, params, jax.tree.map(lambda x: x[0], data))
        zeros = jax.tree.map(lambda y: jnp.zeros(y.shape, y.dtype), result)
        total, _ = lax.scan(add, lax.pcast(zeros, AXIS, to="varying"), data)
        return jax.tree.map(lambda y: y / n, lax.psum(total, AXIS))

    return program


def with_vmap(fn: Callable, n: int, gradient: bool) -> Program:
    """No word about devices: the compiler decides, from how the data arrives."""

    def program(params, data):
        rows = jax.vmap(fn, (None, 0))(params, data)
        return jax.tree.map(lambda y: y.sum(0) / n, rows)

    return jax.grad(program) if gradient else program


IMPLEMENTATIONS: dict[str, Callable[[Callable, int, bool], Program]] = {
    "drjax": with_drjax,
    "shard_map, vmap": with_shard_map,
    "shard_map, scan": with_local_scan,
    "jit(vmap)": with_vmap,
    "google drjax": with_drjax,
}
