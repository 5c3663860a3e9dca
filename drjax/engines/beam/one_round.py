"""A plan of one round in two halves: the groups' stage, the server's work on totals.

Input: a plan and its arguments but for the groups' own, which the caller has. Output:
the stage of the groups, as a `Job`, and a function from its totals to the results of
the planned function. For pipelines of users, which run the job and combine its partial
reductions themselves.

Invariants: both halves are those of the driver: server stages are the exported ones,
totals are finished by `combine`, and `min_groups` holds.

Sharp edges: totals do not tell which groups they are of, only of how many.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from drjax._errors import DrjaxTypeError, DrjaxValueError, EngineError
from drjax.backends._interpret_plan import Environment
from drjax.engines.core.block_size import BlockSize
from drjax.engines.core.combine import Totals, finish
from drjax.engines.core.executable_plan import ExecutablePlan, scatter
from drjax.engines.core.job import Job
from drjax.engines.core.messages import File, refuse_group_mesh, refuse_secure_sums
from drjax.engines.core.options import EngineOptions
from drjax.engines.core.stage_results import check_survivors
from drjax.engines.slices.groups import Groups, Lazy, flat_slices
from drjax.plan import Broadcast, Fold, Plan, Reduce, Round, Scatter, Stage, Step

_MOST_GROUPS = 2**31 - 1  # stages take the group index as int32


@dataclass(frozen=True)
class GroupsStage:
    """The local stage of a plan of one round, to be run on blocks in a user's pipeline.

    Attributes:
      job: The stage and its global inputs.
      lazy: For each partitioned input of the stage, in order, which leaf of a group's
        data is the group's slice.
    """

    job: Job
    lazy: list[Lazy]


def split(
    plan: Plan, args: Sequence[Any], options: EngineOptions
) -> "tuple[GroupsStage, ResultsFromTotals]":
    """Split a plan of one round into the groups' stage and the server's work after it.

    `args` are the arguments of the planned function, all by position, with `...` for
    the one whose slices the groups have. Of the options `block_size`, `timeout`,
    `on_error`, `min_groups` and `check_nans` count. A plan or arguments that do not fit
    are a `DrjaxValueError` or `DrjaxTypeError`.
    """
    if sum(x is ... for x in args) != 1:
        raise DrjaxTypeError(
            f"One argument of {plan.name} must be ...: that whose slices the groups "
            "have."
        )
    refuse_secure_sums(plan)
    refuse_group_mesh(plan.group_mesh, "Beam")
    _check_one_round(plan)
    executable = ExecutablePlan(plan)
    (a_round,) = executable.plan.rounds
    # Wide plans have 64-bit arguments, whatever JAX is set to here.
    with executable.precision():
        env = _inputs_of_groups(executable, a_round, args)
        lazy = env.read(v for v in a_round.local.inputs if v.partitioned)
        if not lazy or not all(isinstance(x, Lazy) for x in lazy):
            raise DrjaxTypeError(
                f"All partitioned values of {plan.name} must be in the argument ..., "
                "and its groups must use it: put them into one tuple."
            )
        # One worker: how many a pipeline has is not known.
        own = BlockSize(a_round, plan.size, 1, options.timeout)
        # The pipeline adds up what blocks return.
        size = options.block_size or min(own.value, own.batch)
        # Of more groups a block would only have padding.
        size = size if plan.open_groups else min(size, plan.size)
        job = executable.job(a_round, env, "1", size, options)
    # Only global values: the groups' data is with the pipeline.
    later = [*executable.plan.server.inputs, *executable.plan.outputs]
    later += [v for fold in a_round.folds for v in (*fold.consts, *fold.init)]
    values = {v.name: env[v] for v in later if v in env and not v.partitioned}
    return GroupsStage(job, lazy), ResultsFromTotals(executable.file, values, options)


def _check_one_round(plan: Plan) -> None:
    """Raise a `DrjaxValueError` unless a plan is one round that can be split.

    It must have reductions. There may be no gathers, no moves, no loops, no partitioned
    results, and no folds that need the order of the groups.
    """
    exchanges: list[Step] = []
    if len(plan.rounds) == 1:
        later = [step for step in plan.steps if not isinstance(step, Stage)]
        exchanges = [s for s in later if not isinstance(s, Broadcast | Scatter)]
    if any(isinstance(step, Fold) and not step.commutative for step in exchanges):
        raise DrjaxValueError(
            f"{plan.name} folds states in the order of the groups, but a pipeline "
            "has blocks of any groups. If any order will do, say so by "
            "drjax.reduce(..., commutative=True); or use the engine's compile."
        )
    splittable = exchanges and all(isinstance(s, Reduce | Fold) for s in exchanges)
    if not splittable or any(v.partitioned for v in plan.outputs):
        raise DrjaxValueError(
            f"Only plans of one round, without loops and with reduced results alone, "
            f"can be split; {plan.name} is another. Use the engine's compile."
        )


def _inputs_of_groups(
    executable: ExecutablePlan, a_round: Round, args: Sequence[Any]
) -> Environment:
    """Run a plan of one round up to its local stage: server stage, then scatters.

    The result has the plan's inputs, the outputs of the server stage and the scattered
    values. The values of the argument `...` are each a `Lazy`, which names a leaf of a
    group's data, and has no data.
    """
    plan, env = executable.plan, Environment()
    # A `Groups` has the place of the data, and is never read.
    with_groups = tuple([Groups(list) if x is ... else x for x in args])
    # Any group index is one of an open number of groups.
    sized = plan.with_groups(_MOST_GROUPS) if plan.open_groups else plan
    env.write(plan.inputs, flat_slices(sized, with_groups, {}))
    executable.run_server(a_round.server, env)
    for whole, slices in a_round.scatter:
        env[slices] = scatter(slices, env[whole])
    return env


class ResultsFromTotals:
    """The server's work of a plan of one round, after the local stage; a callable.

    It can be pickled, for the last step of a pipeline. `values` are arrays by the names
    of their `Value`s: the global values that are known before the reductions, and that
    the last server stage reads or the plan returns. Of the options `on_error` and
    `min_groups` count.
    """

    def __init__(self, file: File, values: dict[str, Any], options: EngineOptions):
        self.file, self.values, self.options = file, values, options

    def __call__(self, totals: Totals) -> Any:
        """Compute the planned function's results from all blocks' partial reductions.

        `totals` has for each of the round's reductions but gathers its total, as
        `combine.add` returns it; then, if there are folds, the indices of the blocks'
        first groups, `[blocks]`, and each leaf of the blocks' states, `[blocks, *s]`;
        and last the number of groups that took part. Each is None if no group took
        part. An `EngineError` is raised if more than n groups took part, or too few:
        less than `min_groups`, or than n with `on_error="raise"`.
        """
        *partials, count = totals
        # What was pickled has only the bytes of the file, so the plan is loaded now.
        n, executable = int(count or 0), ExecutablePlan.from_file(self.file)
        plan = executable.plan
        # A pipeline has as many groups as it has; the plan was made for n.
        fits = n <= plan.size if self.options.on_error == "drop" else n == plan.size
        if not (fits or plan.open_groups):
            raise EngineError(f"The plan is for {plan.size} groups, got {n}.")
        (a_round,) = plan.rounds
        check_survivors(plan, "1", a_round.local, n, self.options.min_groups)
        env = Environment().updated(self.values)
        with executable.precision():
            fold = functools.partial(executable.run_fold, env)
            env.write(a_round.combined, finish(a_round, partials, n, fold))
            executable.run_server(plan.server, env)
            return executable.results(env.read(plan.outputs))
