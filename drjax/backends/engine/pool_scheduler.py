"""The scheduler of a pool: the blocks of a stage go to its workers and come back.

Input: a `StageCall` and a `Pool`. Output: pairs of a block and its `BlockResult`.

Invariants:

* Each group has exactly one result. Results come in the order of the groups, whatever
  worker is faster, so that float sums do not depend on timing.
* The number of blocks in memory is bounded: at most two for each worker are in flight,
  and as many again are done and wait for an earlier one.
* A block that is lost is tried again `retries` times, then by halves, until one group
  is left: that group has failed.

Sharp edges: a block that takes too long goes to another worker, which runs its groups
one by one (a *search*) and reports the group at work, so that the slow one is found
within another time limit. The others then run again together: a group may run more than
once.
"""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from drjax.backends.engine.blocks_of_groups import LoadedBlock, blocks_of_groups
from drjax.backends.engine.messages import Block, BlockResult
from drjax.backends.engine.protocols import Lost, Pool, Results, StageCall


@dataclass
class _BlockState:
    """A block until its result is there.

    Attributes:
      position: Its place in the order of results: a tuple, as a half of block 3 is
        `(3, 0)` or `(3, 1)`.
      block: The groups.
      failed: Groups that could not even be sent, and why.
      retries_left: How often it may still be lost.
      deadline: When it is late, by `time.monotonic`.
      alone: Whether its worker has no other block.
      task_number: The number of its latest `Task`.
      search: The groups to run one by one before the block; None: no search.
      searched: Whether a search was done, or has found a group already.
    """

    position: tuple[int, ...]
    block: Block
    failed: dict[int, str]
    retries_left: int
    deadline: float = float("inf")
    alone: bool = True
    task_number: int = 0
    search: Block | None = None
    searched: bool = False

    def halves(self) -> list["_BlockState"]:
        """For a block that ends its workers: to find the group that does."""
        first, second = self.block.halves()
        position, searched = self.position, self.searched
        return [
            _BlockState((*position, 0), first, self.failed, 0, searched=searched),
            # `failed` goes with one half only, as each failure is reported once.
            _BlockState((*position, 1), second, {}, 0, searched=searched),
        ]


def results(pool: Pool, call: StageCall) -> Results:
    """`Engine.results` of an engine that is a pool: each block, in order."""
    # The plan file is shared once for a generation of workers, not once for a stage.
    key = f"{call.job.file.key} {pool.generation}"
    if key not in call.cache:
        call.cache[key] = pool.share(call.job.file)
    shared = pool.share(call.job.shared)
    yield from _Scheduler(pool, call, call.cache[key], shared).run()


