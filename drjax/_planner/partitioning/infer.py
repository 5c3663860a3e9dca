"""Partitioning inference: is a variable global or partitioned?

Input: an `InlinedJaxpr`, its partition, and the kinds of arguments that the user has
declared. Output: `PartitioningInference`, a table from variables to kinds; `check`
refuses programs without a meaning.

The lattice is that of `kind.py`: free below global and below partitioned along each
axis. Arguments start free, and so do values computed from free values only. Three
phases raise variables; each is the least fixed point of its transfer rules:

1. forward: results of drjax primitives and of unbatchable equations on partitioned
   operands. These kinds follow from the program and admit no choice;
2. demands for global values (a broadcast, an equation that mixes groups), backward
   through free values. They precede phase 3, since a global value can still be
   scattered, and a partitioned one cannot become global without communication;
3. demands for partitioned values (a map, a reduction, a pointwise equation with a
   partitioned partner), backward.

What is free in the end is global. A partitioned value where a global one is needed
has no meaning and is refused; a global `[n, ...]` value where a partitioned one is
needed is a scatter.

Termination: a transfer rule raises free variables only, and the lattice has two levels,
so each variable is raised at most once in a run. The worklist receives the equations
next to a variable only when it is raised, so a run of P phases visits at most `P E +
(uses + 1, summed over the variables)` of E equations. Where demands of phase 3
contradict each other, the variables are forced to be global and the run starts again;
the forced set grows strictly and is bounded by the number of variables. Bodies of loops
iterate over their carried values with the same argument; see `control_flow.py`.

Invariants: the result does not depend on debug data. Within a run no variable is
lowered. Sharp edges: of two demands for different axes, the one first visited is
recorded and the other detected afterwards (`_inconsistent_variables`). The order of the
worklist is that of the equations, so the outcome is deterministic.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from jax.extend.core import Literal

from drjax import _compat
from drjax._errors import PlanError
from drjax._partition import Partition
from drjax._planner.implicit_communication import (
    ImplicitCommunication,
    gather_operands,
    implicit_communication,
)
from drjax._planner.inline import CONTROL, InlinedJaxpr, uses_blocks
from drjax._planner.partitioning import diagnostics
from drjax._planner.partitioning.control_flow import ControlFlowInference
from drjax._planner.partitioning.kind import (
    FREE,
    GLOBAL,
    PARTITIONED,
    Kind,
    partitioned_along,
    signature,
)
from drjax._planner.unbatching.core import UnbatchedEquation
from drjax._planner.unbatching.rules import (
    unbatch,
    unbatch_single_group,
    unbatching_candidates,
)
from drjax.primitives import scatter_p

PHASES = ("forward", "global", "partitioned")


class _ConflictingDemands(Exception):
    """An equation mixes groups of variables that only demands made partitioned."""

    def __init__(self, variables: set[Any]):
        self.variables = variables


def _kinds_of_axes(axes: Sequence[int | None]) -> list[Kind]:
    return [GLOBAL if axis is None else partitioned_along(axis) for axis in axes]


class PartitioningInference:
    """The kinds of all variables of an inlined jaxpr.

    Args:
      program: The program.
      partition: Its partition.
      argument_kinds: The kind of each argument, None if it is to be inferred.
      result_kinds: The kind of each result, None or left out if it is to be inferred.
      last_phase: The last phase to run.

    Attributes:
      loops: For each loop on partitioned values the inference of its bodies.
      phase: The phase that has begun.
    """

    def __init__(
        self,
        program: InlinedJaxpr,
        partition: Partition | None,
        argument_kinds: Sequence[Kind | None],
        result_kinds: Sequence[Kind | None] = (),
        last_phase: str = PHASES[-1],
    ):
        self.program, self.partition, self._last_phase = program, partition, last_phase
        self._num_groups = -1 if partition is None else partition.size
        self._declared = dict(zip(program.invars, argument_kinds, strict=True))
        # Variables whose uses demand different axes. No one axis fits, so they are
        # global and scattered for each use.
        forced_global: set[Any] = set()
        while (conflicts := self._run(forced_global, result_kinds)) - forced_global:
            forced_global |= conflicts

    def _run(self, forced_global: set, result_kinds: Sequence[Kind | None]) -> set:
        """Run all phases; returns the variables with contradicting demands."""
        self.loops: dict[Any, ControlFlowInference] = {}
        self._lattice = dict.fromkeys((*self.program.consts, *forced_global), GLOBAL)
        self._raised: list[Any] = []
        self._raise(list(self._declared), list(self._declared.values()))
        # Variables whose kind does not come from a demand for partitioned values.
        self._settled = settled = set()
        for phase in PHASES[: PHASES.index(self._last_phase) + 1]:
            self.phase = phase
            # What the phases before the last one raise holds whoever uses it.
            if phase != "forward":
                settled |= set(self._lattice)
            # A required result kind is a demand like any other, in its phase.
            for var, kind in zip(self.program.outvars, result_kinds, strict=False):
                if kind is not None and kind.name == phase:
                    self._raise([var], [kind])
            try:
                self._iterate_to_fixed_point(phase)
            except _ConflictingDemands as conflict:
                return conflict.variables
        self._inconsistent = {}
        # Before the last phase, a demand may still come from outside of a body.
        if self._last_phase != PHASES[-1]:
            return set()
        self._inconsistent = {
            eqn: variables
            for eqn in self.program.eqns
            if (variables := self._inconsistent_variables(eqn))
        }
        # A settled variable cannot be forced to be global: `check` refuses it.
        return {v for vs in self._inconsistent.values() for v in vs} - settled

    def _inconsistent_variables(self, eqn) -> list:
        """Partitioned variables of an equation along another axis than it needs."""
        if self.is_loop(eqn):
            ins, outs = self.loops[eqn].operand_kinds, self.loops[eqn].result_kinds
        elif self.signature(eqn) is not None:
            # Global operands are no contradiction: they are scattered. Results are
            # raised by the signature itself.
            ins, outs = [PARTITIONED] * len(eqn.invars), []
        elif (implicit := self.implicit_communication(eqn)) is not None:
            axes = implicit.in_axes, implicit.result_axes(eqn)
            ins, outs = map(_kinds_of_axes, axes)
        else:
            unbatched = self.unbatched(eqn)
            if unbatched is None:
                return [v for v in eqn.outvars if self.lattice_value(v).partitioned]
            axes = unbatched.in_axes, unbatched.out_axes
            ins, outs = map(_kinds_of_axes, axes)
        atoms, kinds = [*eqn.invars, *eqn.outvars[: len(outs)]], [*ins, *outs]
        return [
            atom
            for atom, kind in zip(atoms, kinds, strict=True)
            if self.lattice_value(atom).partitioned and self.lattice_value(atom) != kind
        ]

    def check(self) -> "PartitioningInference":
        """Refuse what has no meaning: partitioned values where global are needed."""
        for eqn in self.program.eqns:
            self._check_equation(eqn)
        return self

    def __getitem__(self, atom) -> Kind:
        """The kind of a variable; literals and what stayed free are global."""
        kind = self.lattice_value(atom)
        return GLOBAL if kind is FREE else kind

    def lattice_value(self, atom: Any) -> Kind:
        """The kind of a variable as far as it is inferred, free if it is not."""
        if isinstance(atom, Literal):
            # A scalar literal fits a partitioned partner, as pointwise equations
            # broadcast it; an array literal has a shape and is global.
            aval: Any = atom.aval
            return GLOBAL if aval.shape else FREE
        return self._lattice.get(atom, FREE)

    def unbatched(self, eqn) -> UnbatchedEquation | None:
        """The equation of one group, also if only its results are partitioned."""
        axes = tuple([self.lattice_value(v).axis for v in eqn.invars])
        if any(axis is not None for axis in axes):
            cache = self.program.unbatched_cache
            if (eqn, axes) not in cache:
                unbatched = unbatch(eqn, axes)
                if unbatched is None and self._num_groups == 1:
                    unbatched = unbatch_single_group(eqn, axes)
                cache[eqn, axes] = unbatched
            return cache[eqn, axes]
        results = [self.lattice_value(v) for v in eqn.outvars]
        if not any(kind.partitioned for kind in results):
            return None
        return self._unbatched_with_results(eqn, results)

    def signature(self, eqn) -> tuple[Kind, Kind] | None:
        """The type rule of a drjax primitive over this partition."""
        if self.partition is None or eqn.params.get("partition") != self.partition:
            return None
        return signature(eqn.primitive)

    def implicit_communication(self, eqn) -> ImplicitCommunication | None:
        """The communication that an equation of `lax` implies; None for any other."""
        if self.partition is None or self.signature(eqn) is not None:
            return None
        axes = [self.lattice_value(v).axis for v in eqn.invars]
        if all(axis is None for axis in axes):
            return None
        implicit = implicit_communication(eqn, axes)
        single = self._num_groups == 1 and eqn.primitive.name not in CONTROL
        if implicit is None and single:
            # A gather from one group costs nothing, so that any equation has a plan.
            return gather_operands(eqn, axes) if self.unbatched(eqn) is None else None
        return implicit

    def is_redundant_scatter(self, eqn) -> bool:
        """Whether a scatter takes a partitioned value, as derivatives may.

        The transpose of a gather scatters the cotangent of its result, which is
        partitioned where the result was used in unbatchable equations.
        """
        if self.signature(eqn) is None or eqn.primitive is not scatter_p:
            return False
        return self.lattice_value(eqn.invars[0]) == PARTITIONED

    def is_loop(self, eqn) -> bool:
        """Whether a loop or branch needs a plan of its own."""
        if eqn.primitive.name not in CONTROL:
            return False
        if self.implicit_communication(eqn) is not None:
            return False
        # "sizes" marks a scan that rematerialization has rewritten.
        operands_partitioned = any(
            self.lattice_value(v).partitioned for v in eqn.invars
        )
        if "sizes" in eqn.params or operands_partitioned:
            return True
        return self.partition is not None and any(
            uses_blocks(jaxpr, self.partition)
            for jaxpr in _compat.jaxprs_in(eqn.params)
        )

    def infer_body(
        self,
        body: InlinedJaxpr,
        argument_kinds: Sequence[Kind],
        result_kinds: Sequence[Kind],
    ) -> "PartitioningInference":
        """The inference of the body of a loop, up to the phase of this one.

        Later phases must wait: the program around the loop may still demand a global
        value of what the body would make partitioned.
        """
        # The cache stands in the body. A fixed point asks for the same kinds often,
        # and nested loops would otherwise be inferred exponentially often.
        key = (self.partition, *argument_kinds, "->", *result_kinds, self.phase)
        if key not in body.inference_cache:
            body.inference_cache[key] = PartitioningInference(
                body, self.partition, argument_kinds, result_kinds, self.phase
            )
        return body.inference_cache[key]

    # -----------------------------------------------------------------------------
    # The worklist

    def _raise(self, atoms: Sequence[Any], kinds: Sequence[Kind | None]) -> None:
        """Raise free variables to these kinds; others keep theirs."""
        for atom, kind in zip(atoms, kinds, strict=True):
            if kind is None or kind == FREE or isinstance(atom, Literal):
                continue
            if self.lattice_value(atom) == FREE:
                self._lattice[atom] = kind
                self._raised.append(atom)

    def _iterate_to_fixed_point(self, phase: str) -> None:
        """Visit every equation, and again those next to each raised variable."""
        eqns = self.program.eqns
        order = range(len(eqns))
        if phase != "forward":
            # Demands flow from uses to definitions: fewer visits in reverse order.
            order = reversed(order)
        worklist = OrderedDict.fromkeys(order)  # as a set
        while worklist:
            index, _ = worklist.popitem(last=False)
            eqn = eqns[index]
            self._raised.clear()
            loop = self.is_loop(eqn)
            try:
                if loop or any(self.lattice_value(v) == FREE for v in eqn.outvars):
                    self._transfer_forward(eqn)
                if phase != "forward" and (loop or self._has_free_operand(eqn)):
                    self._transfer_backward(eqn, phase)
            except PlanError as error:
                if variables := self._demanded_operands(eqn, phase):
                    raise _ConflictingDemands(variables) from error
                raise
            for atom in self._raised:
                worklist |= dict.fromkeys(self.program.defs_and_uses[atom])
            if not loop:
                # Its rules have seen what it raised. A loop has not: a kind of a
                # result may change the kinds of its carried values.
                worklist.pop(index, None)

    def _demanded_operands(self, eqn, phase: str) -> set:
        """The operands that are partitioned because of demands alone."""
        if phase != PHASES[-1]:
            return set()
        partitioned = {v for v in eqn.invars if self.lattice_value(v).partitioned}
        return partitioned - self._settled

    def _has_free_operand(self, eqn) -> bool:
        # Scalars have no axis along which they could be partitioned.
        return any(self.lattice_value(v) == FREE for v in eqn.invars if v.aval.shape)

    def _transfer_forward(self, eqn) -> None:
        """Raise the results to the kinds that follow from the operands."""
        signature = self.signature(eqn)
        if signature is not None:
            kinds = [signature[1]] * len(eqn.outvars)
        elif self.is_loop(eqn):
            loop = self.loops[eqn] = ControlFlowInference(self, eqn)
            kinds = loop.result_kinds
        elif (implicit := self.implicit_communication(eqn)) is not None:
            kinds = _kinds_of_axes(implicit.result_axes(eqn))
        elif any(self.lattice_value(v).partitioned for v in eqn.invars):
            unbatched = self.unbatched(eqn)
            if unbatched is None:
                raise self.refusal(
                    eqn, [self[v] for v in eqn.invars], diagnostics.MIXES_GROUPS
                )
            kinds = _kinds_of_axes(unbatched.out_axes)
        elif self._follows_its_uses(eqn):
            # Demands of later phases decide; until then the results stay free.
            return
        else:
            kinds = [GLOBAL] * len(eqn.outvars)
        self._raise(eqn.outvars, kinds)

    def _follows_its_uses(self, eqn) -> bool:
        """Whether the kinds of results are still open: they follow from their uses."""
        return self._has_free_operand(eqn) and bool(
            unbatching_candidates(eqn, self._num_groups)
        )

    def _transfer_backward(self, eqn, phase: str) -> None:
        """Raise the operands to the kinds that the equation demands in this phase."""
        demands = self._demands(eqn)
        self._raise(
            eqn.invars,
            [k if k is not None and k.name == phase else None for k in demands],
        )

    def _demands(self, eqn) -> Sequence[Kind | None]:
        """The kind that an equation demands of each operand; None: any."""
        signature = self.signature(eqn)
        if signature is not None:
            return [signature[0]] * len(eqn.invars)
        if self.is_loop(eqn):
            return ControlFlowInference(self, eqn).operand_kinds
        if (implicit := self.implicit_communication(eqn)) is not None:
            return _kinds_of_axes(implicit.in_axes)
        results = [self.lattice_value(v) for v in eqn.outvars]
        if any(kind.partitioned for kind in results):
            # A partitioned result takes its operands partitioned along fitting axes. If
            # no form fits, `check` refuses the equation.
            unbatched = self.unbatched(eqn)
            if unbatched is None:
                return [None] * len(eqn.invars)
            return _kinds_of_axes(unbatched.in_axes)
        # An equation that can be unbatched demands nothing, unless a result is global:
        # only global operands give that without communication.
        candidates = unbatching_candidates(eqn, self._num_groups)
        if candidates and GLOBAL not in results:
            return [None] * len(eqn.invars)
        return [GLOBAL] * len(eqn.invars)

    def _unbatched_with_results(
        self, eqn, results: Sequence[Kind]
    ) -> UnbatchedEquation | None:
        """The equation of one group whose results have these kinds."""
        # The first one, by operands and axes in their order: a deterministic choice.
        for candidate in unbatching_candidates(eqn, self._num_groups):
            if all(
                kind.axis == axis
                for kind, axis in zip(results, candidate.out_axes, strict=True)
                if kind.partitioned
            ):
                return candidate
        return None

    # -----------------------------------------------------------------------------
    # Refusals

    def _check_equation(self, eqn) -> None:
        kinds = [self[v] for v in eqn.invars]
        if self.is_loop(eqn):
            self.loops[eqn].check()
            return
        # Global operands always fit: they can be scattered where it is needed.
        if not any(kind.partitioned for kind in kinds):
            return
        signature = self.signature(eqn)
        if signature is None:
            mixes = (
                self.unbatched(eqn) is None and self.implicit_communication(eqn) is None
            )
            if mixes or eqn in self._inconsistent:
                raise self.refusal(eqn, kinds, diagnostics.MIXES_GROUPS)
        elif signature[0] == GLOBAL:
            if not self.is_redundant_scatter(eqn):
                raise self.refusal(eqn, kinds, diagnostics.ALREADY_PARTITIONED)
        elif any(kind.axis for kind in kinds):
            raise self.refusal(eqn, kinds, diagnostics.ANOTHER_AXIS)

    def refusal(self, eqn, kinds: Sequence[Kind], fix: str) -> PlanError:
        declared = [
            v for v, kind in self._declared.items() if kind and kind.partitioned
        ]
        return diagnostics.refusal(
            eqn, kinds, self.partition, fix, self.program, declared
        )
