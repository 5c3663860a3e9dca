"""The values of a plan: names and types, without arrays.

Input: facts of a variable of a program. Output: `Value`, a record. Invariants: a value
is global, or over the partition of its plan: in the body of a `Program` that is another
one, and in the plan of an inner level the inner one. Sharp edges: `drjax.plan` exports
it.
"""

from dataclasses import dataclass
from typing import Any

from drjax._partition import Partition
from drjax._plan.record import Record


@dataclass(frozen=True)
class Value(Record):
    """A value that stages exchange: its name and type, without an array.

    Attributes:
      name: Unique in the plan; derived from names of arguments and functions.
      shape: Its shape; of a partitioned value, the shape of one group's slice.
      dtype: Its dtype.
      over: The partition of whose groups each has a slice; () of a global value.
      nbytes: Its size in bytes; of a partitioned value, that of one slice.
      axis: Of a partitioned value, the group axis of the whole array; of a global value
        0.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Any
    over: tuple[Partition, ...]
    nbytes: int
    axis: int = 0

    def named(self, name: str) -> "Value":
        """Return another value of the same type, a copy that needs no check."""
        new = object.__new__(Value)
        new.__dict__.update(self.__dict__, name=name)
        return new

    @property
    def partitioned(self) -> bool:
        """Whether it has a slice for each group; if not, it is a global value."""
        return bool(self.over)

    def whole_shape(self, n: int) -> tuple[int, ...]:
        """Return the shape of the whole array, for n groups: with the group axis.

        Of a global value it is `shape`.
        """
        if not self.partitioned:
            return self.shape
        return (*self.shape[: self.axis], n, *self.shape[self.axis :])

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}[{','.join(map(str, self.shape))}]"