class _Scheduler:
    """Schedules the blocks of one stage.

    Args:
      pool: The workers.
      call: The stage.
      file: The reference that `share` returned for the plan file.
      shared: That for the global inputs.
    """

    def __init__(self, pool: Pool, call: StageCall, file: Any, shared: Any):
        self.pool, self.call, self.file, self.shared = pool, call, file, shared
        self.options, self.lost = call.options, call.lost
        # Two blocks for each worker hide the time that messages take. With a time limit
        # a worker has one block, as the clock must start when its work begins.
        depth = 2 if self.options.timeout is None else 1
        self._limit = depth * pool.workers
        self._in_flight: dict[Any, _BlockState] = {}
        self._queue: list[_BlockState] = []  # to be sent again, or after a split

    def run(self) -> Results:
        call = self.call
        loaded = blocks_of_groups(call.slices, call.alive, call.job.size)
        try:
            yield from self._run(loaded)
        finally:
            # The caller may have stopped early, as after a group that failed.
            for handle in self._in_flight:
                self.pool.forget(handle)

    def _run(
        self, loaded: Iterable[LoadedBlock]
    ) -> Iterator[tuple[Block, BlockResult]]:
        unsent, ready = enumerate(loaded), {}
        positions: list[tuple[int, ...]] = []  # of blocks without a yielded result
        more = True
        while more or positions:
            # Blocks are read at most this far ahead of the oldest without a result:
            # one slow block must not let all others pile up in memory.
            while more and len(positions) < 2 * self._limit and self._free():
                item = next(unsent, None)
                if item is None:
                    more = False
                    break
                index, (block, failed) = item
                positions.append((index,))
                if block.valid.any():
                    retries = self.options.retries
                    self._send(_BlockState((index,), block, failed, retries))
                else:
                    ready[(index,)] = block, _only_failures(failed)
            for state, result in self._finished() if self._in_flight else ():
                if result is None:
                    # Halves take the block's place, so that the order stays.
                    halves = state.halves()
                    i = positions.index(state.position)
                    positions[i : i + 1] = [half.position for half in halves]
                    self._queue += halves
                else:
                    result = replace(result, failed=result.failed | state.failed)
                    ready[state.position] = state.block, result
            while self._queue and self._free():
                self._send(self._queue.pop(0))
            while positions and positions[0] in ready:
                yield ready.pop(positions.pop(0))

    def _free(self) -> bool:
        return len(self._in_flight) < self._limit

    def _send(self, state: _BlockState) -> None:
        options, block = self.options, state.search or state.block
        task = self.call.job.task(block, search=state.search is not None)
        state.task_number = task.number
        if options.timeout is not None:
            # A search may take as long as halving the block down to one group.
            limits = 1 if state.search is None else 1 + len(block.groups).bit_length()
            state.deadline = time.monotonic() + limits * options.timeout
        state.alone = self._limit <= self.pool.workers
        self._in_flight[self.pool.submit(task, self.file, self.shared)] = state

    def _finished(self) -> Iterator[tuple[_BlockState, BlockResult | None]]:
        """Blocks that are over; None: lost, and not to be tried again whole."""
        for handle in self.pool.wait([*self._in_flight], self._patience()):
            state = self._in_flight.pop(handle)
            try:
                result = self.pool.result(handle)
            except Lost as error:
                yield from self._lost(_after_search(state), str(error))
                continue
            if state.search is None:
                yield state, result
            elif state.searched:  # and groups that take too long were found
                self._queue.append(_after_search(state))
            else:
                # No group was slow alone: the worker or the machine was.
                yield from self._retry(_after_search(state))
        for handle, group in self._late():
            # A result that came just in time counts, though the deadline is over.
            if handle not in self.pool.wait([handle], 0):
                state = self._in_flight.pop(handle)
                self.pool.abandon(handle)
                yield from self._out_of_time(state, group)

    def _patience(self) -> float | None:
        """How long to wait for a block before looking for what is late."""
        limit = self.options.timeout
        if limit is None:
            return None
        first = min(state.deadline for state in self._in_flight.values())
        remaining = max(0.0, first - time.monotonic())
        # In a search each group has the limit, so workers are asked more often.
        searching = any(state.search for state in self._in_flight.values())
        return min(remaining, limit / 8) if searching else remaining

    def _late(self) -> Iterator[tuple[Any, int | None]]:
        """Handles of blocks that took too long, and for which group if it is known."""
        now, limit = time.monotonic(), self.options.timeout
        for handle, state in [*self._in_flight.items()]:
            if state.deadline <= now:
                yield handle, None
        searches = {s.task_number: h for h, s in self._in_flight.items() if s.search}
        for worker in self.pool.states() if searches else ():
            # A worker may report a task that is over: then it has no handle here.
            handle = searches.get(worker.task)
            if handle is not None and worker.groups is not None:
                if limit is not None and worker.seconds >= limit:
                    yield handle, worker.groups[0]

    def _out_of_time(
        self, state: _BlockState, group: int | None
    ) -> Iterator[tuple[_BlockState, BlockResult | None]]:
        """The next step for a late block; `group`: the late one, if it is known."""
        why = f"took longer than {self.options.timeout} s"
        groups = state.block.groups[state.block.valid]
        if state.search is not None and group is not None:
            self.lost(f"group {group}: it {why}")
            state.failed = state.failed | {group: f"it {why}, alone"}
            state.block = state.block.without_failed(state.failed)
            if self.options.on_error == "raise" or not state.block.valid.any():
                yield state, _only_failures({})
                return
            # The search goes on behind the slow group: those before it have ended.
            last = int(np.flatnonzero(state.search.groups == group)[0])
            rest = state.search.without(np.arange(len(state.search.groups)) <= last)
            state = replace(state, search=rest if rest.valid.any() else None)
            self._queue.append(replace(state, searched=True))
        elif state.search is None and not state.searched and len(groups) > 1:
            self.lost(f"groups {groups[0]} to {groups[-1]}: a block {why}")
            self._queue.append(replace(state, search=state.block))
        else:
            yield from self._lost(_after_search(state), f"a block {why}")

    def _lost(
        self, state: _BlockState, why: str
    ) -> Iterator[tuple[_BlockState, BlockResult | None]]:
        groups = state.block.groups[state.block.valid]
        self.lost(f"groups {groups[0]} to {groups[-1]}: {why}")
        if not state.alone:
            # Another block may have ended the worker. From here on each worker has one
            # block, so that the next loss has one cause; this one costs no retry.
            self._limit = self.pool.workers
            self._queue.append(state)
        elif not state.retries_left and len(groups) == 1:
            yield state, _only_failures({int(groups[0]): why})
        else:
            yield from self._retry(state)

    def _retry(
        self, state: _BlockState
    ) -> Iterator[tuple[_BlockState, BlockResult | None]]:
        """Send a block again, or give it up: None."""
        if state.retries_left:
            state.retries_left -= 1
            self._queue.append(state)
        else:
            yield state, None


def _after_search(state: _BlockState) -> _BlockState:
    """The block itself, after a search."""
    return state if state.search is None else replace(state, search=None, searched=True)


def _only_failures(failed: dict[int, str]) -> BlockResult:
    """The result of groups that all failed."""
    return BlockResult([], [], failed, 0, 0.0)
