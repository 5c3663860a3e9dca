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
    """A client reported that it cannot answer a query; it may be asked again."""


class Link(Protocol):
    """The connection of an engine to its clients, by which `ClaimQueries` asks them.

    A client is a process with the data of one group. Its id is an integer.
    """

    def present(self) -> set[int]:
        """Return the ids of the clients that are connected now."""
        ...

    def query(self, client: int) -> str | None:
        """Send a client the query which group it has.

        Args:
          client: The id of the client.

        Returns:
          A text that identifies the query, for `claim`; None if the query cannot be
          sent.
        """
        ...

    def claim(self, number: str) -> Any:
        """Read a client's answer to a query, without waiting.

        Args:
          number: The text that identifies the query, from `query`.

        Returns:
          What the client sent as its group index, of any type and not validated; None
          if there is no answer yet.

        Raises:
          BadReply: The answer cannot be read.
          ClientFailed: The client reported that it cannot answer.
        """
        ...


class ClaimQueries:
    """Asks clients which group they have, and puts their answers into an `Assignment`.

    Args:
      link: The connection to the clients.
      assignment: The table of the client of each group, which is updated. If it is
        `fixed`, no client is asked.
      drop: If true, a refused claim is logged as a warning; if false, it is an error.
    """

    def __init__(self, link: Link, assignment: Assignment, drop: bool):
        self._link, self._assignment, self._drop = link, assignment, drop
        # The number of the query of each client; None once it has answered.
        self._asked: dict[int, str | None] = {}

    def run(self, groups: Iterable[int], seconds: float, late: bool) -> None:
        """Ask clients for their groups, until each of `groups` has a connected client.

        Queries go to clients that were not asked, that have reconnected, or whose claim
        would be accepted now. Their answers are put into the constructor's
        `Assignment`; if that is `fixed`, no client is asked. The method returns without
        an error if time is over before each group has a client.

        Args:
          groups: Group indices.
          seconds: The time limit.
          late: If true, wait also for clients that have not connected yet. If false,
            return as soon as no connected client has an unanswered query.

        Raises:
          EngineError: A claim is refused, and the constructor's `drop` is false.
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
        another client that has disconnected or claimed another group. The queries are
        recorded, and a client has one unanswered query at most.

        Args:
          present: The ids of all connected clients.
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

        A claim is the index of the group whose data a client says that it has. A claim
        is refused if it is no index of a group, or if another connected client has the
        group. If the constructor's `drop` is true, a refused claim is logged as a
        warning, and its client gets no group. A client that could not answer is asked
        again later.

        Args:
          present: The ids of all connected clients. The group of a client that is not
            among them may be claimed by another one.

        Raises:
          EngineError: A claim is refused, and the constructor's `drop` is false.
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
