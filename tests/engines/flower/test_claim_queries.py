"""Clients are asked which group each is: no engine needed.

Covers: drjax.engines.flower.claim_queries.
"""

import logging

import drjax
from drjax.engines.flower.assignment import Assignment
from drjax.engines.flower.claim_queries import ClaimQueries, ClientFailed
from drjax.engines.flower.untrusted_replies import BadReply
from tests.helpers.raising import raises


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
