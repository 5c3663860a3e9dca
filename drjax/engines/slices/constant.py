"""Arrays that nobody can change, so that whether they are the same needs no comparison.

Input: an array. Output: a `Constant`, a copy; of a part of it an `identity`, and what
is computed from it `once`.

Invariants: equal identities mean equal bits. Parts of a `Constant` that are views have
identities; whatever is computed from it, copies included, has none.

Sharp edges: an identity holds no memory: a `Constant` that was released has it still,
but no other array gets it.
"""

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")


class _Token:
    """Of all views of one array, with what was computed of them."""

    def __init__(self) -> None:
        self.results: dict[Hashable, Any] = {}


class Constant(np.ndarray):
    """A read-only array, or a view of one. Engines' `Runner.put` makes it."""

    token: _Token | None = None

    def __array_finalize__(self, obj: Any) -> None:
        self.token = getattr(obj, "token", None)


def constant(x: Any) -> Constant:
    """Copy an array to one that nobody can change."""
    copy = np.array(x)
    copy.flags.writeable = False
    result = copy.view(Constant)
    result.token = _Token()
    return result


def identity(x: np.ndarray) -> tuple[Any, ...] | None:
    """Return what only views of a `Constant` with these bits have; None: no identity.

    A copy has the token too, and perhaps the memory of a `Constant` that was released,
    but can be written.
    """
    if not isinstance(x, Constant) or x.flags.writeable or x.token is None:
        return None
    address = x.__array_interface__["data"][0]
    return x.token, address, x.shape, x.strides, x.dtype.str


def once(compute: Callable[[np.ndarray], T], x: np.ndarray) -> T:
    """Return `compute(x)`, of the same part of a `Constant` computed once."""
    part = identity(x)
    if part is None:
        return compute(x)
    token, *rest = part
    key = compute, *rest
    if key not in token.results:
        token.results[key] = compute(x)
    return token.results[key]
