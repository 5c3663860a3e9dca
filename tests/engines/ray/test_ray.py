"""The Ray backend on two workers: the conformance test, and what is its own.

Covers: drjax.engines.ray.adapter, drjax.engines.ray.actor,
drjax.engines.ray.process_exit, drjax.engines.ray.placement,
drjax.engines.ray.metrics.
"""

import importlib
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import drjax
from drjax.backends import ray
from drjax.backends.groups import Groups
from drjax.backends.parquet import Parquet
from drjax.engines.core.stage_results import StageResults
from drjax.engines.ray import adapter
from drjax.engines.ray.tree_of_sums import TreeOfSums
from tests.engines.ray.conftest import MARKS
from tests.helpers import example_rounds
from tests.helpers.conformance import (
    ROOT,
    Conformance,
    check_example,
    check_poisoned_file,
    check_resume,
    run_docs,
    runs,
    slices_for,
    survivors,
    weighted_plan,
)
from tests.helpers.raising import raises
from tests.helpers.run_python import HANGS

# Seconds of a block: more than any takes, in a new worker on a slow machine too.
LIMIT = 20.0

pytestmark = MARKS


class TestRay(Conformance):
    processes = True

    @pytest.fixture(autouse=True)
    def _on(self, actors):
        def compile(plan, workers=2, **options):
            warm = actors if workers == actors.workers else workers
            # Another test may have ended one, whose successor calls do not wait for.
            while actors._starting:
                actors._watch([], 1.0)
            cores = {"num_cpus": 0}  # all are taken
            return ray.compile(plan, workers=warm, ray_options=cores, **options)

        self.compile = compile

    def test_several_plan_files_on_the_same_workers(self, actors, tmp_path):
        for n in (5, 7):
            path = tmp_path / f"{n}.drjax"
            weighted_plan(n).save(path)
            with ray.compile(drjax.load_plan(path), workers=actors) as run:
                survivors(run(np.float32(2), slices_for(n)), np.ones(n, bool))

    def test_calls_after_failed_ones(self):
        n, (x, w) = 8, slices_for(8)

        def loaded():
            for i in range(n):
                if i == 3:
                    raise OSError("the disk is gone")
                yield x[i], w[i]

        with self.compile(weighted_plan(n), block_size=1) as run:
            run(np.float32(2), (x, w))
            for _ in range(300):
                begin = time.monotonic()
                with pytest.raises(drjax.EngineError, match="the disk is gone"):
                    run(np.float32(2), Groups(loaded))
                survivors(run(np.float32(2), (x, w)), np.ones(n, bool))
                assert not run.report.lost
                # A stalled call waits for ever, or for Ray's limits of minutes.
                assert time.monotonic() - begin < 60, "it stalls"

    def test_what_a_failed_call_left_at_work(self, actors):
        n, (x, w) = 4, slices_for(4)
        x[1] = -1  # its work goes on when group 0 has failed
        work = lambda model, x: jax.lax.while_loop(
            lambda y: x < 0, lambda y: y + 1, model * jnp.sqrt(x)
        )
        first = [*zip(x, w, strict=True)]
        first[0] = np.zeros(2, np.float32), w[0]
        options = {"timeout": LIMIT, "retries": 0}
        with self.compile(weighted_plan(n, work), block_size=1, **options) as run:
            run(np.float32(2), slices_for(n))
            with pytest.raises(drjax.EngineError, match="Group 0 failed"):
                run(np.float32(2), Groups(first))
            time.sleep(1)  # the work has begun by then, or never will
            before = actors.states()
            idle = {state.pid for state in before if state.groups is None}
            survivors(run(np.float32(2), slices_for(n)), np.ones(n, bool))
            assert not run.report.lost
            # The worker that was busy has been replaced, and it alone.
            pids = {state.pid for state in before}
            assert pids & {state.pid for state in actors.states()} == idle

    def test_slices_that_stay_the_same_are_sent_once(self, actors, monkeypatch):
        engine, sent = importlib.import_module("ray"), []
        put = engine.put
        monkeypatch.setattr(engine, "put", lambda x: (sent.append(x), put(x))[1])
        n = 1000
        x = np.arange(n * 100, dtype=np.float32).reshape(n, 100) / n
        groups = Groups([*x])

        @drjax.program(clients=n)
        def scaled(scale, x):
            slices = drjax.map_fn(jnp.multiply, (drjax.broadcast(scale), x))
            return drjax.reduce_mean(slices)

        plan = drjax.make_plan(scaled)(np.float32(1), x)
        right = lambda scale: np.testing.assert_allclose(
            run(np.float32(scale), x), scale * x.mean(0), rtol=1e-5
        )
        with self.compile(plan, block_size=250) as run:
            for scale in range(3):
                right(scale)
            assert sum(isinstance(y, list) for y in sent) == 4
            x[300] += 1  # in place: one block is another one
            right(2)
            assert sum(isinstance(y, list) for y in sent) == 5
            np.testing.assert_array_equal(
                run(np.float32(2), groups), run(np.float32(2), x)
            )
            assert sum(isinstance(y, list) for y in sent) == 5

    def test_a_block_that_takes_too_long(self):
        n = 4
        options = {"timeout": LIMIT, "retries": 0, "on_error": "drop"}
        with self.compile(stuck_plan(n), block_size=2, **options) as run:
            total = run(np.arange(n, dtype=np.float32))
            assert total == 4  # without 2, for which the work never ends
            assert [*run.report.dropped] == [2]
            assert f"took longer than {LIMIT} s" in run.report.dropped[2]

    def test_groups_in_parquet_files(self, tmp_path, monkeypatch):
        pa, pq = map(importlib.import_module, ("pyarrow", "pyarrow.parquet"))
        n, (x, w) = 20, slices_for(20)
        wide = np.arange(6, dtype=np.float32).reshape(2, 3) * x[:, None, None]
        for part in range(4):
            part_slice = slice(5 * part, 5 * part + 5)
            inner = pa.FixedSizeListArray.from_arrays(wide[part_slice].ravel(), 3)
            column = pa.FixedSizeListArray.from_arrays(inner, 2)
            table = pa.table({"x": column, "w": w[part_slice]})
            pq.write_table(table, tmp_path / f"groups-{part}.parquet")

        @drjax.program(clients=n)
        def total(data):
            return drjax.reduce_weighted_mean(data["x"], data["w"]), data["w"]

        def mean_alone(data):
            return drjax.reduce_weighted_mean(data["x"], data["w"])

        files, shapes = Parquet(tmp_path / "groups-*.parquet"), {"x": wide, "w": w}
        with self.compile(drjax.make_plan(total)(shapes), block_size=3) as run:
            mean, result = run(files)
        np.testing.assert_allclose(mean, np.average(wide, 0, w), rtol=1e-6)
        np.testing.assert_array_equal(result, w)

        def refuse(*_):
            raise AssertionError("the driver reads")

        # Workers are other processes, where this changes nothing.
        for name in ("starting", "cursor", "batches"):
            monkeypatch.setattr(Parquet, name, refuse)
        plan = drjax.make_plan(drjax.program(clients=n)(mean_alone))(shapes)
        (tmp_path / "groups-2.parquet").write_bytes(b"")  # after its footer was read
        with self.compile(plan, block_size=3, on_error="drop") as run:
            mean = run(files)
        good = np.arange(n) // 5 != 2
        np.testing.assert_allclose(mean, np.average(wide[good], 0, w[good]), rtol=1e-6)
        assert [*run.report.dropped] == [10, 11, 12, 13, 14]
        assert "it cannot be read from" in run.report.dropped[10]

    def test_files_that_are_not_there(self, tmp_path):
        text = "There is no file "
        raises(drjax.DrjaxValueError, text, Parquet, tmp_path / "*.parquet")


