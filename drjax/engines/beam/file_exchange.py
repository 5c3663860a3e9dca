"""Engines whose workers share nothing with the driver but a folder of files.

Input: a `StageCall`. Output: blocks with their results, and in the end the totals that
the workers have combined. An engine says how to start a `StageRun`, and with which file
system.

The driver writes the stage and the slices that workers cannot read themselves, starts a
run, and reads the results of blocks while it goes on; a run that fails is started
again, `retries` times:

    job | slices-START | block-GROUP (results of a block) | totals

Slices that stay between calls are in files, too: see `kept_files`.

Invariants: every file is written whole or not at all. A block that ran twice has
written the same file twice, and is counted once. The totals must be of as many groups
as were reported, else the call fails.

Sharp edges: the totals are combined by the workers in any order, so that the last bits
of a sum may differ between runs. Results of blocks are files, as Beam's local runner
gives nothing while a pipeline runs, neither metrics nor errors: `Pipeline.run` returns
at its end, and what a worker raised is text.
"""

import collections
import functools
import itertools
import time
import uuid
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from drjax._sharding.group_mesh import MeshAxes
from drjax.engines.beam import kept_files, temporary_folders
from drjax.engines.core import wire_format
from drjax.engines.core.blocks_of_groups import LoadedBlock, blocks_of_groups
from drjax.engines.core.combine import Totals
from drjax.engines.core.job import Job
from drjax.engines.core.messages import Block, BlockResult, refuse_group_mesh
from drjax.engines.core.options import checked_integer
from drjax.engines.core.protocols import Results, StageCall
from drjax.engines.slices.groups import Lazy
from drjax.engines.slices.slices import HostSlices, Slices
from drjax.engines.slices.worker_slices import Keeping, WorkerSlices
from drjax.plan import Value

_LOOK = 0.1  # seconds between looks for results of blocks, at least
_REST = 9  # times as long as a look takes, so that looks take a tenth of the time


class Files(Protocol):
    """A file system that the driver and all workers see. A module can be one.

    `make` creates a folder, and `remove` deletes one with its files. Folders and files
    are identified by their paths.
    """

    def make(self, folder: str) -> None: ...

    def read(self, path: str) -> bytes: ...

    def write(self, path: str, data: bytes) -> None:
        """Write a file, whole or not at all; replace an old file."""
        ...

    def listed(self, prefix: str) -> list[str]:
        """List the paths of all finished files whose paths begin with `prefix`."""
        ...

    def remove(self, folder: str) -> None: ...


class Run(Protocol):
    """A stage run that `FileExchange.start` has started, as a process or a thread."""

    def wait(self, seconds: float) -> bool:
        """Wait until the run ends, at most so many seconds; return whether it ended."""
        ...

    def error(self) -> str | None:
        """Return why the run failed; None if it did not. It must have ended."""
        ...

    def end(self) -> None:
        """Kill the run and its workers; a run that cannot be killed is waited for."""
        ...


