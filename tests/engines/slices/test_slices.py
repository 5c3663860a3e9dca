"""One interface of a partitioned value: an array, data that is read, workers' slices.

Covers: drjax.engines.slices.slices, drjax.engines.slices.groups,
drjax.engines.slices.worker_slices.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import drjax
from drjax.backends.groups import Groups
from drjax.engines.slices.groups import flat_slices
from drjax.engines.slices.slices import as_slices, in_steps, read_if_lazy
from drjax.engines.slices.worker_slices import Keeping, Pieces, WorkerSlices

N = 5
X = np.random.RandomState(0).randn(N, 3, 2).astype(np.float32)
ALIVE = np.array([True, False, True, True, False])


class Store(Keeping):
    """Workers whose pieces the driver can read; it counts how often it does."""

    def __init__(self):
        super().__init__()
        self.reads, self.pieces = 0, {"a": [X[3:]], "b": [X[:3]]}

    def fetch(self, value, pieces):
        self.reads += 1
        return [self.pieces[name] for name in pieces]


def value():
    plan = drjax.make_plan(drjax.program(clients=N)(drjax.reduce_sum))(X)
    return plan, plan.inputs[0]


def array():
    return as_slices(value()[1], X)


def lazy():
    (slices,) = flat_slices(value()[0], (Groups([*X]),), {})
    return slices


def of_workers() -> Any:
    piece, position = np.array([1, 1, 1, 0, 0]), np.array([0, 1, 2, 0, 1])
    table = Pieces([("a", 0), ("b", 0)], piece, position)
    return WorkerSlices(value()[1], table, Store())


def block(x, low, high):
    leaves = [[y] for y in X[low:high]]
    part = x.block(low, high, leaves)
    return part.assemble(x.engine.pieces.get) if isinstance(part, Pieces) else part


@pytest.mark.parametrize("make", [array, lazy, of_workers])
class TestSlices:
    def test_blocks_and_the_whole(self, make):
        x = make()
        assert (x.shape, x.dtype, x.n) == (X.shape, X.dtype, N)
        np.testing.assert_array_equal(block(x, 1, 4), X[1:4])
        np.testing.assert_array_equal(x.whole(), X)
        np.testing.assert_array_equal(read_if_lazy(x.opened()), X)
        steps: Any = in_steps(x)
        np.testing.assert_array_equal(read_if_lazy(steps[:, 1]), X[:, 1])

    def test_moved_to_other_groups(self, make):
        index = np.array([4, 4, 0, 1, 2])
        np.testing.assert_array_equal(make().moved(value()[1], index).whole(), X[index])

    def test_without_dropped_groups(self, make):
        want = np.where(ALIVE[:, None, None], X, np.nan)
        np.testing.assert_array_equal(make().masked(ALIVE).whole(), want)
        np.testing.assert_array_equal(make().masked(ALIVE | True).whole(), X)
        index = np.array([1, 0, 2, 3, 4])
        moved = make().masked(ALIVE).moved(value()[1], index)
        np.testing.assert_array_equal(moved.whole(), want[index])

    @pytest.mark.parametrize("old", [lambda: -X, of_workers, lazy])
    def test_dropped_groups_keep_what_they_had(self, make, old):
        kept = make().masked(ALIVE).replacing(value()[1], old(), ALIVE)
        want = np.where(ALIVE[:, None, None], X, read_if_lazy(old()))
        np.testing.assert_array_equal(kept.whole(), want)

    def test_columns(self, make):
        def median(x):
            return drjax.reduce_columns(
                lambda c: jnp.median(c, 0), drjax.map_fn(jnp.sin, x)
            )

        plan = drjax.make_plan(drjax.program(clients=N)(median))(X)
        (loop,) = [step for step in plan.steps if step.bodies]
        (column,) = [v for v in loop.bodies[0].inputs if v.partitioned]
        x = make().columns(column, 6)
        flat = X.reshape(N, 6).T
        assert x.n == 6
        np.testing.assert_array_equal(block(x, 2, 5), flat[2:5])
        np.testing.assert_array_equal(x.whole(), flat)


def test_what_workers_have_is_in_use_until_it_is_released():
    x = of_workers()
    moved = x.moved(x.value, np.array([3, 3, 4, 3, 4]))
    assert isinstance(moved, WorkerSlices) and {*x.engine.in_use} == {x, moved}
    assert moved.table.pieces == [("a", 0)]  # no group has the other
    masked = x.masked(ALIVE)
    x.engine.generation += 1
    with pytest.raises(drjax.EngineError, match="have ended, by close"):
        masked.opened()
    assert not x.engine.reads
    x.held = True
    x.release()
    assert not x.held and not x.table.pieces
    assert np.isnan(x.whole()).all()
