"""Which worker has which task, and which clients are asked for their group.

Covers: drjax.engines.ray.placement.
"""

import pytest

from drjax.engines.ray.placement import Placement

A, B, C = (), (1,), (2,)  # workers are compared by identity


def test_tasks_go_to_the_worker_with_the_fewest():
    tasks = Placement([A, B])
    for handle, worker in enumerate([A, B, A, B]):
        assert tasks.least_loaded() == worker
        tasks.submitted(handle, worker, handle + 10)
    assert tasks.finished(1) == B and tasks.least_loaded() == B
    # Its worker is still busy with an abandoned task.
    assert tasks.abandon(3) == (B, 13) and tasks.abandon(3) is None
    assert tasks.finished(0) == A and tasks.least_loaded() == A


def test_a_new_worker_has_neither_files_nor_tasks():
    tasks = Placement([A, B])
    assert [tasks.first_use(A, name) for name in ("x", "y", "x")] == [1, 1, 0]
    tasks.submitted(0, A, 10)
    tasks.abandon(0)
    tasks.remove(A)
    assert tasks.workers == [B] and not tasks.abandoned
    tasks.workers.append(C)
    assert tasks.first_use(C, "x")


def test_slices_are_sent_to_a_worker_once():
    tasks, stored = Placement([A, B]), {1, 2}
    assert tasks.outdated(A, stored, 0) is None  # whatever it has
    assert [tasks.lacks(A, i) for i in (1, 2, 1)] == [True, True, False]
    assert tasks.outdated(A, stored, 0) == []
    stored.remove(1)
    assert tasks.outdated(A, stored, 1) == [1] and tasks.outdated(A, stored, 1) == []
    assert tasks.outdated(B, stored, 1) is None and tasks.lacks(B, 2)
    assert not tasks.lacks(A, 2)
    tasks.unsure(A)
    assert tasks.outdated(A, stored, 1) is None and tasks.lacks(A, 2)
    tasks.remove(A)
    tasks.workers.append(C)
    assert tasks.outdated(C, stored, 1) is None and tasks.lacks(C, 2)


@pytest.mark.parametrize(("timeout", "replaced"), [(None, []), (2.0, [A, B])])
def test_abandoned_tasks_get_the_time_limit(timeout, replaced, caplog):
    tasks, waited, finished = Placement([A, B]), [], []
    for handle, worker in enumerate([A, A, B, B]):
        tasks.submitted(handle, worker, handle)
        tasks.abandon(handle)

    def wait(handles, count, seconds):
        waited.append((count, seconds))
        return handles[:1], handles[1:]

    def replace(worker):
        finished.append(worker)
        tasks.remove(worker)

    tasks.settle(wait, replace, timeout)
    # The second task of a worker that was replaced is gone with it.
    Placement([A]).settle(wait, replace, timeout)  # it has no abandoned tasks
    assert waited == [(4, timeout or 0)] and finished == replaced
    assert [*tasks.abandoned] == ([] if replaced else [1, 2, 3])
    text = "3 blocks of an earlier call, which failed or was stopped, still run"
    assert (text in caplog.text) == (timeout is None)
