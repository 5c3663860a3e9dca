"""The Beam backend: the conformance test, and what is its own.

Covers: drjax.engines.beam.adapter, drjax.backends.beam,
drjax.engines.beam.transforms, drjax.engines.beam.kept_files,
drjax.engines.beam.file_sinks, drjax.engines.beam.file_exchange,
drjax.engines.beam.one_round, drjax.engines.beam.subprocess_run,
drjax.engines.beam.temporary_folders.
"""

# pyright: reportMissingImports=false

import contextlib
import dataclasses
import importlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import drjax
from drjax.backends import beam
from drjax.backends.parquet import Parquet
from drjax.engines.beam import file_sinks
from tests.helpers import example_rounds, tensor_parallel
from tests.helpers.cases import CASES, some
from tests.helpers.conformance import (
    Conformance,
    check_example,
    check_poisoned_file,
    check_resume,
    free_ports,
    run_docs,
    runs,
    slices_for,
    slow_work,
    survivors,
    wait_for,
    weighted_plan,
)
from tests.helpers.raising import raises

pytestmark = [
    pytest.mark.engines,
    pytest.mark.usefixtures("leaks_unchecked"),
    pytest.mark.filterwarnings("ignore"),  # Beam's own
]


class TestBeam(Conformance):
    """In this process: pipelines are the same, and start in less time."""

    cases = CASES[::4]

    @staticmethod
    def compile(plan, workers=1, **options):
        return beam.compile(plan, workers=1, **options)


@pytest.mark.parametrize("on_error", some(["raise", "drop"], "drop"))
def test_two_worker_processes(on_error):
    x, w = slices_for(17)
    bad = np.isin(np.arange(17), [5])
    args = np.float32(2), (np.where(bad, -x, x), w)
    options = {"block_size": 2, "on_error": on_error, "check_nans": True}
    with beam.compile(weighted_plan(17), workers=2, **options) as run:
        if on_error == "raise":
            with pytest.raises(drjax.EngineError, match="Group 5 failed in rou") as e:
                run(*args)
            assert (e.value.round, e.value.group) == ("1", 5)
            args = np.float32(2), (x, w)
        survivors(run(*args), ~bad if on_error == "drop" else np.ones(17, bool))
        assert len(run.report.workers) >= 2
        assert os.getpid() not in run.report.workers


def test_a_worker_killed_while_a_stage_runs(tmp_path):
    n, killed = 12, []
    plan = weighted_plan(n, slow_work)
    options = {"block_size": 1, "checkpoint": tmp_path / "run"}
    with beam.compile(plan, workers=2, **options) as run:

        def kill():  # the first that gave a block, while it is at the next one
            while not run.report.workers:
                time.sleep(0.05)
            (pid, *_), stage = run.report.workers, run.report.stages[-1]
            os.kill(pid, signal.SIGKILL)
            killed.append((pid, stage.blocks, len(run.report.stages)))

        threading.Thread(target=kill, daemon=True).start()
        survivors(run(np.float32(2), slices_for(n)), np.ones(n, bool))
        ((pid, blocks, stages),) = killed
        assert stages == 1 and blocks < n
        assert len(run.report.lost) == 1
        assert run.report.lost[0].startswith("a run failed: ")  # in Beam's words
        assert len(run.report.workers) >= 3 and run.report.workers[pid] < n


def test_a_pipeline_that_fails_names_round_and_stage(tmp_path):
    run = beam.compile(weighted_plan(3), workers=2, runner="no.such.Runner", retries=0)
    with run, pytest.raises(drjax.EngineError, match="the run failed") as e:
        run(np.float32(2), slices_for(3))
    assert e.value.round == "1" and "No module named 'no'" in str(e.value)


def test_workers_read_parquet_files(tmp_path):
    pa, pq = map(importlib.import_module, ("pyarrow", "pyarrow.parquet"))
    n, (x, w) = 50, slices_for(50)
    for part, part_slice in enumerate((slice(0, 20), slice(20, 50))):
        table = pa.table({"x": x[part_slice], "w": w[part_slice]})
        pq.write_table(table, tmp_path / f"groups-{part}.parquet", row_group_size=8)
    groups = Parquet(tmp_path / "groups-*.parquet", lambda row: (row["x"], row["w"]))
    with beam.compile(weighted_plan(n), workers=1, block_size=4) as run:
        survivors(run(np.float32(2), groups), np.ones(n, bool))
        assert run.report.stages[0].blocks == 13  # of ranges 8, 8, 4, 8, 8, 8, 6
    few = beam.compile(weighted_plan(40), workers=1)
    raises(drjax.DrjaxError, "for 40 groups, got 50", few, np.float32(2), groups)


