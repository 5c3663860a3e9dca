"""Trace the equations of a stage as a jaxpr of its inputs.

Input: the equations of a stage, what it takes and what it returns. Output: a `Stage`.

Invariants: a stage is a function of its inputs, and so type-checked; the types of its
results are compared with those of the program. Sharp edges: bitwise-observable results
of a local stage are fenced, as XLA could compute them twice by itself.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, assert_never

import jax
import numpy as np

from drjax import _compat, primitives
from drjax._compat.jax_types import Literal
from drjax._compat.types import Array, Atom, ClosedJaxpr, Eqn, Var
from drjax._jaxprs.walk import variables
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
    SliceOperand,
    StageValues,
)
from drjax._primitives.map_columns import evaluate_columns
from drjax.plan import Stage, Value


def trace_server_stage(
    eqns: Sequence[Eqn], results: Sequence[Var], values: StageValues
) -> Stage:
    """Trace equations on global values as a stage of the server.

    Its inputs are the variables that the equations use and do not define, in the order
    of their first use, without constants of the program; its outputs are `results`,
    results of the equations or constants.
    """
    consts = values.program.consts
    defined = {v for e in eqns for v in e.outvars}
    # A dict, as a set would make the sequence of inputs depend on identities.
    operands = dict.fromkeys(v for e in eqns for v in variables(e.invars))
    inputs = [v for v in operands if v not in defined and v not in consts]

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
    # As they are: most programs spend their planning on equations of the server.
    jaxpr = _compat.jaxpr_of_equations(eqns, inputs, results, consts)
    if jaxpr is not None and all(e.primitive is not columns_p for e in eqns):
        return _stage("server", ins, outs, jaxpr)
    return _trace("server", ins, outs, run)


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
    inputs += [values.value(x.var) for x in parts.slices]
    outputs = [*map(values.value, parts.saved)]
    outputs += [values.outgoing(*x) for x in parts.outgoing]
    outputs += [values.forwarded(v, index) for v in parts.forwarded]
    names = dict.fromkeys(
        function_name(e.params["name"])
        for e in parts.equations
        if e.primitive is primitives.map_fn_p
    )

    def run(group: Array, *args: Array) -> list[Array]:
        return _run_group(parts, kinds, values, group, args)

    partition = kinds.partition
    assert partition is not None
    name = " + ".join(names) or "slices"
    return _trace(name, inputs, outputs, run, over=(partition,))


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
        closed = [x.value if isinstance(x, ConstantOperand) else env[x] for x in consts]
        return fn(*closed, *args[len(copies) :])

    inputs = [*(values.value(x.var) for x in copies), *sides]
    name = function_name(eqn.params["name"])
    return _trace(name, inputs, outputs, run)


def _run_group(
    parts: LocalStageParts,
    kinds: Environment,
    values: StageValues,
    group: Array,
    args: Sequence[Array],
) -> list[Array]:
    """Evaluate a local stage for one group, from its inputs to its outputs."""
    inputs = [*parts.broadcast, *parts.scatter, *parts.slices]
    # By equality of operands: several equations read the same input.
    env: dict[Operand, Any] = dict(zip(inputs, args, strict=True))

    def read(operand: Operand) -> Any:
        match operand:
            case ConstantOperand():
                return operand.value
            case GroupIndexOperand():
                return group
            case ExpandedOperand():
                return operand.expand(read(operand.operand))
            case BroadcastOperand() | ScatteredOperand() | SliceOperand():
                return env[operand]
            case _:
                assert_never(operand)

    for eqn in parts.equations:
        operands = list(map(read, values.operands(eqn)))
        again = id(eqn) in parts.rematerialized or _compat.is_rematerialized(eqn)
        if eqn.primitive is fence_p:
            # Copies that the stage takes anyway, so that nothing more is sent.
            copies = map(BroadcastOperand, eqn.params["after"])
            operands += [env[copy] for copy in copies if copy in env]
            outs = fence_p.bind(*operands)[: len(eqn.outvars)]
        else:
            with _compat.rematerializing() if again else contextlib.nullcontext():
                outs = _bind_for_group(eqn, kinds, group, operands)
        for var, out in zip(eqn.outvars, outs, strict=True):
            # An observable result of a rematerialized equation is an input of this
            # stage, and must not be replaced by its second value.
            if var in parts.computed:
                env[SliceOperand(var)] = _fence(out) if var in parts.fenced else out
    return [
        *(env[SliceOperand(v)] for v in parts.saved),
        *(read(values.slice_of(*x)) for x in parts.outgoing),
        *(env[SliceOperand(v)] for v in parts.forwarded),
    ]


def _bind_for_group(
    eqn: Eqn, kinds: Environment, group: Array, operands: list[Array]
) -> list[Array]:
    """Bind an equation on partitioned values for one group, and return its slices.

    It is a `map_fn` over the plan's partition, or one that can be unbatched: then an
    operand is whole if its entry in `kinds.unbatched(eqn).in_axes` is None.
    """
    if eqn.primitive is primitives.map_fn_p:
        # Evaluated, not bound: a stage has no building block of its plan's partition.
        with jax.named_scope(_compat.scope_of(eqn.primitive, eqn.params)):
            return group_index.evaluate_for_group(
                eqn.params["jaxpr"], group, kinds.partition, *operands
            )
    unbatched = kinds.unbatched(eqn)
    assert unbatched is not None
    return unbatched.run(eqn, operands)


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
    return Stage(name, tuple(inputs), tuple(outputs), jaxpr, over=over)
