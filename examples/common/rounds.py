"""One round of an example's algorithm, small, for the engines of `examples.engines`."""

from collections.abc import Callable
from typing import Any, NamedTuple


class Round(NamedTuple):
    """A program and its arguments: `step(shared, own, data) -> (result, own)`.

    Attributes:
      step: The program of the round, over n groups.
      shared: What the groups get: global values.
      own: What each group keeps for its next round: partitioned, `()` if nothing.
      data: The groups' data: partitioned.
    """

    step: Callable[[Any, Any, Any], tuple[Any, Any]]
    shared: Any
    own: Any
    data: Any
