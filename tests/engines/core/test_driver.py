"""The engines' core, with blocks that run in this process.

Covers: drjax.engines.core.driver, drjax._plan_file.export_plan,
drjax.engines.core.executable_plan, drjax.engines.core.stage_results,
drjax.engines.core.job, drjax.engines.core.pool_scheduler,
drjax.engines.core.protocols, drjax.engines.core.combine,
drjax.engines.core.number_of_groups, drjax.engines.core.options,
drjax.engines.core.progress, drjax._extras,
drjax.engines.core.blocks_of_groups, drjax.engines.slices.groups,
drjax.engines.in_process.adapter.
"""

import contextlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import drjax
from drjax._extras import needed
from drjax.backends import in_process, reference
from drjax.backends.groups import Groups
from drjax.engines.core import pool_scheduler
from drjax.engines.core.driver import Runner
from drjax.engines.core.options import EngineOptions
from drjax.engines.in_process.adapter import InProcess
from drjax.engines.slices.groups import Source
from drjax.plan import Value
from tests.helpers.cases import CASES
from tests.helpers.conformance import (
    Conformance,
    runs,
    slices_for,
    survivors,
    weighted_plan,
)
from tests.helpers.raising import raises

pytestmark = pytest.mark.usefixtures("leaks_unchecked")


class TestLocal(Conformance):
    compile = staticmethod(in_process.compile)
    cases = CASES[::2]


def test_slices_of_dropped_groups_are_empty():
    n, (x, w) = 6, slices_for(6)

    @drjax.program(clients=n)
    def late(data):
        x, w = data
        first = drjax.map_fn(jnp.sin, x)
        mean = drjax.reduce_mean(first)
        root = drjax.map_fn(lambda w, m: jnp.sqrt(w) + m, (w, drjax.broadcast(mean)))
        return first, root, data, drjax.reduce_mean(root)

    w = np.where(np.arange(n) == 2, -w, w)
    plan = drjax.make_plan(late)((x, w))
    run = in_process.compile(plan, on_error="drop", check_nans=True)
    for args in ((x, w), Groups([*zip(x, w, strict=True)])):
        out = run(args)
        good = np.arange(n) != 2
        np.testing.assert_allclose(out[0], np.where(good, np.sin(x), np.nan), rtol=1e-6)
        for result, value in zip(out[2], (x, w), strict=True):
            np.testing.assert_array_equal(result, np.where(good, value, np.nan))
    items: list = [*zip(x, np.abs(w), strict=True)]
    items[4] = np.zeros(2, np.float32)
    out = run(Groups(items))
    assert [*run.report.dropped] == [4] and np.isnan(out[2][0][4])


# ---------------------------------------------------------------------------------
# Where the groups' data is


def test_groups_are_made_a_bounded_number_at_a_time():
    n, seen, (x, w) = 64, [], slices_for(64)

    def items():
        for i in range(n):
            seen.append(i)
            yield {"x": x[i], "w": w[i]}

    @drjax.program(clients=n)
    def total(data):
        y = drjax.map_fn(lambda d: d["x"] * d["w"], data)
        mean = drjax.reduce_mean(y)
        again = drjax.map_fn(lambda d, m: d["x"] - m, (data, drjax.broadcast(mean)))
        return drjax.reduce_max(again), data

    class Watched(InProcess):
        def submit(self, work, file, shared):
            most.append(len(seen) % n - int(work.block.groups[-1]))
            assert work.block.groups.size == 4
            return super().submit(work, file, shared)

    most: list[int] = []
    plan = drjax.make_plan(total)({"x": x, "w": w})
    run = Runner(plan, Watched(2), EngineOptions.checked(block_size=4))
    largest, data = run(Groups(items))
    assert largest == pytest.approx(64 - (x * w).mean(), rel=1e-6)
    np.testing.assert_array_equal(data["x"], x)
    assert max(most) <= 1 and len(seen) == 4 * n  # two rounds, and two results


def test_a_range_of_groups_reads_no_other_data():
    read = []

    class Items:
        def __len__(self):
            return 6

        def __getitem__(self, i):
            read.append(i)
            return np.float32(i)

    values = [Value("x", (), "float32", (drjax.Partition("clients", 6),), 4)]
    source = Source(Groups(Items()), jax.tree.structure(0), values, 6)
    for start, stop in (0, 3), (3, 3), (3, 6):
        got = []
        for group, inputs in source.between(start, stop):
            assert isinstance(inputs, list)
            got.append((group, float(inputs[0])))
        assert got == [(i, i) for i in range(start, stop)]
    assert read == [0, 1, 2, 3, 4, 5]


