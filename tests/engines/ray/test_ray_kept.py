"""Slices that stay on Ray between calls, and slices that are sent once.

Covers: drjax.engines.ray.adapter, drjax.engines.ray.actor,
drjax.engines.slices.worker_slices, drjax.engines.ray.resident_slices,
drjax.engines.slices.coordinates.
"""

import dataclasses
import importlib
import os
import signal
import subprocess
import sys
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import drjax
from drjax.backends import Kept, in_process, ray, reference
from drjax.engines.ray import adapter
from tests.engines.ray.conftest import MARKS
from tests.helpers import dying_trainer
from tests.helpers import kept_programs as programs
from tests.helpers.cases import some
from tests.helpers.conformance import ROOT
from tests.helpers.raising import raises
from tests.helpers.run_python import HANGS

pytestmark = MARKS


def sent_bytes(monkeypatch):
    """A list to which the bytes of each list of arrays that Ray stores are added."""
    engine, sent = importlib.import_module("ray"), []
    put = engine.put

    def counted(x):
        if isinstance(x, list):
            sent.append(sum(y.nbytes for y in x))
        return put(x)

    monkeypatch.setattr(engine, "put", counted)
    return sent


def received_bytes(monkeypatch):
    """A list to which the bytes of each array of slices that Ray reads are added."""
    engine, received = importlib.import_module("ray"), []
    get = engine.get

    def counted(x, **options):
        result = get(x, **options)
        received.extend(y.nbytes for y in getattr(result, "slices", ()))
        return result

    monkeypatch.setattr(engine, "get", counted)
    return received


@pytest.mark.parametrize("name", some(["scaffold", "diloco"], "scaffold"))
@pytest.mark.parametrize("by_workers", [False, True])
def test_state_stays_with_the_workers(actors, name, by_workers, monkeypatch):
    if by_workers:  # add up partial reductions
        monkeypatch.setattr(adapter, "_ADDED", 0)
        monkeypatch.setattr(adapter, "MOST", 1)
    n, algorithm = 8, programs.ALGORITHMS[name]
    plan, start = algorithm.plan(n), algorithm.start(n)
    run, keep = algorithm.run, algorithm.keep
    expected = run(reference.compile(plan), start, 3, programs.data(n))
    kept = ray.compile(plan, workers=actors, block_size=3, keep=keep)
    state = run(kept, start, 2, programs.data(n))
    # Blocks of another size are assembled from parts of these.
    kept.options = dataclasses.replace(kept.options, block_size=2)
    state = run(kept, state, 1, programs.data(n))
    fetched = jax.tree.map(lambda x: x.fetch() if isinstance(x, Kept) else x, state)
    close = lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)
    jax.tree.map(close, fetched, expected)


def test_what_does_not_change_is_sent_once(actors, monkeypatch):
    """Of the state nothing is sent, of the data what a call or a round first reads."""
    n, d = 32, 20_000
    x = np.random.default_rng(0).normal(size=(n, d)).astype(np.float32)
    zeros = np.zeros((n, d), np.float32)

    @drjax.program(clients=n)
    def step(model, kept, x):
        args = drjax.broadcast(model), kept, x
        kept = drjax.map_fn(lambda m, c, x: 0.5 * c + m + x, args)
        mean = drjax.reduce_mean(jnp.mean(kept, axis=1))
        again = (drjax.broadcast(mean), x)
        return mean + drjax.reduce_max(drjax.map_fn(lambda m, x: m * x[0], again)), kept

    plan = drjax.make_plan(step)(np.float32(0), zeros, x)
    assert len(plan.rounds) == 2
    expected, state = [], (np.float32(0), zeros)
    for _ in range(3):
        state = reference.compile(plan)(*state, x)
        expected.append(state)
    sent, run = sent_bytes(monkeypatch), ray.compile(
        plan, workers=actors, block_size=8, keep={1: 1}
    )  # fmt: skip
    model, kept = np.float32(0), cast(Any, zeros)
    for i in range(3):
        del sent[:]
        model, kept = run(model, kept, x)
        np.testing.assert_allclose(model, expected[i][0], rtol=1e-4)
        # At first the state and the data, 2.56 MB each, for both rounds; then nothing.
        assert sum(sent) == (0 if i else x.nbytes + zeros.nbytes)
    np.testing.assert_allclose(kept.fetch(), expected[2][1], rtol=1e-4, atol=1e-5)
    # Without keep=, the state is sent, and the data not.
    plain = ray.compile(plan, workers=actors, block_size=8)
    state = plain(np.float32(1), zeros, x)
    del sent[:]
    plain(*state, x)
    assert sum(sent) == zeros.nbytes


