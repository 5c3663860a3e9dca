"""The driver: server stages and loops in this process, groups' stages on an engine.

Input: a plan, an engine and its options; then, for each call, the arguments of the
planned function. Output: its results, as JAX arrays of the planned shapes and dtypes.
`Runner` is what every engine's `compile` returns.

Invariants: partitioned values are stacks of slices along axis 0, or `Slices`; all other
values between stages are numpy arrays, random keys as raw data. Server stages are the
exported ones of the plan file, so that they compute the same on every engine and after
a resumption. A group that was dropped takes no part in any later stage of the call.

Sharp edges: the driver holds slices that a later round needs or that are returned, and,
unless workers keep them, those that move to other groups or are read as columns. Each
step of a loop of rounds waits for its groups. A failure of a group of another partition
is an error, whatever `on_error` says.
"""

import functools
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from drjax._compat.types import PyTree
from drjax._errors import CanceledError, DrjaxTypeError, DrjaxValueError, EngineError
from drjax._jaxprs.prng_keys import is_key
from drjax.backends import _python_loops
from drjax.backends._interpret_plan import RULES, Environment, PlanInterpreter
from drjax.backends._move_slices import move_slices
from drjax.engines.core import checkpoint, telemetry
from drjax.engines.core.block_size import BlockSize, equal_batches
from drjax.engines.core.events import (
    BlockDone,
    CallEnded,
    CallStarted,
    Event,
    GroupFailed,
    Observer,
    Retried,
    StageEnded,
    StageStarted,
    WorkersChanged,
    log,
)
from drjax.engines.core.executable_plan import ExecutablePlan, scatter
from drjax.engines.core.kept_results import KeptResults
from drjax.engines.core.loop_progress import CheckpointedSteps
from drjax.engines.core.messages import (
    File,
    kept_outputs,
    refuse_secure_sums,
)
from drjax.engines.core.number_of_groups import for_arguments
from drjax.engines.core.options import EngineOptions
from drjax.engines.core.progress import Bar, Report
from drjax.engines.core.protocols import Engine, StageCall
from drjax.engines.core.saved_calls import SavedCalls, SliceFiles
from drjax.engines.core.stage_results import StageResults, check_survivors, stage_error
from drjax.engines.core.telemetry import Telemetry
from drjax.engines.slices.constant import constant, identity
from drjax.engines.slices.coordinates import (
    gathers_for_columns,
    is_move_of_slices,
    read_by_workers,
    slices_of_whole,
    whole_of_slices,
)
from drjax.engines.slices.groups import Groups, Lazy, as_array, flat_slices
from drjax.engines.slices.kept import check_plan
from drjax.engines.slices.slices import Slices, as_slices, in_steps, read_if_lazy
from drjax.engines.slices.worker_slices import WorkerSlices
from drjax.plan import (
    Columns,
    Gather,
    Loop,
    Move,
    Plan,
    Program,
    PutAdd,
    Round,
    Rules,
    Scan,
    Stage,
    Value,
)