@dataclass(frozen=True)
class StageRun:
    """One run of a local stage for all groups, as it is sent to the workers.

    The workers read the stage and the groups' slices from files in one folder of a
    shared file system, and write the results to files there.

    Attributes:
      files: The file system that the driver and all workers see, a `Files`.
      folder: The path of the run's folder in it.
      ops: The operations of what a block returns, from `combine.ops_of`.
      starts: The groups are divided into ranges, one for a worker at a time: the index
        of the first group of each range.
      lazy: For each partitioned input of the stage, in order, a `Lazy` that workers can
        read themselves; None if the run's folder has a file with its slices.
      size: The number of groups in a block.
      stay: For each output of the stage that is read later whether its slices stay in
        files; () if none do.
      kept: The path of the folder for these files.
      pieces: If blocks are of coordinates, and workers have the slices: the files that
        have them. Pairs of a path and a list of what `columns_of_file` takes.
    """

    files: Any
    folder: str
    ops: tuple[str, ...]
    starts: list[int]
    lazy: list[Slices | None]
    size: int
    stay: tuple[bool, ...] = ()
    kept: str = ""
    pieces: tuple[tuple[str, list[tuple[int, int, int]]], ...] = ()

    def job(self) -> Job:
        """Read the stage with its global inputs from the run's folder."""
        return Job.from_bytes(self.files.read(f"{self.folder}/job"))

    def parts(
        self, path: str, leaves: list[tuple[int, int, int]]
    ) -> Iterator[tuple[int, tuple[str, int, np.ndarray]]]:
        """Cut the slices of one file into the parts that blocks of coordinates need.

        The arguments are an element of `pieces`. For each of `starts` come pairs
        `(start, (path, position, part))`, with the position of an array in the file,
        and `[k, c, *t]` of it.
        """
        columns = kept_files.columns_of_file(self.files, path, leaves)
        for start in self.starts:
            for leaf, x in columns.items():
                yield start, (path, leaf, x[:, start : start + self.size])

    def blocks(
        self, start: int, parts: Iterable[tuple[str, int, np.ndarray]] | None = None
    ) -> Iterator[LoadedBlock]:
        """Read the groups of one range, in blocks of at most `size`; a worker calls it.

        `start` is one of `starts`. With each block, in the order of group indices,
        comes a dict from group index to reason, with the groups of the block whose data
        cannot be read. Of a range of coordinates, `parts` is what the method `parts`
        has yielded for it, of all files; None: the slices are read from the files.
        """
        # Digits are padded, so that a listing sorts by group.
        name = f"{self.folder}/slices-{start:012}"
        header, (alive, *stacks) = wire_format.from_bytes(self.files.read(name))
        columns: Any = None
        if parts is not None:
            columns = collections.defaultdict(dict)
            for path, leaf, x in parts:
                columns[path][leaf] = x
        arrays = iter(
            kept_files.slices_from_message(header["kept"], stacks, self.files, columns)
        )
        sent = lambda: HostSlices(None, next(arrays), start)
        slices = [sent() if x is None else x for x in self.lazy]
        yield from blocks_of_groups(slices, alive, self.size, start)

    def report(self, block: Block, result: BlockResult) -> None:
        """Write the result of a block to a file in the run's folder, for the driver.

        The slices of outputs for which `stay` is true are left out: they are written to
        another file, in the folder `kept`. The partial reductions are in none: workers
        combine these.

        A file for each block, and not a collection of the pipeline: the driver reads it
        while the pipeline runs, and after one that failed.
        """
        if self.stay:
            result = kept_files.store_staying_slices(
                self.files, self.kept, self.stay, block, result
            )
        data = wire_format.result_to_bytes(block, result)
        self.files.write(f"{self.folder}/block-{block.groups[0]:012}", data)

    def write_totals(self, totals: Totals) -> None:
        """Write the partial reductions over all groups to a file in the run's folder.

        `totals` has for each of `self.ops` the partial reduction over all groups, an
        array; for a fold the arrays of all blocks, stacked to `[blocks, *s]`. The last
        element is the number of groups that took part, as an array. Each is None if no
        group took part.
        """
        # JSON has the None; "there" is the key of the file format.
        present = [x is not None for x in totals]
        data = wire_format.to_bytes(
            {"there": present}, [x for x in totals if x is not None]
        )
        self.files.write(f"{self.folder}/totals", data)

    def read_totals(self) -> Totals:
        """Read the totals that a worker has written, as `write_totals` got them."""
        header, arrays = wire_format.from_bytes(
            self.files.read(f"{self.folder}/totals")
        )
        remaining = iter(arrays)
        return [next(remaining) if present else None for present in header["there"]]


