"""What a plan does by code that is built on it: print, draw, save.

The modules above implement these methods. A module is imported by the first call, so
that this layer imports none of them, and `import drjax` no plans.
"""

import importlib
from typing import Any

# By the name of the method: the module of `drjax`, and the function in it.
_IMPLEMENTATIONS = {
    "Plan.__reduce__": ("_plan_file.save", "pickled"),
    "Plan.__str__": ("_drawing.print_plan", "printed"),
    "Plan.communication": ("_plan_file.group_stages", "bytes_of_code"),
    "Plan.draw": ("_drawing.draw", "draw"),
    "Plan.save": ("_plan_file.save", "save"),
}


def call(method: str, *args: Any) -> Any:
    """Call the implementation of a method, such as `Plan.draw`."""
    module, function = _IMPLEMENTATIONS[method]
    return getattr(importlib.import_module(f"drjax.{module}"), function)(*args)
