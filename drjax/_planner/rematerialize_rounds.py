"""What the local stage of each round computes, rematerializes, takes and saves.

This is about rounds outside of loops. What the steps of a loop rematerialize, instead
of stacking residuals, is decided in `rematerialize_loops.py`.

Input: the kinds of an inlined jaxpr, its rounds, and the operands of its equations.
Output: `LocalWork`, and of it for each round its `LocalStageParts`.

The local stage of a round holds its equations on partitioned values, and those of
earlier rounds that it rematerializes. What enters it: broadcast and scattered values
that it uses (groups never store copies of global values), and slices that earlier
rounds have saved. What leaves it: operands of reductions and loops, results of the
program, and slices that a later round needs and cannot rematerialize.

Invariants: no equation with effects is in two stages. No bitwise-observable variable,
one whose exact bits the program may compare (see `bitwise_observable.py`), is computed
twice. Sharp edges: the stage of a later round may contain all local work of an earlier
one; without rematerialization, its results are saved for all groups instead.
"""

from collections.abc import Iterable, Sequence
from typing import TypeVar

from drjax import primitives
from drjax._compat.types import Eqn, Var
from drjax._jaxprs.walk import variables
from drjax._planner.bitwise_observable import bitwise_observable
from drjax._planner.exchanges import exchange_rule
from drjax._planner.fences import fence_p
from drjax._planner.partitioning.environment import Environment
from drjax._planner.partitioning.kind import Kind
from drjax._planner.rounds import RoundAssignment
from drjax._planner.stage_values import (
    BroadcastOperand,
    ExpandedOperand,
    LocalStageParts,
    Operand,
    ScatteredOperand,
    SliceOperand,
    StageValues,
)

T = TypeVar("T")

# These equations are communication down or an index: inputs of a stage, not its work.
_INPUTS_OF_STAGES = (
    primitives.broadcast_p,
    primitives.scatter_p,
    primitives.partition_index_p,
)


class LocalWork:
    """What the local stages of all rounds compute, by liveness across rounds.

    `rematerialize` says whether a round rematerializes the results of earlier rounds
    that it needs, instead of each group saving them. `num_rounds` counts the rounds up
    to the last that communicates or has a local stage.
    """

    def __init__(
        self,
        kinds: Environment,
        rounds: RoundAssignment,
        values: StageValues,
        result_kinds: Sequence[Kind],
        rematerialize: bool,
    ):
        self._kinds, self._rounds, self._values = kinds, rounds, values
        self._results = list(zip(kinds.program.outvars, result_kinds, strict=True))
        self._rematerialize = rematerialize
        self._observable = bitwise_observable(kinds.program)
        # What is before a fence is not done again behind it.
        self._before_fences = {
            v
            for e in kinds.program.eqns
            if e.primitive is fence_p
            for v in variables(e.invars)
        }
        self._order = {id(e): i for i, e in enumerate(kinds.program.eqns)}
        self.num_rounds = self._count_rounds()
        indices = range(self.num_rounds)
        # For each round: what leaves the groups, `(variable, group axis)`, and of it
        # the slices; the equations of its stage, and the variables that it computes.
        self._leaving = [_leaving(kinds, rounds, self._results, i) for i in indices]
        self._leaving_slices = [
            dict.fromkeys(v for v, axis in leaving if values.is_slice(v, axis))
            for leaving in self._leaving
        ]
        self._equations = [self._equations_of_round(i) for i in indices]
        self._computed = [self._computed_in_round(i) for i in indices]
        # Liveness: the last round that needs a slice of an earlier one.
        # Later rounds overwrite earlier ones. To ask all later rounds for each variable
        # would take quadratic time in unrolled rounds.
        self._last_use = {v: i for i in indices for v in self._live_into_round(i)}

    def parts(self, index: int) -> LocalStageParts:
        """Return what the local stage of a round takes, computes and returns."""
        equations, computed = self._equations[index], self._computed[index]
        leaving, is_slice = self._leaving[index], self._values.is_slice
        outgoing = [x for x in leaving if not is_slice(*x)]
        own, exchanges = self._kinds.partition, [*self._rounds.exchanges_of(index)]
        through = [(e, rule) for e, rule in exchanges if rule.passes_through]
        combined = [v for e, rule in through for v in rule.slices(e, own)]
        forwarded = _unique(v for v in combined if is_slice(v, 0) and v not in computed)
        saved = [v for v in computed if self._is_saved(v, index)]
        needs: list[Operand] = [x for e in equations for x in self._values.operands(e)]
        needs += [self._values.slice_of(*x) for x in outgoing]
        needs += [SliceOperand(v) for v in forwarded]
        # Where groups are, blocks of them are folded.
        closed_over = [v for e, rule in exchanges for v in rule.closed_over(e)]
        needs += map(self._values.whole_of, closed_over)
        # Of an expanded array a group takes the operand that it expands.
        needs += [x.operand for x in needs if isinstance(x, ExpandedOperand)]
        slices = [x for x in needs if isinstance(x, SliceOperand)]
        return LocalStageParts(
            equations,
            computed,
            _unique(x for x in needs if isinstance(x, BroadcastOperand)),
            _unique(x for x in needs if isinstance(x, ScatteredOperand)),
            _unique(x for x in slices if x.var not in computed),
            saved,
            self._observable.intersection(saved),
            outgoing,
            forwarded,
        )

    def _count_rounds(self) -> int:
        """Count the rounds, up to the last that communicates or has work of groups.

        A partitioned result of the program is an output of a local stage, even if it is
        an argument, so its round counts, too; but not if a move between groups or a
        loop gives the result.
        """
        rounds = self._rounds
        indices = [*rounds.exchanges, *rounds.loops]
        # Broadcasts and indices alone need no round: a later stage has them as inputs.
        for index, eqns in rounds.local.items():
            if any(map(_is_work, eqns)):
                indices.append(index)
        for var, kind in self._results:
            eqn = self._values.definition.get(var)
            communicated = eqn is not None and _gives_slices(eqn, self._kinds)
            if kind.partitioned and not communicated:
                # A result without local work, such as a scattered argument.
                indices.append(rounds.round_of(var))
        return 1 + max(indices, default=-1)

    def _equations_of_round(self, index: int) -> list[Eqn]:
        """List the equations of a round's local stage, rematerialized ones included.

        They are in the order of the program.
        """
        eqns = [e for e in self._rounds.local.get(index, ()) if _is_work(e)]
        if not self._rematerialize:
            return eqns
        leaving = filter(self._may_rematerialize, self._leaving_slices[index])
        stack = eqns + [self._values.definition[v] for v in leaving]
        work = {id(e): e for e in stack}
        # The backward slice of the round's equations through earlier rounds.
        while stack:
            for operand in self._values.operands(stack.pop()):
                if not isinstance(operand, SliceOperand):
                    continue
                if self._may_rematerialize(operand.var):
                    eqn = self._values.definition[operand.var]
                    if id(eqn) not in work:
                        work[id(eqn)] = eqn
                        stack.append(eqn)
        # In the order of the program, as definitions must precede uses.
        return sorted(work.values(), key=lambda e: self._order[id(e)])

    def _may_rematerialize(self, var: Var) -> bool:
        """Whether a later round may rematerialize the slices of a partitioned variable.

        It may unless the variable is an argument, bitwise-observable (the program may
        compare its exact bits), an operand of a fence, or the result of an equation
        with effects, of a move between groups or of a loop.
        """
        # Arguments have no definition, effects run once, and others communicate.
        eqn = self._values.definition.get(var)
        if eqn is None or eqn.effects or var in self._observable:
            return False
        if var in self._before_fences:
            return False
        return not _gives_slices(eqn, self._kinds)

    def _computed_in_round(self, index: int) -> dict[Var, None]:
        """List the variables that a round's local stage computes, in program order.

        An equation with several results may be rematerialized for one of them while
        another is bitwise-observable (the program may compare its exact bits). That
        result is not computed a second time, but read from the round that computed it.
        """
        results = (v for eqn in self._equations[index] for v in eqn.outvars)
        return dict.fromkeys(
            v
            for v in results
            if v not in self._observable or self._rounds.round_of(v) == index
        )

    def _live_into_round(self, index: int) -> set[Var]:
        """Collect the partitioned variables whose slices a round reads as inputs.

        They are operands of its equations, and what reductions, folds, moves, loops and
        results of the program take after it, without the variables that the round
        computes itself. So they are arguments of the program or results of earlier
        rounds.
        """
        operands = [x for e in self._equations[index] for x in self._values.operands(e)]
        needed = {x.var for x in operands if isinstance(x, SliceOperand)}
        needed |= self._leaving_slices[index].keys()
        return needed - self._computed[index].keys()

    def _is_saved(self, var: Var, index: int) -> bool:
        """Whether a local stage returns the slices of a variable that it computes.

        It does if a reduction, a fold, a move, a loop or a result of the program takes
        them after the round, or if the round defines the variable and a later one reads
        it. A round that only rematerializes it does not.
        """
        # Leaving slices are outputs under their own name: no copy is made.
        if var in self._leaving_slices[index]:
            return True
        # Only the round of its definition saves a variable; rematerialized values die
        # with their stage.
        return self._rounds.round_of(var) == index < self._last_use.get(var, -1)


