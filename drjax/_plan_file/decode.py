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
import math
import re
from collections.abc import Callable, Collection, Iterable, Sequence, Set
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from drjax._errors import DrjaxError, PlanFileError
from drjax._jaxprs.prng_keys import from_raw, key_dtype, raw_type, to_raw
from drjax._partition import Partition
from drjax._plan_file import pytrees
from drjax._plan_file.container import check_used, malformed
from drjax._plan_file.custom_calls import check_allowed, check_declared
from drjax._plan_file.encode import batched_results, ledger
from drjax._plan_file.exported_stage import ExportedFunction, ExportedStage
from drjax._planner.stage_values import new_value
from drjax._primitives.reduce_ops import REDUCE_OPS
from drjax.plan import Loop, Plan, Reduce, Round, Stage, Value

_ORIGIN = ("producer", "calling_convention", "platforms", "x64", "prng")
_LOOPS = ("scan", "while", "cond")


def decode(
    path: Path | str,
    manifest: dict[str, Any],
    members: dict[str, bytes],
    run: bool = True,
    allowed: Collection[str] | None = (),
) -> Plan:
    """Decode the plan of a file, and check it: the reverse of `encode`.

    Args:
      path: The file, for errors.
      manifest: Its manifest: JSON data that is not trusted.
      members: The bytes of its members, by name.
      run: Whether the stages are to be run; if not, their bytes are not looked at.
      allowed: Names of custom calls that stages to be run may make besides
        `drjax._plan_file.custom_calls.ALLOWED`; None allows all.

    Raises:
      PlanFileError: The manifest is malformed, or this JAX cannot read a stage, or a
        stage makes a custom call that is not allowed.
    """
    try:
        origin = _origin(manifest)
        stages = _StageReader(path, members, origin, run=False)
        plan = _PlanReader(stages).plan(manifest["plan"])
        if ledger(plan) != manifest["ledger"]:
            raise ValueError("its ledger is not that of its plan")
        check_used(path, members, stages.used)
        if run:  # only now is any stage looked at
            if allowed is not None:
                check_allowed(path, plan, allowed)
            stages = _StageReader(path, members, origin, run=True)
            plan = _PlanReader(stages).plan(manifest["plan"])
    except PlanFileError:
        raise
    except (
        ArithmeticError,
        AssertionError,
        AttributeError,
        DrjaxError,
        LookupError,
        MemoryError,
        RecursionError,
        TypeError,
        ValueError,
    ) as error:
        raise malformed(path, f"{type(error).__name__}: {error}") from error
    return plan


def _origin(manifest: dict[str, Any]) -> dict[str, Any]:
    """Check the origin of the stages in a manifest, and return it.

    It has the versions of the producer, platforms, precision, and implementations of
    random keys. Errors are as in `_PlanReader`.
    """
    origin = {key: manifest[key] for key in _ORIGIN}
    if type(origin["x64"]) is not bool:
        raise ValueError("x64 must be true or false")
    _count(origin["calling_convention"])
    for key in ("platforms", "prng"):
        origin[key] = [_text(x) for x in _list(origin[key])]
    producer = {**origin["producer"]}
    origin["producer"] = {_text(name): _text(x) for name, x in producer.items()}
    return origin


Values = Callable[[Iterable[str]], tuple[Value, ...]]  # from names in one plan


