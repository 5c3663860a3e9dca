"""Partitioning inference: is a variable global or partitioned?

Input: an `InlinedJaxpr`, its partition, and the kinds that are known of its arguments
and results. Output: an `Environment`, from variables to kinds.

The lattice is that of `kind.py`: free below global and below partitioned along each
axis. Arguments start free, and so do values computed from free values only. Three
phases raise variables; each is the least fixed point of its propagation rules:

1. forward: results of drjax primitives and of unbatchable equations on partitioned
   operands. These kinds follow from the program and admit no choice;
2. demands for global values (a broadcast, an equation that mixes groups), backward
   through free values. They precede phase 3, since a global value can still be
   scattered, and a partitioned one cannot become global without communication;
3. demands for partitioned values (a map, a reduction, a pointwise equation with a
   partitioned partner), backward.

What is free in the end is global. A partitioned value where a global one is needed
has no meaning and is refused (`consistency.py`); a global `[n, ...]` value where a
partitioned one is needed is a scatter.

Termination: a rule raises free variables only, and the lattice has two levels, so each
variable is raised at most once in a run. The worklist receives the equations next to a
variable only when it is raised, so a run of P phases visits at most `P E + (uses + 1,
summed over the variables)` of E equations. Where demands of phase 3 contradict each
other, the variables are forced to be global and the run starts again; the forced set
grows strictly and is bounded by the number of variables. Bodies of loops iterate over
their carried values with the same argument; see `control_flow.py`.

Invariants: the result does not depend on debug data. Within a run no variable is
lowered. Sharp edges: of two demands for different axes, the one first visited is
recorded and the other detected afterwards (`contradictions`). The order of the worklist
is that of the equations, so the outcome is deterministic.
"""

import functools
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from drjax._compat.jax_types import Literal
from drjax._compat.types import Eqn, Var
from drjax._errors import PlanError
from drjax._jaxprs.walk import variables
from drjax._partition import Partition
from drjax._planner.inline import InlinedJaxpr
from drjax._planner.partitioning.consistency import contradictions
from drjax._planner.partitioning.control_flow import InferBody
from drjax._planner.partitioning.environment import Environment
from drjax._planner.partitioning.kind import GLOBAL, Kind
from drjax._planner.partitioning.propagation_rules import has_free_operand, rule_of

# The last two are names of kinds: a demand for a kind propagates in its phase.
PHASES = ("forward", "global", "partitioned")


class _ConflictingDemands(Exception):
    """An equation mixes groups, but only because of demands on its operands.

    A demand is the kind that an equation needs of an operand. Demands of other
    equations have made `variables` partitioned, which are operands that this equation
    needs to be global. Inference starts again with them forced to be global.
    """

    def __init__(self, variables: set[Var]):
        self.variables = variables


def infer_partitioning(
    program: InlinedJaxpr,
    partition: Partition | None,
    argument_kinds: Sequence[Kind | None],
    result_kinds: Sequence[Kind | None] = (),
    last_phase: str = PHASES[-1],
) -> Environment:
    """Infer the kinds of all variables of an inlined jaxpr; they are not checked yet.

    None or free, in `argument_kinds` and `result_kinds`, means that the kind is to be
    inferred; results may also be left out. If equations demand contradicting kinds of a
    variable, it is forced to be global, and inference starts again. An equation that
    mixes groups, whatever is demanded, raises a `PlanError`.

    After the last phase, `env[var]` is global for variables that are still free. After
    an earlier one, the program around a loop's body may still demand a kind of them:
    read `env.cell(var)`.
    """
    # Variables whose uses demand different axes. No one axis fits, so they are global
    # and scattered for each use.
    forced_global: set[Any] = set()
    while True:
        # The server has the constants: where slices are needed, it scatters them. The
        # environment is new, as kinds that follow from a conflict are never lowered.
        cells = dict.fromkeys((*program.consts, *forced_global), GLOBAL)
        env = Environment(program, partition, argument_kinds, cells)
        conflicts = _run_phases(env, result_kinds, last_phase)
        if conflicts <= forced_global:
            return env
        forced_global |= conflicts


def _run_phases(
    env: Environment, result_kinds: Sequence[Kind | None], last_phase: str
) -> set[Var]:
    """Infer the kinds of `env` phase by phase, and return the variables in conflict.

    These are the variables for which equations demand contradicting kinds: the caller
    forces them to be global and starts again with a new environment. There are none if
    `last_phase` is not the last of all phases.
    """
    env.join(env.program.invars, env.argument_kinds)
    settled: frozenset[Any] = frozenset()
    for phase in PHASES[: PHASES.index(last_phase) + 1]:
        # What the phases before this one raised holds whoever uses it.
        settled = frozenset(env.cells)
        # A required result kind is a demand like any other, in its phase.
        required = zip(env.program.outvars, result_kinds, strict=False)
        for var, kind in required:
            env.join([var], [_in_phase(kind, phase)])
        try:
            if phase == "forward":
                _propagate_forward(env)
            else:
                # What is not free stays as it is, but a loop has bodies of its own.
                eqns = [e for e in env.open_eqns if env.has_free(e) or env.is_loop(e)]
                blocks = [env.signature(e) for e in eqns]
                if any(block is None for block in blocks):
                    _propagate(env, eqns, phase, settled)
                    continue
                # No other kind changes those that blocks demand.
                for eqn, block in zip(eqns, blocks, strict=True):
                    kinds = block.operand_kinds if block else ()
                    env.join(eqn.invars, [_in_phase(kind, phase) for kind in kinds])
        except _ConflictingDemands as conflict:
            return conflict.variables
    # Before the last phase, a demand may still come from outside of a body.
    if last_phase != PHASES[-1]:
        return set()
    conflicts = {v for eqn in env.others for v in contradictions(env, eqn)}
    # A settled variable cannot be forced to be global: its equation is refused.
    return conflicts - settled


