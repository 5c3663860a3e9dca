"""From a plan to the manifest and the members of its file.

Input: a plan whose stages are exported. Output: the manifest, as JSON data, and the
members by name.

Invariants: equal plans give equal contents. A loaded plan is written as it was read,
and its origin stays that of the first writer.

Sharp edges: keys of the manifest and names of members are a file format, described in
docs/plan_file_format.md. Some use older words than the code: "in_turn" is
`ExportedStage.sequential`, and "rows" are slices of groups.
"""

import hashlib
import io
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import numpy as np

from drjax._jaxprs.prng_keys import is_key, key_impl
from drjax._plan_file.export_plan import origin_of
from drjax._plan_file.exported_stage import exported_of
from drjax._plan_file.pytrees import Structure, Tree, describe
from drjax.plan import Ledger, Loop, Move, Plan, Reduce, Round, Stage, Value

# Returns the names of values, and adds their entries to the plan's table of values.
Names: TypeAlias = Callable[[Iterable[Value]], list[str]]


def encode(plan: Plan) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Encode a plan whose stages are exported: return the contents of its plan file.

    They are the contents of `manifest.json`, which describes the plan, as JSON data;
    and the bytes of all other files in the zip, by name.
    """
    origin = origin_of(plan)
    writer = _Writer()
    written = writer.plan(plan, "")
    return {**origin, "plan": written, "ledger": ledger(plan)}, writer.members


def ledger(plan: Plan) -> list[dict[str, Any]]:
    """Return the communication of a plan as JSON data, for the manifest.

    There is a dict for each value that is communicated in each round, as
    `plan.communication()` lists them: `round`, `op`, `value` (its name), `bytes` (for
    each group) and `times`.
    """
    communication: Ledger = plan.communication()
    return [
        {
            "round": m.round,
            "op": m.op,
            "value": m.value.name,
            "bytes": m.nbytes,
            "times": list(m.times),
        }
        for m in communication.messages
    ]


def batched_results(a_round: Round, kept: frozenset[str]) -> dict[str, list[Any]]:
    """Name the results of the batched function of a round's local stage, as JSON data.

    The function returns an unnamed list; this is the order of its results:
    `{"partials": [{"op": ..., "value": name}, ...], "rows": [name, ...]}`. First come
    the partial reductions: one for each reduction except gathers, with the name of the
    value that is reduced, and then one for each leaf of each fold's state, with
    `"op": "fold"`. Then come the outputs that are returned as slices, those in `kept`,
    `Plan.kept()` of the plan that has the round.
    """
    # As `export_plan` passes them to the exporter: results have an order, and no names.
    slices = [v.name for v in a_round.local.outputs if v.name in kept]
    partials = [{"op": r.op, "value": r.source.name} for r in a_round.partials]
    partials += [
        {"op": "fold", "value": v.name} for f in a_round.folds for v in f.sources
    ]
    return {"partials": partials, "rows": slices}


class _Writer:
    """Encodes plans as JSON data for the manifest, and collects the file's members.

    Values are referred to by name. `members` has the bytes of each member but the
    manifest, by name; the code and constants of stages that are encoded are added to
    it. A `prefix` is the text before the names of the members of a part of a plan.
    """

    def __init__(self):
        self.members: dict[str, bytes] = {}

    def plan(self, plan: Plan, prefix: str) -> dict[str, Any]:
        """Encode a plan, with a table of its values.

        `prefix` is empty for the whole plan, `2.scan.0.` for the first body of the loop
        `scan` of round 2, and `2.inner.` for its inner level.
        """
        values: dict[str, dict] = {}

        def names(used: Iterable[Value]) -> list[str]:
            used = [*used]
            for value in used:
                entry = _value(value)
                # Stages refer to values by name: a name has one type in the plan.
                assert values.setdefault(value.name, entry) == entry, value
            return [v.name for v in used]

        kept, rounds = plan.kept(), []
        for number, a_round in enumerate(plan.rounds, 1):
            within = f"{prefix}{number}."
            rounds.append(
                {
                    "server": self._stage(a_round.server, f"{within}server", names),
                    "broadcast": names(a_round.broadcast),
                    "scatter": [names(pair) for pair in a_round.scatter],
                    "groups": {
                        **self._stage(a_round.local, f"{within}groups", names),
                        **batched_results(a_round, kept),
                        **self._inner(a_round.local, f"{within}inner."),
                    },
                    "reduces": [_reduce(reduce, names) for reduce in a_round.reduces],
                    "moves": [_move(move, names) for move in a_round.moves],
                    "loops": [
                        self._loop(loop, within, names) for loop in a_round.loops
                    ],
                    **self._folds(a_round, within, names),
                }
            )
        server = self._stage(plan.server, f"{prefix}server", names)
        inputs, outputs = names(plan.inputs), names(plan.outputs)
        return {
            "name": plan.name,
            "partition": _partition(plan),
            "inputs": inputs,
            "outputs": outputs,
            "in_tree": _tree(plan.in_tree),
            "out_tree": _tree(plan.out_tree),
            "values": values,
            "rounds": rounds,
            "server": server,
            # Only if it is true, so that earlier versions read other files.
            **({"open_groups": True} if plan.open_groups else {}),
        }

    def _stage(self, stage: Stage, member: str, names: Names) -> dict[str, Any]:
        """Encode a stage, which is exported, unless it has no outputs.

        `member` is the name of its members, such as `2.server`: `stages/` and a suffix
        for each file are added. In the result it is None if the stage has no outputs;
        only others have `consts` and `custom_calls`, and local ones `in_turn`: whether
        the groups of a batch run one after another.
        """
        data = {
            "name": stage.name,
            "inputs": names(stage.inputs),
            "outputs": names(stage.outputs),
            "member": None,
        }
        if stage.empty:
            return data
        exported = exported_of(stage)
        member = f"stages/{member}"
        for end, function in (("", exported.per_group), (".batch", exported.batched)):
            if function is not None:
                # The same code twice, for JAX and for other runtimes.
                self.members[f"{member}{end}.jexp"] = function.exported
                self.members[f"{member}{end}.mlirbc"] = function.stablehlo
        self.members[f"{member}.jaxpr.txt"] = exported.text.encode()
        consts = [self._constant(x) for x in exported.consts]
        calls = list(exported.custom_calls)
        data |= {"member": member, "consts": consts, "custom_calls": calls}
        if exported.batched is None:
            return data
        # The keys of the manifest are a file format: "in_turn" stays.
        return {**data, "in_turn": exported.sequential}

    def _inner(self, stage: Stage, prefix: str) -> dict[str, Any]:
        """Encode the plan of the inner level of a local stage: `{"inner": {...}}`.

        {} if the stage has none, so that earlier versions can read the file.
        """
        return {} if stage.inner is None else {"inner": self.plan(stage.inner, prefix)}

    def _folds(self, a_round: Round, prefix: str, names: Names) -> dict[str, Any]:
        """Encode the folds of a round: `{"folds": [...]}`.

        {} if there are none, so that earlier versions can read the file.
        """
        folds = [
            {
                "combine": self._stage(fold.combine, f"{prefix}fold{i}", names),
                "init": names(fold.init),
                "sources": names(fold.sources),
                "results": names(fold.results),
                "commutative": fold.commutative,
            }
            for i, fold in enumerate(a_round.folds)
        ]
        return {"folds": folds} if folds else {}

    def _constant(self, x: np.ndarray) -> dict[str, Any]:
        """Encode a constant: `{"member": name of its .npy file, "dtype": name}`.

        Equal constants share one file. A dtype that numpy cannot read back is an
        unsigned integer of the same size in the file.
        """
        # `decode` requires C order. ascontiguousarray turns a scalar into a 1-d array.
        file, array = io.BytesIO(), np.ascontiguousarray(x).reshape(x.shape)
        # Dtypes that ml_dtypes registers: numpy writes them, but cannot read them back.
        # Not by their kind, which is "V" only for most.
        if array.dtype.isbuiltin == 2:
            array = array.view(f"u{array.dtype.itemsize}")
        np.save(file, array, allow_pickle=False)
        name = f"consts/{hashlib.sha256(file.getvalue()).hexdigest()[:16]}.npy"
        self.members[name] = file.getvalue()
        return {"member": name, "dtype": str(x.dtype)}

    def _loop(self, loop: Loop, prefix: str, names: Names) -> dict[str, Any]:
        """Encode a loop: the attributes of a `Loop` as keys."""
        bodies = [
            self.plan(body, f"{prefix}{loop.name}.{i}.")
            for i, body in enumerate(loop.bodies)
        ]
        return {
            "op": loop.op,
            "name": loop.name,
            "inputs": names(loop.inputs),
            "outputs": names(loop.outputs),
            "bodies": bodies,
            "consts": list(loop.consts),
            "carry": loop.carry,
            "length": loop.length,
            "reverse": loop.reverse,
        }


def _reduce(reduce: Reduce, names: Names) -> dict[str, Any]:
    """Encode a reduction: `{"op": ..., "values": [source, result]}`.

    It has `wire`, `sharded`, `secure` and `bound` only where they are not the default.
    """
    data = {"op": reduce.op, "values": names((reduce.source, reduce.result))}
    # Only where they are used, so that earlier versions read other files.
    if reduce.wire is not None:
        data["wire"] = [reduce.wire.dtype, reduce.wire.block]
    options = {"sharded": reduce.sharded, "secure": reduce.secure}
    options |= {"bound": reduce.bound}
    return data | {name: option for name, option in options.items() if option}


def _move(move: Move, names: Names) -> dict[str, Any]:
    """Encode a move of slices between groups: `op`, `values` and `sources`.

    The values are the source, the index if there is one, and the result.
    """
    return {
        "op": move.op,
        "values": names((*move.inputs, move.result)),
        "sources": [*move.sources],
    }


def _partition(plan: Plan) -> dict[str, Any] | None:
    """Encode the partition of a plan: `{"name": ..., "size": ..., "mesh_axes": [...]}`.

    Return None if the plan has no partition, as it calls no building block.
    """
    if plan.partition is None:
        return None
    name, size, axes = (
        plan.partition.name,
        plan.partition.size,
        plan.partition.mesh_axes,
    )
    return {"name": name, "size": size, "mesh_axes": list(axes)}


def _value(value: Value) -> dict[str, Any]:
    """Encode a value: `{"dtype": name, "shape": [...], "group_axis": int or None}`.

    The shape is that of one group's slice. A global value has its whole shape, and None
    as group axis. The dtype of typed random keys is `key:IMPL`.
    """
    dtype = str(value.dtype)
    if is_key(value.dtype):
        dtype = f"key:{key_impl(value.dtype)}"
    axis = value.axis if value.partitioned else None
    return {"dtype": dtype, "shape": list(value.shape), "group_axis": axis}


def _tree(tree: Structure | None) -> dict[str, Any] | None:
    """Encode the structure of a plan's arguments or results; None if `tree` is None.

    It is None in bodies of loops, whose values are flat. The result is
    `{"node": description, "paths": [...]}`: the description of the pytree as JSON data,
    and the path of each leaf as text.
    """
    if tree is None:
        return None
    node = describe(tree)
    return {"node": node, "paths": list(Tree(node).paths())}
