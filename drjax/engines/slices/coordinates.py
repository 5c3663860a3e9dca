"""Coordinates of gathered slices in the place of groups, for stages on workers.

A function of one coordinate (`drjax.reduce_columns`) is the local stage of a plan whose
groups are the coordinates: workers compute blocks of coordinates, each with the numbers
of all groups of the program.

Input: the values of a loop of the op `columns`. Output: for its body arrays with the
coordinates along axis 0, and the reverse. Slices that workers have stay with them: each
worker reads its block of coordinates from all of them, and the driver reads none.
`read_by_workers` says which slices of a plan do, those that move to other groups
included.

Invariants: coordinates are in their flat order. Groups without a slice have NaNs, or
zeros if the dtype has none, in each column.

Sharp edges: if anything else reads the gathered slices, the driver has them anyway, and
sends the columns.
"""

from typing import Any

import numpy as np

from drjax._plan import uses
from drjax.engines.slices.slices import as_slices, read_if_lazy
from drjax.plan import Columns, Gather, Move, Plan, Value


def gathers_for_columns(plan: Plan) -> frozenset[str]:
    """Return the names of gathered values that only work on coordinates reads."""
    columns, others = set[str](), set[str]()
    for position, value in uses.reads(plan):
        reader = plan.steps[position] if position < len(plan.steps) else None
        names = columns if isinstance(reader, Columns) else others
        names.add(value.name)
    gathers = [step for step in plan.steps if isinstance(step, Gather)]
    return frozenset(step.result.name for step in gathers) & columns - others


def is_move_of_slices(move: Move) -> bool:
    """Return whether a move gives each group the slice of one group.

    So does a permute or a take. Not a move from or to a population, which the server
    has, nor one that adds slices.
    """
    ends = move.source.partitioned and move.result.partitioned
    return move.whole_slices and ends


def read_by_workers(plan: Plan) -> frozenset[str]:
    """Return the names of values whose slices workers can read from each other.

    They are outputs of local stages, which are read as columns or move to other groups.
    """
    columns = gathers_for_columns(plan)
    return frozenset(
        step.source.name
        for step in plan.steps
        if (isinstance(step, Gather) and step.result.name in columns)
        or (isinstance(step, Move) and is_move_of_slices(step))
    )


def slices_of_whole(value: Value, x: Any, size: int) -> Any:
    """Return an input of a plan over another partition as its body takes it.

    `value` is the input of the body, and `x` that of the step, a global value: the
    whole array of the slices of `size` groups; or, for d = `size` coordinates of the
    shape `s`, `[n, *s, *t]` or `[*s, *t]`, or the gathered `Slices`. An `x` that all
    groups or coordinates share is returned as it is.
    """
    return as_slices(value, x).columns(value, size) if value.partitioned else x


def whole_of_slices(value: Value, result: Value, x: Any) -> Any:
    """Return an output of a plan over another partition as one of the step.

    `value` is the output of the body, and `x` its slices, `[d, n, *t]` or `[d, *t]`:
    the result has the shape of `result`, a global value. What is global in the body,
    such as a sum over the coordinates, is returned as it is.
    """
    if not value.partitioned:
        return x
    return np.reshape(np.moveaxis(read_if_lazy(x), 0, value.axis), result.shape)
