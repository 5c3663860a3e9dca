"""The scheduler of a pool: the blocks of a stage go to its workers and come back.

Input: a `StageCall` and a `Pool`. Output: pairs of a block and its `BlockResult`.

Invariants:

* Each group has exactly one result. Results come in the order of the groups, whatever
  worker is faster, so that float sums do not depend on timing.
* The blocks in memory are bounded: at most two for each worker are in flight, and as
  many again, or 64 MB, are done and wait for an earlier one.
* A block that is lost is tried again as often as the option `retries` says, then by
  halves, until one group is left: that group has failed.

Sharp edges: a block that takes too long goes to another worker, which runs its groups
one by one (a *search*) and reports the group at work, so that the slow one is found
within another time limit. The others then run again together: a group may run more than
once.
"""

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from drjax._errors import CanceledError, EngineError
from drjax.engines.core.blocks_of_groups import LoadedBlock, blocks_of_groups
from drjax.engines.core.messages import Block, BlockResult
from drjax.engines.core.protocols import Lost, Pool, Results, StageCall

_LOOK = 1.0  # seconds between looks whether the call was canceled
_WAITING = 64 << 20  # bytes of blocks that may be done and wait for an earlier one
_OBJECTS = 4 << 10  # of each in Python's objects


@dataclass
class _BlockState:
    """A block that has no result yet, and its tries so far.

    Attributes:
      position: Its place in the order of results: block 3 has `(3,)`, and its halves
        `(3, 0)` and `(3, 1)`.
      failed: The reasons for groups of it that have failed already: their data could
        not be read, or they took too long alone.
      tries: How often it was sent again, by the kind of the error.
      not_before: The `time.monotonic()` at which it may be sent again.
      half: Whether it is part of a block that was lost too often: it has no retries.
      deadline: The `time.monotonic()` at which it is late; infinity without a limit.
      alone: Whether its worker has no other block: if the worker ends then, this block
        is the cause.
      task_number: The `Task.number` of its latest task.
      search: The groups of it that its next task runs one by one, to find one that
        takes too long; after that the block runs as a whole again. None: the task runs
        the block.
      searched: Whether a search was done, or has found a group already.
    """

    position: tuple[int, ...]
    block: Block
    failed: dict[int, str]
    tries: Counter[str] = field(default_factory=Counter)
    not_before: float = 0.0
    half: bool = False
    deadline: float = float("inf")
    alone: bool = True
    task_number: int = 0
    search: Block | None = None
    searched: bool = False

    def halves(self) -> list["_BlockState"]:
        """Split a block that ends its workers into two, to find the group that does.

        Neither half is sent yet, and both have no retries: a half that ends its
        worker, too, is split at once, and not sent again as a whole. If it is one
        group, that group has failed.
        """
        # No retries: a group that ends its workers then costs one loss for each
        # halving, and not `retries + 1`.
        first, second = self.block.halves()
        position, searched = self.position, self.searched
        # `failed` goes with one half only, as each failure is reported once.
        halves = ((0, first, self.failed), (1, second, {}))
        return [
            _BlockState((*position, i), block, failed, half=True, searched=searched)
            for i, block, failed in halves
        ]

    def after_search(self) -> "_BlockState":
        """Return the state with which the block runs as a whole after a search.

        A search is a task that runs groups of the block one by one, to find one that
        takes too long. Without one, it is this state itself.
        """
        return (
            self if self.search is None else replace(self, search=None, searched=True)
        )


# A block that is over and its result; None: it was lost too often, and is to be split.
_Finished = tuple[_BlockState, BlockResult | None]


def results(pool: Pool, call: StageCall) -> Results:
    """Run the blocks of a stage on the workers of a pool, and lost blocks again.

    It is the `Engine.results` of engines that are pools; results come in the order of
    the groups. The plan file is sent to the workers unless `call.cache` has a reference
    to it.
    """
    # The plan file is shared once for a generation of workers, not once for a stage.
    key = f"{call.job.file.key} {pool.generation}"
    if key not in call.cache:
        call.cache[key] = pool.share(call.job.file)
    shared = pool.share(call.job.shared)
    yield from _Scheduler(_InFlight(pool, call, call.cache[key], shared), call).run()


