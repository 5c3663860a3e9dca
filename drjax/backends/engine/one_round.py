"""A plan of one round in two halves: the groups' stage, the server's work on totals.

Input: a plan and its arguments but for the groups' own, which the caller has. Output:
the `StageCall` of the round, and a function from totals to the results of the planned
function.

Both halves are runs of the driver itself on engines that run nothing: the first records
the call and stops, the second replays totals that are known. So every rule of the
driver holds for pipelines of users, too.

Sharp edges: the recording engine leaves the driver by a `BaseException`, so that no
handler for failures of groups takes it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from drjax._errors import DrjaxTypeError, DrjaxValueError, EngineError
from drjax._plan_file.load import plan_from_bytes
from drjax.backends.engine.combine import Totals
from drjax.backends.engine.driver import Runner
from drjax.backends.engine.messages import Block, BlockResult, File
from drjax.backends.engine.options import EngineOptions
from drjax.backends.engine.protocols import Results, StageCall
from drjax.backends.groups import Groups, Lazy, flat_rows
from drjax.plan import Plan


def split(
    plan: Plan, args: Sequence[Any], options: EngineOptions
) -> "tuple[StageCall, ResultsFromTotals]":
    """The groups' stage, and the function from its totals to the results.

    Args:
      plan: A plan of one round, without loops and without partitioned results.
      args: Its arguments; `...` for the one that the groups have.
      options: How it runs.

    Raises:
      DrjaxTypeError, DrjaxValueError: Other plans and arguments.
    """
    if sum(x is ... for x in args) != 1:
        raise DrjaxTypeError(
            f"One argument of {plan.name} must be ...: that whose rows the groups have."
        )
    (first, *others), reduces = plan.rounds or [None], []
    if first is not None:
        reduces = [] if first.loops or others else first.reduces
    splittable = reduces and all(reduce.op != "gather" for reduce in reduces)
    if not splittable or any(v.partitioned for v in plan.outputs):
        raise DrjaxValueError(
            f"Only plans of one round, without loops and with reduced results alone, "
            f"can be split; {plan.name} is another. Use the engine's compile."
        )
    # An empty `Groups` has the place of the data, and is never read.
    with_groups = tuple([Groups([]) if x is ... else x for x in args])
    engine = _RecordingEngine()
    runner = Runner(plan, engine, options)
    with jax.enable_x64(runner.file.x64):
        # Wide plans have 64-bit arguments, whatever JAX is set to here.
        flat = flat_rows(plan, with_groups, {})
    try:
        runner.call_flat(flat)
    except _Recorded:
        pass
    rows = engine.call.rows
    if not rows or not all(isinstance(x, Lazy) for x in rows):
        raise DrjaxTypeError(
            f"All partitioned values of {plan.name} must be in the argument ..., and "
            "its groups must use it: put them into one tuple."
        )
    return engine.call, ResultsFromTotals(runner.file, flat, options)


class ResultsFromTotals:
    """From totals to results of the planned function; can be pickled."""

    def __init__(self, file: File, inputs: list, options: EngineOptions):
        self.file, self.inputs, self.options = file, inputs, options

    def __call__(self, totals: Totals) -> Any:
        """`totals`: the stage's partial reductions, and the number of groups."""
        *partials, count = totals
        n = 0 if count is None else int(count)
        with jax.enable_x64(self.file.x64):
            calls = self.file.custom_calls
            plan = plan_from_bytes(
                Path("plan.drjax"), self.file.data, custom_calls=calls
            )
        # A pipeline has as many groups as it has; the plan was made for n.
        if self.options.on_error == "raise" and n != plan.size:
            raise EngineError(f"The plan is for {plan.size} groups, got {n}.")
        runner = Runner(plan, _ReplayEngine(partials, n), self.options)
        return runner.call_flat(self.inputs)


class _Recorded(BaseException):
    pass


class _Engine:
    workers = 1

    def open(self) -> None:
        pass

    def close(self) -> None:
        pass


class _RecordingEngine(_Engine):
    """Records the stage that it is called with, and ends the call."""

    call: StageCall

    def results(self, call: StageCall) -> Results:
        self.call = call
        raise _Recorded
        yield


class _ReplayEngine(_Engine):
    """Yields totals that are known."""

    def __init__(self, partials: Totals, count: int):
        self.partials, self.count = partials, count

    def results(self, call: StageCall) -> Results:
        # Which groups they were is not known, and only their number matters.
        groups = np.arange(self.count, dtype=np.int32)
        block = Block(groups, np.ones(self.count, bool), [])
        yield block, BlockResult([*self.partials], [], {}, 0, 0.0)
