"""From a manifest and members to a plan; nothing in them is believed unchecked.

Input: a manifest and members, as `container.read` returns them. Output: a plan whose
stages are `ExportedStage`s.

Invariants: the whole manifest is validated before the bytes of any stage are read, and
every error about it is a `PlanFileError`. A plan that is only inspected never reads
them. Values are produced before they are used, and the ledger is that of the plan.

Sharp edges: validation of the manifest says nothing about the code of a stage but which
custom calls it makes; see `custom_calls`.
"""

import io
import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from drjax._compat.types import Array, ClosedJaxpr
from drjax._errors import PlanFileError
from drjax._jaxprs.prng_keys import from_raw, key_dtype, raw_type, to_raw
from drjax._partition import Partition
from drjax._plan.uses import check_defined
from drjax._plan_file import json_values, pytrees
from drjax._plan_file.check_plan import check_batches, check_plan
from drjax._plan_file.container import check_used, malformed
from drjax._plan_file.custom_calls import check_allowed, check_declared
from drjax._plan_file.encode import batched_results, ledger
from drjax._plan_file.exported_stage import ExportedFunction, ExportedStage
from drjax._plan_file.json_values import Json
from drjax._plan_file.step_fields import (
    PLANS,
    STAGE,
    VALUE,
    VALUES,
    WIRE,
    fields_of,
    has_default,
    step_class,
)
from drjax._planner.open_groups import fixed_by
from drjax._planner.stage_values import new_value
from drjax._sharding.group_mesh import MeshAxes
from drjax.plan import Plan, Stage, Step, Value, Wire

# From names to the values of the plan that have these names, in order.
Values: TypeAlias = Callable[[Iterable[str]], tuple[Value, ...]]

_ORIGIN = ("producer", "calling_convention", "platforms", "x64", "prng")


def decode(
    path: Path | str,
    manifest: dict[str, Any],
    members: dict[str, bytes],
    run: bool = True,
    allowed: Collection[str] | None = (),
) -> Plan:
    """Decode the plan of a file, and check it: the reverse of `encode`.

    `manifest` is the contents of its `manifest.json`, JSON data that is not trusted,
    and `members` are those of all other files in the zip, by name. Unless the plan is
    to be `run`, no code of a stage is read, and the stages of the plan have no jaxpr. A
    plan to be run may make the custom calls `allowed` in addition to
    `drjax._plan_file.custom_calls.ALLOWED`; None allows all. Each stage of the plan
    with outputs has an `ExportedStage` as `exported`.
    """
    try:
        origin = _origin(manifest)
        # Two passes. The first validates the whole manifest and reads no code, as MLIR,
        # which parses code, is not hardened against forged input.
        stages = _StageReader(path, members, origin, run=False)
        plan = _PlanReader(stages).plan(manifest["plan"])
        _check_arguments(plan)
        if ledger(plan) != manifest["ledger"]:
            raise ValueError("its ledger is not that of its plan")
        check_used(path, members, stages.used)
        if run:  # only now is any stage looked at
            check_allowed(path, plan, allowed)
            stages = _StageReader(path, members, origin, run=True)
            plan = _PlanReader(stages).plan(manifest["plan"])
    except PlanFileError:
        raise
    # Any part of a manifest may be any JSON value, and Python and JAX raise anything.
    except Exception as error:
        raise malformed(path, f"{type(error).__name__}: {error}") from error
    return plan


def _origin(manifest: dict[str, Any]) -> dict[str, Any]:
    """Check and return the part of a manifest that says how its stages were exported.

    It is as `export_plan.origin_of` returns it.
    """
    origin = {key: manifest[key] for key in _ORIGIN}
    if type(origin["x64"]) is not bool:
        raise ValueError("x64 must be true or false")
    json_values.count(origin["calling_convention"])
    for key in ("platforms", "prng"):
        origin[key] = [json_values.text(x) for x in json_values.items(origin[key])]
    producer = {**origin["producer"]}
    text = json_values.text
    origin["producer"] = {text(name): text(x) for name, x in producer.items()}
    return origin


def _check_arguments(plan: Plan) -> None:
    """Check that a plan, not that of a body, takes `(args, kwargs)` and has results."""
    if plan.in_tree is None or plan.out_tree is None:
        raise ValueError("it has no structure of its arguments or its results")
    args, kwargs = plan.in_tree.node["tuple"]
    if "tuple" not in args or any(type(key) is not str for key, _ in kwargs["dict"]):
        raise ValueError("it does not take arguments as a function does")


