"""The assignment of groups to clients, where clients run before the call.

Input: the ids of clients, or their claims. Output: the client of each group.

Invariants: each group has at most one client. Either the driver knows the clients,
or each client claims a group, and the first to claim one has it for as long as it is
present. A claim is not trusted: one that does not fit is refused, and changes nothing
for other clients.

Sharp edges: a client that reconnects under another id may find its group taken, and may
claim it again once the holder is gone (`reclaimable`).
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from drjax._errors import DrjaxValueError
from drjax.backends.engine.untrusted_replies import BadReply, readable


class Assignment:
    """The clients of n groups, by their ids.

    Args:
      n: How many groups there are.
      clients: The id of each group's client, in the order of the groups. Default: each
        client is yet to claim a group.

    Attributes:
      size: n.
      fixed: Whether the clients are arguments, so that claims are not needed.

    Raises:
      DrjaxValueError: The ids are not n different integers.
    """

    def __init__(self, n: int, clients: Sequence[int] | None = None):
        self.size, self.fixed = n, clients is not None
        ids_in_order = [] if clients is None else [*clients]
        self._clients = dict(enumerate(ids_in_order))
        self._refused: dict[int, tuple[Any, str]] = {}  # the claim of each, and why
        # `type` and not isinstance: True is no id of a client.
        ids = {x for x in ids_in_order if type(x) is int}
        if self.fixed and not len(ids_in_order) == len(ids) == n:
            raise DrjaxValueError(
                f"The ids of {n} different clients are needed, one integer for each "
                f"group in order; got {len(ids_in_order)} with {len(ids)} different "
                "integers."
            )

    def __getitem__(self, group: int) -> int | None:
        """The id of a group's client; None if the group has none."""
        return self._clients.get(group)

    def complete(self, groups: Iterable[int], present: Collection[int]) -> bool:
        """Whether each of these groups has a client that is present.

        `present` has the ids of all clients that are connected.
        """
        return all(self._clients.get(group) in present for group in groups)

    def claim(self, client: int, group: Any, present: Collection[int]) -> str | None:
        """Give a client the group that it claims; returns None, or why it is refused.

        Args:
          client: The id of the client.
          group: The claimed group, of any type; a `BadReply` if the client claimed
            none.
          present: The ids of the clients that are present: others lose their group to
            this one.
        """
        # A client may claim again, as after a restart: only its latest claim counts.
        self._refused.pop(client, None)
        claim_text, also = f"has partition-id={group!r}", ""
        if isinstance(group, BadReply):
            claim_text = f"does not report its partition-id: {group}"
        elif type(group) is int and 0 <= group < self.size:
            holder = self._clients.get(group)
            # A present holder keeps its group, or any client could take it by a claim.
            if holder in (None, client) or holder not in present:
                self._clients[group] = client
                return None
            also = f", and client {holder} has this one"
        # It holds what the client sent, and goes to logs and terminals.
        claim_text = readable(claim_text)
        self._refused[client] = group, f"client {client} {claim_text}{also}"
        return (
            f"A client {claim_text}. Each of 0 to {self.size - 1} must have one "
            f"client. This is client {client}{also}."
        )

    def refused(self) -> list[str]:
        """For each client that was refused a text: the client and why."""
        return [why for _, why in self._refused.values()]

    def reclaimable(self, present: Collection[int]) -> list[int]:
        """The ids of clients that were refused a group whose holder has left.

        `present` has the ids of all clients that are connected.
        """
        return [
            client
            for client, (group, _) in self._refused.items()
            if type(group) is int
            and group in self._clients
            and self._clients[group] not in present
        ]
