"""Propagation rules: what an equation implies for the kinds of its variables.

Input: an environment and an equation. Output of `rule_of`: its `PropagationRule`, a
forward and a backward transfer function. There are four, each with a table by
primitive of its own:

    BuildingBlock   its signature                 kind.signature
    ControlFlow     a fixed point over bodies     control_flow.py
    Communication   what it means in blocks       implicit_communication.py
    PerGroup        all others: work of a group   unbatching/rules.py
                    or of the server

and that of a fence, whose results have the kinds of its operands (`Barrier`).

Invariants: rules read cells and do not write them, but that `ControlFlow` records the
environments of its bodies. Sharp edges: which rule applies depends on the kinds of the
operands, so it is looked up at each visit.
"""

import abc
from collections.abc import Sequence

from jax import lax

from drjax._compat.jax_types import Literal
from drjax._compat.types import Eqn
from drjax._planner.fences import fence_p
from drjax._planner.partitioning import diagnostics
from drjax._planner.partitioning.control_flow import InferBody, infer_loop
from drjax._planner.partitioning.environment import Environment, EquationKinds
from drjax._planner.partitioning.kind import FREE, GLOBAL, Kind, kinds_of_axes


class PropagationRule(abc.ABC):
    """How the kinds of an equation's operands and results depend on each other.

    `results` propagates kinds forward, from operands to results; `demands` backward,
    from results to operands. `env` has the kinds, so far, of the variables of the
    program with the equation. The rules write no kinds of variables to it, which the
    caller does. `infer_body(body, argument_kinds, result_kinds)` infers the environment
    of a loop's body, from the kinds known of its arguments and of its results.
    """

    @abc.abstractmethod
    def kinds(self, env: Environment, eqn: Eqn) -> EquationKinds | None:
        """Return the kinds that partitioned operands and results must have.

        They are as far as they follow from the kinds in `env`. None if no operand or
        result is partitioned, or if the equation mixes groups, so that none of them may
        be partitioned.
        """

    @abc.abstractmethod
    def results(
        self, env: Environment, eqn: Eqn, infer_body: InferBody
    ) -> Sequence[Kind]:
        """Return the kind of each result, by the operands; free if none follows yet.

        An equation that mixes the slices of different groups raises a `PlanError`.
        """

    @abc.abstractmethod
    def demands(
        self, env: Environment, eqn: Eqn, infer_body: InferBody
    ) -> Sequence[Kind | None]:
        """Return the kind that the equation demands of each operand, by the results.

        None or free: any kind will do.
        """


class BuildingBlock(PropagationRule):
    """The propagation rule of a building block over the partition that is inferred.

    The primitive fixes all kinds: a map takes and returns partitioned values; a
    broadcast takes global values and returns partitioned ones; a reduction the reverse.
    """

    def kinds(self, env: Environment, eqn: Eqn) -> EquationKinds:
        kinds = env.signature(eqn)
        assert kinds is not None
        return kinds

    def results(
        self, env: Environment, eqn: Eqn, infer_body: InferBody
    ) -> Sequence[Kind]:
        return self.kinds(env, eqn).result_kinds

    def demands(
        self, env: Environment, eqn: Eqn, infer_body: InferBody
    ) -> Sequence[Kind | None]:
        return self.kinds(env, eqn).operand_kinds


class ControlFlow(PropagationRule):
    """The propagation rule of a loop of rounds: its kinds are inferred from its bodies.

    The bodies are inferred again at each visit, and `results` records their
    environments in `Environment.loops`.
    """

    def kinds(self, env: Environment, eqn: Eqn) -> EquationKinds:
        return env.loops[eqn]

    def results(
        self, env: Environment, eqn: Eqn, infer_body: InferBody
    ) -> Sequence[Kind]:
        # A visit that raises a variable of the loop is followed by another, so that the
        # last record is that of the fixed point.
        env.loops[eqn] = infer_loop(env, eqn, infer_body)
        return env.loops[eqn].result_kinds

    def demands(
        self, env: Environment, eqn: Eqn, infer_body: InferBody
    ) -> Sequence[Kind | None]:
        # Inferred again, as its results may have been raised since.
        return infer_loop(env, eqn, infer_body).operand_kinds


class Communication(PropagationRule):
    """The propagation rule of a `lax` equation that implies communication.

    An example is a `reduce_sum` over the group axis. Its kinds are those of the
    building blocks that replace it.
    """

    def kinds(self, env: Environment, eqn: Eqn) -> EquationKinds:
        implicit = env.implicit_communication(eqn)
        assert implicit is not None
        axes = implicit.in_axes, implicit.result_axes(eqn)
        return EquationKinds(*map(kinds_of_axes, axes))

    def results(
        self, env: Environment, eqn: Eqn, infer_body: InferBody
    ) -> Sequence[Kind]:
        return self.kinds(env, eqn).result_kinds

    def demands(
        self, env: Environment, eqn: Eqn, infer_body: InferBody
    ) -> Sequence[Kind | None]:
        return self.kinds(env, eqn).operand_kinds