class _PlanReader:
    """Builds plans from the manifest's JSON data, and checks the data.

    Malformed data raise built-in exceptions, such as `ValueError` or `KeyError`, or a
    `DrjaxError`, which `decode` converts to `PlanFileError`. This is so of all
    functions of this module that take data. `stages` builds the stages of these plans.
    """

    def __init__(self, stages: "_StageReader"):
        self.stages = stages

    def plan(self, data: dict[str, Any]) -> Plan:
        """Build a plan, also that of a loop's body or an inner level, from JSON data.

        It checks that values are used only after a stage has produced them, and that
        the batched functions return what the rounds need.
        """
        partition = _partition(data["partition"])
        table = {
            name: _value(json_values.text(name), entry, partition)
            for name, entry in data["values"].items()
        }

        def values(names: Iterable[str]) -> tuple[Value, ...]:
            names = json_values.items(names)
            check_defined(names, table.keys())
            return tuple(table[name] for name in names)

        steps = [self._step(x, values, partition) for x in data["steps"]]
        inputs, outputs = values(data["inputs"]), values(data["outputs"])
        plan = Plan(
            json_values.text(data["name"]),
            partition,
            tuple(steps),
            inputs,
            outputs,
            _tree(data["in_tree"], inputs),
            _tree(data["out_tree"], outputs),
            data.get("open_groups") is True,
        )
        check_plan(plan)
        if plan.open_groups and (plan.partition is None or fixed_by(plan)):
            raise ValueError("it cannot run with any number of groups")
        kept = plan.kept()
        of_groups = (x for x in data["steps"] if x.get("local"))
        for entry, a_round in zip(of_groups, plan.rounds, strict=True):
            # Results of the batched function are identified by their position alone.
            results = batched_results(a_round, kept)
            if results != {key: entry[key] for key in results}:
                raise ValueError("a batch gives other results than the round needs")
        if self.stages.run:
            check_batches(plan)
        return plan

    def _step(
        self, data: dict[str, Any], values: Values, partition: Partition | None
    ) -> Step:
        """Build a step from its JSON data: `step`, the name of its class, and fields.

        `partition` is that of the plan.
        """
        cls = step_class(json_values.text(data["step"]))
        if cls is Stage:
            over = () if partition is None else (partition,)
            stage = self.stages.stage(data, values, over if data["local"] else ())
            if "inner" in data:
                stage = replace(stage, inner=self.plan(data["inner"]))
            return stage
        known = {name: (kind, default) for name, kind, default in fields_of(cls)}
        if unknown := data.keys() - known.keys() - {"step"}:
            raise ValueError(f"a {cls.__name__} has no {str(sorted(unknown))[:60]}")
        fields: dict[str, Any] = {}
        for name, (kind, default) in known.items():
            if name in data:
                fields[name] = self._field(kind, data[name], values)
            elif not has_default(default):
                raise KeyError(name)
        return cls(**fields)

    def _field(self, kind: str, data: Json, values: Values) -> Any:
        """Build a field of a step, of one of the kinds of `step_fields.py`."""
        if kind is VALUE:
            return values([data])[0]
        if kind is VALUES:
            return values(data)
        if kind is STAGE:
            return self.stages.stage(data, values, ())
        if kind is PLANS:
            return tuple(map(self.plan, json_values.items(data)))
        if kind is WIRE:
            dtype, *numbers = json_values.items(data)
            return Wire(json_values.text(dtype), *map(json_values.count, numbers))
        return json_values.plain(data)


def _partition(data: dict[str, Any] | None) -> Partition | None:
    """Build the partition of a plan from its JSON data: `name`, `size` and `mesh_axes`.

    It is None, and so are the data, for a plan that calls no building block.
    """
    if data is None:
        return None
    axes = map(json_values.text, json_values.items(data["mesh_axes"]))
    return Partition(json_values.text(data["name"]), data["size"], tuple(axes))


