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
from drjax.backends.engine.assignment import Assignment
from drjax.backends.engine.untrusted_replies import BadReply

_INTERVAL = 0.1  # seconds between looks for clients and answers
_logger = logging.getLogger("drjax")


class ClientFailed(Exception):
    """A client could not answer a query; it may answer when it is asked again."""


class Link(Protocol):
    """How clients are reached: what an engine gives to `ClaimQueries`."""

    def present(self) -> set[int]:
        """The ids of the clients that are connected."""
        ...

    def query(self, client: int) -> str | None:
        """Ask a client for its group; returns the query's number, None if it fails."""
        ...

    def claim(self, number: str) -> Any:
        """The group, of any type, in the answer to the query with this number.

        None if there is no answer yet.

        Raises:
          BadReply: The answer cannot be read.
          ClientFailed: The client could not answer.
        """
        ...


class ClaimQueries:
    """Asks the clients of an engine for their groups.

    Args:
      link: How the clients are reached.
      assignment: The assignment of groups to clients, which gets the claims.
      drop: Whether a refused claim is only logged, and is no error.
    """

    def __init__(self, link: Link, assignment: Assignment, drop: bool):
        self._link, self._assignment, self._drop = link, assignment, drop
        # The number of the query of each client; None once it has answered.
        self._asked: dict[int, str | None] = {}

    def run(self, groups: Iterable[int], seconds: float, late: bool) -> None:
        """Ask new clients for their groups, until all of these groups have a client.

        Args:
          groups: The group indices.
          seconds: How long to wait for that at most.
          late: Whether to wait also for clients that are yet to connect.

        Raises:
          EngineError: A claim is refused, and `drop` is false.
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
        """Query the clients that are new, or may claim again.

        `present` has the ids of the clients that are connected.
        """
        # A client that left may come back as another group; one that was refused may
        # now have a chance.
        gone = {*self._asked} - present
        for client in gone | {*self._assignment.reclaimable(present)}:
            if self._asked.get(client) is None:
                self._asked.pop(client, None)  # it is new again
        for client in sorted(present - {*self._asked}):
            if number := self._link.query(client):
                self._asked[client] = number

    def _collect(self, present: set[int]) -> None:
        """Pass the answers that have come to the assignment.

        `present` has the ids of the clients that are connected.

        Raises:
          EngineError: A claim is refused, and `drop` is false.
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
