"""An exchange of files, whose workers are in this process: slices stay in its files.

Covers: drjax.engines.beam.file_exchange, drjax.engines.beam.kept_files,
drjax.engines.slices.coordinates.
"""

import collections
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import drjax
from drjax.backends import in_process, reference
from drjax.engines.beam.file_exchange import FileExchange
from drjax.engines.core import driver
from drjax.engines.core.combine import add, stacked
from drjax.engines.core.driver import Runner
from drjax.engines.core.options import EngineOptions
from drjax.engines.slices.coordinates import gathers_for_columns
from drjax.engines.slices.worker_slices import WorkerSlices
from tests.helpers.raising import raises

pytestmark = pytest.mark.usefixtures("leaks_unchecked")


class Files:
    """A file system in memory."""

    def __init__(self):
        self.files: dict[str, bytes] = {}
        self.reads = collections.Counter[str]()

    def make(self, folder):
        pass

    def read(self, path):
        self.reads[path] += 1
        return self.files[path]

    def write(self, path, data):
        self.files[path] = data

    def listed(self, prefix):
        return [path for path in self.files if path.startswith(prefix)]

    def remove(self, folder):
        for path in self.listed(f"{folder}/"):
            del self.files[path]


class Exchange(FileExchange):
    """Workers in this process, which exchange the columns of files in memory."""

    shuffle = True

    def __init__(self, workers, files):
        super().__init__(workers, files)
        self.runs: list[Done] = []

    def start(self, stage_run, folder):
        job, totals = stage_run.job(), [None] * (len(stage_run.ops) + 1)
        ops, parts = (*stage_run.ops, "sum"), collections.defaultdict(list)
        for path, leaves in stage_run.pieces if self.shuffle else ():
            for start, part in stage_run.parts(path, leaves):
                parts[start].append(part)
        for start in stage_run.starts:
            for block, failed in stage_run.blocks(start, parts.get(start)):
                result = job.run(block, failed, encode=False)
                stage_run.report(block, result)
                good = block.without_failed(result.failed).valid
                if good.any():
                    count = np.int64(good.sum())
                    totals = add(ops, totals, [*result.partials, count])
        stage_run.write_totals(stacked(totals))
        self.runs.append(Done())
        return self.runs[-1]


class Done:
    """A run that has ended."""

    ends = 0

    def wait(self, seconds):
        return True

    def error(self):
        return None

    def end(self):
        self.ends += 1


def exchange(plan, shuffle=True, **options):
    engine = Exchange(2, files := Files())
    engine.stays, engine.shuffle = "kept", shuffle
    return Runner(plan, engine, EngineOptions.checked(**options)), files


@drjax.program(clients=6)
def f(x, scale):
    """Two values of the groups, one of which is returned, too."""
    y, z = drjax.map_fn(lambda x, s: (jnp.sqrt(x) * s, x), (x, drjax.broadcast(scale)))
    pairs = {"y": y, "z": jnp.stack([z, -z], -1)}
    medians = drjax.reduce_columns(lambda c: jnp.median(c, 0) * scale, pairs)
    return medians, drjax.reduce_columns(lambda c: jnp.sort(c)[1:], z), z


def arguments():
    x = np.random.RandomState(0).rand(6, 3, 5).astype(np.float32)
    return x, np.float32(2)


@pytest.mark.parametrize("shuffle", [True, False])
def test_the_driver_reads_no_slices(shuffle, monkeypatch):
    args = arguments()
    plan = drjax.make_plan(f)(*args)
    want, read = reference.compile(plan)(*args), []
    real = WorkerSlices.whole
    monkeypatch.setattr(
        WorkerSlices, "whole", lambda x: (read.append(x.value.name), real(x))[1]
    )
    run, files = exchange(plan, shuffle, block_size=2)
    jax.tree.map(np.testing.assert_array_equal, run(*args), want)
    engine: Any = run.engine
    assert {x.ends for x in engine.runs} == {1}
    # Only what the program returns.
    assert read == ["result[2]"]
    kept = {n for path, n in files.reads.items() if "/kept-" in path}
    # A shuffle reads each of the files once for each of three loops; and the driver
    # reads what the program returns.
    assert max(kept) <= 4 if shuffle else max(kept) > 4
    run.close()
    assert not files.files


def test_slices_of_dropped_groups_are_nan():
    x, scale = arguments()
    x[3] = -1
    plan = drjax.make_plan(f)(x, scale)
    run, _ = exchange(plan, on_error="drop", check_nans=True, block_size=2)
    medians, columns, z = run(x, scale)
    assert [*run.report.dropped] == [3]
    rest = np.delete(x, 3, axis=0)
    np.testing.assert_array_equal(
        columns[..., :4], np.sort(rest, 0)[1:].transpose(1, 2, 0)
    )
    assert np.isnan(columns[..., 4]).all() and np.isnan(z[3]).all()
    assert np.isnan(jax.tree.leaves(medians)[0]).all()


