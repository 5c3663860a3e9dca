"""Rewrite equations that imply communication as building blocks.

Input: the kinds of an inlined jaxpr. Output: the same jaxpr with building blocks in
place of such equations, or None if there are none.

Invariants: results keep their variables, and equations keep their source lines. Sharp
edges: the new equations have kinds too, and may imply communication themselves, so that
partitioning is inferred again.
"""

from typing import Any

import jax
import jax.numpy as jnp

from drjax._compat.types import Array, Eqn, Var
from drjax._jaxprs.walk import live_equations, substitute
from drjax._partition import Partition
from drjax._planner.bind_blocks import WithBlocks
from drjax._planner.fences import fence_p, split_fence
from drjax._planner.inline import InlinedJaxpr, inline_calls
from drjax._planner.partitioning.environment import Environment


def make_communication_explicit(kinds: Environment) -> InlinedJaxpr | None:
    """Rewrite all equations that imply communication as building blocks, also in loops.

    A sum over the group axis becomes a `reduce_sum`, for example. A scatter of a value
    that is partitioned already becomes a copy. The new jaxpr has the same arguments and
    result variables; its kinds are to be inferred again. None if nothing is rewritten.
    """
    if kinds.partition is None:
        return None
    program = kinds.program
    # Copies, as what the old jaxpr has memoized rests on its equations and bodies.
    bodies, consts = dict(program.known_bodies), dict(program.consts)
    replaced: dict[int, list[Eqn]] = {}  # by the id of an equation
    for eqn in kinds.others:
        implicit = kinds.implicit_communication(eqn)
        fn = None if implicit is None else implicit.fn
        if kinds.is_redundant_scatter(eqn):
            fn = _identity
        if fn is not None:
            replaced[id(eqn)] = _equations_of(eqn, fn, kinds.partition, consts)
            continue
        split = split_fence(eqn, kinds) if eqn.primitive is fence_p else None
        if split is not None:
            replaced[id(eqn)] = split
        if kinds.is_loop(eqn):
            # The equation stays: its bodies are those of known_bodies, not its params.
            rewritten = list(map(make_communication_explicit, kinds.loops[eqn].bodies))
            if loop := program.replaced_bodies(eqn, rewritten):
                bodies[eqn], replaced[id(eqn)] = loop, [eqn]
    if not replaced:
        return None
    eqns = [new for eqn in program.eqns for new in replaced.get(id(eqn), (eqn,))]
    # Equations that only the replaced ones needed are dead now.
    live = live_equations(eqns, program.outvars)
    return InlinedJaxpr(program.invars, live, program.outvars, consts, bodies)


def _identity(partition: Partition, x: Array) -> Array:
    """Copy `x`: replaces a scatter of a value that is partitioned already."""
    # Not x itself: the result variable needs an equation that defines it.
    return jnp.copy(x)


def _equations_of(
    eqn: Eqn, fn: WithBlocks, partition: Partition, consts: dict[Var, Any]
) -> list[Eqn]:
    """Trace `fn` to the equations that replace an equation, with its source line.

    Operands and results stay the same variables. The constants of the trace are added
    to `consts`.
    """
    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
    # Tracing writes jits of jax.numpy, which are inlined like the user's.
    inner = inline_calls(jax.make_jaxpr(lambda *xs: fn(partition, *xs))(*avals))
    consts.update(inner.consts)
    names: dict[Any, Any] = dict(zip(inner.invars, eqn.invars, strict=True))
    names.update(zip(inner.outvars, eqn.outvars, strict=True))
    eqns = []
    # All other variables of the trace are fresh and occur nowhere else.
    for new in inner.eqns:
        ins = substitute(new.invars, names)
        outs = [names.get(v, v) for v in new.outvars]
        # Errors and profiles still name the line of the equation that is replaced.
        eqns.append(new.replace(invars=ins, outvars=outs, source_info=eqn.source_info))
    return eqns
