"""Partial results of blocks, combined on the host.

Floats are added up in float64 and integers exactly, in the order of the blocks, so that
the sum depends neither on the number of workers nor on which of them is faster. A block
without groups gives nothing: no identity of max or min ever mixes in.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np

from drjax.plan import Reduce


class Total:
    """One reduction of a round, so far."""

    def __init__(self, reduce: Reduce):
        self.reduce = reduce
        self._sum: Any = None

    def add(self, partial: np.ndarray) -> None:
        """Add what a block gives."""
        if self.reduce.op not in ("max", "min"):
            partial = np.asarray(partial).astype(_wide(partial.dtype))
        if self._sum is None:
            self._sum = np.array(partial)
        elif self.reduce.op == "max":
            self._sum = np.maximum(self._sum, partial)
        elif self.reduce.op == "min":
            self._sum = np.minimum(self._sum, partial)
        else:
            np.add(self._sum, partial, out=self._sum)

    def result(self, groups: int) -> np.ndarray:
        """The reduced value, of so many groups."""
        found, dtype = self._sum, self.reduce.source.dtype
        if found is None:  # of no group
            fill = 0 if self.reduce.op in ("max", "min") else np.nan
            fill = 0 if self.reduce.op == "sum" else fill
            return np.full(self.reduce.source.shape, fill, dtype)
        if self.reduce.op == "mean":
            found = found / groups
        return np.asarray(found).astype(dtype)


def _wide(dtype: Any) -> Any:
    """The dtype in which partial sums are added up."""
    for kind, wide in (
        (jnp.floating, np.float64), (np.complexfloating, np.complex128),
        (np.signedinteger, np.int64), (np.unsignedinteger, np.uint64),
    ):  # fmt: skip
        if jnp.issubdtype(dtype, kind):
            return wide
    return dtype
