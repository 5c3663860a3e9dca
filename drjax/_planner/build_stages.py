"""Build the stages of a plan: split an inlined jaxpr at its communication.

Input: the kinds of an inlined jaxpr, and the plan's names and kinds of results. Output:
a `Plan`, whose rounds are those of `RoundAssignment` and whose loops hold plans of
their bodies.

For each round, `rematerialize_rounds.py` determines what its local stage takes,
computes and returns. The server's stage holds the global equations that something
needs, by liveness, from the last round back to the first: it computes in each round
what the local stages and loops of this one and of later rounds take, and the results.

Invariants: the names of values depend on the order in which stages ask for them, which
is that of the rounds: local stages first, then loops. Sharp edges: constants that
others need are results of the server's first stage.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeAlias

from drjax._compat.jax_types import Literal
from drjax._compat.types import Eqn, Var
from drjax._jaxprs.walk import split_scan, split_while, variables
from drjax._planner.bitwise_observable import bitwise_observable
from drjax._planner.gathered_columns import columns_loop
from drjax._planner.later_sums import later_sums
from drjax._planner.naming import function_name
from drjax._planner.partitioning.environment import Environment, LoopKinds
from drjax._planner.partitioning.kind import GLOBAL, Kind, shift_axis
from drjax._planner.rematerialize_rounds import LocalWork
from drjax._planner.rounds import RoundAssignment
from drjax._planner.scans import step_axes
from drjax._planner.stage_values import LocalStageParts, StageValues
from drjax._planner.trace_stages import (
    trace_local_stage,
    trace_server_stage,
)
from drjax.plan import (
    Broadcast,
    Columns,
    Cond,
    Exchange,
    Loop,
    Plan,
    Program,
    Scan,
    Scatter,
    Stage,
    Step,
    Value,
    While,
)


@dataclass(frozen=True)
class PlanSignature:
    """The name of a plan, its arguments and its results.

    Attributes:
      name: The name of the plan.
      arguments: A name for each argument of the inlined jaxpr.
      result_kinds: The kind that each result must have, global or partitioned. A result
        that is inferred to be global may be required partitioned.
      results: A name for each result; (): results are named by their equations.
      in_tree: The `PyTreeDef` of the arguments; None: they are flat.
      out_tree: The `PyTreeDef` of the results; None: they are flat.
    """

    name: str
    arguments: Sequence[str]
    result_kinds: Sequence[Kind]
    results: Sequence[str] = ()
    in_tree: Any = None
    out_tree: Any = None


def build_plan(
    kinds: Environment,
    signature: PlanSignature,
    rematerialize: bool,
    skips: bool = False,
) -> Plan:
    """Build the plan of an inlined jaxpr: split the jaxpr at its communication.

    `rematerialize` says whether a round rematerializes the results of earlier rounds
    that it needs, instead of each group saving them. Never rematerialized are equations
    with effects, and bitwise-observable variables: those whose exact bits the program
    may compare. `skips`: as in `LocalWork`.
    """
    program, result_kinds = kinds.program, signature.result_kinds
    rounds = RoundAssignment(kinds)
    if rematerialize:
        observable = program.memoize(bitwise_observable, program, not skips)
        if later := later_sums(kinds, rounds, observable):
            rounds = RoundAssignment(kinds, later)
    values = StageValues(kinds, signature.arguments, signature.results)
    work = LocalWork(kinds, rounds, values, result_kinds, rematerialize, skips)
    indices = range(work.num_rounds)
    # Local stages and loops first: they determine which global values are live.
    parts = [work.parts(index) for index in indices]
    local_stages = [trace_local_stage(parts[i], kinds, values, i) for i in indices]
    loops = [
        (
            *(_columns(e, values) for e in rounds.columns.get(i, ())),
            *(
                _loop(e, kinds, values, rematerialize, skips)
                for e in rounds.loops.get(i, ())
            ),
        )
        for i in indices
    ]
    results = list(zip(program.outvars, result_kinds, strict=True))
    # A result that is required partitioned is an output of a local stage, which takes
    # what it needs of the server as a broadcast or scattered value.
    live = {v for v, kind in results if not kind.partitioned}
    live |= _globals_of_groups(kinds, rounds, parts)
    *server_stages, last_stage = _server_stages(rounds, values, live, work.num_rounds)
    steps: list[Step] = []
    for i in indices:
        steps += [
            server_stages[i],
            *(Broadcast(values.value(x.var)) for x in parts[i].broadcast),
            *(
                Scatter(values.value(x.var), values.scattered(x.var, x.axis))
                for x in parts[i].scatter
            ),
            local_stages[i],
            *_exchanges(rounds, kinds, values, parts[i], i),
            *loops[i],
        ]
    return Plan(
        signature.name,
        kinds.partition,
        (*steps, last_stage),
        tuple(map(values.value, program.invars)),
        tuple(_value_of_kind(values, v, kind) for v, kind in results),
        signature.in_tree,
        signature.out_tree,
    )


def _value_of_kind(values: StageValues, var: Var, kind: Kind) -> Value:
    """Return the `Value` of an operand of a loop, or a result of the plan, of a kind.

    It is that of `var` itself. If `var` is required partitioned, but is global or the
    result of a broadcast, scatter or `partition_index`, it is a second `Value`: that of
    its slices, which a local stage returns.
    """
    return values.value(var) if kind.axis is None else values.outgoing(var, kind.axis)


def _globals_of_groups(
    kinds: Environment, rounds: RoundAssignment, parts: Sequence[LocalStageParts]
) -> set[Var]:
    """Collect the global variables that are taken outside of the server's stages.

    Local stages, folds (the neutral state), moves (the index, or a population), loops
    and work on coordinates take them.
    """
    taken = {x.var for p in parts for x in (*p.broadcast, *p.scatter)}
    for index in rounds.exchanges:
        for eqn, rule in rounds.exchanges_of(index):
            taken |= {*variables(rule.globals_of(eqn, kinds.partition))}
    for eqns in rounds.loops.values():
        for eqn in eqns:
            operands = zip(eqn.invars, kinds.loops[eqn].operand_kinds, strict=True)
            # Operands that must be partitioned are outputs of local stages.
            taken |= {v for v, kind in operands if not kind.partitioned}
    taken |= {v for e in chain(*rounds.columns.values()) for v in variables(e.invars)}
    return taken


def _server_stages(
    rounds: RoundAssignment, values: StageValues, live: set[Var], num_rounds: int
) -> list[Stage]:
    """Trace the server's stage of each round, and the one after the last round.

    `live` has the global variables that local stages, folds, moves, loops and results
    of the program take; the operands of live equations are added to it. Each of the
    `num_rounds + 1` stages evaluates the live equations of its round and returns those
    of their results that others take; the first also returns the constants in `live`.
    """
    consts: dict[Any, Any] = values.program.consts
    stages = []
    # Backward, as the server computes in each round what later rounds need. It keeps
    # its values from round to round, so that only their definition matters: a stage
    # that needs none of them is empty.
    # What depends on the last communication is in round num_rounds, after all rounds.
    for index in reversed(range(num_rounds + 1)):
        eqns: list[Any] = []
        operands = set[Any]()  # of the stage's own equations
        for eqn in reversed(rounds.server.get(index, [])):
            needed = not (
                live.isdisjoint(eqn.outvars) and operands.isdisjoint(eqn.outvars)
            )
            if eqn.effects or needed:
                eqns.append(eqn)
                operands.update([v for v in eqn.invars if type(v) is not Literal])
        eqns.reverse()
        results = [v for e in eqns for v in e.outvars if v in live]
        live |= operands - consts.keys()  # constants are part of a stage's code
        if index == 0:
            # Constants that others need leave the server's first stage.
            results = [c for c in consts if c in live] + results
        stages.append(trace_server_stage(eqns, results, values))
    return stages[::-1]


def _exchanges(
    rounds: RoundAssignment,
    kinds: Environment,
    values: StageValues,
    parts: LocalStageParts,
    index: int,
) -> Iterator[Exchange]:
    """Build the exchanges after the local stage of a round."""
    forwarded = {*parts.forwarded}
    for eqn, rule in rounds.exchanges_of(index):
        slices = rule.slices(eqn, kinds.partition)
        # Backends combine outputs of the round's own stage, partly while it runs; hence
        # slices of earlier rounds pass through it.
        through = forwarded if rule.passes_through else ()
        sources = [
            values.forwarded(v, index) if v in through else values.outgoing(v, 0)
            for v in slices
        ]
        yield rule.make(eqn, sources, values)


# -------------------------------------------------------------------------------------
# Loops


def _columns(eqn: Eqn, values: StageValues) -> Columns:
    """Build the step of a `columns` equation: work on each coordinate of slices."""
    inputs, outputs = (list(map(values.value, vs)) for vs in (eqn.invars, eqn.outvars))
    name, function = values.names.fresh("columns"), function_name(eqn.params["name"])
    return columns_loop(eqn, name, function, inputs, outputs)


def _loop(
    eqn: Eqn,
    kinds: Environment,
    values: StageValues,
    rematerialize: bool,
    skips: bool,
) -> Loop:
    """Build the `Loop` of a `scan`, `while`, `cond` or `program`.

    It has a plan for each body. `kinds` and `values` are those of the jaxpr that
    contains it.
    """
    op, loop = eqn.primitive.name, kinds.loops[eqn]
    operands = zip(eqn.invars, loop.operand_kinds, strict=True)
    inputs = tuple(_value_of_kind(values, v, kind) for v, kind in operands)
    outputs = tuple(map(values.value, eqn.outvars))
    name = values.names.fresh(op)
    names = [values.names.of(v) for v in eqn.invars]
    arguments, results, fields = _BODIES[op](eqn, names, loop)
    if op == "program":
        (body,) = loop.bodies
        results = [[body[v] for v in body.program.outvars]]
    elif op == "scan":
        # A body sees one step: a stack of partitioned values has its groups one axis
        # earlier in it, unless it takes blocks of steps.
        _, axes = step_axes(eqn, loop.bodies[0].program)
        carry, stacks = results[0][: fields["carry"]], results[0][fields["carry"] :]
        steps = map(shift_axis, stacks, (-axis for axis in axes))
        results = [[*carry, *steps]]
    bodies = tuple(
        build_plan(
            body,
            PlanSignature(f"{name} body {i}", arguments[i], results[i]),
            rematerialize,
            skips,
        )
        for i, body in enumerate(loop.bodies)
    )
    return _LOOPS[op](name, inputs, outputs, bodies, **fields)


# The bodies of a loop, by its primitive: from its equation, the names of its operands
# and its kinds to `(names of arguments of each body, kinds of results of
# each body, further fields of the Loop)`.
LoopBodies: TypeAlias = tuple[
    Sequence[Sequence[str]], Sequence[Sequence[Kind]], dict[str, Any]
]


def _scan(eqn: Eqn, names: Sequence[str], loop: LoopKinds) -> LoopBodies:
    """Describe the body of a scan, one step.

    One step of a stack named `x` is named `x[step]`. The caller replaces the kinds of
    stacks by those of their steps.
    """
    consts, carry, xs = split_scan(eqn, names)
    fields = {
        "consts": (len(consts),),
        "carry": len(carry),
        "length": eqn.params["length"],
        "reverse": eqn.params["reverse"],
    }
    arguments = [*consts, *carry, *(f"{x}[step]" for x in xs)]
    return [arguments], [loop.result_kinds], fields


def _while(eqn: Eqn, names: Sequence[str], loop: LoopKinds) -> LoopBodies:
    """Describe the bodies of a while: its condition, and a step."""
    cond_consts, body_consts, carry = split_while(eqn, names)
    fields = {"consts": (len(cond_consts), len(body_consts)), "carry": len(carry)}
    # Body 0 is the condition.
    arguments = [[*cond_consts, *carry], [*body_consts, *carry]]
    return arguments, [[GLOBAL], loop.result_kinds], fields


def _cond(eqn: Eqn, names: Sequence[str], loop: LoopKinds) -> LoopBodies:
    # The first operand is the index, which no branch takes.
    """Describe the branches of a cond, which take all operands but the index."""
    count = len(loop.bodies)
    return [names[1:]] * count, [loop.result_kinds] * count, {}


def _program(eqn: Eqn, names: Sequence[str], loop: LoopKinds) -> LoopBodies:
    # The kinds of its results are those of another partition, in the body.
    """Describe the body of a program over another partition, which takes all operands.

    The caller replaces the kinds of the results by those that the body has over the
    other partition.
    """
    return [names], [loop.result_kinds], {}


_LOOPS: dict[str, Callable[..., Loop]] = {
    loop.op: loop for loop in (Scan, While, Cond, Program)
}
_BODIES = {"scan": _scan, "while": _while, "cond": _cond, "program": _program}