def test_workers_read_columns_from_the_store(actors, monkeypatch):
    """The driver sends and receives results, and no slice of a group."""
    n, d = 8, 30_000

    @drjax.program(clients=n)
    def medians(model, seed):
        def update(model, seed):
            x = jnp.sin(model + seed * jnp.arange(d, dtype=jnp.float32))
            return x, jnp.log(seed)

        x, loss = drjax.map_fn(update, (drjax.broadcast(model), seed))
        return drjax.reduce_columns(jnp.median, x), drjax.reduce_mean(loss)

    seed = np.arange(1, n + 1, dtype=np.float32)
    model = np.ones(d, np.float32)
    plan = drjax.make_plan(medians)(model, seed)
    sent, received = sent_bytes(monkeypatch), received_bytes(monkeypatch)
    run = ray.compile(plan, workers=actors, block_size=3, on_error="drop",
                      check_nans=True)  # fmt: skip
    expected = reference.compile(plan)(model, seed)
    median, loss = run(model, seed)
    np.testing.assert_array_equal(median, expected[0])
    np.testing.assert_allclose(loss, expected[1], rtol=1e-6)
    # What is sent is the model; what is received are the medians, in chunks.
    assert sum(sent) == 4 * d and sum(received) == 4 * d and len(received) == 8
    assert len(run.report.workers) == 2
    bad = np.where(seed == 4, -1, seed).astype(np.float32)
    median, _ = run(model, bad)
    assert [*run.report.dropped] == [3] and np.isnan(median).all()


def test_workers_read_slices_that_move(actors, monkeypatch):
    n, d = 8, 30_000

    @drjax.program(clients=n)
    def gossip(seed):
        x = drjax.map_fn(lambda s: jnp.sin(s * jnp.arange(d, dtype=jnp.float32)), seed)
        y = drjax.map_fn(lambda x, s: jnp.cos(x) * s, (drjax.shift(x, 1), seed))
        z = drjax.take(y, jnp.flip(jnp.arange(n)))
        return drjax.reduce_mean(drjax.map_fn(lambda z, s: jnp.mean(z) * s, (z, seed)))

    seed = np.arange(n, dtype=np.float32)
    plan = drjax.make_plan(gossip)(seed)
    sent, received = sent_bytes(monkeypatch), received_bytes(monkeypatch)
    mean = ray.compile(plan, workers=actors, block_size=3)(seed)
    np.testing.assert_allclose(mean, reference.compile(plan)(seed), rtol=1e-5)
    assert len(plan.rounds) == 3 and sum(sent) + sum(received) < 4 * d


def test_a_group_that_is_dropped_keeps_what_it_had(actors):
    n = 8
    options = {"on_error": "drop", "check_nans": True, "block_size": 3}
    plan, (x, y) = programs.scaffold_plan(n), programs.data(n)
    run = ray.compile(plan, workers=actors, keep=programs.SCAFFOLD_KEEP, **options)
    bad = y.copy()
    bad[4] = np.nan
    for rounds in range(2):
        start = programs.scaffold_start(n)
        start = *start[:2], start[2] + 0.5
        model, control, kept = programs.run_scaffold(run, start, rounds, (x, y))
        before = kept.fetch()[4] if rounds else start[2][4]
        *_, kept = run(model, control, kept, (x, bad))
        assert [*run.report.dropped] == [4]
        np.testing.assert_array_equal(kept.fetch()[4], before)
        assert np.isfinite(kept.fetch()).all()


