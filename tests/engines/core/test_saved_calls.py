"""State of the groups that outlives the driver: `keep=` with `checkpoint=`.

Covers: drjax.engines.core.saved_calls, drjax.engines.core.checkpoint.
"""

import itertools
import os

import jax
import numpy as np
import pytest

import drjax
from drjax.backends import in_process
from drjax.engines.core.driver import Runner
from drjax.engines.core.options import EngineOptions
from drjax.engines.in_process.adapter import InProcess
from tests.helpers import kept_programs as programs
from tests.helpers.full_disk import files_of_at_most
from tests.helpers.raising import raises

pytestmark = pytest.mark.usefixtures("leaks_unchecked")

N, BLOCK, CALLS = 4, 2, 4


class Crash(BaseException):
    """Not an error that anything catches."""


class Dying(InProcess):
    """A pool that crashes before each block of these numbers."""

    def __init__(self, crashes=()):
        super().__init__()
        self.crashes, self.sent = crashes, itertools.count()

    def submit(self, task, file, shared):
        if next(self.sent) in self.crashes:
            raise Crash
        return super().submit(task, file, shared)


@pytest.fixture(scope="module", params=["scaffold", "diloco"])
def algorithm(request):
    chosen = programs.ALGORITHMS[request.param]
    with jax.check_tracer_leaks(False):
        return chosen._replace(plan=chosen.plan(N), start=chosen.start(N))


@pytest.fixture(scope="module")
def scaffold():
    chosen = programs.ALGORITHMS["scaffold"]
    with jax.check_tracer_leaks(False):
        return chosen._replace(plan=chosen.plan(N), start=chosen.start(N))


def runner(algorithm, folder, crashes=(), **options):
    options = EngineOptions.checked(block_size=BLOCK, checkpoint=folder, **options)
    return Runner(algorithm.plan, Dying(crashes), options, keep=algorithm.keep)


def state_of(results):
    """What the next call takes, of what a call has returned."""
    return results[0] if isinstance(results[0], dict) else results


def go_on(run, algorithm, calls=CALLS):
    """Make the calls that are left, of so many; return the state after the last."""
    done, results = run.restore() or (0, None)
    state = algorithm.start if results is None else state_of(results)
    return algorithm.run(run, state, calls - done, programs.data(N))


def arrays(state):
    fetch = lambda x: x.fetch() if hasattr(x, "fetch") else x
    return [np.asarray(x) for x in jax.tree.leaves(jax.tree.map(fetch, state))]


def same_bits(a, b):
    for x, y in zip(arrays(a), arrays(b), strict=True):
        np.testing.assert_array_equal(x, y)


def expected(algorithm):
    run = in_process.compile(algorithm.plan, block_size=BLOCK, keep=algorithm.keep)
    return algorithm.run(run, algorithm.start, CALLS, programs.data(N))