class TestAddedUp:
    """Partial reductions, though they are small, are added up by the workers."""

    processes = True
    compile: Any
    _on = TestRay._on
    test_folds = Conformance.test_folds_are_in_the_order_of_the_groups
    test_sizes = Conformance.test_block_size_and_workers_do_not_matter

    @pytest.fixture(autouse=True)
    def _small(self, monkeypatch):
        monkeypatch.setattr(adapter, "_ADDED", 0)

    @pytest.mark.parametrize("bad", [[], [3], [0, 1, 2], [2, 9, 21], range(1, 22)])
    def test_the_driver_gets_one_total(self, bad, monkeypatch):
        n, received, add = 22, [], StageResults.add
        spy = lambda self, block, result, alive: (
            received.append(bool(result.partials)) or add(self, block, result, alive)
        )
        monkeypatch.setattr(StageResults, "add", spy)
        good, (x, w) = ~np.isin(np.arange(n), list(bad)), slices_for(n)
        options = {"on_error": "drop", "check_nans": True, "block_size": 2}
        with self.compile(weighted_plan(n), **options) as run:
            survivors(run(np.float32(2), (np.where(good, x, -x), w)), good)
        assert sorted(run.report.dropped) == list(bad)
        assert received.count(True) == 2  # of each round

    @pytest.mark.parametrize("losses", [1, 3])
    def test_workers_that_end_with_partial_reductions(
        self, actors, losses, monkeypatch
    ):
        engine, left = importlib.import_module("ray"), [losses]

        class Unlucky(TreeOfSums):
            def total(self):
                if left[0]:
                    left[0] -= 1
                    while actors.working < actors.workers:
                        actors._watch([], 1)  # else one may join after this
                    for actor in actors._placement.workers:
                        engine.kill(actor)
                        with suppress(engine.exceptions.RayActorError):
                            while True:  # it ends some time later
                                engine.get(actor.state.remote())
                return super().total()

        n = 22
        with self.compile(weighted_plan(n), block_size=2, retries=2) as run:
            right = run(np.float32(2), slices_for(n))
            monkeypatch.setattr(adapter, "TreeOfSums", Unlucky)
            again = lambda: run(np.float32(2), slices_for(n))
            if losses > 2:
                with pytest.raises(drjax.EngineError, match="Partial reductions are l"):
                    again()
            for x, y in zip(again(), right, strict=True):
                np.testing.assert_array_equal(x, y)
            assert losses > 2 or "partial reductions: " in run.report.lost[0]


