"""What a plan may know of the exported functions of a stage, as a `Protocol`."""

from typing import Any, Protocol


class Exported(Protocol):
    """What `drjax.plan` may know of an exported stage: custom calls and origin.

    `drjax._plan_file.exported_stage.ExportedStage` implements it, and also has the
    functions. This is a Protocol, so that the plan, the lowest layer, need not import
    `_plan_file`.
    """

    @property
    def custom_calls(self) -> tuple[str, ...]:
        """The names of the custom calls in the code of the functions."""
        ...

    @property
    def origin(self) -> dict[str, Any]:
        """How the functions were exported, as JSON data for a plan file's manifest.

        The dict has `producer` (the versions of the software, by name),
        `calling_convention` (an int), `platforms` (names), `x64` (whether there are
        64-bit values), and `prng` (the names of the implementations of random keys).
        """
        ...
