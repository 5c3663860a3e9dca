"""The worker: a block of groups, through one stage of a plan file.

Input: a plan file, a `Task`, and the stage's global inputs, as numpy arrays. Output: a
`BlockResult`. `run` is the entry point in a worker's process; it keeps the latest plan
files with their compiled stages, by the hash of the file.

Invariants: a failure of one group is reported for that group alone. A block that fails
or yields NaN runs again to find which groups do, each alone or by halving the block. A
block is padded to the block size, so that a stage compiles once.

Sharp edges: a group of a block that fails runs more than once. What fails in a block
and in no group alone is raised as it is: then the block, not a group, was too much, as
for memory.
"""

import functools
import os
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from drjax._plan_file.load import plan_from_bytes
from drjax.backends.engine.messages import (
    Block,
    BlockResult,
    File,
    Task,
    WorkerState,
    rounds_of,
)
from drjax.plan import Stage

_FEW = 64  # groups that are tried one by one
_HALVINGS = 128  # most batches to find them


class LoadedPlan:
    """A plan file in a worker, with its stages as they are compiled."""

    def __init__(self, file: File):
        self.file = file
        # The plan's precision: the worker's process may be set to another.
        with jax.enable_x64(file.x64):
            plan = plan_from_bytes(
                Path(f"{file.key[:12]}.drjax"),
                file.data,
                custom_calls=file.custom_calls,
            )
        self._stages = [(r.local, len(r.partials)) for _, r in rounds_of(plan)]
        # By index of the stage, and whether it is the batched function.
        self._compiled: dict[tuple[int, bool], Any] = {}

    def run(self, task: Task, shared: list[np.ndarray]) -> BlockResult:
        """Run a block; `shared`: the global inputs of the stage, in order."""
        with jax.enable_x64(self.file.x64):
            return self._run(task, shared)

    def _run(self, task: Task, shared: list[np.ndarray]) -> BlockResult:
        """As `run`, in the plan's precision."""
        start = time.perf_counter()
        stage, partials = self._stages[task.stage]
        block, failed, outs, error = task.block, {}, [], None
        # The partial reductions include the groups that failed, so the block runs
        # again.
        for _ in range(2):  # as it is, then without the groups that failed
            if not block.valid.any():
                break
            try:
                outs, error = self._batch(task, stage, block, shared), None
            except Exception as caught:
                outs, error = [], caught
            if error is None and not (task.check_nans and _nans(outs, block, partials)):
                break
            if error is None:
                # A NaN in a reduction does not say whose it is.
                suspects = self._suspects(task, stage, block, shared, partials)
            else:
                # An error says nothing of groups, and a half might raise again.
                suspects = np.flatnonzero(block.valid)
            failures = self._failing(task, stage, block, shared, suspects)
            if not failures:
                break
            failed |= failures
            if not task.drop:
                break
            block = block.without_failed(failures)
        # No single group raises: memory, a bug of the batched function, or an error
        # that comes and goes. To drop groups for that would hide it.
        if error is not None and (not failed or (task.drop and block.valid.any())):
            raise error  # of no group alone
        if not block.valid.any() or (failed and not task.drop):
            outs = []
        # Without the padding.
        count = len(block.groups)
        return BlockResult(
            outs[:partials],
            [x[:count] for x in outs[partials:]],
            failed,
            os.getpid(),
            time.perf_counter() - start,
        )

    def _batch(self, task: Task, stage: Stage, block: Block, shared) -> list:
        """The outputs of the batched function for a block, with padding."""
        # One shape for all blocks, so that XLA compiles the stage once.
        padded = block.padded(task.size)
        args = _inputs(stage, shared, padded.slices)
        call = self._call(task.stage, batch=True)
        # On the host now, so that an error of the device is raised in this block.
        return [np.asarray(y) for y in call(padded.valid, padded.groups, *args)]

    def _suspects(
        self, task: Task, stage: Stage, block: Block, shared, partials: int
    ) -> np.ndarray:
        """The positions in a block of some groups; all that yield NaN are among them.

        Halving the block leaves few of many groups. Where many groups yield a NaN it
        ends, as trying each is then faster.

        Args:
          task: The task.
          stage: Its stage.
          block: The block, without groups that failed before.
          shared: The global inputs of the stage.
          partials: How many of the stage's outputs are partial reductions.
        """
        suspects, parts, left = [], [np.flatnonzero(block.valid)], _HALVINGS
        while parts:
            part = parts.pop()
            if len(part) <= _FEW or left <= 0:
                suspects.append(part)
                continue
            middle = len(part) // 2
            for half in (part[middle:], part[:middle]):
                # Masked, not cut: a smaller block would be compiled again.
                only = block.without(~np.isin(np.arange(len(block.groups)), half))
                left -= 1
                if _nans(self._batch(task, stage, only, shared), only, partials):
                    parts.append(half)
        return np.sort(np.concatenate(suspects)) if suspects else np.zeros(0, int)

    def _failing(
        self, task: Task, stage: Stage, block: Block, shared, suspects: np.ndarray
    ) -> dict[int, str]:
        """Why groups fail, by index: each runs alone, by the per-group function.

        Args:
          task: The task.
          stage: Its stage.
          block: The block.
          shared: The global inputs of the stage.
          suspects: The positions in the block of the groups to try.
        """
        # The per-group function: an error in it has one possible cause.
        call, failures = self._call(task.stage, batch=False), {}
        for i in suspects:
            args = _inputs(stage, shared, [x[i] for x in block.slices])
            group = block.groups[i]
            try:
                outs = [np.asarray(y) for y in call(group, *args)]
            except Exception as error:
                failures[int(group)] = f"{type(error).__name__}: {error}"
                continue
            if task.check_nans:
                names = [
                    v.name
                    for v, y in zip(stage.outputs, outs, strict=True)
                    if _has_nan(y)
                ]
                if names:
                    failures[int(group)] = f"it yields NaN as {', '.join(names)}"
        return failures

    def search(self, task: Task, shared: list[np.ndarray], begin: Any) -> BlockResult:
        """Run the groups that take part one by one, to find one that takes long.

        Args:
          task: The task.
          shared: The global inputs of the stage.
          begin: Called before each group with its index, twice: first and last.

        Returns:
          A result without values.
        """
        start, block = time.perf_counter(), task.block
        stage = self._stages[task.stage][0]
        with jax.enable_x64(self.file.x64):
            call, compiled = self._call(task.stage, batch=False), None
            for i in np.flatnonzero(block.valid):
                args = _inputs(stage, shared, [x[i] for x in block.slices])
                # `call` is partial over the stage's constants: `lower` needs them too.
                args = *call.args, block.groups[i], *args
                with suppress(Exception):  # `run` reports what fails
                    # Compiling is no part of a group's time.
                    compiled = compiled or call.func.lower(*args).compile()
                    begin(int(block.groups[i]), int(block.groups[i]))
                    jax.block_until_ready(compiled(*args))
        return BlockResult([], [], {}, os.getpid(), time.perf_counter() - start)

    def _call(self, index: int, batch: bool):
        """A function of a stage with its constants, compiled when it is first used.

        Args:
          index: The index of the stage in `rounds_of`.
          batch: Whether it is the batched function, or the per-group one.
        """
        if (index, batch) not in self._compiled:
            exported = self._stages[index][0].forms
            part = exported.batched if batch else exported.per_group
            # The exported function itself, without the guards against vmap and grad.
            compiled = jax.jit(part.function.call)
            self._compiled[index, batch] = functools.partial(compiled, *exported.consts)
        return self._compiled[index, batch]