class Runner:
    """A plan on an engine: call it as the planned function.

    Its results are numpy-backed JAX arrays of the shapes and dtypes of the planned
    function's. An argument whose values are all partitioned may be a `Groups` instead
    of arrays. Workers start with the first call and stay until `close`, or until the
    end of a `with` block.

    Args:
      plan: The plan; its stages need not be exported yet.
      engine: The engine, which runs the stages of the groups in its workers.
      options: The engine's options.
      owner: Whether `close` ends the workers; false if other runners share them.
      secure: Whether the engine meets the demand of secure sums.
      keep: Which partitioned results are arguments of the next call: a dict from
        results to arguments, as `{1: 0}`, or None. See `drjax.backends.Kept`.

    Raises:
      DrjaxValueError: The plan has a secure sum, and the engine does not meet it.

    Attributes:
      plan: The plan.
      engine: The engine.
      options: The engine's options.
      report: A `Report` on the latest call: stages, times, and dropped groups.
      executable: The plan with compiled server stages and its plan file, an
        `ExecutablePlan`.
      kept: What stays between the calls, a `KeptResults`.
      engine_cache: A dict of what the engine stores between calls, by a key that the
        engine chooses.
    """

    def __init__(
        self,
        plan: Plan,
        engine: Engine,
        options: EngineOptions,
        owner: bool = True,
        secure: bool = False,
        keep: dict[Any, Any] | None = None,
    ):
        check_plan(plan)
        # Unless an engine says so itself: it must not be forgotten for a new one.
        if not secure:
            refuse_secure_sums(plan)
        # First, as it may refuse its arguments, and exporting a plan takes long.
        self.kept = KeptResults(plan, keep, engine, options)
        if plan.group_mesh:
            engine.check_mesh(plan.group_mesh)
        self.plan, self.engine, self.options = plan, engine, options
        self.executable = ExecutablePlan(plan)
        self._owner = owner
        self._sizes: dict[tuple, BlockSize] = {}  # by stage, n, and how it is read
        self._read_elsewhere: dict[int, tuple[frozenset[str], frozenset[str]]] = {}
        self.report = Report()
        bar = [Bar()] if options.progress else []
        traces = [Telemetry()] if telemetry.installed() else []
        self._observers: list[Observer] = [
            log, *traces, *bar, *getattr(engine, "observers", ()), *options.observers
        ]  # fmt: skip
        self._canceled, self._count = threading.Event(), engine.workers
        self.engine_cache: dict[str, Any] = {}
        self._named: list[Groups] = []  # whose data the latest call reads
        # Of an engine that has data sets of its own, as Ray has.
        self._as_groups = getattr(engine, "as_groups", lambda x: x)

    def name_of(self, group: int) -> str:
        """Return what the data of the latest call name a group; empty: nothing."""
        return next(filter(None, (x.name_of(group) for x in self._named)), "")

    @property
    def file(self) -> File:
        """The plan file that workers get."""
        return self.executable.file

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> Any:
        # Around the arguments too: without x64, 64-bit ones would be cast to 32 bits.
        with self.executable.precision():
            args = tuple(map(self._as_groups, args))
            kwargs = {k: self._as_groups(x) for k, x in kwargs.items()}
            args, kwargs, handles = self.kept.open(args, kwargs)
            plan = for_arguments(self.plan, args, kwargs)
            inputs = flat_slices(plan, args, kwargs)
            self._named = [x.source.groups for x in inputs if isinstance(x, Lazy)]
            with self._checkpoint(inputs, plan.size) as saved:
                self.report, self._began = Report(), time.perf_counter()
                self._canceled.clear()
                # Not in the constructor: workers start with the first call, also after
                # `close`.
                self.engine.open()
                workers = self.engine.workers
                self.emit(CallStarted(plan.name, plan.size, workers, saved.resumed))
                try:
                    results = self._run(plan, self.kept.inputs(inputs), saved)
                except BaseException as error:
                    self._ended(plan.name, error)
                    raise
                self._ended(plan.name, None)
                # Only now: after an error the handles are still valid.
                for handle in handles:
                    handle.use_up()
                return results

    def emit(self, event: Event) -> None:
        """Tell an event to all observers; the report is the first."""
        self.report.observe(event)
        for observe in self._observers:
            observe(event)

    def count_workers(self, count: int) -> None:
        """Tell observers how many workers there are, if that has changed."""
        if count != self._count:
            self._count = count
            self.emit(WorkersChanged(count))

    def _ended(self, name: str, error: BaseException | None) -> None:
        self.emit(CallEnded(name, time.perf_counter() - self._began, error))

    def cancel(self) -> None:
        """End the call that runs, from another thread or from an observer.

        The call raises a `CanceledError` within about a second. On Ray the workers of
        blocks at work are ended, and others start; on Beam and Flower, what runs is
        given up; in this process the running block ends first. A call that begins
        later is not affected. With the option `checkpoint`, the same call resumes.

        Example:
          >>> import drjax, jax.numpy as jnp
          >>> from drjax.backends import in_process
          >>> mean = drjax.program(clients=4)(drjax.reduce_mean)
          >>> plan = drjax.make_plan(mean)(jnp.arange(4.0))
          >>> late = lambda event: run.cancel()
          >>> run = in_process.compile(plan, observers=[late])
          >>> try:
          ...     run(jnp.arange(4.0))
          ... except drjax.EngineError as error:
          ...     print(error)
          The call was canceled.
        """
        self._canceled.set()

    def check_canceled(self) -> None:
        """Raise `CanceledError` if `cancel` was called during this call."""
        if self._canceled.is_set():
            raise CanceledError("The call was canceled.")

    def _run(self, plan: Plan, inputs: list[Any], saved: checkpoint.Checkpoint) -> Any:
        """Run the plan once, and return the results of the planned function.

        `plan` is for the number of groups of the call. Of its inputs each is a numpy
        array, with the groups along axis 0 if it is partitioned, or `Slices`. Results
        that the open checkpoint has are not computed.

        A result that the constructor's `keep` names as an argument of the next call is
        a `Kept`, which stands for its slices. In other partitioned results the slices
        of dropped groups are NaN, or zero if they are not floats.
        """
        call = _Call(self, plan, saved, self.options)
        # Groups that were dropped before a crash stay dropped, or totals would mix.
        call.restore_dropped()
        run = _DriverInterpreter(call, self.executable.plan, "")
        all_outputs, outputs = run(inputs), []  # None in the place of what stays
        staying = self.kept.split(all_outputs, inputs, call.alive)
        for value, x in zip(self.plan.outputs, all_outputs, strict=True):
            if value.partitioned and x is not None:
                # Masked now, as a group may be dropped in a later round than that of
                # its slice.
                x = as_slices(value, x).masked(call.alive).whole()
                x = np.moveaxis(x, 0, value.axis)
            outputs.append(x)
        # Only with all results at hand; until then a crash resumes from the folder.
        returned = [x for x in outputs if x is not None]
        saved.end(returned, [x for x in staying if x is not None])
        return self.kept.results(self.executable.results(outputs), staying)

    def restore(self) -> tuple[int, Any] | None:
        """What the latest call has returned, of this process or of one that has ended.

        For functions with `keep=` and the option `checkpoint`: the results of each call
        are in that folder, with the slices that stay between calls. A new process goes
        on from them; at most the call is lost that ran when the former one ended.

        Returns:
          `(calls, results)`: how many calls have ended, and what the latest of them
          returned, with a `Kept` for each result that stays. None: none has ended.

        Raises:
          EngineError: The folder cannot be used, or is that of another plan; or the
            results of no call are whole.
          DrjaxValueError: There is no option `checkpoint`, or no `keep=`.

        Example:
          >>> import drjax, jax.numpy as jnp, tempfile
          >>> from drjax.backends import in_process
          >>> @drjax.program(clients=3)
          ... def count(total, x):
          ...     total = drjax.map_fn(jnp.add, (total, x))
          ...     return total, drjax.reduce_sum(total)
          >>> plan = drjax.make_plan(count)(jnp.zeros(3), jnp.ones(3))
          >>> folder = tempfile.mkdtemp()
          >>> for _ in range(2):  # as in two processes
          ...     run = in_process.compile(plan, keep={0: 0}, checkpoint=folder)
          ...     calls, (total, sum_) = run.restore() or (0, (jnp.zeros(3), 0.0))
          ...     total, sum_ = run(total, jnp.ones(3))
          ...     print(calls, sum_)
          0 3.0
          1 6.0
        """
        if self._calls is None or self.slice_files is None:
            raise DrjaxValueError(
                "restore() needs a function with keep= and checkpoint=: without keep=, "
                "a repeated call goes on by itself."
            )
        files, calls = self.slice_files, self._calls
        values = self.kept.staying_values
        folder, lock = checkpoint.locked_folder(files.folder)
        try:
            with self.executable.precision():
                self.engine.open()
                saved = calls.latest(
                    folder,
                    lambda call: [
                        files.slices(value, entry)
                        for value, entry in zip(values, call.staying, strict=True)
                    ],
                )
                if saved is None:
                    return None
                call, staying = saved
                returned, slices = iter(call.outputs), iter(staying)
                stays = self.kept.stays
                outputs = [None if s else next(returned) for s in stays]
                leaves = [next(slices) if s else None for s in stays]
                results = self.executable.results(outputs)
                return call.number, self.kept.results(results, leaves)
        finally:
            lock.release()

    def _checkpoint(self, inputs: list[Any], n: int) -> checkpoint.Checkpoint:
        """Open and lock the checkpoint of a call in the option `checkpoint`'s folder.

        The call is identified by a hash of the inputs and by n, its number of groups.
        The result is a context manager that unlocks the folder; without the option, one
        that saves nothing. An `EngineError` is raised if the folder cannot be used, is
        locked, or has another call's checkpoint.
        """
        if self.options.checkpoint is None:
            return checkpoint.Checkpoint()
        file = self.file.key if n == self.plan.size else f"{self.file.key} for {n}"
        slices, calls = self.slice_files, self._calls
        key = checkpoint.call_fingerprint(file, inputs, self.options, slices)
        return checkpoint.FolderCheckpoint(self.options.checkpoint, key, calls, slices)

    @functools.cached_property
    def _calls(self) -> SavedCalls | None:
        return None if self.slice_files is None else SavedCalls(self.file.key)

    @functools.cached_property
    def slice_files(self) -> SliceFiles | None:
        """The files of slices that stay between calls, if there are such files."""
        if self.options.checkpoint is None or not any(self.kept.stays):
            return None
        return SliceFiles(checkpoint.location(self.options.checkpoint), self.engine)

    def block_size(
        self, a_round: Round, n: int, kept: Sequence[Value], one_by_one: bool
    ) -> BlockSize:
        """Return the `BlockSize` that chooses how many groups a block of a stage has.

        `kept` are the outputs of the stage that are read after it; `one_by_one` says
        whether its groups are read so. The first call for a round, of the plan or of
        the body of a loop, and a number of groups creates it; later calls return the
        same one, so that all calls of this runner share what was measured.
        """
        key = self.executable.stage_index(a_round), n, one_by_one
        if key not in self._sizes:
            timeout = self.options.timeout
            workers = self.engine.workers
            self._sizes[key] = BlockSize(a_round, n, workers, timeout, kept, one_by_one)
        return self._sizes[key]

    def read_elsewhere(self, plan: Plan) -> tuple[frozenset[str], frozenset[str]]:
        """Return the names of what only columns read, and what workers read themselves.

        `plan` is the plan of `executable`, or the body of a loop in it.
        """
        # By identity: they live as long as the runner.
        if id(plan) not in self._read_elsewhere:
            names = gathers_for_columns(plan), read_by_workers(plan)
            self._read_elsewhere[id(plan)] = names
        return self._read_elsewhere[id(plan)]

    def put(self, data: PyTree) -> PyTree:
        """Copy arrays, so that calls that pass them need not look for changes.

        An engine whose workers have the groups' data between calls compares it in each
        call with what they have, bit by bit, as the caller may have changed it. What
        this returns cannot change.

        Args:
          data: A pytree of arrays, such as an argument with the data of all groups.

        Returns:
          A pytree of read-only numpy arrays, to pass in the place of `data`. Random
          keys in it are as they were.

        Raises:
          DrjaxTypeError: A leaf is `Groups`, which are read in each round.

        Example:
          >>> import drjax, numpy as np
          >>> mean = drjax.program(clients=4)(drjax.reduce_mean)
          >>> plan = drjax.make_plan(mean)(np.zeros(4, np.float32))
          >>> run = drjax.backends.in_process.compile(plan)
          >>> data = run.put(np.arange(4, dtype=np.float32))
          >>> print(run(data), run(data))
          1.5 1.5
        """
        with self.executable.precision():
            return jax.tree.map(lambda x: _constant(self._as_groups(x)), data)

    def close(self) -> None:
        """End the workers, and clear `engine_cache`.

        The workers go on if the constructor's `owner` was false: other runners share
        them.
        """
        self.engine_cache.clear()
        # Workers that several plans share end with their owner.
        if self._owner:
            self.engine.close()

    def __enter__(self) -> "Runner":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _is_resident(x: Slices) -> bool:
    """Return whether workers that keep data have slices since an earlier call."""
    if isinstance(x, WorkerSlices):
        return True
    return x.source is None and identity(x.whole()) is not None


