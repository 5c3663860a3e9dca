"""The environment of partitioning inference: the kind of each variable, so far.

Input: an inlined jaxpr, its partition and the kinds of its arguments. Output:
`Environment`, a table from variables to elements of the lattice, which also tells what
an equation is, given the kinds of its operands: a building block, a loop of rounds,
communication, or work of each group.

Invariants: `infer_partitioning` alone writes to an environment, and only before it
returns it; all later passes read. Sharp edges: as the kinds of operands are raised, an
equation may become a loop of rounds or communication, so what is asked during inference
is asked again after it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.extend.core import Literal

from drjax import _compat
from drjax._partition import Partition
from drjax._planner.implicit_communication import (
    ImplicitCommunication,
    gather_operands,
    implicit_communication,
)
from drjax._planner.inline import (
    CONTROL,
    InlinedJaxpr,
    is_rewritten_scan,
    uses_blocks,
)
from drjax._planner.partitioning.kind import (
    FREE,
    GLOBAL,
    PARTITIONED,
    Kind,
    signature,
)
from drjax._planner.unbatching.core import UnbatchedEquation
from drjax._planner.unbatching.rules import (
    unbatch,
    unbatch_single_group,
    unbatching_candidates,
)
from drjax.primitives import scatter_p


@dataclass(frozen=True)
class EquationKinds:
    """The kinds of an equation's operands and results.

    Attributes:
      operand_kinds: The kind that each operand must have.
      result_kinds: The kind of each result.
    """

    operand_kinds: Sequence[Kind]
    result_kinds: Sequence[Kind]


@dataclass(frozen=True)
class LoopKinds(EquationKinds):
    """What is inferred of a `scan`, `while` or `cond` of rounds.

    Attributes:
      bodies: An environment for each of its jaxprs, in the order of
        `InlinedJaxpr.bodies`.
    """

    bodies: tuple["Environment", ...]


@dataclass(frozen=True, eq=False)
class Environment:
    """The kinds of the variables of an inlined jaxpr, so far or as inferred.

    Attributes:
      program: The inlined jaxpr.
      partition: Its partition, None if it has no building block.
      argument_kinds: The kind that each argument is declared to have; None: inferred.
      cells: The kind of each variable that is not free.
      loops: For each loop of rounds the kinds of its operands, results and bodies.
    """

    program: InlinedJaxpr
    partition: Partition | None
    argument_kinds: Sequence[Kind | None]
    cells: dict[Any, Kind]
    loops: dict[Any, LoopKinds] = field(default_factory=dict)

    def __getitem__(self, atom: Any) -> Kind:
        """The kind of a variable after inference; literals and free ones are global."""
        kind = self.cell(atom)
        return GLOBAL if kind is FREE else kind

    def cell(self, atom: Any) -> Kind:
        """The kind of a variable as far as it is inferred; else free."""
        if isinstance(atom, Literal):
            # A scalar literal fits a partitioned partner, as pointwise equations
            # broadcast it; an array literal has a shape and is global.
            aval: Any = atom.aval
            return GLOBAL if aval.shape else FREE
        return self.cells.get(atom, FREE)

    def join(self, atoms: Sequence[Any], kinds: Sequence[Kind | None]) -> list[Any]:
        """Join kinds into the cells of variables.

        Two kinds that are not free have no join: the first one stays, and
        `consistency.py` looks for the contradiction afterwards.

        Args:
          atoms: Variables, or literals, which are ignored.
          kinds: A kind for each of them; None or free changes nothing.

        Returns:
          The variables that were free and are no longer.
        """
        raised = []
        for atom, kind in zip(atoms, kinds, strict=True):
            if kind is None or kind == FREE or isinstance(atom, Literal):
                continue
            if self.cell(atom) == FREE:
                self.cells[atom] = kind
                raised.append(atom)
        return raised

    def group_axes(self, atoms: Sequence[Any]) -> tuple[int | None, ...]:
        """The group axis of each variable; None: it is not partitioned, so far."""
        return tuple([self.cell(atom).axis for atom in atoms])

    def signature(self, eqn) -> tuple[Kind, Kind] | None:
        """`(kind of operands, kind of results)` of a building block over the partition.

        None for any other equation, also for building blocks over other partitions.
        """
        if self.partition is None or eqn.params.get("partition") != self.partition:
            return None
        return signature(eqn.primitive)

    def is_loop(self, eqn) -> bool:
        """Whether a `scan`, `while` or `cond` is a loop of rounds, with its own plan.

        Other loops are work of the server, or imply communication (maps over groups).
        """
        if eqn.primitive.name not in CONTROL:
            return False
        if self.implicit_communication(eqn) is not None:
            return False
        if any(axis is not None for axis in self.group_axes(eqn.invars)):
            return True
        # Rematerialization rewrites loops of rounds only.
        if is_rewritten_scan(eqn):
            return True
        return self.partition is not None and self.program.memoize(
            _holds_blocks, eqn, self.partition
        )

    def implicit_communication(self, eqn) -> ImplicitCommunication | None:
        """The communication that an equation implies, for the kinds of its operands.

        None if it implies none, is a building block, or has no partitioned operand.
        """
        if self.partition is None or self.signature(eqn) is not None:
            return None
        axes = self.group_axes(eqn.invars)
        if all(axis is None for axis in axes):
            return None
        implicit = self.program.memoize(implicit_communication, eqn, axes)
        single = self.partition.size == 1 and eqn.primitive.name not in CONTROL
        if implicit is None and single and self.unbatched(eqn) is None:
            # A gather from one group costs nothing, so that any equation has a plan.
            return gather_operands(eqn, axes)
        return implicit

    def unbatched(self, eqn) -> UnbatchedEquation | None:
        """The equation of one group, by the group axes of operands, or else of results.

        None if no variable is partitioned, or if the equation mixes groups.
        """
        axes = self.group_axes(eqn.invars)
        if any(axis is not None for axis in axes):
            unbatched = self.program.memoize(unbatch, eqn, axes)
            if unbatched is None and self._num_groups == 1:
                return unbatch_single_group(eqn, axes)
            return unbatched
        results = self.group_axes(eqn.outvars)
        if all(axis is None for axis in results):
            return None
        # The first one, by operands and axes in their order: a deterministic choice.
        for candidate in self.unbatching_candidates(eqn):
            pairs = zip(results, candidate.out_axes, strict=True)
            if all(axis in (None, out) for axis, out in pairs):
                return candidate
        return None

    def unbatching_candidates(self, eqn) -> list[UnbatchedEquation]:
        """The equation of one group for each axis along which an operand has n groups.

        [] if there is no such axis, or no unbatching rule for it.
        """
        return unbatching_candidates(eqn, self._num_groups)

    @property
    def _num_groups(self) -> int:
        # No axis has size -1, so without a partition there are no candidates.
        return -1 if self.partition is None else self.partition.size

    def is_redundant_scatter(self, eqn) -> bool:
        """Whether a scatter takes a partitioned value, as derivatives may.

        The transpose of a gather scatters the cotangent of its result, which is
        partitioned where the result was used in unbatchable equations.
        """
        if self.signature(eqn) is None or eqn.primitive is not scatter_p:
            return False
        return self.cell(eqn.invars[0]) == PARTITIONED


def _holds_blocks(eqn, partition: Partition) -> bool:
    """Whether the jaxprs in an equation's parameters bind blocks of a partition."""
    return any(uses_blocks(j, partition) for j in _compat.jaxprs_in(eqn.params))