class _Scheduler:
    """Schedules the blocks of one stage: which are sent when, and which again."""

    def __init__(self, in_flight: "_InFlight", call: StageCall):
        self.in_flight, self.call, self.options = in_flight, call, call.options
        self._queue: list[_BlockState] = []  # to be sent again, or after a split

    def run(self) -> Results:
        """Run all blocks of the stage; the results come in the order of the groups.

        At the end, or when the caller closes the generator, tasks in flight are
        released.
        """
        call = self.call
        loaded = blocks_of_groups(call.slices, call.alive, call.block_size)
        try:
            yield from self._run(loaded)
        except (KeyboardInterrupt, CanceledError):
            # Else the next call would wait for what nobody waits for any more.
            self.in_flight.abandon()
            raise
        finally:
            # The caller may have stopped early, as after a group that failed.
            self.in_flight.forget()

    def _run(self, loaded: Iterable[LoadedBlock]) -> Results:
        """Send all blocks to workers, and await their results: the scheduler's loop.

        `loaded` reads the blocks in order, each with the reasons for groups of it whose
        data could not be read.
        """
        unsent, ordered, more = enumerate(loaded), _OrderedResults(self.call), True
        while more or ordered.waiting:
            # Blocks are read at most this far ahead of the oldest without a result: it
            # may be slow, or lost with its machine, which Ray may see seconds later.
            # That must neither let all others pile up in memory, nor stop them.
            most = 2 * self.in_flight.limit
            while more and self.in_flight.free():
                if len(ordered.waiting) >= most and ordered.size >= _WAITING:
                    break
                item = next(unsent, None)
                if item is None:
                    more = False
                    break
                index, (block, failed) = item
                state = _BlockState((index,), block, failed)
                ordered.waiting.append(state.position)
                if block.empty:
                    ordered.add(state, _only_failures({}))
                else:
                    self.in_flight.send(state)
            self.call.check()
            self.call.workers(self.in_flight.pool.working)
            # Nothing is in flight if no group of the blocks so far takes part.
            for state, result in self._finished() if len(self.in_flight) else ():
                if result is None:
                    halves = state.halves()
                    ordered.split(state, halves)
                    self._queue += halves
                else:
                    ordered.add(state, result)
            # Before any new block: the results of all later blocks wait for these.
            self._send_again()
            yield from ordered.ready()

    def _send_again(self) -> None:
        """Send the blocks of the queue whose time has come, and that workers can take.

        If nothing else runs, it waits for them, or for a worker, for up to a second.
        """
        pool = self.in_flight.pool
        if not len(self.in_flight) and not pool.working:
            pool.wait([], _LOOK)
        elif self._queue and not len(self.in_flight):
            first = min(state.not_before for state in self._queue)
            time.sleep(min(max(0.0, first - time.monotonic()), _LOOK))
        now = time.monotonic()
        for state in [x for x in self._queue if x.not_before <= now]:
            if not self.in_flight.free():
                break
            self._queue.remove(state)
            self.in_flight.send(state)

    def _finished(self) -> Iterator[_Finished]:
        """Wait until tasks end or are late, and decide what is next for their blocks.

        A block that is to be sent again is put into the queue, and not yielded. Of the
        others, one that was lost too often comes with None, and is to be split.
        """
        next_sent = min((x.not_before for x in self._queue), default=float("inf"))
        for state, result in self.in_flight.wait(next_sent):
            if isinstance(result, Lost):
                state = state.after_search()
                yield from self._lost(state, str(result), result.kind)
            elif isinstance(result, Exception):
                self._raised(state, result)
            elif state.search is None:
                yield state, result
            elif state.searched:  # and groups that take too long were found
                self._queue.append(state.after_search())
            else:
                # No group was slow alone: the worker or the machine was.
                yield from self._retry(state.after_search(), "timeout")
        for state, group in self.in_flight.abandon_late():
            yield from self._out_of_time(state, group)

    def _out_of_time(
        self, state: _BlockState, group: int | None
    ) -> Iterator[_Finished]:
        """Decide what is next for a late block: search its slow group, retry, or fail.

        A search is a task that runs the groups of a block one by one.

        * In a search that has named a slow `group`, that group has failed: it is added
          to the state's `failed`, and masked in its block. The block is sent again,
          after a search of the groups behind this one; but it is over if no other group
          takes part, or if the option `on_error` is `"raise"`.
        * If the block was not searched and has several groups, it is searched.
        * Else it counts as lost, like a block whose worker is gone.

        `group` is None if it is not known, or if there was no search. Nothing is
        yielded if the block is to be sent again: it goes to the queue.
        """
        why = f"took longer than {self.options.timeout} s"
        groups = state.block.groups[state.block.valid]
        if state.search is not None and group is not None:
            self.call.lost(f"group {group}: it {why}", "timeout")
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
            text = f"groups {groups[0]} to {groups[-1]}: a block {why}"
            self.call.lost(text, "timeout")
            self._queue.append(replace(state, search=state.block))
        else:
            # A search does not help: it is late itself, or was done before, or the
            # block has only one group.
            yield from self._lost(state.after_search(), f"a block {why}", "timeout")

    def _lost(self, state: _BlockState, why: str, kind: str) -> Iterator[_Finished]:
        """Decide what is next for a block whose worker is gone: retry, split, or fail.

        If `state.alone` is false, the worker may have had another block, which may be
        the cause. Then this block is sent again without using up a retry, and from then
        on each worker has one block at a time. If it is true, the block is sent again
        while it has retries for this `kind` of error. After that it is split into
        halves; a block of one group has failed instead.

        Nothing is yielded if the block is to be sent again: it goes to the queue.
        """
        groups = state.block.groups[state.block.valid]
        wait = self._wait(state, kind) if state.alone else 0.0
        text = f"groups {groups[0]} to {groups[-1]}: {why}"
        self.call.lost(text, kind, wait or 0.0)
        if not state.alone:
            # Another block may have ended the worker. From here on each worker has one
            # block, so that the next loss has one cause; this one costs no retry.
            # Once for each block, as all that are sent from now on are alone.
            self.in_flight.one_for_each_worker()
            self._queue.append(state)
        elif wait is None and len(groups) == 1:
            yield state, _only_failures({int(groups[0]): why})
        else:
            yield from self._retry(state, kind)

    def _wait(self, state: _BlockState, kind: str) -> float | None:
        """Return the seconds until the block may be sent again; None: no retry is left.

        They are those after the next error of this kind.
        """
        retry, tries = self.options.retry(kind), state.tries[kind]
        return None if state.half or tries >= retry.times else retry.delay(tries)

    def _retry(self, state: _BlockState, kind: str) -> Iterator[_Finished]:
        """Put a block into the queue to be sent again, if it has retries left.

        A retry is used up. Else the block is yielded, to be split into halves.
        """
        wait = self._wait(state, kind)
        if wait is None:
            yield state, None
        else:
            state.tries[kind] += 1
            state.not_before = time.monotonic() + wait
            self._queue.append(state)

    def _raised(self, state: _BlockState, error: Exception) -> None:
        """Send a block again that failed, and no group of it alone; or raise that."""
        wait = self._wait(state, "error")
        if wait is None:
            raise error
        groups = state.block.groups[state.block.valid]
        why = f"{type(error).__name__}: {str(error).strip()[:500]}"
        text = f"groups {groups[0]} to {groups[-1]}: {why}"
        self.call.lost(text, "error", wait)
        assert not [*self._retry(state.after_search(), "error")]


