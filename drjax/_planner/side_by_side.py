"""Programs over several partitions: blocks of all but one move into bodies.

Input: an inlined jaxpr with the building blocks of several partitions. Output: the same
results, with building blocks of one partition, the plan's own. Those of another one are
in the bodies of `program` equations, whose plans have rounds of their own:

    x -> [blocks over A] -> y -> [blocks over B] -> z -> [blocks over A] -> ...
                                 program over B

What a `program` equation takes and gives are global values of the plan; those that are
partitioned over B are slices in its body alone. Its body has the blocks over B, and the
equations between them: what depends on one of them, and is taken by one of them.

The equations are divided by stages of dependencies: a path from one body back to itself
would pass through an equation outside of it. Let

    stage(equation over B, or between two) = the least odd number
    stage(other equation)                  = the least even number

that is no less than that of any operand's definition; an equation is between two only
if an operand is of an odd stage, and none may have slices of A. Then each odd stage is
one body.

Invariants: a body is no bigger than its stage, and no equation is computed twice. Sharp
edges: work on slices of B after its last block is the server's.
"""

from collections.abc import Iterable
from typing import Any

from drjax import _compat
from drjax._compat.jax_types import Primitive
from drjax._compat.types import Eqn, Var
from drjax._jaxprs.walk import variables
from drjax._partition import Partition
from drjax._planner.inline import CONTROL, InlinedJaxpr, uses_blocks
from drjax._planner.partitioning.kind import PARTITIONED, signature
from drjax._primitives.moves import partitions_of
from drjax._primitives.registration import BLOCKS

program_p = Primitive("program")
program_p.multiple_results = True


def separate(
    program: InlinedJaxpr, own: Partition, others: Iterable[Partition]
) -> InlinedJaxpr:
    """Move the building blocks of other partitions to bodies of `program` equations.

    A `program` equation is one whose body has a plan of its own, over another
    partition; its operands and results are global values of the plan, which is over
    `own`.
    """
    return _separate_with_slices(program, own, [*others], set())


def _separate_with_slices(
    program: InlinedJaxpr, own: Partition, others: list[Partition], slices: set[Var]
) -> InlinedJaxpr:
    """Move blocks of other partitions to bodies, in a program or in the body of a loop.

    `slices` are the arguments of the body of a loop that may be partitioned over `own`.
    Equations without building blocks that take them stay outside of the new bodies,
    which take global values.
    """
    for other in others:
        program = _Separation(program, own, other, others, slices).result()
    return program


