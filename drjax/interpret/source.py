"""Where an equation comes from: a user's line, a call, a derivative."""

import os
from pathlib import Path

import jax

from drjax import _compat

_JAX = str(Path(jax.__file__).parent)
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
    """`eqn` as part of a call: within its names, and from its line if it has none."""
    info = (call if _user_frame(eqn) is None else eqn).source_info
    names = call.source_info.name_stack + eqn.source_info.name_stack
    return eqn.replace(source_info=info.replace(name_stack=names))


def is_transposed(eqn) -> bool:
    """Whether an equation is of a derivative in reverse mode, as its names say."""
    names = eqn.source_info.name_stack.stack
    return any(n.name == "transpose" and type(n).__name__ == "Transform" for n in names)


def is_written_sum(eqn) -> bool:
    """Whether a user wrote this sum: not so if it is the transpose of a broadcast.

    The transpose of an equation has the traceback of that equation.
    """
    if eqn.source_info.traceback is None:
        return True
    files = ("reductions.py", "einsum.py", "tensor_contractions.py")
    for frame in eqn.source_info.traceback.frames:  # from the innermost
        if not frame.file_name.startswith(_JAX):
            return False
        name = Path(frame.file_name).name
        if name in files or (name == "lax.py" and "reduce" in frame.function_name):
            return True
    return False
