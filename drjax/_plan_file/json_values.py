"""Checks of single JSON values of a manifest, which may be any.

Input: a value, as `json.loads` returns it. Output: the value, of the type that the name
of the function says; anything else is a `ValueError`, which `decode` converts to
`PlanFileError`.
"""

from typing import Any, TypeAlias

Json: TypeAlias = Any  # a value as `json.loads` returns it, which is not trusted


def text(x: Json) -> str:
    """Return `x` if it is a printable string; raise `ValueError` if not."""
    if not isinstance(x, str) or not x.isprintable():  # as it goes to a terminal
        raise ValueError(f"{x!r:.60} is not a text")
    return x


def items(x: Json) -> list[Json]:
    """Return `x` if it is a list; raise `ValueError` if not."""
    if not isinstance(x, list):
        raise ValueError(f"{str(x)[:60]} is not a list")
    return x


def count(x: Json) -> int:
    """Return `x` if it is a nonnegative `int`, no bool; raise `ValueError` if not."""
    if type(x) is not int or x < 0:
        raise ValueError(f"{str(x)[:60]} is not a count")
    return x


def plain(x: Json) -> Any:
    """Return `x` if it is a bool, a float, None, a count, a text or a list of them.

    Lists become tuples. Anything else raises `ValueError`.
    """
    if x is None or type(x) in (bool, float):
        return x
    if isinstance(x, list):
        return tuple(map(plain, x))
    return text(x) if isinstance(x, str) else count(x)
