"""The driver: server stages and loops in this process, the groups' in workers.

Partitioned values are stacks of rows along axis 0, or `Lazy`; all values are numpy
arrays, random keys as raw data. `Runner` is what every engine's `compile` returns.
"""

import hashlib
import time
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from drjax._errors import EngineError
from drjax._jaxprs.prng_keys import from_raw
from drjax._plan_file.load import unpacked
from drjax._plan_file.save import packed
from drjax._plan_file.stage_features import ALLOWED
from drjax.backends import _python_loops
from drjax.backends.engine import checkpoint
from drjax.backends.engine.block_size import BlockSize
from drjax.backends.engine.combine import Totals, add, result
from drjax.backends.engine.extras import needed
from drjax.backends.engine.messages import Block, Done, File, rounds_of, rows_of
from drjax.backends.engine.options import EngineOptions
from drjax.backends.engine.progress import Report, StageReport
from drjax.backends.engine.protocols import Call, Engine
from drjax.backends.groups import Lazy, empty_rows, inputs, survivors
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
        data = packed(plan)
        with jax.enable_x64(True):  # if the file needs it
            path = Path(f"{plan.name}.drjax")
            self._loaded = unpacked(path, data, custom_calls=None)
        forms = [s.forms for _, s in self._loaded.stages() if s.forms is not None]
        x64 = any(f.origin["x64"] for f in forms)
        calls = tuple(sorted({c for f in forms for c in f.custom_calls} - ALLOWED))
        self.file = File(data, hashlib.sha256(data).hexdigest(), x64, calls)
        self._servers: dict[int, Any] = {}
        self._places = {id(r): i for i, (_, r) in enumerate(rounds_of(self._loaded))}
        self._sizes: dict[int, BlockSize] = {}  # by place
        self.report = Report()
        self.known: dict[str, Any] = {}  # to the engine

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._precision():
            return self.flat(inputs(self.plan, args, kwargs))

    def _precision(self) -> Any:
        return jax.enable_x64(self.file.x64 or bool(jax.config.read("jax_enable_x64")))

    def flat(self, given: list) -> Any:
        """The results, of what `drjax.backends.groups.inputs` gives."""
        plan = self.plan
        with self._precision(), self._notes(given) as notes:
            self.report = Report()
            self.report.resumed = notes.resumed
            self.engine.open()
            try:
                run, found = _Run(self, notes), []
                outs = run.plan(self._loaded, given, "")
                for value, x in zip(plan.outputs, outs, strict=True):
                    if value.partitioned:
                        x = np.moveaxis(survivors(value, x, run.alive), 0, value.axis)
                    found.append(from_raw(jax.numpy.asarray(x), value.dtype))
                notes.clear()
            finally:
                self.report.finish()
            return plan.out_tree.unflatten(found)

    def _notes(self, given: list) -> checkpoint.Notes:
        if self.options.checkpoint is None:
            return checkpoint.Notes()
        key = checkpoint.key_of(self.file.key, given, self.options)
        return checkpoint.Saved(self.options.checkpoint, key)

    def server(self, stage: Stage, args: list) -> list[np.ndarray]:
        """The results of a server stage, raw."""
        if stage.forms is None:
            return []
        if id(stage) not in self._servers:
            self._servers[id(stage)] = jax.jit(stage.forms.one.function.call)
        args = [x.whole() if isinstance(x, Lazy) else x for x in args]
        outs = self._servers[id(stage)](*stage.forms.consts, *args)
        return list(map(np.asarray, outs))

    def place(self, a_round: Round) -> int:
        """Where a round is in the file, for workers."""
        return self._places[id(a_round)]

    def block_size(self, a_round: Round) -> BlockSize:
        """That of a round, as far as it is not an option."""
        place, n = self.place(a_round), self.plan.size
        if place not in self._sizes:
            self._sizes[place] = BlockSize(
                a_round, n, self.engine.workers, self.options.timeout
            )
        return self._sizes[place]

    def close(self) -> None:
        """End the workers, unless they were given to `compile`."""
        self.known.clear()
        if self._owner:
            self.engine.close()

    def __enter__(self) -> "Runner":
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()


