"""The Beam backend: each run of a stage of the groups is a pipeline.

Input: a plan and options. Output: a `Runner`; or `MapReduce`, the same as a transform
for pipelines of users.

The driver keeps the server's work, loops and checkpoints; a round's pipeline reads
groups from files, runs blocks of them, and combines their partial reductions on the
workers.

Invariants: a failed pipeline changes nothing: it runs again from the same files.

Sharp edges: every round starts its workers again, some seconds with the local runner.
The driver's process is not the pipeline's, as Beam's local runner hangs where a worker
dies.
"""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from drjax._errors import DrjaxValueError
from drjax._extras import needed
from drjax.engines.beam import file_sinks
from drjax.engines.beam.file_exchange import FileExchange, Run, StageRun
from drjax.engines.core.driver import Runner
from drjax.engines.core.options import EngineOptions
from drjax.plan import Plan

_QUIET = "--default_sdk_harness_log_level=ERROR"


def compile(
    plan: Plan,
    *,
    workers: int = 2,
    runner: str = "FnApiRunner",
    flags: Sequence[str] = (),
    folder: str | None = None,
    keep: dict[Any, Any] | None = None,
    **options: Any,
) -> Runner:
    """A function that runs the plan on Apache Beam, a pipeline for each round.

    Args:
      plan: The plan.
      workers: The number of worker processes of the default runner, on this machine;
        with 1, pipelines run in a thread of this process. For other runners, the number
        of workers for which the default block size is chosen.
      runner: The name of the runner, as for `beam.Pipeline`.
      flags: The options of the pipelines, as on a command line:
        `["--job_endpoint=..."]`.
      folder: The folder in which the driver and the workers exchange files: any path
        that Beam's `FileSystems` knows and all of them see. Default: a temporary one.
      keep: Which partitioned results are arguments of the next call: a dict from
        results to arguments. `{1: 0}` means that element 1 of what the function returns
        is positional argument 0 of the next call, both counted from 0. The function
        returns a `Kept` for each, whose slices stay in files in `folder` until the
        handle is used up or the `Runner` is closed; with the option `checkpoint`, they
        are in the memory of this process instead.
      **options: See `drjax.backends.EngineOptions`: `block_size`, `on_error`,
        `min_groups`, `check_nans`, `retries` of a pipeline that fails, `checkpoint`,
        `progress`. Runners have time limits of their own, so there is no `timeout`.

    Returns:
      A `drjax.engines.core.driver.Runner` with the signature of the planned
      function. Close it, or use it in a `with` block.

    Raises:
      EngineError: Beam is not installed; (when called) a group failed, or too few
        survive, or the pipeline failed.
      DrjaxTypeError, DrjaxValueError: A wrong option; the plan has a secure sum.
      MeshError: The plan runs a group on several devices.

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
    checked = EngineOptions.checked(**options)
    # A time limit needs a worker to replace; Beam's workers belong to the runner.
    if checked.timeout is not None:
        raise DrjaxValueError(
            "Beam takes no timeout: give the runner's own limits as flags."
        )
    settings = [f"--runner={runner}", _QUIET, *flags]
    in_thread = runner == "FnApiRunner" and workers == 1
    # The default runs workers as threads of one process, which share the GIL.
    if runner == "FnApiRunner" and not in_thread:
        # Before the user's flags: of a flag that occurs twice, the last one counts.
        settings[1:1] = [
            f"--direct_num_workers={workers}",
            "--direct_running_mode=multi_processing",
        ]
    pipelines = Pipelines(workers, settings, folder, in_thread)
    # A checkpoint has arrays, and no files of another folder.
    pipelines.stays = "" if checked.checkpoint is not None else "kept"
    return Runner(plan, pipelines, checked, keep=keep)


class Pipelines(FileExchange):
    """An engine that runs each local stage of a plan as one Beam pipeline.

    `flags` are the options of the pipelines, as on a command line; one of them names
    the runner. The driver and the workers exchange files in `folder`; None: a temporary
    one of this machine. `in_thread`: a pipeline runs in a thread of this process, not
    in a subprocess.
    """

    def __init__(
        self, workers: int, flags: list[str], folder: str | None, in_thread: bool
    ):
        super().__init__(workers, file_sinks, folder)
        self._flags, self._in_thread = flags, in_thread

    def start(self, stage_run: StageRun, folder: Path) -> Run:
        # Imported late: both need packages of the `beam` extra.
        from drjax.engines.beam import subprocess_run, transforms

        run = functools.partial(transforms.run, stage_run, self._flags)
        # A thread starts in less time, but only a subprocess that hangs can be killed.
        if self._in_thread:
            return subprocess_run.ThreadRun(run, folder)
        return subprocess_run.SubprocessRun(run, folder)
