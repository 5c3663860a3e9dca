"""How many groups a block has by default.

Covers: drjax.engines.core.block_size.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import drjax
from drjax.backends import in_process
from drjax.engines.core.block_size import BlockSize
from drjax.engines.core.driver import Runner
from drjax.engines.core.messages import BlockResult
from drjax.engines.core.options import EngineOptions
from drjax.engines.in_process.adapter import InProcess
from tests.helpers.conformance import slices_for, survivors, weighted_plan

pytestmark = pytest.mark.usefixtures("leaks_unchecked")


def plan_of(n, floats, results):
    """A plan whose groups have so many floats of inputs and results."""

    @drjax.program(clients=n)
    def total(scale, x):
        work = lambda s, x: jnp.zeros(results) + s * x.sum()
        return drjax.reduce_sum(drjax.map_fn(work, (drjax.broadcast(scale), x)))

    slices = jax.ShapeDtypeStruct((n, floats), jnp.float32)
    return drjax.make_plan(total)(jnp.float32(1), slices)


def block_size(n, *, floats=1, results=1, workers=2, timeout=None) -> BlockSize:
    return BlockSize(plan_of(n, floats, results).rounds[0], n, workers, timeout)


def took(seconds, pids=(1, 2), blocks=2) -> list[BlockResult]:
    return [
        BlockResult([], [], {}, pid, seconds) for _ in range(blocks) for pid in pids
    ]


def test_by_bytes_of_inputs_and_results():
    assert block_size(1000).value == 125  # four for each worker
    assert block_size(1_000_000, floats=8).value == 62500  # 256 bytes at least
    assert block_size(1000, floats=1_000_000).value == 4
    assert block_size(100, floats=25_000_000).value == 1
    assert block_size(3).value == 1


def test_workers_have_equally_many_blocks():
    size = block_size(1_000_000, floats=8)
    size.measure(took(0.001))
    size.measure(took(0.012))
    assert size.value == 62500
    plan = plan_of(1_000_000, 1, 25)
    size = BlockSize(plan.rounds[0], 1_000_000, 2, None, one_by_one=False)
    size.measure(took(0.1))
    size.measure(took(0.006))  # 416,666 groups would take 20 ms
    assert size.value == 250_000


def test_groups_with_large_results_are_added_up_in_the_worker():
    size = block_size(1000, results=1_000_000)
    assert (size.value, size.batch) == (125, 4)
    size = block_size(100, results=25_000_000)
    assert (size.value, size.batch) == (50, 1)  # one block for each worker
    assert block_size(1000).batch == 65536


def test_groups_in_arrays_need_no_python_objects():
    plan = plan_of(1_000_000, 8, 1)
    size = BlockSize(plan.rounds[0], 1_000_000, 2, None, one_by_one=False)
    assert size.value == 125_000  # four for each worker
    assert size.batch == (16 << 20) // 36


def test_by_time_of_blocks():
    size = block_size(1000)
    size.measure(took(3.0, blocks=1))  # the first block of a worker is compiled
    assert size.value == 125
    size.measure(took(0.001))
    assert size.value == 500  # one for each worker
    size.measure(took(0.001))
    assert size.value == 500
    size = block_size(1000)
    size.measure(took(0.01))
    assert size.value == 250
    size = block_size(1000)
    size.measure(took(0.5))
    assert size.value == 125
    size.measure(took(25.0))
    assert size.value == 12
    size = block_size(1000, timeout=8.0)
    size.measure(took(4.0))
    assert size.value == 31
    size = block_size(1000, floats=1_000_000)
    size.measure(took(0.001))
    assert size.value == 4  # in bytes it is enough


def test_large_sums_are_sent_seldom():
    size = block_size(1000, results=1_000_000)
    size.measure(took(0.2))  # a tenth of a second for each megabyte is enough
    assert (size.value, size.sent) == (250, 4_000_000)
    size = block_size(1000, results=1_000_000)
    size.measure(took(0.5))
    assert size.value == 125
    size = block_size(1000, results=1_000_000, timeout=2.0)
    size.measure(took(0.3))  # and half a second is late
    assert size.value == 125


def test_resident_data_does_not_limit_blocks():
    size = block_size(1000, floats=1_000_000)
    size.measure(took(0.001), resident=True)
    assert size.value == 72  # of 80 groups in 20 ms, seven blocks for each worker
    assert size.batch == 4


def test_it_changes_seldom():
    size = block_size(4000)
    for seconds in (12.0, 60.0, 0.001, 100.0, 0.001):  # of a busy machine
        size.measure(took(seconds))
    assert size.value == 4  # 500, 104, 4


def test_later_rounds_have_fewer_blocks():
    class Quick(InProcess):
        """Blocks that take a millisecond, in two workers."""

        def submit(self, task, file, shared):
            handle = super().submit(task, file, shared)
            handle.result = replace(handle.result, seconds=1e-3)
            return handle

    n, args = 64, (np.float32(2), slices_for(64))
    run = Runner(weighted_plan(n), Quick(2), EngineOptions.checked())
    for blocks in (8, 2):
        survivors(run(*args), np.ones(n, bool))
        assert [stage.blocks for stage in run.report.stages] == [blocks] * 2
    run = in_process.compile(weighted_plan(n), block_size=5)
    for _ in range(2):
        run(*args)
        assert [stage.blocks for stage in run.report.stages] == [13] * 2
