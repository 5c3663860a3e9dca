"""From a plan to the manifest and the members of its file.

Input: a plan whose stages are exported. Output: the manifest, as JSON data, and the
members by name.

Invariants: equal plans give equal contents. A loaded plan is written as it was read,
and its origin stays that of the first writer.

A step is written by the fields of its class (`step_fields.py`), so that a new kind of
exchange needs no code here.

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
from drjax._plan.wire import Wire
from drjax._plan_file.export_plan import origin_of
from drjax._plan_file.exported_stage import exported_of
from drjax._plan_file.pytrees import Structure, Tree, describe
from drjax._plan_file.step_fields import (
    PLAIN,
    PLANS,
    STAGE,
    VALUE,
    VALUES,
    WIRE,
    fields_of,
)
from drjax._planner.cost import cost_of_stage
from drjax.plan import Ledger, Loop, Plan, Round, Stage, Step, Value

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
    partials = [{"op": op, "value": v.name} for op, v in a_round.sources]
    return {"partials": partials, "rows": slices}


class _Writer:
    """Encodes plans as JSON data for the manifest, and collects the file's members.

    Values are referred to by name. `members` has the bytes of each member but the
    manifest, by name; the code and constants of stages that are encoded are added to
    it. A `prefix` is the text before the names of the members of a part of a plan.
    """

    def __init__(self):
        self.members: dict[str, bytes] = {}
        # The names of the members of exported stages, by their identity.
        self._names: dict[int, str] = {}

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

        kept, steps = plan.kept(), []
        for number, a_round in enumerate(plan.rounds, 1):
            within = f"{prefix}{number}."
            for position, step in enumerate(a_round.steps):
                if isinstance(step, Stage):
                    steps.append(self._stage_step(step, within, names))
                    if step.local:
                        steps[-1] |= batched_results(a_round, kept)
                else:
                    steps.append(self._step(step, position, within, names))
        steps.append(self._stage_step(plan.server, prefix, names))
        inputs, outputs = names(plan.inputs), names(plan.outputs)
        return {
            "name": plan.name,
            "partition": _partition(plan),
            "inputs": inputs,
            "outputs": outputs,
            "in_tree": _tree(plan.in_tree),
            "out_tree": _tree(plan.out_tree),
            "values": values,
            "steps": steps,
            **({"open_groups": True} if plan.open_groups else {}),
        }

    def _stage(self, stage: Stage, member: str, names: Names) -> dict[str, Any]:
        """Encode a stage, which is exported, unless it has no outputs.

        `member` is the name of its members, such as `2.server`: `stages/` and a suffix
        for each file are added. Stages of the same code have the members of the first
        of them. In the result it is None if the stage has no outputs; only others have
        `consts`, `custom_calls` and `work`, and local ones `in_turn`: whether the
        groups of a batch run one after another.
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
        member = self._names.setdefault(id(exported), f"stages/{member}")
        for end, function in (("", exported.per_group), (".batch", exported.batched)):
            if function is not None:
                # The same code twice, for JAX and for other runtimes.
                self.members[f"{member}{end}.jexp"] = function.exported
                self.members[f"{member}{end}.mlirbc"] = function.stablehlo
        self.members[f"{member}.jaxpr.txt"] = exported.text.encode()
        consts = [self._constant(x) for x in exported.consts]
        calls = list(exported.custom_calls)
        data |= {"member": member, "consts": consts, "custom_calls": calls}
        cost = cost_of_stage(stage)
        data["work"] = [round(cost.operations), round(cost.rematerialized)]
        if stage.mesh:
            data["mesh"] = [list(axis) for axis in stage.mesh]
        if exported.batched is None:
            return data
        # The keys of the manifest are a file format: "in_turn" stays.
        return {**data, "in_turn": exported.sequential}

    def _stage_step(self, stage: Stage, prefix: str, names: Names) -> dict[str, Any]:
        """Encode a stage that is a step: with whether it is local, and its inner level.

        `inner` is left out if it has none.
        """
        where = "groups" if stage.local else "server"
        data = {"step": "Stage", "local": stage.local}
        data |= self._stage(stage, f"{prefix}{where}", names)
        if stage.inner is not None:
            data["inner"] = self.plan(stage.inner, f"{prefix}inner.")
        return data

    def _step(
        self, step: Step, position: int, prefix: str, names: Names
    ) -> dict[str, Any]:
        """Encode another step: its class, and its fields that have not the default.

        `position` is that in its round, for the names of its members.
        """
        data: dict[str, Any] = {"step": type(step).__name__}
        for name, kind, default in fields_of(type(step)):
            x = getattr(step, name)
            if x == default:
                continue
            if kind is STAGE:
                data[name] = self._stage(x, f"{prefix}{position}.{name}", names)
            elif kind is PLANS:
                assert isinstance(step, Loop), step
                data[name] = [
                    self.plan(body, f"{prefix}{step.name}.{i}.")
                    for i, body in enumerate(x)
                ]
            else:
                data[name] = _KINDS[kind](x, names)
        return data

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


_KINDS: dict[str, Callable[[Any, Names], Any]] = {
    VALUE: lambda value, names: names([value])[0],
    VALUES: lambda values, names: names(values),
    WIRE: lambda wire, names: [
        wire.dtype,
        wire.block,
        *[wire.collectives] * (wire.collectives != Wire.collectives),
    ],
    PLAIN: lambda x, names: list(x) if isinstance(x, tuple) else x,
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
