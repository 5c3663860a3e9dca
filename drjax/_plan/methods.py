"""What a plan does by code that is built on it: print, draw, save.

    @implements("Plan.draw")
    def draw(plan, path): ...

The modules above register what they implement. A module is imported by the first call,
so that this layer imports none of them, and `import drjax` no plans.
"""

import importlib
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable)

_MODULES = {
    "Plan.__reduce__": "drjax._plan_file.save",
    "Plan.__str__": "drjax._drawing.print_plan",
    "Plan.communication": "drjax._plan_file.group_stages",
    "Plan.draw": "drjax._drawing.draw",
    "Plan.save": "drjax._plan_file.save",
}
_implementations: dict[str, Callable] = {}


def implements(method: str) -> Callable[[F], F]:
    """Decorate the function that implements a method of `Plan`, by its name."""

    def register(function: F) -> F:
        _implementations[method] = function
        return function

    return register


def call(method: str, *args: Any) -> Any:
    """Call the implementation of a method, such as `Plan.draw`."""
    if method not in _implementations:
        importlib.import_module(_MODULES[method])
    return _implementations[method](*args)
