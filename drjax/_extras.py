"""Optional dependencies of engines, imported when they are first needed.

Input: the name of a module, and of the extra that installs it. Output: the module, or
an error with the command to install it.

Sharp edges: an ImportError inside an installed module is not hidden: it is raised as it
is.
"""

import importlib
from typing import Any

from drjax._errors import EngineError


def needed(module: str, extra: str, what: str) -> Any:
    """Import and return `module`, which the extra `extra` of drjax installs.

    If it is not installed, raise an `EngineError` with `what` as its subject, and the
    command to install it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        if error.name is None or error.name.split(".")[0] != module.split(".")[0]:
            raise  # it is installed, but does not work
        raise EngineError(
            f"{what} needs {module.split('.')[0]}, which is not installed here. "
            f"Install it from a checkout of drjax: pip install '.[{extra}]'"
        ) from error
