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

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from drjax._jaxprs.walk import split_scan, split_while, variables
from drjax._planner.gathered_columns import columns_loop
from drjax._planner.naming import function_name
from drjax._planner.partitioning.environment import Environment
from drjax._planner.partitioning.kind import GLOBAL, Kind, shift_axis
from drjax._planner.rematerialize_rounds import LocalStageParts, LocalWork
from drjax._planner.rounds import (
    RoundAssignment,
    closed_over_by,
    move_name,
    reduction,
    states_of,
)
from drjax._planner.stage_values import StageValues
from drjax._planner.trace_stages import (
    trace_combine_stage,
    trace_local_stage,
    trace_server_stage,
)
from drjax._primitives.routes import partitions_of
from drjax.plan import Fold, Loop, Move, Plan, Reduce, Round, Stage, Value


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
    kinds: Environment, signature: PlanSignature, rematerialize: bool
) -> Plan:
    """Build the plan of an inlined jaxpr: split the jaxpr at its communication.

    Args:
      kinds: The kind of each variable, with the inlined jaxpr as `kinds.program`.
      signature: The name of the plan, its arguments and results.
      rematerialize: Whether a round rematerializes the results of earlier rounds that
        it needs, instead of each group saving them. Never rematerialized are equations
        with effects, and bitwise-observable variables: those whose exact bits the
        program may compare.

    Returns:
      The plan, and in its loops the plans of their bodies.
    """
    program, result_kinds = kinds.program, signature.result_kinds
    rounds = RoundAssignment(kinds)
    values = StageValues(kinds, signature.arguments, signature.results)
    work = LocalWork(kinds, rounds, values, result_kinds, rematerialize)
    indices = range(work.num_rounds)
    # Local stages and loops first: they determine which global values are live.
    parts = [work.parts(index) for index in indices]
    local_stages = [trace_local_stage(parts[i], kinds, values, i) for i in indices]
    loops = [
        (
            *(_columns(e, values) for e in rounds.columns.get(i, ())),
            *(_loop(e, kinds, values, rematerialize) for e in rounds.loops.get(i, ())),
        )
        for i in indices
    ]
    results = list(zip(program.outvars, result_kinds, strict=True))
    # A result that is required partitioned is an output of a local stage, which takes
    # what it needs of the server as a broadcast or scattered value.
    live = {v for v, kind in results if not kind.partitioned}
    live |= _globals_of_groups(kinds, rounds, parts)
    *server_stages, last_stage = _server_stages(rounds, values, live, work.num_rounds)
    return Plan(
        signature.name,
        kinds.partition,
        tuple(
            Round(
                server_stages[i],
                tuple(values.value(x.var) for x in parts[i].broadcast),
                tuple(
                    (values.value(x.var), values.scattered(x.var, x.axis))
                    for x in parts[i].scatter
                ),
                local_stages[i],
                _reduces(rounds, values, parts[i], i),
                tuple(_move(eqn, kinds, values) for eqn in rounds.moves.get(i, ())),
                loops[i],
                tuple(
                    _fold(eqn, values, parts[i], i) for eqn in rounds.folds.get(i, ())
                ),
            )
            for i in indices
        ),
        last_stage,
        tuple(map(values.value, program.invars)),
        tuple(_value_of_kind(values, v, kind) for v, kind in results),
        signature.in_tree,
        signature.out_tree,
    )


def _value_of_kind(values: StageValues, var, kind: Kind) -> Value:
    """Return the `Value` of a variable that is required to have a kind.

    A value that does not exist yet is created and recorded in `values`.

    Args:
      values: The `Value` of each variable of the inlined jaxpr.
      var: The variable, an operand of a loop or a result of the plan.
      kind: Its required kind, global or partitioned.

    Returns:
      The `Value` of `var` itself. If it is required partitioned, but is global or the
      result of a broadcast, scatter or `partition_index`, a second `Value`: that of its
      slices, which a local stage returns.
    """
    return values.value(var) if kind.axis is None else values.outgoing(var, kind.axis)


