"""Checks of users' functions at the edge of the API."""

import inspect
import types
from collections.abc import Callable
from typing import Any

from drjax._errors import DrjaxTypeError

_KINDS = (
    ("an async function", inspect.iscoroutinefunction),
    ("an async generator function", inspect.isasyncgenfunction),
    ("a generator function", inspect.isgeneratorfunction),
)
_RUNS_LATER = inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR | inspect.CO_GENERATOR


def function_name(fn: Any) -> str:
    return getattr(fn, "__name__", None) or type(fn).__name__


def check_plain_function(caller: str, fn: Any) -> None:
    """Refuse functions whose body runs only after they have returned."""
    if isinstance(fn, types.FunctionType) and not fn.__dict__:  # neither wrapped
        if not fn.__code__.co_flags & _RUNS_LATER:  # nor marked as a coroutine
            return
    for found in (inspect.unwrap(fn), type(fn).__call__):
        for kind, is_kind in _KINDS:
            if is_kind(found):
                raise DrjaxTypeError(
                    f"{caller} needs a plain function, but {function_name(fn)} is "
                    f"{kind}: its body would run after the partition has gone out of "
                    "scope. Return the results instead."
                )


def check_accepts(fn: Callable, args: tuple) -> None:
    """Explain a TypeError if it came from calling `fn(*args)` with `map_fn`."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*args)
    except TypeError as error:
        name = function_name(fn)
        raise DrjaxTypeError(
            f"drjax.map_fn calls {name} with {len(args)} positional argument(s), but "
            f"its signature is {name}{signature}: {error}. A plain tuple is unpacked "
            "into the arguments of the function; wrap it as ((a, b),), or use a list, "
            "to pass it as one argument."
        ) from None