class _StageReader:
    """Builds stages from the manifest's JSON data and from members of the file.

    Stages may share constants. If stages are not to be `run`, their code is not read.
    `origin` is how they were exported, as `_origin` returns it, and `path` is for
    errors. `used` has the names of the members that the stages built so far need.
    """

    def __init__(
        self,
        path: Path | str,
        members: dict[str, bytes],
        origin: dict[str, Any],
        run: bool,
    ):
        self.path, self.origin, self.run = path, origin, run
        self.used: set[str] = set()
        self._members, self._consts = members, dict[tuple[str, Any], np.ndarray]()
        # By all that they are made of, so that what stages share is read once.
        self._exported: dict[str, ExportedStage] = {}
        self._jaxprs: dict[Any, ClosedJaxpr] = {}

    def stage(
        self, data: dict[str, Any], values: Values, over: tuple[Partition, ...]
    ) -> Stage:
        """Build a stage, of the groups of a partition, or with () of the server.

        The names of its members, the files in the zip with its code and constants, are
        added to `used`. If stages are to be run, its code is read and checked, and it
        has a jaxpr that calls this code; if not, its jaxpr is None. `PlanFileError`:
        this version of JAX cannot read the code.
        """
        inputs, outputs = values(data["inputs"]), values(data["outputs"])
        name, member = json_values.text(data["name"]), data["member"]
        local = bool(over)
        if (member is None) != (not outputs):
            raise ValueError(f"stage {name} has results and no member, or the reverse")
        exported = None if member is None else self._shared(data, member, local)
        jaxpr = self._jaxpr(inputs, outputs, exported, local) if self.run else None
        counts = json_values.items(data.get("work", [0, 0]))
        operations, again = map(json_values.count, counts)
        work, mesh = (operations, again), _mesh(data, local)
        return Stage(
            name, inputs, outputs, jaxpr, exported, over=over, work=work, mesh=mesh
        )

    def _jaxpr(
        self,
        inputs: Sequence[Value],
        outputs: Sequence[Value],
        exported: ExportedStage | None,
        local: bool,
    ) -> ClosedJaxpr:
        """Trace the call of a stage's code, once for all stages with equal types."""
        types = lambda values: tuple((v.shape, v.dtype) for v in values)
        key = id(exported), types(inputs), types(outputs), local
        if key not in self._jaxprs:
            nothing = lambda *_: []
            code = exported and _per_group(inputs, outputs, exported, local)
            self._jaxprs[key] = _jaxpr(code or nothing, inputs, local)
        return self._jaxprs[key]

    def _shared(self, data: dict[str, Any], member: str, local: bool) -> ExportedStage:
        """Return the `ExportedStage` of a stage, read once for those that share it."""
        keys = ("name", "member", "consts", "custom_calls", "in_turn", "mesh")
        key = json.dumps([local, *(data.get(key) for key in keys)])
        if key not in self._exported:
            self._exported[key] = self._exported_stage(data, member, local)
            if self.run:
                _check_code(data["name"], self._exported[key], _mesh(data, local))
        return self._exported[key]

    def _exported_stage(
        self, data: dict[str, Any], member: str, local: bool
    ) -> ExportedStage:
        """Build the `ExportedStage` of a stage; its code is not deserialized yet.

        `member` is the common prefix of the names of its members, such as
        `stages/2.server`.
        """
        function = lambda end: ExportedFunction(
            self._member(f"{member}{end}.jexp"),
            self._member(f"{member}{end}.mlirbc"),
            f"{member}{end} of the plan file {self.path}",
        )
        return ExportedStage(
            function(""),
            function(".batch") if local else None,
            local and data["in_turn"] is True,  # the key of `sequential` in files
            self._member(f"{member}.jaxpr.txt").decode(),
            tuple(map(self._constant, data["consts"])),
            tuple(map(json_values.text, data["custom_calls"])),
            self.origin,
        )

    def _constant(self, data: dict[str, Any]) -> np.ndarray:
        """Return a constant of a stage from its JSON data, `member` and `dtype`.

        The member is a `.npy` file. Constants of one member and dtype share the array.
        """
        # Constants of equal bits share a member, also if their dtypes differ.
        name, dtype = key = data["member"], _dtype(data["dtype"])
        if key not in self._consts:
            # Dtypes that numpy does not know are unsigned integers in the file.
            self._consts[key] = _array(self._member(name)).view(dtype)
        return self._consts[key]

    def _member(self, name: str) -> bytes:
        """Return the bytes of the file `name` in the zip; add the name to `used`."""
        self.used.add(name)
        return self._members[name]


def _mesh(data: dict[str, Any], local: bool) -> MeshAxes:
    """Return the mesh that a stage needs, from its JSON data: names and sizes."""
    axes = [json_values.items(axis) for axis in json_values.items(data.get("mesh", []))]
    mesh = tuple((json_values.text(n), json_values.count(size)) for n, size in axes)
    if mesh and not (local and all(size for _, size in mesh)):
        raise ValueError(f"stage {data['name']} has a mesh that no group has")
    if len(dict(mesh)) != len(mesh):
        raise ValueError(f"stage {data['name']} has a mesh with an axis twice")
    return mesh


def _check_code(name: str, exported: ExportedStage, mesh: MeshAxes) -> None:
    """Deserialize the code of a stage, and check that it is what the manifest says.

    `ValueError`: the functions make other custom calls than it declares, or the
    StableHLO for other runtimes (`.mlirbc`) is not that of the functions.
    `PlanFileError`: this version of JAX cannot read the code.
    """
    parts = [f for f in (exported.per_group, exported.batched) if f]
    called = [function.custom_calls for function in parts]
    check_declared(name, exported.custom_calls, called)
    if any(function.meshes - {mesh} for function in parts):
        raise ValueError(f"stage {name} runs on another mesh than it is said to")
    for function in parts:
        # JAX runs the .jexp, which was checked; other runtimes run the .mlirbc.
        if function.function.mlir_module_serialized != function.stablehlo:
            raise ValueError(
                f"the .mlirbc of stage {name} is not the code of its .jexp"
            )