def _globals_of_groups(
    kinds: Environment, rounds: RoundAssignment, parts: Sequence[LocalStageParts]
) -> set[Any]:
    """Collect the global variables that are taken outside of the server's stages.

    Local stages, folds, moves, loops and work on coordinates take them.

    A fold reduces the groups' states by a function of two states, and takes a neutral
    state. A move sends slices between groups, and takes an index, or a population.

    Args:
      kinds: The kinds of the variables; `kinds.loops` has those of loops' operands.
      rounds: The assignment of equations to rounds, with their folds, moves and loops.
      parts: For each round what its local stage takes, computes and returns.

    Returns:
      A new set of variables, which the server must compute.
    """
    taken = {x.var for p in parts for x in (*p.broadcast, *p.scatter)}
    for eqns in rounds.folds.values():
        for eqn in eqns:
            # What the function closes over is among what local stages take.
            init = eqn.invars[len(closed_over_by(eqn)) : -eqn.params["n_states"]]
            taken |= {*variables(init)}
    for eqns in rounds.moves.values():
        # The first operand is an output of a local stage, unless it is a population;
        # the second is the index.
        for eqn in eqns:
            first = partitions_of(eqn)[0] == kinds.partition
            taken |= {*variables(eqn.invars[first:])}
    for eqns in rounds.loops.values():
        for eqn in eqns:
            operands = zip(eqn.invars, kinds.loops[eqn].operand_kinds, strict=True)
            # Operands that must be partitioned are outputs of local stages.
            taken |= {v for v, kind in operands if not kind.partitioned}
    taken |= {v for e in chain(*rounds.columns.values()) for v in variables(e.invars)}
    return taken


def _server_stages(
    rounds: RoundAssignment, values: StageValues, live: set[Any], num_rounds: int
) -> list[Stage]:
    """Trace the server's stage of each round, and the one after the last round.

    The server computes in each round what that round or a later one needs. An equation
    is live if it has effects, or if one of its results is in `live`.

    Args:
      rounds: The assignment of equations to rounds; `rounds.server` lists for each
        round its equations on global values.
      values: The `Value` (name, shape and dtype) of each variable.
      live: The global variables that local stages, folds, moves, loops and results of
        the program take. The operands of live equations are added to this set.
      num_rounds: The number of rounds.

    Returns:
      `num_rounds + 1` stages, in order. Each evaluates the live equations of its round
      and returns their results that are in `live`; the first also returns the constants
      in `live`. A stage without live equations is empty.
    """
    consts: dict[Any, Any] = values.program.consts
    stages = []
    # Backward, as the server computes in each round what later rounds need. It keeps
    # its values from round to round, so that only their definition matters: a stage
    # that needs none of them is empty.
    # What depends on the last communication is in round num_rounds, after all rounds.
    for index in reversed(range(num_rounds + 1)):
        eqns: list[Any] = []
        for eqn in reversed(rounds.server.get(index, [])):
            if eqn.effects or any(v in live for v in eqn.outvars):
                eqns.append(eqn)
                live.update(variables(eqn.invars))
        eqns.reverse()
        results = [v for e in eqns for v in e.outvars if v in live]
        if index == 0:
            # Constants that others need leave the server's first stage.
            results = [c for c in consts if c in live] + results
        stages.append(trace_server_stage(eqns, results, values))
    return stages[::-1]


def _reduces(
    rounds: RoundAssignment, values: StageValues, parts: LocalStageParts, index: int
) -> tuple[Reduce, ...]:
    """List the reductions after the local stage of a round, as the plan records them.

    Args:
      rounds: The assignment of equations to rounds; `rounds.reduces` lists for each
        round its reductions and gathers.
      values: The `Value` (name, shape and dtype) of each variable.
      parts: What the local stage of the round takes, computes and returns.
      index: The index of the round, from 0.

    Returns:
      A `Reduce` for each reduction or gather: its name, the partitioned `Value` that
      the local stage returns, and the global `Value` of the result.
    """
    reduces = []
    for eqn in rounds.reduces.get(index, ()):
        operand, result = eqn.invars[0], values.value(eqn.outvars[0])
        source = _source(operand, values, parts, index)
        optional = ("wire", "sharded", "secure", "bound")
        options = {k: eqn.params[k] for k in optional if k in eqn.params}
        name = str(reduction(eqn.primitive))
        reduces.append(Reduce(name, source, result, **options))
    return tuple(reduces)


