"""Datasets of Ray Data as the groups' data.

Covers: drjax.engines.ray.dataset_rows.
"""

# pyright: reportMissingImports=false

import gc
import importlib
import os
import signal
import time
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

import drjax
from drjax.backends import Groups, in_process
from drjax.engines.ray import dataset_rows
from drjax.engines.ray.dataset_rows import DatasetRows, _dense
from tests.engines.ray.conftest import MARKS
from tests.helpers.raising import raises

N = 12
X = np.random.RandomState(0).rand(N, 3).astype(np.float32)
W = np.arange(N, dtype=np.float32)


@drjax.program(clients=N)
def step(model, data):
    """A sum, and a maximum that names the group which it is of."""
    score = lambda m, d: (m * d["x"]).sum() * d["w"]
    y = drjax.map_fn(score, (drjax.broadcast(model), data))
    return drjax.reduce_sum(y), drjax.reduce_argmax(y)


def plan_of(program=step, **options):
    kind = lambda *shape: jax.ShapeDtypeStruct(shape, np.float32)
    return drjax.make_plan(program, **options)(kind(3), {"x": kind(N, 3), "w": kind(N)})


ONE = np.ones(3, np.float32)


def check(run, data, groups=None):
    groups = np.arange(N) if groups is None else groups
    total, best = run(ONE, data)
    y = X[groups].sum(1) * W[groups]
    np.testing.assert_allclose(total, y.sum(), rtol=1e-6)
    assert best == groups[np.argmax(y)]


# ---------------------------------------------------------------------------------
# Without Ray


class InMemory(DatasetRows):
    def __init__(self, columns, counts):
        ends = np.cumsum(counts)
        names = [
            {k: x[end - count : end] for k, x in columns.items()}
            for end, count in zip(ends, counts, strict=True)
        ]
        super().__init__(range(len(counts)), counts)
        self.columns, self.reads = [x for x in names if len(x["w"])], []

    def part_of(self, group):
        i = int(np.searchsorted(self.bounds(), group, "right")) - 1
        self.reads.append(i)
        return self.columns[i], group - self.bounds()[i]


@pytest.mark.parametrize("counts", [[N], [5, 0, 1, 6], [0, 4, 4, 4, 0]])
@pytest.mark.parametrize("block", [1, 4, 5, N])
def test_rows_of_parts(counts, block):
    rows = InMemory({"x": X, "w": W}, counts)
    assert rows.bounds()[-1] == rows.count() == N
    for i in range(0, N, block):
        cursor, size = rows.cursor(i), min(block, N - i)
        batch = cursor.take(size)
        np.testing.assert_array_equal(batch["x"], X[i : i + size])
        np.testing.assert_array_equal(batch["w"], W[i : i + size])
        item = next(rows.starting(i))
        np.testing.assert_array_equal(item["x"], X[i])
        assert item["w"] == W[i]
    rows.reads.clear()
    assert [x["w"] for x in rows.starting(2)] == [*W[2:]]
    assert rows.reads == [*range(rows.reads[0], len(rows.columns))]
    check(in_process.compile(plan_of(), block_size=block), rows)


def test_one_column_is_its_value():
    rows = InMemory({"w": W}, [4, 8])
    np.testing.assert_array_equal(rows.cursor(2).take(4), W[2:6])
    assert [*rows.starting(10)] == [10.0, 11.0]


def test_lists_of_one_length_are_an_array():
    lists = np.empty(2, object)
    lists[:] = [np.ones(3), np.zeros(3)]
    assert _dense(lists).shape == (2, 3)
    lists[1] = np.zeros(2)
    assert _dense(lists) is lists and _dense(W) is W


# ---------------------------------------------------------------------------------
# On Ray


@pytest.fixture(scope="module")
def ray():
    """Ray, with a CPU for Ray Data besides those of two workers."""
    engine: Any = importlib.import_module("ray")
    importlib.import_module("ray.data").DataContext.get_current()
    engine.init(num_cpus=3, include_dashboard=False, log_to_driver=False)
    yield engine
    engine.shutdown()


@pytest.fixture(scope="module")
def actors(ray):
    result = drjax.backends.ray.Actors(2)
    yield result
    result.close()


def items(ray, indices=None, blocks=5, **columns):
    columns = {"x": X, "w": W} | columns
    indices = range(N) if indices is None else indices
    return ray.data.from_items(
        [{k: x[i] for k, x in columns.items()} for i in indices],
        override_num_blocks=blocks,
    )


def on_ray(function):
    for mark in MARKS:
        function = mark(function)
    return function


