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

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from drjax import _compat
from drjax._compat.types import Array, GlobalArray, PartitionedArray
from drjax._errors import DrjaxError, DrjaxValueError
from drjax._jaxprs.associative import difference_of_orders
from drjax._jaxprs.eval_jaxpr import as_arrays
from drjax._jaxprs.prng_keys import from_raw, to_raw
from drjax._planner.arguments import flat_inputs
from drjax._primitives.reduce_ops import REDUCE_OPS
from drjax._sharding.group_mesh import in_local_mesh
from drjax.backends import _locate_failure, _python_loops
from drjax.backends._all_columns import run_columns
from drjax.backends._interpret_plan import RULES, Environment, PlanInterpreter
from drjax.backends._move_slices import move_slices
from drjax.engines.slices.kept import Keep
from drjax.plan import (
    Columns,
    Fold,
    Gather,
    Loop,
    Move,
    Plan,
    Program,
    Reduce,
    Rules,
    Stage,
    Value,
)


class GroupError(DrjaxError, RuntimeError):
    """The work of one group failed; or, with `check_nans`, the server has a NaN.

    Attributes:
      group: The group index; None of work of the server and of a reduction.
      stage: The stage that failed, a `drjax.plan.Stage`; of a reduction the local stage
        of its round.
      inputs: The arguments of the stage's jaxpr: of a local stage the group index, then
        one array for each input. To rerun the stage:
        `jax.extend.core.jaxpr_as_fun(error.stage.jaxpr)(*error.inputs)`. Of a reduction
        the slices of all groups, one array `[n, *s]`.
    """

    def __init__(self, message: str, group: int | None, stage: Stage, inputs: list):
        super().__init__(message)
        self.group, self.stage, self.inputs = group, stage, inputs


def compile(
    plan: Plan, *, check_nans: bool = False, keep: dict[Any, Any] | None = None
) -> Callable:
    """A function that runs the plan one group at a time.

    Args:
      plan: The plan.
      check_nans: Whether to raise `GroupError` if an output of a group's stage, a
        reduction or an output of the server's work has a NaN.
      keep: Which partitioned results are arguments of the next call: a dict from
        results to arguments. `{1: 0}` means that element 1 of what the function returns
        is positional argument 0 of the next call, both counted from 0. The function
        returns a `Kept` for each.

    Returns:
      A function with the signature of the planned one.

    Raises:
      GroupError: (from the returned function) a group's work failed.
      DrjaxTypeError, DrjaxValueError: `keep` does not fit the plan; (from the returned
        function) a handle is of another function, or was used up.

    Example:
      >>> import drjax, jax.numpy as jnp
      >>> mean = drjax.program(clients=4)(drjax.reduce_mean)
      >>> plan = drjax.make_plan(mean)(jnp.arange(4.0))
      >>> print(drjax.backends.reference.compile(plan)(jnp.arange(4.0)))
      1.5
    """

    kept = Keep(plan, keep)

    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs, handles = kept.open(args, kwargs)
        whole = _run(plan, flat_inputs(plan, args, kwargs), check_nans)
        for handle in handles:
            handle.use_up()
        # Arrays of JAX cannot change: no copy is needed.
        results = plan.out_tree.unflatten(whole)
        return kept.results(results, whole, lambda _, arrays: arrays)

    return run


def _run(
    plan: Plan, inputs: Sequence[Array | np.int32], check_nans: bool
) -> list[Array]:
    """Run a plan on flat inputs, one group at a time; return its outputs.

    Partitioned inputs and outputs have their n slices along `Value.axis`. The plan is
    that of a call; or that of an inner level, which then runs for one group of the
    outer level; or the body of a loop over another partition.
    """
    slices_first = [
        # Slices are along axis 0 inside, whatever axis users chose.
        jnp.moveaxis(x, v.axis, 0) if v.partitioned else x
        for v, x in zip(plan.inputs, inputs, strict=True)
    ]
    outs = _GroupByGroup(plan, check_nans)(slices_first)
    return [
        jnp.moveaxis(x, 0, v.axis) if v.partitioned else jnp.asarray(x)
        for v, x in zip(plan.outputs, outs, strict=True)
    ]


