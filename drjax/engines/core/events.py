"""What happens in a call, for those who observe it.

Input: the option `observers`, functions of an `Event`. Output: calls of these, in the
thread of the driver, in the order in which things happen. Reports, the progress bar,
logs, and metrics are observers, too; `logs` is the one for the standard `logging`.

Invariants: a call begins with `CallStarted` and ends with `CallEnded`, whatever fails;
each `StageStarted` has one `StageEnded`, unless the call fails in it.

Sharp edges: an observer delays the call, and what it raises ends it.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

_logger = logging.getLogger(__name__)


class Event:
    """What an observer is called with: one of the classes below."""


@dataclass(frozen=True)
class CallStarted(Event):
    """A call of a compiled function begins, and its workers run.

    Attributes:
      program: The name of the planned function, text.
      groups: How many groups it has, int.
      workers: How many workers the engine has, if none is away, int.
      resumed: How many stages and steps of loops come from a checkpoint, int.
    """

    program: str
    groups: int
    workers: int
    resumed: int


@dataclass(frozen=True)
class _OfStage(Event):
    """An event in the groups' work of a round."""

    round: str
    stage: str


@dataclass(frozen=True)
class StageStarted(_OfStage):
    """The groups' work of a round begins.

    Attributes:
      round: The location of the round, text, as in `StageReport`.
      stage: The name of the stage, text.
      groups: How many groups take part, int.
    """

    groups: int


@dataclass(frozen=True)
class BlockDone(_OfStage):
    """The result of a block of groups has been added.

    Attributes:
      round: The location of the round, text.
      stage: The name of the stage, text.
      groups: How many groups of the block took part, int.
      process: The id of the worker's process; 0 if no worker ran, as for groups whose
        data cannot be read.
      seconds: How long the worker took, float.
    """

    groups: int
    process: int
    seconds: float


@dataclass(frozen=True)
class Retried(_OfStage):
    """A block was lost, and is tried again, perhaps in halves.

    Attributes:
      round: The location of the round, text.
      stage: The name of the stage, text.
      kind: The kind of the error, text: see `Retry`.
      why: The reason, text.
      wait: Seconds until it is sent again, float.
    """

    kind: str
    why: str
    wait: float


@dataclass(frozen=True)
class GroupFailed(_OfStage):
    """A group has failed. With `on_error="raise"`, the error follows.

    Attributes:
      round: The location of the round, text.
      stage: The name of the stage, text.
      group: Its index, int.
      why: The reason, text.
    """

    group: int
    why: str


@dataclass(frozen=True)
class WorkersChanged(Event):
    """Workers were lost, or have joined.

    Attributes:
      workers: How many there are now, int.
    """

    workers: int


@dataclass(frozen=True)
class StageEnded(_OfStage):
    """The groups' work of a round is done.

    Attributes:
      round: The location of the round, text.
      stage: The name of the stage, text.
      groups: How many groups took part to the end, int.
      blocks: How many blocks workers have done, int.
      seconds: How long the stage took, float.
    """

    groups: int
    blocks: int
    seconds: float


@dataclass(frozen=True)
class CallEnded(Event):
    """A call has its results, or has failed.

    Attributes:
      program: The name of the planned function, text.
      seconds: How long it took, float.
      error: What it raises; None: it returns.
    """

    program: str
    seconds: float
    error: BaseException | None


Observer: TypeAlias = Callable[[Event], object]


def log(event: Event) -> None:
    """Log an event: what failed as warnings, the rest for those who ask for it."""
    match event:
        case CallStarted():
            what = event.program, event.groups, event.resumed
            _logger.info("%s: %d groups, %d stages and steps resumed", *what)
        case StageStarted():
            what = event.round, event.stage, event.groups
            _logger.info("round %s, %s: %d groups", *what)
        case BlockDone():
            what = event.round, event.groups, event.process, event.seconds
            _logger.debug("round %s: %d groups by process %d in %.3f s", *what)
        case Retried():
            what = event.round, event.stage, event.why, event.wait
            _logger.warning("round %s, %s: %s; tried again in %.1f s", *what)
        case GroupFailed():
            what = event.round, event.stage, event.group, event.why
            _logger.warning("round %s, %s: group %d failed: %s", *what)
        case WorkersChanged():
            _logger.info("%d workers", event.workers)
        case StageEnded():
            what = event.round, event.stage, event.blocks, event.seconds
            _logger.info("round %s, %s: %d blocks in %.3f s", *what)
        case CallEnded(error=None):
            _logger.info("%s: done in %.3f s", event.program, event.seconds)
        case CallEnded():
            what = event.program, event.seconds, event.error
            _logger.error("%s: failed after %.3f s: %s", *what)
