"""One run of a stage of the groups: its blocks go to the workers and come back.

Blocks are made, sent and combined in order, a bounded number at a time: a block that
is late holds up the making of others, never the results that are there already.
"""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from drjax.backends.engine.blocks import Cut, blocks
from drjax.backends.engine.pool import Call, Lost, Pool, Results
from drjax.backends.engine.work import Block, Done, Work


@dataclass
class _Task:
    """A block on its way; `place` orders what comes back."""

    place: tuple[int, ...]
    block: Block
    failed: dict[int, str]  # groups that could not even be sent
    left: int  # how often it may still be lost
    deadline: float = float("inf")
    alone: bool = True  # whether its worker has no other block

    def halves(self) -> list["_Task"]:
        """For a block that ends its workers: to find the group that does."""
        first, second = self.block.halves()
        return [
            _Task((*self.place, 0), first, self.failed, 0),
            _Task((*self.place, 1), second, {}, 0),
        ]


def results(pool: Pool, call: Call) -> Results:
    """`Engine.results` of an engine that is a pool: each block, in order."""
    key = f"{call.file.key} {pool.session}"
    if key not in call.known:
        call.known[key] = pool.share(call.file)
    yield from _Flights(pool, call, (call.known[key], pool.share(call.shared))).run()


class _Flights:
    """The blocks of a stage; `given`: the file and the global inputs, as shared."""

    def __init__(self, pool: Pool, call: Call, given: tuple):
        self.pool, self.call, self.given = pool, call, given
        self.options, self.lost = call.options, call.lost
        # With a time limit a worker has one block, which begins when it is sent.
        depth = 2 if self.options.timeout is None else 1
        self._most = depth * pool.workers
        self._flying: dict[Any, _Task] = {}
        self._waiting: list[_Task] = []

    def run(self) -> Results:
        call = self.call
        try:
            yield from self._run(blocks(call.rows, call.alive, call.size))
        finally:
            for flight in self._flying:
                self.pool.forget(flight)

    def _run(self, cut: Iterable[Cut]) -> Iterator[tuple[Block, Done]]:
        made, ready = enumerate(cut), {}
        order: list[tuple[int, ...]] = []  # of blocks that were made and not given on
        more = True
        while more or order:
            # As far ahead of the oldest as there are workers, twice.
            while more and len(order) < 2 * self._most and self._free():
                found = next(made, None)
                if found is None:
                    more = False
                    break
                number, (block, failed) = found
                order.append((number,))
                if block.valid.any():
                    self._send(_Task((number,), block, failed, self.options.retries))
                else:
                    ready[(number,)] = block, _only(failed)
            for task, done in self._landed() if self._flying else ():
                if done is None:
                    parts = task.halves()
                    at = order.index(task.place)
                    order[at : at + 1] = [part.place for part in parts]
                    self._waiting += parts
                else:
                    done = replace(done, failed=done.failed | task.failed)
                    ready[task.place] = task.block, done
            while self._waiting and self._free():
                self._send(self._waiting.pop(0))
            while order and order[0] in ready:
                yield ready.pop(order.pop(0))

    def _free(self) -> bool:
        return len(self._flying) < self._most

    def _send(self, task: _Task) -> None:
        options = self.options
        work = Work(
            self.call.stage, task.block, self.call.size, options.check_nans,
            options.on_error == "drop",
        )  # fmt: skip
        if options.timeout is not None:
            task.deadline = time.monotonic() + options.timeout
        task.alone = self._most <= self.pool.workers
        self._flying[self.pool.submit(work, *self.given)] = task

    def _landed(self) -> Iterator[tuple[_Task, Done | None]]:
        """Tasks that are over; None: lost, and not to be tried again."""
        first = min(task.deadline for task in self._flying.values())
        timeout = None
        if self.options.timeout is not None:
            timeout = max(0.0, first - time.monotonic())
        for flight in self.pool.wait([*self._flying], timeout):
            task = self._flying.pop(flight)
            try:
                yield task, self.pool.result(flight)
            except Lost as error:
                yield from self._again(task, str(error))
        now = time.monotonic()
        for flight, task in [*self._flying.items()]:
            if task.deadline <= now and flight not in self.pool.wait([flight], 0):
                del self._flying[flight]
                self.pool.abandon(flight)
                why = f"a block took longer than {self.options.timeout} s"
                yield from self._again(task, why)

    def _again(self, task: _Task, why: str) -> Iterator[tuple[_Task, Done | None]]:
        groups = task.block.groups[task.block.valid]
        self.lost(f"groups {groups[0]} to {groups[-1]}: {why}")
        if not task.alone:  # another block may have ended the worker
            self._most = self.pool.workers
            self._waiting.append(task)
        elif task.left:
            task.left -= 1
            self._waiting.append(task)
        elif len(groups) == 1:
            yield task, _only({int(groups[0]): why})
        else:
            yield task, None


def _only(failed: dict[int, str]) -> Done:
    """What becomes of groups that all failed."""
    return Done([], [], failed, 0, 0.0)
