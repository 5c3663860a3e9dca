"""The driver: server stages and loops in this process, groups' stages on an engine.

Input: a plan, an engine and its options; then, for each call, the arguments of the
planned function. Output: its results, as JAX arrays of the planned shapes and dtypes.
`Runner` is what every engine's `compile` returns.

Invariants: partitioned values are stacks of slices along axis 0, or `Lazy`; all values
between stages are numpy arrays, random keys as raw data. Server stages are the exported
ones of the plan file, so that they compute the same on every engine and after a
resumption. A group that was dropped takes no part in any later stage of the call.

Sharp edges: slices that a later round needs, or that are returned, are held by the
driver. A loop of rounds is a Python loop: each step waits for its groups.
"""

import time
from contextlib import closing, nullcontext
from typing import Any

import numpy as np

from drjax._errors import EngineError
from drjax.backends import _python_loops
from drjax.backends._interpret_plan import Environment, PlanInterpreter
from drjax.backends.engine import checkpoint
from drjax.backends.engine.block_size import BlockSize
from drjax.backends.engine.executable_plan import ExecutablePlan, scatter
from drjax.backends.engine.extras import needed
from drjax.backends.engine.messages import File, kept_outputs
from drjax.backends.engine.options import EngineOptions
from drjax.backends.engine.progress import Report, StageReport
from drjax.backends.engine.protocols import Engine, StageCall
from drjax.backends.engine.stage_results import (
    StageResults,
    check_survivors,
    stage_error,
)
from drjax.backends.groups import flat_slices, survivors
from drjax.plan import Loop, Plan, Round, Stage, Value


class Runner:
    """A plan on an engine: call it as the planned function.

    Its results are numpy-backed JAX arrays of the shapes and dtypes of the planned
    function's. An argument whose values are all partitioned may be a `Groups` instead
    of arrays. Workers start with the first call and stay until `close`, or until the
    end of a `with` block.

    Attributes:
      plan: The plan.
      engine: What runs the groups.
      options: How it runs.
      report: A `Report` on the latest call.
      executable: The plan with compiled server stages, and its file.
      engine_cache: What the engine keeps between calls.
    """

    def __init__(
        self, plan: Plan, engine: Engine, options: EngineOptions, owner: bool = True
    ):
        self.plan, self.engine, self.options = plan, engine, options
        self.executable = ExecutablePlan(plan)
        self._owner = owner
        self._sizes: dict[int, BlockSize] = {}  # by index of the stage
        self.report = Report()
        self.engine_cache: dict[str, Any] = {}

    @property
    def file(self) -> File:
        """The plan file that workers get."""
        return self.executable.file

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.executable.precision():
            inputs = flat_slices(self.plan, args, kwargs)
            with self._checkpoint(inputs) as saved:
                self.report = Report()
                self.report.resumed = saved.resumed
                # Not in the constructor: workers start with the first call, also after
                # `close`.
                self.engine.open()
                try:
                    results = self._run(inputs, saved)
                    # Only with all results at hand; until then a crash resumes from
                    # the folder.
                    saved.clear()
                finally:
                    self.report.finish()
                return results

    def _run(self, inputs: list, saved: checkpoint.Checkpoint) -> Any:
        """Run the plan in one call; returns the results of the planned function.

        Args:
          inputs: The plan's inputs, as `flat_slices` returns them.
          saved: The checkpoint of the call.
        """
        call = _Call(self, saved)
        run, outputs = _DriverInterpreter(call, self.executable.plan, ""), []
        for value, x in zip(self.plan.outputs, run(inputs), strict=True):
            if value.partitioned:
                x = np.moveaxis(survivors(value, x, call.alive), 0, value.axis)
            outputs.append(x)
        return self.executable.results(outputs)

    def _checkpoint(self, inputs: list) -> checkpoint.Checkpoint:
        """Open the checkpoint of a call; without the option, one that saves nothing.

        `inputs` are the plan's inputs, as `flat_slices` returns them.
        """
        if self.options.checkpoint is None:
            return checkpoint.Checkpoint()
        key = checkpoint.call_fingerprint(self.file.key, inputs, self.options)
        return checkpoint.FolderCheckpoint(self.options.checkpoint, key)

    def block_size(self, a_round: Round) -> BlockSize:
        """The `BlockSize` of a round, kept between calls of this runner."""
        index = self.executable.stage_index(a_round)
        if index not in self._sizes:
            self._sizes[index] = BlockSize(
                a_round, self.plan.size, self.engine.workers, self.options.timeout
            )
        return self._sizes[index]

    def close(self) -> None:
        """End the workers, unless they were given to `compile`."""
        self.engine_cache.clear()
        # Workers that several plans share end with their owner.
        if self._owner:
            self.engine.close()

    def __enter__(self) -> "Runner":
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()