def test_a_worker_that_is_lost_leaves_its_slices(actors):
    n = 8
    plan, data = programs.scaffold_plan(n), programs.data(n)
    run = ray.compile(
        plan, workers=actors, keep=programs.SCAFFOLD_KEEP, block_size=2
    )  # fmt: skip
    state = programs.run_scaffold(run, programs.scaffold_start(n), 2, data)
    for each in actors.states():
        os.kill(each.pid, signal.SIGKILL)
    state = programs.run_scaffold(run, state, 1, data)
    assert run.report.lost
    expected = programs.run_scaffold(
        reference.compile(plan), programs.scaffold_start(n), 3, data
    )
    np.testing.assert_allclose(state[2].fetch(), expected[2], rtol=1e-4, atol=1e-6)


def test_handles_end_with_their_workers():
    n = 4
    plan, data = programs.scaffold_plan(n), programs.data(n)
    options = {"keep": programs.SCAFFOLD_KEEP, "ray_options": {"num_cpus": 0}}
    run = ray.compile(plan, workers=1, **options)
    state = programs.run_scaffold(run, programs.scaffold_start(n), 1, data)
    run.close()
    text = "The workers that had the slices of"
    raises(drjax.EngineError, text, state[2].fetch)
    raises(drjax.EngineError, text, run, *state, data)


@pytest.mark.parametrize("name", some(["scaffold", "diloco"], "scaffold"))
def test_state_outlives_drivers_that_are_killed(tmp_path, name):
    """Killed when three calls have ended; the next one has the bits of no kill."""
    command = [sys.executable, "-m", "tests.helpers.dying_trainer", name]
    first = subprocess.Popen(
        [*command, tmp_path / "run"], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert first.stdout is not None
    lines = []
    for line in first.stdout:
        lines.append(line.strip())
        if line.startswith("ended 3"):
            first.kill()
    first.wait()
    assert lines[0] == "restored 0" and first.returncode == -signal.SIGKILL
    ended = int(lines[-1].split()[1])
    done = subprocess.run(
        [*command, tmp_path / "run"],
        cwd=ROOT, capture_output=True, text=True, timeout=HANGS,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    restored, *_, bits = done.stdout.split("\n")[:-1]
    # A call that has returned is never lost; one may have ended that did not say so.
    assert int(restored.split()[1]) - ended in (0, 1)
    algorithm, n = programs.ALGORITHMS[name], dying_trainer.N
    run = in_process.compile(algorithm.plan(n), block_size=2, keep=algorithm.keep)
    data = programs.data(n)
    state = algorithm.run(run, algorithm.start(n), dying_trainer.CALLS, data)
    assert bits == f"bits {dying_trainer.bits(state)}"


def test_workers_write_what_stays(actors, tmp_path, monkeypatch):
    """The driver neither sends nor receives slices, also when it restores them."""
    n, d = 8, 30_000

    @drjax.program(clients=n)
    def step(kept):
        kept = drjax.map_fn(lambda x: jnp.sin(x) + 1, kept)
        return kept, drjax.reduce_max(drjax.map_fn(jnp.max, kept))

    start = np.arange(n * d, dtype=np.float32).reshape(n, d)
    plan = drjax.make_plan(step)(start)
    options = {"keep": {0: 0}, "checkpoint": tmp_path / "run", "block_size": 2}
    run = ray.compile(plan, workers=actors, **options)
    kept, _ = run(start)
    received, sent = received_bytes(monkeypatch), sent_bytes(monkeypatch)
    kept, top = run(kept)
    again = ray.compile(plan, workers=actors, **options)
    calls, (restored, same_top) = again.restore() or pytest.fail()
    assert calls == 2 and same_top == top and not sum(sent) + sum(received)
    np.testing.assert_array_equal(restored.fetch(), kept.fetch())
    # A file for each block, of two calls.
    assert len([*(tmp_path / "run").glob("slices-*")]) == 2 * n // 2
