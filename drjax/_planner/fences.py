"""Optimization barriers of a program, in plans: what is after one waits for it.

Input: an `optimization_barrier` with several operands, global or partitioned. Output: a
`fence` of the server and one of each group, which share no stage. The parameter `after`
of each has variables of the other one, for which it waits: `rounds.py` puts it into
their round or a later one, so that a plan has the order of the program in every engine.
What waits for groups is named in `Stage.after`, too, of which the XLA backend makes a
dependency of data (`_primitives/in_two_legs.py`).
In a local stage, copies of global values that it takes anyway pass the barrier, too, so
that XLA keeps the order inside of one compiled function.

Sharp edges: the primitive stands in jaxprs of the planner alone; its `bind` writes the
`optimization_barrier` again. A barrier of one operand orders nothing: it is dropped.
"""

from typing import Any

from jax import lax

from drjax import _compat
from drjax._compat.jax_types import Primitive
from drjax._compat.types import Array, ClosedJaxpr, Eqn, Var
from drjax._jaxprs.walk import variables
from drjax._primitives.in_two_legs import received_after_p


class Fence(Primitive):
    """The primitive of a barrier whose results wait for other variables, too."""

    def bind(self, *args: Array, after: tuple[Var, ...] = (), **_: Any) -> list[Array]:
        return list(lax.optimization_barrier(args))


fence_p = Fence("fence")
fence_p.multiple_results = True


def as_fence(eqn: Eqn) -> Eqn | None:
    """Write an `optimization_barrier` as a `fence`, or a `received_after`; None: other.

    What the latter waits for is a result of the fence, too, which nothing reads.
    """
    if eqn.primitive not in (lax.optimization_barrier_p, received_after_p):
        return None
    unread = [_compat.new_var(x.aval) for x in eqn.invars[len(eqn.outvars) :]]
    outs = [*eqn.outvars, *unread]
    return eqn.replace(primitive=fence_p, outvars=outs, params={"after": ()})


def split_fence(eqn: Eqn, kinds: Any) -> list[Eqn] | None:
    """Split a fence of global and partitioned values; None if all are of one kind.

    `kinds` is an `Environment`, whose module must not be imported here.
    """
    pairs = [*zip(eqn.invars, eqn.outvars, strict=True)]
    of_groups = [(x, y) for x, y in pairs if kinds[x].partitioned]
    of_server = [(x, y) for x, y in pairs if not kinds[x].partitioned]
    if not of_groups or not of_server:
        return None
    after = tuple(x for x, _ in of_groups), tuple(y for _, y in of_server)
    return [
        eqn.replace(
            invars=[x for x, _ in part],
            outvars=[y for _, y in part],
            params={"after": (*eqn.params["after"], *others)},
        )
        for part, others in zip((of_server, of_groups), after, strict=True)
    ]


def fenced_inputs(jaxpr: ClosedJaxpr) -> list[int]:
    """Which inputs of a server's stage its fences hold, as they are."""
    raw = _compat.open_jaxpr(jaxpr)
    fences = (fence_p, lax.optimization_barrier_p)
    held = {v for e in raw.eqns if e.primitive in fences for v in variables(e.invars)}
    return [i for i, v in enumerate(raw.invars) if v in held]
