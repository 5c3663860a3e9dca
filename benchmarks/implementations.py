"""How it is computed: the mean over the groups, written in several ways.

Each function takes `(task, n)` and returns the jitted program, to be called with
`(params, data)` under `jax.set_mesh` of a mesh with the axis "clients". `with_drjax`
is the same source for this library and for Google's: which one runs depends on the
environment. A *chunk* is the number of a device's groups that work at once.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import drjax
from benchmarks.tasks import Program, Task

AXIS = "clients"
CHUNKS = {"1": 1, "8": 8, "1000": 1000, "all": None}


def drjax_program(task: Task, n: int) -> Program:
    """The task in the library's building blocks, not jitted."""

    @drjax.program(placements={AXIS: n})
    def mean(params, data):
        slices = drjax.map_fn(task.fn, (drjax.broadcast(params), data))
        return drjax.reduce_mean(slices)

    return task.whole(task.derivative(mean))


def with_drjax(task: Task, n: int) -> Any:
    return jax.jit(drjax_program(task, n))


def with_plan(task: Task, n: int, chunk: int | None) -> Any:
    return drjax.jit(drjax_program(task, n), groups_per_step=chunk)


def with_shard_map(task: Task, n: int) -> Any:
    """Each device runs a vmap over its groups, then one psum of all results.

    The parameters are not batched: where a group does not change them, all groups of
    a device share one copy.
    """

    @jax.shard_map(in_specs=(P(), P(AXIS)), out_specs=P())
    def mean(params, data):
        params = lax.pcast(params, AXIS, to="varying")
        slices = jax.vmap(task.fn, (None, 0))(params, data)
        total = lax.psum(jax.tree.map(lambda y: y.sum(0), slices), AXIS)
        return jax.tree.map(lambda y: y / n, total)

    return jax.jit(task.whole(task.derivative(mean)))


def with_local_scan(task: Task, n: int, chunk: int = 1) -> Any:
    """Each device adds up its groups chunk by chunk, then one psum of all results.

    Derivatives are taken in each group. A loop over rounds rematerializes each round,
    and in it each chunk, in its backward pass: two `jax.checkpoint`s, without which it
    saves what the groups share once for each chunk or each round.
    """

    def total(params, data):
        sum_of = _sum_of_chunk(task, params)
        slices = jax.tree.map(lambda x: x.reshape(-1, chunk, *x.shape[1:]), data)
        return lax.scan(
            lambda y, x: (_add(y, sum_of(x)), None),
            _zeros(sum_of, _first(slices)),
            slices,
        )[0]

    return _hand_written(task, n, chunk, total)


def with_local_slices(task: Task, n: int, chunk: int = 1) -> Any:
    """As `with_local_scan`; the loop slices its chunk out of the device's data."""

    def total(params, data):
        # Sliced inside the checkpoint, which else would save each slice.
        @functools.partial(jax.checkpoint, prevent_cse=False)
        def sum_of(i):
            take = lambda x: lax.dynamic_slice_in_dim(x, i * chunk, chunk)
            return _sum_of_chunk(task, params)(jax.tree.map(take, data))

        numbers = jnp.arange(len(jax.tree.leaves(data)[0]) // chunk)
        return lax.scan(
            lambda y, i: (_add(y, sum_of(i)), None), _zeros(sum_of, 0), numbers
        )[0]

    return _hand_written(task, n, chunk, total)


def _hand_written(task: Task, n: int, chunk: int, total: Callable) -> Any:
    total = jax.checkpoint(total, prevent_cse=False)

    @jax.shard_map(in_specs=(P(), P(AXIS)), out_specs=P())
    def mean(params, data):
        params = lax.pcast(params, AXIS, to="varying")
        return jax.tree.map(lambda y: y / n, lax.psum(total(params, data), AXIS))

    return jax.jit(task.whole(mean))


def _sum_of_chunk(task: Task, params: Any) -> Callable:
    fn = task.derivative(task.fn)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def checkpointed(params, slices):
        if len(jax.tree.leaves(slices)[0]) == 1:
            return fn(params, _first(slices))
        results = jax.vmap(fn, (None, 0))(params, slices)
        return jax.tree.map(lambda y: y.sum(0), results)

    return lambda slices: checkpointed(params, slices)


def _add(x: Any, y: Any) -> Any:
    return jax.tree.map(jnp.add, x, y)


def _first(slices: Any) -> Any:
    return jax.tree.map(lambda x: x[0], slices)


def _zeros(fn: Callable, slices: Any) -> Any:
    shapes = jax.eval_shape(fn, slices)
    zeros = jax.tree.map(lambda y: jnp.zeros(y.shape, y.dtype), shapes)
    return lax.pcast(zeros, AXIS, to="varying")


def with_vmap(task: Task, n: int) -> Any:
    """No word about devices: the compiler decides, from how the data arrives."""

    def mean(params, data):
        slices = jax.vmap(task.fn, (None, 0))(params, data)
        return jax.tree.map(lambda y: y.sum(0) / n, slices)

    return jax.jit(task.whole(task.derivative(mean)))


IMPLEMENTATIONS: dict[str, Callable[[Task, int], Any]] = {
    "drjax": with_drjax,
    "shard_map, vmap": with_shard_map,
    "shard_map, scan": with_local_scan,
    "jit(vmap)": with_vmap,
    "google drjax": with_drjax,
}
for _name, _chunk in CHUNKS.items():
    IMPLEMENTATIONS[f"drjax.jit, {_name}"] = functools.partial(with_plan, chunk=_chunk)
for _name in ("1", "8"):
    for _how, _fn in (("scan", with_local_scan), ("slices", with_local_slices)):
        IMPLEMENTATIONS[f"{_how}, {_name}"] = functools.partial(
            _fn, chunk=CHUNKS[_name]
        )
