"""Engines whose workers share nothing with the driver but a folder of files.

Input: a `StageCall`. Output: blocks with their results, and in the end the totals that
the workers have combined. An engine says how to start a `StageRun`, and with which file
system.

The driver writes the stage and the slices that workers cannot read themselves, starts a
run, and reads the results of blocks while it goes on; a run that fails is started
again, `retries` times:

    job | slices-START | block-GROUP (results of a block) | totals

Invariants: every file is written whole or not at all. A block that ran twice has
written the same file twice, and is counted once. The totals must be of as many groups
as were reported, else the call fails.

Sharp edges: the totals are combined by the workers in any order, so that the last bits
of a sum may differ between runs.
"""

import itertools
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from drjax.backends.engine import temporary_folders, wire_format
from drjax.backends.engine.blocks_of_groups import LoadedBlock, blocks_of_groups
from drjax.backends.engine.combine import Totals
from drjax.backends.engine.job import Job
from drjax.backends.engine.messages import Block, BlockResult
from drjax.backends.engine.protocols import Results, StageCall
from drjax.backends.groups import Lazy


class Files(Protocol):
    """A file system that the driver and all workers see. A module can be one."""

    def make(self, folder: str) -> None: ...

    def read(self, path: str) -> bytes: ...

    def write(self, path: str, data: bytes) -> None:
        """Write a file whole or not at all; a file of that name is replaced."""
        ...

    def listed(self, prefix: str) -> list[str]:
        """The paths of the files that begin with `prefix`."""
        ...

    def remove(self, folder: str) -> None: ...


class Run(Protocol):
    """A stage run that was started, as a process or a thread."""

    def wait(self, seconds: float) -> bool:
        """Wait at most so many seconds; returns whether the run has ended."""
        ...

    def error(self) -> str | None:
        """Why the run failed, once it has ended; None if it did not fail."""
        ...

    def end(self) -> None:
        """End the run and its workers."""
        ...


@dataclass(frozen=True)
class StageRun:
    """A run of a stage of the groups, for workers: it can be sent to them.

    Attributes:
      files: The file system that the driver and all workers see, a `Files`.
      folder: The folder of the run there.
      ops: The operations of the stage's partial reductions.
      starts: The indices of the first groups of the ranges that workers take.
      lazy: For each partitioned input a `Lazy` that workers can read; None if its
        slices are in a file of the run.
      size: The number of groups in a block.
    """

    files: Any
    folder: str
    ops: tuple[str, ...]
    starts: list[int]
    lazy: list[Lazy | None]
    size: int

    def job(self) -> Job:
        """Read the job from its file: the stage with its global inputs."""
        return Job.from_bytes(self.files.read(f"{self.folder}/job"))

    def blocks(self, start: int) -> Iterator[LoadedBlock]:
        """Read the blocks of a range of groups; `start` is one of `starts`."""
        # Digits are padded, so that a listing sorts by group.
        name = f"{self.folder}/slices-{start:012}"
        _, (alive, *stacks) = wire_format.from_bytes(self.files.read(name))
        arrays = iter(stacks)
        slices = [next(arrays) if x is None else x for x in self.lazy]
        yield from blocks_of_groups(slices, alive, self.size, start)

    def report(self, block: Block, result: BlockResult) -> None:
        """Write the result of a block to a file, for the driver.

        Without the partial reductions: workers combine these themselves.
        """
        # Without partial reductions: those the workers combine among themselves.
        data = wire_format.result_to_bytes(block, replace(result, partials=[]))
        self.files.write(f"{self.folder}/block-{block.groups[0]:012}", data)

    def write_totals(self, totals: Totals) -> None:
        """Write the combined partial reductions to a file, for the driver.

        `totals` has the number of groups last.
        """
        # JSON has the None; "there" is the key of the file format.
        present = [x is not None for x in totals]
        data = wire_format.to_bytes(
            {"there": present}, [x for x in totals if x is not None]
        )
        self.files.write(f"{self.folder}/totals", data)

    def read_totals(self) -> Totals:
        """Read what `write_totals` wrote."""
        header, arrays = wire_format.from_bytes(
            self.files.read(f"{self.folder}/totals")
        )
        remaining = iter(arrays)
        return [next(remaining) if present else None for present in header["there"]]


