"""What is said of an equation that has no plan."""

from collections.abc import Sequence
from typing import Any

from jax.extend.core import Literal

from drjax._errors import PlanError
from drjax._jaxprs.provenance import source_line
from drjax._partition import Partition
from drjax._planner.inline import Flat
from drjax._planner.partitioning.kind import Kind
from drjax._planner.unbatching.rules import ROW_RULES

MIXES_ROWS = (
    "It may mix the rows of different groups, which only a reduction can do. Do it "
    "inside the function given to drjax.map_fn, where each group sees its own row, "
    "combine the groups with drjax.reduce_sum, reduce_mean, reduce_max, reduce_min or "
    "select, or collect the rows as a global value with drjax.gather."
)
ALREADY_PARTITIONED = (
    "It needs a global value. Use drjax.gather to collect all rows as a global value, "
    "or leave out the broadcast: the value already has a row for each group. Is it a "
    "value that a mapped function closes over? Pass it to drjax.map_fn as an argument."
)
ANOTHER_AXIS = (
    "It needs the groups along axis 0, as drjax.scatter gives them. Move the axis "
    "before the value is scattered."
)
_CALLS_BACK = (
    "It gives Python the rows of all groups at once. Call it inside the function given "
    "to drjax.map_fn, for each row, or with drjax.gather of the rows."
)
_UNKNOWN = "drjax knows no row-by-row form of it. "


def refusal(
    eqn,
    kinds: Sequence[Kind],
    partition: Partition | None,
    fix: str,
    program: Flat,
    said: Sequence[Any],
) -> PlanError:
    """The error for an equation.

    Args:
      eqn: The equation.
      kinds: Those of its operands.
      partition: The partition.
      fix: What to do about it.
      program: The program in which it stands.
      said: The arguments of the program that are partitioned because the user says so.
    """
    pairs = zip(eqn.invars, kinds, strict=True)
    operands = ", ".join(f"{v.aval.str_short()} {kind}" for v, kind in pairs)
    name = eqn.primitive.name
    if fix is MIXES_ROWS and ("callback" in name or name == "debug_print"):
        fix = _CALLS_BACK
    elif fix is MIXES_ROWS and name not in ROW_RULES:
        fix = _UNKNOWN + fix
    blamed = _arguments_of(eqn, program).intersection(said)
    if blamed:
        names = ", ".join(program.names[v] for v in program.names if v in blamed)
        fix += (
            f" partitioned= says that {names} has a row for each group: without it, "
            "drjax finds out."
        )
    return PlanError(
        f"{name} at {source_line(eqn)} takes ({operands}) "
        f"over partition {partition}. {fix}"
    )


def _arguments_of(eqn, program: Flat) -> set:
    """The named arguments on which an equation depends."""
    makers = {v: e for e in program.eqns for v in e.outvars}
    found, todo = set(), [eqn]
    while todo:
        for var in todo.pop().invars:
            if not isinstance(var, Literal) and var not in found:
                found.add(var)
                todo += [makers[var]] if var in makers else []
    return found.intersection(program.names)
