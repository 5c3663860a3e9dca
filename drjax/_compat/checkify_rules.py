"""Registration of rules of `jax.experimental.checkify`, and access to its errors."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax._src import checkify, core

from drjax._compat.types import Array

CheckError = checkify.JaxException  # what a failed check is, as a tree
CheckEffect = checkify.ErrorEffect  # the kind of such an error: (type, shapes)
# From 0.11 on, rules take a context in which errors are counted.
_CHECKED = 3 if hasattr(checkify, "CheckifyContext") else 2


def register_error_check(
    primitive: core.Primitive, rule: Callable[..., tuple[checkify.Error, list[Array]]]
) -> None:
    """Register how `jax.experimental.checkify` checks equations of `primitive`.

    It writes to checkify's global registry. `rule(enabled, *args, **params)` takes the
    set of error classes that checkify looks for, the operands, and the parameters of
    the equation. It returns the error of this equation alone, and the list of its
    results. The error is merged with those of earlier equations.
    """

    def check(*args: Any, **params: Any) -> tuple[checkify.Error, list[Array]]:
        *context, error, enabled = args[:_CHECKED]
        new, outs = rule(enabled, *args[_CHECKED:], **params)
        leaves, tree = jax.tree.flatten(new)
        merge = checkify.error_checks[checkify.check_p]
        args = (*context, error, enabled, *leaves)
        error, _ = merge(*args, err_tree=tree, debug=False)
        return error, outs

    checkify.error_checks[primitive] = check


def error_parts(
    error: checkify.Error,
) -> tuple[dict, dict, dict, dict]:
    """Split a `checkify.Error` into the four dicts that its constructor takes.

    They are `(happened, codes, trees, leaves)`. Three of them have as keys the
    `CheckEffect`s of the error, one for each kind of check: `happened` maps a kind to a
    bool array, whether that check failed; `codes` to an integer array, which identifies
    the exception; `leaves` to the arrays that are the leaves of the exception. `trees`
    maps such a code, an int, to the `PyTreeDef` of the exception.
    """
    return error._pred, error._code, error._metadata, error._payload


def register_nan_check(primitive: core.Primitive) -> None:
    """Let `checkify.nan_checks` check the results of equations of `primitive`.

    It writes to checkify's global registry.
    """
    check = functools.partial(checkify.nan_error_check, primitive)
    checkify.error_checks[primitive] = check
