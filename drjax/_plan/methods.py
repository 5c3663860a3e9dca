"""What a plan does by code that is built on it: print, draw, save.

    @implements("Plan.draw")
    def draw(plan, path): ...

The modules above register what they implement when `drjax` imports them, so that this
layer imports none of them.
"""

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable)

_implementations: dict[str, Callable] = {}


def implements(method: str) -> Callable[[F], F]:
    """Decorate the function that implements a method of `Plan`, by its name."""

    def register(function: F) -> F:
        _implementations[method] = function
        return function

    return register


def call(method: str, *args: Any) -> Any:
    """Call the implementation of a method, such as `Plan.draw`."""
    return _implementations[method](*args)
