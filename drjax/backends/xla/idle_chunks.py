"""Chunks of groups that add zeros: their work is left out, for the XLA backend.

Input: the jaxpr of a local stage. Output: a `Decision`, for a chunk of groups, made
while it runs: whether they have any work; and of it the `Indices` of the groups that
have, where it compares the group index.

A loop over chunks comes by all groups. Where a reduction takes one group's slice, as
`drjax.select` and the gradient of an extremum do, or those of a mask, all others add
zeros: the forward pass that they would rematerialize, and the backward pass of zeros,
are skipped. So the work of the chosen group is done again, and not that of all. Where
an index says which group that is, no loop looks for it; then the compiler merges what
two rounds compute of this group.

Invariants: a stage without effects, all of whose outputs are summed; what others than
zeros add is computed for all groups, if that is little work. Sharp edges: where
work that is skipped would give infinities or NaNs, times zeros, the sum is without.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from drjax import _compat
from drjax._compat.jax_types import Literal
from drjax._compat.types import Array, ClosedJaxpr, Flags
from drjax._jaxprs.compared_index import compared
from drjax._jaxprs.zeros import NEVER, Condition, both, zero_results
from drjax._planner.work import operations
from drjax._primitives.reduce_ops import REDUCE_OPS
from drjax._sharding.eval_on_mesh import evaluate_on_mesh
from drjax.plan import Reduce, Round, Stage, Value

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


@dataclass(frozen=True)
class Indices:
    """The indices of the groups that may have work.

    Attributes:
      jaxpr: From some inputs of the stage's jaxpr, which all groups share, to integers;
        None: there is one index, `number`.
      used: For each input of the stage's jaxpr whether this one takes it.
      count: The number of indices.
    """

    jaxpr: ClosedJaxpr | None
    used: Sequence[bool]
    count: int
    number: int = 0

    def ordered(self, args: Sequence[Array]) -> tuple[Array, Array]:
        """Return the indices, `[count]`, and whether each is the first of its value.

        `args` are those of the stage's jaxpr. The order is that in which a loop over
        all groups comes by them.
        """
        if self.jaxpr is None:
            return jnp.full(1, self.number, jnp.int32), jnp.ones(1, bool)
        taken = [x for x, u in zip(args, self.used, strict=True) if u]
        indices = jnp.ravel(evaluate_on_mesh(self.jaxpr, taken)[0])
        if self.count < 2:
            return indices, jnp.ones(self.count, bool)
        indices = jnp.sort(indices)
        return indices, jnp.append(True, indices[1:] != indices[:-1])


def decision_of(
    stage: Stage, reduces: Sequence[Reduce], kept: Sequence[Value]
) -> Decision | None:
    """Find what decides whether a group has work, if its results are only added.

    Devices that share the model of a group, over other axes of the mesh, have the same
    groups, and exchange parts of it in one branch.
    """
    plain = stage.exported is None and stage.inner is None
    if not plain or _compat.effects_of(stage.jaxpr) or kept or not reduces:
        return None
    if not all(REDUCE_OPS[r.op].additive for r in reduces):
        return None
    position = {v.name: i for i, v in enumerate(stage.outputs)}
    read = {position[r.source.name] for r in reduces}
    return _decision(stage.jaxpr, tuple(sorted(read)))


def decision_of_round(a_round: Round, kept: Collection[str]) -> Decision | None:
    """As `decision_of`, of a round of a plan; `kept` has names of slices that stay."""
    stage = a_round.local
    if a_round.folds or stage.jaxpr is None:
        return None
    stay = [v for v in stage.outputs if v.name in kept]
    return decision_of(stage, a_round.partials, stay)


def indices_of_round(a_round: Round, kept: Collection[str]) -> Indices | None:
    """As `indices_of`, of a round of a plan; `kept` has names of slices that stay."""
    known, inputs = decision_of_round(a_round, kept), a_round.local.inputs
    return known and indices_of(known, [True, *(v.partitioned for v in inputs)])


@_compat.weakref_lru_cache
def _decision(jaxpr: ClosedJaxpr, outputs: tuple[int, ...]) -> Decision | None:
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


def indices_of(decision: Decision, partitioned: Flags) -> Indices | None:
    """Find the indices of the groups that may have work; None: others may, too.

    `partitioned` says which inputs of the stage's jaxpr are slices; the first of them
    is the group index.
    """
    if len(decision.case) != 1 or decision.always or not decision.used[0]:
        return None
    (condition,) = decision.case
    (result,) = compared(decision.jaxpr)
    works = lambda number: (number == condition.number) is not condition.equal
    if result is None or works(result.no) or not works(result.yes):
        return None
    if isinstance(result.values, int):
        return Indices(None, [False] * len(partitioned), 1, result.values)
    jaxpr, taken = _compat.select_outputs(decision.jaxpr, [result.values])
    rest = iter(taken)
    used = [u and next(rest) for u in decision.used]
    if any(u and p for u, p in zip(used, partitioned, strict=True)):
        return None
    avals: list[Any] = jaxpr.out_avals
    return Indices(jaxpr, used, math.prod(avals[0].shape))


def takes_index(stage: Stage) -> bool:
    """Whether a stage's jaxpr reads the first of its inputs, the group index."""
    if stage.jaxpr is None:
        return False
    raw = _compat.open_jaxpr(stage.jaxpr)
    index = raw.invars[0]
    return any(index is v for eqn in raw.eqns for v in eqn.invars)


def _operations(jaxpr: ClosedJaxpr) -> float:
    return sum(map(operations, _compat.open_jaxpr(jaxpr).eqns))
