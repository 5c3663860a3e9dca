"""One run of a stage of the groups: its blocks go to the workers and come back.

Blocks are made, sent and combined in order, a bounded number at a time: a block that
is late holds up the making of others, never the results that are there already.

A block that takes too long goes to another worker, where its groups work one by one:
the worker tells which one is at work, so that the one that takes too long is found
within another time limit. The others then run again together.
"""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from drjax.backends.engine.blocks import Cut, blocks
from drjax.backends.engine.messages import Block, Done, Work
from drjax.backends.engine.protocols import Call, Lost, Pool, Results


@dataclass
class _Task:
    """A block on its way; `place` orders what comes back."""

    place: tuple[int, ...]
    block: Block
    failed: dict[int, str]  # groups that could not even be sent
    left: int  # how often it may still be lost
    deadline: float = float("inf")
    alone: bool = True  # whether its worker has no other block
    number: int = 0  # that of its latest `Work`
    search: Block | None = None  # to run these groups one by one, before the block
    searched: bool = False  # whether that was done, or has found one already

    def halves(self) -> list["_Task"]:
        """For a block that ends its workers: to find the group that does."""
        first, second = self.block.halves()
        return [
            _Task((*self.place, 0), first, self.failed, 0, searched=self.searched),
            _Task((*self.place, 1), second, {}, 0, searched=self.searched),
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
        options, block = self.options, task.search or task.block
        work = Work(
            self.call.stage, block, self.call.size, options.check_nans,
            options.on_error == "drop", search=task.search is not None,
        )  # fmt: skip
        task.number = work.number
        if options.timeout is not None:
            # A search may take as long as halving the block down to one group.
            limits = 1 if task.search is None else 1 + len(block.groups).bit_length()
            task.deadline = time.monotonic() + limits * options.timeout
        task.alone = self._most <= self.pool.workers
        self._flying[self.pool.submit(work, *self.given)] = task

    def _landed(self) -> Iterator[tuple[_Task, Done | None]]:
        """Tasks that are over; None: lost, and not to be tried again."""
        for flight in self.pool.wait([*self._flying], self._patience()):
            task = self._flying.pop(flight)
            try:
                done = self.pool.result(flight)
            except Lost as error:
                yield from self._again(_searched(task), str(error))
                continue
            if task.search is None:
                yield task, done
            elif task.searched:  # and groups that take too long were found
                self._waiting.append(_searched(task))
            else:
                yield from self._retry(_searched(task))
        for flight, group in self._late():
            if flight not in self.pool.wait([flight], 0):
                task = self._flying.pop(flight)
                self.pool.abandon(flight)
                yield from self._out_of_time(task, group)

    def _patience(self) -> float | None:
        """How long to wait for a block before looking for what is late."""
        limit = self.options.timeout
        if limit is None:
            return None
        first = min(task.deadline for task in self._flying.values())
        left = max(0.0, first - time.monotonic())
        searching = any(task.search for task in self._flying.values())
        return min(left, limit / 8) if searching else left

    def _late(self) -> Iterator[tuple[Any, int | None]]:
        """Flights that took too long, and for which group if that is known."""
        now, limit = time.monotonic(), self.options.timeout
        for flight, task in [*self._flying.items()]:
            if task.deadline <= now:
                yield flight, None
        searches = {t.number: f for f, t in self._flying.items() if t.search}
        for state in self.pool.states() if searches else ():
            flight = searches.get(state.task)
            if flight is not None and state.groups is not None:
                if limit is not None and state.seconds >= limit:
                    yield flight, state.groups[0]

    def _out_of_time(
        self, task: _Task, group: int | None
    ) -> Iterator[tuple[_Task, Done | None]]:
        """What becomes of a block that was late; `group`: who was, if that is known."""
        why = f"took longer than {self.options.timeout} s"
        groups = task.block.groups[task.block.valid]
        if task.search is not None and group is not None:
            self.lost(f"group {group}: it {why}")
            task.failed = task.failed | {group: f"it {why}, alone"}
            task.block = task.block.without_failed(task.failed)
            if self.options.on_error == "raise" or not task.block.valid.any():
                yield task, _only({})
                return
            # Those before it have come to their ends.
            last = int(np.flatnonzero(task.search.groups == group)[0])
            rest = task.search.without(np.arange(len(task.search.groups)) <= last)
            task = replace(task, search=rest if rest.valid.any() else None)
            self._waiting.append(replace(task, searched=True))
        elif task.search is None and not task.searched and len(groups) > 1:
            self.lost(f"groups {groups[0]} to {groups[-1]}: a block {why}")
            self._waiting.append(replace(task, search=task.block))
        else:
            yield from self._again(_searched(task), f"a block {why}")

    def _again(self, task: _Task, why: str) -> Iterator[tuple[_Task, Done | None]]:
        groups = task.block.groups[task.block.valid]
        self.lost(f"groups {groups[0]} to {groups[-1]}: {why}")
        if not task.alone:  # another block may have ended the worker
            self._most = self.pool.workers
            self._waiting.append(task)
        elif not task.left and len(groups) == 1:
            yield task, _only({int(groups[0]): why})
        else:
            yield from self._retry(task)

    def _retry(self, task: _Task) -> Iterator[tuple[_Task, Done | None]]:
        """Send a block again, or give it up: None."""
        if task.left:
            task.left -= 1
            self._waiting.append(task)
        else:
            yield task, None


def _searched(task: _Task) -> _Task:
    """The block itself, after a search."""
    return task if task.search is None else replace(task, search=None, searched=True)


def _only(failed: dict[int, str]) -> Done:
    """What becomes of groups that all failed."""
    return Done([], [], failed, 0, 0.0)