class _DriverInterpreter(PlanInterpreter):
    """Runs a plan, or the body of a loop, within one call.

    Partitioned values have slices along axis 0, or are `Lazy`.

    Args:
      call: The call.
      plan: The plan, with exported stages.
      prefix: What the locations of its rounds begin with: empty, or of a body
        `2.scan.0.`.
    """

    def __init__(self, call: "_Call", plan: Plan, prefix: str):
        self.call, self.plan, self.prefix = call, plan, prefix

    def run_server(self, stage: Stage, env: Environment) -> None:
        self.call.runner.executable.run_server(stage, env)

    def scatter(self, slices: Value, whole: Any) -> Any:
        return scatter(slices, whole)

    def run_groups(self, index: int, env: Environment) -> None:
        a_round, location = self.plan.rounds[index], f"{self.prefix}{index + 1}"
        # A round may only broadcast or gather.
        if a_round.local.exported is not None:
            kept = kept_outputs(self.plan, a_round)
            key = f"{location}.groups"
            entry = self.call.checkpoint.get(key)
            if entry is None:
                entry = self.call.run_stage(a_round, kept, env, location)
                self.call.checkpoint.put(key, entry)
            env.write([*(r.result for r in a_round.partials), *kept], entry)
        for reduce in a_round.reduces:
            if reduce.op == "gather":
                source = reduce.source
                # Slices of dropped groups are NaN or zero in whatever gathers them.
                slices = survivors(source, env[source], self.call.alive)
                env[reduce.result] = slices

    def run_loop(self, index: int, loop: Loop, inputs: list) -> list:
        # The index of the body follows, as in names of members of the plan file.
        prefix = f"{self.prefix}{index + 1}.{loop.name}"
        bodies = [
            _DriverInterpreter(self.call, body, f"{prefix}.{i}.")
            for i, body in enumerate(loop.bodies)
        ]
        steps = _CheckpointedSteps(self.call.checkpoint, prefix)
        return _python_loops.run(loop, bodies, inputs, self.plan.size, np, steps)


