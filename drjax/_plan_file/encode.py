"""From a plan to the manifest and the members of its file.

Input: a plan whose stages are exported. Output: the manifest, as JSON data, and the
members by name.

Invariants: equal plans give equal contents. A loaded plan is written as it was read,
and its origin stays that of the first writer.

Sharp edges: keys of the manifest and names of members are a file format, described in
docs/plan_files.md. Some use older words than the code: "in_turn" is
`ExportedStage.sequential`, and "rows" are slices of groups.
"""

import hashlib
import io
from collections.abc import Iterable
from typing import Any

import numpy as np

from drjax._jaxprs.prng_keys import is_key, key_impl
from drjax._plan_file.export_plan import origin_of
from drjax._plan_file.exported_stage import ExportedStage
from drjax._plan_file.pytrees import Tree, describe
from drjax.plan import Ledger, Loop, Plan, Round, Stage, Value


def encode(plan: Plan) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Encode an exported plan: `(manifest, members)`, JSON data and bytes by name.

    Raises:
      PlanFileError: A pytree of the plan cannot be described without its class.
    """
    origin = origin_of(plan)
    writer = _Writer()
    written = writer.plan(plan, "")
    return {**origin, "plan": written, "ledger": ledger(plan)}, writer.members


def ledger(plan: Plan) -> list[dict[str, Any]]:
    """The communication of a plan as JSON data: an entry for each value and round."""
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


def batched_results(a_round: Round, kept: frozenset[str]) -> dict[str, list]:
    """What the batched function of a round's stage returns, by name, as JSON data.

    Args:
      a_round: The round.
      kept: The names of its outputs of which slices are read later.
    """
    slices = [v.name for v in a_round.local.outputs if v.name in kept]
    partials = [{"op": r.op, "value": r.source.name} for r in a_round.partials]
    return {"partials": partials, "rows": slices}


class _Writer:
    """Writes plans as JSON data for the manifest, and collects the members of the file.

    Attributes:
      members: The bytes of the file's members besides the manifest, by name.
    """

    def __init__(self):
        self.members: dict[str, bytes] = {}

    def plan(self, plan: Plan, prefix: str) -> dict[str, Any]:
        """A plan or a loop's body as JSON data; its stages' code goes to `members`.

        Args:
          plan: The plan.
          prefix: What the names of its members begin with: empty, or of a body
            `2.scan.0.`.
        """
        values: dict[str, dict] = {}

        def names(used: Iterable[Value]) -> list[str]:
            used = [*used]
            for value in used:
                entry = _value(value)
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
                    },
                    "reduces": [
                        {"op": r.op, "values": names((r.source, r.result))}
                        for r in a_round.reduces
                    ],
                    "loops": [
                        self._loop(loop, within, names) for loop in a_round.loops
                    ],
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
        }

    def _stage(self, stage: Stage, member: str, names) -> dict[str, Any]:
        """A stage as JSON data; its code and constants go to `members`.

        Args:
          stage: The stage.
          member: What the names of its members begin with, as `2.server`.
          names: A function that registers values in the plan's table, and returns their
            names.
        """
        data = {
            "name": stage.name,
            "inputs": names(stage.inputs),
            "outputs": names(stage.outputs),
            "member": None,
        }
        if stage.empty:
            return data
        exported: ExportedStage = stage.exported
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
        """A constant as JSON data; its bytes go to `members`, of equal ones once."""
        file, array = io.BytesIO(), np.ascontiguousarray(x).reshape(x.shape)
        if array.dtype.kind == "V":  # a dtype that numpy does not know: its bits
            array = array.view(f"u{array.dtype.itemsize}")
        np.save(file, array, allow_pickle=False)
        name = f"consts/{hashlib.sha256(file.getvalue()).hexdigest()[:16]}.npy"
        self.members[name] = file.getvalue()
        return {"member": name, "dtype": str(x.dtype)}

    def _loop(self, loop: Loop, prefix: str, names) -> dict[str, Any]:
        """A loop as JSON data; the code of its bodies' stages goes to `members`.

        Args:
          loop: The loop.
          prefix: What the names of its round's members begin with, as `2.`.
          names: A function that registers values in the plan's table, and returns their
            names.
        """
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


def _partition(plan: Plan) -> dict[str, Any] | None:
    """The partition of a plan as JSON data; None if it calls no building block."""
    if plan.partition is None:
        return None
    name, size, axes = (
        plan.partition.name,
        plan.partition.size,
        plan.partition.mesh_axes,
    )
    return {"name": name, "size": size, "mesh_axes": list(axes)}


def _value(value: Value) -> dict[str, Any]:
    """A value as JSON data: dtype, shape of one group's slice, and group axis.

    A global value has its whole shape, and None as group axis.
    """
    dtype = str(value.dtype)
    if is_key(value.dtype):
        dtype = f"key:{key_impl(value.dtype)}"
    axis = value.axis if value.partitioned else None
    return {"dtype": dtype, "shape": list(value.shape), "group_axis": axis}


def _tree(tree: Any) -> dict[str, Any] | None:
    """The structure of arguments or results as JSON data; None if `tree` is None.

    `tree` is a `PyTreeDef`, or a `Tree` of a loaded plan; None in bodies of loops,
    whose values are flat.
    """
    if tree is None:
        return None
    node = describe(tree)
    return {"node": node, "paths": list(Tree(node).paths())}