class _PlanReader:
    """Reads plans from the manifest's JSON data, and checks them.

    What does not fit raises an error of some built-in class, as `ValueError` or
    `KeyError`, from which `decode` makes a `PlanFileError`.

    Args:
      stages: What reads their stages.
    """

    def __init__(self, stages: "_StageReader"):
        self.stages = stages

    def plan(self, data: dict[str, Any]) -> Plan:
        """A plan, or the body of a loop, from its JSON data."""
        partition = _partition(data["partition"])
        size = 0 if partition is None else partition.size
        table = {
            name: _value(_text(name), entry, size)
            for name, entry in data["values"].items()
        }

        def values(names: Iterable[str]) -> tuple[Value, ...]:
            names = [*names]
            _check_known(names, table.keys())
            return tuple(table[name] for name in names)

        rounds = tuple(self._round(entry, values) for entry in data["rounds"])
        inputs, outputs = values(data["inputs"]), values(data["outputs"])
        plan = Plan(
            _text(data["name"]),
            partition,
            rounds,
            self.stages.stage(data["server"], values, local=False),
            inputs,
            outputs,
            _tree(data["in_tree"], inputs),
            _tree(data["out_tree"], outputs),
        )
        _check_order(plan)
        kept = plan.kept()
        for entry, a_round in zip(data["rounds"], rounds, strict=True):
            results = batched_results(a_round, kept)
            if results != {key: entry["groups"][key] for key in results}:
                raise ValueError("a batch gives other results than the round needs")
        return plan

    def _round(self, data: dict[str, Any], values: Values) -> Round:
        """A round from its JSON data; `values` finds values of its plan by name."""
        reduces = []
        for entry in data["reduces"]:
            source, result = values(entry["values"])
            op = _one_of((*REDUCE_OPS, "gather"), entry["op"])
            reduces.append(Reduce(op, source, result))
        scatter = []
        for pair in data["scatter"]:
            whole, slices = values(pair)
            scatter.append((whole, slices))
        return Round(
            self.stages.stage(data["server"], values, local=False),
            values(data["broadcast"]),
            tuple(scatter),
            self.stages.stage(data["groups"], values, local=True),
            tuple(reduces),
            tuple(self._loop(entry, values) for entry in data["loops"]),
        )

    def _loop(self, data: dict[str, Any], values: Values) -> Loop:
        """A loop, with the plans of its bodies, from its JSON data.

        `values` finds values of the plan around it by their names.
        """
        bodies = tuple(map(self.plan, data["bodies"]))
        consts, carry, length = data["consts"], data["carry"], data["length"]
        return Loop(
            _one_of(_LOOPS, data["op"]),
            _text(data["name"]),
            values(data["inputs"]),
            values(data["outputs"]),
            bodies,
            tuple(map(_count, consts)),
            _count(carry),
            None if length is None else _count(length),
            data["reverse"] is True,
        )


def _partition(data: dict[str, Any] | None) -> Partition | None:
    """A partition from its JSON data; None for a plan that calls no building block."""
    if data is None:
        return None
    return Partition(data["name"], data["size"], tuple(data["mesh_axes"]))


def _check_order(plan: Plan) -> None:
    """Check that values are produced before use; raise `ValueError` if not."""
    known = {v.name for v in plan.inputs}

    def use(values: Iterable[Value]) -> None:
        _check_known([v.name for v in values], known)

    def produce(values: Iterable[Value]) -> None:
        known.update(v.name for v in values)

    for a_round in plan.rounds:
        use(a_round.server.inputs)
        produce(a_round.server.outputs)
        use((*a_round.broadcast, *(whole for whole, _ in a_round.scatter)))
        produce(slices for _, slices in a_round.scatter)
        use(a_round.local.inputs)
        produce(a_round.local.outputs)
        use(reduce.source for reduce in a_round.reduces)
        produce(reduce.result for reduce in a_round.reduces)
        for loop in a_round.loops:
            use(loop.inputs)
            produce(loop.outputs)
    use(plan.server.inputs)
    produce(plan.server.outputs)
    use(plan.outputs)


def _check_known(names: Iterable[str], known: Set[str]) -> None:
    """Check that all names are among `known`; raise `ValueError` if not."""
    if unknown := set(names) - known:
        raise ValueError(f"{sorted(unknown)} are used before they are made")


