"""Folders of checkpoints that are damaged, full, shared, elsewhere, or no folders.

Covers: drjax.engines.core.checkpoint, drjax.engines.core.checkpoint_files,
drjax.engines.core.folder_lock, drjax.engines.core.loop_progress.
"""

import errno
import json
import os
import resource
import subprocess
import sys
import time
import uuid
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import drjax
from drjax import _storage
from drjax.backends import in_process
from drjax.backends.groups import Groups
from drjax.engines.core import folder_lock
from drjax.engines.core.driver import Runner
from drjax.engines.core.options import EngineOptions
from drjax.engines.in_process.adapter import InProcess
from tests.helpers.cases import checkerboard
from tests.helpers.full_disk import files_of_at_most
from tests.helpers.raising import raises

pytestmark = pytest.mark.usefixtures("leaks_unchecked")

N, STEPS = 3, 4


@pytest.fixture(scope="module")
def plan():
    @drjax.program(clients=N)
    def train(model, data):
        def step(model, _):
            pair = drjax.broadcast(model), data
            mean = drjax.reduce_mean(drjax.map_fn(lambda m, x: jnp.sin(m + x), pair))
            return 0.5 * model + mean, None

        return jax.lax.scan(step, model, length=STEPS)[0]

    with jax.check_tracer_leaks(False):
        return drjax.make_plan(train)(*ARGS)


ARGS = np.arange(500, dtype=np.float32), np.linspace(0, 1, N, dtype=np.float32)


class Crash(BaseException):
    """Not an error that anything catches."""


class Interrupted(InProcess):
    """A pool that calls a function before each block, with the block's number."""

    def __init__(self, function):
        super().__init__()
        self.function, self.sent = function, 0

    def submit(self, work, file, shared):
        self.function(self.sent)
        self.sent += 1
        return super().submit(work, file, shared)


def crash_in(block):
    def function(sent):
        if sent == block:
            raise Crash

    return Interrupted(function)


def run_on(pool, plan, folder):
    return Runner(plan, pool, EngineOptions.checked(block_size=N, checkpoint=folder))


def crash(plan, folder, rounds=3):
    """Leave a checkpoint of so many rounds."""
    with pytest.raises(Crash):
        run_on(crash_in(rounds), plan, folder)(*ARGS)


def stages(run):
    return len(run.report.stages)


def result_of(plan):
    return in_process.compile(plan, block_size=N)(*ARGS)


@pytest.fixture(params=["local", "memory"])
def folder(request, tmp_path):
    """A folder by its path, and one by a URL."""
    if request.param == "local":
        return tmp_path / "run"
    return f"memory://{uuid.uuid4().hex}/run"


def opened(folder):
    return _storage.folder(_storage.locate(folder))


# ---------------------------------------------------------------------------------
# Damage


def flipped(data):
    position = len(data) // 2  # within an array: a number, and only it, is another
    return data[:position] + bytes([data[position] ^ 16]) + data[position + 1 :]