def test_groups_beyond_the_last_of_many():
    """More of them than the integers of which Python has one object each."""
    sums = drjax.program(clients=300)(drjax.reduce_sum)
    run = in_process.compile(drjax.make_plan(sums)(np.ones(300, np.float32)))
    items = [np.float32(1)] * 301
    text = "The plan is for 300 groups, got more"
    raises(drjax.DrjaxError, text, run, Groups(items))
    assert run(Groups(items[1:])) == 300


def test_groups_that_do_not_fit():
    plan = weighted_plan(3)
    run = in_process.compile(plan)
    x, w = slices_for(3)
    items = [*zip(x, w, strict=True)]
    fails = lambda text, *args: raises(drjax.DrjaxError, text, run, *args)
    text = "an iterator, list_iterator. Give a list, or a function"
    raises(drjax.DrjaxTypeError, text, Groups, iter(items))
    fails("takes model as a global value, got Groups", Groups(items), (x, w))
    two = np.float32(2)
    fails("The plan is for 3 groups, got 2", two, Groups(items[:2]))
    fails("The plan is for 3 groups, got more", two, Groups([*items, items[0]]))
    fails("Group 0 failed in round 1", two, Groups([{"x": x[0], "w": w[0]}] * 3))
    fails(
        "its data has the structure [*, *], but the plan is for (*, *)",
        two,
        Groups([[x[0], w[0]]] * 3),
    )
    fails("was planned for data[0] of shape (3,), got (2,)", two, (x[:2], w))
    total = drjax.program(clients=3)(drjax.reduce_sum)
    named = in_process.compile(drjax.make_plan(total)({"x": x, "w": w}))
    text = "the plan is for {'w': *, 'x': *}: leave out 'id' and add 'w'"
    raises(drjax.DrjaxError, text, named, Groups([{"x": x[0], "id": 1}] * 3))
    text = "has the structure *, but the plan is for {'w': *, 'x': *}"
    raises(drjax.DrjaxError, text, named, Groups([x[0]] * 3))
    run = drjax.backends.reference.compile(plan)
    fails("needs an array as model, got Groups", Groups(items), (x, w))


# ---------------------------------------------------------------------------------
# Loops, checkpoints, options


def rounds_plan(n=6, steps=3):
    """Rounds in a scan, with a branch and a search that communicate too."""

    @drjax.program(clients=n)
    def rounds(model, data):
        mean = lambda f, *xs: drjax.reduce_mean(drjax.map_fn(f, xs))
        slices = drjax.map_fn(jnp.tanh, data)

        def step(model, t):
            model = 0.9 * model + mean(lambda m, d: jnp.sin(m + d), *one(model, slices))
            return model, (t * model, drjax.map_fn(jnp.add, one(model, slices)))

        one = lambda model, slices: (drjax.broadcast(model), slices)
        model, each = jax.lax.scan(step, model, jnp.arange(steps, dtype=jnp.float32))
        shrink = lambda m: mean(lambda m, d: 0.5 * m * jnp.abs(d), *one(m, slices))
        small = jax.lax.while_loop(lambda m: jnp.abs(m) > 1e-2, shrink, model)
        last = jax.lax.cond(
            model > 0, shrink, lambda m: m + drjax.reduce_max(slices), small
        )
        return model, each, small, last

    data = jnp.linspace(-1.0, 2.0, n)
    return drjax.make_plan(rounds)(jnp.float32(1), data), (np.float32(1), data)


def same(result, expected):
    def check(a, b):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-6)

    jax.tree.map(check, result, expected)


@pytest.mark.slow
def test_loops_of_every_sort():
    plan, args = rounds_plan()
    run = in_process.compile(plan, block_size=4)
    same(run(*args), reference.compile(plan)(*args))
    rounds = [stage.round for stage in run.report.stages]
    assert rounds.count("1.scan.0.1") == 3, rounds


@drjax.program(clients=4)
def previous_step(x, first):
    def step(carry, now):
        before, total = carry
        return (now, total + drjax.reduce_sum(drjax.map_fn(jnp.sum, before))), None

    return jax.lax.scan(step, (first, jnp.float32(0)), x)[0]


