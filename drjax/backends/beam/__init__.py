"""The Beam backend: each run of a stage of the groups is a pipeline.

The driver keeps the server's work, loops and checkpoints; a round's pipeline reads
groups from files, runs blocks of them, and combines their partial results on the
workers. `MapReduce` is the same as a transform for pipelines of your own.
"""

import itertools
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from drjax._errors import DrjaxValueError
from drjax.backends.beam import files
from drjax.backends.engine import spool
from drjax.backends.engine.blocks import blocks
from drjax.backends.engine.driver import Runner
from drjax.backends.engine.extras import needed
from drjax.backends.engine.groups import Lazy
from drjax.backends.engine.options import Options
from drjax.backends.engine.pool import Call, Results
from drjax.backends.engine.work import Block, Done
from drjax.plan import Plan

_NOBODY = Block(np.zeros(0, np.int32), np.zeros(0, bool), [])
_QUIET = "--default_sdk_harness_log_level=ERROR"


def compile(
    plan: Plan,
    *,
    workers: int = 2,
    runner: str = "FnApiRunner",
    flags: Sequence[str] = (),
    folder: str | None = None,
    **options: Any,
) -> Runner:
    """A function that runs the plan on Apache Beam, a pipeline for each round.

    Args:
      plan: The plan.
      workers: How many worker processes of the default runner, on this machine. One
        is a thread of this process.
      runner: The runner, as for `beam.Pipeline`.
      flags: Its options, as on a command line: `["--job_endpoint=..."]`.
      folder: Where the driver and the workers exchange files: any path that Beam's
        `FileSystems` knows and all of them see. Default: a temporary one.
      **options: See `drjax.backends.engine.options.Options`: `block_size`, `on_error`,
        `min_groups`, `check_nans`, `retries` of a pipeline that fails, `checkpoint`,
        `progress`. Runners have time limits of their own, so there is no `timeout`.

    Returns:
      A `drjax.backends.engine.driver.Runner` with the signature of the planned
      function. Close it, or use it in a `with` block.

    Raises:
      EngineError: Beam is not installed; (when called) a group failed, or too few
        survive, or the pipeline failed.
      DrjaxTypeError, DrjaxValueError: A wrong option.

    Example:
      >>> import drjax, jax.numpy as jnp
      >>> import drjax.backends.beam
      >>> mean = drjax.program(clients=4)(drjax.reduce_mean)
      >>> plan = drjax.make_plan(mean)(jnp.arange(4.0))
      >>> with drjax.backends.beam.compile(plan, workers=1) as run:
      ...     print(run(jnp.arange(4.0)))
      1.5
    """
    needed("apache_beam", "beam", "drjax.backends.beam")
    checked = Options.checked(**options)
    if checked.timeout is not None:
        raise DrjaxValueError(
            "Beam takes no timeout: give the runner's own limits as flags."
        )
    settings = [f"--runner={runner}", _QUIET, *flags]
    here = runner == "FnApiRunner" and workers == 1
    if runner == "FnApiRunner" and not here:
        settings[1:1] = [
            f"--direct_num_workers={workers}",
            "--direct_running_mode=multi_processing",
        ]
    return Runner(plan, Pipelines(workers, settings, folder, here), checked)


def __getattr__(name: str) -> Any:
    if name == "MapReduce":
        needed("apache_beam", "beam", "drjax.backends.beam")
        from drjax.backends.beam.transforms import MapReduce

        return MapReduce
    raise AttributeError(name)


class Pipelines:
    """A `drjax.backends.engine.pool.Engine`; each run of a stage is a pipeline."""

    def __init__(
        self, workers: int, flags: list[str], folder: str | None, here: bool
    ):  # fmt: skip
        self.workers, self._flags, self._shared = workers, flags, folder
        self._here = here
        self._ours: Path | None = None

    def open(self) -> None:
        if self._ours is None:
            self._ours = Path(tempfile.mkdtemp(prefix="drjax-beam-"))

    def close(self) -> None:
        if self._ours is not None:
            shutil.rmtree(self._ours, ignore_errors=True)
            self._ours = None

    def results(self, call: Call) -> Results:
        from drjax.backends.beam import process, transforms

        assert self._ours is not None
        folder = f"{self._shared or self._ours}/{uuid.uuid4().hex}"
        files.make(folder)
        run = None
        try:
            files.write(f"{folder}/job", spool.Job.of(call).packed())
            starts, failed = self._write(call, folder)
            yield _NOBODY, Done([], [], failed, 0, 0.0)
            lazy = [x if _in_files(x) else None for x in call.rows]
            reader = transforms.ReadBlocks(folder, lazy, call.size)
            pipeline = transforms.Pipeline(
                self._flags, folder, call.ops, starts, reader
            )
            seen: set[str] = set()
            for left in reversed(range(call.options.retries + 1)):
                run = (process.Here if self._here else process.Run)(
                    pipeline, self._ours
                )
                while not run.wait(0.1):
                    yield from self._done(folder, seen)
                yield from self._done(folder, seen)
                if (error := run.error()) is None:
                    break
                run.end()  # and its workers
                if not left:
                    raise RuntimeError(f"the pipeline failed: {error}")
                call.lost(f"a pipeline failed: {error[:500]}")
            totals = transforms.totals_of(files.read(f"{folder}/totals"))
            yield _NOBODY, Done(totals[:-1], [], {}, 0, 0.0)
        finally:
            if run is not None:
                run.end()
            files.remove(folder)

    def _write(self, call: Call, folder: str) -> tuple[list[int], dict[int, str]]:
        """Write the groups that workers cannot read themselves.

        Returns the first groups of the ranges that workers take, and why groups cannot
        take part.
        """
        starts, failed = [], {}
        others = [x for x in call.rows if not _in_files(x)]
        bounds = {
            b for x in call.rows if _in_files(x) for b in x.source.groups.bounds()
        }
        if bounds:
            edges = sorted(bounds)
            cut = itertools.chain.from_iterable(
                blocks([x[i:j] if isinstance(x, np.ndarray) else x for x in others],
                       call.alive[i:j], j - i, i)
                for i, j in itertools.pairwise(edges)
            )  # fmt: skip
        else:
            cut = blocks(others, call.alive, call.size)
        for block, why in cut:
            start = int(block.groups[0])
            data = spool.packed({}, [block.valid, *block.rows])
            files.write(f"{folder}/rows-{start:012}", data)
            starts.append(start)
            failed.update(why)
        return starts, failed

    def _done(self, folder: str, seen: set[str]) -> Iterator[tuple[Block, Done]]:
        for path in files.listed(f"{folder}/block-"):
            if path not in seen:
                seen.add(path)
                yield spool.unpacked_done(files.read(path))


def _in_files(x: Any) -> bool:
    """Whether workers can read a value themselves."""
    return isinstance(x, Lazy) and x.source.groups.bounds() is not None
