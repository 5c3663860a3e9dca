"""The round of local SGD, written in six ways: `(params, tokens) -> (params, loss)`.

`params` are the global parameters, `tokens` int32 `[n, steps, batch, length + 1]`. All
run on a mesh with the axes `groups` and `model`. A group's model is left to the
compiler, which lays it out over `model` by how the parameters come in.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import drjax
from experiments.config import Variant

GROUPS, MODEL = "groups", "model"
Work = Callable[[Any, Any], tuple[Any, Any]]


def make(variant: Variant, work: Work, n: int, groups_per_step: int | None) -> Callable:
    """The round, not jitted but for `drjax.jit`."""
    if variant == "drjax jit":
        return drjax.jit(with_drjax(work, n), groups_per_step=groups_per_step)
    return _WAYS[variant](work, n)


def with_drjax(work: Work, n: int) -> Callable:
    """In the library's building blocks."""

    @drjax.program(placements={GROUPS: n})
    def round_(params, tokens):
        updates, losses = drjax.map_fn(work, (drjax.broadcast(params), tokens))
        return _add(params, drjax.reduce_mean(updates)), drjax.reduce_mean(losses)

    return round_


def with_shard_map(work: Work, n: int) -> Callable:
    """By hand: each device runs a vmap over its groups, then one psum."""

    @jax.shard_map(in_specs=(P(), P(GROUPS)), out_specs=P(), axis_names={GROUPS})
    def means(params, tokens):
        params = lax.pcast(params, GROUPS, to="varying")
        if tokens.shape[0] == 1:
            total = work(params, tokens[0])
        else:
            rows = jax.vmap(work, (None, 0))(params, tokens)
            total = jax.tree.map(lambda y: y.sum(0), rows)
        return jax.tree.map(lambda y: y / n, lax.psum(total, GROUPS))

    return _adding(means)


def with_python_loop(work: Work, n: int) -> Callable:
    """Group after group in Python: every device runs all of them."""

    def means(params, tokens):
        rows = [work(params, tokens[i]) for i in range(n)]
        return jax.tree.map(lambda *ys: sum(ys) / n, *rows)

    return _adding(means)


def with_rolled_loop(work: Work, n: int) -> Callable:
    """The same as a `lax.scan`, which compiles one group."""

    def means(params, tokens):
        def add(total, tokens):
            return _add(total, work(params, tokens)), None

        zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(work, params, tokens[0]))
        total, _ = lax.scan(add, zeros, tokens)
        return jax.tree.map(lambda y: y / n, total)

    return _adding(means)


def without_annotations(work: Work, n: int) -> Callable:
    """A vmap, which nothing tells where its groups are."""

    def means(params, tokens):
        copies = jax.tree.map(lambda p: jnp.broadcast_to(p, (n, *p.shape)), params)
        rows = jax.vmap(work)(copies, tokens)
        return jax.tree.map(lambda y: y.mean(0), rows)

    return _adding(means)


_WAYS: dict[str, Callable[[Work, int], Callable]] = {
    "drjax": with_drjax,
    "shard_map": with_shard_map,
    "python loop": with_python_loop,
    "rolled loop": with_rolled_loop,
    "no annotations": without_annotations,
}


def _add(a: Any, b: Any) -> Any:
    return jax.tree.map(jnp.add, a, b)


def _adding(means: Callable) -> Callable:
    """A round: the mean of the updates added to the parameters, the mean loss."""

    def round_(params, tokens):
        update, loss = means(params, tokens)
        return _add(params, update), loss

    return round_
