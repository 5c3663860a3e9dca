"""From a plan to the manifest and the members of its file."""

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
from drjax._plan_file.exported_stage import PLATFORMS, Forms
from drjax._plan_file.pytrees import Tree, describe
from drjax._plan_file.stage_features import Contents, contents, together
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
        origin = _origin(together(contents(s.jaxpr, where) for where, s in stages))
    writer = _Writer(origin)
    with jax.enable_x64(origin["x64"]):
        written = writer.plan(plan, "", "")
    return {**origin, "plan": written, "ledger": ledger(plan)}, writer.members


@functools.cache
def _producer() -> dict[str, str]:
    names = ("drjax", "jax", "jaxlib")
    found = {name: version(name) for name in names}
    return {**found, "python": platform.python_version()}


def _origin(found: Contents) -> dict[str, Any]:
    convention = export.maximum_supported_calling_convention_version
    return {
        "producer": _producer(), "calling_convention": convention,
        "platforms": list(PLATFORMS), "x64": found.wide, "prng": sorted(found.keys),
    }  # fmt: skip


def ledger(plan: Plan) -> list[dict[str, Any]]:
    """The communication of a plan, message by message."""
    found: Ledger = plan.communication()
    return [
        {
            "round": m.round, "op": m.op, "value": m.value.name, "bytes": m.nbytes,
            "times": list(m.times),
        }
        for m in found.messages
    ]  # fmt: skip


def batch_results(a_round: Round, kept: frozenset[str]) -> dict[str, list]:
    """What the batch form of a round's groups gives: see `exported_stage.py`."""
    rows = [v.name for v in a_round.local.outputs if v.name in kept]
    partials = [{"op": r.op, "value": r.source.name} for r in a_round.partials]
    return {"partials": partials, "rows": rows}


class _Writer:
    """Writes plans as data; `members` are the other members of the file."""

    def __init__(self, origin: dict[str, Any]):
        self.origin = origin
        self.members: dict[str, bytes] = {}

    def plan(self, plan: Plan, at: str, where: str) -> dict[str, Any]:
        """A plan as data.

        Args:
          plan: The plan.
          at: Where it is, as a prefix for names of members.
          where: The same, for people.
        """
        values: dict[str, dict] = {}

        def names(found) -> list[str]:
            for value in found:
                told = _value(value)
                assert values.setdefault(value.name, told) == told, value
            return [v.name for v in found]

        kept, rounds = plan.kept(), []
        for number, a_round in enumerate(plan.rounds, 1):
            here, said = f"{at}{number}.", f"{where}round {number}, "
            rounds.append(
                {
                    "server": self._server(
                        a_round.server, f"{here}server", f"{said}server", names
                    ),
                    "broadcast": names(a_round.broadcast),
                    "scatter": [names(pair) for pair in a_round.scatter],
                    "groups": self._local(
                        a_round, kept, f"{here}groups", f"{said}groups", names
                    ),
                    "reduces": [
                        {"op": r.op, "values": names((r.source, r.result))}
                        for r in a_round.reduces
                    ],
                    "loops": [
                        self._loop(loop, here, said, names) for loop in a_round.loops
                    ],
                }
            )
        server = self._server(plan.server, f"{at}server", f"{where}server", names)
        inputs, outputs = names(plan.inputs), names(plan.outputs)
        return {
            "name": plan.name, "partition": _partition(plan),
            "inputs": inputs, "outputs": outputs,
            "in_tree": _tree(plan.in_tree), "out_tree": _tree(plan.out_tree),
            "values": values, "rounds": rounds, "server": server,
        }  # fmt: skip

    def _server(self, stage: Stage, member: str, where: str, names) -> dict[str, Any]:
        export = lambda: Exporter(stage, where, self.origin).server()
        return self._stage(stage, member, export, names)

    def _local(self, a_round: Round, kept, member: str, where: str, names):
        stage = a_round.local
        reduces, rows = a_round.partials, [v for v in stage.outputs if v.name in kept]
        export = lambda: Exporter(stage, where, self.origin).local(reduces, rows)
        found = self._stage(stage, member, export, names)
        return {**found, **batch_results(a_round, kept)}

    def _stage(self, stage: Stage, member: str, export, names) -> dict[str, Any]:
        told = {
            "name": stage.name, "inputs": names(stage.inputs),
            "outputs": names(stage.outputs), "member": None,
        }  # fmt: skip
        if stage.empty:
            return told
        forms: Forms = export() if stage.forms is None else stage.forms
        member = f"stages/{member}"
        for end, form in (("", forms.one), (".batch", forms.batch)):
            if form is not None:
                self.members[f"{member}{end}.jexp"] = form.exported
                self.members[f"{member}{end}.mlirbc"] = form.stablehlo
        self.members[f"{member}.jaxpr.txt"] = forms.text.encode()
        consts = [self._constant(x) for x in forms.consts]
        calls = list(forms.custom_calls)
        told |= {"member": member, "consts": consts, "custom_calls": calls}
        return told if forms.batch is None else {**told, "in_turn": forms.in_turn}

    def _constant(self, x: np.ndarray) -> dict[str, Any]:
        file, data = io.BytesIO(), np.ascontiguousarray(x).reshape(x.shape)
        if data.dtype.kind == "V":  # a dtype that numpy does not know: its bits
            data = data.view(f"u{data.dtype.itemsize}")
        np.save(file, data, allow_pickle=False)
        name = f"consts/{hashlib.sha256(file.getvalue()).hexdigest()[:16]}.npy"
        self.members[name] = file.getvalue()
        return {"member": name, "dtype": str(x.dtype)}

    def _loop(self, loop: Loop, at: str, where: str, names) -> dict[str, Any]:
        bodies = [
            self.plan(body, f"{at}{loop.name}.{i}.", f"{where}{loop.name}, ")
            for i, body in enumerate(loop.bodies)
        ]
        return {
            "op": loop.op, "name": loop.name, "inputs": names(loop.inputs),
            "outputs": names(loop.outputs), "bodies": bodies,
            "consts": list(loop.consts), "carry": loop.carry, "length": loop.length,
            "reverse": loop.reverse,
        }  # fmt: skip


def _partition(plan: Plan) -> dict[str, Any] | None:
    if plan.partition is None:
        return None
    name, size, axes = (
        plan.partition.name, plan.partition.size, plan.partition.mesh_axes
    )  # fmt: skip
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