class _GroupByGroup(PlanInterpreter):
    """Runs a plan in this process, one group at a time: `interpreter(inputs)`.

    Partitioned values are arrays `[n, *s]`, whatever `Value.axis` is. With
    `check_nans`, a NaN in an output of a group's stage, a reduction, or an output of
    the server's work is a `GroupError`.
    """

    rules = Rules("The reference backend", RULES)

    def __init__(self, plan: Plan, check_nans: bool):
        self.plan, self.check_nans = plan, check_nans

    def run_server(self, stage: Stage, env: Environment) -> None:
        inputs = env.read(stage.inputs)
        outs = _call(stage, inputs)
        if self.check_nans:
            _check_nans(outs, None, stage, inputs, self.plan.name)
        env.write(stage.outputs, outs)

    def scatter(self, slices: Value, whole: GlobalArray) -> PartitionedArray:
        return jnp.moveaxis(whole, slices.axis, 0)

    def run_groups(self, index: int, env: Environment) -> None:
        stage, location = self.plan.rounds[index].local, self.location(index)
        # Nothing is returned; but a callback or print must still run.
        if stage.empty and not stage.jaxpr.effects:
            return
        call = lambda *inputs: _call(stage, [*inputs])
        # Shardings mean nothing to one equation after another.
        call = jax.jit(call) if stage.mesh else call
        with in_local_mesh(stage.mesh):
            outs = [
                self._run_group(group, stage, env, location, call)
                for group in range(self.plan.size)
            ]
        for value, slices in zip(stage.outputs, zip(*outs, strict=True), strict=True):
            env[value] = _stack(slices)

    def location(self, index: int) -> str:
        return f"round {index + 1} of {self.plan.name}"

    def check_order(
        self, fold: Fold, consts: list[GlobalArray], states: list[PartitionedArray]
    ) -> None:
        """Raise `DrjaxValueError` if the first groups' states fold to two results."""
        arrays = (*consts, *states)
        if self.plan.size < 3 or any(isinstance(x, Tracer) for x in arrays):
            return
        combine = lambda a, b: _call(fold.combine, [*consts, *a, *b])
        first = [[x[group] for x in states] for group in range(3)]
        why = difference_of_orders(fold.combine.name, combine, first, fold.commutative)
        if why is not None:
            raise DrjaxValueError(why)

    def move(self, move: Move, slices: Array, index: Array | None = None) -> Array:
        return jnp.asarray(move_slices(move, slices, index))

    def _run_group(
        self,
        group: int,
        stage: Stage,
        env: Environment,
        location: str,
        call: Callable[..., list[Array]],
    ) -> list[Array]:
        """Return one group's slice of each output of the local stage, in order.

        `call` runs the stage for a group, unless it has an inner level. `location`, the
        round and the plan as text, is for errors.
        """
        # A local stage takes the group index first.
        inputs = [np.int32(group)]
        for value in stage.inputs:
            x = env[value]
            inputs.append(x[group] if value.partitioned else x)
        try:
            # The groups of an inner level run one at a time, too.
            if stage.inner is None or stage.mesh:
                outs = call(*inputs)
            else:
                outs = _run(stage.inner, inputs, self.check_nans)
        except Exception as error:
            # The traceback shows drjax's evaluation of the jaxpr, not the user's code.
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
        return outs

    def run_loop(self, index: int, loop: Loop, inputs: list[Array]) -> list[Array]:
        bodies = [_GroupByGroup(body, self.check_nans) for body in loop.bodies]
        return _python_loops.run(loop, bodies, inputs, self.plan.size, jnp)


@_GroupByGroup.rules.rule(Reduce)
def _reduce(reduce: Reduce, run: _GroupByGroup, index: int, env: Environment) -> None:
    # Cast first: of float32 slices `np.add.reduce` has a float32 accumulator.
    slices, op = env[reduce.source], REDUCE_OPS[reduce.op]
    host = np.asarray(slices)
    with np.errstate(invalid="ignore"):  # infinities of either sign
        total = op.ufunc.reduce(host.astype(op.wide(host.dtype)), axis=0)
    result = jnp.asarray(op.finish(total, host.shape[0]), dtype=host.dtype)
    if run.check_nans and _locate_failure.has_nan(result):
        raise GroupError(
            f"The reduction of {reduce.source.name} ({reduce.op}) yields NaN "
            f"in {run.location(index)}: see which groups have an infinity or a NaN.",
            None,
            run.plan.rounds[index].local,
            [slices],
        )
    env[reduce.result] = result


@_GroupByGroup.rules.rule(Gather)
def _gather(gather: Gather, run: _GroupByGroup, index: int, env: Environment) -> None:
    env[gather.result] = env[gather.source]


@_GroupByGroup.rules.rule(Fold)
def _fold(fold: Fold, run: _GroupByGroup, index: int, env: Environment) -> None:
    state, consts = env.read(fold.init), env.read(fold.consts)
    states = env.read(fold.sources)
    run.check_order(fold, consts, states)
    for group in range(run.plan.size):
        one = [x[group] for x in states]
        state = _call(fold.combine, [*consts, *state, *one])
    env.write(fold.results, state)


@_GroupByGroup.rules.rule(Program)
def _program(loop: Program, run: _GroupByGroup, index: int, env: Environment) -> None:
    env.write(loop.outputs, _run(loop.body, env.read(loop.inputs), run.check_nans))


@_GroupByGroup.rules.rule(Columns)
def _columns(loop: Columns, run: _GroupByGroup, index: int, env: Environment) -> None:
    evaluate = lambda jaxpr, args: _compat.jaxpr_as_fun(jaxpr)(*args)
    env.write(loop.outputs, run_columns(loop, env.read(loop.inputs), evaluate))


def _call(stage: Stage, args: list) -> list[Array]:
    """Evaluate the jaxpr of a stage, one equation after another, without compiling it.

    The outputs have the dtypes of `stage.outputs`.
    """
    outs = _compat.jaxpr_as_fun(stage.jaxpr)(*args)
    return as_arrays(outs, [value.dtype for value in stage.outputs])


def _stack(slices: tuple[Array, ...]) -> PartitionedArray:
    """Stack the slices of all n groups, which may be random keys or tracers."""
    if any(isinstance(x, Tracer) for x in slices):
        # Under a JAX transformation numpy cannot read slices: they are tracers.
        return jnp.stack(slices)
    # By numpy: XLA would take minutes to compile a stack of many thousand arrays.
    stacked = jnp.asarray(np.stack([np.asarray(to_raw(x)) for x in slices]))
    return from_raw(stacked, slices[0].dtype)


def _check_nans(
    outs: list[Array], group: int | None, stage: Stage, inputs: list, location: str
) -> None:
    """Raise `GroupError` if an output of a stage has a NaN; `group` None: the server's.

    `location` is the round, if any, and the plan as text, for errors.
    """
    who = "The server" if group is None else f"Group {group}"
    for value, out in zip(stage.outputs, outs, strict=True):
        if _locate_failure.has_nan(out):
            raise GroupError(
                f"{who} yields NaN as the value {value.name} in {location}, "
                f"in the stage {stage.name}: "
                f"{_locate_failure.of_nan(stage, inputs)}.",
                group,
                stage,
                inputs,
            )
