"""Partial results of blocks, combined on the host.

Floats are added up in float64 and integers exactly, in the order of the blocks, so that
the sum depends neither on the number of workers nor on which of them is faster. A block
without groups gives nothing: no identity of max or min ever mixes in.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from drjax.plan import Reduce

Totals = list[np.ndarray | None]  # None: of no groups


def add(ops: Sequence[str], totals: Totals, partials: Sequence[Any]) -> Totals:
    """Totals and what a block gives, or other totals, combined in place."""
    return [_add(*x) for x in zip(ops, totals, partials, strict=True)]


def _add(op: str, total: np.ndarray | None, partial: Any) -> np.ndarray | None:
    if partial is None:
        return total
    partial = np.asarray(partial)
    if op not in ("max", "min"):
        partial = partial.astype(_wide(partial.dtype), copy=False)
    if total is None:
        return np.array(partial)
    combine = {"max": np.maximum, "min": np.minimum}.get(op, np.add)
    return combine(total, partial, out=total)


def result(reduce: Reduce, total: np.ndarray | None, groups: int) -> np.ndarray:
    """The reduced value, of so many groups."""
    source = reduce.source
    if total is None:  # of no group
        fill = np.nan if reduce.op == "mean" else 0
        return np.full(source.shape, fill, source.dtype)
    if reduce.op == "mean":
        total = total / groups
    return np.asarray(total).astype(source.dtype)


def _wide(dtype: Any) -> Any:
    """The dtype in which partial sums are added up."""
    for kind, wide in (
        (jnp.floating, np.float64), (np.complexfloating, np.complex128),
        (np.signedinteger, np.int64), (np.unsignedinteger, np.uint64),
    ):  # fmt: skip
        if jnp.issubdtype(dtype, kind):
            return wide
    return dtype
