"""The reference backend: one group at a time, on the host, in plain Python.

Input: a plan. Output: a function with the signature of the planned one.

It is the oracle of the tests, and a debugger: an error in the work of one group names
the group, the stage and the user's line, and keeps the group's inputs.

Invariants: it shares nothing between groups, calls neither vmap nor any lowering of
drjax, and adds up in float64, so that a mistake in batching or in a lowering cannot be
in both of what a test compares.

Sharp edges: time grows with the number of groups, and nothing is compiled as a whole.
Partitioned values are stacks of slices along axis 0 inside, whatever `Value.axis` is.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from drjax import _compat
from drjax._errors import DrjaxError
from drjax._jaxprs.prng_keys import from_raw, to_raw
from drjax._planner.arguments import flat_inputs
from drjax._primitives.reduce_ops import REDUCE_OPS
from drjax.backends import _locate_failure, _python_loops
from drjax.plan import Loop, Plan, Reduce, Stage, Value


class GroupError(DrjaxError, RuntimeError):
    """The work of one group failed.

    Attributes:
      group: The index of the group.
      stage: The stage that failed.
      inputs: The arguments of the stage for that group: rerun it with
        `jax.extend.core.jaxpr_as_fun(error.stage.jaxpr)(*error.inputs)`.
    """

    def __init__(self, message: str, group: int, stage: Stage, inputs: list):
        super().__init__(message)
        self.group, self.stage, self.inputs = group, stage, inputs


def compile(plan: Plan, *, check_nans: bool = False) -> Callable:
    """A function that runs the plan one group at a time.

    Args:
      plan: The plan.
      check_nans: Raise `GroupError` where a group's work yields a NaN.

    Returns:
      A function with the signature of the planned one.

    Raises:
      GroupError: (from the returned function) a group's work failed.

    Example:
      >>> import drjax, jax.numpy as jnp
      >>> mean = drjax.program(clients=4)(drjax.reduce_mean)
      >>> plan = drjax.make_plan(mean)(jnp.arange(4.0))
      >>> print(drjax.backends.reference.compile(plan)(jnp.arange(4.0)))
      1.5
    """

    def run(*args, **kwargs):
        inputs = [
            # Slices are along axis 0 inside, whatever axis users chose.
            jnp.moveaxis(x, v.axis, 0) if v.partitioned else x
            for v, x in zip(plan.inputs, flat_inputs(plan, args, kwargs), strict=True)
        ]
        outs = _Run(plan, check_nans)(inputs)
        whole = [
            jnp.moveaxis(x, 0, v.axis) if v.partitioned else jnp.asarray(x, v.dtype)
            for v, x in zip(plan.outputs, outs, strict=True)
        ]
        return plan.out_tree.unflatten(whole)

    return run


class _Run:
    """Runs one plan; partitioned values are stacks of rows along axis 0."""

    def __init__(self, plan: Plan, check_nans: bool):
        self.plan, self.check_nans = plan, check_nans

    def __call__(self, inputs: list) -> list:
        plan, values = self.plan, {}
        _store(values, plan.inputs, inputs)
        for number, a_round in enumerate(plan.rounds, 1):
            self._server(a_round.server, values)
            for whole, rows in a_round.scatter:
                values[rows.name] = jnp.moveaxis(values[whole.name], rows.axis, 0)
            self._groups(a_round.local, values, f"round {number} of {plan.name}")
            for reduce in a_round.reduces:
                values[reduce.result.name] = _combine(reduce, values)
            for loop in a_round.loops:
                outs = self._loop(loop, [values[v.name] for v in loop.inputs])
                _store(values, loop.outputs, outs)
        self._server(plan.server, values)
        return [values[v.name] for v in plan.outputs]

    def _server(self, stage: Stage, values: dict[str, Any]) -> None:
        outs = _run(stage, [values[v.name] for v in stage.inputs])
        _store(values, stage.outputs, outs)

    def _groups(self, stage: Stage, values: dict[str, Any], location: str) -> None:
        # Nothing is returned; but a callback or print must still run.
        if stage.empty and not stage.jaxpr.effects:
            return
        rows = []
        for group in range(self.plan.size):
            # A local stage takes the group index first.
            inputs = [np.int32(group)]
            for value in stage.inputs:
                stack = values[value.name]
                inputs.append(stack[group] if value.partitioned else stack)
            try:
                outs = _run(stage, inputs)
            except Exception as error:
                # The traceback shows drjax's evaluation of the jaxpr, not the user's
                # code.
                line = _locate_failure.of_error(stage, inputs)
                raise GroupError(
                    f"Group {group} failed in {location}, in {stage.name}"
                    f"{'' if line is None else f', at {line}'}: "
                    f"{type(error).__name__}: {error}",
                    group,
                    stage,
                    inputs,
                ) from error
            if self.check_nans:
                _check_nans(outs, group, stage, inputs, location)
            rows.append(outs)
        for value, column in zip(stage.outputs, zip(*rows, strict=True), strict=True):
            values[value.name] = _stack(column)

    def _loop(self, loop: Loop, inputs: list) -> list:
        bodies = [_Run(body, self.check_nans) for body in loop.bodies]
        return _python_loops.run(loop, bodies, inputs, self.plan.size, jnp)


def _stack(column: tuple) -> Any:
    if any(isinstance(x, Tracer) for x in column):
        return jnp.stack(column)
    # By numpy: XLA would take minutes to compile a stack of many thousand arrays.
    rows = jnp.asarray(np.stack([np.asarray(to_raw(x)) for x in column]))
    return from_raw(rows, column[0].dtype)


def _store(values: dict[str, Any], names: tuple[Value, ...], arrays: list) -> None:
    values.update(zip([v.name for v in names], arrays, strict=True))


def _run(stage: Stage, args: list) -> list:
    return _compat.jaxpr_as_fun(stage.jaxpr)(*args)


def _check_nans(outs, group: int, stage: Stage, inputs: list, location: str) -> None:
    for value, out in zip(stage.outputs, outs, strict=True):
        if _locate_failure.has_nan(out):
            raise GroupError(
                f"Group {group} yields NaN as {value.name} in {location}, "
                f"in {stage.name}: {_locate_failure.of_nan(stage, inputs)}.",
                group,
                stage,
                inputs,
            )


def _combine(reduce: Reduce, values: dict[str, Any]):
    """All groups' rows as one global value; sums are accumulated in float64."""
    rows = values[reduce.source.name]
    if reduce.op == "gather":
        return rows
    op, host = REDUCE_OPS[reduce.op], np.asarray(rows)
    total = op.ufunc.reduce(host.astype(op.wide(host.dtype)), axis=0)
    return jnp.asarray(op.finish(total, host.shape[0]), dtype=host.dtype)
