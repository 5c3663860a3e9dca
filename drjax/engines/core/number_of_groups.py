"""How many groups a call is for.

Input: a plan, and the arguments of a call. Output: the plan for as many groups as the
arguments have, if it runs with any number of groups.

Invariants: the stages are those of the plan. Sharp edges: nothing is read, so that an
iterable without a length tells no number; and arguments that disagree are refused only
when they are flattened.
"""

from typing import Any

import jax
import numpy as np

from drjax.engines.slices.groups import Groups
from drjax.plan import Plan


def for_arguments(plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
    """Return the plan for as many groups as the arguments of a call have.

    The first argument that tells the number of groups decides: an array of a
    partitioned input by its group axis, or a `Groups` whose `count()` is not None. If
    none tells it, or the plan runs with its own number only, `plan` itself is returned.
    """
    if not plan.open_groups:
        return plan
    positions, named = plan.in_tree.unflatten(range(len(plan.inputs)))
    pairs = [*zip(args, positions, strict=False)]
    pairs += [(x, named[k]) for k, x in kwargs.items() if k in named]
    for x, indices in pairs:
        if isinstance(x, Groups):
            # One that does not tell has as many as planned, or reading it fails.
            if (n := x.count()) is not None:
                return plan.with_groups(n)
            continue
        for leaf, i in zip(*map(jax.tree.leaves, (x, indices)), strict=False):
            value, shape = plan.inputs[i], np.shape(leaf)
            # Others are refused when the arguments are flattened.
            if value.partitioned and len(shape) > value.axis:
                return plan.with_groups(shape[value.axis])
    return plan
