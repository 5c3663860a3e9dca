"""From a plan to the manifest and the members of its file.

Input: a plan, made here or loaded. Output: the manifest, as JSON data, and the members
by name.

Invariants: equal plans give equal contents. A loaded plan is written as it was read:
its stages are not exported again, and its origin stays that of the first writer.

Sharp edges: keys of the manifest and names of members are a file format, described in
docs/plan_files.md. Some use older words than the code: "in_turn" is
`ExportedStage.sequential`, and "rows" are slices of groups.
"""

import functools
import hashlib
import io
import platform
from importlib.metadata import version
from typing import Any

import jax
import numpy as np
from jax import export

from drjax._jaxprs.prng_keys import is_key, key_impl
from drjax._plan_file.export_stage import Exporter
from drjax._plan_file.exported_stage import PLATFORMS, ExportedStage
from drjax._plan_file.pytrees import Tree, describe
from drjax._plan_file.stage_features import StageFeatures, features_of, merge
from drjax.plan import Ledger, Loop, Plan, Round, Stage, Value


def encode(plan: Plan) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The manifest of a plan, and the members of its file by name.

    Raises:
      PlanFileError: The plan cannot be written.
    """
    stages = [*plan.stages()]
    loaded = [s.forms for _, s in stages if s.forms is not None]
    if loaded:
        origin = loaded[0].origin
    else:
        origin = _origin(
            merge(features_of(s.jaxpr, location) for location, s in stages)
        )
    writer = _Writer(origin)
    with jax.enable_x64(origin["x64"]):
        written = writer.plan(plan, "", "")
    return {**origin, "plan": written, "ledger": ledger(plan)}, writer.members


@functools.cache
def _producer() -> dict[str, str]:
    names = ("drjax", "jax", "jaxlib")
    found = {name: version(name) for name in names}
    return {**found, "python": platform.python_version()}


def _origin(found: StageFeatures) -> dict[str, Any]:
    convention = export.maximum_supported_calling_convention_version
    return {
        "producer": _producer(),
        "calling_convention": convention,
        "platforms": list(PLATFORMS),
        "x64": found.wide,
        "prng": sorted(found.keys),
    }


def ledger(plan: Plan) -> list[dict[str, Any]]:
    """The communication of a plan, one entry for each collective."""
    found: Ledger = plan.communication()
    return [
        {
            "round": m.round,
            "op": m.op,
            "value": m.value.name,
            "bytes": m.nbytes,
            "times": list(m.times),
        }
        for m in found.messages
    ]


def batched_results(a_round: Round, kept: frozenset[str]) -> dict[str, list]:
    """The outputs of the batched function of a round: see `exported_stage.py`."""
    rows = [v.name for v in a_round.local.outputs if v.name in kept]
    partials = [{"op": r.op, "value": r.source.name} for r in a_round.partials]
    return {"partials": partials, "rows": rows}


class _Writer:
    """Writes plans as data; `members` are the other members of the file."""

    def __init__(self, origin: dict[str, Any]):
        self.origin = origin
        self.members: dict[str, bytes] = {}

    def plan(self, plan: Plan, prefix: str, location: str) -> dict[str, Any]:
        """A plan as data.

        Args:
          plan: The plan.
          prefix: Of the names of its members.
          location: The same, for errors.
        """
        values: dict[str, dict] = {}

        def names(found) -> list[str]:
            for value in found:
                entry = _value(value)
                assert values.setdefault(value.name, entry) == entry, value
            return [v.name for v in found]

        kept, rounds = plan.kept(), []
        for number, a_round in enumerate(plan.rounds, 1):
            prefix_, location_ = f"{prefix}{number}.", f"{location}round {number}, "
            rounds.append(
                {
                    "server": self._server(
                        a_round.server, f"{prefix_}server", f"{location_}server", names
                    ),
                    "broadcast": names(a_round.broadcast),
                    "scatter": [names(pair) for pair in a_round.scatter],
                    "groups": self._local(
                        a_round, kept, f"{prefix_}groups", f"{location_}groups", names
                    ),
                    "reduces": [
                        {"op": r.op, "values": names((r.source, r.result))}
                        for r in a_round.reduces
                    ],
                    "loops": [
                        self._loop(loop, prefix_, location_, names)
                        for loop in a_round.loops
                    ],
                }
            )
        server = self._server(
            plan.server, f"{prefix}server", f"{location}server", names
        )
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
        }

    def _server(
        self, stage: Stage, member: str, location: str, names
    ) -> dict[str, Any]:
        export = lambda: Exporter(stage, location, self.origin).server()
        return self._stage(stage, member, export, names)

    def _local(self, a_round: Round, kept, member: str, location: str, names):
        stage = a_round.local
        reduces, rows = a_round.partials, [v for v in stage.outputs if v.name in kept]
        export = lambda: Exporter(stage, location, self.origin).local(reduces, rows)
        found = self._stage(stage, member, export, names)
        return {**found, **batched_results(a_round, kept)}

    def _stage(self, stage: Stage, member: str, export, names) -> dict[str, Any]:
        data = {
            "name": stage.name,
            "inputs": names(stage.inputs),
            "outputs": names(stage.outputs),
            "member": None,
        }
        if stage.empty:
            return data
        exported: ExportedStage = export() if stage.forms is None else stage.forms
        member = f"stages/{member}"
        for end, function in (("", exported.per_group), (".batch", exported.batched)):
            if function is not None:
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

    def _constant(self, x: np.ndarray) -> dict[str, Any]:
        file, array = io.BytesIO(), np.ascontiguousarray(x).reshape(x.shape)
        if array.dtype.kind == "V":  # a dtype that numpy does not know: its bits
            array = array.view(f"u{array.dtype.itemsize}")
        np.save(file, array, allow_pickle=False)
        name = f"consts/{hashlib.sha256(file.getvalue()).hexdigest()[:16]}.npy"
        self.members[name] = file.getvalue()
        return {"member": name, "dtype": str(x.dtype)}

    def _loop(self, loop: Loop, prefix: str, location: str, names) -> dict[str, Any]:
        bodies = [
            self.plan(body, f"{prefix}{loop.name}.{i}.", f"{location}{loop.name}, ")
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


def _partition(plan: Plan) -> dict[str, Any] | None:
    if plan.partition is None:
        return None
    name, size, axes = (
        plan.partition.name,
        plan.partition.size,
        plan.partition.mesh_axes,
    )
    return {"name": name, "size": size, "mesh_axes": list(axes)}


def _value(value: Value) -> dict[str, Any]:
    dtype = str(value.dtype)
    if is_key(value.dtype):
        dtype = f"key:{key_impl(value.dtype)}"
    axis = value.axis if value.partitioned else None
    return {"dtype": dtype, "shape": list(value.shape), "group_axis": axis}


def _tree(tree: Any) -> dict[str, Any] | None:
    if tree is None:
        return None
    node = describe(tree)
    return {"node": node, "paths": list(Tree(node).paths())}
