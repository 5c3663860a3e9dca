"""The round of each equation, with as few rounds as possible.

Input: the kinds of an inlined jaxpr. Output: `RoundAssignment`: for each equation the
round in which it runs, for each variable the round from which on it is available.

Communication is a reduction or a fold, a move of slices between groups, or a loop with
a plan of its own. Let

    round(argument or constant) = 0
    round(equation)             = max over its operands of round(operand)
    round(result)               = round(equation) + 1 if the equation communicates
                                  round(equation)     otherwise

The number of rounds is minimal: round(v) is the largest number of communicating
equations on a path of dependencies to v. They depend on each other, so no plan can run
two of them in one round, and no plan has fewer rounds than the longest path. The
assignment attains this bound. It also puts independent reductions into the same round,
where they are communicated together, and all local equations of a round into one stage.

Equations with ordered effects keep the order of the program, and what is after a fence
(`fences.py`) is in no earlier round than what is before it, at the cost of rounds.

Invariants: operands are available in the round of their equation or earlier; equations
keep their order within a round. Sharp edges: a broadcast does not end a round, as the
server's stage of a round precedes its local stage.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from drjax import _compat
from drjax._compat.jax_types import Literal
from drjax._compat.types import Atom, Eqn
from drjax._jaxprs.walk import variables
from drjax._planner.exchanges import ExchangeRule, exchange_rule
from drjax._planner.fences import fence_p
from drjax._planner.gathered_columns import columns_p
from drjax._planner.partitioning.environment import Environment


class RoundAssignment:
    """The round of each variable and equation of an inlined jaxpr, counted from 0.

    An equation is in the first round in which all of its operands are available; what
    it communicates is available from the next round on.

    Attributes:
      local: From the index of a round to its equations on partitioned values. Rounds
        without such equations are missing, here and below.
      server: To its equations on global values.
      exchanges: To what communicates after its local stage, in the order of a plan.
      loops: To the loops of rounds at its end.
      columns: To its `columns` equations: work on coordinates whose operands are there
        when its reductions and moves are done.
    """

    def __init__(self, kinds: Environment, earliest: Mapping[int, int] | None = None):
        # By the `id` of an equation that communicates.
        self._rules: dict[int, ExchangeRule] = {}
        # By the `id` of an equation, the first round in which it may be.
        earliest = earliest or {}
        self._available: dict[Any, int] = {}
        self.local: dict[int, list] = {}
        self.server: dict[int, list] = {}
        self.exchanges: dict[int, list] = {}
        self.loops: dict[int, list] = {}
        self.columns: dict[int, list] = {}
        communicated = set[Any]()  # by exchanges
        of_groups = set[Any]()  # the results of local stages
        # The first round in which ordered effects may run: the server's stage of a
        # round precedes its local one.
        in_server = in_groups = 0
        available = self._available
        for eqn in kinds.program.eqns:
            index = earliest.get(id(eqn), 0) if earliest else 0
            for v in eqn.invars:
                if type(v) is not Literal and available.get(v, 0) > index:
                    index = available[v]
            if kinds.is_pointwise(eqn):  # most equations
                out = eqn.outvars[0]
                local = kinds[out].axis is not None
                (self.local if local else self.server).setdefault(index, []).append(eqn)
                if index:
                    available.update(dict.fromkeys(eqn.outvars, index))
                if local:
                    of_groups.update(eqn.outvars)
                continue
            axes = kinds.group_axes(eqn.outvars or eqn.invars)
            local = axes.count(None) < len(axes)
            for v in eqn.params.get("after", ()) if eqn.primitive is fence_p else ():
                index = max(index, self.round_of(v) + (v in of_groups and not local))
            ordered = _compat.has_ordered_effects(eqn)
            if ordered:
                index = max(index, in_groups if local else in_server)
            after = index
            rule = exchange_rule(eqn, kinds)
            if rule is not None:
                self._rules[id(eqn)] = rule
                self.exchanges.setdefault(index, []).append(eqn)
                after = index + 1
            elif kinds.is_loop(eqn):
                self.loops.setdefault(index, []).append(eqn)
                after = index + 1
            elif local:
                of_groups.update(eqn.outvars)
                # An equation without results runs for its effects, where its operands
                # are: in the groups if one of them is partitioned.
                self.local.setdefault(index, []).append(eqn)
            elif eqn.primitive is columns_p and all(
                v in communicated or self.round_of(v) < index
                for v in variables(eqn.invars)
            ):
                # Operands that the server computes in this round would be too late.
                self.columns.setdefault(index - 1, []).append(eqn)
            else:
                self.server.setdefault(index, []).append(eqn)
            if ordered:
                in_groups = max(in_groups, after)
                in_server = max(in_server, index + (after > index or local))
            if after > index and not kinds.is_loop(eqn):
                communicated.update(eqn.outvars)
            available.update(dict.fromkeys(eqn.outvars, after))
        # Reductions that are results of the program come first and in its order, so
        # that a printed plan reads like the program.
        # Reversed: a variable that is several results has the position of the first.
        position = {v: i for i, v in reversed(list(enumerate(kinds.program.outvars)))}

        def order(eqn: Eqn) -> tuple[int, int]:
            rank = self._rules[id(eqn)].rank
            last = len(position)
            return rank, 0 if rank else position.get(eqn.outvars[0], last)

        for eqns in self.exchanges.values():
            eqns.sort(key=order)

    def exchanges_of(self, index: int) -> Iterator[tuple[Eqn, ExchangeRule]]:
        """Yield what communicates after the local stage of a round, with its rules."""
        return ((eqn, self._rules[id(eqn)]) for eqn in self.exchanges.get(index, ()))

    def round_of(self, atom: Atom) -> int:
        """Return the index of the first round in which a variable is available, from 0.

        An argument, a constant or a literal is available in round 0; what is
        communicated in a round, in the next one.
        """
        return 0 if isinstance(atom, Literal) else self._available.get(atom, 0)
