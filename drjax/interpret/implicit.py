"""Sums over groups that derivatives make without saying so.

A global value that meets a partitioned one in pointwise work, outside `map_fn`, is
broadcast by JAX itself; the transpose of that is a `reduce_sum` over the group axis.
`explicit` writes it with the primitive: the sum over the other axes is the work of a
group, and what is left is a `reduce_sum` of the partition. A user's own `jnp.sum` over
the groups stays refused: only equations of a transpose are taken.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal

from drjax import _compat
from drjax.interpret.flat import Flat, live_equations
from drjax.interpret.kinds import Kinds
from drjax.primitives import reduce_sum_p


def explicit(program: Flat, kinds: Kinds) -> Flat | None:
    """The program with its implicit sums written out; None if there are none."""
    eqns, bodies, changed = [], dict(program.known_bodies), False
    for eqn in program.eqns:
        axis = kinds.implicit_sum(eqn)
        if axis is not None:
            eqns += _written_out(eqn, axis, kinds)
            changed = True
            continue
        eqns.append(eqn)
        if kinds.is_loop(eqn):
            key = eqn.outvars[0]
            old = program.bodies(eqn)
            found = [explicit(b.program, b) for b in kinds.loops[key].bodies]
            if any(new is not None for new in found):
                bodies[key] = tuple(
                    body if new is None else new
                    for body, new in zip(old, found, strict=True)
                )
                changed = True
    if not changed:
        return None
    live = live_equations(eqns, program.outvars)
    return Flat(program.invars, live, program.outvars, program.consts, bodies)


def _written_out(eqn, axis: int, kinds: Kinds) -> list:
    """The equations of a sum over `axis` and others, the one over groups being ours."""
    others = tuple(a for a in eqn.params["axes"] if a != axis)
    left = axis - sum(a < axis for a in others)

    def total(x):
        rows = lax.reduce_sum(x, others) if others else x
        rows = jnp.moveaxis(rows, left, 0)
        return reduce_sum_p.bind(rows, partition=kinds.partition, mesh=None)

    var: Any = eqn.invars[0]
    jaxpr = jax.make_jaxpr(total)(jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype))
    raw = _compat.open_jaxpr(jaxpr)
    names = {raw.invars[0]: var, raw.outvars[0]: eqn.outvars[0]}
    found = []
    for inner in raw.eqns:
        for out in inner.outvars:
            names.setdefault(out, _compat.new_var(out.aval))
        ins = [v if isinstance(v, Literal) else names[v] for v in inner.invars]
        outs = [names[v] for v in inner.outvars]
        found.append(
            inner.replace(invars=ins, outvars=outs, source_info=eqn.source_info)
        )
    return found
