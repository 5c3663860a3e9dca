"""The source line of an equation, for error texts.

Invariants: no plan, result or refusal depends on it, as it is debug data.
"""

import os
import traceback
from pathlib import Path
from typing import Any

import jax

from drjax import _compat
from drjax._compat.types import Eqn

_PACKAGE = str(Path(__file__).parents[1]) + os.sep


def _user_frame(eqn: Eqn) -> Any:
    """Return the innermost frame outside of JAX and drjax in an equation's traceback.

    It is JAX's `Frame`, with `file_name`, `start_line` and `function_name`; None if the
    traceback has no such frame.
    """
    frames = _compat.user_frames(eqn)
    return next((f for f in frames if not f.file_name.startswith(_PACKAGE)), None)


def source_line(eqn: Eqn) -> str:
    """Return the user's code that an equation comes from, as `file:line (function)`.

    "an unknown line" if the equation has no traceback with user code.
    """
    frame = _user_frame(eqn)
    if frame is None:
        return "an unknown line"
    return f"{frame.file_name}:{frame.start_line} ({frame.function_name})"


def line_of_error(error: BaseException) -> str:
    """Return the last line of the user's code in an error's traceback, likewise."""
    jax_package = str(Path(jax.__file__).parent) + os.sep
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((_PACKAGE, jax_package, "<")):
            return f"{frame.filename}:{frame.lineno} ({frame.name})"
    return "an unknown line"


def called_by(call: Eqn, eqn: Eqn) -> Eqn:
    """Give an equation the source line of a call, if it has no line of user code.

    `call` is the equation that calls the jaxpr with `eqn`.
    """
    if _user_frame(eqn) is not None:
        return eqn
    return eqn.replace(source_info=call.source_info)