def _leaving(
    kinds: Environment,
    rounds: RoundAssignment,
    results: Sequence[tuple[Var, Kind]],
    index: int,
) -> list[tuple[Var, int]]:
    """List the values, with group axes, that leave the groups after a local stage.

    They are operands of the reductions, folds, moves and loops after the round, and
    partitioned results of the program, each once. A variable may be global; then each
    group returns its slice or copy of it.
    """
    # An exchange takes groups along axis 0. Its operand may be global: then each group
    # sends its slice of it, or its copy of a broadcast.
    exchanges = [*rounds.exchanges_of(index)]
    leaving = [(v, 0) for e, r in exchanges for v in r.slices(e, kinds.partition)]
    # A loop starts after the round, so what it takes is an output of the stage.
    for eqn in rounds.loops.get(index, ()):
        pairs = zip(eqn.invars, kinds.loops[eqn].operand_kinds, strict=True)
        leaving += [(v, kind.axis) for v, kind in pairs if kind.axis is not None]
    # A result leaves in the round that defines it, so that no later stage returns it.
    leaving += [
        (v, kind.axis)
        for v, kind in results
        if kind.axis is not None and rounds.round_of(v) == index
    ]
    return _unique(leaving)


def _gives_slices(eqn: Eqn, kinds: Environment) -> bool:
    """Whether communication, not a local stage, gives the results of an equation.

    True for a move of slices between groups, and for a loop of rounds. Groups get the
    slices of its results after the round, and cannot rematerialize them.
    """
    rule = exchange_rule(eqn, kinds)
    return kinds.is_loop(eqn) or (rule is not None and rule.gives_slices)


def _is_work(eqn: Eqn) -> bool:
    """Whether an equation on partitioned values is computed by a local stage.

    Not a broadcast, scatter or `partition_index`: these are inputs of stages.
    """
    return eqn.primitive not in _INPUTS_OF_STAGES


def _unique(items: Iterable[T]) -> list[T]:
    """Return a list of hashable items without repetitions, by first occurrence."""
    return list(dict.fromkeys(items))
