"""A plan of one round, apart: what the groups do, and what the server does with it.

For engines in which the caller, not drjax, has the groups' rows.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from drjax._errors import DrjaxTypeError, DrjaxValueError, EngineError
from drjax._plan_file.load import unpacked
from drjax.backends.engine.combine import Totals
from drjax.backends.engine.driver import Runner
from drjax.backends.engine.messages import Block, Done, File
from drjax.backends.engine.options import EngineOptions
from drjax.backends.engine.protocols import Call, Results
from drjax.backends.groups import Groups, Lazy, inputs
from drjax.plan import Plan


def split(
    plan: Plan, args: Sequence[Any], options: EngineOptions
) -> "tuple[Call, Finish]":
    """What the groups are to do, and what makes results of their partial results.

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
    whole = reduces and all(reduce.op != "gather" for reduce in reduces)
    if not whole or any(v.partitioned for v in plan.outputs):
        raise DrjaxValueError(
            f"Only plans of one round, without loops and with reduced results alone, "
            f"can be split; {plan.name} is another. Use the engine's compile."
        )
    given = tuple([Groups([]) if x is ... else x for x in args])
    engine = _Asked()
    runner = Runner(plan, engine, options)
    with jax.enable_x64(runner.file.x64):
        flat = inputs(plan, given, {})
    try:
        runner.flat(flat)
    except _Stop:
        pass
    rows = engine.call.rows
    if not rows or not all(isinstance(x, Lazy) for x in rows):
        raise DrjaxTypeError(
            f"All partitioned values of {plan.name} must be in the argument ..., and "
            "its groups must use it: put them into one tuple."
        )
    return engine.call, Finish(runner.file, flat, options)


class Finish:
    """Makes the planned function's results of partial ones; can be sent anywhere."""

    def __init__(self, file: File, given: list, options: EngineOptions):
        self.file, self.given, self.options = file, given, options

    def __call__(self, totals: Totals) -> Any:
        """`totals`: the stage's partial results, and the number of groups."""
        *partials, count = totals
        n = 0 if count is None else int(count)
        with jax.enable_x64(self.file.x64):
            calls = self.file.custom_calls
            plan = unpacked(Path("plan.drjax"), self.file.data, custom_calls=calls)
        if self.options.on_error == "raise" and n != plan.size:
            raise EngineError(f"The plan is for {plan.size} groups, got {n}.")
        runner = Runner(plan, _Known(partials, n), self.options)
        return runner.flat(self.given)


class _Stop(BaseException):
    pass


class _Engine:
    workers = 1

    def open(self) -> None:
        pass

    def close(self) -> None:
        pass


class _Asked(_Engine):
    """Takes down what it is asked to do, and ends the call."""

    call: Call

    def results(self, call: Call) -> Results:
        self.call = call
        raise _Stop
        yield


class _Known(_Engine):
    """Gives results that are known."""

    def __init__(self, partials: Totals, count: int):
        self.partials, self.count = partials, count

    def results(self, call: Call) -> Results:
        groups = np.arange(self.count, dtype=np.int32)
        block = Block(groups, np.ones(self.count, bool), [])
        yield block, Done([*self.partials], [], {}, 0, 0.0)