@on_ray
def test_workers_read_the_rows_and_the_driver_does_not(ray, actors, tmp_path):
    def noted(batch):
        for group in batch["w"]:
            with open(tmp_path / f"{group:.0f}", "a") as file:
                file.write(".")
        return batch

    data = items(ray).map_batches(noted)
    run = drjax.backends.ray.compile(plan_of(), workers=actors, block_size=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DatasetRows, "part_of", lambda *_: pytest.fail("read here"))
        for _ in range(3):
            check(run, data)
            assert len(run.report.workers) == 2
    # It is run once, not in each round.
    assert [path.read_text() for path in tmp_path.iterdir()] == ["."] * N
    raises(drjax.DrjaxTypeError, "put needs arrays, got DatasetRows", run.put, data)
    # Its rows leave the store with it.
    assert len(actors._datasets) == 1
    del data
    gc.collect()
    assert len(actors._datasets) == 0


@on_ray
def test_rows_keep_their_order(ray, actors):
    """Also if the first of them is the last that is ready, as is for Ray Data."""

    def late(batch):
        time.sleep(2.0 * (0 in batch["w"]))
        return batch

    data = items(ray, blocks=4).map_batches(late)
    before = data.context.execution_options.preserve_order
    run = drjax.backends.ray.compile(plan_of(), workers=actors, block_size=5)
    check(run, data)
    assert data.context.execution_options.preserve_order == before


@on_ray
def test_a_row_that_does_not_fit_is_the_failure_of_its_group(ray, actors):
    x = [*map(list, X.tolist())]
    x[7] = [1.0]
    rows = [{"x": np.array(x[i], np.float32), "w": W[i]} for i in range(N)]
    data = ray.data.from_items(rows, override_num_blocks=3)
    options = {"workers": actors, "block_size": 3}
    run = drjax.backends.ray.compile(plan_of(), on_error="drop", **options)
    check(run, data, np.delete(np.arange(N), 7))
    assert [*run.report.dropped] == [7] and "float32[1]" in run.report.dropped[7]
    run = drjax.backends.ray.compile(plan_of(), **options)
    with pytest.raises(drjax.EngineError, match="Group 7 failed in round 1"):
        run(ONE, data)


@on_ray
def test_how_many_rows(ray, actors):
    run = drjax.backends.ray.compile(plan_of(), workers=actors)
    text = "The plan is for 12 groups, got 11"
    raises(drjax.DrjaxValueError, text, run, ONE, items(ray, range(N - 1)))

    @drjax.program(clients=N)
    def mean(model, data):
        return drjax.reduce_mean(data["x"]) + model, drjax.reduce_mean(data["w"])

    run = drjax.backends.ray.compile(plan_of(mean, open_groups=True), workers=actors)
    for n in (5, N):
        np.testing.assert_allclose(run(ONE, items(ray, range(n)))[1], W[:n].mean())


@on_ray
def test_lists_and_pandas(ray, actors):
    """Columns of lists have arrays, and so have data frames."""
    arrow, pandas = map(importlib.import_module, ("pyarrow", "pandas"))
    columns = {"x": [*X], "w": W}
    table = arrow.table({"x": arrow.array([*X]), "w": W})
    run = drjax.backends.ray.compile(plan_of(), workers=actors, block_size=5)
    check(run, ray.data.from_arrow(table))
    check(run, ray.data.from_pandas(pandas.DataFrame(columns)))


@on_ray
def test_on_other_engines(ray):
    data, run = items(ray), in_process.compile(plan_of())
    text = "Elsewhere pass Groups(dataset.iter_rows), which reads it here, or arrays"
    for wrong in (data, data.map_batches(lambda batch: batch)):
        raises(drjax.DrjaxTypeError, text, run, ONE, wrong)
    raises(drjax.DrjaxTypeError, text, Groups, data)
    check(run, Groups(data.iter_rows))


@on_ray
def test_a_worker_that_dies_while_it_reads(ray, actors):
    run = drjax.backends.ray.compile(plan_of(), workers=actors, block_size=2)
    data = items(ray)
    check(run, data)
    os.kill(next(iter(run.report.workers)), signal.SIGKILL)
    check(run, data)


@on_ray
def test_without_a_cpu_for_ray_data(ray, actors, monkeypatch):
    run = drjax.backends.ray.compile(plan_of(), workers=actors)
    check(run, items(ray))  # workers run
    # One that starts has a CPU soon, which is not left for Ray Data.
    os.kill(next(iter(run.report.workers)), signal.SIGKILL)
    check(run, items(ray))
    monkeypatch.setattr(actors, "_options", {"num_cpus": 1.5})
    # Not by pytest.warns: threads of Ray Data set the filters of warnings back.
    warned: list[tuple[str, type]] = []
    warn = lambda text, kind, **_: warned.append((text, kind))
    monkeypatch.setattr(dataset_rows, "warnings", SimpleNamespace(warn=warn))
    check(run, items(ray).map_batches(lambda batch: batch))
    ((text, kind),) = warned
    assert kind is RuntimeWarning
    assert text.startswith("Ray Data waits for a CPU to read the dataset with")
    check(run, items(ray))  # in the store already, which needs none
    assert len(warned) == 1
