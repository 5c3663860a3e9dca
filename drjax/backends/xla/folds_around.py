"""Gradients of `reduce` on a mesh: the tree of a fold once more, with derivatives.

Input: a server stage with equations of `fold_of_all_p`, which compute a fold or its
derivatives from the states of all groups. Output: its results, by `fold_tree` on the
mesh: an exchange of m states, where the stage, as it is, needs those of all n groups.

Invariants: arrays of all groups' states and cotangents stay sharded over the groups, as
partitioned values are; a gather whose result has no other use is none.

Sharp edges: a loaded plan has no equations, so it gathers the n states.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from drjax import _compat
from drjax._compat.types import Array, Eqn
from drjax._jaxprs.eval_jaxpr import as_arrays, evaluate
from drjax._plan import uses
from drjax._primitives.fold_devices import choose_way, of_parts
from drjax._primitives.fold_groups import fold_of_all_p, fold_tree_p, kinds_of
from drjax._primitives.fold_trees import COLUMNS
from drjax._primitives.map_columns import GROUPS
from drjax._sharding.execute import as_operand
from drjax._sharding.layout import Layout
from drjax.plan import Plan, Scatter, Stage, Value


def has_folds(stage: Stage) -> bool:
    """Return whether a server stage has an equation of `fold_of_all_p`.

    Gradients of `reduce` have such equations. A stage from a plan file has no jaxpr,
    and none.
    """
    return stage.jaxpr is not None and any(map(_is_fold, _equations(stage)))


def run_with_folds(stage: Stage, args: Sequence[Array], layout: Layout) -> list[Array]:
    """Run a server stage whose folds and their derivatives run on the mesh.

    Each equation of `fold_of_all_p` is bound as `fold_tree_p`, which leaves the groups'
    states on their devices: `[n, *s]`, sharded over the groups, as operands and as
    results. The value of a fold saves the devices' states for its derivatives.
    """
    ways = _ways(stage, layout)
    # What is saved, by what the value and its derivatives share.
    saved: dict[Any, list] = {}

    def step(eqn: Eqn, operands: list[Array]) -> list[Array] | None:
        if not _is_fold(eqn):
            return None
        mode, n_states = eqn.params["mode"], eqn.params["n_states"]
        n_fold = mode.count(len(operands))
        kinds = kinds_of(eqn)[0]
        typed = [
            as_operand(x, layout, kind == GROUPS)
            for x, kind in zip(operands, kinds, strict=True)
        ]
        key, derivative = _key(eqn), eqn.params["derivative"]
        saves = mode.what == "value" or key in saved
        mode = replace(mode, way=ways[key], saved=saves)
        params = {**eqn.params, "mesh": layout.mesh, "mode": mode}
        by_columns = mode.way == COLUMNS
        params["part"] = of_parts(params["jaxpr"], layout) if by_columns else None
        of_derivative = None
        if by_columns and derivative is not None:
            of_derivative = of_parts(derivative, layout)
        params["part_derivative"] = of_derivative
        typed[n_fold:n_fold] = saved.get(key, []) if mode.what != "value" else []
        outs = fold_tree_p.bind(*typed, **params)
        if mode.what != "value":
            return outs
        saved[key] = outs[n_states:]
        return outs[:n_states]

    outs = evaluate(stage.jaxpr, args, step)
    return as_arrays(outs, [value.dtype for value in stage.outputs])


def _key(eqn: Eqn) -> tuple[Any, ...]:
    """What the value of a fold and its derivatives share: function and operands."""
    mode = eqn.params["mode"]
    operands = eqn.invars[mode.closed : mode.count(len(eqn.invars))]
    return (id(eqn.params["jaxpr"]), *map(id, operands))


def _ways(stage: Stage, layout: Layout) -> dict[Any, str]:
    """Choose for each fold the way that serves all of its equations."""
    jaxprs: dict[Any, list] = {}
    operands: dict[Any, tuple[list, list]] = {}
    for eqn in filter(_is_fold, _equations(stage)):
        mode, n_states, key = eqn.params["mode"], eqn.params["n_states"], _key(eqn)
        n_consts = mode.count(len(eqn.invars)) - 2 * n_states
        avals = [v.aval for v in eqn.invars]
        derivative = eqn.params["derivative"]
        each = jaxprs.setdefault(key, [eqn.params["jaxpr"]])
        each += [] if derivative is None else [derivative]
        consts, _ = operands.setdefault(
            key, ([], avals[n_consts : n_consts + n_states])
        )
        consts += avals[:n_consts]
    return {key: choose_way(layout, jaxprs[key], *operands[key]) for key in jaxprs}


def only_for_folds(plan: Plan, value: Value) -> bool:
    """Return whether a gathered value is read only as states by folds on the server.

    Then no gather is needed: `run_with_folds` leaves the states on their devices. False
    if no stage reads it, or if the plan returns it, or anything else reads it.
    """
    readers = uses.readers(plan, value)
    return bool(readers) and all(
        isinstance(step, Stage) and not step.local and _only_folded(step, value)
        for step in readers
    )


def folded_slices(plan: Plan) -> frozenset[str]:
    """Return the names of scattered values that equations of `fold_of_all_p` give.

    `run_with_folds` returns these as arrays that are sharded over the groups, so that
    each device has its slices already, and the scatter moves nothing.
    """
    folded = set()
    for stage in plan.steps:
        if isinstance(stage, Stage) and not stage.local and has_folds(stage):
            results = [
                id(v) for e in _equations(stage) if _is_fold(e) for v in e.outvars
            ]
            outs = _compat.open_jaxpr(stage.jaxpr).outvars
            pairs = zip(outs, stage.outputs, strict=True)
            folded |= {value.name for var, value in pairs if id(var) in results}
    scatters = [step for step in plan.steps if isinstance(step, Scatter)]
    return frozenset(x.result.name for x in scatters if x.source.name in folded)


def _only_folded(stage: Stage, value: Value) -> bool:
    """Return whether a stage uses an input only as states of `fold_of_all_p`."""
    if stage.jaxpr is None:
        return False
    jaxpr = _compat.open_jaxpr(stage.jaxpr)
    var = jaxpr.invars[stage.inputs.index(value)]
    uses = [
        _is_fold(eqn) and kinds_of(eqn)[0][i] == GROUPS
        for eqn in jaxpr.eqns
        for i, operand in enumerate(eqn.invars)
        if operand is var
    ]
    return all(uses) and not any(x is var for x in jaxpr.outvars)


def _equations(stage: Stage) -> Sequence[Eqn]:
    return _compat.open_jaxpr(stage.jaxpr).eqns


def _is_fold(eqn: Eqn) -> bool:
    return eqn.primitive is fold_of_all_p
