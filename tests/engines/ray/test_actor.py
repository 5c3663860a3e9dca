"""What a worker is sent, and what it keeps.

Covers: drjax.engines.ray.actor.
"""

import pickle

import numpy as np
import pytest

from drjax.engines.core.executable_plan import ExecutablePlan
from drjax.engines.core.messages import Block, Task
from drjax.engines.ray.actor import Message, Stored, Worker, result_of
from tests.helpers.conformance import slices_for, weighted_plan

N = 4


class Sent:
    """A worker, and messages to it, as the adapter makes them."""

    def __init__(self):
        self.worker, self.file = Worker(), ExecutablePlan(weighted_plan(N)).file
        self.x, self.w = slices_for(N)

    def run(self, parts, outdated, *arguments, file=None, stay=()):
        block = Block(np.arange(N, dtype=np.int32), np.ones(N, bool), [])
        task = Task(0, block, N, False, False, stay=stay)
        shared = [np.array(2, np.float32)]
        message = Message("name", file, task, [0, 1], shared, parts, outdated)
        return self.worker.run(message.to_bytes(), *arguments)


def test_slices_are_named_after_they_were_sent():
    sent = Sent()
    parts = [Stored(1, 5), [sent.w]]
    first = sent.run(parts, None, sent.file, [sent.x], file=Stored(0))
    again = sent.run([5, [sent.w]], [])
    assert isinstance(first, bytes)
    results = [result_of(x) for x in (first, again)]
    for x, y in zip(*(result.partials for result in results), strict=True):
        np.testing.assert_array_equal(x, y)
    with pytest.raises(KeyError):
        sent.run([5, [sent.w]], [5])
    sent.run([Stored(0, 6), [sent.w]], [], [sent.x])
    with pytest.raises(KeyError):
        sent.run([6, [sent.w]], None)
    # For this task alone.
    sent.run([Stored(0), [sent.w]], [], [sent.x])
    assert not sent.worker._slices


@pytest.mark.parametrize("groups", [[0, 1, 2], [3, 4], [2, 4, 5], [7], []])
@pytest.mark.parametrize("out", [None, 0])
def test_blocks_are_pickled(groups, out):
    valid = np.ones(len(groups), bool)
    if out is not None:
        valid[out : out + 1] = False
    block = Block(np.array(groups, np.int32), valid, [np.arange(3)])
    copy = pickle.loads(pickle.dumps(block))
    assert copy.groups.dtype == np.int32 and copy.valid.dtype == bool
    np.testing.assert_array_equal(copy.groups, block.groups)
    np.testing.assert_array_equal(copy.valid, block.valid)
    np.testing.assert_array_equal(copy.slices[0], np.arange(3))
    np.testing.assert_array_equal(np.arange(8)[block.place], block.groups)
    consecutive = [0, 1, 2], [3, 4], [7]
    assert isinstance(copy.place, slice) == (groups in consecutive)


def test_a_range_is_pickled_as_two_numbers():
    size = 100_000
    block = Block(np.arange(size, dtype=np.int32), np.ones(size, bool), [])
    assert len(pickle.dumps(block)) < 200