class _Call:
    """One call of a `Runner`: which groups take part, the report, the checkpoint.

    Args:
      runner: The runner.
      saved: The checkpoint of the call.

    Attributes:
      alive: Which groups take part, bool `[n]`; dropped ones do not.
    """

    def __init__(self, runner: Runner, saved: checkpoint.Checkpoint):
        self.runner, self.checkpoint, self.options = runner, saved, runner.options
        self.report = runner.report
        # Groups that were dropped before a crash stay dropped, or totals would mix.
        self.alive = np.ones(runner.plan.size, bool)
        dropped = saved.get("dropped")
        if dropped is not None:
            for group in dropped[0]:
                self.alive[group] = False
                self.report.dropped[int(group)] = "before the call was resumed"

    def run_stage(
        self, a_round: Round, kept: list[Value], env: Environment, location: str
    ) -> list[np.ndarray]:
        """Run the groups of a round on the engine.

        Args:
          a_round: The round.
          kept: The outputs of its stage that are read later as slices.
          env: The arrays so far.
          location: The round, as in `StageReport`.

        Returns:
          The reduced values of the round's reductions but gathers, then all groups'
          slices `[n, *s]` of each output in `kept`.

        Raises:
          EngineError: A group or the stage failed, or too few groups survive.
        """
        # Now, so that the file is written while the groups run.
        self.checkpoint.write()
        stage, runner, options = a_round.local, self.runner, self.options
        stage_report = StageReport(location, stage.name)
        self.report.stages.append(stage_report)
        dropped_before, start = len(self.report.dropped), time.perf_counter()
        block_size = runner.block_size(a_round)
        size = options.block_size or block_size.value
        call = StageCall(
            job=runner.executable.job(a_round, env, location, size, options),
            slices=env.read(v for v in stage.inputs if v.partitioned),
            alive=self.alive.copy(),
            options=options,
            lost=self.report.lost.append,
            cache=runner.engine_cache,
        )
        results = StageResults(a_round, kept, runner.plan.size, call.job.size)
        try:
            self._collect(call, results, stage_report, stage)
        except EngineError as error:
            # An error that names its round is complete; one from reading groups is not.
            if error.group is None or error.round is not None:
                raise
            raise self._error(stage, location, str(error), error.group) from error
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            raise self._error(stage, location, why) from error
        stage_report.seconds = time.perf_counter() - start
        # Measured only where the size is ours to change.
        if options.block_size is None:
            block_size.measure(results.full_blocks)
        check_survivors(
            runner.plan, location, stage, results.groups, options.min_groups
        )
        # Before the round's own entry: a resumed call must not count dropped groups.
        if len(self.report.dropped) > dropped_before:
            self.checkpoint.put("dropped", [np.array(sorted(self.report.dropped))])
        return results.finish()

    def _collect(
        self,
        call: StageCall,
        results: StageResults,
        stage_report: StageReport,
        stage: Stage,
    ) -> None:
        """Run a stage on the engine, and add the results of its blocks to `results`.

        Args:
          call: What the engine is asked for.
          results: The results so far.
          stage_report: The report on the stage, which is updated.
          stage: The stage.

        Raises:
          EngineError: A group failed, with `on_error="raise"`; and whatever the engine
            raises.
        """
        location = stage_report.round
        with (
            self._progress_bar(f"round {location}") as bar,
            # Closing the generator lets the engine release tasks in flight after an
            # error.
            closing(self.runner.engine.results(call)) as blocks,
        ):
            for block, block_result in blocks:
                for group, why in block_result.failed.items():
                    self._fail(group, why, location, stage)
                results.add(block, block_result, self.alive)
                stage_report.groups = results.groups
                stage_report.blocks = results.blocks
                if block_result.pid:
                    self.report.workers[block_result.pid] += 1
                if bar is not None:
                    bar.update(int(block.valid.sum()))

    def _fail(self, group: int, why: str, location: str, stage: Stage) -> None:
        """Drop a group that failed, for the rest of the call.

        Args:
          group: The group index.
          why: The reason.
          location: The round, as in `StageReport`.
          stage: The stage.

        Raises:
          EngineError: With `on_error="raise"`.
        """
        if self.options.on_error == "raise":
            raise self._error(stage, location, why, group)
        self.alive[group] = False
        self.report.dropped[group] = f"round {location}, {stage.name}: {why}"

    def _error(
        self, stage: Stage, location: str, why: str, group: int | None = None
    ) -> EngineError:
        """An `EngineError` to raise for a stage.

        Args:
          stage: The stage.
          location: The round, as in `StageReport`.
          why: The reason.
          group: The index of the group that failed; None: no single group did.
        """
        return stage_error(self.runner.plan, location, stage, why, group)

    def _progress_bar(self, text: str) -> Any:
        """A context whose value is a progress bar over the groups; by default None.

        `text` is its title.
        """
        if not self.options.progress:
            return nullcontext()
        tqdm = needed("tqdm", "examples", "progress=True").tqdm
        return tqdm(total=self.runner.plan.size, desc=text, unit="group", leave=False)


class _CheckpointedSteps(_python_loops.Steps):
    """The progress of a loop as an entry of the checkpoint.

    Args:
      saved: The checkpoint of the call.
      key: The place of the loop in the plan, as `2.scan`.
    """

    def __init__(self, saved: checkpoint.Checkpoint, key: str):
        self.checkpoint, self.key = saved, key

    def load(self):
        entry = self.checkpoint.get(self.key)
        if entry is None:
            return None
        (done, carried, each), arrays = map(int, entry[0]), entry[1:]
        carry, rest = arrays[:carried], arrays[carried:]
        outs = [rest[i * each : (i + 1) * each] for i in range(done)] if each else []
        return done, carry, outs or [[] for _ in range(done)]

    def save(self, done: int, carry: list, outs: list) -> None:
        each = len(outs[0]) if outs else 0
        # Entries are lists of arrays, so the counts are an array too.
        sizes = np.array([done, len(carry), each])
        flat = [x for out in outs for x in out]
        self.checkpoint.put(self.key, [sizes, *carry, *flat], over=f"{self.key}.")
