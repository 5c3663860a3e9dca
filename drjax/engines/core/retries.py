"""How often a block is tried again, and after which time, by the kind of error.

Input: the option `retries`. Output: a `Retry` for each kind.

Invariants: each kind has one. Sharp edges: a block that has no retries left is split in
halves, unless the stage itself raised: then the call fails.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from drjax._errors import DrjaxValueError

KINDS = ("worker", "memory", "timeout", "error")


@dataclass(frozen=True)
class Retry:
    """How a block is tried again after one kind of error.

    The kinds, keys of the option `retries`, are: `"worker"`, a worker was lost, with
    its machine or alone; `"memory"`, the system ended a worker for lack of memory;
    `"timeout"`, a block took longer than the option `timeout`, though no group of it
    did; and `"error"`, a block failed and none of its groups did alone, as for a file
    system that does not answer. An integer in the place of a `Retry` is its `times`;
    one in the place of the dict is that of all kinds but `"error"`, which is 0.

    Attributes:
      times: How often a block is tried again.
      wait: Seconds before the first time.
      factor: By which the wait grows each time.
      most: The longest wait, in seconds.

    Example:
      >>> from drjax.backends import EngineOptions, Retry
      >>> patient = Retry(times=5, wait=1.0)
      >>> options = EngineOptions.checked(retries={"error": patient})
      >>> [options.retry("error").delay(i) for i in range(3)]
      [1.0, 2.0, 4.0]
    """

    times: int = 2
    wait: float = 0.0
    factor: float = 2.0
    most: float = 60.0

    def delay(self, tries: int) -> float:
        """Return the seconds to wait before a block is sent again.

        Args:
          tries: How often it was tried again before.
        """
        # By logarithms it would be exact for any number; 64 doublings are no wait.
        return min(self.most, self.wait * self.factor ** min(tries, 64))


def checked_retries(value: Any) -> dict[str, Retry]:
    """Return the `Retry` of each kind, from the option `retries`."""
    if not isinstance(value, Mapping):
        value = {kind: value for kind in KINDS if kind != "error"}
    if unknown := sorted(set(map(str, value)) - set(KINDS)):
        raise DrjaxValueError(
            f"retries takes the kinds {', '.join(KINDS)}, got {unknown[0]!r}."
        )
    default = {kind: Retry(0 if kind == "error" else Retry.times) for kind in KINDS}
    return default | {kind: _checked(x) for kind, x in value.items()}


def _checked(x: Any) -> Retry:
    retry = x if isinstance(x, Retry) else Retry(x)
    # `type`, as True is no number of anything.
    if type(retry.times) is not int or retry.times < 0:
        raise DrjaxValueError(
            f"retries must be an integer from 0, got {retry.times!r}."
        )
    for name in ("wait", "factor", "most"):
        number = getattr(retry, name)
        if not (isinstance(number, int | float) and number >= 0):
            raise DrjaxValueError(
                f"Retry.{name} must be a number from 0, got {number!r}."
            )
    return retry
