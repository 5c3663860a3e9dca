"""What an engine must do for the core: run blocks in workers. And the simplest one."""

from collections.abc import Sequence
from typing import Any, Protocol

from drjax.backends.engine import work
from drjax.backends.engine.work import Done, File, State, Work


class Lost(Exception):
    """A block's worker is gone; the block may be tried again on another."""


class Pool(Protocol):
    """Workers that run blocks, by `drjax.backends.engine.work.run`.

    Attributes:
      workers: How many there are.
    """

    workers: int

    def open(self) -> None:
        """Start the workers, unless they run."""
        ...

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

    def close(self) -> None:
        """End the workers."""
        ...


class InProcess:
    """A pool without processes, which runs each block when it is submitted."""

    def __init__(self, workers: int = 1):
        self.workers = workers

    def open(self) -> None:
        pass

    def share(self, x: Any) -> Any:
        return x

    def submit(self, work: Work, file: File, shared: Any) -> Any:
        return _Flight(file, work, shared)

    def wait(self, flights: Sequence[Any], timeout: float | None) -> Sequence[Any]:
        return flights

    def result(self, flight: Any) -> Done:
        if flight.error is not None:
            raise flight.error
        return flight.done

    def abandon(self, flight: Any) -> None:
        pass

    def forget(self, flight: Any) -> None:
        pass

    def states(self) -> list[State]:
        return [work.state()]

    def close(self) -> None:
        pass


class _Flight:
    def __init__(self, file: File, task: Work, shared: Any):
        self.done: Any = None
        self.error: Exception | None = None
        try:
            self.done = work.run(file, task, shared)
        except Exception as error:
            self.error = error
