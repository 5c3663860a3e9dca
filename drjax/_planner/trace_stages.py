"""Trace the equations of a stage as a jaxpr of its inputs.

Input: the equations of a stage, what it takes and what it returns. Output: a `Stage`.

Invariants: a stage is a function of its inputs, and so type-checked; the types of its
results are compared with those of the program. Sharp edges: bitwise-observable results
of a local stage are fenced, as XLA could compute them twice by itself.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from drjax import _compat, primitives
from drjax._compat.jax_types import Literal, Variable
from drjax._compat.types import Array, Atom, ClosedJaxpr, Eqn, Var
from drjax._context import group_mesh
from drjax._partition import Partition
from drjax._planner import group_index
from drjax._planner.fences import fence_p
from drjax._planner.gathered_columns import columns_p
from drjax._planner.naming import function_name
from drjax._planner.partitioning.environment import Environment
from drjax._planner.stage_values import (
    BroadcastOperand,
    ConstantOperand,
    ExpandedOperand,
    GroupIndexOperand,
    LocalStageParts,
    Operand,
    ScatteredOperand,
    StageValues,
)
from drjax._primitives.map_columns import evaluate_columns
from drjax._sharding.group_mesh import axes_of, is_bound
from drjax.plan import Stage, Value

T = TypeVar("T")


def trace_server_stage(
    eqns: Sequence[Eqn], results: Sequence[Var], values: StageValues
) -> Stage:
    """Trace equations on global values as a stage of the server.

    Its inputs are the variables that the equations use and do not define, in the order
    of their first use, without constants of the program; its outputs are `results`,
    results of the equations or constants.
    """
    consts = values.program.consts
    # A dict, as a set would make the sequence of inputs depend on identities.
    taken: dict[Any, None] = {}
    defined = set[Any]()
    for eqn in eqns:
        for v in eqn.invars:
            if type(v) is not Literal and v not in defined:
                taken[v] = None
        defined.update(eqn.outvars)
    inputs = [v for v in taken if v not in consts]

    def run(*args: Array) -> list[Array]:
        env = {**consts, **dict(zip(inputs, args, strict=True))}
        for eqn in eqns:
            operands = [v.val if isinstance(v, Literal) else env[v] for v in eqn.invars]
            if eqn.primitive is columns_p:
                # Evaluated, not bound: no stage has an equation of the planner's own.
                outs = evaluate_columns(*operands, **eqn.params)
            else:
                outs = _compat.bind_equation(eqn, operands)
            env.update(zip(eqn.outvars, outs, strict=True))
        return [env[v] for v in results]

    ins, outs = [*map(values.value, inputs)], [*map(values.value, results)]
    fences = [v for e in eqns if e.primitive is fence_p for v in e.params["after"]]
    after = tuple(values.value(v) for v in fences if values.kinds[v].partitioned)
    # As they are: most programs spend their planning on equations of the server.
    try:
        if any(e.primitive is columns_p for e in eqns):
            raise _compat.NotWritten
        jaxpr = _compat.jaxpr_of_equations(eqns, inputs, results, consts)
        stage = _stage("server", ins, outs, jaxpr)
    except _compat.NotWritten:
        stage = _trace("server", ins, outs, run)
    return dataclasses.replace(stage, after=after)


def trace_local_stage(
    parts: LocalStageParts, kinds: Environment, values: StageValues, index: int
) -> Stage:
    """Trace the local stage of a round, as a function of one group.

    It is named by its mapped functions, `slices` if there are none. Its jaxpr takes the
    group index, int32 `[]`, then copies of global values, slices of global values, and
    slices of partitioned values for this group. It returns this group's slices of the
    variables in `parts.saved` (it computes them), `parts.outgoing` (it derives them
    from global values or the group index) and `parts.forwarded` (it takes and returns
    them unchanged), in this order.
    """
    inputs = [values.value(x.var) for x in parts.broadcast]
    inputs += [values.scattered(x.var, x.axis) for x in parts.scatter]
    inputs += map(values.value, parts.slices)
    outputs = [*map(values.value, parts.saved)]
    outputs += [values.outgoing(*x) for x in parts.outgoing]
    outputs += [values.forwarded(v, index) for v in parts.forwarded]
    names = dict.fromkeys(
        function_name(e.params["name"])
        for e in parts.equations
        if e.primitive is primitives.map_fn_p
    )

    partition = kinds.partition
    assert partition is not None

    def run(group: Array, *args: Array) -> list[Array]:
        traced = _Traced(partition, values, group)
        return _run_group(parts, values, group, args, traced)

    name = " + ".join(names) or "slices"
    try:
        jaxpr = _write_group(parts, partition, values, inputs)
    except _compat.NotWritten:
        return _trace(name, inputs, outputs, run, over=(partition,))
    return _stage(name, inputs, outputs, jaxpr, over=(partition,))


def trace_combine_stage(
    eqn: Eqn, closed_over: Sequence[Atom], values: StageValues
) -> Stage:
    """Trace the function of two states of a fold as a stage, named by the function.

    Its inputs are the values that the function closes over, each once and without
    scalar constants, then the leaves of the left state, and those of the right one; its
    outputs are the leaves of the combined state. The `Value`s of the two states are
    added to `values`.
    """
    consts = [values.whole_of(v) for v in closed_over]
    copies = list(dict.fromkeys(x for x in consts if isinstance(x, BroadcastOperand)))
    outputs = list(map(values.value, eqn.outvars))
    sides = [values.state(v, side) for side in ("left", "right") for v in eqn.outvars]
    fn = _compat.jaxpr_as_fun(eqn.params["jaxpr"])

    def run(*args: Array) -> Sequence[Array]:
        env = dict(zip(copies, args, strict=False))
        known: list[Any] = consts
        closed = [env[x] if isinstance(x, BroadcastOperand) else x.val for x in known]
        return fn(*closed, *args[len(copies) :])

    inputs = [*(values.value(x.var) for x in copies), *sides]
    name = function_name(eqn.params["name"])
    return _trace(name, inputs, outputs, run)


def _write_group(
    parts: LocalStageParts,
    partition: Partition,
    values: StageValues,
    inputs: Sequence[Value],
) -> ClosedJaxpr:
    """Write the jaxpr of a local stage; `NotWritten` if it has to be traced."""
    if parts.fenced or any(e.primitive is fence_p for e in parts.equations):
        raise _compat.NotWritten
    index = (), np.dtype(np.int32)
    writer = _compat.Writer([index, *((v.shape, v.dtype) for v in inputs)])
    group, *args = writer.args
    written = _Written(partition, values, writer)
    return writer.closed(_run_group(parts, values, group, args, written))


def _run_group(
    parts: LocalStageParts,
    values: StageValues,
    group: T,
    args: Sequence[T],
    by: "_Traced | _Written",
) -> list[T]:
    """Evaluate a local stage for one group, from its inputs to its outputs.

    It is traced, for arrays, or written, for variables.
    """
    inputs = [*parts.broadcast, *parts.scatter, *parts.slices]
    # By equality of operands: several equations read the same input.
    env: dict[Any, Any] = dict(zip(inputs, args, strict=True))

    def read(operand: Operand) -> Any:
        match operand:
            case BroadcastOperand() | ScatteredOperand():
                return env[operand]
            case ConstantOperand():
                return by.constant(operand.val)
            case GroupIndexOperand():
                return group
            case ExpandedOperand():
                return by.expanded(operand, read(operand.operand))
            case _:
                return by.literal(operand) if type(operand) is Literal else env[operand]

    fenced = parts.fenced
    for eqn in parts.equations:
        operands: list[Any] = [
            env[x] if type(x) is Variable else read(x) for x in values.operands(eqn)
        ]
        again = id(eqn) in parts.rematerialized or _compat.is_rematerialized(eqn)
        if eqn.primitive is fence_p:
            # Copies that the stage takes anyway, so that nothing more is sent.
            copies = map(BroadcastOperand, eqn.params["after"])
            operands += [env[copy] for copy in copies if copy in env]
            outs = fence_p.bind(*operands)[: len(eqn.outvars)]
        elif again:
            with _compat.rematerializing():
                outs = by.work(eqn, operands)
        else:
            outs = by.work(eqn, operands)
        for var, out in zip(eqn.outvars, outs, strict=True):
            # An observable result of a rematerialized equation is an input of this
            # stage, and must not be replaced by its second value.
            if not again or var in parts.computed:
                env[var] = _fence(out) if var in fenced else out
    return [
        *(env[v] for v in parts.saved),
        *(read(values.slice_of(*x)) for x in parts.outgoing),
        *(env[v] for v in parts.forwarded),
    ]


class _Traced:
    """The work of one group on arrays."""

    def __init__(self, partition: Partition, values: StageValues, group: Array) -> None:
        self._partition, self._values, self._group = partition, values, group

    def literal(self, x: Literal) -> Any:
        return x.val

    def constant(self, x: Any) -> Any:
        return x

    def expanded(self, operand: ExpandedOperand, copy: Array) -> Array:
        return operand.expand(copy)

    def work(self, eqn: Eqn, operands: list[Array]) -> list[Array]:
        """Bind an equation on partitioned values for one group; return its slices.

        It is a `map_fn` over the plan's partition, or one that can be unbatched: then
        an operand is whole if its entry in `in_axes` is None.
        """
        if eqn.primitive is primitives.map_fn_p:
            # Evaluated, not bound: a stage has no block of its plan's partition.
            with jax.named_scope(_compat.scope_of(eqn.primitive, eqn.params)):
                return group_index.evaluate_for_group(
                    eqn.params["jaxpr"], self._group, self._partition, *operands
                )
        return self._values.unbatched(eqn).run(eqn, operands)


class _Written:
    """The work of one group on the variables of a jaxpr that is written."""

    def __init__(
        self, partition: Partition, values: StageValues, writer: _compat.Writer
    ) -> None:
        self._partition, self._values, self._writer = partition, values, writer

    def literal(self, x: Literal) -> Atom:
        return x

    def constant(self, x: Any) -> Atom:
        return _compat.literal_of(x)

    def expanded(self, operand: ExpandedOperand, copy: Atom) -> Atom:
        raise _compat.NotWritten

    def work(self, eqn: Eqn, operands: list[Atom]) -> list[Atom]:
        writer = self._writer
        if eqn.primitive is primitives.map_fn_p:
            if group_index.uses_group_index(eqn.params["jaxpr"], self._partition):
                raise _compat.NotWritten
            with jax.named_scope(_compat.scope_of(eqn.primitive, eqn.params)):
                return writer.jaxpr(eqn.params["jaxpr"], operands)
        kinds = self._values.kinds
        if kinds.is_pointwise(eqn) and len(eqn.outvars) == 1:
            if "sharding" not in eqn.params:  # as `elementwise` has it, but faster
                axis = kinds[eqn.outvars[0]].axis
                return writer.pointwise(eqn, operands, axis, eqn.params)
        unbatched = self._values.unbatched(eqn)
        if not unbatched.pointwise:
            raise _compat.NotWritten
        params = eqn.params if unbatched.params is None else unbatched.params
        return writer.pointwise(eqn, operands, unbatched.out_axes[0], params)


def _fence(x: object) -> Any:
    """Put an optimization barrier behind `x`, a bitwise-observable slice; returns it.

    Otherwise XLA may fuse the equation that computes it into each of its users, and
    round differently in each. Constants and random keys are returned as they are.
    """
    if not isinstance(x, jax.Array):  # a constant
        return x
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended):
        return x
    return jax.lax.optimization_barrier(x)


def _trace(
    name: str,
    inputs: Sequence[Value],
    outputs: Sequence[Value],
    run: Callable[..., Sequence[Array]],
    over: tuple[Partition, ...] = (),
) -> Stage:
    """Trace `run` as a stage, without dead code, and assert the types of its results.

    It takes an array for each input, of a partitioned value the slice of one group;
    `over` a partition, the group index, int32 `[]`, before them.
    """
    avals = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in inputs]
    if over:
        avals = [jax.ShapeDtypeStruct((), np.int32), *avals]
    return _stage(name, inputs, outputs, jax.make_jaxpr(run)(*avals), over)


def _stage(
    name: str,
    inputs: Sequence[Value],
    outputs: Sequence[Value],
    jaxpr: ClosedJaxpr,
    over: tuple[Partition, ...] = (),
) -> Stage:
    """Make a stage from its jaxpr, without dead code."""
    # An equation may have been included for one of several results, or as the operand
    # of an equation whose result is a constant.
    jaxpr = _compat.without_dead_code(jaxpr)
    # A wrong unbatching rule often changes a type, and then fails here.
    avals_out: list[Any] = jaxpr.out_avals
    for aval, value in zip(avals_out, outputs, strict=True):
        assert (aval.shape, aval.dtype) == (value.shape, value.dtype), (aval, value)
    mesh = group_mesh.value
    mesh = axes_of(mesh) if mesh is not None and is_bound(jaxpr) else ()
    return Stage(name, tuple(inputs), tuple(outputs), jaxpr, over=over, mesh=mesh)
