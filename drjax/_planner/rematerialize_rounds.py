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
twice. A round rematerializes work of a round of which it reads a result itself; what
that work takes of rounds before it, as of a state that groups keep, is saved. So the
work of a round is repeated once for each round that reads its results, and not once
more for each round after that. Without rematerialization, all slices that a later round
reads are saved.

Sharp edges: what is cheap (see `work.py`) is rematerialized through any number of
rounds.
"""

import functools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

from drjax import primitives
from drjax._compat.jax_types import Literal, Variable
from drjax._compat.types import Eqn, Var
from drjax._jaxprs.walk import variables
from drjax._planner.bitwise_observable import bitwise_observable
from drjax._planner.exchanges import exchange_rule
from drjax._planner.fences import fence_p
from drjax._planner.partitioning.environment import Environment
from drjax._planner.partitioning.kind import Kind
from drjax._planner.rematerialized import part_of
from drjax._planner.rounds import RoundAssignment
from drjax._planner.stage_values import (
    BroadcastOperand,
    ExpandedOperand,
    LocalStageParts,
    Operand,
    ScatteredOperand,
    StageValues,
    slices_among,
)
from drjax._planner.work import bytes_of, is_cheap, operations

T = TypeVar("T")

# These equations are communication down or an index: inputs of a stage, not its work.
_INPUTS_OF_STAGES = (
    primitives.broadcast_p,
    primitives.scatter_p,
    primitives.partition_index_p,
)

# Work is of one round if that of all rounds is at most so many times as much.
_NEARLY = 1.05


class LocalWork:
    """What the local stages of all rounds compute, by liveness across rounds.

    `rematerialize` says whether a round rematerializes the results of earlier rounds
    that it needs, instead of each group saving them. `skips`: where groups only add
    zeros, they do not work; so the work of a chosen group is done again, too.
    `num_rounds` counts the rounds up to the last that communicates or has a local
    stage.
    """

    def __init__(
        self,
        kinds: Environment,
        rounds: RoundAssignment,
        values: StageValues,
        result_kinds: Sequence[Kind],
        rematerialize: bool,
        skips: bool = False,
    ):
        self._kinds, self._rounds, self._values = kinds, rounds, values
        self._results = list(zip(kinds.program.outvars, result_kinds, strict=True))
        self._rematerialize = rematerialize
        self._observable = kinds.program.memoize(
            bitwise_observable, kinds.program, not skips
        )
        # What is before a fence is not done again behind it.
        self._before_fences = {
            v
            for e in kinds.program.eqns
            if e.primitive is fence_p
            for v in variables(e.invars)
        }
        self.num_rounds = self._count_rounds()
        indices = range(self.num_rounds)
        # For each round: what leaves the groups, `(variable, group axis)`, and of it
        # the slices; the equations of its stage, and the variables that it computes.
        self._leaving = [_leaving(kinds, rounds, self._results, i) for i in indices]
        self._leaving_slices = [
            dict.fromkeys(v for v, axis in leaving if values.is_slice(v, axis))
            for leaving in self._leaving
        ]
        self._states: set[Var] = set()
        self._cheap: dict[Var, bool] = {}
        self._operations: dict[int, float] = {}
        if rematerialize:
            self._states = self._find_states()
        self._equations = [self._equations_of_round(i) for i in indices]
        self._computed = [self._computed_in_round(i) for i in indices]
        self._read = [self._operands_of_round(i) for i in indices]
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
        # Most values are read in their own round alone.
        read = self._leaving_slices[index].keys() | self._last_use.keys()
        saved = [v for v in computed if v in read and self._is_saved(v, index)]
        own_eqns = [e for e in self._rounds.local.get(index, ()) if _is_work(e)]
        again = frozenset[int]()
        if len(equations) > len(own_eqns):
            again = frozenset(map(id, equations)).difference(map(id, own_eqns))
        needs = list(self._read[index])
        needs += [self._values.slice_of(*x) for x in outgoing]
        needs += forwarded
        # Where groups are, blocks of them are folded.
        closed_over = [v for e, rule in exchanges for v in rule.closed_over(e)]
        needs += map(self._values.whole_of, closed_over)
        # Of an expanded array a group takes the operand that it expands.
        needs += [x.operand for x in needs if isinstance(x, ExpandedOperand)]
        return LocalStageParts(
            equations,
            computed,
            _unique(x for x in needs if isinstance(x, BroadcastOperand)),
            _unique(x for x in needs if isinstance(x, ScatteredOperand)),
            _unique(v for v in slices_among(needs) if v not in computed),
            saved,
            self._observable.intersection(saved),
            outgoing,
            forwarded,
            again,
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
        if not self._rematerialize or index == 0:
            return eqns
        leaving = filter(self._may_rematerialize, self._leaving_slices[index])
        stack = eqns + [self._values.definition[v] for v in leaving]
        work = {id(e): e for e in stack}
        # The backward slice of the round's equations through earlier rounds.
        while stack:
            for operand in slices_among(self._values.operands(stack.pop())):
                # What the round computes itself is in its work already.
                earlier = self._rounds.round_of(operand) < index
                if earlier and self._may_rematerialize(operand):
                    eqn = self._values.definition[operand]
                    if id(eqn) not in work:
                        work[id(eqn)] = eqn
                        stack.append(eqn)
        ordered = sorted(work.values(), key=self._position)
        return self._parts_needed(ordered, index) if len(work) > len(eqns) else ordered

    def _parts_needed(self, eqns: list[Eqn], index: int) -> list[Eqn]:
        """Leave out those results of earlier rounds that a round does not need.

        An equation may have other results, which take other slices, that are saved.
        """
        own = {id(e) for e in self._rounds.local.get(index, ())}
        live, parts = {*self._leaving_slices[index]}, list[Eqn]()
        for eqn in reversed(eqns):
            if id(eqn) not in own:
                used = [v in live and v not in self._observable for v in eqn.outvars]
                if not any(used):
                    continue
                eqn = part_of(eqn, used)
            parts.append(eqn)
            live.update(slices_among(self._values.operands(eqn)))
        return parts[::-1]

    def _position(self, eqn: Eqn) -> int:
        return self._order[id(eqn)]

    @functools.cached_property
    def _order(self) -> dict[int, int]:
        return {id(e): i for i, e in enumerate(self._kinds.program.eqns)}

    def _may_rematerialize(self, var: Var) -> bool:
        """Whether a later round may rematerialize the slices of a partitioned variable.

        It may unless the variable is an argument, bitwise-observable (the program may
        compare its exact bits), an operand of a fence, a state, or the result of an
        equation with effects, of a move between groups or of a loop.
        """
        # Arguments have no definition, effects run once, and others communicate.
        eqn = self._values.definition.get(var)
        if eqn is None or eqn.effects or var in self._observable:
            return False
        if var in self._before_fences or var in self._states:
            return False
        return not _gives_slices(eqn, self._kinds)

    def _find_states(self) -> set[Var]:
        """Choose the slices to save, so that no work is repeated round after round.

        Where a round reads results of an earlier one, these are rematerialized if that
        is nearly all work of one round, however many rounds read them. If not, of what
        it reads and what the work of that round takes of rounds before, the smaller is
        saved. So is what fits into the memory of results that come later.
        """
        reads = [
            [v for v in self._reads_of_earlier(index) if not self._is_cheap(v)]
            for index in range(self.num_rounds)
        ]
        states, sources = self._in_memory_of_results(reads)
        count = -1
        # What is saved may let another round do with less work, which then ends there.
        while count < len(states):
            count = len(states)
            for roots in sources:
                roots = [v for v in roots if v not in states]
                if not self._is_of_one_round(roots, states):
                    states.update(self._cut(roots, states))
        return states

    def _in_memory_of_results(
        self, reads: Sequence[Sequence[Var]]
    ) -> tuple[set[Var], list[list[Var]]]:
        """Choose what to save in memory that results of later rounds take in the end.

        `reads` has what each round reads of earlier ones. What is left over is returned
        as well: for each round that reads and each that is read, a list.
        """
        last = {v: index for index, each in enumerate(reads) for v in each}
        saved, left, free = set[Var](), list[list[Var]](), self._later_results()
        for each in reads:
            by_round = defaultdict[int, list[Var]](list)
            for var in each:
                if var not in saved:
                    by_round[self._rounds.round_of(var)].append(var)
            for start, roots in by_round.items():
                needed = [
                    (types, Counter(_type(v) for v in roots if index < last[v]))
                    for index, types in enumerate(free[start:], start)
                ]
                if all(new <= types for types, new in needed):
                    for types, new in needed:
                        types -= new
                    saved.update(roots)
                else:
                    left.append(roots)
        return saved, left

    def _later_results(self) -> list[Counter[Any]]:
        """For each round, count the types of the slices that later ones return.

        Until then, the memory of these is free. Only what local stages compute counts.
        """
        later, results = (
            Counter[Any](),
            [Counter[Any]() for _ in range(self.num_rounds)],
        )
        for var, kind in dict(self._results).items():
            eqn = self._values.definition.get(var)
            if kind.partitioned and eqn and not _gives_slices(eqn, self._kinds):
                results[self._rounds.round_of(var)][_type(var)] += 1
        free: list[Counter[Any]] = []
        for each in reversed(results):
            free.append(later.copy())
            later += each
        return free[::-1]

    def _is_of_one_round(self, roots: Sequence[Var], states: set[Var]) -> bool:
        """Whether the work that `roots` need is nearly all of the same round.

        It starts from slices of arguments, from `states`, and from what else no round
        rematerializes.
        """
        work, seen, stack = defaultdict[int, float](float), {*roots}, [*roots]
        while stack:
            var = stack.pop()
            eqn = self._values.definition[var]
            if id(eqn) not in self._operations:
                self._operations[id(eqn)] = operations(eqn)
            work[self._rounds.round_of(var)] += self._operations[id(eqn)]
            for x in slices_among(self._values.operands(eqn)):
                if x not in seen:
                    seen.add(x)
                    if x not in states and self._may_rematerialize(x):
                        stack.append(x)
        return sum(work.values()) <= _NEARLY * max(work.values(), default=0)

    def _reads_of_earlier(self, index: int) -> Iterator[Var]:
        """Yield once what the own work of a round may rematerialize of earlier rounds.

        That are operands of its equations, and what leaves the groups after it.
        """
        if index == 0:
            return
        eqns = filter(_is_work, self._rounds.local.get(index, ()))
        operands = (x for e in eqns for x in self._values.operands(e))
        read = dict.fromkeys(slices_among(operands))
        for var in read | self._leaving_slices[index]:
            if self._rounds.round_of(var) < index and self._may_rematerialize(var):
                yield var

    def _cut(self, roots: Sequence[Var], states: set[Var]) -> Iterable[Var]:
        """Choose what to save so that `roots` are rematerialized within their round.

        `roots` are of one round, and `states` are saved already. Saved are those roots
        whose work takes slices of earlier rounds, or these slices: the smaller of both.
        """
        escaping: dict[Var, None] = {}
        reaching: dict[Var, bool] = {}

        def reaches(var: Var) -> bool:
            if var not in reaching:
                stack = [var]
                while stack:
                    eqn = self._values.definition[stack[-1]]
                    operands = [
                        x
                        for x in slices_among(self._values.operands(eqn))
                        if x not in states and self._may_rematerialize(x)
                    ]
                    index = self._rounds.round_of(stack[-1])
                    own = [v for v in operands if self._rounds.round_of(v) == index]
                    if missing := [v for v in own if v not in reaching]:
                        stack += missing
                        continue
                    outside = [
                        v for v in operands if v not in own and not self._is_cheap(v)
                    ]
                    escaping.update(dict.fromkeys(outside))
                    reaching[stack.pop()] = bool(outside) or any(map(reaching.get, own))
            return reaching[var]

        read = [v for v in roots if reaches(v)]
        return read if bytes_of(read) < bytes_of(escaping) else escaping

    def _is_cheap(self, var: Var) -> bool:
        """Whether to rematerialize a variable, from the start, is no work at all."""
        if var not in self._cheap:
            definition = self._values.definition
            self._cheap[var] = is_cheap(
                var, lambda v: definition[v] if self._may_rematerialize(v) else None
            )
        return self._cheap[var]

    def _computed_in_round(self, index: int) -> dict[Var, None]:
        """List the variables that a round's local stage computes, in program order.

        An equation with several results may be rematerialized for one of them while
        another is bitwise-observable (the program may compare its exact bits). That
        result is not computed a second time, but read from the round that computed it.
        """
        results = [v for eqn in self._equations[index] for v in eqn.outvars]
        if not self._observable:
            return dict.fromkeys(results)
        return dict.fromkeys(
            v
            for v in results
            if v not in self._observable or self._rounds.round_of(v) == index
        )

    def _operands_of_round(self, index: int) -> list[Operand]:
        """List the operands of a round's equations, without what it computes itself."""
        computed, operands = self._computed[index], []
        for eqn in self._equations[index]:
            for x in self._values.operands(eqn):
                if type(x) is Variable:
                    if x not in computed:
                        operands.append(x)
                elif type(x) is not Literal:
                    operands.append(x)
        return operands

    def _live_into_round(self, index: int) -> set[Var]:
        """Collect the partitioned variables whose slices a round reads as inputs.

        They are operands of its equations, and what reductions, folds, moves, loops and
        results of the program take after it, without the variables that the round
        computes itself. So they are arguments of the program or results of earlier
        rounds.
        """
        needed = {*slices_among(self._read[index])}
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


def _type(var: Var) -> tuple[tuple[int, ...], Any]:
    return var.aval.shape, var.aval.dtype


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
