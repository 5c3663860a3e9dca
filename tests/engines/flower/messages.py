"""Every message between Flower's server and its clients, and what is in it."""

from typing import Any

import numpy as np

from drjax.engines.flower import records


class Recorded:
    """A Flower grid that records what passes it.

    Args:
      grid: The grid.

    Attributes:
      messages: For each message `(kind, fields)`: `query` or `train`, with `reply` for
        an answer; the fields of all of its records by name, and lists of arrays under
        the name of their record.
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
            arrays = message.content.array_records
            for name, record in message.content.items():
                own = name in arrays
                fields |= {name: records.from_record(record)} if own else dict(record)
        self.messages.append((kind, fields))


def arrays_of(fields: dict[str, Any]) -> list[np.ndarray]:
    """The arrays in a request, apart from the stage's global inputs, or in a reply."""
    return fields.get(records.ARRAYS, [])


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
        expected = {"query": 0, "train": 0, "reply": planned}[kind]
        assert len(arrays) == (0 if "group" in fields else expected), (kind, fields)
        values = [x for x in fields.values() if isinstance(x, bytes)]
        values += [
            x.tobytes()
            for arrays in fields.values()
            if isinstance(arrays, list)
            for x in arrays
            if isinstance(x, np.ndarray)
        ]
        data = b"".join(values)
        for x in slices:
            assert x.dtype == np.float32 and x.size == np.unique(x).size > 1
            # A whole slice, or a half of it, whatever encloses it.
            for part in (x, *np.array_split(x, 2)):
                assert part.tobytes() not in data, kind
