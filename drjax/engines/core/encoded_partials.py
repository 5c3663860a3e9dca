"""Partial reductions with `wire=`, encoded on their way from a worker to the driver.

Input: the partial reduction of a block, and the `Wire` of its reduction in the plan.
Output: an `EncodedPartial`, whose bytes are those that the ledger counts; and from it
the numbers again, as float32.

Invariants: a worker encodes a block's partial reduction once, and whoever combines it
with others decodes it first; combined ones are never encoded. A NaN or infinity decodes
to NaNs, so that it stays visible; with `check_nans`, a group that yields one failed.
Beam's workers combine before they send, in float64: they do not encode.

Sharp edges: the error depends on the block size. That of a mesh depends on the number
of devices: the numbers of an engine and of a mesh differ by both errors.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from drjax._primitives.wire_codes import decode, encode
from drjax.plan import Reduce, Wire


@dataclass(frozen=True, eq=False)  # of arrays
class EncodedPartial:
    """The partial reduction `[*s]` of a block, encoded.

    Attributes:
      codes: Codes and scales, uint8 `[k]`.
      shape: `[*s]`, without the padding of the codes.
    """

    codes: np.ndarray
    wire: Wire
    shape: tuple[int, ...]


def encode_partials(
    reduces: Sequence[Reduce], partials: Sequence[np.ndarray]
) -> list[Any]:
    """Encode those of a block's partial reductions for which `wire_of` has a `Wire`.

    The others are returned as they are, in the order of `reduces`.
    """
    pairs = zip(map(wire_of, reduces), partials, strict=True)
    return [x if wire is None else _encoded(wire, x) for wire, x in pairs]


def wire_of(reduce: Reduce) -> Wire | None:
    """Return how workers encode the partial reductions of a reduction; None: not.

    A secure sum is never encoded: clients mask its numbers as they are.
    """
    return None if reduce.secure else reduce.wire


def _encoded(wire: Wire, x: np.ndarray) -> EncodedPartial:
    """Encode an array of floats `[*s]` in float32, as a partial reduction.

    It is padded with zeros to a multiple of `wire.block` numbers, which share a scale.
    """
    # Infinities become NaNs, and numbers above float32 infinities, without a warning;
    # a block of zeros has no inverse of its scale.
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        flat = np.ravel(x).astype(np.float32)
        padded = np.pad(flat, (0, -flat.size % wire.block))
        return EncodedPartial(np.asarray(encode(padded, wire)), wire, x.shape)


def fits(x: np.ndarray) -> bool:
    """Return whether an array of floats has only numbers that `wire=` encodes."""
    with np.errstate(over="ignore"):
        return bool(np.isfinite(x.astype(np.float32)).all())


def decoded(partial: EncodedPartial | np.ndarray) -> np.ndarray:
    """Decode a partial reduction to float32 `[*s]`; an array is returned as it is."""
    if not isinstance(partial, EncodedPartial):
        return np.asarray(partial)
    # A forged scale may be any float.
    with np.errstate(invalid="ignore", over="ignore"):
        numbers = np.asarray(decode(partial.codes, partial.wire))
    return numbers[: math.prod(partial.shape)].reshape(partial.shape)
