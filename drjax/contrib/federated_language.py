"""A plan as a computation of federated-language: for systems that read that format.

Input: a plan. Output: a building block of `federated_language`, with each stage as
StableHLO. Only an export: federated-language has types, building blocks and protos, and
no engine.

Invariants: the per-group function of each exported stage is used, not the batched one,
as that system maps over clients itself.

Sharp edges: `federated_language` has no gather, scatter or loop, so that plans with
these are refused. The group index is one more argument, which callers must supply.
"""

import functools
import importlib
from collections import OrderedDict
from pathlib import Path
from typing import Any, TypeAlias

import jax
import numpy as np
from jax import export

from drjax._compat.types import Array, PyTree
from drjax._errors import DrjaxTypeError, DrjaxValueError
from drjax._extras import needed
from drjax._jaxprs.prng_keys import raw_type
from drjax._plan_file.custom_calls import parsed_module
from drjax._plan_file.exported_stage import exported_of
from drjax._plan_file.load import plan_from_bytes
from drjax._plan_file.save import plan_to_bytes
from drjax.engines.core.messages import refuse_group_mesh
from drjax.plan import (
    Broadcast,
    Fold,
    Gather,
    Loop,
    Move,
    Plan,
    Reduce,
    Round,
    Rules,
    Scatter,
    Stage,
    Step,
    Value,
)

# Of federated-language, which users may lack.
BuildingBlock: TypeAlias = Any  # a `Lambda` or a `ConcreteComputation`
TypeSignature: TypeAlias = Any
Operand: TypeAlias = Any  # stands for a value of the plan in the computation


def export_federated_language(plan: Plan, platform: str = "cpu") -> Any:
    """Export a plan as a building block of `federated_language`.

    Global values are at the server and partitioned ones at the clients; rounds become
    `federated_broadcast`, `federated_map` and `federated_sum`, `_mean`, `_max` or
    `_min`. Each stage is an `Xla` computation that holds StableHLO: its `hlo_module` is
    a `google.protobuf.BytesValue` with a portable artifact, as
    `jaxlib.mlir.dialects.stablehlo.deserialize_portable_artifact` reads it. Parameters
    and results are the leaves of the planned function's arguments and results, by name;
    random keys are raw data.

    Args:
      plan: A plan without loops, whose rounds gather and scatter nothing.
      platform: The platform for which stages are lowered: `cpu`, `cuda` or `tpu`.

    Returns:
      A `federated_language.framework.Lambda`; `.to_proto()` and
      `.formatted_representation()` are what others read. If a stage calls
      `drjax.partition_index()`, there is one more parameter, `group`, int32 at the
      clients: the group index of each.

    Raises:
      EngineError: federated-language is not installed.
      DrjaxValueError: The plan has loops, gathers or scatters.
      MeshError: The plan runs a group on several devices.
      DrjaxTypeError: federated-language has no such dtype.

    Example:
      >>> import drjax, jax.numpy as jnp
      >>> mean = drjax.program(clients=4)(drjax.reduce_mean)
      >>> plan = drjax.make_plan(mean)(jnp.zeros(4))
      >>> print(drjax.contrib.export_federated_language(plan).type_signature)
      (<x={float32}@CLIENTS> -> <result=float32@SERVER>)
    """
    return _Export(plan, platform).computation()


