"""Checkpoints of a run: its state, and its settings to refuse a wrong `--resume`."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from drjax.contrib import diloco


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
        self._checkpoints = diloco.Checkpoints(folder)
        self._settings, self._free = settings, free

    def save(
        self, rounds: int, state: diloco.State, history: list[dict[str, Any]]
    ) -> None:
        """Starts to write one checkpoint."""
        # From the host, as one file for each device takes three times as long.
        state, metadata = jax.device_get(state), [self._settings, history]
        self._checkpoints.save(rounds, state, metadata)

    def restore(
        self, train_round: diloco.Round, like: diloco.State
    ) -> tuple[diloco.State, list[dict[str, Any]]]:
        """Reads the latest checkpoint, as arrays placed like those of `like`.

        Returns:
            The state and the history; `like` and no history if there is none yet.

        Raises:
            ValueError: the checkpoint is of a run with other settings.
        """
        saved, history = self._checkpoints.metadata() or (self._settings, [])
        changed = {
            name: (saved.get(name), value)
            for name, value in self._settings.items()
            if name not in self._free and saved.get(name) != value
        }
        if changed:
            raise ValueError(
                "A run resumes only with the settings it began with; these differ "
                f"(saved, now): {changed}."
            )
        return self._checkpoints.restore(train_round, like)[1], history

    def close(self) -> None:
        """Waits until everything is written."""
        self._checkpoints.close()