def stuck_plan(n):
    """Sums numbers; for 2 it never comes to an end."""

    @drjax.program(clients=n)
    def total(x):
        work = lambda x: jax.lax.while_loop(lambda y: x == 2, lambda y: y + 1, x)
        return drjax.reduce_sum(drjax.map_fn(work, x))

    return drjax.make_plan(total)(jax.ShapeDtypeStruct((n,), jnp.float32))


@pytest.mark.parametrize("workers", [0, "2"])
def test_a_number_of_workers_that_is_none(workers):
    text = f"workers must be an integer from 1, got {workers!r}."
    wrong = lambda: ray.compile(weighted_plan(3), workers=workers)
    raises(drjax.DrjaxValueError, text, wrong)


def test_more_workers_than_ray_has_room_for(monkeypatch, actors):
    actors.open()
    monkeypatch.setattr(adapter, "_START", 2)
    run = ray.compile(weighted_plan(3), workers=50)
    text = "50 workers did not start on Ray within 2 s. Its resources are"
    raises(drjax.EngineError, text, run, np.float32(2), slices_for(3))


def test_code_in_docs_runs(actors):
    actors.close()  # so that Ray runs already, and has room
    run_docs("ray")


def test_docstring_example_runs(actors):
    actors.close()
    assert runs(ray.compile)


def test_the_driver_is_killed(tmp_path):
    check_resume("ray", tmp_path / "run")


RAYLET_KILLED = """
import os, signal, subprocess, sys, threading, time
import numpy as np
import drjax
from drjax.backends import ray
from tests.helpers.conformance import slices_for, slow_work, survivors, weighted_plan

def kill():
    (pid,) = subprocess.check_output(
        ["pgrep", "-P", str(os.getpid()), "-x", "raylet"], text=True
    ).split()
    os.kill(int(pid), signal.SIGKILL)

n = 6
args, good = (np.float32(2), slices_for(n)), np.ones(n, bool)
run = ray.compile(weighted_plan(n, slow_work), workers=2, block_size=1)
survivors(run(*args), good)
for idle in (True, False):
    threading.Timer(0.0 if idle else 0.5, kill).start()
    time.sleep(1.0 if idle else 0.0)
    begin = time.monotonic()
    try:
        run(*args)
    except drjax.EngineError as error:
        print("The error:", error)
    assert time.monotonic() - begin < 60
    survivors(run(*args), good)
run.close()
print("the end")
"""