def test_groups_in_files_that_do_not_fit(tmp_path):
    pa, pq = map(importlib.import_module, ("pyarrow", "pyarrow.parquet"))
    lists = [[1.0, 2.0], [3.0, 4.0, 5.0, 6.0], [1.0, 2.0, 3.0], None, [1.0, 1.0, 1.0]]
    table = pa.table({"x": pa.array(lists, pa.list_(pa.float32()))})
    pq.write_table(table, tmp_path / "groups.parquet")
    total = drjax.program(clients=5)(drjax.reduce_sum)
    plan = drjax.make_plan(total)(np.zeros((5, 3), np.float32))
    with beam.compile(plan, workers=1, on_error="drop") as run:
        result = run(Parquet(tmp_path / "groups.parquet"))
    np.testing.assert_array_equal(result, [2, 3, 4])
    assert sorted(run.report.dropped) == [0, 1, 3]
    assert "float32[2]" in run.report.dropped[0]


def test_64_bits_in_files(tmp_path):
    pa, pq = map(importlib.import_module, ("pyarrow", "pyarrow.parquet"))
    x = np.arange(6.0) + 1e-12
    pq.write_table(pa.table({"x": x}), tmp_path / "groups.parquet")
    with jax.enable_x64(True):
        plan = drjax.make_plan(drjax.program(clients=6)(drjax.reduce_sum))(x)
    with beam.compile(plan, workers=1) as run:
        result = run(Parquet(tmp_path / "groups.parquet"))
    assert result.dtype == np.float64 and abs(float(result) - x.sum()) < 1e-14


@pytest.fixture
def portable():
    """Flags of a job service with a pool of workers, which are ended after a while."""
    job, pool = free_ports(2)
    bin = str(Path(sys.executable).parent)  # the pool starts the `python` of PATH
    environment = os.environ | {"PATH": f"{bin}:{os.environ['PATH']}"}
    modules = (
        ("portability.local_job_service_main", f"--port={job}"),
        ("worker.worker_pool_main", f"--service_port={pool}"),
    )
    started = [
        subprocess.Popen(
            [sys.executable, "-m", f"apache_beam.runners.{module}", flag],
            env=environment, start_new_session=True,
        )
        for module, flag in modules
    ]  # fmt: skip

    def end():
        for process in started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    timer = threading.Timer(180, end)  # with no workers a job would wait for ever
    timer.start()
    for port in (job, pool):
        wait_for(lambda port=port: socket.socket().connect_ex(("localhost", port)) == 0)
    yield [
        f"--job_endpoint=localhost:{job}",
        "--environment_type=EXTERNAL",
        f"--environment_config=localhost:{pool}",
    ]
    timer.cancel()
    end()


@pytest.mark.slow
def test_a_job_service_with_a_pool_of_workers(portable):
    n, options = 17, {"runner": "PortableRunner", "flags": portable, "block_size": 4}
    with beam.compile(weighted_plan(n), **options) as run:
        survivors(run(np.float32(2), slices_for(n)), np.ones(n, bool))
        assert os.getpid() not in run.report.workers