class _InFlight:
    """The blocks that workers have, with their deadlines; it sends and awaits them.

    `file` and `shared` are the references that `Pool.share` returned for the plan file
    and for the global inputs.
    """

    def __init__(self, pool: Pool, call: StageCall, file: Any, shared: Any):
        self.pool, self.job, self.file, self.shared = pool, call.job, file, shared
        self.timeout = call.options.timeout
        # Two blocks for each worker hide the time that messages take. With a time limit
        # a worker has one block, as the clock must start when its work begins.
        self._depth = 2 if self.timeout is None else 1
        self._states: dict[Any, _BlockState] = {}  # by the pool's handle

    def __len__(self) -> int:
        return len(self._states)

    @property
    def limit(self) -> int:
        """How many blocks may be in flight, with the workers that there are now."""
        return self._depth * self.pool.working

    def free(self) -> bool:
        """Return whether fewer than `limit` blocks are in flight."""
        return len(self._states) < self.limit

    def one_for_each_worker(self) -> None:
        """Let each worker have at most one new block.

        Blocks that are in flight already stay.
        """
        self._depth = 1

    def send(self, state: _BlockState) -> None:
        """Send a block to a worker; if `state.search` is not None, send that instead.

        The block is in flight from then on. Its `task_number`, its `deadline` and
        `alone` (whether each worker has at most one block) are set.
        """
        block = state.search or state.block
        task = self.job.task(block, search=state.search is not None)
        state.task_number = task.number
        if self.timeout is not None:
            # A search may take as long as halving the block down to one group.
            limits = 1 if state.search is None else 1 + len(block).bit_length()
            state.deadline = time.monotonic() + limits * self.timeout
        state.alone = self._depth == 1
        self._states[self.pool.submit(task, self.file, self.shared)] = state

    def wait(
        self, until: float
    ) -> Iterator[tuple[_BlockState, BlockResult | Exception]]:
        """Wait until a task is done, or until one may be late, for a second at most.

        The blocks whose tasks are done come with their results, or, if the worker is
        gone, with a `Lost`, which is not raised; they are no longer in flight. Other
        exceptions mean that the stage failed, and that no single group causes it.
        `until` is a `time.monotonic()` at which there is something else to do.
        """
        patience = min(self._patience(), max(0.0, until - time.monotonic()))
        for handle in self.pool.wait([*self._states], patience):
            state = self._states.pop(handle)
            try:
                result = self.pool.result(handle)
            # Not of the stage, but of the engine.
            except EngineError:
                raise
            except Exception as error:
                yield state, error
            else:
                yield state, result

    def _patience(self) -> float:
        """Return how long to wait for a task before looking for late ones, in seconds.

        It is the time to the first deadline; but an eighth of the option `timeout` at
        most while some task is a search, which runs groups one by one, as each of them
        has the time limit. A second at most, to notice that the call was canceled. At
        least one block must be in flight.
        """
        if self.timeout is None:
            return _LOOK
        first = min(state.deadline for state in self._states.values())
        remaining = min(_LOOK, max(0.0, first - time.monotonic()))
        # In a search each group has the limit, so workers are asked more often.
        searching = any(state.search for state in self._states.values())
        return min(remaining, self.timeout / 8) if searching else remaining

    def abandon_late(self) -> Iterator[tuple[_BlockState, int | None]]:
        """Abandon the tasks of late blocks, so that their workers are replaced.

        The blocks, no longer in flight, come with the index of the group that took too
        long, or None if that is not known. A task that is done by now is not abandoned.
        """
        for handle, group in self._late():
            # A result that came just in time counts, though the deadline is over.
            if handle not in self.pool.wait([handle], 0):
                state = self._states.pop(handle)
                self.pool.abandon(handle)
                yield state, group

    def _late(self) -> Iterator[tuple[Any, int | None]]:
        """Find the handles of late blocks, each with the group that took too long.

        A block is late when its deadline is over; then the group is None. In a search,
        which runs the groups of a block one by one, it is also late when one group has
        run for the option `timeout`. A handle may come twice, unless the caller removes
        its block.
        """
        now = time.monotonic()
        for handle, state in [*self._states.items()]:
            if state.deadline <= now:
                yield handle, None
        # After the loop: the caller has removed the blocks that were yielded in it.
        searches = {s.task_number: h for h, s in self._states.items() if s.search}
        for worker in self.pool.states() if searches else ():
            # A worker may report a task that is over: then it has no handle here.
            handle = searches.get(worker.task)
            if handle is not None and worker.groups is not None:
                if self.timeout is not None and worker.seconds >= self.timeout:
                    yield handle, worker.groups[0]

    def forget(self) -> None:
        """Release all tasks in flight: their results are not needed."""
        for handle in self._states:
            self.pool.forget(handle)

    def abandon(self) -> None:
        """End all tasks in flight, with their workers where that is the only way."""
        while self._states:
            self.pool.abandon(self._states.popitem()[0])


