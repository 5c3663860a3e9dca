"""The options that all engines take.

Input: keywords of an engine's `compile`. Output: an `EngineOptions` whose values were
validated. `checked_integer` validates what engines take besides, such as `workers`.
`pool_scheduler.py`, or an engine that is no pool, acts on `retries`.

Invariants: `checked` returns options with valid values only. An engine itself refuses
those that it does not support (Beam: `timeout`).

Sharp edges: the constructor itself validates nothing.
"""

import dataclasses
import numbers
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from drjax._errors import DrjaxTypeError, DrjaxValueError
from drjax.engines.core.events import Observer
from drjax.engines.core.retries import Retry, checked_retries


@dataclass(frozen=True)
class EngineOptions:
    """How an engine runs a plan. Give these to its `compile`, by name.

    Attributes:
      block_size: How many groups a worker sends one result of. Default: such that each
        worker gets four blocks, or one if sums have over 16 MB, of at most 16 MB of
        inputs and of slices that are sent. In later rounds there are fewer blocks if
        they take less than 20 ms, and 0.1 s for each megabyte of their sums, and
        smaller ones if they take more than 5 s, or than a fourth of `timeout`. A worker
        runs as many groups of a block at once as have 16 MB of inputs and results. Sums
        within a block are made in the dtype of the program; blocks are added up in
        float64. The last bits of results depend on the size, of sums with `wire=` more
        than these: give it if they must be the same in each run.
      on_error: What happens if a group fails. `"raise"`: the call raises an
        `EngineError`. `"drop"`: the group takes no part in the rest of the call. Sums
        are then over the survivors, means are divided by their number, and in returned
        partitioned values the slice of a dropped group is NaN, or zero if it is no
        float.
      min_groups: How many groups must survive each round; with fewer the call raises
        an `EngineError`.
      check_nans: Whether a group that yields a NaN has failed.
      timeout: Seconds that one block may take. Then its worker is replaced, and its
        groups run one by one: one that takes that long alone has failed, the others run
        again together. A worker compiles a stage within its first block. Default: no
        limit.
      retries: How often a block is tried again, before it is split into halves, if its
        worker was lost, or if it takes too long though none of its groups does alone.
        Or a dict from kinds of errors to a `drjax.backends.Retry`, which has waits.
      checkpoint: A folder for what has been computed, written after each round: the
        same call, repeated after a crash, resumes from there. It is emptied at the
        end. A path, or a URL such as `gs://bucket/run`, for which fsspec and the
        package of that file system (gcsfs, s3fs, ...) must be installed.
      progress: Whether to show a bar of the groups done; needs tqdm.
      observers: Functions that are called with each `drjax.backends.engine.events`
        event of a call: of stages, blocks, failures and retries.

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
    retries: int | Mapping[str, int | Retry] = 2
    checkpoint: str | os.PathLike[str] | None = None
    progress: bool = False
    observers: Sequence[Observer] = ()

    def retry(self, kind: str) -> Retry:
        """Return how a block is tried again after an error of this kind."""
        return checked_retries(self.retries)[kind]

    @staticmethod
    def checked(**values: Any) -> "EngineOptions":
        """Make an `EngineOptions` from keyword arguments, and validate their values.

        Args:
          **values: The options by name; others have their defaults.

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
        if options.block_size is not None:
            checked_integer("block_size", options.block_size, 1)
        checked_integer("min_groups", options.min_groups, 0)
        checked_retries(options.retries)
        if not all(map(callable, options.observers)):
            raise DrjaxValueError(
                f"observers must be functions of an event, got {options.observers!r}."
            )
        if (seconds := options.timeout) is not None:
            # True would be a second.
            number = isinstance(seconds, numbers.Real) and type(seconds) is not bool
            # `not >` also refuses NaN.
            if not (number and seconds > 0):
                raise DrjaxValueError(
                    f"timeout must be a positive number of seconds, got {seconds!r}."
                )
        return options


def checked_integer(name: str, value: object, low: int) -> int:
    """Return `value`, of any type, if it is an integer from `low`; else raise an error.

    `name` is the option's, such as an engine's `workers`, for the `DrjaxValueError`.
    """
    # `type` and not isinstance: True is no number of anything.
    if type(value) is not int or value < low:
        raise DrjaxValueError(f"{name} must be an integer from {low}, got {value!r}.")
    return value