def _inputs(stage: Stage, shared: list, slices: list) -> list:
    """The inputs of a stage, in order, from its global and its partitioned ones."""
    shared_, slices_ = iter(shared), iter(slices)
    return [next(slices_ if v.partitioned else shared_) for v in stage.inputs]


def _nans(outs: list, block: Block, partials: int) -> bool:
    """Whether a block yields a NaN.

    Args:
      outs: The outputs of the batched function.
      block: The block; its masked groups do not count.
      partials: How many of the outputs are partial reductions.
    """
    return any(map(_has_nan, outs[:partials])) or any(
        _has_nan(x[: len(block.groups)][block.valid]) for x in outs[partials:]
    )


def _has_nan(x: np.ndarray) -> bool:
    """Whether an array of floats has a NaN."""
    return jax.numpy.issubdtype(x.dtype, np.inexact) and bool(np.isnan(x).any())


# ---------------------------------------------------------------------------------
# In a worker's process

_files: dict[str, LoadedPlan] = {}  # the latest last
_state = WorkerState()
_lock = threading.Lock()
_skipped: set[int] = set()
_MOST = 4


def run(file: File, task: Task, shared: list[np.ndarray]) -> BlockResult:
    """The result of a task in this process, by the plan file that it keeps."""
    # Its driver gave up; the pid 0 marks a result that does not count.
    if task.number in _skipped:
        _skipped.remove(task.number)
        return BlockResult([], [], {}, 0, 0.0)
    with _lock:
        loaded = _files.pop(file.key, None) or LoadedPlan(file)
        # Back at the end: the least recently used file is the first.
        _files[file.key] = loaded
        while len(_files) > _MOST:
            _files.pop(next(iter(_files)))

    def begin(first: int, last: int) -> None:
        _state.task, _state.since = task.number, time.time()
        _state.groups = first, last

    try:
        if task.search:
            return loaded.search(task, shared, begin)
        begin(int(task.block.groups[0]), int(task.block.groups[-1]))
        return loaded.run(task, shared)
    finally:
        _state.groups = None
        _skipped.discard(task.number)


def skip(number: int) -> None:
    """Do not begin a task that this process was sent: its result is not needed."""
    _skipped.add(number)  # without the lock, which is held while a file is loaded


def state() -> WorkerState:
    """What this process is doing."""
    return replace(_state, seconds=time.time() - _state.since)
