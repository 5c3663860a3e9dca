"""Names of `drjax` that moved: each works, and warns of its new place.

Input: a name that `drjax` lacks. Output: its value, or `AttributeError`. Sharp edges: a
name may go in a minor version after the one whose changelog says that it moved.
"""

import sys
import warnings
from typing import Any

from drjax import contrib

_MOVED: dict[str, Any] = {
    "export_federated_language": contrib.export_federated_language
}


def __getattr__(name: str) -> Any:
    """The value of a name that moved."""
    if name not in _MOVED:
        text = f"module 'drjax' has no attribute {name!r}"
        # With both, Python suggests a name that is close.
        raise AttributeError(text, name=name, obj=sys.modules["drjax"])
    new = f"{contrib.__name__}.{name}"
    text = f"drjax.{name} is deprecated; use {new}."
    warnings.warn(text, DeprecationWarning, stacklevel=2)
    return _MOVED[name]