def _propagate_forward(env: Environment) -> None:
    """Infer the kinds of results from those of operands, until no kind changes.

    One pass does, as definitions precede uses, and no demand is made.
    """
    infer_body = functools.partial(_infer_body, env.partition, PHASES[0])
    cells = env.cells
    for eqn in env.program.eqns:
        # Without its rule, as most equations are pointwise, of known operands.
        if env.settle(eqn):
            continue
        env.open_eqns.append(eqn)
        if env.is_pointwise(eqn):
            if all(v in cells for v in eqn.outvars):
                continue
            kind = env.common_kind(eqn)
            if kind is None and _is_global(env, eqn):
                kind = GLOBAL
            if kind is not None:
                cells.update(dict.fromkeys(eqn.outvars, kind))
                continue
        if (block := env.signature(eqn)) is not None:
            env.join(eqn.outvars, block.result_kinds)
            continue
        loop = env.is_loop(eqn)
        # A kind of a result of a loop may change the kinds of its carried values.
        while _visit(env, eqn, loop, PHASES[0], infer_body) and loop:
            pass


def _is_global(env: Environment, eqn: Eqn) -> bool:
    """Whether all operands of an equation are global, or scalars."""
    for v in eqn.invars:
        if type(v) is not Literal:
            kind = env.cells.get(v)
            if kind is not GLOBAL and (kind is not None or v.aval.shape):
                return False
    return True


def _propagate(
    env: Environment, eqns: Sequence[Eqn], phase: str, settled: frozenset[Var]
) -> None:
    """Apply the propagation rules of equations until no kind changes.

    `eqns` are all loops, and those of which a variable is free. `settled` are the
    variables whose kinds are known before this phase begins. If, in the last phase, an
    equation mixes groups, and some of its partitioned operands are not settled, it
    raises `_ConflictingDemands`: only demands made them partitioned. An equation that
    mixes groups otherwise raises a `PlanError`.
    """
    # The indices of the definition of each variable, then of its uses.
    neighbors: dict[Any, list[int]] = {}
    for i, eqn in enumerate(eqns):
        for var in (*eqn.outvars, *variables(eqn.invars)):
            neighbors.setdefault(var, []).append(i)
    # Demands flow from uses to definitions: fewer visits in reverse order.
    # An ordered set: an equation waits once, however many of its variables change.
    worklist = OrderedDict.fromkeys(reversed(range(len(eqns))))
    infer_body = functools.partial(_infer_body, env.partition, phase)
    while worklist:
        index, _ = worklist.popitem(last=False)
        eqn = eqns[index]
        loop = env.is_loop(eqn)
        try:
            raised = _visit(env, eqn, loop, phase, infer_body)
        except PlanError as error:
            # Only in the last phase: before it, no demand makes a value partitioned.
            demanded = {v for v in eqn.invars if env.cell(v).partitioned} - settled
            if phase == PHASES[-1] and demanded:
                raise _ConflictingDemands(demanded) from error
            raise
        for var in raised:
            worklist |= dict.fromkeys(neighbors[var])
        if not loop:
            # Its rule has seen what it raised. A loop has not: a kind of a result may
            # change the kinds of its carried values.
            worklist.pop(index, None)


def _visit(
    env: Environment, eqn: Eqn, loop: bool, phase: str, infer_body: InferBody
) -> list[Var]:
    """Apply the rule of an equation once, and return the variables that it raised.

    They are the operands and results that were free and are no longer. In the forward
    phase, no demand on operands is made.
    """
    # A loop is always visited: its bodies may still have free variables.
    forward = loop or not env.cells.keys() >= {*eqn.outvars}
    backward = phase != "forward" and (loop or has_free_operand(env, eqn))
    if not (forward or backward):
        return []
    raised = []
    block = env.signature(eqn)
    if block is not None:  # whose kinds are known without a rule
        if forward:
            raised += env.join(eqn.outvars, block.result_kinds)
        if backward:
            demands = [_in_phase(kind, phase) for kind in block.operand_kinds]
            raised += env.join(eqn.invars, demands)
        return raised
    rule = rule_of(env, eqn)
    # Results first, as the demands on operands depend on their kinds.
    if forward:
        raised += env.join(eqn.outvars, rule.results(env, eqn, infer_body))
    if backward:
        demands = [_in_phase(k, phase) for k in rule.demands(env, eqn, infer_body)]
        raised += env.join(eqn.invars, demands)
    return raised


def _in_phase(kind: Kind | None, phase: str) -> Kind | None:
    """Return `kind` if demands for this kind propagate in the phase, else None.

    In "global" those for global values do, in "partitioned" those for partitioned ones
    along any axis, in "forward" none.
    """
    return kind if kind is not None and kind.name == phase else None


def _infer_body(
    partition: Partition | None,
    phase: str,
    body: InlinedJaxpr,
    argument_kinds: Sequence[Kind],
    result_kinds: Sequence[Kind],
    over: Partition | None = None,
) -> Environment:
    """Infer the kinds of a loop's body, in no more phases than the program around it.

    While the program around the loop is in the second phase, it may still demand a
    global value of the body, which a third phase of the body would have made
    partitioned too early. The body's partition is `over`, if it is a program over
    another one. The environment is cached: callers must not modify it.
    """
    # A fixed point asks for the same kinds often, and nested loops would otherwise be
    # inferred exponentially often.
    # An environment may be shared, as it is not written to after its inference.
    kinds = tuple(argument_kinds), tuple(result_kinds)
    return body.memoize(infer_partitioning, body, over or partition, *kinds, phase)