def test_map_reduce_in_a_pipeline_of_ones_own():
    import apache_beam
    from apache_beam.testing.util import assert_that

    n = 9

    @drjax.program(clients=n)
    def step(model, data):
        work = lambda m, d: m * d["x"]
        y = drjax.map_fn(work, (drjax.broadcast(2 * model), data))
        mean = drjax.reduce_weighted_mean(y, data["w"])
        return {"mean": mean + model, "most": drjax.reduce_max(y)}

    x, w = slices_for(n)
    plan = drjax.make_plan(step)(np.float32(1.5), {"x": x, "w": w})
    slices = [(i, {"x": x[i], "w": w[i]}) for i in range(n)]
    slices[4] = (4, {"x": np.zeros(2, np.float32), "w": w[4]})
    options = {"block_size": 4, "on_error": "drop"}
    good = np.arange(n) != 4

    def check(results):
        (result,) = results
        mean = (3 * x * w)[good].sum() / w[good].sum() + 1.5
        np.testing.assert_allclose(result["mean"], mean, rtol=1e-6)
        np.testing.assert_allclose(result["most"], 27)

    def check_failed(failed):
        ((group, why),) = failed
        assert group == 4 and "float32[2]" in why

    with apache_beam.Pipeline("FnApiRunner") as p:
        out = (
            p
            | apache_beam.Create(slices)
            | beam.MapReduce(plan, np.float32(1.5), ..., **options)
        )
        assert_that(out["results"], check, "results")
        assert_that(out["failed"], check_failed, "failed")


def test_state_stays_in_files(tmp_path, monkeypatch):
    """Workers write it and read it; what the driver sends has names of files."""
    n, d, sent = 6, 5000, []

    @drjax.program(clients=n)
    def count(total, x):
        total = drjax.map_fn(lambda t, x: t + x, (total, x))
        return total, drjax.reduce_sum(drjax.map_fn(jnp.mean, total))

    write = file_sinks.write

    def counted(path, data):
        sent.append((path.split("/")[-1].split("-")[0], len(data), path))
        write(path, data)

    monkeypatch.setattr(file_sinks, "write", counted)
    x, zeros = np.arange(n, dtype=np.float32), np.zeros((n, d), np.float32)
    plan = drjax.make_plan(count)(zeros, x)
    options = {"workers": 1, "block_size": 4, "keep": {0: 0}, "folder": str(tmp_path)}
    drop = {"on_error": "drop", "check_nans": True}
    with beam.compile(plan, **options, **drop) as run:
        total, _ = run(zeros, x)
        sent.clear()
        run.options = dataclasses.replace(run.options, block_size=3)
        bad = np.where(x == 4, np.nan, x)
        total, sum_ = run(total, bad.astype(np.float32))
        assert max(size for kind, size, _ in sent if kind == "slices") < 4 * d
        written = {
            path for kind, size, path in sent if kind == "block" and size > 4 * d
        }
        assert all("/kept-" in path for path in written) and len(written) == 2
        np.testing.assert_allclose(sum_, 2 * (x.sum() - 4))
        # The dropped group has what it had before.
        np.testing.assert_allclose(total.fetch()[:, 0], np.where(x == 4, 4, 2 * x))
        total, sum_ = run(total, x)
        np.testing.assert_allclose(sum_, 3 * x.sum() - 4)
        assert len([*tmp_path.glob("kept-*")]) <= 3
    assert not [*tmp_path.iterdir()]
    raises(drjax.EngineError, "The workers that had the slices", run, total, x)


@pytest.mark.slow
@pytest.mark.grid  # by default test_file_exchange does it without Beam's workers
def test_workers_exchange_columns(monkeypatch):
    """Two workers shuffle slices by coordinates; the driver reads no slice."""
    n, d = 6, 63 * 63

    @drjax.program(clients=n)
    def medians(x):
        y, root = drjax.map_fn(lambda x: (jnp.outer(x, x).ravel(), jnp.sqrt(x[0])), x)
        return drjax.reduce_columns(jnp.median, y), drjax.reduce_mean(root)

    x = np.random.RandomState(0).rand(n, 63).astype(np.float32)
    plan = drjax.make_plan(medians)(x)
    expected, sizes = drjax.backends.reference.compile(plan)(x), []
    read = file_sinks.read
    monkeypatch.setattr(
        file_sinks, "read", lambda path: (sizes.append(len(y := read(path))), y)[1]
    )
    options = {"on_error": "drop", "check_nans": True, "block_size": 2}
    with beam.compile(plan, workers=2, **options) as run:
        median, root = run(x)
        np.testing.assert_array_equal(median, expected[0])
        np.testing.assert_allclose(root, expected[1], rtol=1e-6)
        # Results of chunks: a file with slices of two groups has 2 * 4 * 3969 bytes.
        assert max(sizes) < 4 * d and len(run.report.workers) > 2
        x[4] = -1
        median, _ = run(x)
        assert [*run.report.dropped] == [4] and np.isnan(median).all()