@pytest.mark.parametrize("block", range(CALLS * N // BLOCK))
def test_a_crash_in_each_block_loses_one_call_at_most(algorithm, tmp_path, block):
    with pytest.raises(Crash):
        go_on(runner(algorithm, tmp_path, [block]), algorithm)
    run = runner(algorithm, tmp_path)
    done = (run.restore() or (0, None))[0]
    assert done == block // (N // BLOCK)
    same_bits(go_on(run, algorithm), expected(algorithm))
    # Those of two calls, and what stays of each: one file for a leaf.
    leaves = len(run.kept.staying_values)
    kinds = sorted(name.partition("-")[0] for name in os.listdir(tmp_path))
    assert kinds[:2] == ["call"] * 2 and kinds.count("slices") <= 2 * leaves
    assert not [kind for kind in kinds if kind.startswith((".", "step"))]


@pytest.mark.once
def test_a_crash_after_each_file(scaffold, tmp_path, monkeypatch):
    """Also between the results of a call and the end of its own checkpoint."""
    from drjax import _storage

    write, remove = _storage.LocalFolder.write, _storage.LocalFolder.remove
    right = expected(scaffold)
    for crash in itertools.count():
        folder, count, crashed = tmp_path / str(crash), itertools.count(), False

        def counted(function, count=count, crash=crash):
            def call(place, name, *args):
                # A process that dies leaves its lock, which nobody then has.
                if "lock" not in name and next(count) == crash:
                    raise Crash
                return function(place, name, *args)

            return call

        with monkeypatch.context() as patch:
            patch.setattr(_storage.LocalFolder, "write", counted(write))
            patch.setattr(_storage.LocalFolder, "remove", counted(remove))
            try:
                go_on(runner(scaffold, folder), scaffold)
            except Crash:
                crashed = True
        same_bits(go_on(runner(scaffold, folder), scaffold), right)
        if not crashed:
            break
    # Two files for each call, and two that go from the third on.
    assert crash == 2 * CALLS + 2 * (CALLS - 2)


def test_a_damaged_call_costs_one_call(scaffold, tmp_path):
    right = go_on(runner(scaffold, tmp_path), scaffold)
    newest = max(tmp_path.glob("call-*"))
    for path in (max(tmp_path.glob("slices-*"), key=os.path.getmtime), newest):
        whole = path.read_bytes()
        path.write_bytes(whole[:-40] + b"damaged!" + whole[-32:])
        run = runner(scaffold, tmp_path)
        with pytest.warns(RuntimeWarning, match=f"{path.name}.* call {CALLS - 1} "):
            done, _ = run.restore() or pytest.fail()
        assert done == CALLS - 1
        path.write_bytes(whole)
    newest.write_bytes(b"")
    run = runner(scaffold, tmp_path)
    with pytest.warns(RuntimeWarning, match="What call 3 returned is used"):
        done, state = run.restore() or pytest.fail()
    text = "The checkpoint in .* has the results of 4 calls, and this driver .* 3"
    with pytest.raises(drjax.EngineError, match=text):
        run(*state, programs.data(N))
    newest.unlink()
    same_bits(scaffold.run(run, state, 1, programs.data(N)), right)
    for path in tmp_path.glob("call-*"):
        path.write_bytes(b"")
    text = "The results of no call can be used: "
    raises(drjax.EngineError, text, runner(scaffold, tmp_path).restore)


def test_what_was_not_restored_is_not_overwritten(scaffold, tmp_path):
    first = runner(scaffold, tmp_path)
    state = go_on(first, scaffold, 2)
    second = runner(scaffold, tmp_path)
    text = "has the results of 2 calls, and this driver has made or restored 0"
    with pytest.raises(drjax.EngineError, match=text):
        second(*scaffold.start, programs.data(N))
    # Two drivers, one after the other: the first notices.
    go_on(second, scaffold, 3)
    with pytest.raises(drjax.EngineError, match="of 3 calls, and this driver .* 2"):
        first(*state, programs.data(N))


def test_other_plans_and_options(scaffold, tmp_path):
    go_on(runner(scaffold, tmp_path), scaffold, 1)
    other = programs.personalization_plan(N)
    options = EngineOptions.checked(checkpoint=tmp_path)
    run = Runner(other, InProcess(), options, keep=programs.PERSONALIZATION_KEEP)
    with pytest.raises(drjax.EngineError, match="has the results of another plan"):
        run.restore()
    text = "restore() needs a function with keep= and checkpoint="
    raises(drjax.DrjaxValueError, text, in_process.compile(other).restore)


def test_a_full_disk(scaffold, tmp_path):
    run = runner(scaffold, tmp_path)
    state = go_on(run, scaffold, 1)
    with files_of_at_most(16), pytest.raises(drjax.EngineError) as e:
        run(*state, programs.data(N))
    assert "cannot be" in str(e.value) and str(tmp_path) in str(e.value)
    same_bits(scaffold.run(run, state, CALLS - 1, programs.data(N)), expected(scaffold))


def test_dropped_groups_keep_their_slices_over_a_crash(scaffold, tmp_path):
    x, y = programs.data(N)
    bad = np.where(np.arange(N)[:, None] == 1, np.nan, y).astype(np.float32)
    options = {"on_error": "drop", "check_nans": True}
    run = runner(scaffold, tmp_path, **options)
    state = go_on(run, scaffold, 1)
    before = state[2].fetch()[1]
    run(*state, (x, bad))
    run = runner(scaffold, tmp_path, **options)
    done, state = run.restore() or pytest.fail()
    assert done == 2
    np.testing.assert_array_equal(state[2].fetch()[1], before)
