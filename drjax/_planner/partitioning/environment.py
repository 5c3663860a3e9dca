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

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from drjax import _compat
from drjax._compat.jax_types import Literal, Primitive
from drjax._compat.types import Atom, Eqn, Var
from drjax._jaxprs.elementwise import ELEMENTWISE
from drjax._partition import Partition
from drjax._planner.implicit_communication import (
    ImplicitCommunication,
    gather_operands,
    implicit_communication,
)
from drjax._planner.inline import (
    CONTROL,
    InlinedJaxpr,
    is_rewritten,
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
from drjax._primitives.moves import partitions_of
from drjax.primitives import reduce_fold_p, scatter_p


@dataclass(frozen=True)
class EquationKinds:
    """The kind that each operand must have, and the kind that each result has."""

    operand_kinds: Sequence[Kind]
    result_kinds: Sequence[Kind]


@dataclass(frozen=True)
class LoopKinds(EquationKinds):
    """The kinds of a loop of rounds, and the environment of each of its bodies.

    `bodies` is `(body,)` of a scan and a program, `(condition, body)` of a while, one
    for each branch of a cond.
    """

    bodies: tuple["Environment", ...]


@dataclass(frozen=True, eq=False)
class Environment:
    """The kinds of the variables of an inlined jaxpr, during and after inference.

    Attributes:
      program: The inlined jaxpr, of a whole program or of the body of a loop.
      partition: The partition of the program, None if it has no building block.
      argument_kinds: For each argument of `program` the kind that is declared, or for
        the body of a loop is known from outside; None or free: it is inferred.
      cells: For each variable that is no longer free its kind.
      loops: For each loop of rounds its kinds, as of its last visit.
      signatures: For each building block what `signature` returns.
      open_eqns: The equations that the first phase of inference has not settled.
    """

    program: InlinedJaxpr
    partition: Partition | None
    argument_kinds: Sequence[Kind | None]
    cells: dict[Any, Kind]
    loops: dict[Any, LoopKinds] = field(default_factory=dict)
    signatures: dict[Any, EquationKinds | None] = field(default_factory=dict)
    open_eqns: list[Any] = field(default_factory=list)

    def __getitem__(self, atom: Atom) -> Kind:
        """Return the inferred kind of a variable or literal: global or partitioned.

        A variable that is still free, without an inferred kind, counts as global. A
        scalar literal is global, too.
        """
        kind = self.cell(atom)
        # No use demands slices of a free variable, so the server computes it once.
        return GLOBAL if kind is FREE else kind

    def cell(self, atom: Atom) -> Kind:
        """Return the kind of a variable or literal, as far as it is inferred.

        Free for a variable whose kind is not inferred yet, and for a scalar literal,
        which fits any kind; global for a literal with a shape.
        """
        if type(atom) is Literal:
            # A scalar literal fits a partitioned partner, as pointwise equations
            # broadcast it; an array literal has a shape and is global.
            aval: Any = atom.aval
            return GLOBAL if aval.shape else FREE
        return self.cells.get(atom, FREE)

    def join(self, atoms: Sequence[Atom], kinds: Sequence[Kind | None]) -> list[Var]:
        """Set the kinds of variables that are still free, and return these variables.

        None and free change nothing. The kind of any other variable stays, also if it
        differs from the new one: inference never replaces a kind. `contradictions`
        detects such differences afterwards.
        """
        raised = []
        for atom, kind in zip(atoms, kinds, strict=True):
            if kind is None or kind is FREE or isinstance(atom, Literal):
                continue
            if self.cells.get(atom, FREE) is FREE:
                self.cells[atom] = kind
                raised.append(atom)
        return raised

    def group_axes(self, atoms: Sequence[Atom]) -> tuple[int | None, ...]:
        """Return the group axis of each atom; None: global, literal or still free."""
        get = self.cells.get
        # Literals, which have no hash, are never partitioned.
        return tuple([None if type(a) is Literal else get(a, FREE).axis for a in atoms])

    def has_free(self, eqn: Eqn) -> bool:
        """Whether a variable of an equation has no inferred kind yet."""
        cells = self.cells
        # Loops, as all equations are asked, several times.
        for v in eqn.outvars:
            if v not in cells:
                return True
        for v in eqn.invars:
            if type(v) is not Literal and v not in cells:
                return True
        return False

    @functools.cached_property
    def _pointwise(self) -> frozenset[str]:
        single = self.partition is not None and self.partition.size == 1
        return frozenset() if single else ELEMENTWISE

    def is_pointwise(self, eqn: Eqn) -> bool:
        """Whether an equation is pointwise, and so implies no communication.

        In a partition of one group, also such an equation may be a gather.
        """
        return eqn.primitive.name in self._pointwise

    def common_kind(self, eqn: Eqn) -> Kind | None:
        """The kind of all that is partitioned of a pointwise equation, if it is one.

        None unless an operand is partitioned, all that is along the same axis, and the
        equation is pointwise: then it is work of each group.
        """
        if not self.is_pointwise(eqn):
            return None
        get, common = self.cells.get, None
        for v in eqn.invars:
            kind = None if type(v) is Literal else get(v)
            if kind is not None and kind.axis is not None:
                if common is not None and kind is not common and kind != common:
                    return None
                common = kind
        if common is not None:
            for v in eqn.outvars:
                kind = get(v)
                if kind is not None and kind.axis is not None and kind != common:
                    return None
        return common

    def settle(self, eqn: Eqn) -> bool:
        """Set the kinds of a pointwise equation's results, if operands have theirs.

        False unless it is work of each group, or of the server, whatever other
        equations demand.
        """
        if not self.is_pointwise(eqn):
            return False
        cells, common = self.cells, GLOBAL
        for v in eqn.invars:
            if type(v) is not Literal:
                kind = cells.get(v)
                if kind is None:
                    return False
                if kind is not common and kind.axis is not None:
                    if common is not GLOBAL and kind != common:
                        return False
                    common = kind
        for v in eqn.outvars:
            kind = cells.setdefault(v, common)
            if kind is not common and kind.axis is not None and kind != common:
                return False
        return True

    @functools.cached_property
    def others(self) -> list[Eqn]:
        """The equations that are not pointwise work on values of a single kind.

        These alone may communicate, have rounds, or mix groups. Asked for after the
        inference, as each pass looks at them.
        """
        others = []
        for eqn in self.open_eqns or self.program.eqns:
            if not self.is_pointwise(eqn):
                others.append(eqn)
            elif self.common_kind(eqn) is None:
                axes = self.group_axes(eqn.invars) + self.group_axes(eqn.outvars)
                if axes.count(None) < len(axes):
                    others.append(eqn)
        return others

    def signature(self, eqn: Eqn) -> EquationKinds | None:
        """Return the kinds that a building block over the partition takes and returns.

        None for any other equation, also for a building block over another partition.
        The kinds follow from the equation alone, not from the inferred kinds. Of a move
        of slices between a population and a cohort of it, the side that is not over the
        partition of this environment is global, and so is the index.
        """
        if self.partition is None or "partition" not in eqn.params:
            return None
        known = self.signatures.get(eqn, _UNKNOWN)
        if known is _UNKNOWN:
            known = self.signatures[eqn] = self._signature(eqn, self.partition)
        return known

    def _signature(self, eqn: Eqn, partition: Partition) -> EquationKinds | None:
        # A population, of which the groups are a cohort, is a global value.
        operand, result = partitions_of(eqn)
        own = operand is partition or operand == partition
        if operand is not result and own != (result == partition):
            sides = [_kind_of_end(own), _kind_of_end(not own)]
            return EquationKinds([sides[0], GLOBAL], sides[1:])
        if not own:
            return None
        if eqn.primitive is reduce_fold_p:
            n_states = eqn.params["n_states"]
            others = [GLOBAL] * (len(eqn.invars) - n_states)
            return EquationKinds(others + [PARTITIONED] * n_states, [GLOBAL] * n_states)
        return _kinds_of_block(eqn.primitive, len(eqn.invars), len(eqn.outvars))

    def is_loop(self, eqn: Eqn) -> bool:
        """Whether an equation is a loop of rounds, whose bodies have their own plans.

        These are a `program` over another partition; a `scan`, `while` or `cond` of
        which an operand is partitioned, as far as inferred, or a body binds a building
        block over the partition; and the scans that rematerialization has rewritten.
        Not among them is a scan that implies communication, as its steps are the
        groups. Other loops are work of the server.
        """
        if eqn.primitive.name not in CONTROL:
            return False
        if eqn.primitive.name == "program":
            return True
        # First, as the operands of such a scan over the groups are partitioned, too.
        if self.implicit_communication(eqn) is not None:
            return False
        # Loops have no unbatching rule: also without blocks, their bodies are planned.
        if any(axis is not None for axis in self.group_axes(eqn.invars)):
            return True
        # Rematerialization rewrites loops of rounds only.
        if is_rewritten(eqn):
            return True
        # Each visit of the equation asks this, and its bodies may be large.
        return self.partition is not None and self.program.memoize(
            _holds_blocks, self.program, eqn, self.partition
        )

    def implicit_communication(self, eqn: Eqn) -> ImplicitCommunication | None:
        """Recognize an equation that implies communication, as a sum of groups does.

        It depends on which operands are partitioned, as far as inferred, so the answer
        may change while kinds are inferred. In a partition of one group, the result may
        be a gather of the operands, for an equation that cannot be unbatched. None if
        the equation implies no communication that has a plan, is a building block over
        the partition, or has no partitioned operand.
        """
        if self.partition is None or self.is_pointwise(eqn):
            return None
        if self.signature(eqn) is not None:
            return None
        axes = self.group_axes(eqn.invars)
        if all(axis is None for axis in axes):
            return None
        known = self.program.memoize(_known_index, self.program, eqn)
        implicit = self.program.memoize(implicit_communication, eqn, axes, known)
        # A loop is never gathered: `is_loop` would be false for it, and the blocks in
        # its bodies would have no plan.
        single = self.partition.size == 1 and eqn.primitive.name not in CONTROL
        if implicit is None and single and self.unbatched(eqn) is None:
            # A gather from one group costs nothing, so that any equation has a plan.
            return gather_operands(eqn, axes)
        return implicit

    def unbatched(self, eqn: Eqn) -> UnbatchedEquation | None:
        """Derive the equation of one group, by the kinds inferred so far.

        If no operand is partitioned, the results' group axes decide: of the ways in
        which one operand could be partitioned, the first that gives the results these
        axes. None if no operand or result is partitioned, as far as inferred, if the
        equation mixes the slices of different groups, or if its primitive has no
        unbatching rule.
        """
        axes = self.group_axes(eqn.invars)
        if axes.count(None) < len(axes):
            if self.is_pointwise(eqn):  # faster than to look it up
                return unbatch(eqn, axes)
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

    def unbatching_candidates(self, eqn: Eqn) -> list[UnbatchedEquation]:
        """Unbatch an equation for each way in which one operand could be partitioned.

        An operand could be partitioned along each of its axes of size n, the number of
        groups. The inferred kinds are not read.
        """
        return unbatching_candidates(eqn, self._num_groups)

    @property
    def _num_groups(self) -> int:
        # No axis has size -1, so without a partition there are no candidates.
        """The number of groups of the partition; without one -1, which no axis has."""
        return -1 if self.partition is None else self.partition.size

    def is_redundant_scatter(self, eqn: Eqn) -> bool:
        """Whether an equation scatters a value that already has the group axis 0.

        Such a scatter changes nothing. Derivatives have it: the transpose of a gather
        scatters the cotangent of its result, which is partitioned where the result was
        used in equations that are the work of each group.
        """
        if self.signature(eqn) is None or eqn.primitive is not scatter_p:
            return False
        # Along another axis, the scatter would move elements between groups.
        return self.cell(eqn.invars[0]) == PARTITIONED


def _known_index(program: InlinedJaxpr, eqn: Eqn) -> tuple[int, ...] | None:
    """Return the k indices, `[k, 1]`, of a `gather`, `scatter` or `scatter-add`.

    None if they are not known while planning or have another shape, and for any other
    equation. If they are a permutation of the groups, reading or updating groups is a
    permute.
    """
    if eqn.primitive.name not in ("gather", "scatter", "scatter-add"):
        return None
    shape = eqn.invars[1].aval.shape
    if len(shape) != 2 or shape[1] != 1:
        return None
    value = program.known_integers.value(eqn.invars[1])
    return None if value is None else tuple(value[:, 0].tolist())


_UNKNOWN: Any = object()


def _kinds_of_block(
    primitive: Primitive, num_operands: int, num_results: int
) -> EquationKinds | None:
    """Return the kinds of a building block of so many operands and results."""
    known = signature(primitive)
    if known is None:
        return None
    operands, result = known
    # A mapped function may have no operands at all, once unused ones are dropped.
    kinds = [*operands, *operands[-1:] * num_operands][:num_operands]
    return EquationKinds(kinds, [result] * num_results)


def _kind_of_end(own: bool) -> Kind:
    """Return the kind of an operand or result of a move of slices.

    It is partitioned if it is over the partition that is planned (`own`); if not, it is
    a population over another partition, a global value.
    """
    return PARTITIONED if own else GLOBAL


def _holds_blocks(program: InlinedJaxpr, eqn: Eqn, partition: Partition) -> bool:
    """Whether the body of a loop binds a building block over a partition.

    It counts at any depth, except inside mapped functions. A `program` over another
    partition in a body counts, too, as it has rounds of its own. Bodies that are not
    inlined yet are searched as jaxprs.
    """
    if any(uses_blocks(j, partition) for j in _compat.jaxprs_in(eqn.params)):
        return True
    return any(
        inner.primitive.name == "program" or _holds_blocks(body, inner, partition)
        for body in program.known_bodies.get(eqn, ())
        for inner in body.eqns
        if inner.primitive.name in CONTROL
    )
