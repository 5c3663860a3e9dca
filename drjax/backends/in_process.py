"""Engines' core without an engine: every block runs in this process, in turn.

For tests of the core, and for groups that come from an iterable or from files.
"""

from collections.abc import Sequence
from typing import Any

from drjax.backends.engine import pool_scheduler, worker
from drjax.backends.engine.driver import Runner
from drjax.backends.engine.messages import Done, File, State, Work
from drjax.backends.engine.options import EngineOptions
from drjax.backends.engine.protocols import Call, Results
from drjax.plan import Plan


def compile(plan: Plan, *, workers: int = 1, **options: Any) -> Runner:
    """A function that runs the plan block by block in this process.

    Args:
      plan: The plan.
      workers: How many workers to pretend; blocks are cut as for so many.
      **options: See `EngineOptions`. There is no `timeout` here.

    Returns:
      A `Runner` with the signature of the planned function.

    Raises:
      EngineError: (when called) a group failed, or too few survive.
      DrjaxTypeError, DrjaxValueError: A wrong option.

    Example:
      >>> import drjax, jax.numpy as jnp
      >>> from drjax.backends import in_process
      >>> mean = drjax.program(clients=4)(drjax.reduce_mean)
      >>> plan = drjax.make_plan(mean)(jnp.arange(4.0))
      >>> print(in_process.compile(plan, block_size=3)(jnp.arange(4.0)))
      1.5
    """
    return Runner(plan, InProcess(workers), EngineOptions.checked(**options))


class InProcess:
    """A pool without processes, which runs each block when it is submitted."""

    def __init__(self, workers: int = 1):
        self.workers, self.session = workers, 0

    def open(self) -> None:
        pass

    def results(self, call: Call) -> Results:
        return pool_scheduler.results(self, call)

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
        return [worker.state()]

    def close(self) -> None:
        pass


class _Flight:
    def __init__(self, file: File, task: Work, shared: Any):
        self.done: Any = None
        self.error: Exception | None = None
        try:
            self.done = worker.run(file, task, shared)
        except Exception as error:
            self.error = error