def _constant(x: Any) -> Any:
    """Copy a leaf of an argument to an array that nobody can change."""
    if isinstance(x, Groups):
        raise DrjaxTypeError(
            f"put needs arrays, got {type(x).__name__}, which are read in each round "
            "that needs them. Pass them as they are."
        )
    x = as_array(x)
    return x if isinstance(x, Slices) or is_key(x.dtype) else constant(x)


class _DriverInterpreter(PlanInterpreter):
    """Runs a plan, or the body of a loop, in one call: `interpreter(inputs)`.

    Server stages run in this process, and stages of the groups on the engine. Inputs
    and outputs are lists of numpy arrays in the order of `plan.inputs` and
    `plan.outputs`, random keys as key data. Partitioned values have the groups along
    axis 0, or are `Slices`.

    `prefix` is a text before the number of each round in its location: empty for the
    plan, and `2.scan.0.` for body 0 of the loop `scan` in round 2.
    """

    rules = Rules("The driver of an engine", RULES)

    def __init__(self, call: "_Call", plan: Plan, prefix: str):
        self.call, self.plan, self.prefix = call, plan, prefix
        self.for_columns, self._stay = call.runner.read_elsewhere(plan)

    def run_server(self, stage: Stage, env: Environment) -> None:
        self.call.runner.executable.run_server(stage, env)

    def scatter(self, slices: Value, whole: Any) -> Any:
        return scatter(slices, whole)

    def run_groups(self, index: int, env: Environment) -> None:
        a_round, location = self.plan.rounds[index], self.location(index)
        # A round may only broadcast or gather.
        if not a_round.local.empty:
            kept = kept_outputs(self.plan, a_round)
            key = f"{location}.groups"
            values = [*a_round.combined, *kept]
            entry = self.call.checkpoint.get(key, values)
            if entry is None:
                entry = self.call.run_stage(a_round, kept, env, location, self._stay)
                self.call.checkpoint.put(key, entry)
            env.write(values, entry)

    def location(self, index: int) -> str:
        return f"{self.prefix}{index + 1}"

    def move(self, move: Move, slices: Any, index: Any = None) -> Any:
        alive = self.call.alive
        # A population has slices of groups that take no part.
        if not move.source.partitioned:
            return move_slices(move, slices, index)
        slices = as_slices(move.source, slices)
        if is_move_of_slices(move):
            source = np.asarray(move.sources if index is None else index)
            inside = (source >= 0) & (source < len(alive))
            # Else a group would have NaNs, or zeros: then the driver moves them.
            if alive.all() and inside.all():
                return slices.moved(move.result, source).opened()
        if isinstance(move, PutAdd):
            # What a dropped group has is added to no group.
            index = np.where(alive, index, -1)
        # Slices of dropped groups are NaN or zero in other groups, too.
        whole = slices.masked(alive).whole()
        return move_slices(move, whole, index)

    def run_loop(self, index: int, loop: Loop, inputs: list[Any]) -> list[Any]:
        # The index of the body follows, as in names of members of the plan file.
        prefix = f"{self.location(index)}.{loop.name}"
        bodies: list[Callable[[list], list]] = [
            _DriverInterpreter(self.call, body, f"{prefix}.{i}.")
            for i, body in enumerate(loop.bodies)
        ]
        if isinstance(loop, Scan):
            bodies = [_read_stacked(bodies[0], loop.carry)]
            consts, carry, stacks = loop.split(inputs)
            inputs = [*consts, *carry, *map(in_steps, stacks)]
        # A branch saves nothing, and a scan carries its first outputs.
        carried = loop.outputs[: loop.carry] if isinstance(loop, Scan) else loop.outputs
        steps = CheckpointedSteps(self.call.checkpoint, prefix, inputs, carried)
        return _python_loops.run(loop, bodies, inputs, self.call.plan.size, np, steps)