DAMAGES = {
    "a bit": flipped,
    "the end": lambda data: data[:-9],
    "half": lambda data: data[: len(data) // 2],
    "all": lambda data: b"",
    "the header": lambda data: data.replace(b"float32", b"flaat32"),
    "another file": lambda data: b"PK\x03\x04" * 99,
}


@checkerboard(3, damage=DAMAGES)
def test_the_last_whole_step_is_used(damage, plan, folder):
    crash(plan, folder)
    steps = sorted(name for name in opened(folder).names() if name.startswith("step"))
    assert len(steps) == 2
    data = opened(folder).read(steps[1])
    opened(folder).write(steps[1], [DAMAGES[damage](data)])
    run = run_on(InProcess(), plan, folder)
    with pytest.warns(RuntimeWarning) as warnings:
        result = run(*ARGS)
    text = str(warnings[0].message)
    assert opened(folder).location(steps[1]) in text and len(warnings) == 1
    assert f"goes on from the step before, {opened(folder).location(steps[0])}" in text
    np.testing.assert_array_equal(result, result_of(plan))
    assert stages(run) == 2 and run.report.resumed
    assert opened(folder).names() == []


def test_what_a_loop_stacks_comes_back(folder):
    @drjax.program(clients=N)
    def train(model, data):
        def step(model, _):
            pair = drjax.broadcast(model), data
            return drjax.reduce_mean(drjax.map_fn(jnp.multiply, pair)), model

        return jax.lax.scan(step, model, length=STEPS)

    plan = drjax.make_plan(train)(*ARGS)
    crash(plan, folder)
    run = run_on(InProcess(), plan, folder)
    jax.tree.map(np.testing.assert_array_equal, run(*ARGS), result_of(plan))
    assert stages(run) == 1 and run.report.resumed


def test_no_step_is_whole(plan, folder):
    crash(plan, folder)
    steps = sorted(opened(folder).names())
    for name in steps:
        opened(folder).write(name, [flipped(opened(folder).read(name))])
    text = raises(
        drjax.EngineError, "has files that cannot be used",
        run_on(InProcess(), plan, folder), *ARGS,
    )  # fmt: skip
    assert all(opened(folder).location(name) in text for name in steps)
    assert "remove them to start the call from the beginning" in text
    assert sorted(opened(folder).names()) == steps  # nothing is lost, nor locked


def test_files_of_others_stay(plan, tmp_path):
    crash(plan, tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "99").mkdir()
    (tmp_path / ".theirs.part").write_text("of another program")
    (tmp_path / ".step-000000009.part").write_text("of an earlier version")
    (tmp_path / ".step-000000009.0a1b.part").write_text("of a process that died")
    run = run_on(InProcess(), plan, tmp_path)
    run(*ARGS)
    assert stages(run) == STEPS - 3
    assert {x.name for x in tmp_path.iterdir()} == {"notes.txt", "99", ".theirs.part"}


def test_arrays_of_every_shape_and_dtype_come_back(tmp_path):
    @drjax.program(clients=N)
    def f(x):
        y = drjax.map_fn(lambda x: (x.astype(jnp.bfloat16), x[:0], x > 0), x)
        total = drjax.reduce_sum(y[0])
        return (
            *y,
            drjax.reduce_max(drjax.map_fn(jnp.add, (x, drjax.broadcast(total)))),
        )

    x = np.linspace(-1, 1, 2 * N, dtype=np.float32).reshape(N, 2)
    plan = drjax.make_plan(f)(x)
    with pytest.raises(Crash):
        run_on(crash_in(1), plan, tmp_path)(x)
    run = run_on(InProcess(), plan, tmp_path)
    result = run(x)
    assert stages(run) == 1
    for a, b in zip(result, in_process.compile(plan, block_size=N)(x), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def test_groups_that_a_loop_carries(tmp_path):
    """What is carried unchanged is no array, but slices that are made when needed."""

    @drjax.program(clients=N)
    def f(model, data):
        def step(carry, _):
            model, data = carry
            mean = drjax.reduce_mean(drjax.map_fn(jnp.sin, data))
            return (model + mean, data), None

        return jax.lax.scan(step, (model, data), length=STEPS)[0]

    plan = drjax.make_plan(f)(np.float32(0), ARGS[1])
    with pytest.raises(Crash):
        run_on(crash_in(2), plan, tmp_path)(np.float32(0), Groups([*ARGS[1]]))
    run = run_on(InProcess(), plan, tmp_path)
    model, data = run(np.float32(0), Groups([*ARGS[1]]))
    np.testing.assert_allclose(model, STEPS * np.sin(ARGS[1]).mean(), rtol=1e-6)
    np.testing.assert_array_equal(data, ARGS[1])
    assert stages(run) == STEPS - 2


@pytest.mark.parametrize("block", [1, 2])
def test_groups_that_a_loop_carries_in_turn(block, tmp_path):
    @drjax.program(clients=N)
    def f(x, first):
        def step(carry, now):
            before, a, b, total = carry
            total += drjax.reduce_sum(drjax.map_fn(jnp.sin, before))
            total *= 1 + drjax.reduce_mean(drjax.map_fn(lambda a, b: a - b, (a, b)))
            return (now, b, a, total), None

        carry = first, first, x[0], jnp.float32(0)
        return jax.lax.scan(step, carry, x)[0]

    x = np.linspace(-1, 1, N * STEPS, dtype=np.float32).reshape(N, STEPS)
    plan, groups = drjax.make_plan(f)(x.T, ARGS[1]), (Groups([*x]), Groups([*ARGS[1]]))
    with pytest.raises(Crash):
        run_on(crash_in(block), plan, tmp_path)(*groups)
    run = run_on(InProcess(), plan, tmp_path)
    result = run(*groups)
    assert run.report.resumed
    for a, b in zip(result, in_process.compile(plan)(x.T, ARGS[1]), strict=True):
        np.testing.assert_array_equal(a, b)


# ---------------------------------------------------------------------------------
# Folders that cannot be used


def test_a_file_in_place_of_the_folder(plan, tmp_path):
    (tmp_path / "file").write_text("mine")
    opened("memory://of-files").write("file", [b"mine"])
    needs = "checkpoint= needs a folder that can be written"
    for path in ("file", "file/below"):
        path = str(tmp_path / path)
        run = in_process.compile(plan, checkpoint=path)
        text = raises(drjax.EngineError, needs, run, *ARGS)
        assert path in text and "Give another folder" in text
    run = in_process.compile(plan, checkpoint="memory://of-files/file")
    raises(drjax.EngineError, "memory://of-files/file is a file", run, *ARGS)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    "path, text",
    [
        ("", "got an empty text"),
        (3, "a path or a URL is needed, got int"),
        ("nosuch://bucket/run", "Protocol not known: nosuch"),
        (Path("gs://bucket/run"), "give it as a text, 'gs://bucket/run'"),
    ],
)
def test_what_is_no_folder(path, text, plan, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    raises(drjax.EngineError, text, in_process.compile(plan, checkpoint=path), *ARGS)
    assert not [*tmp_path.iterdir()]  # no local folder named gs:


def test_urls_without_fsspec(plan, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "fsspec", None)
    run = in_process.compile(plan, checkpoint="gs://bucket/run")
    text = "fsspec, which is not installed here. Install it, and the package"
    raises(drjax.EngineError, text, run, *ARGS)
    in_process.compile(plan, checkpoint=f"file://{tmp_path}/run")(*ARGS)
    assert (tmp_path / "run").is_dir()


@pytest.mark.slow
def test_local_checkpoints_need_no_other_package(tmp_path):
    code = """
import sys, numpy as np
for name in ("fsspec", "etils", "orbax", "tensorstore"):
    sys.modules[name] = None
import drjax
from drjax.backends import in_process
plan = drjax.make_plan(drjax.program(clients=3)(drjax.reduce_sum))(np.ones(3))
assert in_process.compile(plan, checkpoint=sys.argv[1])(np.ones(3)) == 3
"""
    command = [sys.executable, "-c", code, str(tmp_path / "run")]
    subprocess.run(command, check=True, timeout=300)


# ---------------------------------------------------------------------------------
# A full disk


def test_a_full_disk(plan, tmp_path):
    def function(sent):
        if sent == 1 and not run.report.resumed:
            while not (tmp_path / "step-000000001").exists():
                time.sleep(0.01)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limit))

    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    run = run_on(Interrupted(function), plan, tmp_path)
    with files_of_at_most(10**9):
        text = raises(
            drjax.EngineError, "cannot be written: File too large", run, *ARGS
        )
    assert f"The checkpoint file {tmp_path}/step-" in text
    assert "What was saved before is kept. Free space there" in text
    assert [x.name for x in tmp_path.iterdir()] == ["step-000000001"]
    result = run(*ARGS)
    assert run.report.resumed and stages(run) == STEPS - 1
    np.testing.assert_array_equal(result, result_of(plan))


