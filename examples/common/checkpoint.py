"""Checkpoints of a run: its state, and its settings to refuse a wrong `--resume`."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp


class Checkpoints:
    """The checkpoints in one folder, by number of finished rounds.

    They are written in the background and become visible only when complete, so a
    process that is killed at any moment leaves the latest complete one intact.
    """

    def __init__(
        self,
        folder: Path,
        settings: dict[str, Any],
        *,
        keep: bool,
        free: Sequence[str] = (),
    ):
        """Opens the folder; empties it first unless `keep`.

        Args:
            settings: of the run.
            free: the names of those that may change when a run resumes.
        """
        if not keep and folder.exists():
            shutil.rmtree(folder)
        options = ocp.CheckpointManagerOptions(max_to_keep=2)
        self._manager = ocp.CheckpointManager(folder.resolve(), options=options)
        self._settings, self._free = settings, free

    def save(self, rounds: int, state: Any, history: list[dict[str, Any]]) -> None:
        """Starts to write one checkpoint."""
        metadata = {"settings": self._settings, "history": history}
        args = ocp.args.Composite(
            state=ocp.args.StandardSave(state), metadata=ocp.args.JsonSave(metadata)
        )
        self._manager.save(rounds, args=args)

    def setting(self, name: str) -> Any:
        """A setting of the latest checkpoint; of this run if there is none."""
        return (self._saved() or {"settings": self._settings})["settings"][name]

    def _saved(self) -> dict[str, Any] | None:
        """The settings and the history of the latest checkpoint, if there is one."""
        rounds = self._manager.latest_step()
        if rounds is None:
            return None
        metadata = ocp.args.Composite(metadata=ocp.args.JsonRestore())
        return self._manager.restore(rounds, args=metadata)["metadata"]

    def restore(self, like: Any) -> tuple[Any, list[dict[str, Any]]]:
        """Reads the latest checkpoint, as arrays placed like those of `like`.

        Returns:
            The state and the history; `like` and no history if there is none yet.

        Raises:
            ValueError: the checkpoint is of a run with other settings.
        """
        metadata = self._saved()
        if metadata is None:
            return like, []
        abstract = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like
        )
        changed = {
            name: (metadata["settings"].get(name), value)
            for name, value in self._settings.items()
            if name not in self._free and metadata["settings"].get(name) != value
        }
        if changed:
            raise ValueError(
                "A run resumes only with the settings it began with; these differ "
                f"(saved, now): {changed}."
            )
        args = ocp.args.Composite(state=ocp.args.StandardRestore(abstract))
        state = self._manager.restore(self._manager.latest_step(), args=args)["state"]
        return state, metadata["history"]

    def close(self) -> None:
        """Waits until everything is written."""
        self._manager.close()