class _StageReader:
    """Reads the stages of plans, and the constants that they share.

    Args:
      path: The file, for errors.
      members: The bytes of the file's members, by name.
      origin: Where and how the stages were exported, from `_origin`.
      run: Whether the stages are to be run; if not, their bytes are not looked at.

    Attributes:
      used: The names of the members that the stages need.
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
        self._members, self._consts = members, dict[str, np.ndarray]()

    def stage(self, data: dict[str, Any], values: Values, local: bool) -> Stage:
        """A stage from its JSON data; it has a jaxpr only if stages are to be run.

        Args:
          data: The stage's entry in the manifest.
          values: A function that finds values of its plan by their names.
          local: Whether it is a local stage, not one of the server.

        Raises:
          ValueError: The entry, or the code, does not fit the manifest.
        """
        inputs, outputs = values(data["inputs"]), values(data["outputs"])
        name, member = _text(data["name"]), data["member"]
        if (member is None) != (not outputs):
            raise ValueError(f"stage {name} has results and no member, or the reverse")
        exported = None if member is None else self._exported_stage(data, member, local)
        if not self.run:
            return Stage(name, inputs, outputs, None, exported)
        if exported is not None:
            _check_code(name, exported)
        jaxpr = _jaxpr(inputs, outputs, exported, local)
        return Stage(name, inputs, outputs, jaxpr, exported)

    def _exported_stage(
        self, data: dict[str, Any], member: str, local: bool
    ) -> ExportedStage:
        """The `ExportedStage` of an entry in the manifest; its code is not read yet.

        Args:
          data: The stage's entry.
          member: What the names of its members begin with, as `stages/2.server`.
          local: Whether it is a local stage, not one of the server.
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
            tuple(map(_text, data["custom_calls"])),
            self.origin,
        )

    def _constant(self, data: dict[str, Any]) -> np.ndarray:
        """A constant of a stage, from its JSON data, which names a member and a dtype.

        Stages that name the same member share the array.
        """
        name = data["member"]
        if name not in self._consts:
            array = _array(self._member(name))
            self._consts[name] = array.view(_dtype(data["dtype"]))
        return self._consts[name]

    def _member(self, name: str) -> bytes:
        """The bytes of the member of this name, which goes to `used`."""
        self.used.add(name)
        return self._members[name]


def _check_code(name: str, exported: ExportedStage) -> None:
    """Check that the code of a stage is what the manifest says.

    Args:
      name: The name of the stage, for errors.
      exported: Its functions.

    Raises:
      ValueError: Its functions make other custom calls, or its StableHLO for other
        runtimes is not that of its functions.
    """
    parts = [f for f in (exported.per_group, exported.batched) if f]
    called = [function.custom_calls for function in parts]
    check_declared(name, exported.custom_calls, called)
    for function in parts:
        if function.function.mlir_module_serialized != function.stablehlo:
            raise ValueError(
                f"the .mlirbc of stage {name} is not the code of its .jexp"
            )


def _jaxpr(
    inputs: Sequence[Value],
    outputs: Sequence[Value],
    exported: ExportedStage | None,
    local: bool,
) -> Any:
    """A jaxpr for a stage from a file, which calls its `per_group` function.

    Args:
      inputs: The inputs of the stage.
      outputs: Its outputs.
      exported: Its functions; None if it has no outputs.
      local: Whether it is a local stage, whose jaxpr takes the group index first.

    Raises:
      ValueError: The exported function returns other types than those of `outputs`.
    """

    def run(*args):
        if exported is None:
            return []
        raw = map(to_raw, args)
        outs = exported.per_group.call(*map(jnp.asarray, exported.consts), *raw)
        return [from_raw(y, v.dtype) for y, v in zip(outs, outputs, strict=True)]

    types = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in inputs]
    if local:
        types = [jax.ShapeDtypeStruct((), np.int32), *types]
    if exported is not None:
        avals = [(x.shape, x.dtype) for x in exported.per_group.function.out_avals]
        if avals != [(t.shape, t.dtype) for t in map(raw_type, outputs)]:
            raise ValueError("a stage gives other types than it is said to")
    return jax.make_jaxpr(run)(*types)


