"""Checkpoints of a run: its state, and its settings to refuse a wrong `--resume`."""

import shutil
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp


class Checkpoints:
    """The checkpoints in one folder, by number of finished rounds.

    They are written in the background and become visible only when complete, so a
    process that is killed at any moment leaves the latest complete one intact.
    """

    def __init__(self, folder: Path, settings: dict[str, Any], *, keep: bool):
        """Opens the folder; empties it first unless `keep`."""
        if not keep and folder.exists():
            shutil.rmtree(folder)
        options = ocp.CheckpointManagerOptions(max_to_keep=2)
        self._manager = ocp.CheckpointManager(folder.resolve(), options=options)
        self._settings = settings

    def save(self, rounds: int, state: Any, history: list[dict[str, Any]]) -> None:
        """Starts to write one checkpoint."""
        metadata = {"settings": self._settings, "history": history}
        args = ocp.args.Composite(
            state=ocp.args.StandardSave(state), metadata=ocp.args.JsonSave(metadata)
        )
        self._manager.save(rounds, args=args)

    def restore(self, like: Any) -> tuple[Any, list[dict[str, Any]]]:
        """Reads the latest checkpoint, as arrays placed like those of `like`.

        Returns:
            The state and the history; `like` and no history if there is none yet.

        Raises:
            ValueError: the checkpoint is of a run with other settings.
        """
        rounds = self._manager.latest_step()
        if rounds is None:
            return like, []
        abstract = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like
        )
        metadata = self._manager.restore(
            rounds, args=ocp.args.Composite(metadata=ocp.args.JsonRestore())
        )["metadata"]
        changed = {
            name: (metadata["settings"].get(name), value)
            for name, value in self._settings.items()
            if metadata["settings"].get(name) != value
        }
        if changed:
            raise ValueError(
                "A run resumes only with the settings it began with; these differ "
                f"(saved, now): {changed}."
            )
        state = self._manager.restore(
            rounds, args=ocp.args.Composite(state=ocp.args.StandardRestore(abstract))
        )["state"]
        return state, metadata["history"]

    def close(self) -> None:
        """Waits until everything is written."""
        self._manager.close()
