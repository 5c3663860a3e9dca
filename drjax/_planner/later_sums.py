"""Sums that wait for a later round, which does the work of their operands anyway.

Input: the rounds of an inlined jaxpr, each equation as early as possible. Output: for
some reductions a later round.

A gradient through several rounds rematerializes work of an earlier one. So a value that
nothing but the end of the program reads, as a loss next to its gradient, is summed
there: its own round then has no such work at all. A mean with weights is an example:

    round 1: sum of the weights           instead of: losses, their sum, and this
    round 2: losses, their sum, and the gradient      losses again, and the gradient

Invariants: no group, move or loop needs what waits; the number of rounds stays. Sharp
edges: with fences or ordered effects the order is that of the program.
"""

from collections.abc import Iterable, Set
from typing import Any

from drjax import _compat
from drjax._compat.jax_types import Literal
from drjax._compat.types import Atom, Eqn, Var
from drjax._jaxprs.walk import backward_slice, definitions, variables
from drjax._planner.fences import fence_p
from drjax._planner.partitioning.environment import Environment
from drjax._planner.rounds import RoundAssignment
from drjax._planner.work import PER_BYTE, bytes_of, operations
from drjax.primitives import reduce_mean_p, reduce_sum_p

# The part of its work that the later round has to do anyway.
_SHARED = 0.5


def later_sums(
    kinds: Environment, rounds: RoundAssignment, observable: Set[Var]
) -> dict[int, int]:
    """Find the sums to delay: by the `id` of the equation the index of its round.

    `observable` are variables that are not rematerialized, whatever reads them.
    """
    starts = [
        index for index, eqns in rounds.exchanges.items() if any(map(_is_sum, eqns))
    ]
    if not starts or max(rounds.local, default=0) <= min(starts):
        return {}
    eqns = kinds.program.eqns
    if any(e.primitive is fence_p or _compat.has_ordered_effects(e) for e in eqns):
        return {}
    sums = _sums_for_the_end(kinds, rounds)
    later = [index for index in sorted(rounds.local) if sums and index > min(sums)]
    if not later:
        return {}
    cones = _Cones(kinds, rounds, observable)
    needed, result = dict[int, set[int]](), dict[int, int]()
    for start, own in sums.items():
        waiting = {id(e) for e in own}
        staying = [e for e in rounds.exchanges[start] if id(e) not in waiting]
        staying += rounds.loops.get(start, [])
        partitioned = [v for v in kinds.program.outvars if kinds[v].partitioned]
        done = cones.of([*partitioned, *(v for e in staying for v in e.invars)])
        for eqn in own:
            cone = cones.of(eqn.invars)
            # Less than it takes to save the operand is nothing.
            least = PER_BYTE * bytes_of(variables(eqn.invars))
            for index in later:
                if index > start:
                    if index not in needed:
                        reads = (v for e in rounds.local[index] for v in e.invars)
                        needed[index] = cones.of(reads)
                    shared = cones.work((cone & needed[index]) - done)
                    if shared > max(least, _SHARED * cones.work(cone)):
                        result[id(eqn)] = index
                        break
    return result


def _sums_for_the_end(
    kinds: Environment, rounds: RoundAssignment
) -> dict[int, list[Eqn]]:
    """By round, list the sums whose results only the server computes with."""
    server = {id(e) for eqns in rounds.server.values() for e in eqns}
    # What groups, communication and loops need.
    read: set[Any] = set()
    for eqn in reversed(kinds.program.eqns):
        if id(eqn) not in server or not read.isdisjoint(eqn.outvars):
            read.update([v for v in eqn.invars if type(v) is not Literal])
    results = {
        index: [e for e in eqns if _is_sum(e) and read.isdisjoint(e.outvars)]
        for index, eqns in rounds.exchanges.items()
    }
    return {index: eqns for index, eqns in results.items() if eqns}


def _is_sum(eqn: Eqn) -> bool:
    return eqn.primitive in (reduce_sum_p, reduce_mean_p)


class _Cones:
    """The work in the groups on which variables depend, as far as it may be repeated.

    Sets have the `id`s of equations.
    """

    def __init__(
        self, kinds: Environment, rounds: RoundAssignment, observable: Set[Var]
    ) -> None:
        self._definition = definitions(kinds.program.eqns)
        self._local = {id(e) for eqns in rounds.local.values() for e in eqns}
        self._observable = observable
        self._operations: dict[int, float] = {}
        self._eqns: dict[int, Eqn] = {}

    def of(self, atoms: Iterable[Atom]) -> set[int]:
        eqns, _ = backward_slice(atoms, self._definition, self._is_repeated)
        self._eqns.update(eqns)
        return set(eqns)

    def _is_repeated(self, var: Var, eqn: Eqn) -> bool:
        local = id(eqn) in self._local
        return local and not eqn.effects and var not in self._observable

    def work(self, cone: Iterable[int]) -> float:
        for i in cone:
            if i not in self._operations:
                self._operations[i] = operations(self._eqns[i])
        return sum(self._operations[i] for i in cone)
