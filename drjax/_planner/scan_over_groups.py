"""Scans over the groups that are maps: `jax.lax.map(fn, x)`, and its derivatives.

Input: a scan whose steps are the groups. Output: the same scan written with building
blocks, or None if its steps depend on each other.

Such a scan mixes groups only by its carry. If the carry is empty, or each step leaves
it as it is or adds to it (so the derivative in what `fn` closes over does), the steps
are independent of each other: the scan is one `map_fn`, and a `reduce_sum` of the
addends, since addition is associative and commutative up to rounding:

    scan: (c, x_i) -> (c + f(x_i), g(x_i))    is    c + reduce_sum(map f), map g

Invariants: `f` and `g` do not read a running sum. Sharp edges: the addition must be the
last equation on its carried value; a step that scales the carry is refused.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from drjax import _compat
from drjax._compat.jax_types import Literal
from drjax._compat.types import Array, Atom, Eqn, OpenJaxpr, Var
from drjax._jaxprs.walk import definitions
from drjax._partition import Partition
from drjax._planner.bind_blocks import map_groups, reduce_groups
from drjax._planner.inline import is_rewritten
from drjax._planner.moves_between_groups import Rewrite
from drjax.primitives import reduce_sum_p


def scan_as_map(eqn: Eqn, axes: Sequence[int | None]) -> Rewrite | None:
    """Rewrite a scan whose steps are the groups as a `map_fn` and reductions.

    A step may use the carried values only to add to them; then steps are independent.
    None if the steps are not the groups, or depend on each other.
    """
    n_consts, n_carry = _compat.scan_sizes(eqn)
    first = n_consts + n_carry
    # The steps of a scan lie along axis 0 of its stacks: they are groups only if the
    # groups lie there too.
    over_groups = 0 in axes[first:] and not any(axes[first:])
    # A partitioned constant or carry would bring all groups' slices into each step.
    if not over_groups or any(axis is not None for axis in axes[:first]):
        return None
    if is_rewritten(eqn):  # its steps communicate
        return None
    body = eqn.params["jaxpr"]
    addends = _addends(_compat.open_jaxpr(body), n_consts, n_carry)
    if addends is None:
        return None
    summed = [v for v in addends if v is not None]
    ys = _compat.open_jaxpr(body).outvars[n_carry:]
    live, used = _compat.select_outputs(body, [*summed, *ys])
    # A step that reads a running sum depends on the steps before it.
    # An unchanged carried value is the initial one in all steps, and may be read.
    sums_read = [n_consts + i for i, v in enumerate(addends) if v is not None]
    if any(used[i] for i in sums_read):
        return None

    def blocks(partition: Partition, *operands: Array) -> list[Array]:
        closed_over, init = operands[:first], operands[n_consts:first]

        def step(*xs: Array) -> list[Array]:
            inputs = zip([*closed_over, *xs], used, strict=True)
            return list(_compat.jaxpr_as_fun(live)(*(x for x, u in inputs if u)))

        # Also if the scan runs in reverse: steps are independent, and ys lie as xs do.
        outs = map_groups(step, *operands[first:], partition=partition)
        sums = iter(outs[: len(summed)])
        carried = [
            jnp.copy(c)  # a result needs an equation that defines it
            if addend is None
            else c + reduce_groups(reduce_sum_p, next(sums), partition)
            for c, addend in zip(init, addends, strict=True)
        ]
        return [*carried, *outs[len(summed) :]]

    in_axes = (*(None,) * first, *(0,) * (len(axes) - first))
    return blocks, in_axes, (*(None,) * n_carry, *(0,) * len(ys))


def _addends(body: OpenJaxpr, n_consts: int, n_carry: int) -> list[Var | None] | None:
    """Find what a step of a scan adds to each carried value, if it does nothing else.

    None for a value that the step returns as it is. None in place of the list if a step
    changes a carried value in another way, or uses one that it adds to, or the sum,
    elsewhere.
    """
    definition = definitions(body.eqns)
    uses = [v for e in body.eqns for v in e.invars] + list(body.outvars)
    addends = []
    carried = body.invars[n_consts : n_consts + n_carry]
    # The running sum may be read by its addition only, and the addition by nothing.
    for before, after in zip(carried, body.outvars[:n_carry], strict=True):
        if after is before:
            addends.append(None)
            continue
        eqn = None if isinstance(after, Literal) else definition.get(after)
        if eqn is None or eqn.primitive.name not in ("add", "add_any"):
            return None
        others = [v for v in eqn.invars if _converted(v, definition) is not before]
        same = [v.aval.shape == before.aval.shape for v in others]
        # c + c has no addend, and one of another shape is broadcast.
        if same != [True] or sum(v is before for v in uses) != 1:
            return None
        if isinstance(others[0], Literal) or sum(v is after for v in uses) != 1:
            return None
        addends += others
    return addends


def _converted(var: Atom, definition: dict[Var, Eqn]) -> Atom:
    """Look through a conversion of a weakly typed carry to the same dtype.

    JAX writes this no-op for a scan that starts from a Python number, as `0.0` is. It
    would hide that a step returns its carry unchanged.
    """
    eqn = None if isinstance(var, Literal) else definition.get(var)
    if eqn is None or eqn.primitive.name != "convert_element_type":
        return var
    before: Any = eqn.invars[0].aval
    after: Any = var.aval
    same = before.dtype == after.dtype
    return eqn.invars[0] if same and eqn.params["sharding"] is None else var
