"""Where an equation comes from, for messages: nothing may depend on it."""

import os
from pathlib import Path

from drjax import _compat

_HERE = str(Path(__file__).parents[1]) + os.sep


def _user_frame(eqn):
    frames = _compat.user_frames(eqn)
    return next((f for f in frames if not f.file_name.startswith(_HERE)), None)


def source_line(eqn) -> str:
    """The user's file, line and function that an equation came from."""
    frame = _user_frame(eqn)
    if frame is None:
        return "an unknown line"
    return f"{frame.file_name}:{frame.start_line} ({frame.function_name})"


def called_by(call, eqn):
    """`eqn` as part of a call: from the line of the call if it has none of its own."""
    if _user_frame(eqn) is not None:
        return eqn
    return eqn.replace(source_info=call.source_info)
