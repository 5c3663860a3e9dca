"""What the local stage of each round computes, rematerializes, takes and saves.

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

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from drjax import primitives
from drjax._planner.bitwise_observable import bitwise_observable
from drjax._planner.partitioning.environment import Environment
from drjax._planner.partitioning.kind import Kind
from drjax._planner.rounds import RoundAssignment
from drjax._planner.stage_values import (
    BroadcastOperand,
    ExpandedOperand,
    Operand,
    ScatteredOperand,
    SliceOperand,
    StageValues,
)

# These equations are communication down or an index: inputs of a stage, not its work.
_INPUTS_OF_STAGES = (
    primitives.broadcast_p,
    primitives.scatter_p,
    primitives.partition_index_p,
)


@dataclass(frozen=True)
class LocalStageParts:
    """What a local stage takes, computes and returns; `trace_local_stage` traces it.

    Attributes:
      equations: Its equations, in the order of the program.
      computed: The variables that it computes, in that order.
      broadcast: Global values of which it takes a copy.
      scatter: Global values of which it takes a slice.
      slices: Slices of partitioned values that it takes from earlier rounds.
      saved: The variables that it computes and whose slices it returns.
      fenced: The bitwise-observable variables among `saved`, which the compiler must
        not rematerialize either.
      outgoing: Variables that the communication after it takes and that groups do not
        store (global, broadcast or scattered ones), as `(variable, group axis)`: each
        group returns its slice, or its copy.
      forwarded: Variables of earlier rounds whose slices it hands through to a
        reduction.
    """

    equations: Sequence[Any]
    computed: dict[Any, None]
    broadcast: list[BroadcastOperand]
    scatter: list[ScatteredOperand]
    slices: list[SliceOperand]
    saved: list[Any]
    fenced: frozenset[Any]
    outgoing: list[tuple[Any, int]]
    forwarded: list[Any]


class LocalWork:
    """The local work of all rounds, by liveness across rounds.

    Args:
      kinds: The kinds of a program.
      rounds: The rounds of its equations.
      values: How its local stages obtain the operands of equations.
      result_kinds: The kind that each result of the program must have.
      rematerialize: Whether a round rematerializes the results of earlier rounds that
        it needs, instead of each group saving them.

    Attributes:
      num_rounds: The number of rounds that communicate or have local work.
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
        self._last_use = {v: i for i in indices for v in self._live_into_round(i)}

    def parts(self, index: int) -> LocalStageParts:
        """What the local stage of a round takes, computes and returns.

        Args:
          index: The index of the round, from 0.
        """
        equations, computed = self._equations[index], self._computed[index]
        leaving, is_slice = self._leaving[index], self._values.is_slice
        outgoing = [x for x in leaving if not is_slice(*x)]
        reduced = [e.invars[0] for e in self._rounds.reduces.get(index, ())]
        forwarded = _unique(v for v in reduced if is_slice(v, 0) and v not in computed)
        saved = [v for v in computed if self._is_saved(v, index)]
        needs: list[Operand] = [x for e in equations for x in self._values.operands(e)]
        needs += [self._values.slice_of(*x) for x in outgoing]
        needs += [SliceOperand(v) for v in forwarded]
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
        """The number of rounds: up to the last that communicates or has local work."""
        indices = [*self._rounds.reduces, *self._rounds.loops]
        # Broadcasts and indices alone need no round: a later stage has them as inputs.
        for index, eqns in self._rounds.local.items():
            if any(map(_is_work, eqns)):
                indices.append(index)
        for var, kind in self._results:
            if kind.partitioned:
                # A result without local work, such as a scattered argument.
                indices.append(self._rounds.round_of(var))
        return 1 + max(indices, default=-1)

    def _equations_of_round(self, index: int) -> list[Any]:
        """The equations of a round's local stage, rematerialized ones included."""
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

    def _may_rematerialize(self, var) -> bool:
        """Whether a later round may rematerialize the slices of a variable."""
        # Arguments have no definition, effects run once, and a loop communicates.
        eqn = self._values.definition.get(var)
        if eqn is None or eqn.effects or var in self._observable:
            return False
        return not self._kinds.is_loop(eqn)

    def _computed_in_round(self, index: int) -> dict[Any, None]:
        """The variables that the local stage of a round computes, in program order.

        An equation with several results may be rematerialized for one of them while
        another is bitwise-observable: that result is not computed a second time, but
        read from the round that computed it.
        """
        results = (v for eqn in self._equations[index] for v in eqn.outvars)
        return dict.fromkeys(
            v
            for v in results
            if v not in self._observable or self._rounds.round_of(v) == index
        )

    def _live_into_round(self, index: int) -> set[Any]:
        """The variables of earlier rounds whose slices a round needs."""
        operands = [x for e in self._equations[index] for x in self._values.operands(e)]
        needed = {x.var for x in operands if isinstance(x, SliceOperand)}
        needed |= self._leaving_slices[index].keys()
        return needed - self._computed[index].keys()

    def _is_saved(self, var, index: int) -> bool:
        """Whether the stage of a round returns the slices of a variable it computes."""
        # Leaving slices are outputs under their own name: no copy is made.
        if var in self._leaving_slices[index]:
            return True
        # Only the round of its definition saves a variable; rematerialized values die
        # with their stage.
        return self._rounds.round_of(var) == index < self._last_use.get(var, -1)


def _leaving(
    kinds: Environment,
    rounds: RoundAssignment,
    results: Sequence[tuple[Any, Kind]],
    index: int,
) -> list[tuple[Any, int]]:
    """The variables that leave the groups after a round, as `(variable, group axis)`.

    They are operands of the reductions and loops after the round, and results of the
    program.

    Args:
      kinds: The kinds of the program.
      rounds: The rounds of its equations.
      results: Each result of the program with the kind that it must have.
      index: The index of the round.
    """
    # A reduction takes groups along axis 0. Its operand may be global: then each group
    # sends its slice of it, or its copy of a broadcast.
    leaving = [(e.invars[0], 0) for e in rounds.reduces.get(index, ())]
    # A loop starts after the round, so what it takes is an output of the stage.
    for eqn in rounds.loops.get(index, ()):
        pairs = zip(eqn.invars, kinds.loops[eqn].operand_kinds, strict=True)
        leaving += [(v, kind.axis) for v, kind in pairs if kind.axis is not None]
    leaving += [
        (v, kind.axis)
        for v, kind in results
        if kind.axis is not None and rounds.round_of(v) == index
    ]
    return _unique(leaving)


def _is_work(eqn) -> bool:
    """Whether a local stage computes an equation on partitioned values.

    Broadcasts, scatters and `partition_index` are inputs of stages instead.
    """
    return eqn.primitive not in _INPUTS_OF_STAGES


def _unique(items) -> list:
    """The items without repetitions, in order of their first occurrences."""
    return list(dict.fromkeys(items))
