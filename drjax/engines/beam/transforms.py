"""The Beam pipeline: blocks of groups through a stage, partial reductions combined.

Input: a `StageRun`, or in a user's pipeline pairs of a group index and its slice.
Output: the totals of the stage, and the groups that were dropped with the reason.

Invariants: workers of any runner import this module; they get files and numpy arrays
only. The number of groups is one more partial reduction, so that it is combined with
the same retries as the others and cannot disagree with them.

Sharp edges: Beam may run a bundle twice; elements of one that failed are not counted,
but side effects, such as the files of `report`, may be written twice.
"""

# pyright: reportMissingImports=false

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import apache_beam as beam
import numpy as np
from apache_beam.options.pipeline_options import PipelineOptions

from drjax.engines.beam import one_round
from drjax.engines.beam.file_exchange import StageRun
from drjax.engines.core.blocks_of_groups import LoadedBlock, block_of_pairs
from drjax.engines.core.combine import Totals, add, stacked
from drjax.engines.core.job import Job
from drjax.engines.core.options import EngineOptions
from drjax.plan import Plan


class Sums(beam.CombineFn):
    """Beam's `CombineFn` for the partial reductions of blocks of groups.

    An element is a list with one array for each operation (`ops`: `"sum"`, `"max"`,
    ...), the partial reduction of a block. Accumulators and the result have the partial
    reductions over several blocks; they have None for an operation until a block with a
    group that takes part was added.
    """

    def __init__(self, ops: tuple[str, ...]):
        self.ops = ops

    def create_accumulator(self) -> Totals:
        return [None] * len(self.ops)

    def add_input(self, mutable_accumulator: Totals, element: list) -> Totals:
        return add(self.ops, mutable_accumulator, element)

    def merge_accumulators(self, accumulators: Iterable[Totals]) -> Totals:
        # Into a fresh accumulator: `add` overwrites its totals, but copies a first
        # partial reduction, so that no merged accumulator changes.
        total = self.create_accumulator()
        for other in accumulators:
            total = add(self.ops, total, other)
        return total

    def extract_output(self, accumulator: Totals) -> Totals:
        return stacked(accumulator)


class RunBlocks(beam.DoFn):
    """Runs blocks of groups through a local stage.

    An element is a `LoadedBlock`; the groups whose data could not be read are masked,
    and have failed. For each block the main output has a list: its partial reductions,
    then the number of its groups that take part and did not fail. A block without such
    groups gives no list. The output with the tag `"failed"` has pairs of a group index
    and the reason why that group failed.

    `load` is called once in each worker. `report` is called with each block and its
    result, before anything is raised.
    """

    def __init__(self, load: Callable[[], Job], report: Callable | None = None):
        self.load, self.report = load, report

    def setup(self) -> None:
        self.job = self.load()

    def process(self, element: LoadedBlock) -> Iterator[Any]:
        """Run a block; yield its failed groups, and last its partial reductions.

        A failed group is a `beam.pvalue.TaggedOutput`; it is a `RuntimeError`, which
        ends the pipeline, if failed groups are not dropped (`job.drop`).
        """
        (block, failed), job = element, self.job
        # Not encoded: what a worker sends are sums of its blocks, in float64.
        result = job.run(block, failed, encode=False)
        # Before anything raises: from the report the driver knows which group failed.
        if self.report is not None:
            self.report(block, result)
        for group, why in result.failed.items():
            # An exception ends the pipeline: the driver need not wait for other groups.
            if not job.drop:
                raise RuntimeError(f"Group {group} failed in {job.location}: {why}.")
            yield beam.pvalue.TaggedOutput("failed", (group, why))
        # A block in which no group is left has no partial reduction.
        good = block.without_failed(result.failed).valid
        if good.any():
            yield [*result.partials, np.int64(good.sum())]


class _Stage(beam.PTransform):
    """A transform from `LoadedBlock`s to a stage's totals and the failed groups.

    Its result is a dict of two `PCollection`s. `"totals"` has one element, a list: for
    each operation in `ops` the combined partial reductions of all blocks, then the
    number of groups that took part and did not fail; each is None if there is no such
    group. `"failed"` has pairs of a group index and the reason why that group failed.

    `job` are the arguments of `RunBlocks`: `load`, and `report` if there is one.
    """

    def __init__(self, ops: tuple[str, ...], *job: Any):
        super().__init__()
        self.ops, self.job = ops, job

    def expand(self, input_or_inputs: Any) -> Any:
        run = beam.ParDo(RunBlocks(*self.job)).with_outputs("failed", main="partials")
        outputs = input_or_inputs | "Work" >> run
        # The last is the number of groups.
        sums = Sums((*self.ops, "sum"))
        return {
            # Without any block, this is the empty accumulator: None for each operation.
            "totals": outputs.partials | "Reduce" >> beam.CombineGlobally(sums),
            "failed": outputs.failed,
        }