@_DriverInterpreter.rules.rule(Gather)
def _gather(
    gather: Gather, run: _DriverInterpreter, index: int, env: Environment
) -> None:
    # Not saved in checkpoints: what it gathers is in `env`, also after a resumption.
    source, alive, slices = gather.source, run.call.alive, env[gather.source]
    # Slices of dropped groups are NaN or zero in whatever gathers them.
    masked = as_slices(source, slices).masked(alive)
    for_columns = gather.result.name in run.for_columns
    env[gather.result] = masked if for_columns else masked.whole()


# -------------------------------------------------------------------------------------
# Plans over another partition, whose groups the same workers run


@_DriverInterpreter.rules.rule(Program)
def _program(
    loop: Program, run: _DriverInterpreter, index: int, env: Environment
) -> None:
    options = run.call.options
    # Its groups are others: none may be dropped, as the plan's own groups would be. And
    # a NaN of a dropped group makes NaNs.
    check_nans = options.check_nans and options.on_error == "raise"
    options = replace(options, on_error="raise", min_groups=1, check_nans=check_nans)
    call = _Call(run.call.runner, loop.body, run.call.checkpoint, options)
    prefix = f"{run.location(index)}.{loop.name}.0."
    _run_body(loop, _DriverInterpreter(call, loop.body, prefix), env)


