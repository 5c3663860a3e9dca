"""The source line of an equation, for error texts.

Invariants: no plan, result or refusal depends on it, as it is debug data.
"""

import os
from pathlib import Path

from drjax import _compat

_PACKAGE = str(Path(__file__).parents[1]) + os.sep


def _user_frame(eqn):
    """The innermost frame outside of drjax in an equation's traceback, or None."""
    frames = _compat.user_frames(eqn)
    return next((f for f in frames if not f.file_name.startswith(_PACKAGE)), None)


def source_line(eqn) -> str:
    """The user's file, line and function of an equation, or "an unknown line"."""
    frame = _user_frame(eqn)
    if frame is None:
        return "an unknown line"
    return f"{frame.file_name}:{frame.start_line} ({frame.function_name})"


def called_by(call, eqn):
    """Give an equation of a callee the source line of its call if it has none itself.

    Args:
      call: The equation that calls the jaxpr.
      eqn: The equation of the jaxpr.
    """
    if _user_frame(eqn) is not None:
        return eqn
    return eqn.replace(source_info=call.source_info)