@drjax.program(clients=4)
def swapped(x, first):
    def step(carry, _):
        a, b, total = carry
        total += drjax.reduce_sum(drjax.map_fn(lambda a, b: jnp.sum(a * b[0]), (a, b)))
        return (b, a, total), a

    return jax.lax.scan(step, (x[0], first, jnp.float32(0)), length=3)


@drjax.program(clients=4)
def of_a_branch(x, first):
    def step(total, now):
        sines = lambda x: drjax.map_fn(jnp.sin, x)
        now = jax.lax.cond(total < 0, sines, lambda x: x, now)
        return total + drjax.reduce_sum(drjax.map_fn(jnp.sum, now)), now

    return jax.lax.scan(step, drjax.reduce_sum(first)[0], x)


@pytest.mark.sampled
@pytest.mark.parametrize("program", [previous_step, swapped, of_a_branch])
def test_scans_that_return_groups(program):
    """What a step carries or stacks are slices that are not read yet."""
    x = np.linspace(-1, 2, 24, dtype=np.float32).reshape(4, 3, 2)
    steps, first = np.moveaxis(x, 1, 0), x[:, 0] + 1
    plan = drjax.make_plan(program)(steps, first)
    result = in_process.compile(plan)(Groups([*x]), Groups([*first]))
    same(result, reference.compile(plan)(steps, first))


class Crash(BaseException):
    """Not an error that anything catches."""


class Crashing(InProcess):
    """A pool whose driver ends when it sends its k-th block."""

    def __init__(self, after):
        super().__init__()
        self.left = after

    def submit(self, work, file, shared):
        self.left -= 1
        if self.left < 0:
            raise Crash
        return super().submit(work, file, shared)


@pytest.mark.slow
@pytest.mark.parametrize("after", [3])
def test_a_call_goes_on_where_it_ended(after, tmp_path):
    plan, args = rounds_plan()
    options = EngineOptions.checked(block_size=6, checkpoint=tmp_path / "run")
    with pytest.raises(Crash):
        Runner(plan, Crashing(after), options)(*args)
    whole = in_process.compile(plan, block_size=6)
    same(expected := whole(*args), reference.compile(plan)(*args))
    again = Runner(plan, InProcess(), options)
    jax.tree.map(np.testing.assert_array_equal, again(*args), expected)
    blocks = lambda run: sum(s.blocks for s in run.report.stages)
    assert blocks(again) == blocks(whole) - after
    assert again.report.resumed
    again(*args)  # from the start: the first run is forgotten
    assert blocks(again) == blocks(whole) and not again.report.resumed


def test_a_checkpoint_of_another_call(tmp_path):
    plan, args = rounds_plan()
    options = EngineOptions.checked(checkpoint=tmp_path / "run")
    with pytest.raises(Crash):
        Runner(plan, Crashing(4), options)(*args)
    run = Runner(plan, InProcess(), options)
    text = "is of another call: of another plan or of other arguments"
    raises(drjax.EngineError, text, run, np.float32(2), args[1])
    same(run(*args), reference.compile(plan)(*args))