@_DriverInterpreter.rules.rule(Columns)
def _columns(
    loop: Columns, run: _DriverInterpreter, index: int, env: Environment
) -> None:
    # Coordinates are no groups: no option for groups is theirs.
    options = replace(
        run.call.options,
        block_size=None,
        on_error="raise",
        min_groups=1,
        check_nans=False,
        checkpoint=None,
    )
    call = _Call(run.call.runner, loop.body, checkpoint.Checkpoint(), options)
    location = f"{run.location(index)}.{loop.name}"
    _run_body(loop, _OfCoordinates(call, loop.body, location), env)


class _OfCoordinates(_DriverInterpreter):
    """Runs the one round of a `Columns`, which has the location of the step."""

    def location(self, index: int) -> str:
        return self.prefix


def _run_body(loop: Program, run: _DriverInterpreter, env: Environment) -> None:
    """Run the body of a program: its inputs and outputs are global values in `env`."""
    size, inputs = loop.body.size, env.read(loop.inputs)
    pairs = zip(loop.body.inputs, inputs, strict=True)
    outs = run([slices_of_whole(v, x, size) for v, x in pairs])
    triples = zip(loop.body.outputs, loop.outputs, outs, strict=True)
    env.write(loop.outputs, [whole_of_slices(v, out, x) for v, out, x in triples])


