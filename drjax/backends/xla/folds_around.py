"""Gradients of `reduce` on a mesh: the folds before and after each group.

Input: a server stage with equations of `fold_of_all_p`, which compute these folds from
the states of all groups. Output: its results, by `fold_around` on the mesh: one
all-gather of m states, where the stage, as it is, needs those of all n groups.

Invariants: arrays of all groups' states and folds stay sharded over the groups, as
partitioned values are; a gather whose result has no other use is none.

Sharp edges: a loaded plan has no equations, so it gathers the n states.
"""

from collections.abc import Sequence
from typing import Any

from drjax import _compat
from drjax._jaxprs.eval_jaxpr import as_arrays, evaluate
from drjax._primitives.fold_groups import fold_around_p, fold_of_all_p
from drjax._sharding.execute import as_operand
from drjax._sharding.layout import Layout
from drjax.backends._interpret_plan import reads_after_server
from drjax.plan import Plan, Stage, Value


def has_folds(stage: Stage) -> bool:
    """Return whether a server stage folds the states of all groups around each group.

    That is, whether it has an equation of `fold_of_all_p`, which computes, for each
    group, the fold of the groups before it and of those after it. Gradients of `reduce`
    have such equations. A stage from a plan file has no jaxpr, and none.
    """
    return stage.jaxpr is not None and any(map(_is_fold, _equations(stage)))


def run_with_folds(stage: Stage, args: Sequence[Any], layout: Layout) -> list:
    """Run a server stage whose folds around the groups run on the devices of the mesh.

    Each equation of `fold_of_all_p` is bound as `fold_around_p`, which leaves the
    groups' states on their devices. Other equations are evaluated as they are.

    Args:
      stage: The server stage, for which `has_folds` is true.
      args: The arrays of its inputs, in order; the states of all groups are `[n, *s]`,
        sharded over the groups.
      layout: How the partition is laid out on the mesh.

    Returns:
      The list of the arrays of its outputs, in order. Those with the folds before or
      after each group, `[n, *s]`, are sharded over the groups.
    """

    def step(eqn, operands):
        if not _is_fold(eqn):
            return None
        count = eqn.params["n_states"]
        first = len(operands) - count
        typed = [as_operand(x, layout, i >= first) for i, x in enumerate(operands)]
        return fold_around_p.bind(*typed, mesh=layout.mesh, **eqn.params)

    outs = evaluate(stage.jaxpr, args, step)
    return as_arrays(outs, [value.dtype for value in stage.outputs])


def only_for_folds(plan: Plan, value: Value) -> bool:
    """Return whether a gathered value is read only by folds around the groups.

    A fold around the groups is an equation of `fold_of_all_p` in a server stage. It
    takes the states of all groups, and computes for each group the fold of the groups
    before it and of those after it. If nothing else reads the states, no gather is
    needed: `run_with_folds` leaves them on their devices.

    Args:
      plan: The plan.
      value: The global value that is the result of a gather.

    Returns:
      True if server stages read the value, only as states of such equations. False if
      no stage reads it, or if the plan returns it, or anything else reads it.
    """
    reads = [*plan.outputs]
    for a_round in plan.rounds:
        reads += [*a_round.broadcast, *reads_after_server(a_round)]
    if value in reads:
        return False
    stages = [a_round.server for a_round in plan.rounds] + [plan.server]
    readers = [stage for stage in stages if value in stage.inputs]
    return bool(readers) and all(_only_folded(stage, value) for stage in readers)


def folded_slices(plan: Plan) -> frozenset[str]:
    """Return the names of scattered values that are results of folds around the groups.

    A fold around the groups is an equation of `fold_of_all_p` in a server stage: for
    each group, the fold of the groups before it and of those after it.
    `run_with_folds` returns its results as arrays that are sharded over the groups, so
    that each device has its slices already, and the scatter moves nothing.

    Args:
      plan: The plan.

    Returns:
      Names of partitioned values, those that the scatters give.
    """
    folded = set()
    for stage in (*(a_round.server for a_round in plan.rounds), plan.server):
        if has_folds(stage):
            results = [
                id(v) for e in _equations(stage) if _is_fold(e) for v in e.outvars
            ]
            outs = _compat.open_jaxpr(stage.jaxpr).outvars
            pairs = zip(outs, stage.outputs, strict=True)
            folded |= {value.name for var, value in pairs if id(var) in results}
    scattered = (pair for a_round in plan.rounds for pair in a_round.scatter)
    return frozenset(part.name for whole, part in scattered if whole.name in folded)


def _only_folded(stage: Stage, value: Value) -> bool:
    """Return whether a stage uses an input only as states of folds around the groups.

    These are equations of `fold_of_all_p`, whose last `n_states` operands are states.
    The result is False for a stage from a plan file, whose equations are not known, and
    for an input that the stage also returns.

    Args:
      stage: A server stage.
      value: One of `stage.inputs`.
    """
    if stage.jaxpr is None:
        return False
    jaxpr = _compat.open_jaxpr(stage.jaxpr)
    var = jaxpr.invars[stage.inputs.index(value)]
    uses = [
        _is_fold(eqn) and i >= len(eqn.invars) - eqn.params["n_states"]
        for eqn in jaxpr.eqns
        for i, operand in enumerate(eqn.invars)
        if operand is var
    ]
    return all(uses) and not any(x is var for x in jaxpr.outvars)


def _equations(stage: Stage) -> Sequence[Any]:
    return _compat.open_jaxpr(stage.jaxpr).eqns


def _is_fold(eqn: Any) -> bool:
    return eqn.primitive is fold_of_all_p