@pytest.mark.slow
@pytest.mark.grid
def test_a_killed_raylet_is_an_error_and_the_next_call_works():
    done = subprocess.run(
        [sys.executable, "-c", RAYLET_KILLED],
        cwd=ROOT, capture_output=True, text=True, timeout=HANGS,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    text = "The error: The raylet, Ray's process on this machine, has ended"
    assert done.stdout.count(text) == 2 and "the end" in done.stdout, done.stdout


def test_an_interrupted_call_does_not_delay_the_next(actors):
    """Ctrl-C while workers run blocks that would take minutes."""

    def work(x):
        step = lambda i, y: jnp.where(jnp.sin(y + i) > 2, 0.0, y)
        return jax.lax.fori_loop(0, jnp.where(x < 0, 2_000_000_000, 10), step, x)

    mean = drjax.program(clients=2)(lambda x: drjax.reduce_mean(drjax.map_fn(work, x)))
    x = np.ones(2, np.float32)
    plan = drjax.make_plan(mean)(x)
    cores = {"num_cpus": 0}
    run = ray.compile(plan, workers=actors, ray_options=cores, block_size=1)
    assert run(x) == 1
    # A process in the background of a shell ignores Ctrl-C.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Timer(3.0, signal.raise_signal, [signal.SIGINT]).start()
        with pytest.raises(KeyboardInterrupt):
            run(-x)
    finally:
        signal.signal(signal.SIGINT, before)
    start = time.monotonic()
    assert run(x) == 1
    assert time.monotonic() - start < 120


def test_metrics_are_those_of_ray(actors, monkeypatch):
    metrics, recorded = importlib.import_module("ray.util.metrics"), []
    for kind, method in (("Counter", "inc"), ("Histogram", "observe")):
        original = getattr(getattr(metrics, kind), method)

        def record(self, value, tags=None, original=original):
            recorded.append((self.info["name"], value, tags))
            return original(self, value, tags)

        monkeypatch.setattr(getattr(metrics, kind), method, record)
    n, (x, w) = 4, slices_for(4)
    run = ray.compile(weighted_plan(n), workers=actors, block_size=2, on_error="drop",
                      check_nans=True)  # fmt: skip
    x[3] = np.nan
    run(np.float32(2), (x, w))
    total = lambda name: sum(value for name_, value, _ in recorded if name_ == name)
    done = sum(stage.groups for stage in run.report.stages)
    assert total("drjax_groups") == done > 0
    assert total("drjax_failures") == 1
    assert [x for x in recorded if x[0] == "drjax_block_seconds"]
    assert all(tags["program"] == "step" for *_, tags in recorded)


def test_a_canceled_call_ends_what_runs(actors):
    n = 2
    with ray.compile(stuck_plan(3), workers=actors, block_size=1) as run:
        run(np.zeros(3, np.float32))
        threading.Timer(2.0, run.cancel).start()
        begin = time.monotonic()
        with pytest.raises(drjax.CanceledError):
            run(np.arange(3, dtype=np.float32))
        assert time.monotonic() - begin < HANGS / 4
        assert run(np.ones(3, np.float32)) == 3
    # Those that were ended are replaced, now or soon.
    assert actors.working + len(actors._starting) == n


def test_a_poisoned_file(tmp_path, actors):
    check_poisoned_file(ray, tmp_path, workers=actors)


@pytest.mark.slow
@pytest.mark.grid
def test_the_example(tmp_path):
    check_example("ray", tmp_path)


@pytest.mark.parametrize("name", example_rounds.parameters("ray"))
def test_a_round_of_each_example(name, tmp_path, actors):
    example_rounds.check_round("ray", name, tmp_path, actors)
