"""The assignment of groups to clients, where clients run before the call.

Input: the ids of clients, or their claims. Output: the client of each group.

Invariants: each group has at most one client, and each client at most one group. Either
the driver knows the clients, or each client claims a group, and the first to claim one
has it for as long as it is present and claims no other. A claim is
not trusted: one that does not fit is refused, and changes nothing for other clients.

Sharp edges: a client that reconnects under another id may find its group taken, and may
claim it again once the holder has left or claimed another (`reclaimable`).
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from drjax._errors import DrjaxValueError
from drjax.engines.flower.untrusted_replies import BadReply, readable


class Assignment:
    """A table of n groups: which client process, by its integer id, has which group.

    `clients` are the ids in the order of group indices, which must be n different
    integers. Without them no group has a client until a client claims it.

    Attributes:
      size: n.
      fixed: Whether `clients` was passed. If so, no client needs to claim a group.
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
        """Return the id of the client of a group; None if the group has no client."""
        return self._clients.get(group)

    def complete(self, groups: Iterable[int], present: Collection[int]) -> bool:
        """Return whether each of `groups` has a client whose id is in `present`."""
        return all(self._clients.get(group) in present for group in groups)

    def claim(self, client: int, group: Any, present: Collection[int]) -> str | None:
        """Assign a group to the client that claims it; else return why it is refused.

        `group` is what the client sent: of any type, not validated, or a `BadReply` if
        it sent no readable claim. A claim is refused if it is not a group index from 0
        to n - 1, or if another client has the group and is `present`, connected. In any
        case the client first loses the group of its earlier claim. The reason is text
        for an error; a refused claim is recorded, for `refused` and `reclaimable`.
        """
        # A client may claim again, as after a restart: only its latest claim counts.
        # It may have another group's data now, which would count twice.
        self._refused.pop(client, None)
        self._clients = {g: c for g, c in self._clients.items() if c != client}
        claim_text, also = f"has partition-id={group!r}", ""
        if isinstance(group, BadReply):
            claim_text = f"does not report its partition-id: {group}"
        elif type(group) is int and 0 <= group < self.size:
            holder = self._clients.get(group)
            # A present holder keeps its group, or any client could take it by a claim.
            if holder is None or holder not in present:
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
        """Return a text for each client with a refused claim: its id and the reason."""
        return [why for _, why in self._refused.values()]

    def reclaimable(self, present: Collection[int]) -> list[int]:
        """Return the ids of clients whose claim was refused but would be accepted now.

        The holder of the group has disconnected, so that it is not in `present`, or has
        claimed another. Nothing is assigned.
        """
        return [
            client
            for client, (group, _) in self._refused.items()
            # What is no int was no valid claim, and a list cannot even be looked up.
            if type(group) is int
            and 0 <= group < self.size
            and self._clients.get(group) not in present
        ]
