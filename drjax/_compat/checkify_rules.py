"""Registration of rules of `jax.experimental.checkify`, and access to its errors."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax._src import checkify

CheckError = checkify.JaxException  # what a failed check is, as a tree
CheckEffect: Any = checkify.ErrorEffect  # the kind of such an error: (type, shapes)
# From 0.11 on, rules take a context in which errors are counted.
_CHECKED = 3 if hasattr(checkify, "CheckifyContext") else 2


def register_error_check(primitive, rule: Callable) -> None:
    """Register how `jax.experimental.checkify` checks equations of `primitive`.

    Args:
      primitive: The primitive.
      rule: From the enabled errors, the operands and the parameters, `rule(enabled,
        *args, **params)`, to `(error of the equation, its results)`.
    """

    def check(*args, **params):
        *context, error, enabled = args[:_CHECKED]
        new, outs = rule(enabled, *args[_CHECKED:], **params)
        leaves, tree = jax.tree.flatten(new)
        merge = checkify.error_checks[checkify.check_p]
        args = (*context, error, enabled, *leaves)
        error, _ = merge(*args, err_tree=tree, debug=False)
        return error, outs

    checkify.error_checks[primitive] = check


def error_parts(error) -> tuple[dict, dict, dict, dict]:
    """Take an error of checkify apart, into four dicts in the order of its constructor.

    Returns:
      For each effect whether an error happened; for each effect its code; for each code
      the tree structure of the error; for each effect the leaves of its error.
    """
    return error._pred, error._code, error._metadata, error._payload


def register_nan_check(primitive) -> None:
    """Let `checkify` look for NaN in the results of equations of `primitive`."""
    check = functools.partial(checkify.nan_error_check, primitive)
    checkify.error_checks[primitive] = check
