"""The round of local SGD, written in many ways: `(params, windows) -> (params, loss)`.

`params` are the global parameters, `windows` the text of n groups: tokens
`[n, steps, batch, length + 1]` and lengths `[n, steps, batch]`. All run on a mesh with
the axes `groups` and `model`, and `fsdp` between them if a group's devices have two
axes. A group's model is left to the compiler, which lays it out over these by how the
parameters come in.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import drjax
from experiments.config import Variant

GROUPS, FSDP, MODEL = "groups", "fsdp", "model"
Work = Callable[[Any, Any], tuple[Any, Any]]


def make(
    variant: Variant, work: Work, n: int, groups_per_step: int | None, average: str
) -> Callable:
    """The round, not jitted but for `drjax.jit`.

    Args:
      average: What a group's work gives: `"updates"` of the parameters, or `"models"`,
        whose mean takes the place of the parameters.
    """
    means = _WAYS[variant](work, n)

    def round_(params, windows):
        mean, loss = means(params, windows)
        return (_add(params, mean) if average == "updates" else mean), loss

    if variant == "drjax jit":
        return drjax.jit(round_, groups_per_step=groups_per_step)
    return round_


def with_drjax(work: Work, n: int) -> Callable:
    """In the building blocks of this library, or of Google's, which runs the same."""

    @drjax.program(placements={GROUPS: n})
    def means(params, windows):
        slices = drjax.map_fn(work, (drjax.broadcast(params), windows))
        return drjax.reduce_mean(slices)

    return means


def _mapped(work: Work, params: Any, windows: Any) -> Any:
    """The sum of a device's groups, all at once."""
    slices = jax.vmap(work, (None, 0))(params, windows)
    return jax.tree.map(lambda y: y.sum(0), slices)


def _scanned(
    work: Work, params: Any, windows: Any, varying: tuple[str, ...] = ()
) -> Any:
    """The sum of groups, one after another; over these axes it varies."""
    slice_ = _slice(windows, 0)
    shapes = jax.eval_shape(work, params, slice_)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    zeros = lax.pcast(zeros, varying, to="varying") if varying else zeros
    add = lambda total, slice_: (_add(total, work(params, slice_)), None)
    return lax.scan(add, zeros, windows)[0]


def with_shard_map(work: Work, n: int, many: Callable = _mapped) -> Callable:
    """A shard_map: each device runs its groups, then one psum."""

    @jax.shard_map(in_specs=(P(), P(GROUPS)), out_specs=P(), axis_names={GROUPS})
    def means(params, windows):
        params = lax.pcast(params, GROUPS, to="varying")
        if windows[0].shape[0] == 1:
            total = work(params, _slice(windows, 0))
        else:
            total = many(work, params, windows)
        return jax.tree.map(lambda y: y / n, lax.psum(total, GROUPS))

    return means


def with_python_loop(work: Work, n: int) -> Callable:
    """Group after group in Python: every device runs all of them."""

    def means(params, windows):
        slices = [work(params, _slice(windows, i)) for i in range(n)]
        return jax.tree.map(lambda *ys: sum(ys) / n, *slices)

    return means


def with_rolled_loop(work: Work, n: int) -> Callable:
    """The same as a `lax.scan`, which compiles one group."""

    def means(params, windows):
        return jax.tree.map(lambda y: y / n, _scanned(work, params, windows))

    return means


def without_annotations(work: Work, n: int) -> Callable:
    """A vmap, which nothing tells where its groups are."""

    def means(params, windows):
        copies = jax.tree.map(lambda p: jnp.broadcast_to(p, (n, *p.shape)), params)
        slices = jax.vmap(work)(copies, windows)
        return jax.tree.map(lambda y: y.mean(0), slices)

    return means


_one_by_one = functools.partial(_scanned, varying=(GROUPS,))
_WAYS: dict[Variant, Callable[[Work, int], Callable]] = {
    "drjax": with_drjax,
    "drjax jit": with_drjax,
    "google drjax": with_drjax,
    "shard_map": with_shard_map,
    "shard_map, scan": functools.partial(with_shard_map, many=_one_by_one),
    "python loop": with_python_loop,
    "rolled loop": with_rolled_loop,
    "no annotations": without_annotations,
}


def _add(a: Any, b: Any) -> Any:
    return jax.tree.map(jnp.add, a, b)


def _slice(windows: Any, i: int) -> Any:
    return jax.tree.map(lambda x: x[i], windows)
