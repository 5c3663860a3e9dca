"""The arguments of a planned program: checked against what was planned."""

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
        has another dtype than its value in `plan.inputs`.
      DrjaxValueError: A leaf has another shape.
    """
    leaves, tree = jax.tree_util.tree_flatten((args, kwargs))
    if plan.in_tree != tree:
        raise DrjaxTypeError(
            f"{plan.name} was planned for arguments (args, kwargs) of structure "
            f"{plan.in_tree}, got {tree}. Plan it anew."
        )
    found = []
    for value, leaf in zip(plan.inputs, leaves, strict=True):
        array = as_array(leaf)
        shape = value.shape
        if value.partitioned:
            shape = (*shape[: value.axis], plan.size, *shape[value.axis :])
        if array.shape != shape:
            raise DrjaxValueError(
                f"{plan.name} was planned for {value.name} of shape {shape}, got "
                f"{array.shape}. Plan it anew."
            )
        if array.dtype != value.dtype:
            raise DrjaxTypeError(
                f"{plan.name} was planned for {value.name} of dtype {value.dtype}, got "
                f"{array.dtype}. Cast it, or plan it anew."
            )
        found.append(array)
    return found
