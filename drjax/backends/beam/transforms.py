"""The Beam pipeline: blocks of groups through a stage, partial results combined.

Workers of any runner import this module; they get files and numpy arrays only.
"""

# pyright: reportMissingImports=false

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import apache_beam as beam
import numpy as np
from apache_beam.options.pipeline_options import PipelineOptions

from drjax.backends.beam.files import read, write
from drjax.backends.engine import single, spool
from drjax.backends.engine.blocks import block_of, blocks
from drjax.backends.engine.combine import Totals, add
from drjax.backends.engine.groups import Lazy
from drjax.backends.engine.options import Options
from drjax.backends.engine.spool import Job
from drjax.backends.engine.work import Block
from drjax.plan import Plan


class Sums(beam.CombineFn):
    """Partial results of blocks, combined as `drjax.backends.engine.combine` does."""

    def __init__(self, ops: tuple[str, ...]):
        self.ops = ops

    def create_accumulator(self) -> Totals:
        return [None] * len(self.ops)

    def add_input(self, mutable_accumulator: Totals, element: list) -> Totals:
        return add(self.ops, mutable_accumulator, element)

    def merge_accumulators(self, accumulators: Iterable[Totals]) -> Totals:
        total = self.create_accumulator()
        for other in accumulators:
            total = add(self.ops, total, other)
        return total

    def extract_output(self, accumulator: Totals) -> Totals:
        return accumulator


class RunBlocks(beam.DoFn):
    """Blocks, with why groups in them cannot take part, through a stage.

    It yields partial results, and the number of groups as one more of them. What became
    of each block is written to a file for the driver, if there is a folder.
    """

    def __init__(self, load: Callable[[], Job], folder: str | None = None):
        self.load, self.folder = load, folder

    def setup(self) -> None:
        self.job = self.load()

    def process(self, element: tuple[Block, dict[int, str]]) -> Iterator[Any]:
        (block, failed), job = element, self.job
        done = job.run(block, failed)
        if self.folder is not None:
            name = f"{self.folder}/block-{block.groups[0]:012}"
            write(name, spool.packed_done(block, replace(done, partials=[])))
        for group, why in done.failed.items():
            if not job.drop:
                raise RuntimeError(f"Group {group} failed in {job.where}: {why}.")
            yield beam.pvalue.TaggedOutput("failed", (group, why))
        if done.partials:
            good = block.valid & ~np.isin(block.groups, list(done.failed))
            yield [*done.partials, np.int64(good.sum())]


class _Stage(beam.PTransform):
    """`RunBlocks`, and its results combined: a list, in the end the groups' number."""

    def __init__(self, ops: tuple[str, ...], *job: Any):
        super().__init__()
        self.ops, self.job = ops, job

    def expand(self, input_or_inputs: Any) -> Any:
        run = beam.ParDo(RunBlocks(*self.job)).with_outputs("failed", main="partials")
        found = input_or_inputs | "Work" >> run
        sums = Sums((*self.ops, "sum"))
        return {
            "totals": found.partials | "Reduce" >> beam.CombineGlobally(sums),
            "failed": found.failed,
        }


class ReadBlocks(beam.DoFn):
    """Blocks of a range of groups, of files that the driver wrote and of the user's."""

    def __init__(self, folder: str, lazy: list[Lazy | None], size: int):
        self.folder, self.lazy, self.size = folder, lazy, size

    def process(self, element: int) -> Iterator[tuple[Block, dict[int, str]]]:
        _, (alive, *stacks) = spool.unpacked(read(f"{self.folder}/rows-{element:012}"))
        arrays = iter(stacks)
        rows = [next(arrays) if x is None else x for x in self.lazy]
        yield from blocks(rows, alive, self.size, element)


@dataclass(frozen=True)
class Pipeline:
    """A run of a stage.

    Attributes:
      flags: Options of Beam.
      folder: Where the files are.
      ops: The operations of the stage's partial reductions.
      starts: The first groups of the ranges that workers take.
      reader: What reads them.
    """

    flags: list[str]
    folder: str
    ops: tuple[str, ...]
    starts: list[int]
    reader: ReadBlocks

    def run(self) -> None:
        """Run it, here, to its end."""
        p = beam.Pipeline(options=PipelineOptions(self.flags))
        cut = (
            p
            | "Ranges" >> beam.Create(self.starts)
            | "Spread" >> beam.Reshuffle()
            | "Read" >> beam.ParDo(self.reader)
        )
        load = functools.partial(_load, f"{self.folder}/job")
        staged = cut | "Groups" >> _Stage(self.ops, load, self.folder)
        _ = staged["totals"] | "Write" >> beam.Map(_write_totals, self.folder)
        p.run().wait_until_finish()


def _load(path: str) -> Job:
    return Job.unpacked(read(path))


def _write_totals(totals: Totals, folder: str) -> None:
    there = [x is not None for x in totals]
    data = spool.packed({"there": there}, [x for x in totals if x is not None])
    write(f"{folder}/totals", data)


def totals_of(data: bytes) -> Totals:
    about, arrays = spool.unpacked(data)
    found = iter(arrays)
    return [next(found) if there else None for there in about["there"]]


# ---------------------------------------------------------------------------------
# In the user's own pipeline


class MapReduce(beam.PTransform):
    """A planned function as a transform, for pipelines of your own on any runner.

    Its input are pairs of a group's number, from 0 to n - 1, and the group's row of the
    arguments: a pytree of arrays. Its outputs are a dict of `"results"`, one element,
    what the planned function returns; and `"failed"`, pairs of a group's number and why
    it was dropped. The plan must have one round of communication, no loop around it,
    and reduced results only; for others there is `drjax.backends.beam.compile`.

    Args:
      plan: The plan, as made or loaded.
      *args: Its arguments; `...` for the one whose rows come through the pipeline.
      **options: `block_size`, `on_error`, `min_groups` and `check_nans`, as in
        `drjax.backends.engine.options.Options`.

    Raises:
      DrjaxTypeError, DrjaxValueError: Wrong options, arguments, or such a plan.

    Example:
      >>> import apache_beam as beam
      >>> import drjax, jax.numpy as jnp, numpy as np
      >>> from drjax.backends.beam import MapReduce
      >>> mean = drjax.program(clients=4)(drjax.reduce_mean)
      >>> plan = drjax.make_plan(mean)(jnp.zeros(4))
      >>> with beam.Pipeline("FnApiRunner") as p:
      ...     rows = p | beam.Create([(i, np.float32(i)) for i in range(4)])
      ...     found = rows | MapReduce(plan, ...)
      ...     _ = found["results"] | beam.Map(lambda mean: print(float(mean)))
      1.5
    """

    def __init__(self, plan: Plan, *args: Any, **options: Any):
        super().__init__()
        self.call, self.finish = single.split(plan, args, Options.checked(**options))

    def expand(self, input_or_inputs: Any) -> Any:
        call = self.call
        staged = (
            input_or_inputs
            | "Batch" >> beam.BatchElements(call.size, call.size)
            | "Block" >> beam.Map(block_of, call.rows)
            | "Groups" >> _Stage(call.ops, functools.partial(_same, Job.of(call)))
        )
        results = staged["totals"] | "Server" >> beam.Map(self.finish)
        return {"results": results, "failed": staged["failed"]}


def _same(job: Job) -> Job:
    return job
