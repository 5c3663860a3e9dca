"""What a worker does with blocks of several batches: one result for all groups.

Covers: drjax.engines.core.worker.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import drjax
from drjax.backends import in_process
from drjax.engines.core import block_size, worker
from drjax.engines.core.executable_plan import ExecutablePlan
from drjax.engines.core.messages import Block, Task
from tests.helpers.batches import batches_of
from tests.helpers.cases import CASES
from tests.helpers.compiled import compilations
from tests.helpers.conformance import Conformance, slices_for, survivors, weighted_plan


@pytest.fixture(autouse=True)
def _of_two():
    with batches_of(2), jax.check_tracer_leaks(False):
        yield


class TestInBatches:
    """Blocks of three groups, which run two at a time."""

    compile = staticmethod(in_process.compile)
    processes = False
    cases = CASES[1::3]

    test_programs = Conformance.test_programs
    test_folds = Conformance.test_folds_are_in_the_order_of_the_groups
    test_sizes = Conformance.test_block_size_and_workers_do_not_matter
    test_cohorts = Conformance.test_a_cohort_between_rounds_of_all_clients


def partials_of(plan, args, **options) -> list:
    """The results of all blocks of the plan's only round."""
    results, real = [], worker.run

    def run(*task):
        results.append(real(*task))
        return results[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "run", run)
        in_process.compile(plan, **options)(*args)
    return results


def test_a_block_has_one_partial_reduction():
    n, size = 14, 5

    @drjax.program(clients=n)
    def both(x):
        y = drjax.map_fn(lambda x: jnp.arange(3.0) * x, x)
        return drjax.reduce_sum(y), drjax.reduce_max(y)

    x = slices_for(n)[0]
    results = partials_of(drjax.make_plan(both)(x), (x,), block_size=size)
    assert [[y.shape for y in r.partials] for r in results] == [[(3,), (3,)]] * 3
    for i, result in enumerate(results):
        own = np.arange(3.0) * x[i * size : (i + 1) * size, None]
        np.testing.assert_allclose(result.partials[0], own.sum(0), rtol=1e-6)
        np.testing.assert_array_equal(result.partials[1], own.max(0))


def test_a_sum_loses_nothing_over_many_batches():
    """Running sums of few numbers have a second accumulator."""
    n = 4000
    total = drjax.program(clients=n)(drjax.reduce_sum)
    x = np.full(n, 0.1, np.float32)
    (result,) = partials_of(drjax.make_plan(total)(x), (x,), block_size=n)
    np.testing.assert_allclose(result.partials[0], n * np.float64(x[0]), rtol=1e-7)


@pytest.mark.parametrize("bad", [[0], [3, 4], [0, 1], [2, 9], range(1, 10)])
def test_groups_that_fail_are_found_in_their_batches(bad):
    n, good = 10, ~np.isin(np.arange(10), list(bad))
    x, w = slices_for(n)
    options = {"on_error": "drop", "check_nans": True, "block_size": 10}
    run = in_process.compile(weighted_plan(n), **options)
    survivors(run(np.float32(2), (np.where(good, x, -x), w)), good)
    assert sorted(run.report.dropped) == list(bad)
    strict = in_process.compile(weighted_plan(n), check_nans=True, block_size=10)
    with pytest.raises(drjax.EngineError, match=f"Group {min(bad)} failed"):
        strict(np.float32(2), (np.where(good, x, -x), w))


def test_global_inputs_reach_every_batch():
    n = 6

    @drjax.program(clients=n)
    def scaled(model, x):
        pair = drjax.broadcast(model), x
        return drjax.reduce_sum(drjax.map_fn(lambda m, x: m * x, pair))

    args = np.arange(4, dtype=np.float32), slices_for(n)[0]
    run = in_process.compile(drjax.make_plan(scaled)(*args), block_size=n)
    np.testing.assert_array_equal(run(*args), args[0] * args[1].sum())


def batches_run(work, limit, dropped=(), smaller=False):
    """The sizes of the batches of a block of 8, planned for 2, and its sums.

    At most `limit` bytes of inputs, results and temporaries of its groups fit. Before
    it a `smaller` block may run, which is one batch.
    """
    n, ran = 8, []

    @drjax.program(clients=n)
    def total(model, x):
        each = drjax.map_fn(work, (drjax.broadcast(model), x))
        by_index = drjax.map_fn(lambda x: drjax.partition_index() * x, x)
        return drjax.reduce_sum(each), drjax.reduce_sum(by_index)

    x, valid = slices_for(n)[0], ~np.isin(np.arange(n), dropped)
    model = np.arange(10_000, dtype=np.float32)
    file = ExecutablePlan(drjax.make_plan(total)(model, x)).file
    loaded = worker.LoadedPlan(file)
    batch = worker.CompiledStage._batch

    def spy(stage, b, mask, *args):
        ran.append((b, mask is None))
        return batch(stage, b, mask, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_size, "_BYTES", limit)
        patch.setattr(worker.CompiledStage, "_batch", spy)
        block = Block(np.arange(n, dtype=np.int32), valid, [x])
        task = Task(0, block, 2, False, False, full=n)
        with compilations() as compiled:
            if smaller:
                two = Block.of_range(0, 2, [x[:2]])
                loaded.run(Task(0, two, 2, False, False, full=2), [model])
            result = loaded.run(task, [model])
            count = len(compiled)
            again = loaded.run(task, [model])
            assert len(compiled) == count
    for first, second in zip(result.partials, again.partials, strict=True):
        np.testing.assert_array_equal(first, second)
    expected = sum(work(model, y) for y in x[valid])
    np.testing.assert_allclose(result.partials[0], expected, rtol=1e-6)
    index = np.arange(n)[valid]
    np.testing.assert_allclose(result.partials[1], (index * x[valid]).sum(), rtol=1e-6)
    return ran, [x for x in compiled if "run" in x or "spy" in x]


def scaled(model, x):
    return model * x  # 40,000 bytes, which the compiler adds up unseen


def test_results_that_are_added_up_unseen_do_not_count_as_memory():
    assert batches_run(scaled, 20_000) == (
        [(2, True), (8, True)],
        ["jit(run)", "jit(spy)"],
    )
    # Of two groups at a time, each needs 6 bytes, of four at a time 5.
    ran, _ = batches_run(scaled, 32)
    assert ran == [(2, True), (4, True)]


def test_what_a_smaller_block_has_compiled_says_what_fits():
    """No function for several batches is compiled only to ask that."""
    ran, compiled = batches_run(scaled, 20_000, smaller=True)
    assert (ran, compiled) == ([(2, True), (8, True)], ["jit(spy)"] * 2)


def test_results_that_are_held_count():
    sorted_ = lambda m, x: jnp.sort(m * x)
    assert batches_run(sorted_, 100_000) == ([(2, True)], ["jit(run)"])


def test_a_block_without_some_groups_runs_as_planned():
    ran, compiled = batches_run(scaled, 20_000, dropped=[3])
    assert ran == [(2, True), (2, False)] and len(compiled) == 2