def test_dropped_groups_stay_dropped_when_a_call_goes_on(tmp_path):
    x, w = slices_for(9)
    bad = np.isin(np.arange(9), [3, 6])
    args = np.float32(2), (np.where(bad, -x, x), w)
    keys = {"on_error": "drop", "check_nans": True, "block_size": 4}
    options = EngineOptions.checked(checkpoint=tmp_path / "run", **keys)
    with pytest.raises(Crash):  # in the second round
        Runner(weighted_plan(9), Crashing(4), options)(*args)
    again = Runner(weighted_plan(9), InProcess(), options)
    survivors(again(*args), ~bad)
    assert [*again.report.dropped] == [3, 6]
    assert [s.round for s in again.report.stages] == ["2"]


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8", "uint32", "bool"])
def test_dtypes(dtype, tmp_path):
    @drjax.program(clients=9)
    def f(x):
        y = drjax.map_fn(lambda x: x[::-1], x)
        results = drjax.reduce_sum(y), drjax.reduce_mean(y), drjax.reduce_max(y)
        return *results, drjax.reduce_min(y), drjax.gather(y), y

    x = jnp.asarray(np.arange(27).reshape(9, 3) % 5, dtype)
    plan = drjax.make_plan(f)(x)
    run = in_process.compile(plan, block_size=2, checkpoint=tmp_path / "run")
    for a, b in zip(run(x), reference.compile(plan)(x), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def test_a_loaded_plan_and_one_without_groups(tmp_path):
    plan = weighted_plan(5)
    plan.save(tmp_path / "plan.drjax")
    loaded = drjax.load_plan(tmp_path / "plan.drjax")
    args = np.float32(2), slices_for(5)
    same(in_process.compile(loaded)(*args), reference.compile(plan)(*args))
    alone = drjax.make_plan(lambda x, y: {"y": jnp.sin(x), "x": y})(1.0, 2.0)
    assert in_process.compile(alone)(0.0, 3.0) == {"y": 0.0, "x": 3.0}


def test_options():
    wrong = lambda error, text, **options: raises(
        error, text, lambda: in_process.compile(weighted_plan(3), **options)
    )
    wrong(drjax.DrjaxTypeError, "Engines take the options block_size, ", blocks=3)
    wrong(drjax.DrjaxValueError, 'must be "raise" or "drop", got', on_error="skip")
    wrong(drjax.DrjaxValueError, "block_size must be an integer from 1", block_size=0)
    wrong(drjax.DrjaxValueError, "retries must be an integer from 0", retries=-1)
    wrong(drjax.DrjaxValueError, "min_groups must be an integer", min_groups=None)
    for timeout in (0, -1, float("nan"), "5", True):
        text = f"must be a positive number of seconds, got {timeout!r}."
        wrong(drjax.DrjaxValueError, text, timeout=timeout)
    assert EngineOptions.checked(timeout=np.float32(0.5)).timeout == 0.5


@pytest.mark.parametrize("workers", [0, -1, 2.5, "2", None, True])
def test_a_number_of_workers_that_is_none(workers):
    text = f"workers must be an integer from 1, got {workers!r}."
    make = lambda: in_process.compile(weighted_plan(3), workers=workers)
    raises(drjax.DrjaxValueError, text, make)


def test_progress(capfd):
    in_process.compile(weighted_plan(3), progress=True)(np.float32(2), slices_for(3))
    assert "round 1" in capfd.readouterr().err
    in_process.compile(weighted_plan(3))(np.float32(2), slices_for(3))
    assert not capfd.readouterr().err


def test_an_extra_that_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "mine", None)
    text = "drjax.backends.mine needs mine, which is not installed here. Install it"
    raises(drjax.EngineError, text, needed, "mine.app", "mine", "drjax.backends.mine")


@pytest.mark.parametrize("public", [EngineOptions, Groups, in_process.compile])
def test_docstring_example_runs(public):
    assert runs(public)


def test_the_driver_does_not_read_the_file_that_it_makes(monkeypatch):
    from drjax._plan_file import load

    plan = drjax.make_plan(drjax.program(clients=4)(drjax.reduce_mean))(jnp.arange(4.0))
    run = in_process.compile(plan)
    assert run(jnp.arange(4.0)) == 1.5  # the worker has read it
    monkeypatch.setattr(load, "decode", lambda *_, **__: 1 / 0)
    again = in_process.compile(plan)
    assert again.file.data == run.file.data


def test_an_exported_plan_is_not_exported_again():
    from drjax._plan_file.export_plan import export_plan

    plan = drjax.make_plan(drjax.program(clients=4)(drjax.reduce_mean))(jnp.arange(4.0))
    exported = export_plan(plan)
    pairs = zip(exported.stages(), export_plan(exported).stages(), strict=True)
    assert all(one.exported is two.exported for (_, one), (_, two) in pairs)
    assert any(stage.exported is not None for _, stage in exported.stages())


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("size", ["small", "large"])
def test_blocks_are_read_only_so_far_ahead_of_a_slow_one(size, workers, monkeypatch):
    """Four blocks for each worker: two in flight, and as many with a result.

    Small blocks are all read: a slow one stops no worker.
    """
    if size == "large":
        monkeypatch.setattr(pool_scheduler, "_WAITING", 0)

    class Slow(InProcess):
        """The first block ends when no other is left."""

        first: object = None
        sent, most = 0, 0

        def submit(self, task, file, shared):
            handle = super().submit(task, file, shared)
            self.sent += 1
            self.first = self.first or handle
            return handle

        def wait(self, handles, timeout):
            if others := [x for x in handles if x is not self.first]:
                return others
            self.most = self.most or self.sent
            return handles

    plan = drjax.make_plan(drjax.program(clients=20)(drjax.reduce_sum))(jnp.zeros(20))
    run = Runner(plan, pool := Slow(workers), EngineOptions.checked(block_size=1))
    assert run(np.ones(20, np.float32)) == 20 and run.report.resumed == 0
    assert pool.most == (4 * workers if size == "large" else 20) and pool.sent == 20