class FileExchange(Keeping):
    """An engine whose workers share only a file system with the driver.

    The workers run a whole stage, and combine its partial reductions. A subclass
    defines `start`. The class implements `drjax.engines.core.protocols.Engine`.
    `folder` is the path of a folder for the files of stage runs; None: a temporary
    folder of this machine.
    """

    def __init__(self, workers: int, files: Files, folder: str | None = None):
        super().__init__()
        self.workers, self.stays = checked_integer("workers", workers, 1), ""
        self._files, self._folder = files, folder
        self._own_folder: Path | None = None
        self._kept_folders: set[str] = set()

    def start(self, stage_run: StageRun, folder: Path) -> Run:
        """Start the workers on a stage, without waiting for them; subclasses define it.

        The local `folder` is for files of the driver, such as logs.
        """
        raise NotImplementedError

    def check_mesh(self, axes: MeshAxes) -> None:
        refuse_group_mesh(axes, "Beam")

    def open(self) -> None:
        if self._own_folder is None:
            self._own_folder = temporary_folders.make()

    def close(self) -> None:
        self._remove_kept(used=set())
        self.generation += 1
        if self._own_folder is not None:
            temporary_folders.remove(self._own_folder)
            self._own_folder = None

    def fetch(self, value: Value, pieces: list[Any]) -> list[Sequence[np.ndarray]]:
        return [kept_files.read(self._files, path) for path in pieces]

    def results(self, call: StageCall) -> Results:
        assert self._own_folder is not None
        # A folder for each stage run, as several drivers may share the parent.
        parent = f"{self._folder or self._own_folder}"
        folder, kept = f"{parent}/{uuid.uuid4().hex}", ""
        self._files.make(folder)
        # What earlier calls have left, and no value has any more.
        tables = [x.table for x in [*self.in_use]]
        self._remove_kept(kept_files.folders_of(tables))
        if call.job.stay:
            kept = f"{parent}/kept-{uuid.uuid4().hex}"
            self._files.make(kept)
            self._kept_folders.add(kept)
        run = None
        try:
            self._files.write(f"{folder}/job", call.job.to_bytes())
            starts, failed = self._write(call, folder)
            # Groups that could not be read fail now, before any worker is started.
            yield _EMPTY_BLOCK, BlockResult([], [], failed)
            lazy = [x if _readable_by_workers(x) else None for x in call.slices]
            stage_run = StageRun(
                self._files, folder, call.job.ops, starts, lazy, call.block_size,
                call.job.stay, kept, _pieces(call.slices),
            )  # fmt: skip
            seen: set[str] = set()
            reported, pause = 0, _LOOK
            # The whole run again: there is no way to ask workers for one block.
            retry = call.options.retry("worker")
            for tries in range(retry.times + 1):
                run = self.start(stage_run, self._own_folder)
                while True:
                    # Before the listing: whatever was written before the end is then
                    # seen.
                    ended, until = False, time.monotonic() + pause
                    while not ended and time.monotonic() < until:
                        call.check()
                        ended = run.wait(_LOOK)
                    began = time.monotonic()
                    paths = self._files.listed(f"{folder}/block-")
                    # A listing of many files takes long, in some systems of few, too.
                    pause = max(_LOOK, _REST * (time.monotonic() - began))
                    for block, result in self._new_results(paths, seen):
                        if kept:
                            path = kept_files.path_of(kept, block)
                            result = replace(result, piece=path)
                        reported += int(block.without_failed(result.failed).valid.sum())
                        yield block, result
                    if ended:
                        break
                if (error := run.error()) is None:
                    break
                # Workers of the failed run may have outlived it, and still write files.
                run.end()
                if tries == retry.times:
                    raise RuntimeError(f"the run failed: {error}")
                wait = retry.delay(tries)
                call.lost(f"a run failed: {error[:500]}", "worker", wait)
                time.sleep(wait)
            *totals, count = stage_run.read_totals()
            yield _EMPTY_BLOCK, BlockResult(totals, [], {})
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

    def _remove_kept(self, used: Collection[str]) -> None:
        """Remove the folders of slices that stay, but for those that are used."""
        for folder in self._kept_folders - {*used}:
            self._files.remove(folder)
        self._kept_folders &= {*used}

    def _write(self, call: StageCall, folder: str) -> tuple[list[int], dict[int, str]]:
        """Write a file for each range of groups, with what workers cannot read.

        If workers can read an input, as from Parquet files, the ranges are those of its
        `Groups.bounds()`; else they are the blocks. A file has the slices of those
        inputs that workers cannot read, and the mask of the groups that take part.
        There is one for each range, even without slices.

        The result is `(starts, failed)`: the index of the first group of each range,
        and the reasons for groups whose data cannot be read.
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
                blocks_of_groups(others, call.alive[i:j], j - i, i)
                for i, j in itertools.pairwise(edges)
            )
        else:
            parts = blocks_of_groups(others, call.alive, call.block_size)
        for block, why in parts:
            start = int(block.groups[0])
            # Also without slices: the mask excludes groups that were dropped, or that
            # could not be read.
            read = functools.partial(kept_files.read, self._files)
            named = [kept_files.slices_to_message(x, read) for x in block.slices]
            arrays = [x for _, parts in named for x in parts]
            header = {"kept": [entry for entry, _ in named]}
            data = wire_format.to_bytes(header, [block.valid, *arrays])
            self._files.write(f"{folder}/slices-{start:012}", data)
            starts.append(start)
            failed.update(why)
        return starts, failed

    def _new_results(
        self, paths: Iterable[str], seen: set[str]
    ) -> Iterator[tuple[Block, BlockResult]]:
        """Read the files of blocks that workers have finished since the last call.

        `seen` has the paths of the files that were read before; new ones are added. The
        blocks have no slices, and the results no partial reductions.
        """
        for path in paths:
            # Each file once: after a retry the same blocks are written again.
            if path not in seen:
                seen.add(path)
                yield wire_format.result_from_bytes(self._files.read(path))


def _pieces(
    slices: Sequence[Slices],
) -> tuple[tuple[str, list[tuple[int, int, int]]], ...]:
    """Return `StageRun.pieces` of a stage on coordinates, from its partitioned inputs.

    () if it takes no columns, or some that the driver has.
    """
    pieces: dict[Any, list] = {}
    for x in slices:
        table = x.table if isinstance(x, WorkerSlices) else None
        if table is None or table.columns is None:
            continue
        kind = table.columns.number, table.columns.empty.ndim
        for path, leaf in table.pieces:
            if not isinstance(path, str):
                return ()
            pieces.setdefault(path, []).append((leaf, *kind))
    return tuple(pieces.items())


_EMPTY_BLOCK = Block(np.zeros(0, np.int32), np.zeros(0, bool), [])


def _readable_by_workers(x: object) -> bool:
    """Return whether workers can read a partitioned input without the driver.

    True only for a `Lazy` of a `Groups` whose `bounds()` is not None, such as Parquet
    files.
    """
    return isinstance(x, Lazy) and x.source.groups.bounds() is not None