# ---------------------------------------------------------------------------------
# Values


def _value(name: str, data: dict[str, Any], size: int) -> Value:
    """A value of a plan, from its JSON data.

    Args:
      name: Its name.
      data: Its entry in the manifest: shape of one slice, dtype, and group axis.
      size: n, the number of groups; 0 without a partition.

    Raises:
      ValueError: It cannot have this dtype or group axis.
    """
    shape, axis = tuple(map(_count, data["shape"])), data["group_axis"]
    dtype = _dtype(data["dtype"])
    if axis is not None:
        if _count(axis) > len(shape) or not size:
            raise ValueError(f"{name} has no group axis {axis}")
        shape = (*shape[:axis], size, *shape[axis:])
    return new_value(name, jax.ShapeDtypeStruct(shape, dtype), axis)


def _array(data: bytes) -> np.ndarray:
    """The array in the bytes of a `.npy` file, as a read-only view of them.

    `numpy.load` would allocate whatever size the file declares; this raises
    `ValueError` unless the file has exactly the bytes that it declares.
    """
    file = io.BytesIO(data)
    version = np.lib.format.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"a constant has version {version} of numpy's format")
    first = np.lib.format.read_array_header_1_0
    second = np.lib.format.read_array_header_2_0
    shape, is_fortran, dtype = (first if version == (1, 0) else second)(file)
    size = math.prod(shape) * dtype.itemsize
    if dtype.hasobject or is_fortran or len(data) - file.tell() != size:
        raise ValueError(f"a constant of {dtype}{[*shape]} has not that many bytes")
    return np.frombuffer(data, dtype, math.prod(shape), file.tell()).reshape(shape)


def _dtype(name: str) -> Any:
    """The dtype of this name: a number, bool, or `key:IMPL` for random keys.

    Raises:
      ValueError, TypeError: There is no such dtype.
    """
    if match := re.fullmatch(r"key:(\w+)", _text(name)):
        return key_dtype(match[1])
    dtype = np.dtype(name)
    number = dtype == np.bool_ or jnp.issubdtype(dtype, jnp.number)
    if str(dtype) != name or not number:
        raise ValueError(f"no dtype is called {name}")
    return dtype


def _tree(data: dict[str, Any] | None, values: tuple[Value, ...]) -> Any:
    """The structure of arguments or results from its JSON data; None if it is null.

    Args:
      data: Its entry in the manifest; null in bodies of loops.
      values: The values of its leaves.

    Raises:
      ValueError: The entry describes no pytree, or one with another number of leaves.
    """
    if data is None:
        return None
    tree = pytrees.Tree(pytrees.validate(data["node"]))
    if tree.num_leaves != len(values):
        raise ValueError(f"a pytree of {tree.num_leaves} leaves holds {len(values)}")
    return tree


def _text(x: Any) -> str:
    """Return `x` if it is printable text; raise `ValueError` if not."""
    if not isinstance(x, str) or not x.isprintable():  # as it goes to a terminal
        raise ValueError(f"{x!r:.60} is not a text")
    return x


def _list(x: Any) -> list:
    """Return `x` if it is a list; raise `ValueError` if not."""
    if not isinstance(x, list):
        raise ValueError(f"{str(x)[:60]} is not a list")
    return x


def _count(x: Any) -> int:
    """Return `x` if it is an integer from 0; raise `ValueError` if not."""
    if type(x) is not int or x < 0:
        raise ValueError(f"{str(x)[:60]} is not a count")
    return x


def _one_of(known: tuple[str, ...], x: Any) -> str:
    """Return `x` if it is one of the known names; raise `ValueError` if not."""
    if x not in known:
        raise ValueError(f"{str(x)[:60]} is none of {', '.join(known)}")
    return x