def test_map_reduce_folds_in_any_order():
    import apache_beam
    from apache_beam.testing.util import assert_that

    def plan_of(**options):
        f = lambda x: drjax.reduce(jnp.logaddexp, x, -jnp.inf, **options)
        return drjax.make_plan(drjax.program(clients=5)(f))(np.zeros(5, "f"))

    def check(results):
        np.testing.assert_allclose(results[0], np.log(np.exp(x).sum()), rtol=1e-6)

    x = np.sin(np.arange(5, dtype=np.float32))
    with apache_beam.Pipeline("FnApiRunner") as p:
        slices = p | apache_beam.Create([(i, x[i]) for i in (3, 0, 4, 1, 2)])
        out = slices | beam.MapReduce(plan_of(commutative=True), ..., block_size=2)
        assert_that(out["results"], check)
    text = "If any order will do, say so by drjax.reduce(..., commutative=True)"
    raises(drjax.DrjaxValueError, text, beam.MapReduce, plan_of(), ...)


def test_map_reduce_wants_every_group():
    import apache_beam

    plan = drjax.make_plan(drjax.program(clients=4)(drjax.reduce_sum))(np.zeros(4, "f"))
    with pytest.raises(Exception, match="The plan is for 4 groups, got 3"):
        with apache_beam.Pipeline("FnApiRunner") as p:
            slices = p | apache_beam.Create([(i, np.float32(i)) for i in range(3)])
            _ = slices | beam.MapReduce(plan, ...)


def test_what_map_reduce_refuses():
    plan = weighted_plan(3)
    raises(drjax.DrjaxTypeError, "must be ...", beam.MapReduce, plan, 1.0, (1.0, 2.0))
    raises(drjax.DrjaxValueError, "plans of one round", beam.MapReduce, plan, 1.0, ...)


def test_options():
    raises(
        drjax.DrjaxValueError,
        "Beam takes no timeout",
        lambda: beam.compile(weighted_plan(3), timeout=3.0),
    )
    text = "and Beam runs a group on one device"
    raises(drjax.MeshError, text, beam.compile, tensor_parallel.plan("auto"))
    wrong = lambda: beam.compile(weighted_plan(3), workers=0)
    raises(drjax.DrjaxValueError, "workers must be an integer from 1, got 0", wrong)


def test_two_writers_of_one_file(tmp_path):
    path = tmp_path / "x"
    systems = importlib.import_module("apache_beam.io.filesystems").FileSystems
    parts = []

    class Interleaved(systems):
        @staticmethod
        def create(part):
            parts.append(part)
            if len(parts) == 1:
                file_sinks.write(str(path), b"of another writer")
            return systems.create(part)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(file_sinks, "_systems", lambda: Interleaved)
        file_sinks.write(str(path), b"of this one")
    assert path.read_bytes() == b"of this one" and len({*parts}) == 2
    assert [*tmp_path.iterdir()] == [path]


def test_code_in_docs_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # it writes a file
    run_docs("beam")


@pytest.mark.parametrize("public", [beam.compile, "MapReduce"])
def test_docstring_example_runs(public):
    assert runs(getattr(beam, public) if isinstance(public, str) else public)


def test_the_driver_is_killed(tmp_path):
    check_resume("beam", tmp_path / "run")


def test_a_poisoned_file(tmp_path):
    check_poisoned_file(beam, tmp_path, workers=1)


@pytest.mark.slow
@pytest.mark.grid
def test_the_example(tmp_path):
    check_example("beam", tmp_path)


@pytest.mark.parametrize("name", example_rounds.parameters("beam"))
def test_a_round_of_each_example(name, tmp_path):
    example_rounds.check_round("beam", name, tmp_path)


def test_analytics_of_parquet_files(tmp_path):
    """The workers of Beam read what the devices get as arrays."""
    from examples.reproductions import analytics

    def run(engine):
        some = {"records": 300, "files": 3, "models": 2, "width_bits": 6}
        config = analytics.Config(engine=engine, output=tmp_path / engine, **some)
        return analytics.main(config)

    ours, expected = run("beam"), run("in_process")
    for name, numbers in expected.numbers.items():
        np.testing.assert_allclose(ours.numbers[name], numbers, rtol=1e-5)