class PerGroup(PropagationRule):
    """The propagation rule of other equations: work of each group or of the server.

    On partitioned operands, the primitive's unbatching rule gives the kinds. Equations
    without partitioned operands or results are work of the server.
    """

    def kinds(self, env: Environment, eqn: Eqn) -> EquationKinds | None:
        unbatched = env.unbatched(eqn)
        if unbatched is None:
            return None
        axes = unbatched.in_axes, unbatched.out_axes
        return EquationKinds(*map(kinds_of_axes, axes))

    def results(
        self, env: Environment, eqn: Eqn, infer_body: InferBody
    ) -> Sequence[Kind]:
        common = env.common_kind(eqn)
        if common is not None:
            return [common] * len(eqn.outvars)
        if any(axis is not None for axis in env.group_axes(eqn.invars)):
            kinds = self.kinds(env, eqn)
            if kinds is None:
                # If demands made operands partitioned, `_propagate` catches this, and
                # these operands are forced to be global.
                raise diagnostics.refusal(env, eqn, diagnostics.MIXES_GROUPS)
            return kinds.result_kinds
        # A cohort of a population: groups would each need all of the population.
        if _reads_population(env, eqn):
            return [GLOBAL]
        # Work on free values is of the groups or of the server: demands decide, and
        # until then the results stay free.
        if has_free_operand(env, eqn) and env.unbatching_candidates(eqn):
            return [FREE] * len(eqn.outvars)
        # No operand can be partitioned, or no rule gives slices: the server's work.
        return [GLOBAL] * len(eqn.outvars)

    def demands(
        self, env: Environment, eqn: Eqn, infer_body: InferBody
    ) -> Sequence[Kind | None]:
        anything = [None] * len(eqn.invars)
        results = [env.cell(v) for v in eqn.outvars]
        if any(kind.partitioned for kind in results):
            # A partitioned result takes its operands partitioned along fitting axes. If
            # none fit, `check_equation` refuses the equation.
            kinds = self.kinds(env, eqn)
            return anything if kinds is None else kinds.operand_kinds
        # An equation that can be unbatched demands nothing, unless a result is global:
        # only global operands give that without communication.
        if env.unbatching_candidates(eqn) and GLOBAL not in results:
            return anything
        return [GLOBAL] * len(eqn.invars)


class Barrier(PropagationRule):
    """The propagation rule of a fence: each result has the kind of its operand."""

    def kinds(self, env: Environment, eqn: Eqn) -> EquationKinds:
        operands, results = (map(env.cell, vs) for vs in (eqn.invars, eqn.outvars))
        pairs = zip(operands, results, strict=True)
        kinds = [result if operand == FREE else operand for operand, result in pairs]
        return EquationKinds(kinds, kinds)

    def results(
        self, env: Environment, eqn: Eqn, infer_body: InferBody
    ) -> Sequence[Kind]:
        return self.kinds(env, eqn).result_kinds

    def demands(
        self, env: Environment, eqn: Eqn, infer_body: InferBody
    ) -> Sequence[Kind | None]:
        return self.kinds(env, eqn).operand_kinds


def _reads_population(env: Environment, eqn: Eqn) -> bool:
    """Whether an equation reads elements of an array that has no group axis.

    That is `data[ids]`, with an array `data` of more elements than the result has, and
    no axis of the size of the partition: a population, of which the groups are a
    cohort. It stays work of the server: if groups did it, each would get a copy of all
    of `data`. The result is smaller, and can be scattered.
    """
    if eqn.primitive is not lax.gather_p or env.partition is None:
        return False
    (array, _), (result,) = (v.aval for v in eqn.invars), (v.aval for v in eqn.outvars)
    # An array with an axis for the groups may be a partitioned value.
    return result.size < array.size and env.partition.size not in array.shape


_BUILDING_BLOCK, _CONTROL_FLOW = BuildingBlock(), ControlFlow()
_COMMUNICATION, _PER_GROUP, _BARRIER = Communication(), PerGroup(), Barrier()


def rule_of(env: Environment, eqn: Eqn) -> PropagationRule:
    """Select the propagation rule of an equation, by the present kinds of its operands.

    So the rule of an equation may change while kinds are inferred.
    """
    if env.is_pointwise(eqn):
        return _PER_GROUP
    if eqn.primitive is fence_p:
        return _BARRIER
    if env.signature(eqn) is not None:
        return _BUILDING_BLOCK
    if env.is_loop(eqn):
        return _CONTROL_FLOW
    # Before `PerGroup`: with a single group, a reduction over the group axis can be
    # unbatched too, and its result would be partitioned.
    if env.implicit_communication(eqn) is not None:
        return _COMMUNICATION
    return _PER_GROUP


def has_free_operand(env: Environment, eqn: Eqn) -> bool:
    """Whether an operand of an equation that is no scalar is free."""
    cells = env.cells
    for v in eqn.invars:
        # Scalars have no axis along which they could be partitioned.
        if type(v) is not Literal and v not in cells and v.aval.shape:
            return True
    return False
