"""Whether a fixed point of partitioning inference is a typing of the program.

Input: an environment. Output of `contradictions`: the variables of an equation that are
partitioned along another axis than it needs. Output of `check_partitioning`: the
environment, or a `PlanError` for the first equation that has no meaning.

Invariants: global operands are no contradiction, as they can be scattered where
partitioned ones are needed; a partitioned value where a global one is needed is one.
Sharp edges: the kinds of a loop are recorded at its last visit, so both functions need
an environment that has reached its fixed point.
"""

from typing import Any

from drjax._planner.partitioning import diagnostics
from drjax._planner.partitioning.control_flow import check_loop
from drjax._planner.partitioning.environment import Environment
from drjax._planner.partitioning.kind import GLOBAL
from drjax._planner.partitioning.propagation_rules import rule_of


def contradictions(env: Environment, eqn) -> list[Any]:
    """The partitioned variables of an equation along another axis than it needs.

    [] if there are none. If the equation mixes groups, its partitioned results.
    """
    atoms = [*eqn.invars, *eqn.outvars]
    actual = [env.cell(atom) for atom in atoms]
    if not any(kind.partitioned for kind in actual):
        return []
    kinds = rule_of(env, eqn).kinds(env, eqn)
    if kinds is None:
        return [v for v in eqn.outvars if env.cell(v).partitioned]
    needed = [*kinds.operand_kinds, *kinds.result_kinds]
    triples = zip(atoms, actual, needed, strict=True)
    return [atom for atom, kind, need in triples if kind.partitioned and kind != need]


def check_partitioning(env: Environment) -> Environment:
    """Check that each equation has a meaning with its kinds, those in loops too.

    Returns:
      The environment itself.

    Raises:
      PlanError: An equation mixes groups, or is partitioned where it needs a global
        value.
    """
    for eqn in env.program.eqns:
        check_equation(env, eqn)
        if env.is_loop(eqn):
            for body in env.loops[eqn].bodies:
                check_partitioning(body)
    return env


def check_equation(env: Environment, eqn) -> None:
    """Check that the kinds of an equation fit it, but for the bodies of a loop.

    Raises:
      PlanError: It mixes groups, or is partitioned where it needs a global value.
    """
    if env.is_loop(eqn):
        check_loop(env, eqn)
        return
    # Global operands always fit: they can be scattered where it is needed.
    if not any(env[v].partitioned for v in eqn.invars):
        return
    signature = env.signature(eqn)
    if signature is None:
        mixes = rule_of(env, eqn).kinds(env, eqn) is None
        if mixes or contradictions(env, eqn):
            raise diagnostics.refusal(env, eqn, diagnostics.MIXES_GROUPS)
    elif signature[0] == GLOBAL:
        if not env.is_redundant_scatter(eqn):
            raise diagnostics.refusal(env, eqn, diagnostics.ALREADY_PARTITIONED)
    elif any(env[v].axis for v in eqn.invars):
        raise diagnostics.refusal(env, eqn, diagnostics.ANOTHER_AXIS)