class _Run:
    """One call."""

    def __init__(self, runner: Runner, notes: checkpoint.Notes):
        self.runner, self.notes, self.options = runner, notes, runner.options
        self.report = runner.report
        self.alive = np.ones(runner.plan.size, bool)
        lost = notes.get("dropped")
        if lost is not None:
            for group in lost[0]:
                self.alive[group] = False
                self.report.dropped[int(group)] = "before the call was resumed"

    def plan(self, plan: Plan, given: list, at: str) -> list:
        """The results of a plan; `at`: where it is, as in names of members."""
        values: dict[str, Any] = {}

        def store(names, found) -> None:
            values.update(zip([v.name for v in names], found, strict=True))

        take = lambda names: [values[v.name] for v in names]
        store(plan.inputs, given)
        for number, a_round in enumerate(plan.rounds, 1):
            here, stage = f"{at}{number}", a_round.server
            store(stage.outputs, self.runner.server(stage, take(stage.inputs)))
            for whole, rows in a_round.scatter:
                values[rows.name] = np.moveaxis(values[whole.name], rows.axis, 0)
            if a_round.local.forms is not None:
                rows = rows_of(plan, a_round)
                found = self._groups(a_round, rows, take(a_round.local.inputs), here)
                store([*(r.result for r in a_round.partials), *rows], found)
            for reduce in a_round.reduces:
                if reduce.op == "gather":
                    source = reduce.source
                    rows = survivors(source, values[source.name], self.alive)
                    values[reduce.result.name] = rows
            for loop in a_round.loops:
                found = self._loop(loop, take(loop.inputs), plan, here)
                store(loop.outputs, found)
        last = plan.server
        store(last.outputs, self.runner.server(last, take(last.inputs)))
        return take(plan.outputs)

    def _loop(self, loop: Loop, given: list, plan: Plan, here: str) -> list:
        at = f"{here}.{loop.name}"  # then the number of the body, as in the file
        bodies = [
            lambda xs, body=body, i=i: self.plan(body, xs, f"{at}.{i}.")
            for i, body in enumerate(loop.bodies)
        ]
        steps = _NotedSteps(self.notes, at)
        return _python_loops.run(loop, bodies, given, plan.size, np, steps)

    # -----------------------------------------------------------------------------
    # The groups' work

    def _groups(self, a_round: Round, rows: list, given: list, here: str) -> list:
        """The results of the round's reductions but gathers, then its rows."""
        key, noted = f"{here}.groups", self.notes.get(f"{here}.groups")
        if noted is not None:
            return noted
        self.notes.write()
        stage, runner, options = a_round.local, self.runner, self.options
        told = StageReport(here, stage.name)
        self.report.stages.append(told)
        start, n = time.perf_counter(), runner.plan.size
        pairs = [*zip(stage.inputs, given, strict=True)]
        ops = tuple(reduce.op for reduce in a_round.partials)
        totals: Totals = [None] * len(ops)
        made = [empty_rows(value, n) for value in rows]
        dropped = len(self.report.dropped)
        size = runner.block_size(a_round)
        blocks: list[Done] = []
        call = Call(
            runner.file, runner.place(a_round), f"round {here}, {stage.name}", ops,
            [x for v, x in pairs if not v.partitioned],
            [x for v, x in pairs if v.partitioned],
            self.alive.copy(), min(options.block_size or size.value, n), options,
            self.report.lost.append, runner.known,
        )  # fmt: skip
        try:
            with (
                self._bar(n, f"round {here}") as bar,
                closing(runner.engine.results(call)) as all_,
            ):
                for block, done in all_:
                    for group, why in done.failed.items():
                        self._fail(group, why, here, stage)
                    totals = self._take(block, done, told, ops, totals, made)
                    if done.pid and len(block.groups) == call.size:
                        blocks.append(replace(done, partials=[], rows=[]))
                    if bar is not None:
                        bar.update(int(block.valid.sum()))
        except EngineError as error:
            if error.group is None or error.round is not None:
                raise
            raise self._error(str(error), here, stage, error.group) from error
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            raise self._error(why, here, stage) from error
        told.seconds = time.perf_counter() - start
        if options.block_size is None:
            size.measure(blocks)
        if told.groups < options.min_groups:
            raise self._error(
                f"{told.groups} of {n} groups survive, but min_groups="
                f"{options.min_groups}", here, stage,
            )  # fmt: skip
        pairs = zip(a_round.partials, totals, strict=True)
        found = [*(result(r, total, told.groups) for r, total in pairs), *made]
        if len(self.report.dropped) > dropped:
            self.notes.put("dropped", [np.array(sorted(self.report.dropped))])
        self.notes.put(key, found)
        return found

    def _take(self, block: Block, done: Done, told, ops, totals, made) -> Totals:
        """Keep the rows that a block gives; the totals with its partial results."""
        good = block.valid & self.alive[block.groups]
        if done.pid:
            told.blocks += 1
            self.report.workers[done.pid] += 1
        if good.any():
            told.groups += int(good.sum())
            for into, part in zip(made, done.rows, strict=True):
                into[block.groups[good]] = part[good]
        return add(ops, totals, done.partials) if done.partials else totals

    def _fail(self, group: int, why: str, here: str, stage: Stage) -> None:
        if self.options.on_error == "raise":
            raise self._error(why, here, stage, group)
        self.alive[group] = False
        self.report.dropped[group] = f"round {here}, {stage.name}: {why}"

    def _error(self, why: str, here: str, stage: Stage, group: int | None = None):
        who = "The groups' work" if group is None else f"Group {group}"
        return EngineError(
            f"{who} failed in round {here} of {self.runner.plan.name}, in "
            f"{stage.name}: {why.rstrip('.')}.", here, stage.name, group,
        )  # fmt: skip

    def _bar(self, n: int, text: str) -> Any:
        if not self.options.progress:
            return nullcontext()
        tqdm = needed("tqdm", "examples", "progress=True").tqdm
        return tqdm(total=n, desc=text, unit="group", leave=False)


class _NotedSteps(_python_loops.Steps):
    """How far a loop is, as a note."""

    def __init__(self, notes: checkpoint.Notes, at: str):
        self.notes, self.at = notes, at

    def load(self):
        note = self.notes.get(self.at)
        if note is None:
            return None
        (done, carried, each), arrays = map(int, note[0]), note[1:]
        carry, rest = arrays[:carried], arrays[carried:]
        outs = [rest[i * each : (i + 1) * each] for i in range(done)] if each else []
        return done, carry, outs or [[] for _ in range(done)]

    def save(self, done: int, carry: list, outs: list) -> None:
        each = len(outs[0]) if outs else 0
        sizes = np.array([done, len(carry), each])
        flat = [x for out in outs for x in out]
        self.notes.put(self.at, [sizes, *carry, *flat], over=f"{self.at}.")
