"""Propagation rules: what an equation implies for the kinds of its variables.

Input: an environment and an equation. Output of `rule_of`: its `PropagationRule`, a
forward and a backward transfer function. There are four, each with a table by
primitive of its own:

    BuildingBlock   its signature                 kind.signature
    ControlFlow     a fixed point over bodies     control_flow.py
    Communication   what it means in blocks       implicit_communication.py
    PerGroup        all others: work of a group   unbatching/rules.py
                    or of the server

Invariants: rules read cells and do not write them, but that `ControlFlow` records the
environments of its bodies. Sharp edges: which rule applies depends on the kinds of the
operands, so it is looked up at each visit.
"""

import abc
from collections.abc import Sequence

from drjax._planner.partitioning import diagnostics
from drjax._planner.partitioning.control_flow import InferBody, infer_loop
from drjax._planner.partitioning.environment import Environment, EquationKinds
from drjax._planner.partitioning.kind import FREE, GLOBAL, Kind, kinds_of_axes


class PropagationRule(abc.ABC):
    """The transfer functions of an equation: forward `results`, backward `demands`."""

    @abc.abstractmethod
    def kinds(self, env: Environment, eqn) -> EquationKinds | None:
        """Kinds that fit the equation, as far as they follow from its variables.

        At the fixed point its partitioned variables must have these kinds. None: no
        kinds fit, so that all of its variables must be global.
        """

    @abc.abstractmethod
    def results(self, env: Environment, eqn, infer_body: InferBody) -> Sequence[Kind]:
        """The kinds of results that follow from those of the operands."""

    @abc.abstractmethod
    def demands(
        self, env: Environment, eqn, infer_body: InferBody
    ) -> Sequence[Kind | None]:
        """The kind that the equation demands of each operand; None: any."""


class BuildingBlock(PropagationRule):
    """The rule of a drjax primitive over the partition that is inferred.

    The primitive fixes the kinds: those of a map are all partitioned; a broadcast takes
    global values and gives partitioned ones; a reduction, the reverse.
    """

    def kinds(self, env, eqn) -> EquationKinds:
        signature = env.signature(eqn)
        assert signature is not None
        operand, result = signature
        return EquationKinds([operand] * len(eqn.invars), [result] * len(eqn.outvars))

    def results(self, env, eqn, infer_body):
        return self.kinds(env, eqn).result_kinds

    def demands(self, env, eqn, infer_body):
        return self.kinds(env, eqn).operand_kinds


class ControlFlow(PropagationRule):
    """The rule of a loop of rounds, whose bodies are inferred again at each visit."""

    def kinds(self, env, eqn) -> EquationKinds:
        return env.loops[eqn]

    def results(self, env, eqn, infer_body):
        env.loops[eqn] = infer_loop(env, eqn, infer_body)
        return env.loops[eqn].result_kinds

    def demands(self, env, eqn, infer_body):
        # Inferred again, as its results may have been raised since.
        return infer_loop(env, eqn, infer_body).operand_kinds


class Communication(PropagationRule):
    """The rule of an equation of `lax` that combines groups, such as a sum of them."""

    def kinds(self, env, eqn) -> EquationKinds:
        implicit = env.implicit_communication(eqn)
        assert implicit is not None
        axes = implicit.in_axes, implicit.result_axes(eqn)
        return EquationKinds(*map(kinds_of_axes, axes))

    def results(self, env, eqn, infer_body):
        return self.kinds(env, eqn).result_kinds

    def demands(self, env, eqn, infer_body):
        return self.kinds(env, eqn).operand_kinds


class PerGroup(PropagationRule):
    """The rule of all other equations: work of each group, or of the server.

    Work of a group has an equation of one group, by the primitive's unbatching rule.
    """

    def kinds(self, env, eqn) -> EquationKinds | None:
        unbatched = env.unbatched(eqn)
        if unbatched is None:
            return None
        axes = unbatched.in_axes, unbatched.out_axes
        return EquationKinds(*map(kinds_of_axes, axes))

    def results(self, env, eqn, infer_body):
        if any(axis is not None for axis in env.group_axes(eqn.invars)):
            kinds = self.kinds(env, eqn)
            if kinds is None:
                raise diagnostics.refusal(env, eqn, diagnostics.MIXES_GROUPS)
            return kinds.result_kinds
        # Work on free values is of the groups or of the server: demands decide, and
        # until then the results stay free.
        if has_free_operand(env, eqn) and env.unbatching_candidates(eqn):
            return [FREE] * len(eqn.outvars)
        return [GLOBAL] * len(eqn.outvars)

    def demands(self, env, eqn, infer_body):
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


_BUILDING_BLOCK, _CONTROL_FLOW = BuildingBlock(), ControlFlow()
_COMMUNICATION, _PER_GROUP = Communication(), PerGroup()


def rule_of(env: Environment, eqn) -> PropagationRule:
    """The propagation rule of an equation, for the present kinds of its operands."""
    if env.signature(eqn) is not None:
        return _BUILDING_BLOCK
    if env.is_loop(eqn):
        return _CONTROL_FLOW
    if env.implicit_communication(eqn) is not None:
        return _COMMUNICATION
    return _PER_GROUP


def has_free_operand(env: Environment, eqn) -> bool:
    """Whether an equation has a free operand that could still become partitioned."""
    # Scalars have no axis along which they could be partitioned.
    return any(env.cell(v) == FREE for v in eqn.invars if v.aval.shape)
