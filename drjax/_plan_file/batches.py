"""The body of a local stage: a batch of groups at once, whatever the stage was made of.

    run_batch(mask, groups, inputs) -> (*partials, *states), slices

A stage that was planned in this process has a jaxpr of one group, which `jax.vmap`
batches; what is reduced, folded and kept is computed from its outputs. One from a plan
file has a batched function, which does all of that itself: its code can be run, but
JAX cannot batch it.

Invariants: both compute the same function; the second was exported from the first.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from drjax import _compat
from drjax._compat.types import Array
from drjax._jaxprs.eval_jaxpr import evaluate
from drjax._jaxprs.prng_keys import from_raw, to_raw
from drjax._plan_file.exported_stage import batched_of, exported_of
from drjax._primitives.reduce_ops import REDUCE_OPS, ReduceOp
from drjax.plan import Fold, Reduce, Stage, Value

# `jax.vmap` or `sequential`: from a function of one group, and the axes of its
# arguments, to a function of a batch.
OverGroups: TypeAlias = Callable[..., Callable[..., list[Array]]]


def combines_itself(stage: Stage) -> bool:
    """Return whether the code of a stage has the reductions and folds after it."""
    return stage.exported is not None


def over_groups(
    stage: Stage, fn: Callable[..., list[Array]], count: int, axes: list[int | None]
) -> Callable[..., list[Array]]:
    """Map `fn`, which runs a stage for one group, over `count` groups.

    `axes` has for each argument 0 if each group has its own, else None. Results are
    `[count, *s]`. One group alone makes no batch: `fn` runs on its slices.
    """
    if stage.exported is not None:
        return sequential(fn, axes)
    if count > 1:
        return jax.vmap(fn, axes, axis_size=count)

    def only(*args: Array) -> list[Array]:
        # vmap would turn a `cond` on the group's slice into a `select` of all branches.
        pairs = zip(args, axes, strict=True)
        return [y[None] for y in fn(*(x if a is None else x[0] for x, a in pairs))]

    return only


def sequential(
    fn: Callable[..., list[Array]], axes: list[int | None]
) -> Callable[..., list[Array]]:
    """Map `fn` over groups one after another, by `lax.map`, in place of `jax.vmap`.

    `axes` has for each argument of `fn`, a function of one group, 0 if each group has
    its own, or None if it is global.
    """

    def run(*args: Array) -> list[Array]:
        def one(slices: Iterable[Array]) -> list[Array]:
            slices = iter(slices)
            pairs = zip(args, axes, strict=True)
            return fn(*(x if axis is None else next(slices) for x, axis in pairs))

        # Never empty, as lax.map needs a length: the group index is one of them.
        slices = [x for x, axis in zip(args, axes, strict=True) if axis is not None]
        return lax.map(one, slices)

    return run


def run_batch(
    stage: Stage,
    reduces: Sequence[Reduce],
    kept: Sequence[Value],
    mask: Array | None,
    groups: ArrayLike,
    inputs: Sequence[ArrayLike],
    axes: Sequence[int | None] | None = None,
) -> tuple[list[Array], list[Array]]:
    """Run a local stage on b groups, and reduce those that take part.

    `mask`, bool `[b]`, is true for these; None: all do. `kept` are the outputs of the
    stage to return as slices; of an exported one those that were chosen when it was
    exported, which also decided on its folds. `groups` are the group indices, int32
    `[b]`, and `inputs` slices `[b, *s]` and global values; or with `axes` the groups
    are along these of the inputs, None of a global one.

    The result is `(partials, slices)`: the partial reductions of `reduces`, and then
    the leaves of folded states, with random keys as raw key data; and the slices of all
    b groups, `[b, *s]`.
    """
    if axes is None:
        axes = [0 if v.partitioned else None for v in stage.inputs]
    if combines_itself(stage):
        mask = jnp.ones(jnp.shape(groups), bool) if mask is None else mask
        pairs = zip(inputs, axes, strict=True)
        raw = [to_raw(jnp.moveaxis(x, a, 0) if a else x) for x, a in pairs]
        outs = batched_of(stage).call(*exported_of(stage).consts, mask, groups, *raw)
        count = len(outs) - len(kept)
        pairs = zip(outs[count:], kept, strict=True)
        return outs[:count], [from_raw(y, v.dtype) for y, v in pairs]
    one = _compat.jaxpr_as_checked_fun(stage.jaxpr)
    # Not moved to the front: work on other axes would copy the array for that.
    outs = jax.vmap(lambda *args: one(*args), [0, *axes])(groups, *inputs)
    return combined(stage, reduces, (), kept, outs, mask, inputs)


def combined(
    stage: Stage,
    reduces: Sequence[Reduce],
    folds: Sequence[Fold],
    kept: Sequence[Value],
    outs: Sequence[Array],
    mask: Array | None,
    inputs: Sequence[Any],
) -> tuple[list[Array], list[Array]]:
    """Reduce and fold the outputs of a stage over a batch, and choose those to keep.

    `outs` are all of its outputs, `[b, *s]`. Folds take them, and the result has them,
    with random keys as raw key data; masked groups have their slices there, too. See
    `run_batch`; a state means nothing if no group takes part.
    """
    by_name = {v.name: y for v, y in zip(stage.outputs, outs, strict=True)}
    arguments = {v.name: x for v, x in zip(stage.inputs, inputs, strict=True)}
    partials = []
    for reduce in reduces:
        op = REDUCE_OPS[reduce.op]
        slices = by_name[reduce.source.name]
        slices = slices if mask is None else _masked(op, slices, mask)
        partials.append(op.local(slices))
    for fold in folds:
        assert mask is not None  # only exported functions fold
        consts = [arguments[v.name] for v in fold.consts]
        states = [by_name[v.name] for v in fold.sources]
        partials += _folded(fold, consts, states, mask)
    return partials, [by_name[v.name] for v in kept]


def _folded(
    fold: Fold, consts: list[Array], states: list[Array], mask: Array
) -> list[Array]:
    """Fold the states of a batch of groups one after another, without masked ones.

    `consts` are the arrays that the function closes over. `states` are the leaves of
    the b groups' states, `[b, *s]`, and the result is those of the combined state,
    `[*s]`; in both, random keys are raw key data. `mask` is bool `[b]`: if none is
    true, the result has no meaning.
    """
    stage = fold.combine

    def combine(left: list[Array], right: list[Array]) -> list[Array]:
        args = [*consts, *left, *right]
        args = [from_raw(x, v.dtype) for x, v in zip(args, stage.inputs, strict=True)]
        return list(map(to_raw, evaluate(stage.jaxpr, args)))

    def step(
        carry: tuple[list[Array], Array], x: Sequence[Array]
    ) -> tuple[tuple[list[Array], Array], None]:
        total, started = carry
        *new, real = x
        # Masked slots hold copies of states, so that no other ones are combined.
        both = combine(total, new)
        chosen = zip(both, new, total, strict=True)
        select = lambda b, n, t: jnp.where(real, jnp.where(started, b, n), t)
        return ([select(*xs) for xs in chosen], started | real), None

    first = [x[0] for x in states]
    (total, _), _ = lax.scan(step, (first, jnp.bool_(False)), (*states, mask))
    return total


def _masked(op: ReduceOp, x: Array, mask: Array) -> Array:
    """Replace the slices of masked groups, so that they do not change a reduction.

    Of the slices `x`, `[b, *s]`, those for which `mask`, bool `[b]`, is false become
    the identity of the reduction, such as 0 for a sum.
    """
    chosen = lax.broadcast_in_dim(mask, x.shape, (0,))
    # Not a product with the mask: 0 * NaN is NaN.
    return jnp.where(chosen, x, jnp.asarray(op.identity(x.dtype), x.dtype))
