"""What an engine must do for the core, and the simplest one.

An `Engine` runs all groups of a stage. Most engines are a `Pool`, which runs blocks in
workers; `drjax.backends.engine.pool_scheduler` makes an engine of it.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from drjax.backends.engine.messages import Block, Done, File, State, Work
from drjax.backends.engine.options import EngineOptions


@dataclass(frozen=True)
class Call:
    """One run of a stage of the groups.

    Attributes:
      file: The plan file.
      stage: The stage, by its place in `rounds_of`.
      where: What it is called in errors.
      ops: The operation of each of its partial reductions: sum, mean, max or min.
      shared: Its global inputs.
      rows: Its partitioned inputs: stacks of rows along axis 0, or `Lazy`.
      alive: Which groups take part, bool `[n]`.
      size: How many groups a worker works on at once.
      options: How.
      lost: To be called with a reason for whatever has to be done again.
      known: What the engine keeps between calls of the same `Runner`.
    """

    file: File
    stage: int
    where: str
    ops: tuple[str, ...]
    shared: list[np.ndarray]
    rows: list[Any]
    alive: np.ndarray
    size: int
    options: EngineOptions
    lost: Callable[[str], None]
    known: dict[str, Any]


Results = Generator[tuple[Block, Done], None, None]


class Engine(Protocol):
    """What runs the groups' work.

    Attributes:
      workers: How many workers there are.
    """

    workers: int

    def open(self) -> None:
        """Start the workers, unless they run."""
        ...

    def results(self, call: Call) -> Results:
        """Blocks with what became of them, until each group was in one.

        Where the engine combines the blocks' partial results itself, it gives these in
        the end, with a block of no groups.

        Raises:
          Exception: What a stage raised, and no group alone.
        """
        ...

    def close(self) -> None:
        """End the workers."""
        ...


class Lost(Exception):
    """A block's worker is gone; the block may be tried again on another."""


class Pool(Protocol):
    """Workers that run blocks, by `drjax.backends.engine.worker.run`.

    Attributes:
      workers: How many there are.
      session: Another number after all that was shared has gone.
    """

    workers: int
    session: int

    def share(self, x: Any) -> Any:
        """Make an object known to all workers; what stands for it."""
        ...

    def submit(self, work: Work, file: Any, shared: Any) -> Any:
        """Start a block on the worker with the least to do; what stands for it.

        Args:
          work: For the worker's `run`.
          file: What `share` gave for the file.
          shared: What `share` gave for the global inputs of the stage.
        """
        ...

    def wait(self, flights: Sequence[Any], timeout: float | None) -> Sequence[Any]:
        """Wait until one of those blocks is done, or for so many seconds."""
        ...

    def result(self, flight: Any) -> Done:
        """What became of a block that is done.

        Raises:
          Lost: Its worker is gone. There is a new one.
          Exception: What the stage raised, or words for it.
        """
        ...

    def abandon(self, flight: Any) -> None:
        """End the worker that has this block, and start another."""
        ...

    def forget(self, flight: Any) -> None:
        """Nobody will ask for the result of this block any more."""
        ...

    def states(self) -> list[State]:
        """What each worker is doing."""
        ...
