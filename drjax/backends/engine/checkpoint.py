"""What has been computed in a call, on disk, so that the call can go on after a crash.

The unit is a *note*: the results of one round's groups, or how far a loop is. Notes of
rounds inside a loop are dropped when the step is done, so that what is saved does not
grow with the number of rounds, except by what a loop stacks. Server stages are run
again: they are cheap, and the same.
"""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from drjax._errors import EngineError
from drjax.backends.engine.extras import needed
from drjax.backends.engine.groups import Lazy
from drjax.backends.engine.options import Options

Note = list[np.ndarray]


class Notes:
    """Notes by the place in the plan; these live as long as the call."""

    resumed = 0

    def get(self, key: str) -> Note | None:
        """The note of a place."""

    def put(self, key: str, note: Note, over: str | None = None) -> None:
        """Make a note, and forget those of places that begin with `over`."""

    def write(self) -> None:
        """Called before the groups work: write what is new."""

    def close(self) -> None:
        """The call has come to its end, or to an error."""

    def clear(self) -> None:
        """The call has come to its end."""


class Saved(Notes):
    """Notes in a folder, written by orbax-checkpoint, in the background.

    Args:
      folder: The folder.
      key: What call it is: notes of another are an error.
    """

    def __init__(self, folder: str | Path, key: str):
        self._ocp = needed("orbax.checkpoint", "ray", "checkpoint=")
        self._folder = Path(folder).resolve()
        options = self._ocp.CheckpointManagerOptions(max_to_keep=2)
        self._manager = self._ocp.CheckpointManager(self._folder, options=options)
        self._key, self._notes, self._new = key, {}, False
        self._step = self._manager.latest_step() or 0
        if self._step:
            self._restore()
        self.resumed = len(self._notes)

    def _restore(self) -> None:
        args = self._ocp.args
        told = self._manager.restore(
            self._step, args=args.Composite(about=args.JsonRestore())
        )["about"]
        if told["key"] != self._key:
            self.close()
            raise EngineError(
                f"The checkpoint in {self._folder} is of another call: of another plan "
                "or of other arguments. Give another folder, or remove it."
            )
        state = self._manager.restore(
            self._step, args=args.Composite(state=args.StandardRestore())
        )["state"]
        for name, parts in told["notes"].items():
            note = []
            for part, (dtype, shape) in parts.items():
                flat = np.asarray(state["x"][part]).view(np.dtype(dtype))
                count = int(np.prod(shape))
                note.append(flat[:count].reshape(shape))
            self._notes[name] = note

    def get(self, key: str) -> Note | None:
        return self._notes.get(key)

    def put(self, key: str, note: Note, over: str | None = None) -> None:
        if over is not None:
            gone = [k for k in self._notes if k.startswith(over)]
            for k in gone:
                del self._notes[k]
        self._notes[key], self._new = note, True

    def write(self) -> None:
        if not self._new:
            return
        self._new = False
        self._step += 1
        arrays, about = {}, {}
        for name, parts in self._notes.items():
            about[name] = {}
            for x in parts:
                part = str(len(arrays))
                about[name][part] = [str(x.dtype), [*x.shape]]
                arrays[part] = _bytes(x)
        args = self._ocp.args
        self._manager.save(
            self._step,
            args=args.Composite(
                state=args.StandardSave({"x": arrays}),
                about=args.JsonSave({"key": self._key, "notes": about}),
            ),
        )

    def close(self) -> None:
        self.write()
        self._manager.wait_until_finished()
        self._manager.close()

    def clear(self) -> None:
        self._new = False
        self._manager.wait_until_finished()
        for step in self._manager.all_steps():
            self._manager.delete(step)


def _bytes(x: np.ndarray) -> np.ndarray:
    """Any array as bytes: dtypes and shapes that orbax does not know are fine."""
    flat = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
    return flat if flat.size else np.zeros(x.dtype.itemsize, np.uint8)


def key_of(plan_key: str, inputs: list[Any], options: Options) -> str:
    """What call it is: the plan, what was given to it, and what fails a group.

    Arrays are known by what is in them, files by their names and sizes; of iterables
    nothing is known.
    """
    policy = f"{options.on_error} {options.check_nans}"
    found = hashlib.sha256(f"{plan_key} {policy}".encode())
    for x in inputs:
        if isinstance(x, Lazy):
            found.update(x.source.groups.identity().encode())
        else:
            found.update(f"{x.dtype}{x.shape}".encode())
            found.update(np.ascontiguousarray(x).reshape(-1).view(np.uint8))
    return found.hexdigest()
