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
    """Import and return a module that one of drjax's extras installs.

    Args:
      module: The name of the module, such as `"pyarrow.parquet"`.
      extra: The name of the extra, such as `"ray"`.
      what: What needs the module, as the subject of the error message.

    Raises:
      EngineError: The module is not installed. The message has the command to install
        it.
      ImportError: The module is installed but cannot be imported.
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
