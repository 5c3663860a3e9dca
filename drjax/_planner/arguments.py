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
    """The leaves of the arguments, as arrays.

    Args:
      plan: The plan.
      args: Arguments given by position.
      kwargs: Arguments given by name.
      as_array: Makes an array of a leaf.

    Raises:
      DrjaxTypeError: Their structure is another than that of `plan.in_tree`, or a leaf
        has a dtype other than its value in `plan.inputs`.
      DrjaxValueError: A leaf has another shape.
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
