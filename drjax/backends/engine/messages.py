"""Records between the driver and its workers: `Task` down, `BlockResult` up.

Input of a worker: a plan `File` and a `Task`, which is a block of groups and the stage
that they run. Output: a `BlockResult`. `WorkerState` tells the driver what a worker is
doing meanwhile.

Invariants: records hold numpy arrays, bytes, text and numbers; neither JAX's objects
nor users' code. So they can be pickled by any engine, and `wire_format` can write them
without pickle.

Sharp edges: stages and rounds are named by their index in `rounds_of`, which driver and
workers must compute from the same file.
"""

import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from drjax.plan import Plan, Round, Value


@dataclass(frozen=True)
class File:
    """A plan file, as workers are sent it.

    Attributes:
      data: Its bytes.
      key: Its SHA-256, in hexadecimal.
      x64: Whether it holds 64-bit values.
      custom_calls: Names of code outside of the file that its stages may call, besides
        those on drjax's own list.
    """

    data: bytes
    key: str
    x64: bool
    custom_calls: tuple[str, ...] = ()


@dataclass(frozen=True)
class Block:
    """c groups that a worker runs at once.

    Attributes:
      groups: The group indices, int32 `[c]`.
      valid: Which of them take part, bool `[c]`; the others are masked.
      slices: For each partitioned input of the stage the groups' slices, `[c, ...]`.
    """

    groups: np.ndarray
    valid: np.ndarray
    slices: list[np.ndarray]

    def without(self, out: np.ndarray) -> "Block":
        """The block with groups masked for which `out`, bool `[c]`, is true."""
        return replace(self, valid=self.valid & ~out)

    def without_failed(self, failed: dict[int, str]) -> "Block":
        """The block with failed groups masked; `failed` has reasons by group index."""
        return self.without(np.isin(self.groups, list(failed)))

    def halves(self) -> list["Block"]:
        """Two blocks, each with half of the groups that take part, and no others."""
        # Masked groups are left out: halving must end at one group that takes part.
        chosen = np.flatnonzero(self.valid)
        middle = len(chosen) // 2
        return [self._only(chosen[:middle]), self._only(chosen[middle:])]

    def _only(self, chosen: np.ndarray) -> "Block":
        """The block of some of the groups; `chosen` are their positions."""
        return Block(
            self.groups[chosen], self.valid[chosen], [x[chosen] for x in self.slices]
        )

    def padded(self, size: int) -> "Block":
        """The block with `size` slots, so that all blocks have one shape.

        Slots that are added are masked copies of a group that takes part; some group
        must.
        """
        index = np.zeros(size, np.int64)
        index[: len(self.valid)] = np.arange(len(self.valid))
        valid = np.zeros(size, bool)
        valid[: len(self.valid)] = self.valid
        # Most blocks are full: no copy for them.
        if valid.all():
            return self
        # A real group's slices, as zeros could make a group's work loop for ever or
        # raise.
        index[~valid] = np.flatnonzero(self.valid)[0]
        return Block(self.groups[index], valid, [x[index] for x in self.slices])


@dataclass(frozen=True)
class Task:
    """A block and what to do with it: what a worker is sent.

    Attributes:
      stage: The index of the stage's round in `rounds_of`.
      block: The groups.
      size: How many groups the stage works on at once.
      check_nans: Whether a group that yields a NaN has failed.
      drop: Whether results leave out groups that fail; if not, a block in which a group
        fails has no results.
      number: Unique among the tasks of a driver.
      search: Whether the groups run one by one, without results, while `state` reports
        the group at work: to find the group that takes long.
    """

    stage: int
    block: Block
    size: int
    check_nans: bool
    drop: bool
    number: int = field(default_factory=itertools.count(1).__next__)
    search: bool = False


@dataclass(frozen=True)
class BlockResult:
    """The result of a block.

    Attributes:
      partials: For each reduction but gathers the partial reduction over the block;
        None if no group takes part. [] if the block has no results.
      slices: For each output that is read later the groups' slices, `[c, ...]`.
      failed: Why groups failed, by index. Unless they are dropped, partial reductions
        and slices are empty.
      pid: The id of the worker's process; 0 if no worker ran.
      seconds: How long the block took.
    """

    partials: Sequence[np.ndarray | None]
    slices: list[np.ndarray]
    failed: dict[int, str]
    pid: int
    seconds: float


@dataclass
class WorkerState:
    """What a worker is doing.

    Attributes:
      pid: The id of its process.
      groups: The indices of the first and last group at work; None if it is idle.
      since: `time.time()` when it began with these groups.
      task: The number of the task.
      seconds: How long ago that was, by the clock of the worker.
    """

    pid: int = field(default_factory=os.getpid)
    groups: tuple[int, int] | None = None
    since: float = 0.0
    task: int = 0
    seconds: float = 0.0


def rounds_of(plan: Plan) -> Iterator[tuple[Plan, Round]]:
    """All rounds of a plan and of bodies of its loops, each with its plan, in order.

    The driver and the workers number stages in this order.
    """
    for a_round in plan.rounds:
        yield plan, a_round
        for loop in a_round.loops:
            for body in loop.bodies:
                yield from rounds_of(body)


def kept_outputs(plan: Plan, a_round: Round) -> list[Value]:
    """The outputs of a round's local stage of which slices are read later.

    `plan` is the plan, or the body of a loop, that has the round.
    """
    # Slices that nothing needs later stay in the worker.
    kept = plan.kept()
    return [v for v in a_round.local.outputs if v.name in kept]
