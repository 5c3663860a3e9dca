"""What engines need besides drjax: imported when it is first asked for."""

import importlib
from typing import Any

from drjax._errors import EngineError


def needed(module: str, extra: str, what: str) -> Any:
    """A module that one of the extras installs.

    Raises:
      EngineError: It is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        if error.name is None or error.name.split(".")[0] != module.split(".")[0]:
            raise  # it is there, but does not work
        raise EngineError(
            f"{what} needs {module.split('.')[0]}, which is not installed here. "
            f"Install it from a checkout of drjax: pip install '.[{extra}]'"
        ) from error