def test_only_a_disk_can_be_full(plan, tmp_path, monkeypatch):
    def write(self, name, chunks):
        raise ValueError("no such code page")

    monkeypatch.setattr(_storage.LocalFolder, "write", write)
    text = "cannot be written: no such code page. Make the same call again."
    raises(drjax.EngineError, text, run_on(InProcess(), plan, tmp_path), *ARGS)


def test_a_full_disk_hides_no_other_error(plan, tmp_path):
    run = run_on(crash_in(1), plan, tmp_path)
    with files_of_at_most(1000), pytest.raises(Crash) as error:
        run(*ARGS)
    assert "cannot be written: File too large" in "".join(error.value.__notes__)
    assert not [*tmp_path.iterdir()]


def test_a_result_is_not_lost_with_its_checkpoint(plan, tmp_path, monkeypatch):
    def last(sent):
        if sent == STEPS - 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limit))

    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    with files_of_at_most(10**9):
        result = run_on(Interrupted(last), plan, tmp_path)(*ARGS)
    np.testing.assert_array_equal(result, result_of(plan))

    def remove(self, name):
        raise PermissionError(f"{name} is write-protected")

    monkeypatch.setattr(_storage.LocalFolder, "remove", remove)
    with pytest.warns(RuntimeWarning, match="cannot be removed: step-0"):
        result = run_on(InProcess(), plan, tmp_path / "more")(*ARGS)
    np.testing.assert_array_equal(result, result_of(plan))


