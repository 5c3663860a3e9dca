"""Equations that combine groups without saying so, and what they mean.

* A sum, a maximum or a minimum over the group axis is `drjax.reduce_sum`, `reduce_max`
  or `reduce_min`, whether a user wrote it (`jnp.mean(rows)`) or a derivative did (the
  transpose of the broadcast of a global value that meets rows in pointwise work). What
  it reduces besides the groups, each group reduces by itself, before it sends.
* A product that contracts the group axis, such as the derivative of a product of rows
  and a matrix, is one product in each group, and their sum.
* Indexing a partitioned value by one group, `y[i]`, is `drjax.select(y, i)`.

`meaning` recognises them by what they compute and never by where they come from, and
`explicit` rewrites a program with building blocks.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal

from drjax import _compat
from drjax._partition import Partition
from drjax._reductions import select
from drjax.interpret.flat import Flat, flatten, live_equations
from drjax.interpret.row import drop
from drjax.primitives import gather_p, reduce_max_p, reduce_min_p, reduce_sum_p


@dataclass(frozen=True)
class Meaning:
    """What an equation does to groups.

    Attributes:
      fn: The same work, written with building blocks: `(partition, *operands)`.
      ins: The group axis of each operand; None: all of it is taken.
    """

    fn: Callable
    ins: tuple[int | None, ...]


def meaning(eqn, axes: Sequence[int | None]) -> Meaning | None:
    """What an equation does to groups, or None.

    Args:
      eqn: The equation.
      axes: The group axis of each operand; None: it is not partitioned.
    """
    if eqn.primitive is lax.dot_general_p:
        return _product(eqn, *axes)
    axis, *others = axes or [None]
    if axis is None or any(other is not None for other in others):
        return None
    fn = _of_one(eqn, axis)
    return None if fn is None else Meaning(fn, (axis, *others))


def of_all_rows(eqn, axes: Sequence[int | None]) -> Meaning | None:
    """The equation on the rows of all groups as global values, if they may be so."""
    if "callback" in eqn.primitive.name or eqn.effects:
        return None

    def on_all(partition: Partition, *operands):
        whole = [
            x if axis is None else _gathered(partition, x, axis)
            for x, axis in zip(operands, axes, strict=True)
        ]
        return _compat.bind_equation(eqn, whole)

    return Meaning(on_all, tuple(axes))


def _gathered(partition: Partition, x, axis: int):
    rows = gather_p.bind(jnp.moveaxis(x, axis, 0), partition=partition, mesh=None)
    return jnp.moveaxis(rows, 0, axis)


def _of_one(eqn, axis: int) -> Callable | None:
    """The meaning of an equation of which only the first operand is partitioned."""
    if eqn.primitive in _REDUCTIONS:
        return _reduction(eqn, axis)
    shape = eqn.invars[0].aval.shape
    if eqn.primitive is lax.slice_p:
        starts, limits = eqn.params["start_indices"], eqn.params["limit_indices"]
        sizes = [b - a for a, b in zip(starts, limits, strict=True)]
        one = _is_one_row(sizes, shape, axis)
        return _row(axis, lambda *_: starts[axis]) if one else None
    if eqn.primitive is lax.squeeze_p:  # what is left of y[0] if there is one group
        gone = eqn.params["dimensions"]
        return _only_row(axis, gone) if axis in gone else None
    if eqn.primitive is lax.dynamic_slice_p:
        one = _is_one_row(eqn.params["slice_sizes"], shape, axis)
        return _row(axis, lambda *starts: starts[axis]) if one else None
    if eqn.primitive is lax.gather_p:
        return _chosen_rows(eqn, axis, shape)
    return None


def _product(eqn, left: int | None, right: int | None) -> Meaning | None:
    """A product that adds up over the groups."""
    (lc, rc), (lb, rb) = eqn.params["dimension_numbers"]
    if left is not None and left in lc:
        position = lc.index(left)
    elif right is not None and right in rc:
        position = rc.index(right)
    else:
        return None
    ins = lc[position], rc[position]
    matches = left in (None, ins[0]) and right in (None, ins[1])
    if not matches:
        return None
    params = dict(eqn.params)
    params["dimension_numbers"] = (
        (drop(position, lc), drop(position, rc)),
        ((ins[0], *lb), (ins[1], *rb)),
    )

    def products(partition: Partition, x, y):
        rows = lax.dot_general_p.bind(x, y, **params)
        return _over_groups(reduce_sum_p, rows, partition)

    return Meaning(products, ins)


def _chosen_rows(eqn, axis: int, shape: Sequence[int]) -> Callable | None:
    """Whole rows of fewer groups than there are, each chosen by an index.

    As many as there are groups is a shuffle: those rows are better gathered. Of a
    batch of arrays, rows are chosen of each.
    """
    params = eqn.params
    dims, mode = params["dimension_numbers"], params["mode"]
    inside = (lax.GatherScatterMode.CLIP, lax.GatherScatterMode.PROMISE_IN_BOUNDS)
    batched = dims.operand_batching_dims
    plain = axis in dims.start_index_map and mode in inside
    if not (plain and set(dims.collapsed_slice_dims) <= {axis}):
        return None
    sizes = [
        shape[d] if d in batched else size
        for d, size in enumerate(params["slice_sizes"])
    ]
    if not _is_one_row(sizes, shape, axis):
        return None
    out, column = eqn.outvars[0].aval.shape, dims.start_index_map.index(axis)
    batch = [d for d in range(len(out)) if d not in dims.offset_dims]
    arrays = math.prod(shape[d] for d in batched)
    if math.prod(out[d] for d in batch) >= shape[axis] * arrays:
        return None

    def rows(partition: Partition, x, indices):
        one = _row(axis, lambda i: i)
        found = jax.vmap(lambda i: one(partition, x, i))(indices[..., column].ravel())
        leading = indices.shape[:-1]
        found = found.reshape(*leading, *found.shape[1:])
        for d, i in zip(batched, dims.start_indices_batching_dims, strict=True):
            own = lax.broadcasted_iota(jnp.int32, (*leading, *(1,) * len(shape)), i)
            found = jnp.take_along_axis(found, own, len(leading) + d, mode="clip")
        gone = {*batched, *dims.collapsed_slice_dims}
        found = jnp.squeeze(found, tuple(len(leading) + d for d in gone))
        return jnp.moveaxis(found, range(len(batch)), batch)

    return rows


def _is_one_row(sizes: Sequence[int], shape: Sequence[int], axis: int) -> bool:
    """Whether a slice takes the whole row of one of several groups."""
    whole = (*sizes[:axis], *sizes[axis + 1 :]) == (*shape[:axis], *shape[axis + 1 :])
    return whole and sizes[axis] == 1 < shape[axis]


# Reductions of lax, and those of drjax that they are over the group axis. Of bools,
# the conjunction is the minimum.
_REDUCTIONS = {
    lax.reduce_sum_p: reduce_sum_p,
    lax.reduce_max_p: reduce_max_p,
    lax.reduce_min_p: reduce_min_p,
    lax.reduce_or_p: reduce_max_p,
    lax.reduce_and_p: reduce_min_p,
}


def _reduction(eqn, axis: int) -> Callable | None:
    """A reduction over the group axis, and maybe over others."""
    axes, dtype = eqn.params["axes"], eqn.invars[0].aval.dtype
    bitwise = eqn.primitive in (lax.reduce_or_p, lax.reduce_and_p)
    unordered = eqn.primitive is not lax.reduce_sum_p and jnp.issubdtype(
        dtype, jnp.complexfloating
    )
    if axis not in axes or unordered or (bitwise and dtype != jnp.bool_):
        return None
    others = tuple(a for a in axes if a != axis)
    left = axis - sum(a < axis for a in others)
    params = {**eqn.params, "axes": others}

    def reduction(partition: Partition, x):
        rows = eqn.primitive.bind(x, **params) if others else x
        return _over_groups(
            _REDUCTIONS[eqn.primitive], jnp.moveaxis(rows, left, 0), partition
        )

    return reduction


def _over_groups(primitive, rows, partition: Partition):
    """A reduction of drjax; unlike a building block, it promotes no dtypes."""
    return primitive.bind(rows, partition=partition, mesh=None)


def _only_row(axis: int, gone: Sequence[int]) -> Callable:
    others = tuple(d - (d > axis) for d in gone if d != axis)

    def row(partition: Partition, x):
        found = select(jnp.moveaxis(x, axis, 0), 0, partition=partition)
        return lax.squeeze(found, others)

    return row


def _row(axis: int, number: Callable) -> Callable:
    def row(partition: Partition, x, *starts):
        i = jnp.asarray(number(*starts))
        if i.dtype.itemsize < 4:  # n may not fit in it
            i = i.astype(jnp.int32)
        i = jnp.clip(i, 0, partition.size - 1).astype(jnp.int32)
        found = select(jnp.moveaxis(x, axis, 0), i, partition=partition)
        return jnp.expand_dims(found, axis)

    return row


def explicit(program: Flat, kinds: Any) -> Flat | None:
    """The program, of these kinds, with building blocks for all such equations.

    Returns:
      None if there are none.
    """
    eqns, bodies, changed = [], dict(program.known_bodies), False
    consts = dict(program.consts)
    for eqn in program.eqns:
        meant = kinds.meaning(eqn)
        fn = _itself if kinds.scatters_rows(eqn) else meant and meant.fn
        if fn is not None:
            eqns += _written_out(eqn, fn, kinds.partition, consts)
            changed = True
            continue
        eqns.append(eqn)
        if kinds.is_loop(eqn):
            found = [explicit(b.program, b) for b in kinds.loops[eqn].bodies]
            if any(new is not None for new in found):
                pairs = zip(program.bodies(eqn), found, strict=True)
                bodies[eqn] = tuple(old if new is None else new for old, new in pairs)
                changed = True
    if not changed:
        return None
    live = live_equations(eqns, program.outvars)
    return Flat(program.invars, live, program.outvars, consts, bodies)


def _itself(partition: Partition, x):
    return jnp.copy(x)


def _written_out(eqn, fn: Callable, partition: Partition, consts: dict) -> list:
    """The equations of `fn` in the place of another equation."""
    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
    inner = flatten(jax.make_jaxpr(lambda *xs: fn(partition, *xs))(*avals))
    consts.update(inner.consts)
    names: dict[Any, Any] = dict(zip(inner.invars, eqn.invars, strict=True))
    names.update(zip(inner.outvars, eqn.outvars, strict=True))
    found = []
    for new in inner.eqns:
        ins = [v if isinstance(v, Literal) else names.get(v, v) for v in new.invars]
        outs = [names.get(v, v) for v in new.outvars]
        found.append(new.replace(invars=ins, outvars=outs, source_info=eqn.source_info))
    return found
