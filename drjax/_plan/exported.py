"""What a plan needs to know of the exported functions of a stage."""

from typing import Any, Protocol


class Exported(Protocol):
    """The facts that a plan needs of the exported functions of a stage.

    The functions themselves are `drjax._plan_file.exported_stage.ExportedStage`.
    """

    @property
    def custom_calls(self) -> tuple[str, ...]:
        """The names of the custom calls in the code of the functions."""
        ...

    @property
    def origin(self) -> dict[str, Any]:
        """How the functions were exported, as JSON data for a plan file's manifest.

        The dict has the versions of the software, the platforms, the precision, and the
        implementations of random keys.
        """
        ...