def _per_group(
    inputs: Sequence[Value],
    outputs: Sequence[Value],
    exported: ExportedStage,
    local: bool,
) -> Callable[..., list[Array]]:
    """Return the exported `per_group` function of a stage, on typed random keys.

    `ValueError`: it takes or returns other types than those of `inputs`, after the
    group index of a local stage, and `outputs`.
    """
    # Before it is traced, as a file may list any number of operands.
    function = exported.per_group.function
    index = [jax.ShapeDtypeStruct((), np.int32)] if local else []
    takes = [*exported.consts, *index, *map(raw_type, inputs)]
    for what, avals, expected in (
        ("takes", function.in_avals, takes),
        ("gives", function.out_avals, [*map(raw_type, outputs)]),
    ):
        if [(x.shape, x.dtype) for x in avals] != [
            (x.shape, x.dtype) for x in expected
        ]:
            raise ValueError(f"a stage {what} other types than it is said to")

    def run(*args: Array) -> list[Array]:
        raw = map(to_raw, args)
        outs = exported.per_group.call(*map(jnp.asarray, exported.consts), *raw)
        return [from_raw(y, v.dtype) for y, v in zip(outs, outputs, strict=True)]

    return run


def _jaxpr(
    run: Callable[..., list[Array]], inputs: Sequence[Value], local: bool
) -> ClosedJaxpr:
    """Trace the function of a stage, that of a local stage with the group index first.

    It takes the inputs of the stage, of a partitioned value one slice.
    """
    index = [jax.ShapeDtypeStruct((), np.int32)] if local else []
    types = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in inputs]
    return jax.make_jaxpr(run)(*index, *types)


# ---------------------------------------------------------------------------------
# Values


def _value(name: str, data: dict[str, Any], partition: Partition | None) -> Value:
    """Build a value of a plan from its JSON data: `shape`, `dtype` and `group_axis`.

    The shape of a partitioned value is that of one slice, and a global value has the
    group axis null. `partition` is that of the plan.
    """
    shape, axis = tuple(map(json_values.count, data["shape"])), data["group_axis"]
    dtype = _dtype(data["dtype"])
    if axis is not None:
        if json_values.count(axis) > len(shape) or partition is None:
            raise ValueError(f"{name} has no group axis {axis}")
        shape = (*shape[:axis], partition.size, *shape[axis:])
    return new_value(name, jax.ShapeDtypeStruct(shape, dtype), axis, partition)


def _array(data: bytes) -> np.ndarray:
    """Return the array of a `.npy` file, as a read-only view of the file's bytes.

    `numpy.load` would allocate whatever size the file declares. `ValueError`: the file
    is not of version 1.0 or 2.0, or its array has Python objects or Fortran order, or
    the file has more or fewer bytes than its header declares.
    """
    file = io.BytesIO(data)
    version = np.lib.format.read_magic(file)
    # Version 3.0 is for names of fields in UTF-8, and constants have no fields.
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"a constant has version {version} of numpy's format")
    first = np.lib.format.read_array_header_1_0
    second = np.lib.format.read_array_header_2_0
    shape, is_fortran, dtype = (first if version == (1, 0) else second)(file)
    # Of Python's integers, which do not overflow for a forged shape.
    size = math.prod(shape) * dtype.itemsize
    # Arrays of objects are pickles, which can run code.
    if dtype.hasobject or is_fortran or len(data) - file.tell() != size:
        raise ValueError(f"a constant of {dtype}{[*shape]} has not that many bytes")
    return np.frombuffer(data, dtype, math.prod(shape), file.tell()).reshape(shape)


def _dtype(name: str) -> Any:
    """Return the dtype with a name from the manifest.

    It is that of a numeric dtype or `bool`, such as `float32`; or `key:IMPL` for typed
    random keys, such as `key:threefry2x32`.
    """
    if match := re.fullmatch(r"key:(\w+)", json_values.text(name)):
        return key_dtype(match[1])
    dtype = np.dtype(name)
    number = dtype == np.bool_ or jnp.issubdtype(dtype, jnp.number)
    # np.dtype has other names for one dtype, such as f4; equal plans have equal files.
    if str(dtype) != name or not number:
        raise ValueError(f"no dtype is called {name}")
    return dtype


def _tree(
    data: dict[str, Any] | None, values: tuple[Value, ...]
) -> pytrees.Tree | None:
    """Build the structure of a plan's arguments or results from its JSON data.

    `values` are the plan's inputs or outputs, one for each leaf. The data are null, and
    the result is None, in bodies of loops.
    """
    if data is None:
        return None
    tree = pytrees.Tree(pytrees.validate(data["node"]))
    if tree.num_leaves != len(values):
        raise ValueError(f"a pytree of {tree.num_leaves} leaves holds {len(values)}")
    return tree
