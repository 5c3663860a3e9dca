"""Loops over the groups that are maps: `jax.lax.map(fn, rows)`, and its derivatives.

A scan whose steps are the groups mixes them only by what it carries. If that is
nothing, or what each step leaves as it is or adds to (so the derivative in what `fn`
closes over does), then the steps are independent of each other: the scan means one
`map_fn`, and a `reduce_sum` of what is added.

    scan: (c, x_i) -> (c + f(x_i), g(x_i))    is    c + reduce_sum(map f), map g
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from drjax import _compat
from drjax._api.trace_map import call_mapped
from drjax._partition import Partition
from drjax.primitives import reduce_sum_p


def map_of_scan(
    eqn, axes: Sequence[int | None]
) -> tuple[Callable, tuple[int | None, ...], tuple[int | None, ...]] | None:
    """`(work written with blocks, axes of operands, axes of results)`, or None.

    Args:
      eqn: A scan.
      axes: The group axis of each operand; None: it is not partitioned.
    """
    n_consts, n_carry = _compat.scan_sizes(eqn)
    first = n_consts + n_carry
    over_groups = 0 in axes[first:] and not any(axes[first:])
    if not over_groups or any(axis is not None for axis in axes[:first]):
        return None
    if "jaxpr" not in eqn.params:  # rewritten by the planner
        return None
    body = eqn.params["jaxpr"]
    found = _addends(_compat.open_jaxpr(body), n_consts, n_carry)
    if found is None:
        return None
    wanted = [v for v in found if v is not None]
    ys = _compat.open_jaxpr(body).outvars[n_carry:]
    run, used = _compat.select_outputs(body, [*wanted, *ys])
    added = [n_consts + i for i, addend in enumerate(found) if addend is not None]
    if any(used[i] for i in added):
        return None

    def blocks(partition: Partition, *operands):
        given, init = operands[:first], operands[n_consts:first]

        def row(*xs):
            return list(
                run(*(x for x, u in zip([*given, *xs], used, strict=True) if u))
            )

        xs = list(operands[first:])
        tree = jax.tree.structure(tuple(xs))
        outs = call_mapped(row, xs, tree, partition=partition, mesh=None)
        sums = iter(outs[: len(wanted)])
        carried = [
            jnp.copy(c)  # a result has an equation of its own
            if addend is None
            else c + reduce_sum_p.bind(next(sums), partition=partition, mesh=None)
            for c, addend in zip(init, found, strict=True)
        ]
        return [*carried, *outs[len(wanted) :]]

    ins = (*(None,) * first, *(0,) * (len(axes) - first))
    return blocks, ins, (*(None,) * n_carry, *(0,) * len(ys))


def _addends(body, n_consts: int, n_carry: int) -> list[Any] | None:
    """For each carried value what a step adds to it, or None if it leaves it as it is.

    Returns:
      None if a step does anything else.
    """
    definition = {v: e for e in body.eqns for v in e.outvars}
    used = [v for e in body.eqns for v in e.invars] + list(body.outvars)
    found = []
    carried = body.invars[n_consts : n_consts + n_carry]
    for before, after in zip(carried, body.outvars[:n_carry], strict=True):
        if after is before:
            found.append(None)
            continue
        eqn = None if isinstance(after, Literal) else definition.get(after)
        if eqn is None or eqn.primitive.name not in ("add", "add_any"):
            return None
        others = [v for v in eqn.invars if v is not before]
        same = [v.aval.shape == before.aval.shape for v in others]
        if same != [True] or sum(v is before for v in used) != 1:
            return None
        if isinstance(others[0], Literal) or sum(v is after for v in used) != 1:
            return None
        found += others
    return found