# ---------------------------------------------------------------------------------
# Two drivers


def test_a_folder_has_one_driver(plan, folder):
    def function(sent):
        if sent == 1:
            text = raises(
                drjax.EngineError, "is in use by process",
                run_on(InProcess(), plan, folder), *ARGS,
            )  # fmt: skip
            assert f"{os.getpid()} on " in text and str(folder) in text
            assert "give another folder as checkpoint=" in text

    pool = Interrupted(function)
    result = run_on(pool, plan, folder)(*ARGS)
    np.testing.assert_array_equal(result, result_of(plan))
    run_on(InProcess(), plan, folder)(*ARGS)
    assert pool.sent == STEPS and opened(folder).names() == []


class Unopened(InProcess):
    def open(self):
        raise OSError("no cluster")


def test_a_file_system_without_locks_has_a_lease(tmp_path, monkeypatch):
    """At once: no file of the lock that failed is in the way."""
    fcntl = pytest.importorskip("fcntl")

    def flock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setattr(folder_lock, "EXPIRY", 1e6)
    lease = folder_lock.acquire(opened(tmp_path))
    assert isinstance(lease, folder_lock.Lease)
    with pytest.raises(folder_lock.LockedError):
        folder_lock.acquire(opened(tmp_path))
    lease.release()
    assert not [*tmp_path.iterdir()]


def test_a_call_that_does_not_start_locks_nothing(plan, folder):
    with pytest.raises(OSError, match="no cluster"):
        run_on(Unopened(), plan, folder)(*ARGS)
    run_on(InProcess(), plan, folder)(*ARGS)


OTHER = {"process": 1, "host": "elsewhere", "machine": "elsewhere", "token": "x"}


def test_a_driver_whose_lease_was_taken_stops(plan, monkeypatch):
    folder, locks = f"memory://{uuid.uuid4().hex}/run", []
    acquire = folder_lock.acquire

    def watched(folder):
        locks.append(acquire(folder))
        return locks[-1]

    def function(sent):
        if sent == 1:
            opened(folder).write(folder_lock.NAME, [json.dumps(OTHER).encode()])
            while not locks[0].lost:
                time.sleep(0.01)

    monkeypatch.setattr(folder_lock, "RENEWAL", 0.02)
    monkeypatch.setattr(folder_lock, "acquire", watched)
    run = run_on(Interrupted(function), plan, folder)
    raises(drjax.EngineError, "was taken by another driver", run, *ARGS)
    assert json.loads(opened(folder).read(folder_lock.NAME)) == OTHER  # it is theirs
