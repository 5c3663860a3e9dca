"""The source line of an equation, for error texts.

Invariants: no plan, result or refusal depends on it, as it is debug data.
"""

import os
from pathlib import Path

from drjax import _compat

_PACKAGE = str(Path(__file__).parents[1]) + os.sep


def _user_frame(eqn):
    """The innermost frame of an equation's traceback outside of drjax, or None."""
    frames = _compat.user_frames(eqn)
    return next((f for f in frames if not f.file_name.startswith(_PACKAGE)), None)


def source_line(eqn) -> str:
    """The user's file, line and function that an equation came from."""
    frame = _user_frame(eqn)
    if frame is None:
        return "an unknown line"
    return f"{frame.file_name}:{frame.start_line} ({frame.function_name})"


def called_by(call, eqn):
    """An equation of a callee: with the line of the call if it has none of its own."""
    if _user_frame(eqn) is not None:
        return eqn
    return eqn.replace(source_info=call.source_info)
