"""Engines whose workers share nothing with the driver but a folder of files.

The driver writes what workers cannot read themselves, starts a run, and reads what
became of each block while it goes on; a run that fails is made again, `retries` times.
An engine says how to run an `Order`, and with which files.
"""

import itertools
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from drjax.backends.engine import temporary_folders, wire_format
from drjax.backends.engine.blocks import Cut, blocks
from drjax.backends.engine.combine import Totals
from drjax.backends.engine.messages import Block, Done
from drjax.backends.engine.protocols import Call, Results
from drjax.backends.engine.wire_format import Job
from drjax.backends.groups import Lazy


class Files(Protocol):
    """Files that the driver and all workers see; a module may be one."""

    def make(self, folder: str) -> None: ...

    def read(self, path: str) -> bytes: ...

    def write(self, path: str, data: bytes) -> None:
        """Write a file whole or not at all; it may be there already."""
        ...

    def listed(self, prefix: str) -> list[str]:
        """The files whose names begin so."""
        ...

    def remove(self, folder: str) -> None: ...


class Run(Protocol):
    """A run of an order."""

    def wait(self, seconds: float) -> bool:
        """Wait so long; whether it has ended."""
        ...

    def error(self) -> str | None:
        """Why it failed, in the end; None if it did not."""
        ...

    def end(self) -> None:
        """End it and its workers."""
        ...


@dataclass(frozen=True)
class Order:
    """A run of a stage of the groups, for workers: it can be sent to them.

    Attributes:
      files: The files.
      folder: Where they are.
      ops: The operations of the stage's partial reductions.
      starts: The first groups of the ranges that workers take.
      lazy: For each partitioned input: how workers read it; None if it is in a file.
      size: How many groups work at once.
    """

    files: Any
    folder: str
    ops: tuple[str, ...]
    starts: list[int]
    lazy: list[Lazy | None]
    size: int

    def job(self) -> Job:
        """The stage."""
        return Job.unpacked(self.files.read(f"{self.folder}/job"))

    def blocks(self, start: int) -> Iterator[Cut]:
        """The blocks of a range."""
        name = f"{self.folder}/rows-{start:012}"
        _, (alive, *stacks) = wire_format.unpacked(self.files.read(name))
        arrays = iter(stacks)
        rows = [next(arrays) if x is None else x for x in self.lazy]
        yield from blocks(rows, alive, self.size, start)

    def tell(self, block: Block, done: Done) -> None:
        """Tell the driver what became of a block."""
        data = wire_format.packed_done(block, replace(done, partials=[]))
        self.files.write(f"{self.folder}/block-{block.groups[0]:012}", data)

    def finish(self, totals: Totals) -> None:
        """Tell the driver what all partial results give, the groups' number last."""
        there = [x is not None for x in totals]
        data = wire_format.packed(
            {"there": there}, [x for x in totals if x is not None]
        )
        self.files.write(f"{self.folder}/totals", data)

    def totals(self) -> Totals:
        """What `finish` told."""
        about, arrays = wire_format.unpacked(self.files.read(f"{self.folder}/totals"))
        found = iter(arrays)
        return [next(found) if there else None for there in about["there"]]


class Exchange:
    """A `drjax.backends.engine.protocols.Engine` that runs orders.

    Args:
      workers: How many there are.
      files: The files.
      shared: The folder. Default: a temporary one.
    """

    def __init__(self, workers: int, files: Files, shared: str | None = None):
        self.workers, self._files, self._shared = workers, files, shared
        self._ours: Path | None = None

    def start(self, order: Order, folder: Path) -> Run:
        """Run an order; `folder`: for what the driver alone needs."""
        raise NotImplementedError

    def open(self) -> None:
        if self._ours is None:
            self._ours = temporary_folders.make()

    def close(self) -> None:
        if self._ours is not None:
            temporary_folders.remove(self._ours)
            self._ours = None

    def results(self, call: Call) -> Results:
        assert self._ours is not None
        folder = f"{self._shared or self._ours}/{uuid.uuid4().hex}"
        self._files.make(folder)
        run = None
        try:
            self._files.write(f"{folder}/job", Job.of(call).packed())
            starts, failed = self._write(call, folder)
            yield _NOBODY, Done([], [], failed, 0, 0.0)
            lazy = [x if _in_files(x) else None for x in call.rows]
            order = Order(self._files, folder, call.ops, starts, lazy, call.size)
            seen: set[str] = set()
            told = 0
            for left in reversed(range(call.options.retries + 1)):
                run = self.start(order, self._ours)
                while True:
                    ended = run.wait(0.1)
                    for block, done in self._told(folder, seen):
                        told += int(block.without_failed(done.failed).valid.sum())
                        yield block, done
                    if ended:
                        break
                if (error := run.error()) is None:
                    break
                run.end()
                if not left:
                    raise RuntimeError(f"the run failed: {error}")
                call.lost(f"a run failed: {error[:500]}")
            *totals, count = order.totals()
            yield _NOBODY, Done(totals, [], {}, 0, 0.0)
            if int(count or 0) != told:
                raise RuntimeError(
                    f"the sums are of {count} groups, but {told} were told of"
                )
        finally:
            if run is not None:
                run.end()
            self._files.remove(folder)

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
            data = wire_format.packed({}, [block.valid, *block.rows])
            self._files.write(f"{folder}/rows-{start:012}", data)
            starts.append(start)
            failed.update(why)
        return starts, failed

    def _told(self, folder: str, seen: set[str]) -> Iterator[tuple[Block, Done]]:
        for path in self._files.listed(f"{folder}/block-"):
            if path not in seen:
                seen.add(path)
                yield wire_format.unpacked_done(self._files.read(path))


_NOBODY = Block(np.zeros(0, np.int32), np.zeros(0, bool), [])


def _in_files(x: Any) -> bool:
    """Whether workers can read a value themselves."""
    return isinstance(x, Lazy) and x.source.groups.bounds() is not None
