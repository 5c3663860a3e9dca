"""Whether a fixed point of partitioning inference is a typing of the program.

Input: an environment. Output of `contradictions`: the variables of an equation that are
partitioned along another axis than it needs. Output of `check_partitioning`: the
environment, or a `PlanError` for the first equation that has no meaning.

Invariants: global operands are no contradiction, as they can be scattered where
partitioned ones are needed; a partitioned value where a global one is needed is one.
Sharp edges: the kinds of a loop are recorded at its last visit, so both functions need
an environment that has reached its fixed point.
"""

from collections.abc import Sequence

from drjax._compat.types import Atom, Eqn
from drjax._planner.partitioning import diagnostics
from drjax._planner.partitioning.control_flow import check_loop
from drjax._planner.partitioning.environment import Environment
from drjax._planner.partitioning.kind import GLOBAL, Kind
from drjax._planner.partitioning.propagation_rules import rule_of


def contradictions(env: Environment, eqn: Eqn) -> list[Atom]:
    """List an equation's variables that are partitioned where another kind is needed.

    Operands first, then results. The needed kind is global, or partitioned along
    another axis. A global operand is never listed, as it can be scattered. If the
    equation mixes the slices of different groups, all of its partitioned operands and
    results are listed.
    """
    block = env.signature(eqn)
    if block is not None and _fits(env, eqn.invars, block.operand_kinds):
        if _fits(env, eqn.outvars, block.result_kinds):
            return []
    atoms = [*eqn.invars, *eqn.outvars]
    actual = [env.cell(atom) for atom in atoms]
    if not any(kind.partitioned for kind in actual):
        return []
    kinds = block or rule_of(env, eqn).kinds(env, eqn)
    if kinds is None:
        # If demands of uses made the results partitioned, inference forces them to be
        # global, and they then demand global operands.
        return [atom for atom in atoms if env.cell(atom).partitioned]
    needed = [*kinds.operand_kinds, *kinds.result_kinds]
    triples = zip(atoms, actual, needed, strict=True)
    return [atom for atom, kind, need in triples if kind.partitioned and kind != need]


def _fits(env: Environment, atoms: Sequence[Atom], needed: Sequence[Kind]) -> bool:
    """Whether those of some variables that are partitioned have the needed kinds."""
    for atom, need in zip(atoms, needed, strict=True):
        kind = env.cell(atom)
        if kind is not need and kind.axis is not None and kind != need:
            return False
    return True


def check_partitioning(env: Environment) -> Environment:
    """Return `env`, after a check that its kinds fit each equation, also in loops.

    It needs the kinds after the last phase of inference. The first equation that mixes
    the slices of different groups, or takes a partitioned value where it needs another
    kind, raises a `PlanError`.
    """
    for eqn in env.others:
        check_equation(env, eqn)
        if env.is_loop(eqn):
            for body in env.loops[eqn].bodies:
                check_partitioning(body)
    return env


def check_equation(env: Environment, eqn: Eqn) -> None:
    """Raise a `PlanError` if an equation mixes groups, or an operand's kind is wrong.

    The bodies of a loop are not checked.
    """
    signature = env.signature(eqn)
    if signature is not None and _fits(env, eqn.invars, signature.operand_kinds):
        return
    if env.is_loop(eqn):
        check_loop(env, eqn)
        return
    # Global operands always fit: they can be scattered where it is needed.
    if not any(env[v].partitioned for v in eqn.invars):
        return
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