def _source(operand, values: StageValues, parts: LocalStageParts, index: int) -> Value:
    """Return the `Value` of a local stage's output that is reduced or folded.

    Args:
      operand: The variable whose slices are reduced.
      values: The `Value` (name, shape and dtype) of each variable.
      parts: What the local stage of the round takes, computes and returns.
      index: The index of the round, from 0.

    Returns:
      The partitioned `Value` of the operand's slices. If the operand is in
      `parts.forwarded`, the slices are from an earlier round or an argument: the stage
      returns them unchanged, as a second `Value`, which this round alone has.
    """
    # Backends reduce outputs of the round's own stage, partly while it runs; hence
    # slices of earlier rounds pass through it.
    if operand in parts.forwarded:
        return values.forwarded(operand, index)
    return values.outgoing(operand, 0)


def _fold(eqn, values: StageValues, parts: LocalStageParts, index: int) -> Fold:
    """Build the plan's `Fold` of an equation that folds the groups' states.

    A fold reduces the states of all groups to one, by an associative function of two
    states, which is traced as a stage of its own.

    Args:
      eqn: The equation, a `reduce_fold`.
      values: The `Value` (name, shape and dtype) of each variable.
      parts: What the local stage of the round takes, computes and returns.
      index: The index of the round, from 0.

    Returns:
      The function as a stage, and the values of the neutral state, of the groups'
      states and of the results.
    """
    states, closed_over = states_of(eqn), closed_over_by(eqn)
    init = eqn.invars[len(closed_over) : len(closed_over) + len(states)]
    return Fold(
        trace_combine_stage(eqn, closed_over, values),
        tuple(map(values.value, init)),
        tuple(_source(v, values, parts, index) for v in states),
        tuple(map(values.value, eqn.outvars)),
        eqn.params.get("commutative", False),
    )


def _move(eqn, kinds: Environment, values: StageValues) -> Move:
    """Build the plan's `Move` of an equation that moves slices between groups.

    Args:
      eqn: The equation, a `permute`, `take` or `put_add`.
      kinds: The kinds of the program, of which only the partition is read.
      values: The `Value` (name, shape and dtype) of each variable.

    Returns:
      The name of the move, the values of its operand and of its result, and the
      permutation or the value of the index. The operand is an output of the local
      stage; or, if it is over another partition (a population), a global value.
    """
    x, *index = eqn.invars
    of_groups = partitions_of(eqn)[0] == kinds.partition
    return Move(
        str(move_name(eqn.primitive)),
        values.outgoing(x, 0) if of_groups else values.value(x),
        values.value(eqn.outvars[0]),
        eqn.params.get("sources", ()),
        values.value(index[0]) if index else None,
    )


# -------------------------------------------------------------------------------------
# Loops


def _columns(eqn, values: StageValues) -> Loop:
    """Build the `Loop` of a `columns` equation: work on each coordinate of slices.

    Args:
      eqn: The equation, on global values.
      values: The `Value` of each variable. A name for the loop is reserved.
    """
    inputs, outputs = (list(map(values.value, vs)) for vs in (eqn.invars, eqn.outvars))
    name, function = values.names.fresh("columns"), function_name(eqn.params["name"])
    return columns_loop(eqn, name, function, inputs, outputs)


def _loop(eqn, kinds: Environment, values: StageValues, rematerialize: bool) -> Loop:
    """Build the `Loop` of a `scan`, `while`, `cond` or `program`.

    Args:
      eqn: The equation, a loop of rounds. A `program` runs one body, over another
        partition.
      kinds: The kinds of the jaxpr that contains it; `kinds.loops[eqn]` has those of
        its operands, results and bodies.
      values: The `Value` of each variable of that jaxpr, and their names. A name for
        the loop is reserved.
      rematerialize: Whether rounds of the bodies rematerialize the results of earlier
        rounds instead of saving them.

    Returns:
      The loop, with a value for each operand and result of `eqn`, and a plan for each
      body.
    """
    op, loop = eqn.primitive.name, kinds.loops[eqn]
    operands = zip(eqn.invars, loop.operand_kinds, strict=True)
    inputs = tuple(_value_of_kind(values, v, kind) for v, kind in operands)
    outputs = tuple(map(values.value, eqn.outvars))
    name = values.names.fresh(op)
    names = [values.names.of(v) for v in eqn.invars]
    arguments, results, fields = _BODIES[op](eqn, names, loop.result_kinds)
    if op == "program":
        (body,) = loop.bodies
        results = [[body[v] for v in body.program.outvars]]
    bodies = tuple(
        build_plan(
            body,
            PlanSignature(f"{name} body {i}", arguments[i], results[i]),
            rematerialize,
        )
        for i, body in enumerate(loop.bodies)
    )
    return Loop(op, name, inputs, outputs, bodies, **fields)


