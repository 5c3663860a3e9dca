"""The options that all engines take.

Input: keywords of an engine's `compile`. Output: an `EngineOptions` whose values were
validated.

Invariants: `checked` returns options with valid values only. An engine itself refuses
those that it does not support (Beam: `timeout`).

Sharp edges: the constructor itself validates nothing.
"""

import dataclasses
import os
from dataclasses import dataclass
from typing import Any

from drjax._errors import DrjaxTypeError, DrjaxValueError


@dataclass(frozen=True)
class EngineOptions:
    """How an engine runs a plan. Give these to its `compile`, by name.

    Attributes:
      block_size: How many groups a worker works on at once. Default: such that each
        worker gets four blocks, of at most 16 MB of inputs and results (or the results
        of four groups, if these are larger). In later rounds there are fewer blocks if
        they take less than 20 ms, and smaller ones if they take more than 5 s, or than
        a fourth of `timeout`. Sums within a block are made in the dtype of the program;
        blocks are added up in float64. The last bits of results depend on the size:
        give it where they must be the same in each run.
      on_error: What a group that fails does: `"raise"` an `EngineError`, or `"drop"`
        out for the rest of the call. Sums are then over the survivors, means are
        divided by their number, and what is returned for each group is NaN, or zero
        if it is no float, for a group that was dropped.
      min_groups: With fewer survivors in a round the call fails all the same.
      check_nans: Whether a group that yields a NaN has failed.
      timeout: Seconds for one block; then its worker is replaced, and the groups work
        one by one: one that takes that long alone has failed, the others run again
        together. A worker compiles a stage within its first block. Default: no limit.
      retries: How often a block is tried again whose worker was lost, or that is late
        though none of its groups is, before it is tried by halves.
      checkpoint: A folder for what has been computed, written after each round: the
        same call, repeated after a crash, resumes from there. It is emptied at the
        end. A path, or a URL such as `gs://bucket/run`, for which fsspec and the
        package of that file system (gcsfs, s3fs, ...) must be installed.
      progress: Whether to show a bar of the groups done; needs tqdm.

    Example:
      >>> from drjax.backends import EngineOptions
      >>> EngineOptions.checked(on_error="drop", min_groups=2).retries
      2
    """

    block_size: int | None = None
    on_error: str = "raise"
    min_groups: int = 1
    check_nans: bool = False
    timeout: float | None = None
    retries: int = 2
    checkpoint: str | os.PathLike[str] | None = None
    progress: bool = False

    @staticmethod
    def checked(**values: Any) -> "EngineOptions":
        """EngineOptions from keywords, whose values were validated.

        Raises:
          DrjaxTypeError: There is no such option.
          DrjaxValueError: It cannot have that value.
        """
        known = [field.name for field in dataclasses.fields(EngineOptions)]
        if unknown := sorted(set(values) - set(known)):
            raise DrjaxTypeError(
                f"Engines take the options {', '.join(known)}, got {unknown[0]!r}."
            )
        # After the names were checked: else Python's own TypeError would come first.
        options = EngineOptions(**values)
        if options.on_error not in ("raise", "drop"):
            raise DrjaxValueError(
                f'on_error must be "raise" or "drop", got {options.on_error!r}.'
            )
        lowest = {"block_size": 1, "min_groups": 0, "retries": 0}
        for name, low in lowest.items():
            value = getattr(options, name)
            if value is not None and (type(value) is not int or value < low):
                raise DrjaxValueError(
                    f"{name} must be an integer from {low}, got {value!r}."
                )
        # `not >` also refuses NaN.
        if options.timeout is not None and not options.timeout > 0:
            raise DrjaxValueError(
                f"timeout must be a positive number of seconds, got {options.timeout}."
            )
        return options
