"""Error texts for equations that have no plan.

Input: the equation, the kinds of its program and a fix. Output: a `PlanError` that
names the equation, its source line and the fix.

Invariants: inference decides before it asks for a text, so source lines (debug data)
influence texts only.
"""

from drjax._compat.types import Eqn, Var
from drjax._errors import PlanError
from drjax._jaxprs.provenance import source_line
from drjax._jaxprs.walk import backward_slice, definitions
from drjax._planner.inline import InlinedJaxpr
from drjax._planner.partitioning.environment import Environment
from drjax._planner.unbatching.rules import UNBATCHING_RULES

MIXES_GROUPS = (
    "It may mix the slices of different groups, which only a reduction can do. Do it "
    "inside the function given to drjax.map_fn, where each group sees its own slice, "
    "combine the groups with drjax.reduce_sum, reduce_mean, reduce_max, reduce_min or "
    "select, move slices between groups with drjax.shift, take or put, or collect them "
    "as a global value with drjax.gather."
)
ALREADY_PARTITIONED = (
    "It needs a global value. Use drjax.gather to collect all slices as a global "
    "value, or leave out the broadcast: the value already has a slice for each group. "
    "Is it a value that a mapped function closes over? Pass it to drjax.map_fn as an "
    "argument."
)
MOVES_GROUP_AXIS = (
    "Its body returns a value with the groups along another axis than before the step, "
    "or than in another branch. Move the group axis back at the end of the body."
)
ANOTHER_AXIS = (
    "It needs the groups along axis 0, as drjax.scatter gives them. Move the axis "
    "before the value is scattered."
)
_CALLBACK = (
    "It passes the slices of all groups to Python at once. Call it inside the function "
    "given to drjax.map_fn, for each group, or with drjax.gather of the slices."
)
_NO_RULE = "drjax has no unbatching rule for it. "


def refusal(env: Environment, eqn: Eqn, fix: str) -> PlanError:
    """Build the error for an equation that has no plan; the caller raises it.

    It names the primitive, its source line, the types and kinds of its operands, the
    partition and `fix`, which is a constant of this module. For callbacks, primitives
    without an unbatching rule, and arguments that `partitioned=` declares, the fix says
    more.
    """
    operands = ", ".join(f"{v.aval.str_short()} {env[v]}" for v in eqn.invars)
    name = eqn.primitive.name
    # Callbacks and missing rules look like mixing to inference, which only asks for a
    # rule; users need another fix for them.
    # By its name, the primitive of `jax.debug.print` is no callback.
    if fix is MIXES_GROUPS and ("callback" in name or name == "debug_print"):
        fix = _CALLBACK
    elif fix is MIXES_GROUPS and name not in UNBATCHING_RULES:
        fix = _NO_RULE + fix
    # The declaration may be wrong rather than the equation.
    suspects = _declared_partitioned(env) & _arguments_of(eqn, env.program)
    if suspects:
        # In the order of the arguments, as that of a set is not deterministic.
        named = env.program.names
        names = ", ".join(named[v] for v in named if v in suspects)
        fix += (
            f" partitioned= declares that {names} has a slice for each group: without "
            "it, drjax infers the kind."
        )
    return PlanError(
        f"{name} at {source_line(eqn)} takes ({operands}) "
        f"over partition {env.partition}. {fix}"
    )


def _declared_partitioned(env: Environment) -> set[Var]:
    """Return the arguments that the user's `partitioned=` declares to be partitioned.

    An error on an equation that depends on one mentions the declaration, which may be
    wrong. If `env` is that of a loop's body, the arguments known to be partitioned from
    outside of the loop.
    """
    # The kinds of a loop body's arguments are inferred, not declared. `refusal` leaves
    # them out, as they have no names.
    pairs = zip(env.program.invars, env.argument_kinds, strict=True)
    return {var for var, kind in pairs if kind is not None and kind.partitioned}


def _arguments_of(eqn: Eqn, program: InlinedJaxpr) -> set[Var]:
    """Return the named arguments on which operands of an equation depend, at any depth.

    Only a whole program has named arguments; the body of a loop has none.
    """
    _, starts = backward_slice(eqn.invars, definitions(program.eqns))
    return set(starts).intersection(program.names)
