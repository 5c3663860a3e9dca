"""The schedules of known moves: what arrives, how many messages, and how many slices.

Covers: drjax._plan.schedule_moves.
"""

import numpy as np
import pytest

from drjax._plan.schedule_moves import Schedule, schedule

NONE = -1  # no slice
SLICE = 1024  # bytes


def received(plan: Schedule, devices: int, slots: int) -> np.ndarray:
    """What each device reads of the slots `[m, k]` after all collectives."""
    x = np.arange(devices * slots).reshape(devices, slots)
    parts = [x] if plan.own else []
    for step in plan.steps:
        senders, receivers = zip(*step.pairs, strict=True)
        assert len({*senders}) == len({*receivers}) == len(step.pairs)
        arrived = np.full_like(step.slots, NONE)
        for a, b in step.pairs:
            assert a != b
            arrived[b] = x[a][step.slots[a]]
        parts.append(arrived)
    sent = np.take_along_axis(x, plan.exchanged, 1).reshape(devices, devices, -1)
    parts.append(sent.swapaxes(0, 1).reshape(devices, -1))
    read = np.take_along_axis(np.concatenate(parts, 1), plan.positions, 1)
    return np.where(plan.filled, read, NONE)


def moves(n: int, count: int):
    draw = np.random.RandomState(n + count)
    yield "permutation", draw.permutation(n)
    yield "ring", np.roll(np.arange(n), draw.randint(n))
    yield "reversed", np.arange(n)[::-1]
    yield "with repeats", draw.randint(0, n, count)
    yield "out of bounds", draw.randint(-2, n + 2, count)
    yield "one for all", np.zeros(count, int)


@pytest.mark.parametrize("devices", [1, 2, 3, 7, 8])
def test_every_slice_arrives(devices):
    for n in (1, 5, 8, 16, 29):
        for name, sources in moves(n, 2 * devices + 1):
            for nbytes in (1, SLICE, 10**6):
                plan = schedule(tuple(sources.tolist()), n, devices, nbytes)
                read = received(plan, devices, -(-n // devices)).ravel()
                known = (sources >= 0) & (sources < n)
                want = np.where(known, sources, NONE)
                np.testing.assert_array_equal(read[: len(want)], want, err_msg=name)
                assert (read[len(want) :] == NONE).all()


def shape(sources: np.ndarray, devices: int, nbytes: int = SLICE) -> tuple[int, int]:
    """How many permutes, and the slices that an all-to-all sends to each device."""
    plan = schedule(tuple(sources.tolist()), len(sources), devices, nbytes)
    return len(plan.steps), plan.exchanged.shape[1] // devices


def test_rings_and_blocks_are_permutes():
    ring = np.arange(4096)
    assert shape(np.roll(ring, 1), 8) == (1, 0)
    assert shape(np.roll(ring, 512), 8) == (1, 0)
    assert shape(np.roll(ring, 700), 8) == (2, 0)
    assert shape(ring[::-1], 8) == (1, 0)
    assert shape(ring, 8) == (0, 0)
    blocks = np.random.RandomState(0).permutation(8)
    assert shape(np.arange(4096).reshape(8, -1)[blocks].ravel(), 8)[1] == 0


def test_a_random_permutation_is_one_all_to_all():
    for n in (2048, 100_000):
        permutation = np.random.RandomState(0).permutation(n)
        steps, width = shape(permutation, 8)
        per_pair = n / 64
        assert steps == 0 and width < per_pair + 5 * per_pair**0.5


def test_large_slices_are_not_padded():
    """Four matchings of 4 slices on each device, and not 7 * 2 slices."""
    permutation = np.random.RandomState(1).permutation(32)
    plan = schedule(tuple(permutation.tolist()), 32, 8, 10**6)
    assert plan.slices_sent <= 4 and not plan.exchanged.size


def test_a_block_with_exceptions_is_a_permute_and_an_all_to_all():
    sources = np.roll(np.arange(4096), 512)
    odd = np.random.RandomState(0).permutation(4096)[:64]
    sources[odd] = sources[np.roll(odd, 1)]
    steps, width = shape(sources, 8)
    assert steps == 1 and 0 < width <= 8


def test_a_slice_is_sent_to_a_device_once():
    assert schedule((0,) * 4096, 4096, 8, SLICE).slices_sent <= 7


def test_many_devices():
    """Each has 8 partners, and an all-to-all would be for 4095."""
    permutation = np.random.RandomState(0).permutation(8 * 512)
    plan = schedule(tuple(permutation.tolist()), 8 * 512, 512, 10**5)
    assert plan.slices_sent == 8 and not plan.exchanged.size