def test_a_checkpoint_has_the_slices(tmp_path):
    args = arguments()
    plan = drjax.make_plan(f)(*args)
    run, files = exchange(plan, checkpoint=str(tmp_path), block_size=2)
    want = reference.compile(plan)(*args)
    jax.tree.map(np.testing.assert_array_equal, run(*args), want)
    assert not any("/kept-" in path for path in files.reads)


def test_slices_that_the_server_needs_too():
    """The derivative takes the same columns, and cotangents of the server."""
    x = arguments()[0][0]
    f = drjax.program(clients=3)(lambda x: drjax.reduce_columns(jnp.median, x))
    plan = drjax.make_plan(f)(x)
    assert len(gathers_for_columns(plan)) == 1
    both = jax.value_and_grad(lambda x: jnp.sum(f(jnp.sin(x)) ** 2))
    plan = drjax.make_plan(both)(x)
    assert gathers_for_columns(plan) == frozenset()
    run, _ = exchange(plan)
    close = lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5)
    jax.tree.map(close, run(x), both(x))


@drjax.program(clients=6)
def gossip(x, index):
    """Moves of slices in a loop and outside, and a stack of moved slices."""

    def step(x, i):
        y = drjax.map_fn(jnp.sin, x)
        mean = lambda x, y, z: (x + y) / 2 + z
        return drjax.map_fn(mean, (x, drjax.shift(y, 1), drjax.take(y, index))), x

    x, steps = jax.lax.scan(step, x, jnp.arange(3))
    y = drjax.map_fn(jnp.cos, x)
    moved = drjax.take(y, index)
    stack = drjax.map_fn(lambda x: jnp.stack([x, -x]), moved)
    stack = jnp.moveaxis(drjax.shift(stack, 2), 0, 1)
    total, _ = jax.lax.scan(
        lambda t, y: (t + drjax.reduce_sum(y), None), jnp.zeros(2), stack
    )
    return x, steps, moved, total, drjax.put(y, index, into=y, add=True)


@pytest.mark.parametrize("index", [[5, 5, 0, -3, 9, 2], [5, 5, 0, 1, 3, 2]])
def test_workers_read_slices_that_move(index, monkeypatch):
    x = np.random.RandomState(0).randn(6, 2).astype(np.float32)
    index = np.array(index, np.int32)
    plan = drjax.make_plan(gossip)(x, index)
    want, moved = reference.compile(plan)(x, index), []
    real = driver.move_slices
    monkeypatch.setattr(
        driver, "move_slices", lambda m, *xs: (moved.append(m.op), real(m, *xs))[1]
    )
    close = lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
    run, files = exchange(plan, block_size=4)
    jax.tree.map(close, run(x, index), want)
    # The driver adds slices, and moves none.
    assert set(moved) <= {"put_add"}
    run.close()
    assert not files.files


def test_a_dropped_group_gives_nan_to_others():
    x = np.arange(4, dtype=np.float32)

    @drjax.program(clients=4)
    def f(x):
        y = drjax.map_fn(jnp.sqrt, x - 2 * (x == 2))
        return drjax.map_fn(jnp.add, (y, drjax.shift(y, 1))), drjax.reduce_sum(y)

    x[2] = -1
    plan = drjax.make_plan(f)(x)
    run, _ = exchange(plan, on_error="drop", check_nans=True, block_size=2)
    result, _ = run(x)
    expected, _ = in_process.compile(plan, on_error="drop", check_nans=True)(x)
    np.testing.assert_array_equal(result, expected)
    assert 2 in run.report.dropped


def test_slow_listings_are_rare():
    """A tenth of the time, however long one takes; the last results count, too."""

    class Slow(Files):
        listings = 0

        def listed(self, prefix):
            self.listings += "/block-" in prefix
            time.sleep(0.05)
            return super().listed(prefix)

    class Lasting(Exchange):
        def start(self, stage_run, folder):
            super().start(stage_run, folder)
            last = stage_run.starts[-1]
            (path,) = files.listed(f"{stage_run.folder}/block-{last:012}")
            files.listings = 0
            return Late(path, files.files.pop(path))

    class Late(Done):
        def __init__(self, *late):
            self.end_time, self.late = time.monotonic() + 1.5, late

        def wait(self, seconds):
            time.sleep(min(seconds, max(0, self.end_time - time.monotonic())))
            if time.monotonic() < self.end_time:
                return False
            files.write(*self.late)
            return True

    files = Slow()
    plan = drjax.make_plan(drjax.program(clients=4)(drjax.reduce_sum))(np.ones(4, "f"))
    run = Runner(plan, Lasting(1, files), EngineOptions.checked(block_size=2))
    assert run(np.arange(4, dtype=np.float32)) == 6
    assert 2 <= files.listings <= 5


@pytest.mark.parametrize("workers", [0, -1, 2.5, "2", None, True])
def test_a_number_of_workers_that_is_none(workers):
    text = f"workers must be an integer from 1, got {workers!r}."
    files: Any = None
    raises(drjax.DrjaxValueError, text, FileExchange, workers, files)