class _OrderedResults:
    """Puts results in the order of their blocks, whichever worker is faster.

    Attributes:
      waiting: The `_BlockState.position`s of the blocks whose result was not yielded
        yet, in the order of the groups. The scheduler appends that of each new block.
      size: The bytes of the blocks that are done, with their results.
    """

    def __init__(self, call: StageCall) -> None:
        self.waiting: list[tuple[int, ...]] = []
        self.size = 0
        # Slices of arrays are views.
        self._read = any(x.source is not None for x in call.slices)
        self._sums = call.partial_bytes
        self._results: dict[tuple[int, ...], tuple[Block, BlockResult]] = {}

    def add(self, state: _BlockState, result: BlockResult) -> None:
        """Store the result of a block until the results before it are ready.

        The groups in `state.failed` are added to those that failed.
        """
        if state.failed:
            result = replace(result, failed=result.failed | state.failed)
        self._results[state.position] = state.block, result
        self.size += self._size(state.block, result)

    def _size(self, block: Block, result: BlockResult) -> int:
        slices = [*result.slices, *(block.slices if self._read else ())]
        return _OBJECTS + self._sums + sum(getattr(x, "nbytes", 0) for x in slices)

    def split(self, state: _BlockState, halves: list[_BlockState]) -> None:
        """Replace a block that waits for its result by its two halves, in its place.

        Their results then come where the block's would have come.
        """
        i = self.waiting.index(state.position)
        self.waiting[i : i + 1] = [half.position for half in halves]

    def ready(self) -> Results:
        """Remove and yield the results that no earlier block holds up, in order."""
        while self.waiting and self.waiting[0] in self._results:
            done = self._results.pop(self.waiting.pop(0))
            self.size -= self._size(*done)
            yield done


def _only_failures(failed: dict[int, str]) -> BlockResult:
    """Make a `BlockResult` with no values, only the reasons for failed groups."""
    return BlockResult([], [], failed)
