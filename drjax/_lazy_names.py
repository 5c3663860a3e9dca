"""Names of `drjax` that are imported by their first use, and names that moved.

Input: a name that `drjax` lacks. Output: its value, or `AttributeError`. A program
needs neither plans nor backends, so that `import drjax` does not import them. A name
that moved works, and warns of its new place; it may go in a minor version after the one
whose changelog says that it moved.
"""

import importlib.metadata
import sys
import warnings
from typing import Any

_MODULES = ("backends", "compiled", "contrib", "plan")
_LAZY = {
    "check": "drjax._planner.check",
    "collectives": "drjax.compiled.report",
    "jit": "drjax._jit.jit",
    "load_plan": "drjax._plan_file.load",
    "make_plan": "drjax._planner.make_plan",
}
__version__: str
_MOVED = {"export_federated_language": "drjax.contrib"}


def __getattr__(name: str) -> Any:
    drjax = sys.modules["drjax"]
    if name in _MODULES:
        return importlib.import_module(f"drjax.{name}")
    if name in _LAZY:
        value = getattr(importlib.import_module(_LAZY[name]), name)
        setattr(drjax, name, value)
        return value
    if name == "__version__":
        # Python reads all of the distribution's metadata for it.
        setattr(drjax, name, value := importlib.metadata.version("drjax"))
        return value
    if name in _MOVED:
        text = f"drjax.{name} is deprecated; use {_MOVED[name]}.{name}."
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        return getattr(importlib.import_module(_MOVED[name]), name)
    text = f"module 'drjax' has no attribute {name!r}"
    # With both, Python suggests a name that is close.
    raise AttributeError(text, name=name, obj=drjax)


def __dir__() -> list[str]:
    return sorted({*vars(sys.modules["drjax"]), *_MODULES, *_LAZY, "__version__"})