class _Separation:
    """The separation of the building blocks over one other partition.

    Equations are numbered by stages: the least numbers that do not decrease from an
    operand's definition to its use, odd for what goes to a body over the other
    partition, even for all else. Each odd stage becomes one `program` equation, which
    runs its equations as a plan over the other partition. `others` are all partitions
    but the plan's own, and `slices` the arguments that may be partitioned over `own`.
    """

    def __init__(
        self,
        program: InlinedJaxpr,
        own: Partition,
        other: Partition,
        others: list[Partition],
        slices: set[Var],
    ):
        self.program, self.own, self.other = program, own, other
        self.partitions = [own, *others]
        # The variables that may have slices of the plan's partition. A body takes
        # global values, so work on them stays outside; among them are values that
        # follow from slices by a reduction of `jax.lax`.
        self.slices = {*slices}
        self.used = [self._partitions_used(eqn) for eqn in program.eqns]
        self.stages = self._stages()

    def result(self) -> InlinedJaxpr:
        """Build the inlined jaxpr with one `program` equation for each odd stage.

        Equations are in the order of their stages, and keep their order within an even
        stage. A loop with blocks of the other partition stays, with rewritten bodies,
        if it also has blocks of the plan's own or takes its slices.
        """
        program, bodies = self.program, dict(self.program.known_bodies)
        for eqn, used in zip(program.eqns, self.used, strict=True):
            if {self.own, self.other} <= used and eqn.primitive.name in CONTROL:
                bodies[eqn] = tuple(
                    _separate_with_slices(
                        body, self.own, [self.other], self._slices_in(eqn, body)
                    )
                    for body in program.bodies(eqn)
                )
        groups: dict[int, list] = {}
        for eqn, stage in zip(program.eqns, self.stages, strict=True):
            groups.setdefault(stage, []).append(eqn)
        eqns: list[Any] = []
        for stage, members in sorted(groups.items()):
            if stage % 2:
                eqns.append(self._body(stage, members, bodies))
            else:
                eqns += members
        return InlinedJaxpr(
            program.invars, eqns, program.outvars, program.consts, bodies
        )

    def _partitions_used(self, eqn: Eqn) -> set[Partition]:
        """Return the partitions whose building blocks an equation binds, at any depth.

        The plan's own partition is added for a loop that takes its slices and binds
        blocks of another one, as no body over the other partition may take slices.

        Side effect: the results of `eqn` that may be slices of the plan's own partition
        are added to `self.slices`. So call it once for each equation, in order.
        """
        used, kinds = self._used_by(eqn), signature(eqn.primitive)
        takes = any(v in self.slices for v in variables(eqn.invars))
        if takes and used and eqn.primitive.name in CONTROL:
            # No body takes it whole.
            used = used | {self.own}
        if kinds is None:
            gives = takes or self.own in used
        else:
            gives = self.own in used and kinds[1] == PARTITIONED
        if gives and eqn.primitive is not program_p:
            self.slices.update(eqn.outvars)
        return used

    def _slices_in(self, eqn: Eqn, body: InlinedJaxpr) -> set[Var]:
        """Return the arguments of a loop's body that may be partitioned over `own`.

        Of a `cond`, they are those for operands in `self.slices`. Of a `scan` or
        `while` they are all arguments, if there is such an operand, as it may make any
        carried value partitioned.
        """
        if eqn.primitive.name == "cond":
            pairs = zip(eqn.invars[1:], body.invars, strict=True)
            return {arg for v, arg in pairs if v in self.slices}
        takes = any(v in self.slices for v in variables(eqn.invars))
        return {*body.invars} if takes else set()

    def _used_by(self, eqn: Eqn) -> set[Partition]:
        """Return the partitions whose building blocks an equation binds, at any depth.

        Of a `program` equation that is the partition of its body. Mapped functions are
        not entered.
        """
        if eqn.primitive in BLOCKS:
            return {*partitions_of(eqn)}
        if eqn.primitive is program_p:
            return {eqn.params["over"]}
        if eqn.primitive.name not in CONTROL:
            return set()
        jaxprs = [*_compat.jaxprs_in(eqn.params)]
        return {p for p in self.partitions if any(uses_blocks(j, p) for j in jaxprs)}

    def _stages(self) -> list[int]:
        """Number the equations by stages; those of an odd stage become one body.

        To a body go the equations that bind building blocks of `self.other` and none of
        `self.own`, and those between two of them: equations without blocks that depend
        on one, are needed by another, and take no slices of `self.own`. Such an
        equation has the least odd number that is no less than the numbers of its
        operands' definitions; any other equation has the least even one, from 0 on.
        """
        eqns = self.program.eqns
        blocks = [self.other in used and self.own not in used for used in self.used]
        # What blocks of the other partition take, not through blocks of others.
        needed: set[Any] = set()
        between = [False] * len(eqns)
        for i, eqn in reversed([*enumerate(eqns)]):
            between[i] = (
                not self.used[i]
                and any(v in needed for v in eqn.outvars)
                and not any(v in self.slices for v in variables(eqn.invars))
            )
            if blocks[i] or between[i]:
                needed.update(variables(eqn.invars))
        stage_of: dict[Any, int] = {}
        stages = []
        for i, eqn in enumerate(eqns):
            least = max((stage_of.get(v, 0) for v in variables(eqn.invars)), default=0)
            # Between two blocks is what depends on one: what precedes all is outside.
            inside = blocks[i] or (between[i] and least % 2 == 1)
            stages.append(least + (least % 2 != inside))
            stage_of.update(dict.fromkeys(eqn.outvars, stages[-1]))
        return stages

    def _body(
        self,
        stage: int,
        members: list[Eqn],
        bodies: dict[Eqn, tuple[InlinedJaxpr, ...]],
    ) -> Eqn:
        """Make the `program` equation that replaces the equations of an odd stage.

        It takes what `members` take from outside, and returns those of their results
        that other equations or the program's results use. Its body is added to
        `bodies`.
        """
        defined = {v for eqn in members for v in eqn.outvars}
        taken = dict.fromkeys(v for eqn in members for v in variables(eqn.invars))
        outside = {*variables(self.program.outvars)}
        for eqn, number in zip(self.program.eqns, self.stages, strict=True):
            outside.update(variables(eqn.invars) if number != stage else ())
        invars = [v for v in taken if v not in defined]
        outvars = [v for eqn in members for v in eqn.outvars if v in outside]
        effects = frozenset(effect for eqn in members for effect in eqn.effects)
        # Errors name the line of a building block.
        first = next(eqn for eqn in members if self.other in self._used_by(eqn))
        new = _compat.new_eqn(first, invars, outvars, {"over": self.other}, effects)
        new = new.replace(primitive=program_p)
        bodies[new] = (InlinedJaxpr(invars, members, outvars, {}, dict(bodies)),)
        return new
