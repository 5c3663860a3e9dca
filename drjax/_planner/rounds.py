"""Levels: the number of reductions on the longest path to a variable.

One level is one round of communication, so giving every equation the least level that
its operands allow makes the number of rounds minimal, lets independent reductions
travel together, and fuses all local work of a level into one stage. A loop that needs
a plan of its own ends a level, as a reduction does.
"""

from typing import Any

from jax.extend.core import Literal

from drjax import primitives
from drjax._planner.inline import Flat
from drjax._planner.partitioning.infer import Kinds
from drjax._primitives.reduce_ops import of_primitive


def reduction(primitive) -> str | None:
    """The name, in plans, of what this primitive sends from all groups."""
    if primitive is primitives.gather_p:
        return "gather"
    op = of_primitive(primitive)
    return op and op.name


class Levels:
    """The level of each variable and equation of a flat program."""

    def __init__(self, program: Flat, kinds: Kinds):
        self._levels: dict[Any, int] = {}
        self.local: dict[int, list] = {}  # equations on partitioned values
        self.server: dict[int, list] = {}
        self.reduces: dict[int, list] = {}
        self.loops: dict[int, list] = {}
        for eqn in program.eqns:
            level = max(map(self.of, eqn.invars), default=0)
            after = level
            if is_reduction(eqn, kinds):
                self.reduces.setdefault(level, []).append(eqn)
                after = level + 1
            elif kinds.is_loop(eqn):
                self.loops.setdefault(level, []).append(eqn)
                after = level + 1
            elif any(kinds[v].partitioned for v in eqn.outvars or eqn.invars):
                # What has no results is work for its effects, where its operands are.
                self.local.setdefault(level, []).append(eqn)
            else:
                self.server.setdefault(level, []).append(eqn)
            self._levels.update(dict.fromkeys(eqn.outvars, after))
        place = {v: i for i, v in reversed(list(enumerate(program.outvars)))}
        for eqns in self.reduces.values():  # results in their order, then all others
            eqns.sort(key=lambda eqn: place.get(eqn.outvars[0], len(place)))

    def of(self, atom) -> int:
        return 0 if isinstance(atom, Literal) else self._levels.get(atom, 0)


def is_reduction(eqn, kinds: Kinds) -> bool:
    if reduction(eqn.primitive) is None:
        return False
    return eqn.params["partition"] == kinds.partition
