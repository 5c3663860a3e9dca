"""Every message between Flower's server and its clients, and what is in it."""

from typing import Any

import numpy as np

from drjax.engines.core import wire_format


class Recorded:
    """A Flower grid that records what passes it.

    Args:
      grid: The grid.

    Attributes:
      messages: For each message `(kind, fields)`: `query` or `train`, with `reply` for
        an answer, and the fields of all of its records, by name.
    """

    def __init__(self, grid: Any):
        self._grid, self.messages = grid, []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grid, name)

    def push_messages(self, messages: Any) -> Any:
        messages = [*messages]
        for message in messages:
            self._record(message.metadata.message_type, message)
        return self._grid.push_messages(messages)

    def pull_messages(self, numbers: Any) -> Any:
        replies = [*self._grid.pull_messages(numbers)]
        for reply in replies:
            self._record("reply", reply)
        return replies

    def _record(self, kind: str, message: Any) -> None:
        fields = {}
        if message.has_content():
            for record in message.content.values():
                fields |= dict(record)
        self.messages.append((kind, fields))


def arrays_of(fields: dict[str, Any]) -> list[np.ndarray]:
    """The arrays in a request, apart from the job, or in a reply."""
    if "request" in fields:
        return wire_format.from_bytes(bytes(fields["request"]))[1][1:]
    if "done" in fields:
        return wire_format.from_bytes(bytes(fields["done"]))[1]
    return []


def check_no_slice(messages: Any, slices: Any, planned: int) -> None:
    """Check that no message has one of these slices, and none an array too many.

    Args:
      messages: Of a `Recorded`.
      slices: Arrays of float32, of distinct numbers.
      planned: How many arrays a reply has: the reductions.
    """
    kinds = [kind for kind, _ in messages]
    assert kinds.count("train") > 0 and kinds.count("reply") >= kinds.count("train")
    for kind, fields in messages:
        arrays = arrays_of(fields)
        # The group index and its mask are in each.
        expected = {"query": 0, "train": 2, "reply": 2 + planned}[kind]
        assert len(arrays) == (0 if "group" in fields else expected), (kind, fields)
        data = b"".join(bytes(x) for x in fields.values() if isinstance(x, bytes))
        for x in slices:
            assert x.dtype == np.float32 and x.size == np.unique(x).size > 1
            # A whole slice, or a half of it, whatever encloses it.
            for part in (x, *np.array_split(x, 2)):
                assert part.tobytes() not in data, kind