class _Export:
    """The export of one plan as a computation of federated-language, `fl`.

    The stages of the plan are exported if they are not yet. `platform`, for which they
    are lowered, is `cpu`, `cuda` or `tpu`. The plan may have no loops, gathers or
    scatters.
    """

    def __init__(self, plan: Plan, platform: str):
        self.fl = needed(
            "federated_language", "federated-language", "export_federated_language"
        )
        self.platform = platform
        refuse_group_mesh(plan.group_mesh, "federated-language")
        self.plan = plan_from_bytes(
            Path(f"{plan.name}.drjax"), plan_to_bytes(plan), custom_calls=None
        )
        for a_round in plan.rounds:
            _check(plan, a_round)

    def computation(self) -> BuildingBlock:
        """Build the computation from the plan's inputs to its outputs, by name."""
        fl, plan = self.fl, self.plan
        parameters = [(v.name, self._placed(v)) for v in plan.inputs]
        indexed = any(_uses_group_index(r.local) for r in plan.rounds)
        if indexed:
            group = fl.FederatedType(np.int32, fl.CLIENTS)
            parameters.append(("group", group))

        @fl.federated_computation(fl.StructType(parameters))
        def run(operands):
            values = {v.name: operands[i] for i, v in enumerate(plan.inputs)}
            values[_GROUP_INDEX] = operands[len(plan.inputs)] if indexed else None
            for a_round in plan.rounds:
                self._stage(a_round.server, values, fl.SERVER)
                self._stage(a_round.local, values, fl.CLIENTS)
                for reduce in a_round.partials:
                    values[reduce.result.name] = self._reduced(reduce, values)
            self._stage(plan.server, values, fl.SERVER)
            return OrderedDict((v.name, values[v.name]) for v in plan.outputs)

        return run.to_building_block()

    def _tensor(self, value: Value) -> TypeSignature:
        """Return the `federated_language.TensorType` of a global value or of one slice.

        Random keys have the type of their raw data. `DrjaxTypeError`:
        federated-language has no such dtype.
        """
        raw = raw_type(value)
        if not self.fl.is_valid_dtype(raw.dtype.type):
            raise DrjaxTypeError(
                f"federated-language has no {raw.dtype}, the dtype of {value.name} in "
                f"{self.plan.name}."
            )
        return self.fl.TensorType(raw.dtype.type, raw.shape)

    def _placed(self, value: Value) -> TypeSignature:
        """Return the `federated_language.FederatedType` of a value, with its placement.

        A partitioned value is placed at the clients, a global value at the server.
        """
        fl = self.fl
        place = fl.CLIENTS if value.partitioned else fl.SERVER
        return fl.FederatedType(self._tensor(value), place)

    def _reduced(self, reduce: Reduce, values: dict[str, Operand]) -> Operand:
        """Add a reduction to the computation that is built, and return its result."""
        intrinsic = getattr(self.fl, f"federated_{reduce.op}")
        return intrinsic(values[reduce.source.name])

    def _stage(self, stage: Stage, values: dict[str, Operand], place: Any) -> None:
        """Add a stage to the computation that is built, and its outputs to `values`.

        One without outputs is skipped. `place` is `federated_language.SERVER` for a
        server stage, or `CLIENTS` for a local stage, to which global inputs are
        broadcast.
        """
        if stage.empty:
            return
        fl, operands = self.fl, []
        if place is fl.CLIENTS and _uses_group_index(stage):
            operands.append(values[_GROUP_INDEX])
        for value in stage.inputs:
            x = values[value.name]
            sent = place is fl.CLIENTS and not value.partitioned
            operands.append(fl.federated_broadcast(x) if sent else x)
        work = self._work(stage, place is fl.CLIENTS)
        if operands:
            results = fl.federated_map(work, fl.federated_zip(operands))
        else:
            results = fl.federated_eval(work, place)
        values.update((v.name, results[i]) for i, v in enumerate(stage.outputs))

    def _work(self, stage: Stage, local: bool) -> BuildingBlock:
        """Lower an exported stage to an `Xla` computation of federated-language.

        It takes a struct of tensors: for a local stage that uses the group index, int32
        `[]` first; then the inputs of the stage, of partitioned values one slice. It
        returns a struct with the outputs of the stage, in order. Its platform is
        `self.platform`.
        """
        fl, pb = self.fl, importlib.import_module(_PROTOS)
        protobuf = lambda x: importlib.import_module(f"google.protobuf.{x}_pb2")
        exported = exported_of(stage)
        call, consts = exported.per_group.function.call, exported.consts
        indexed = local and _uses_group_index(stage)
        types = [jax.ShapeDtypeStruct((), np.int32)] if indexed else []
        types += [raw_type(v) for v in stage.inputs]

        def run(*args: Array) -> PyTree:
            operands = args if indexed or not local else (np.int32(0), *args)
            return call(*consts, *operands)

        lowered = export.export(
            jax.jit(run, keep_unused=True), platforms=[self.platform]
        )(*types)
        takes = [fl.TensorType(np.dtype(t.dtype).type, t.shape) for t in types]
        gives = [self._tensor(v) for v in stage.outputs]
        function = fl.FunctionType(
            fl.StructType([(None, t) for t in takes]) if takes else None,
            fl.StructType([(None, t) for t in gives]),
        )
        code = protobuf("any").Any()
        code.Pack(protobuf("wrappers").BytesValue(value=lowered.mlir_module_serialized))
        bind = lambda indices: pb.Xla.Binding(
            struct=pb.Xla.StructBinding(
                element=[
                    pb.Xla.Binding(tensor=pb.Xla.TensorBinding(index=i))
                    for i in indices
                ]
            )
        )
        return fl.framework.ConcreteComputation(
            computation_proto=pb.Computation(
                type=function.to_proto(),
                xla=pb.Xla(
                    hlo_module=code,
                    parameter=bind(range(len(takes))) if takes else None,
                    result=bind(range(len(gives))),
                ),
            ),
            context_stack=fl.framework.get_context_stack(),
            annotated_type=function,
        )


