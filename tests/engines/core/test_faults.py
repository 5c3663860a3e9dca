"""Workers that are lost, groups that never end, groups whose data is wrong.

Covers: drjax.engines.core.worker, drjax.engines.core.messages,
drjax.engines.slices.groups.
"""

import importlib

import jax
import numpy as np
import pytest

import drjax
from drjax.backends import in_process
from drjax.backends.groups import Groups
from drjax.backends.parquet import Parquet
from drjax.engines.core import pool_scheduler, worker
from drjax.engines.core.driver import Runner
from drjax.engines.core.messages import Block, WorkerState
from drjax.engines.core.options import EngineOptions
from drjax.engines.core.protocols import Lost
from drjax.engines.in_process.adapter import InProcess
from tests.helpers.conformance import slices_for, survivors, weighted_plan
from tests.helpers.raising import raises

pytestmark = pytest.mark.usefixtures("leaks_unchecked")


def test_a_block_is_padded_with_its_first_group_that_takes_part():
    valid, x = np.array([False, True, True]), np.arange(3.0)
    padded = Block(np.arange(4, 7, dtype=np.int32), valid, [x]).padded(5)
    np.testing.assert_array_equal(padded.groups, [5, 5, 6, 5, 5])
    np.testing.assert_array_equal(padded.slices[0], [1, 1, 2, 1, 1])
    assert [*padded.valid] == [False, True, True, False, False]


# ---------------------------------------------------------------------------------
# Workers that are lost, blocks that take too long