def run(stage_run: StageRun, flags: list[str]) -> None:
    """Run a local stage on all groups as a Beam pipeline, and wait until it has ended.

    The workers read the groups' slices from files, and write the results of each block
    and the totals of all blocks to files: nothing is returned. If the groups are the
    coordinates of slices that workers have, the workers exchange these: a shuffle by
    block of coordinates. `flags` are the options of the pipeline, as on a command line;
    one of them names the runner.
    """
    p = beam.Pipeline(options=PipelineOptions(flags))
    # Each file with slices is read once, and cut by blocks of coordinates.
    columns = bool(stage_run.pieces)
    loaded = (
        p
        | "Ranges" >> beam.Create(stage_run.pieces if columns else stage_run.starts)
        # Without it the runner fuses these steps, and one worker reads all groups.
        | "Spread" >> beam.Reshuffle()
    )
    if columns:
        parts = loaded | "Cut" >> beam.FlatMapTuple(stage_run.parts)
        grouped = parts | "Columns" >> beam.GroupByKey()
        loaded = grouped | "Read" >> beam.FlatMapTuple(stage_run.blocks)
    else:
        loaded = loaded | "Read" >> beam.FlatMap(stage_run.blocks)
    staged = loaded | "Groups" >> _Stage(stage_run.ops, stage_run.job, stage_run.report)
    _ = staged["totals"] | "Write" >> beam.Map(stage_run.write_totals)
    p.run().wait_until_finish()


# ---------------------------------------------------------------------------------
# In the user's own pipeline


class MapReduce(beam.PTransform):
    """A planned function as a transform, for pipelines of your own on any runner.

    Its input is a collection of pairs of a group index, from 0 to n - 1, and the
    group's slice of one argument: a pytree of arrays. Its result is a dict of two
    collections: `"results"` has one element, the result of the planned function;
    `"failed"` has pairs of a group index and the reason for which that group was
    dropped. The plan must have one round of communication, no loop around it, and
    reduced results only; for others there is `drjax.backends.beam.compile`.

    Args:
      plan: The plan, as made or loaded.
      *args: The arguments of the planned function; `...` for the one whose slices come
        through the pipeline.
      **options: `block_size`, `on_error`, `min_groups` and `check_nans`, as in
        `drjax.backends.EngineOptions`.

    Raises:
      DrjaxTypeError, DrjaxValueError: An option or argument is wrong, or the plan is
        not such a plan.

    Example:
      >>> import apache_beam as beam
      >>> import drjax, jax.numpy as jnp, numpy as np
      >>> from drjax.backends.beam import MapReduce
      >>> mean = drjax.program(clients=4)(drjax.reduce_mean)
      >>> plan = drjax.make_plan(mean)(jnp.zeros(4))
      >>> with beam.Pipeline("FnApiRunner") as p:
      ...     slices = p | beam.Create([(i, np.float32(i)) for i in range(4)])
      ...     outputs = slices | MapReduce(plan, ...)
      ...     _ = outputs["results"] | beam.Map(lambda mean: print(float(mean)))
      1.5
    """

    def __init__(self, plan: Plan, *args: Any, **options: Any):
        super().__init__()
        self.stage, self.results_from_totals = one_round.split(
            plan, args, EngineOptions.checked(**options)
        )

    def expand(self, input_or_inputs: Any) -> Any:
        # The job, with the plan file, is pickled into the pipeline: there is no folder.
        job = self.stage.job
        staged = (
            input_or_inputs
            # Both bounds, as Beam would otherwise choose the size by timing batches.
            | "Batch" >> beam.BatchElements(job.size, job.size)
            | "Block" >> beam.Map(block_of_pairs, self.stage.lazy)
            | "Groups" >> _Stage(job.ops, lambda: job)
        )
        results = staged["totals"] | "Server" >> beam.Map(self.results_from_totals)
        return {"results": results, "failed": staged["failed"]}
