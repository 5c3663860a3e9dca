"""Chunks of groups that add zeros: their work is left out, for the XLA backend.

Input: the jaxpr of a local stage. Output: a `Decision`, for a chunk of groups, made
while it runs: whether they have any work.

A loop over chunks comes by all groups. Where a reduction takes one group's slice, as
`drjax.select` and the gradient of an extremum do, or those of a mask, all others add
zeros: the forward pass that they would rematerialize, and the backward pass of zeros,
are skipped. So the work of the chosen group is done again, and not that of all.

Invariants: a stage without effects, all of whose outputs are summed; what others than
zeros add is computed for all groups, if that is little work. Sharp edges: where
work that is skipped would give infinities or NaNs, times zeros, the sum is without.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp

from drjax import _compat
from drjax._compat.jax_types import Literal
from drjax._compat.types import Array, ClosedJaxpr
from drjax._jaxprs.zeros import NEVER, Condition, both, zero_results
from drjax._planner.work import operations
from drjax._sharding.eval_on_mesh import evaluate_on_mesh

# Operations of one group: of fewer, a branch takes as long.
LEAST_WORK = 50_000
# What may be computed to decide, as a part of the work.
TO_DECIDE = 1 / 16
# What data are read by, and results written, in the order of chunks.
_IN_ORDER = ("drjax_read_groups", "drjax_write_groups")


@dataclass(frozen=True)
class Decision:
    """Whether a group has work: unless all conditions of a case hold.

    Attributes:
      jaxpr: From some inputs of the stage's jaxpr to the variables of the conditions,
        in their order, and then to what is computed of all groups.
      used: For each input of the stage's jaxpr whether this one takes it.
      case: The conditions, of which each has a variable of the stage's jaxpr.
      always: The positions of the results that are computed of all groups.
    """

    jaxpr: ClosedJaxpr
    used: Sequence[bool]
    case: Sequence[Condition]
    always: Sequence[int]

    def has_work(self, args: Sequence[Array]) -> list[Array]:
        """Decide for one group, from those inputs of the stage's jaxpr that are used.

        The result is a bool `[]`, and then the results in `always`.
        """
        values = evaluate_on_mesh(self.jaxpr, args)
        fails = jnp.bool_(False)
        for value, condition in zip(values, self.case, strict=False):
            hits = value == jnp.asarray(condition.number, value.dtype)
            holds = jnp.all(hits) if condition.equal else ~jnp.any(hits)
            fails |= ~holds
        return [fails, *values[len(self.case) :]]


@_compat.weakref_lru_cache
def decision(jaxpr: ClosedJaxpr, outputs: tuple[int, ...]) -> Decision | None:
    """Find what decides whether a group has work; None: it always has, or has little.

    `outputs` are the positions of all that is read of the results of the stage's jaxpr.
    """
    raw = _compat.open_jaxpr(jaxpr)
    work = _operations(jaxpr)
    # Symbolic dimensions have no order.
    if not isinstance(work, int | float) or work < LEAST_WORK:
        return None
    if _compat.has_primitive(jaxpr, _IN_ORDER):
        return None
    results = zero_results(jaxpr)
    always = [i for i in outputs if results[i] == NEVER]
    computed = [raw.outvars[i] for i in always]
    if any(isinstance(x, Literal) for x in computed):
        return None
    position = {v: i for i, e in enumerate(raw.eqns) for v in e.outvars}
    order = lambda c: (position.get(c.var, -1), c.number, c.equal)
    choices: list[tuple] = []
    for case in both(*(results[i] for i in outputs if i not in always)):
        conditions = sorted(case, key=order)
        variables = [*(c.var for c in conditions), *computed]
        own, used = _compat.select_outputs(jaxpr, variables)
        to_decide = _operations(own)
        numbers = isinstance(to_decide, int | float)
        if conditions and numbers and to_decide <= work * TO_DECIDE:
            key = to_decide, [*map(order, conditions)]
            choices.append((key, Decision(own, used, conditions, always)))
    return min(choices, key=lambda pair: pair[0])[1] if choices else None


def _operations(jaxpr: ClosedJaxpr) -> float:
    return sum(map(operations, _compat.open_jaxpr(jaxpr).eqns))
