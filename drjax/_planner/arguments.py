"""Validate the arguments of a planned program.

Input: a plan and the arguments of a call. Output: their leaves, as arrays of the shapes
and dtypes of `plan.inputs`, or an error that names the leaf.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from drjax._errors import DrjaxTypeError, DrjaxValueError
from drjax.plan import Plan


def flat_inputs(
    plan: Plan, args: tuple, kwargs: dict, as_array: Callable = jnp.asarray
) -> list[Any]:
    """Flatten the arguments of a call to arrays, checked against the plan's inputs.

    Args:
      plan: The plan to run.
      args: The positional arguments of the call.
      kwargs: The keyword arguments of the call.
      as_array: Converts a leaf to the array that is checked and returned.

    Returns:
      One array for each value of `plan.inputs`, in that order.

    Raises:
      DrjaxTypeError: The tree structure of `(args, kwargs)` is not `plan.in_tree`, or
        the dtype of a leaf is not that of its value in `plan.inputs`.
      DrjaxValueError: The shape of a leaf is not that of its value; a partitioned value
        has the group axis too.
    """
    leaves, tree = jax.tree_util.tree_flatten((args, kwargs))
    # Types in a plan are fixed: other arguments need another plan, not a cast.
    if plan.in_tree != tree:
        raise DrjaxTypeError(
            f"{plan.name} was planned for arguments (args, kwargs) of structure "
            f"{plan.in_tree}, got {tree}. Plan it again."
        )
    arrays = []
    for value, leaf in zip(plan.inputs, leaves, strict=True):
        array = as_array(leaf)
        shape = value.shape
        if value.partitioned:
            # The shape of a partitioned value is that of one slice.
            shape = (*shape[: value.axis], plan.size, *shape[value.axis :])
        if array.shape != shape:
            raise DrjaxValueError(
                f"{plan.name} was planned for {value.name} of shape {shape}, got "
                f"{array.shape}. Plan it again."
            )
        if array.dtype != value.dtype:
            raise DrjaxTypeError(
                f"{plan.name} was planned for {value.name} of dtype {value.dtype}, got "
                f"{array.dtype}. Cast it, or plan it again."
            )
        arrays.append(array)
    return arrays