class FileExchange:
    """A `drjax.backends.engine.protocols.Engine` that runs whole stages over files.

    Args:
      workers: How many workers there are.
      files: The file system that the driver and all workers see.
      folder: The folder to use there. Default: a temporary one.
    """

    def __init__(self, workers: int, files: Files, folder: str | None = None):
        self.workers, self._files, self._folder = workers, files, folder
        self._own_folder: Path | None = None

    def start(self, stage_run: StageRun, folder: Path) -> Run:
        """Start a stage run, in workers; each engine of this kind defines it.

        Args:
          stage_run: What workers are sent.
          folder: A local folder for what the driver alone needs.
        """
        raise NotImplementedError

    def open(self) -> None:
        if self._own_folder is None:
            self._own_folder = temporary_folders.make()

    def close(self) -> None:
        if self._own_folder is not None:
            temporary_folders.remove(self._own_folder)
            self._own_folder = None

    def results(self, call: StageCall) -> Results:
        assert self._own_folder is not None
        # A folder for each stage run, as several drivers may share the parent.
        folder = f"{self._folder or self._own_folder}/{uuid.uuid4().hex}"
        self._files.make(folder)
        run = None
        try:
            self._files.write(f"{folder}/job", call.job.to_bytes())
            starts, failed = self._write(call, folder)
            # Groups that could not be read fail now, before any worker is started.
            yield _EMPTY_BLOCK, BlockResult([], [], failed, 0, 0.0)
            lazy = [x if _readable_by_workers(x) else None for x in call.slices]
            stage_run = StageRun(
                self._files, folder, call.job.ops, starts, lazy, call.job.size
            )
            seen: set[str] = set()
            reported = 0
            # The whole run again: there is no way to ask workers for one block.
            for left in reversed(range(call.options.retries + 1)):
                run = self.start(stage_run, self._own_folder)
                while True:
                    # Before the listing: whatever was written before the end is then
                    # seen.
                    ended = run.wait(0.1)
                    for block, result in self._new_results(folder, seen):
                        reported += int(block.without_failed(result.failed).valid.sum())
                        yield block, result
                    if ended:
                        break
                if (error := run.error()) is None:
                    break
                run.end()
                if not left:
                    raise RuntimeError(f"the run failed: {error}")
                call.lost(f"a run failed: {error[:500]}")
            *totals, count = stage_run.read_totals()
            yield _EMPTY_BLOCK, BlockResult(totals, [], {}, 0, 0.0)
            # A runner that lost or repeated elements silently would give wrong sums.
            if int(count or 0) != reported:
                raise RuntimeError(
                    f"the totals are of {count} groups, but the reported blocks have "
                    f"{reported}"
                )
        finally:
            if run is not None:
                run.end()
            self._files.remove(folder)

    def _write(self, call: StageCall, folder: str) -> tuple[list[int], dict[int, str]]:
        """Write the slices that workers cannot read themselves to files.

        Args:
          call: The run of the stage.
          folder: The folder of the stage run.

        Returns:
          `(starts, failed)`: the first groups of the ranges that workers take, and why
          groups cannot take part, by index.
        """
        starts, failed = [], {}
        others = [x for x in call.slices if not _readable_by_workers(x)]
        bounds = {
            b
            for x in call.slices
            if _readable_by_workers(x)
            for b in x.source.groups.bounds()
        }
        if bounds:
            # Ranges end at the files' own bounds, so that a worker opens few files.
            edges = sorted(bounds)
            parts = itertools.chain.from_iterable(
                blocks_of_groups(
                    [x[i:j] if isinstance(x, np.ndarray) else x for x in others],
                    call.alive[i:j],
                    j - i,
                    i,
                )
                for i, j in itertools.pairwise(edges)
            )
        else:
            parts = blocks_of_groups(others, call.alive, call.job.size)
        for block, why in parts:
            start = int(block.groups[0])
            data = wire_format.to_bytes({}, [block.valid, *block.slices])
            self._files.write(f"{folder}/slices-{start:012}", data)
            starts.append(start)
            failed.update(why)
        return starts, failed

    def _new_results(
        self, folder: str, seen: set[str]
    ) -> Iterator[tuple[Block, BlockResult]]:
        """Read the results of blocks that workers have reported since the last call.

        Args:
          folder: The folder of the stage run.
          seen: The files that were read before; new ones are added.
        """
        for path in self._files.listed(f"{folder}/block-"):
            # Each file once: after a retry the same blocks are written again.
            if path not in seen:
                seen.add(path)
                yield wire_format.result_from_bytes(self._files.read(path))


_EMPTY_BLOCK = Block(np.zeros(0, np.int32), np.zeros(0, bool), [])


def _readable_by_workers(x: Any) -> bool:
    """Whether workers can read a partitioned input without being sent its slices.

    True for a `Lazy` whose source knows at which groups its parts begin, as Parquet
    files do.
    """
    return isinstance(x, Lazy) and x.source.groups.bounds() is not None
