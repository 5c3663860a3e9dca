"""One reduction of a plan, and how it is communicated."""

import math
from dataclasses import dataclass

from drjax._plan.record import Record
from drjax._plan.value import Value
from drjax._plan.wire import Wire


@dataclass(frozen=True)
class Reduce(Record):
    """One combination of all groups' slices into a global value.

    Attributes:
      op: `sum`, `mean`, `max`, `min` or `gather` (all slices, in order).
      source: The partitioned value that is reduced.
      result: The global value that it gives.
      wire: How a sum or mean is encoded between devices; None: it is not encoded.
      sharded: Whether the devices of a mesh have parts of the result, not all of it;
        "auto": only if the axes of the mesh are Auto.
      secure: Of a secure sum, the least number of groups to sum: no process but a
        group's own may see its slice. 0: the sum is not secure.
      bound: Of a secure sum, the largest magnitude of a number of one group; None: the
        engine's.
    """

    op: str
    source: Value
    result: Value
    wire: Wire | None = None
    sharded: bool | str = False
    secure: int = 0
    bound: float | None = None

    @property
    def nbytes(self) -> int:
        """The bytes of one group's slice as it is communicated."""
        if self.wire is None:
            return self.source.nbytes
        return self.wire.nbytes(math.prod(self.source.shape))