# -------------------------------------------------------------------------------------
# Calls


def _read_stacked(
    body: Callable[[list[Any]], list[Any]], carry: int
) -> Callable[[list[Any]], list[Any]]:
    """Wrap the body of a scan, so that the outputs that the scan stacks are arrays.

    A body may return `Slices` for a partitioned output, and a stack needs the array
    `[n, *s]` of all slices. The first `carry` outputs are returned as they are, as the
    next step can read their slices block by block.
    """

    def step(inputs: list[Any]) -> list[Any]:
        outputs = body(inputs)
        return [*outputs[:carry], *map(read_if_lazy, outputs[carry:])]

    return step


class _Call:
    """The state of one call of a `Runner`.

    The plan is for the number of groups of the call. Its stages may be others than
    those of `runner.executable.plan`. Or it is the body of a `Program`, whose groups
    are others.

    Attributes:
      options: The options of the stages.
      report: The `Report` on the call.
      alive: Which groups take part, bool `[n]`: false for groups that were dropped.
    """

    def __init__(
        self,
        runner: Runner,
        plan: Plan,
        saved: checkpoint.Checkpoint,
        options: EngineOptions,
    ):
        self.runner, self.checkpoint, self.options = runner, saved, options
        self.plan = plan
        self.report = runner.report
        self.alive = np.ones(plan.size, bool)

    def restore_dropped(self) -> None:
        """Drop the groups that the open checkpoint lists as dropped."""
        dropped = self.checkpoint.get("dropped")
        if dropped is not None:
            for group in dropped[0]:
                self.alive[group] = False
                self.report.dropped[int(group)] = "before the call was resumed"

    def run_stage(
        self,
        a_round: Round,
        kept: list[Value],
        env: Environment,
        location: str,
        staying: Collection[str] = (),
    ) -> list[Any]:
        """Run the local stage of a round for all groups, on the engine.

        Before that it begins to save the checkpoint's new entries. It adds a
        report on the stage. Groups that fail are dropped for the rest of the
        call: `self.alive` is False for them.

        `kept` are the outputs of the stage whose slices are needed after it, and
        `staying` the names of those that workers read from each other. The stage's
        inputs are read from `env`. `location` is that of the round: `2`, or
        `2.scan.0.1` for round 1 in body 0 of the loop `scan` in round 2.

        The result is a list: the results of the round's reductions but gathers, `[*s]`,
        the leaves of the results of its folds, then for each of `kept` all groups'
        slices, `[n, *s]`, or a `WorkerSlices` if `KeptResults.staying` says that they
        stay with the workers. An `EngineError` is raised if the stage failed, a group
        failed with `on_error="raise"`, or fewer groups than `min_groups` survive.
        """
        # Now, so that the file is written while the groups run.
        self.checkpoint.write()
        stage, runner, options = a_round.local, self.runner, self.options
        runner.check_canceled()
        where = location, stage.name
        runner.emit(StageStarted(*where, int(np.count_nonzero(self.alive))))
        dropped_before, start = len(self.report.dropped), time.perf_counter()
        n = self.plan.size
        slices = [as_slices(v, env[v]) for v in stage.inputs if v.partitioned]
        one_by_one = any(x.source is not None for x in slices)
        block_size = runner.block_size(a_round, n, kept, one_by_one)
        # A block of more than n groups would only have more padding.
        size = min(options.block_size or block_size.value, n)
        at_once = equal_batches(size, block_size.batch)
        call = StageCall(
            job=runner.executable.job(
                a_round,
                env,
                location,
                at_once,
                options,
                stay=runner.kept.staying(kept, staying),
                save="" if runner.slice_files is None else runner.slice_files.folder,
                full=size,
            ),
            block_size=size,
            slices=slices,
            alive=self.alive.copy(),
            options=options,
            lost=lambda why, kind="worker", wait=0.0: runner.emit(
                Retried(*where, kind, why, wait)
            ),
            check=runner.check_canceled,
            workers=runner.count_workers,
            cache=runner.engine_cache,
            initial=runner.kept.initial,
            partial_bytes=block_size.sent,
        )
        fold = functools.partial(runner.executable.run_fold, env)
        stay = call.job.stay, runner.engine
        results = StageResults(a_round, kept, n, size, fold, *stay)
        try:
            self._collect(call, results, where, stage)
        except CanceledError:
            raise
        except EngineError as error:
            # An error that names its round is complete; one from reading groups is not.
            if error.group is None or error.round is not None:
                raise
            raise self._error(stage, location, str(error), error.group) from error
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            raise self._error(stage, location, why) from error
        seconds = time.perf_counter() - start
        runner.emit(StageEnded(*where, results.groups, results.blocks, seconds))
        # Measured only where the size is ours to change.
        if options.block_size is None:
            block_size.measure(results.full_blocks, all(map(_is_resident, slices)))
        check_survivors(self.plan, location, stage, results.groups, options.min_groups)
        # Before the round's own entry: a resumed call must not count dropped groups.
        if len(self.report.dropped) > dropped_before:
            self.checkpoint.put("dropped", [np.array(sorted(self.report.dropped))])
        return results.finish()

    def _collect(
        self,
        call: StageCall,
        results: StageResults,
        where: tuple[str, str],
        stage: Stage,
    ) -> None:
        """Run a stage on the engine, and add each block of groups to `results`.

        The groups that a block reports as failed are dropped for the rest of the call.
        `where` is the location of the round, and the name of the stage.
        """
        # Closing the generator lets the engine release tasks in flight after an error.
        with closing(self.runner.engine.results(call)) as blocks:
            for block, block_result in blocks:
                for group, why in block_result.failed.items():
                    self._fail(group, why, where[0], stage)
                before = results.groups
                results.add(block, block_result, self.alive)
                done = results.groups - before
                process, seconds = block_result.pid, block_result.seconds
                self.runner.emit(BlockDone(*where, done, process, seconds))

    def _fail(self, group: int, why: str, location: str, stage: Stage) -> None:
        """Drop a group that failed for the rest of the call, or raise its error.

        To drop it sets `self.alive` to False for the group, and puts the reason into
        `self.report.dropped`. The option `on_error` decides.
        """
        name = self.runner.name_of(group)
        why = f"{name}: {why}" if name else why
        self.runner.emit(GroupFailed(location, stage.name, group, why))
        if self.options.on_error == "raise":
            raise self._error(stage, location, why, group)
        self.alive[group] = False
        self.report.dropped[group] = f"round {location}, {stage.name}: {why}"

    def _error(
        self, stage: Stage, location: str, why: str, group: int | None = None
    ) -> EngineError:
        """Make, but not raise, the `EngineError` of a stage or a group that failed."""
        return stage_error(self.runner.plan, location, stage, why, group)
