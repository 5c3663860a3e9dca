"""Equations that combine groups without saying so, and what they mean.

* A sum, a maximum or a minimum over the group axis is `drjax.reduce_sum`, `reduce_max`
  or `reduce_min`, whether a user wrote it (`jnp.mean(rows)`) or a derivative did (the
  transpose of the broadcast of a global value that meets rows in pointwise work). What
  it reduces besides the groups, each group reduces by itself, before it sends.
* A product that contracts the group axis, such as the derivative of a product of rows
  and a matrix, is one product in each group, and their sum. So is a convolution.
* A scan over the groups may be a map: see `scan_over_groups.py`.
* Taking, or changing, the slices of some groups: see `index_groups.py`.

`meaning` recognises them by what they compute and never by where they come from, and
`explicit` rewrites a program with building blocks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal

from drjax import _compat
from drjax._api.resolve import map_leaves
from drjax._partition import Partition
from drjax._planner.index_groups import changed, gathered, taken
from drjax._planner.inline import Flat, flatten, live_equations
from drjax._planner.scan_over_groups import map_of_scan
from drjax._planner.unbatching.core import drop
from drjax.primitives import reduce_max_p, reduce_min_p, reduce_sum_p


@dataclass(frozen=True)
class Meaning:
    """What an equation does to groups.

    Attributes:
      fn: The same work, written with building blocks: `(partition, *operands)`.
      ins: The group axis of each operand; None: all of it is taken.
      outs: The group axis of each result, None if it is global; (): all are global.
    """

    fn: Callable
    ins: tuple[int | None, ...]
    outs: tuple[int | None, ...] = ()

    def of_results(self, eqn) -> tuple[int | None, ...]:
        return self.outs or (None,) * len(eqn.outvars)


def meaning(eqn, axes: Sequence[int | None]) -> Meaning | None:
    """What an equation does to groups, or None.

    Args:
      eqn: The equation.
      axes: The group axis of each operand; None: it is not partitioned.
    """
    if eqn.primitive.name == "scan":
        found = map_of_scan(eqn, axes)
        return None if found is None else Meaning(*found)
    if eqn.primitive is lax.dot_general_p:
        return _product(eqn, *axes)
    if eqn.primitive is lax.conv_general_dilated_p:
        return _convolution(eqn, *axes)
    axis, *others = axes or [None]
    if axis is None or any(other is not None for other in others):
        return None
    fn = _of_one(eqn, axis)
    if fn is not None:
        return Meaning(fn, (axis, *others))
    fn = changed(eqn, axis)
    return None if fn is None else Meaning(fn, (axis, *others), (axis,))


def of_all_rows(eqn, axes: Sequence[int | None]) -> Meaning | None:
    """The equation on the rows of all groups as global values, if they may be so."""
    if "callback" in eqn.primitive.name or eqn.effects:
        return None

    def on_all(partition: Partition, *operands):
        whole = [
            x if axis is None else gathered(partition, x, axis)
            for x, axis in zip(operands, axes, strict=True)
        ]
        return _compat.bind_equation(eqn, whole)

    return Meaning(on_all, tuple(axes))


def _of_one(eqn, axis: int) -> Callable | None:
    """The meaning of an equation of which only the first operand is partitioned."""
    if eqn.primitive in _REDUCTIONS:
        return _reduction(eqn, axis)
    return taken(eqn, axis)


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


def _convolution(eqn, left: int | None, right: int | None) -> Meaning | None:
    """A convolution that adds up over groups that lie along its features.

    The derivative in the kernel is one, as the batch lies there.
    """
    params, dims = eqn.params, eqn.params["dimension_numbers"]
    ins = dims.lhs_spec[1], dims.rhs_spec[1]
    matches = left in (None, ins[0]) and right in (None, ins[1])
    plain = params["feature_group_count"] == params["batch_group_count"] == 1
    if (left is None and right is None) or not (matches and plain):
        return None

    def convolve(x, y):
        x, y = lax.expand_dims(x, ins[:1]), lax.expand_dims(y, ins[1:])
        return lax.conv_general_dilated_p.bind(x, y, **params)

    def sums(partition: Partition, x, y):
        x, y = jnp.moveaxis(x, ins[0], 0), jnp.moveaxis(y, ins[1], 0)
        rows = map_leaves(convolve, x, y, partition=partition, mesh=None)
        return _over_groups(reduce_sum_p, rows, partition)

    return Meaning(sums, ins)


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
