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

import hashlib
import time
from contextlib import closing, nullcontext
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from drjax._errors import EngineError
from drjax._jaxprs.prng_keys import from_raw
from drjax._plan_file.custom_calls import ALLOWED
from drjax._plan_file.export_plan import export_plan
from drjax._plan_file.save import plan_to_bytes
from drjax.backends import _python_loops
from drjax.backends.engine import checkpoint
from drjax.backends.engine.block_size import BlockSize
from drjax.backends.engine.combine import Totals, add, result
from drjax.backends.engine.extras import needed
from drjax.backends.engine.messages import Block, BlockResult, File, rounds_of, rows_of
from drjax.backends.engine.options import EngineOptions
from drjax.backends.engine.progress import Report, StageReport
from drjax.backends.engine.protocols import Engine, StageCall
from drjax.backends.groups import Lazy, empty_rows, flat_rows, survivors
from drjax.plan import Loop, Plan, Round, Stage


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
    """

    def __init__(
        self, plan: Plan, engine: Engine, options: EngineOptions, owner: bool = True
    ):
        self.plan, self.engine, self.options = plan, engine, options
        self._owner = owner
        # The driver runs the exported server stages too, so that results are the same
        # whether the plan was made here or loaded. Only workers need the bytes.
        self._exported = export_plan(plan)
        data = plan_to_bytes(self._exported)
        exported = [s.forms for _, s in self._exported.stages() if s.forms is not None]
        x64 = any(f.origin["x64"] for f in exported)
        # Workers trust the driver: its plan may make these custom calls there.
        calls = tuple(sorted({c for f in exported for c in f.custom_calls} - ALLOWED))
        self.file = File(data, hashlib.sha256(data).hexdigest(), x64, calls)
        # By identity: stages live as long as the plan, and hashing a jaxpr is slow.
        self._servers: dict[int, Any] = {}
        self._stage_indices = {
            id(r): i for i, (_, r) in enumerate(rounds_of(self._exported))
        }
        self._sizes: dict[int, BlockSize] = {}  # by index of the stage
        self.report = Report()
        self.engine_cache: dict[str, Any] = {}  # kept for the engine

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._precision():
            return self.call_flat(flat_rows(self.plan, args, kwargs))

    def _precision(self) -> Any:
        return jax.enable_x64(self.file.x64 or bool(jax.config.read("jax_enable_x64")))

    def call_flat(self, inputs: list) -> Any:
        """The results of inputs as `drjax.backends.groups.flat_rows` gives them."""
        plan = self.plan
        with self._precision(), self._checkpoint(inputs) as saved:
            self.report = Report()
            self.report.resumed = saved.resumed
            # Not in the constructor: workers start with the first call, also after
            # `close`.
            self.engine.open()
            try:
                run, results = _Run(self, saved), []
                outs = run.plan(self._exported, inputs, "")
                for value, x in zip(plan.outputs, outs, strict=True):
                    if value.partitioned:
                        x = np.moveaxis(survivors(value, x, run.alive), 0, value.axis)
                    results.append(from_raw(jax.numpy.asarray(x), value.dtype))
                # Only with all results at hand; until then a crash resumes from the
                # folder.
                saved.clear()
            finally:
                self.report.finish()
            return plan.out_tree.unflatten(results)

    def _checkpoint(self, inputs: list) -> checkpoint.Checkpoint:
        if self.options.checkpoint is None:
            return checkpoint.Checkpoint()
        key = checkpoint.call_fingerprint(self.file.key, inputs, self.options)
        return checkpoint.FolderCheckpoint(self.options.checkpoint, key)

    def server(self, stage: Stage, args: list) -> list[np.ndarray]:
        """The results of a server stage, raw."""
        if stage.forms is None:
            return []
        if id(stage) not in self._servers:
            self._servers[id(stage)] = jax.jit(stage.forms.per_group.function.call)
        # A server stage takes partitioned values whole, as after a gather.
        args = [x.whole() if isinstance(x, Lazy) else x for x in args]
        outs = self._servers[id(stage)](*stage.forms.consts, *args)
        return list(map(np.asarray, outs))

    def stage_index(self, a_round: Round) -> int:
        """The index of a round in the file, for workers."""
        return self._stage_indices[id(a_round)]

    def block_size(self, a_round: Round) -> BlockSize:
        """That of a round, as far as it is not an option."""
        index, n = self.stage_index(a_round), self.plan.size
        if index not in self._sizes:
            self._sizes[index] = BlockSize(
                a_round, n, self.engine.workers, self.options.timeout
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


class _Run:
    """One call."""

    def __init__(self, runner: Runner, saved: checkpoint.Checkpoint):
        self.runner, self.checkpoint, self.options = runner, saved, runner.options
        self.report = runner.report
        # Groups that were dropped before a crash stay dropped, or totals would mix.
        self.alive = np.ones(runner.plan.size, bool)
        lost = saved.get("dropped")
        if lost is not None:
            for group in lost[0]:
                self.alive[group] = False
                self.report.dropped[int(group)] = "before the call was resumed"

    def plan(self, plan: Plan, inputs: list, prefix: str) -> list:
        """The results of a plan; `prefix`: of its rounds, as in names of members."""
        values: dict[str, Any] = {}

        def store(names, arrays) -> None:
            values.update(zip([v.name for v in names], arrays, strict=True))

        take = lambda names: [values[v.name] for v in names]
        store(plan.inputs, inputs)
        for number, a_round in enumerate(plan.rounds, 1):
            location, stage = f"{prefix}{number}", a_round.server
            store(stage.outputs, self.runner.server(stage, take(stage.inputs)))
            for whole, rows in a_round.scatter:
                # A scatter costs nothing here: each block is sent its slices anyway.
                values[rows.name] = np.moveaxis(values[whole.name], rows.axis, 0)
            if a_round.local.forms is not None:
                rows = rows_of(plan, a_round)
                arrays = self._groups(
                    a_round, rows, take(a_round.local.inputs), location
                )
                store([*(r.result for r in a_round.partials), *rows], arrays)
            for reduce in a_round.reduces:
                if reduce.op == "gather":
                    source = reduce.source
                    # Slices of dropped groups are NaN or zero in whatever gathers them.
                    rows = survivors(source, values[source.name], self.alive)
                    values[reduce.result.name] = rows
            for loop in a_round.loops:
                arrays = self._loop(loop, take(loop.inputs), plan, location)
                store(loop.outputs, arrays)
        last = plan.server
        store(last.outputs, self.runner.server(last, take(last.inputs)))
        return take(plan.outputs)

    def _loop(self, loop: Loop, inputs: list, plan: Plan, location: str) -> list:
        # The index of the body follows, as in names of members of the plan file.
        prefix = f"{location}.{loop.name}"
        bodies = [
            lambda xs, body=body, i=i: self.plan(body, xs, f"{prefix}.{i}.")
            for i, body in enumerate(loop.bodies)
        ]
        steps = _CheckpointedSteps(self.checkpoint, prefix)
        return _python_loops.run(loop, bodies, inputs, plan.size, np, steps)

    # -----------------------------------------------------------------------------
    # The groups' work

    def _groups(self, a_round: Round, rows: list, inputs: list, location: str) -> list:
        """The round's reductions but gathers, then the slices that are needed later."""
        key, entry = f"{location}.groups", self.checkpoint.get(f"{location}.groups")
        if entry is not None:
            return entry
        # Now, so that the file is written while the groups run.
        self.checkpoint.write()
        stage, runner, options = a_round.local, self.runner, self.options
        stage_report = StageReport(location, stage.name)
        self.report.stages.append(stage_report)
        start, n = time.perf_counter(), runner.plan.size
        pairs = [*zip(stage.inputs, inputs, strict=True)]
        ops = tuple(reduce.op for reduce in a_round.partials)
        totals: Totals = [None] * len(ops)
        # Filled with NaN or zero: what a dropped group leaves as its slice.
        slices = [empty_rows(value, n) for value in rows]
        dropped = len(self.report.dropped)
        size = runner.block_size(a_round)
        results_of_full_blocks: list[BlockResult] = []
        call = StageCall(
            file=runner.file,
            stage=runner.stage_index(a_round),
            location=f"round {location}, {stage.name}",
            ops=ops,
            shared=[x for v, x in pairs if not v.partitioned],
            rows=[x for v, x in pairs if v.partitioned],
            alive=self.alive.copy(),
            size=min(options.block_size or size.value, n),
            options=options,
            lost=self.report.lost.append,
            cache=runner.engine_cache,
        )
        try:
            with (
                self._bar(n, f"round {location}") as bar,
                # Closing the generator lets the engine release tasks in flight after an
                # error.
                closing(runner.engine.results(call)) as results,
            ):
                for block, block_result in results:
                    for group, why in block_result.failed.items():
                        self._fail(group, why, location, stage)
                    totals = self._take(
                        block, block_result, stage_report, ops, totals, slices
                    )
                    # Shorter last blocks and results without a process say nothing of
                    # the time.
                    if block_result.pid and len(block.groups) == call.size:
                        results_of_full_blocks.append(
                            replace(block_result, partials=[], rows=[])
                        )
                    if bar is not None:
                        bar.update(int(block.valid.sum()))
        except EngineError as error:
            # An error that names its round is complete; one from reading groups is not.
            if error.group is None or error.round is not None:
                raise
            raise self._error(str(error), location, stage, error.group) from error
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            raise self._error(why, location, stage) from error
        stage_report.seconds = time.perf_counter() - start
        # Measured only where the size is ours to change.
        if options.block_size is None:
            size.measure(results_of_full_blocks)
        if stage_report.groups < options.min_groups:
            raise self._error(
                f"{stage_report.groups} of {n} groups survive, but min_groups="
                f"{options.min_groups}",
                location,
                stage,
            )
        pairs = zip(a_round.partials, totals, strict=True)
        outs = [
            *(result(r, total, stage_report.groups) for r, total in pairs),
            *slices,
        ]
        # Before the round's own entry: a resumed call must not count dropped groups.
        if len(self.report.dropped) > dropped:
            self.checkpoint.put("dropped", [np.array(sorted(self.report.dropped))])
        self.checkpoint.put(key, outs)
        return outs

    def _take(
        self, block: Block, block_result: BlockResult, stage_report, ops, totals, slices
    ) -> Totals:
        """Keep the slices of a block; the totals with its partial reductions."""
        # A group that failed in this very block is not alive any more.
        good = block.valid & self.alive[block.groups]
        if block_result.pid:
            stage_report.blocks += 1
            self.report.workers[block_result.pid] += 1
        if good.any():
            stage_report.groups += int(good.sum())
            for into, part in zip(slices, block_result.rows, strict=True):
                into[block.groups[good]] = part[good]
        if not block_result.partials:
            return totals
        return add(ops, totals, block_result.partials)

    def _fail(self, group: int, why: str, location: str, stage: Stage) -> None:
        if self.options.on_error == "raise":
            raise self._error(why, location, stage, group)
        self.alive[group] = False
        self.report.dropped[group] = f"round {location}, {stage.name}: {why}"

    def _error(self, why: str, location: str, stage: Stage, group: int | None = None):
        who = "The groups' work" if group is None else f"Group {group}"
        return EngineError(
            f"{who} failed in round {location} of {self.runner.plan.name}, in "
            f"{stage.name}: {why.rstrip('.')}.",
            location,
            stage.name,
            group,
        )

    def _bar(self, n: int, text: str) -> Any:
        if not self.options.progress:
            return nullcontext()
        tqdm = needed("tqdm", "examples", "progress=True").tqdm
        return tqdm(total=n, desc=text, unit="group", leave=False)


class _CheckpointedSteps(_python_loops.Steps):
    """How far a loop is, as an entry of the checkpoint."""

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
