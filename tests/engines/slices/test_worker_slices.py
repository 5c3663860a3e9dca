"""Slices that stay with the workers of a pool, in this process.

Covers: drjax.engines.slices.worker_slices, drjax.engines.slices.coordinates,
drjax.engines.slices.slices, drjax.engines.core.kept_results.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import drjax
from drjax.backends import Kept, reference
from drjax.engines.core.driver import Runner
from drjax.engines.core.options import EngineOptions
from drjax.engines.in_process.adapter import InProcess
from drjax.engines.slices.worker_slices import Keeping as KeepingEngine
from drjax.engines.slices.worker_slices import Pieces

pytestmark = pytest.mark.usefixtures("leaks_unchecked")


class Piece(list[np.ndarray]):
    """The arrays of a block; the driver knows the reference only."""


class Keeping(KeepingEngine, InProcess):
    """A pool whose workers keep slices, and count what the driver reads."""

    def __init__(self):
        super().__init__()
        InProcess.__init__(self, 2)
        self.stays, self.reads, self.known = "kept", 0, dict[str, Piece]()

    def fetch(self, value, pieces):
        return [*map(self.read, pieces)]

    def read(self, reference):
        self.reads += 1
        return self.known[reference]

    def submit(self, task, file, shared):
        slices = [
            x.assemble(self._arrays) if isinstance(x, Pieces) else x
            for x in task.block.slices
        ]
        task = task.with_block(task.block.with_slices(slices))
        handle = super().submit(task, file, shared)
        if task.stay and handle.error is None:
            result = handle.result
            pairs = [*zip(result.slices, task.stay, strict=not result.slices == [])]
            name = f"piece {len(self.known)}"
            self.known[name] = Piece(x for x, stays in pairs if stays)
            rest = [x for x, stays in pairs if not stays]
            handle.result = replace(result, slices=rest, piece=name)
        return handle

    def _arrays(self, reference: Any):
        # The driver has a list of arrays where it had them before the call.
        return self.known[reference] if isinstance(reference, str) else reference


def compiled(plan, keep=None, **options) -> tuple[Any, Keeping]:
    engine = Keeping()
    return Runner(plan, engine, EngineOptions.checked(**options), keep=keep), engine


@drjax.program(clients=5)
def step(total, x):
    total = drjax.map_fn(jnp.add, (total, x))
    return total, drjax.reduce_mean(drjax.map_fn(jnp.sqrt, total))


def test_results_stay_from_call_to_call():
    x, zeros = np.arange(5, dtype=np.float32), np.zeros(5, np.float32)
    options = {"on_error": "drop", "check_nans": True, "block_size": 2}
    run, engine = compiled(drjax.make_plan(step)(zeros, x), {0: 0}, **options)
    total, mean = run(zeros, x)
    assert isinstance(total, Kept) and not engine.reads
    np.testing.assert_allclose(mean, np.sqrt(x).mean(), rtol=1e-6)
    # Blocks of another size read parts of pieces.
    run.options = replace(run.options, block_size=3)
    total, mean = run(total, np.where(x == 3, -9, x).astype(np.float32))
    assert [*run.report.dropped] == [3] and not engine.reads
    np.testing.assert_allclose(mean, np.sqrt(2 * x[x != 3]).mean(), rtol=1e-6)
    # The group that was dropped has what it had before.
    np.testing.assert_array_equal(total.fetch(), np.where(x == 3, 3, 2 * x))
    assert engine.reads


def test_slices_move_between_workers():
    @drjax.program(clients=5)
    def move(x, index):
        y = drjax.map_fn(jnp.sin, x)
        moved = drjax.shift(y, 1), drjax.take(y, index)
        return drjax.reduce_sum(drjax.map_fn(lambda x, y, z: x * y - z, (y, *moved)))

    x = np.random.RandomState(0).randn(5, 2).astype(np.float32)
    index = np.array([4, 0, 0, -2, 1], np.int32)
    plan = drjax.make_plan(move)(x, index)
    run, engine = compiled(plan, block_size=2)
    want = reference.compile(plan)(x, index)
    np.testing.assert_allclose(run(x, index), want, rtol=1e-5, atol=1e-6)
    assert engine.known and not engine.reads


def test_workers_read_columns():
    @drjax.program(clients=5)
    def medians(x):
        y = drjax.map_fn(lambda x: {"y": jnp.sqrt(x), "z": x[0]}, x)
        return drjax.reduce_columns(jnp.median, y)

    x = np.random.RandomState(0).rand(5, 3, 2).astype(np.float32)
    plan = drjax.make_plan(medians)(x)
    run, engine = compiled(plan, block_size=2)
    want = reference.compile(plan)(x)
    jax.tree.map(np.testing.assert_array_equal, run(x), want)
    assert engine.known and not engine.reads
