"""Which worker has which task, and which clients are asked for their group.

Covers: drjax.engines.ray.placement, drjax.engines.flower.claim_queries.
"""

import logging

import pytest

import drjax
from drjax.engines.flower.assignment import Assignment
from drjax.engines.flower.claim_queries import ClaimQueries, ClientFailed
from drjax.engines.flower.untrusted_replies import BadReply
from drjax.engines.ray.placement import Placement
from tests.helpers.raising import raises

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
    tasks.replace(A, C)
    assert tasks.workers == [C, B] and not tasks.abandoned
    assert tasks.first_use(C, "x")


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
        tasks.replace(worker, f"new {worker}")

    tasks.settle(wait, replace, timeout)
    # The second task of a worker that was replaced is gone with it.
    Placement([A]).settle(wait, replace, timeout)  # it has no abandoned tasks
    assert waited == [(4, timeout or 0)] and finished == replaced
    assert [*tasks.abandoned] == ([] if replaced else [1, 2, 3])
    text = "3 blocks of an earlier call, which failed or was stopped, still run"
    assert (text in caplog.text) == (timeout is None)


class Clients:
    """Clients that answer with `answers`, in turn: a group, None, or an error."""

    def __init__(self, answers):
        self.answers, self.asked = answers, []

    def present(self):
        return {*self.answers}

    def query(self, client):
        self.asked.append(client)
        return str(client)

    def claim(self, number):
        answer = self.answers[int(number)].pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_clients_are_asked_until_each_group_has_one():
    clients = Clients({5: [None, 1], 6: [ClientFailed(), 0]})
    groups = Assignment(2)
    ClaimQueries(clients, groups, drop=False).run([0, 1], 10.0, late=True)
    assert (groups[0], groups[1]) == (6, 5)
    assert clients.asked == [5, 6, 6]  # again after it has failed


def test_claims_that_are_refused(caplog):
    run = lambda drop: ClaimQueries(
        Clients({5: [0], 6: [0], 7: [BadReply("it is text")]}), Assignment(2), drop
    ).run([0, 1], 0.0, late=True)
    raises(drjax.EngineError, "A client has partition-id=0.", run, False)
    with caplog.at_level(logging.WARNING, "drjax"):
        run(True)
    first, second = [record.message for record in caplog.records]
    assert first.endswith("It takes no part.") and "client 5 has this one" in first
    assert "does not report its partition-id: it is text" in second


def test_clients_that_the_driver_knows_are_not_asked():
    clients = Clients({5: [], 6: []})
    ClaimQueries(clients, Assignment(2, [6, 5]), False).run([0, 1], 10.0, late=True)
    assert not clients.asked


def test_clients_that_come_late_are_waited_for():
    clients = Clients({})
    known, groups = iter([{}, {}, {5: [0]}]), Assignment(1)

    def present():
        clients.answers = next(known, clients.answers)
        return {*clients.answers}

    clients.present = present
    queries = ClaimQueries(clients, groups, drop=False)
    queries.run([0], 10.0, late=False)  # no client has an unanswered query
    assert groups[0] is None and not clients.asked
    queries.run([0], 10.0, late=True)
    assert groups[0] == 5


def test_unanswered_queries_are_waited_for_between_rounds():
    clients, groups = Clients({5: [None, None, 0]}), Assignment(2)
    ClaimQueries(clients, groups, drop=False).run([0, 1], 10.0, late=False)
    assert groups[0] == 5 and clients.asked == [5]


def test_clients_claim_again_once_a_holder_has_left():
    clients, groups = Clients({5: [0], 6: [0, 0]}), Assignment(1)
    queries = ClaimQueries(clients, groups, drop=True)
    queries.run([0], 10.0, late=True)
    assert groups[0] == 5 and clients.asked == [5, 6]
    del clients.answers[5]
    queries.run([0], 10.0, late=False)
    assert groups[0] == 6 and clients.asked == [5, 6, 6]
    clients.answers = {5: [0], 6: []}  # it comes back, and is asked again
    queries.run([1], 0.0, late=False)
    assert groups[0] == 6 and clients.asked == [5, 6, 6, 5]