def test_blocks_that_wait_are_bounded_by_their_bytes(monkeypatch):
    """Of sums, of slices that are read later, and of data that the driver has read."""
    n, sizes = 20, []

    class Sizes(pool_scheduler._OrderedResults):
        def add(self, state, result):
            super().add(state, result)
            sizes.append(self.size)

        def ready(self):
            yield from super().ready()
            assert self.waiting or self.size == 0

    @drjax.program(clients=n)
    def program(x):
        return drjax.reduce_sum(x), drjax.map_fn(jnp.sin, x)

    monkeypatch.setattr(pool_scheduler, "_OrderedResults", Sizes)
    zeros = np.zeros((n, 1000), np.float32)
    plan = drjax.make_plan(program)(zeros)
    for data, arrays in ((zeros, 2), (Groups([*zeros]), 3)):
        in_process.compile(plan, block_size=1)(data)
        one = pool_scheduler._OBJECTS + 4000 * arrays
        assert sizes[0] == one and {size % one for size in sizes} == {0}
        sizes.clear()


def test_an_interrupt_ends_the_blocks_in_flight():
    """Ctrl-C while blocks run: their workers are not left at work for the next call."""

    class Interrupted(InProcess):
        def __init__(self):
            super().__init__(2)
            self.stop, self.submitted, self.abandoned = True, [], []

        def submit(self, task, file, shared):
            self.submitted.append(super().submit(task, file, shared))
            return self.submitted[-1]

        def wait(self, handles, timeout):
            if self.stop:
                raise KeyboardInterrupt
            return handles

        def abandon(self, handle):
            self.abandoned.append(handle)

    plan = drjax.make_plan(drjax.program(clients=4)(drjax.reduce_sum))(jnp.zeros(4))
    pool = Interrupted()
    run = Runner(plan, pool, EngineOptions.checked(block_size=1))
    with pytest.raises(KeyboardInterrupt):
        run(np.ones(4, np.float32))
    assert pool.abandoned and {*pool.abandoned} == {*pool.submitted}
    pool.stop = False
    assert run(np.ones(4, np.float32)) == 4


@pytest.mark.parametrize("count", [3, 3000])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "bool"])
def test_blocks_are_combined_in_wide_dtypes(count, dtype):
    """Results of a few bytes, which take a short way, and large ones are the same."""
    n = 5
    x = jnp.asarray(np.arange(n * count).reshape(n, count) % 1009 + 1000, dtype)

    @drjax.program(clients=n)
    def program(x):
        highest = drjax.reduce_max(x)
        if dtype == "bool":
            return highest, highest
        return drjax.reduce_sum(x), highest

    plan = drjax.make_plan(program)(x)
    total, highest = in_process.compile(plan, block_size=1)(x)
    assert total.dtype == highest.dtype == x.dtype
    np.testing.assert_array_equal(highest, np.max(x, 0))
    if dtype != "bool":
        exact = np.sum(np.asarray(x).astype("float64"), 0).astype(x.dtype)
        np.testing.assert_array_equal(total, exact)


@pytest.mark.parametrize("count", [3, 30_000])
def test_results_are_arrays_on_one_device(count):
    """Whatever the caller's context is; small ones and large ones are made apart."""
    mean = drjax.program(clients=2)(drjax.reduce_mean)
    x = np.ones((2, count), np.float32)
    run = in_process.compile(drjax.make_plan(mean)(x))
    mesh = jax.make_mesh((jax.device_count(),), ("d",))
    for context in (contextlib.nullcontext(), jax.set_mesh(mesh), jax.disable_jit()):
        with context:
            result = run(x)
        assert isinstance(result, jax.Array) and len(result.sharding.device_set) == 1
        np.testing.assert_array_equal(result, x[0])
