"""Validate the arguments of a planned program, and the shapes of its inputs.

Input: a plan and the arguments of a call. Output: their leaves, as arrays of the shapes
and dtypes of `plan.inputs`, or an error that names the leaf.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from drjax._compat.types import PyTree
from drjax._error_texts import brief, misplaced, where_it_goes
from drjax._errors import DrjaxError, DrjaxTypeError, DrjaxValueError, PlanError
from drjax.plan import Plan, Value


def flat_inputs(
    plan: Plan,
    args: tuple[PyTree, ...],
    kwargs: dict[str, PyTree],
    as_array: Callable[[Any], Any] = jnp.asarray,
) -> list[Any]:
    """Flatten the arguments of a call to arrays, checked against the plan's inputs.

    There is one array for each of `plan.inputs`, in that order. `as_array` converts a
    leaf of the arguments to an array, or to an object with the attributes `shape` and
    `dtype` of one, which is checked and returned. A partitioned array is whole, with
    its group axis. Raises `DrjaxTypeError` for another tree structure or dtype than
    planned, `DrjaxValueError` for another shape.
    """
    leaves, tree = jax.tree_util.tree_flatten((args, kwargs))
    # Types in a plan are fixed: other arguments need another plan, not a cast.
    if plan.in_tree != tree:
        if text := misplaced(leaves):
            raise DrjaxTypeError(f"{plan.name} needs arrays as arguments. {text}.")
        raise DrjaxTypeError(
            f"{plan.name} was planned for arguments (args, kwargs) of structure "
            f"{brief(plan.in_tree)}, got {brief(tree)}. Plan it again."
        )
    arrays = []
    for value, leaf in zip(plan.inputs, leaves, strict=True):
        # Converted before the checks, as a Python number has no shape and dtype.
        try:
            array = as_array(leaf)
        # Also the error of `Groups.dtype`.
        except (TypeError, DrjaxError) as error:
            text = f"{plan.name} needs an array as {value.name}, got "
            text += f"{type(leaf).__name__}."
            if fix := where_it_goes(leaf):
                text += f" {fix}."
            elif isinstance(error, DrjaxError):
                text += f" {error}"
            raise DrjaxTypeError(text) from error
        shape = value.whole_shape(plan.size)
        if array.shape != shape:
            raise DrjaxValueError(
                f"{plan.name} was planned for {value.name} of shape {shape}, got "
                f"{array.shape}. {_fix_of_shape(value, shape, array.shape)}"
            )
        if array.dtype != value.dtype:
            raise DrjaxTypeError(
                f"{plan.name} was planned for {value.name} of dtype {value.dtype}, got "
                f"{array.dtype}. Cast it, or plan it again."
            )
        arrays.append(array)
    return arrays


def _fix_of_shape(value: Value, shape: tuple[int, ...], got: tuple[int, ...]) -> str:
    """Return what a user can do about an argument of another shape than planned.

    `shape` has the group axis, as `got` has. The sentence says to plan again; or, if
    only the number of groups differs, to plan with `open_groups=True`.
    """
    others = [x[: value.axis] + x[value.axis + 1 :] for x in (shape, got)]
    if value.partitioned and len(shape) == len(got) and others[0] == others[1]:
        return (
            "Plan it again; or, for other numbers of groups, plan it with "
            "open_groups=True, and compile plan.with_groups(n)."
        )
    return "Plan it again."


def check_known_shapes(plan: Plan, what: str) -> None:
    """Raise a `PlanError` if an input of a plan has symbolic dimensions.

    Backends compile for known shapes, and plan files store them. `what` is the
    operation that needs them, as a participle: `saved`.
    """
    for value in plan.inputs:
        if not all(isinstance(size, int) for size in value.shape):
            raise PlanError(
                f"A plan can be {what} only if it has known shapes, but {value} has "
                "symbolic dimensions. Plan the program for the shapes that are needed, "
                "or export drjax.jit of it with jax.export."
            )