# Of which federated-language has a building block.
_REDUCTIONS = {"sum", "mean", "max", "min"}
_PROTOS = "federated_language.proto.computation_pb2"
_GROUP_INDEX = "the index of the client"


def _uses_group_index(stage: Stage) -> bool:
    """Return whether the results of a local stage depend on the group index.

    The StableHLO of its per-group function decides. False if it has none.
    """
    if stage.empty:
        return False
    return _uses_argument(exported_of(stage).per_group.stablehlo, len(stage.inputs) + 1)


@functools.cache
def _uses_argument(code: bytes, from_last: int) -> bool:
    """Return whether the results of StableHLO code may depend on one of its arguments.

    They may if an operation takes the argument, in the function `main` or in one to
    which that passes it. Answers are cached. The code is a portable artifact, in MLIR
    bytecode. `from_last` is the position of the argument from the end, 1 for the last.
    """
    with parsed_module(code) as module:
        functions = {f.name.value: f for f in module.body.operations}
        arguments = functions["main"].arguments
        return _used(arguments[len(arguments) - from_last], functions)


def _used(argument: Any, functions: dict[str, Any]) -> bool:
    """Return whether an operation of an MLIR function takes one of its arguments.

    A call of another function counts only if that function uses the argument in turn;
    any other operation always counts, also the return. `functions` has all functions of
    the MLIR module (`func.func`), by name.
    """
    for use in argument.uses:
        call = use.owner
        if call.name != "func.call":
            return True
        callee = functions[call.attributes["callee"].value]
        if _used(callee.arguments[use.operand_number], functions):
            return True
    return False


# What of a step federated-language cannot say, or None.
_unsayable: Rules[str | None] = Rules("federated-language")


@_unsayable.rule(Stage, Broadcast)
def _sayable(step: Step) -> None:
    return None


@_unsayable.rule(Reduce)
def _reduction(step: Reduce) -> str | None:
    if step.op not in _REDUCTIONS:
        return f"a {step.op} over the groups"
    return "a secure sum of floats" if step.secure else None


@_unsayable.rule(Scatter)
def _slices(step: Scatter) -> str:
    return f"a slice of {step.source.name} for each group: give it to them"


@_unsayable.rule(Gather)
def _all_slices(step: Gather) -> str:
    return "the slices of all groups in one place"


@_unsayable.rule(Fold)
def _folded(step: Fold) -> str:
    return f"a fold in the order of the groups ({step.combine.name})"


@_unsayable.rule(Move)
def _moved(step: Move) -> str:
    return f"slices that move between groups ({step.op})"


@_unsayable.rule(Loop)
def _looped(step: Loop) -> str:
    return f"a loop, {step.name}: export the plan of one round"


def _check(plan: Plan, a_round: Round) -> None:
    """Check that federated-language can express a round of a plan.

    It cannot if the round has a loop, a scatter, a gather, a fold, a move of slices or
    a secure sum.
    """
    what = next(filter(None, map(_unsayable, a_round.steps)), None)
    if what is not None:
        raise DrjaxValueError(
            f"federated-language cannot say what {plan.name} has: {what}."
        )
