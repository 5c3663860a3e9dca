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
    """List an equation's variables that are partitioned where another kind is needed.

    The needed kind is global, or partitioned along another axis. A global operand is
    never listed, as it can be scattered.

    Args:
      env: The inferred kinds of the variables of the program that contains the
        equation.
      eqn: The equation, of any primitive.

    Returns:
      The variables, operands first, then results; [] if there are none. If the equation
      mixes the slices of different groups, all of its partitioned operands and results.
    """
    atoms = [*eqn.invars, *eqn.outvars]
    actual = [env.cell(atom) for atom in atoms]
    if not any(kind.partitioned for kind in actual):
        return []
    kinds = rule_of(env, eqn).kinds(env, eqn)
    if kinds is None:
        # If demands of uses made the results partitioned, inference forces them to be
        # global, and they then demand global operands.
        return [atom for atom in atoms if env.cell(atom).partitioned]
    needed = [*kinds.operand_kinds, *kinds.result_kinds]
    triples = zip(atoms, actual, needed, strict=True)
    return [atom for atom, kind, need in triples if kind.partitioned and kind != need]


def check_partitioning(env: Environment) -> Environment:
    """Check that the inferred kinds fit each equation, also in the bodies of loops.

    Args:
      env: The inferred kinds of a program's variables (each global, or partitioned
        along an axis), after the last phase of inference. It is not modified.

    Returns:
      `env` itself.

    Raises:
      PlanError: An equation mixes the slices of different groups; or an operand is
        partitioned where it must be global, or partitioned along another axis.
    """
    for eqn in env.program.eqns:
        check_equation(env, eqn)
        if env.is_loop(eqn):
            for body in env.loops[eqn].bodies:
                check_partitioning(body)
    return env


def check_equation(env: Environment, eqn) -> None:
    """Check that the inferred kinds of the operands and results fit an equation.

    The bodies of a loop are not checked.

    Args:
      env: The inferred kinds of the variables of the program that contains the
        equation.
      eqn: The equation.

    Raises:
      PlanError: The equation mixes the slices of different groups; or an operand is
        partitioned where it must be global, or partitioned along another axis.
    """
    if env.is_loop(eqn):
        check_loop(env, eqn)
        return
    # Global operands always fit: they can be scattered where it is needed.
    if not any(env[v].partitioned for v in eqn.invars):
        return
    signature = env.signature(eqn)
    if signature is None:
        if contradictions(env, eqn):
            raise diagnostics.refusal(env, eqn, diagnostics.MIXES_GROUPS)
        return
    # Not refused, but replaced by a copy (`explicit_communication.py`).
    if env.is_redundant_scatter(eqn):
        return
    for v, needed in zip(eqn.invars, signature.operand_kinds, strict=True):
        if env[v].partitioned and env[v] != needed:
            if needed == GLOBAL:
                fix = diagnostics.ALREADY_PARTITIONED
            else:
                fix = diagnostics.ANOTHER_AXIS
            raise diagnostics.refusal(env, eqn, fix)