# The bodies of a loop, by its primitive: from its equation, the names of its operands
# and the kinds of its results to `(names of arguments of each body, kinds of results of
# each body, further fields of the Loop)`.


def _scan(eqn, names: Sequence[str], result_kinds: Sequence[Kind]):
    """List the arguments and results of the body of a scan, which runs one step.

    Args:
      eqn: The scan.
      names: The names of its operands: constants, carried values, stacks.
      result_kinds: The kinds of its results: carried values, stacked results.

    Returns:
      `(arguments, results, fields)`. `arguments` and `results` are lists with one entry
      for each body, here one. The entry of `arguments` has the names of the body's
      arguments: for one step of a stack named `x`, it is `x[step]`. The entry of
      `results` has the kinds of the body's results: for a result stacked with group
      axis k, it is partitioned along k - 1. `fields` is a dict with the fields
      `consts`, `carry`, `length` and `reverse` of the `Loop`.
    """
    consts, carry, xs = split_scan(eqn, names)
    n_carry = len(carry)
    # A body sees one step: a stack of partitioned values has its groups one axis
    # earlier in it.
    steps = [shift_axis(kind, -1) for kind in result_kinds[n_carry:]]
    fields = {
        "consts": (len(consts),),
        "carry": n_carry,
        "length": eqn.params["length"],
        "reverse": eqn.params["reverse"],
    }
    arguments = [*consts, *carry, *(f"{x}[step]" for x in xs)]
    return [arguments], [[*result_kinds[:n_carry], *steps]], fields


def _while(eqn, names: Sequence[str], result_kinds: Sequence[Kind]):
    """List the arguments and results of a while's bodies: its condition, and a step.

    Args:
      eqn: The while.
      names: The names of its operands: constants of the condition, constants of the
        step, carried values.
      result_kinds: The kinds of its results, the carried values.

    Returns:
      `(arguments, results, fields)`. `arguments` has for each of the two bodies the
      names of its arguments; `results` has for each the kinds of its results, where
      that of the condition is a global bool. `fields` is a dict with the fields
      `consts` and `carry` of the `Loop`.
    """
    cond_consts, body_consts, carry = split_while(eqn, names)
    fields = {"consts": (len(cond_consts), len(body_consts)), "carry": len(carry)}
    # Body 0 is the condition.
    arguments = [[*cond_consts, *carry], [*body_consts, *carry]]
    return arguments, [[GLOBAL], result_kinds], fields


def _cond(eqn, names: Sequence[str], result_kinds: Sequence[Kind]):
    # The first operand is the index, which no branch takes.
    """List the arguments and results of the branches of a cond.

    Args:
      eqn: The cond.
      names: The names of its operands: the index of the branch, then the operands that
        every branch takes.
      result_kinds: The kinds of its results.

    Returns:
      `(arguments, results, fields)`. `arguments` has for each branch the names of its
      arguments, all but the index; `results` has for each the kinds of its results.
      `fields` is {}: the `Loop` has no further fields.
    """
    count = len(eqn.params["branches"])
    return [names[1:]] * count, [result_kinds] * count, {}


def _program(eqn, names: Sequence[str], result_kinds: Sequence[Kind]):
    # The kinds of its results are those of another partition, in the body.
    """List the arguments and results of the body of a program over another partition.

    Args:
      eqn: The `program` equation.
      names: The names of its operands.
      result_kinds: The kinds of its results, all global.

    Returns:
      `(arguments, results, fields)`, which is `([names], [result_kinds], {})`: the body
      takes all operands, and the `Loop` has no further fields. The caller replaces the
      kinds of the results by those that the body has over the other partition.
    """
    return [names], [result_kinds], {}


_BODIES = {"scan": _scan, "while": _while, "cond": _cond, "program": _program}