class Clock:
    """Time that passes while a pool waits, and not while a slow machine works."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    monkeypatch.setattr(pool_scheduler, "time", Clock())
    return pool_scheduler.time


class Unreliable(InProcess):
    """A pool whose workers are lost with any block that has a group of `fatal`.

    Blocks with a group of `slow` never end.
    """

    def __init__(self, fatal=(), losses=10**6, slow=()):
        super().__init__(2)
        self.fatal, self.losses, self.slow = set(fatal), losses, set(slow)
        self.sent, self.abandoned, self._late, self._states = [], 0, set(), []

    def submit(self, task, file, shared):
        groups = [int(g) for g in task.block.groups[task.block.valid]]
        self.sent.append(groups)
        handle = super().submit(task, file, shared)
        slow = [g for g in groups if g in self.slow]
        if task.search and slow:
            self._states.append(
                WorkerState(0, (slow[0], slow[0]), 0.0, task.number, 99.0)
            )
        if self.fatal & set(groups) and self.losses:
            self.losses -= 1
            handle.error = Lost("a worker died: of this group")
        if self.slow & set(groups):
            self._late.add(handle)
        return handle

    def wait(self, handles, timeout):
        done = [f for f in handles if f not in self._late]
        if not done:
            pool_scheduler.time.sleep(timeout or 0)
        return done

    def abandon(self, handle):
        self.abandoned += 1

    def states(self):
        return self._states


def run_on(pool, n=9, **options):
    runner = Runner(
        weighted_plan(n), pool, EngineOptions.checked(block_size=4, **options)
    )
    return runner, lambda: runner(np.float32(2), slices_for(n))


def test_a_block_whose_worker_is_lost_is_tried_again():
    run, call = run_on(pool := Unreliable(fatal=[5], losses=2))
    survivors(call(), np.ones(9, bool))
    assert pool.sent.count([4, 5, 6, 7]) == 4  # twice lost, then once in each round
    assert run.report.lost == ["groups 4 to 7: a worker died: of this group"] * 2
    assert not run.report.dropped


def test_a_group_that_ends_its_workers_is_found():
    pool = Unreliable(fatal=[5])
    with pytest.raises(drjax.EngineError, match="Group 5 failed in round 1") as error:
        run_on(pool, retries=1)[1]()
    assert error.value.group == 5 and "a worker died" in str(error.value)
    assert pool.sent.count([4, 5, 6, 7]) == 3 and [5] in pool.sent
    run, call = run_on(Unreliable(fatal=[5, 8]), on_error="drop", retries=0)
    survivors(call(), ~np.isin(np.arange(9), [5, 8]))
    assert [*run.report.dropped] == [5, 8]
    assert "dropped group 5: round 1, first" in str(run.report)


def test_a_group_that_takes_too_long(clock):
    pool = Unreliable(slow=[2])
    run, call = run_on(pool, on_error="drop", timeout=0.1, retries=1)
    survivors(call(), np.arange(9) != 2)
    assert pool.abandoned == 2  # the block, then the group
    assert clock.now == pytest.approx(0.1 + 0.1 / 8)  # the search is looked at often
    assert "took longer than 0.1 s" in run.report.dropped[2]
    assert pool.sent.count([0, 1, 2, 3]) == 2 and pool.sent.count([0, 1, 3]) == 2


@pytest.mark.parametrize("slow", [[1, 2], [0, 3], [3], [0, 1, 2, 3]])
def test_groups_that_take_too_long_in_one_block(slow):
    pool = Unreliable(slow=slow)
    run, call = run_on(pool, on_error="drop", timeout=0.05, retries=0)
    survivors(call(), ~np.isin(np.arange(9), slow))
    assert pool.abandoned == 1 + len(slow) and [*run.report.dropped] == slow
    with pytest.raises(drjax.EngineError, match=f"Group {slow[0]} failed .*0.05 s, al"):
        run_on(Unreliable(slow=slow), timeout=0.05)[1]()


def test_a_block_that_is_late_though_no_group_is():
    class Together(Unreliable):
        """Blocks of more than two groups never end, unless one by one."""

        def submit(self, task, file, shared):
            handle = super().submit(task, file, shared)
            if not task.search and task.block.valid.sum() > 2:
                self._late.add(handle)
            return handle

    run, call = run_on(pool := Together(), timeout=0.05, retries=1)
    survivors(call(), np.ones(9, bool))
    assert pool.sent.count([0, 1, 2, 3]) == 6  # in each round twice, and one by one
    assert pool.sent.count([0, 1]) == 2 and not run.report.dropped


def test_a_block_is_not_blamed_for_another_one():
    class OneWorker(Unreliable):
        """What waits behind a block that ends the worker is lost too."""

        queue, gone = [], []

        def __init__(self, fatal):
            super().__init__(fatal)
            self.workers = 1

        def submit(self, task, file, shared):
            handle = super().submit(task, file, shared)
            self.queue = [*self.queue, handle]
            return handle

        def result(self, handle):
            try:
                result = super().result(handle)
            except Lost:
                self.gone = [f for f in self.queue if f is not handle]
                raise
            finally:
                self.queue.remove(handle)
            if handle in self.gone:
                raise Lost("a worker died: of another block")
            return result

    n = 2
    pool = OneWorker(fatal=[0])
    options = EngineOptions.checked(block_size=2, on_error="drop", retries=0)
    run = Runner(weighted_plan(n), pool, options)
    survivors(run(np.float32(2), slices_for(n)), np.arange(n) == 1)
    assert [*run.report.dropped] == [0]


def test_what_fails_in_no_group_alone_names_round_and_stage():
    class Broken(InProcess):
        def result(self, handle):
            raise OSError("the disk is full")

    with pytest.raises(drjax.EngineError, match="OSError: the disk is full") as error:
        run_on(Broken())[1]()
    assert error.value.round == "1" and error.value.group is None
    assert "The groups' work failed in round 1 of step, in first" in str(error.value)


# ---------------------------------------------------------------------------------
# Groups whose data is wrong, or cannot be loaded

N, BAD = 8, 3


class Data:
    """Slices read by index, one of which is another, or raises."""

    def __init__(self, bad):
        self.bad, (self.x, self.w) = bad, slices_for(N)

    def __len__(self):
        return N

    def __getitem__(self, i):
        if i != BAD:
            return self.x[i], self.w[i]
        if isinstance(self.bad, Exception):
            raise self.bad
        return self.bad(self.x[i]), self.w[i]


WRONG = {
    "a string": (lambda x: "abc", r"its data\[0\] is 'abc', which is no array: "),
    "an array of strings": (
        lambda x: np.array("abc"),
        r"data\[0\] is <U3\[\], but the",
    ),
    "an object": (
        lambda x: np.array(None),
        r"its data\[0\] is an array of Python objects, .* nulls",
    ),
    "float64": (
        lambda x: np.float64(x),
        r"is float64\[\], but the plan is for float32\[\]: convert it to float32",
    ),
    "int64": (lambda x: np.int64(x), r"is int64\[\], but .*: convert it to float32"),
    "a loader": (OSError("no disk"), "loading group 3 raised OSError: no disk"),
}


@pytest.mark.parametrize("how", ["raise", "drop"])
@pytest.mark.parametrize("what", WRONG)
def test_a_group_whose_data_is_wrong(what, how):
    bad, text = WRONG[what]
    run = in_process.compile(weighted_plan(N), block_size=2, on_error=how)
    if how == "raise":
        with pytest.raises(drjax.EngineError, match=text) as error:
            run(np.float32(2), Groups(Data(bad)))
        assert (error.value.round, error.value.group) == ("1", BAD)
        assert "Group 3 failed in round 1 of step, in first" in str(error.value)
    else:
        survivors(run(np.float32(2), Groups(Data(bad))), np.arange(N) != BAD)
        assert [*run.report.dropped] == [BAD]


@pytest.mark.parametrize("how", ["raise", "drop"])
def test_an_iterator_ends_where_it_raises(how):
    data = Data(OSError("no disk"))
    run = in_process.compile(weighted_plan(N), block_size=2, on_error=how)
    text = (
        "Group 3 failed in round 1 of step, in first.*: loading group 3 raised "
        "OSError: no disk; groups 4 to 7 cannot be read either, as an iterator ends "
        "where it raises: give Groups a sequence"
    )
    with pytest.raises(drjax.EngineError, match=text) as error:
        run(np.float32(2), Groups(lambda: (data[i] for i in range(N))))
    assert (error.value.round, error.value.group) == ("1", BAD)


@pytest.mark.parametrize("how", ["raise", "drop"])
def test_an_iterator_that_raises_after_the_last_group(how):
    def items():
        data = Data(lambda x: x)
        yield from (data[i] for i in range(N))
        raise OSError("no disk")

    run = in_process.compile(weighted_plan(N), block_size=2, on_error=how)
    text = "The iterator over the groups raised after the last one: OSError: no disk"
    with pytest.raises(drjax.EngineError, match=text) as error:
        run(np.float32(2), Groups(items))
    assert error.value.group is None


def test_a_sequence_of_another_length():
    run = in_process.compile(weighted_plan(N + 1))
    text = "The plan is for 9 groups, got 8"
    raises(drjax.DrjaxError, text, run, np.float32(2), Groups(Data(np.copy)))


def test_lists_of_other_lengths_in_a_file_keep_their_dtype(tmp_path):
    pa, pq = map(importlib.import_module, ("pyarrow", "pyarrow.parquet"))
    lists = [[1.0, 2.0], [3.0, 4.0, 5.0], None, [1.0, None, 2.0], [1.0, 1.0, 1.0]]
    table = pa.table({"x": pa.array(lists, pa.list_(pa.float32()))})
    pq.write_table(table, tmp_path / "groups.parquet")
    total = drjax.program(clients=5)(drjax.reduce_sum)
    plan = drjax.make_plan(total)(np.zeros((5, 3), np.float32))
    run = in_process.compile(plan, on_error="drop")
    result = run(Parquet(tmp_path / "groups.parquet"))
    np.testing.assert_array_equal(result, [4, 5, 6])
    assert sorted(run.report.dropped) == [0, 2, 3]
    assert "float32[2]" in run.report.dropped[0]
    assert "nulls, or lists that differ in length" in run.report.dropped[3]


@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 0)])
@pytest.mark.parametrize("others", [(), ("y",)])
def test_empty_lists_in_a_file(shape, others, tmp_path):
    pa, pq = map(importlib.import_module, ("pyarrow", "pyarrow.parquet"))
    kind = pa.list_(pa.float32())
    for _ in shape[1:]:
        kind = pa.list_(kind)
    columns = {"x": pa.array([np.zeros(shape).tolist()] * 3, kind)}
    columns |= {name: pa.array([1.0, 2.0, 3.0], pa.float32()) for name in others}
    pq.write_table(pa.table(columns), tmp_path / "groups.parquet")
    x = np.zeros((3, *shape), np.float32)
    arg = {"x": x, "y": np.zeros(3, np.float32)} if others else x
    plan = drjax.make_plan(drjax.program(clients=3)(drjax.reduce_sum))(arg)
    result = in_process.compile(plan)(Parquet(tmp_path / "groups.parquet"))
    assert jax.tree.map(np.shape, result) == (
        {"x": shape, "y": ()} if others else shape
    )


@pytest.mark.sampled
@pytest.mark.parametrize("bad", [[0, 2999], [1234], range(2900), range(3000)])
def test_groups_of_a_large_block_that_yield_nan(bad, monkeypatch):
    tried = []

    def failures(stage, block, shared, suspects, check_nans):
        tried.append(len(suspects))
        return one_by_one(stage, block, shared, suspects, check_nans)

    one_by_one = worker._failures
    monkeypatch.setattr(worker, "_failures", failures)
    n, (x, w) = 3000, slices_for(3000)
    good = ~np.isin(np.arange(n), bad)
    keys = {"on_error": "drop", "check_nans": True, "min_groups": 0}
    run = in_process.compile(weighted_plan(n), block_size=n, **keys)
    out = run(np.float32(2), (np.where(good, x, -x), w))
    assert sorted(run.report.dropped) == [*bad]
    assert sum(tried) <= (128 if len(bad) < 3 else n)
    if good.any():
        survivors(out, good)
