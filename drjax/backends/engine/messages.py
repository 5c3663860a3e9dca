"""What passes between the driver and a worker: records of numpy arrays and bytes.

Down go the plan file and tasks, each a block of groups and the stage that they run; up
comes what became of a block. Neither holds JAX's objects or users' code.
"""

import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from drjax.plan import Plan, Round, Value


@dataclass(frozen=True)
class File:
    """A plan file.

    Attributes:
      data: What is in it.
      key: Its SHA-256.
      x64: Whether it holds 64-bit values.
      custom_calls: What its stages may call, as for `drjax.load_plan`.
    """

    data: bytes
    key: str
    x64: bool
    custom_calls: tuple[str, ...] = ()


@dataclass(frozen=True)
class Block:
    """Groups that work together; c of them.

    Attributes:
      groups: Their numbers, int32 `[c]`.
      valid: Which of them take part, bool `[c]`.
      rows: Of each partitioned input of the stage a row for each, `[c, ...]`.
    """

    groups: np.ndarray
    valid: np.ndarray
    rows: list[np.ndarray]

    def without(self, out: np.ndarray) -> "Block":
        """The block without the groups for which `out`, bool `[c]`, is true."""
        return replace(self, valid=self.valid & ~out)

    def without_failed(self, failed: dict[int, str]) -> "Block":
        """The block without the groups that failed, by number."""
        return self.without(np.isin(self.groups, list(failed)))

    def halves(self) -> list["Block"]:
        """The groups that take part, in two blocks."""
        chosen = np.flatnonzero(self.valid)
        middle = len(chosen) // 2
        return [self._only(chosen[:middle]), self._only(chosen[middle:])]

    def _only(self, chosen: np.ndarray) -> "Block":
        return Block(
            self.groups[chosen], self.valid[chosen], [x[chosen] for x in self.rows]
        )

    def padded(self, size: int) -> "Block":
        """The block with `size` groups; those out of it repeat one that takes part."""
        index = np.zeros(size, np.int64)
        index[: len(self.valid)] = np.arange(len(self.valid))
        valid = np.zeros(size, bool)
        valid[: len(self.valid)] = self.valid
        if valid.all():
            return self
        index[~valid] = np.flatnonzero(self.valid)[0]
        return Block(self.groups[index], valid, [x[index] for x in self.rows])


@dataclass(frozen=True)
class Work:
    """What to do with a block.

    Attributes:
      stage: The stage, by its place in `rounds_of`.
      block: The groups.
      size: How many groups the stage works on at once.
      check_nans: Whether to look for groups that yield a NaN.
      drop: Whether to go on without groups that fail.
      number: What tells this task from others of the same driver.
      search: Whether the groups work one by one, without results: `state` tells
        which one takes long.
    """

    stage: int
    block: Block
    size: int
    check_nans: bool
    drop: bool
    number: int = field(default_factory=itertools.count(1).__next__)
    search: bool = False


@dataclass(frozen=True)
class Done:
    """What became of a block.

    Attributes:
      partials: For each reduction but gathers, what the groups give to it; None if
        none of them does.
      rows: What is needed later of each group, `[c, ...]`.
      failed: Why groups failed, by number. Unless they are dropped, nothing else is
        there.
      pid: The worker's process.
      seconds: How long it took.
    """

    partials: Sequence[np.ndarray | None]
    rows: list[np.ndarray]
    failed: dict[int, str]
    pid: int
    seconds: float


@dataclass
class State:
    """What a worker is doing.

    Attributes:
      pid: Its process.
      groups: Numbers of the first and last group at work; None if it is idle.
      since: `time.time()` when it began with them.
      task: The number of the task.
      seconds: How long ago that was, by the clock of the worker.
    """

    pid: int = field(default_factory=os.getpid)
    groups: tuple[int, int] | None = None
    since: float = 0.0
    task: int = 0
    seconds: float = 0.0


def rounds_of(plan: Plan) -> Iterator[tuple[Plan, Round]]:
    """All rounds of a plan and of its loops, in a fixed order."""
    for a_round in plan.rounds:
        yield plan, a_round
        for loop in a_round.loops:
            for body in loop.bodies:
                yield from rounds_of(body)


def rows_of(plan: Plan, a_round: Round) -> list[Value]:
    """The outputs of a round's groups that a batch gives as rows."""
    kept = plan.kept()
    return [v for v in a_round.local.outputs if v.name in kept]
