"""Asks clients which group they claim, until each group has a client.

Input: a link to the clients, and an `Assignment`. Output: the claims, in the
assignment.

Invariants: a client is asked once, and again after it has left, when it has failed, or
when the holder of the group that it was refused is gone. A bad answer is a refused
claim, and concerns no other client.

Sharp edges: which group a client claims is not validated beyond `Assignment.claim`.
"""

import logging
import time
from collections.abc import Iterable
from typing import Any, Protocol

from drjax._errors import EngineError
from drjax.engines.flower.assignment import Assignment
from drjax.engines.flower.untrusted_replies import BadReply

_INTERVAL = 0.1  # seconds between looks for clients and answers
_logger = logging.getLogger("drjax")


class ClientFailed(Exception):
    """A client reported that it cannot answer a query; it may be asked again."""


class Link(Protocol):
    """The connection of an engine to its clients, by which `ClaimQueries` asks them.

    A client is a process with the data of one group. Its id is an integer.
    """

    def present(self) -> set[int]:
        """Return the ids of the clients that are connected now."""
        ...

    def query(self, client: int) -> str | None:
        """Ask a client which group it has; return the number of the query, for `claim`.

        None if the query cannot be sent.
        """
        ...

    def claim(self, number: str) -> Any:
        """Read a client's answer to a query, without waiting; None if none has come.

        It is what the client sent as its group index, of any type and not validated. A
        `BadReply` is raised if it cannot be read, and `ClientFailed` if the client
        reported that it cannot answer.
        """
        ...


class ClaimQueries:
    """Asks clients which group they have, and puts their answers into an `Assignment`.

    If the assignment is `fixed`, no client is asked. If `drop` is true, a refused claim
    is logged as a warning; if false, it is an error.
    """

    def __init__(self, link: Link, assignment: Assignment, drop: bool):
        self._link, self._assignment, self._drop = link, assignment, drop
        # The number of the query of each client; None once it has answered.
        self._asked: dict[int, str | None] = {}

    def run(self, groups: Iterable[int], seconds: float, late: bool) -> None:
        """Ask clients for their groups, until each of `groups` has a connected client.

        It returns without an error after `seconds`. If `late` is true, it also waits
        for clients that have not connected yet; if false, it returns as soon as no
        connected client has an unanswered query. An `EngineError` is raised for a
        refused claim if `drop` is false.
        """
        groups, end = [*groups], time.monotonic() + seconds
        while True:
            present = self._link.present()
            # The driver may know the clients: then there are no queries.
            if not self._assignment.fixed:
                self._ask(present)
                self._collect(present)
            pending = any(self._asked.get(client) for client in present)
            # Between rounds the call does not wait for clients that may never come.
            if self._assignment.complete(groups, present) or not (late or pending):
                return
            if time.monotonic() >= end:
                return
            time.sleep(_INTERVAL)

    def _ask(self, present: set[int]) -> None:
        """Send a query to each connected client that was not asked, or may claim again.

        A client may claim again if it has reconnected, or if its claim was refused for
        another client that has disconnected or claimed another group. A client has one
        unanswered query at most.
        """
        # A client that left may come back as another group; one that was refused may
        # now have a chance.
        gone = {*self._asked} - present
        for client in gone | {*self._assignment.reclaimable(present)}:
            # An unanswered query stays: a client has one query at a time.
            if self._asked.get(client) is None:
                self._asked.pop(client, None)  # it is new again
        for client in sorted(present - {*self._asked}):
            if number := self._link.query(client):
                self._asked[client] = number

    def _collect(self, present: set[int]) -> None:
        """Read the claims that clients have answered, and assign groups to clients.

        The client of a refused claim gets no group, or its `EngineError` is raised if
        `drop` is false.
        """
        for client, number in [*self._asked.items()]:
            if number is None:
                continue
            try:
                group = self._link.claim(number)
            except ClientFailed:  # it may do better next time
                del self._asked[client]
                continue
            except BadReply as error:
                group = error
            if group is None:
                continue
            self._asked[client] = None
            if why := self._assignment.claim(client, group, present):
                if not self._drop:
                    raise EngineError(why)
                _logger.warning("%s It takes no part.", why)
