"""The bytes of encoded numbers: what `Wire` says, between devices and to engines.

Input: float32 numbers and a `Wire`. Output: bytes, and back: float32 numbers. Arrays of
NumPy are encoded without JAX, as engines do on the host.

To add a dtype: an entry in `_WIRES` of `_plan/wire.py`, one in `_LARGEST` and a case in
`encode` and `decode` here, and a case in tests/primitives/test_device_sums.py. Sharp
edges: a number of several bytes is stored plane by plane.
"""

import functools
import itertools
import math
import operator
from types import ModuleType
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from drjax._compat.types import Array
from drjax._plan.wire import Wire

# The largest number of each dtype that has a scale.
_LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0, "float4_e2m1fn": 6.0}


def encode(x: Array | np.ndarray, wire: Wire) -> Any:
    """Encode float32 numbers `[..., c]` as bytes, uint8 `[..., wire.nbytes(c)]`.

    c is a multiple of the block size. Blocks of `wire.block` consecutive numbers share
    a scale: the largest magnitude in the block, divided by the largest number that is a
    code of `wire.dtype`. The code of a number is the number divided by the scale,
    rounded. The bytes are the codes of all numbers, then the float32 scales of all
    blocks. With bfloat16 there are no scales. With other dtypes, a block that has an
    infinity or NaN decodes to NaNs.
    """
    xp, lead = _numpy_of(x), x.shape[:-1]
    x = x.reshape(-1)
    if wire.dtype == "bfloat16":
        return _join(lead, _planes(x.astype(jnp.bfloat16)))
    scale = _largest(xp.abs(x), wire.block) / np.float32(_LARGEST[wire.dtype])
    # A subnormal scale has too few digits to divide by.
    scale = xp.where(scale < jnp.finfo(jnp.float32).tiny, np.float32(0), scale)
    scale = xp.where(xp.isfinite(scale), scale, np.float32(np.nan))
    inverse = xp.where(scale > 0, 1 / scale, np.float32(0))
    scaled = _times(x, inverse, wire.block)
    # Of the largest number it is the largest code, or rounded to that.
    match wire.dtype:
        case "int8":
            codes = _planes(xp.round(scaled).astype(jnp.int8))
        case "float8_e4m3fn":
            codes = _planes(scaled.astype(jnp.float8_e4m3fn))
        case "float4_e2m1fn":
            low, high = _split(_to_nibbles(scaled), lead, [1, 1])
            codes = [low | (high << 4)]
        case _:
            raise NotImplementedError(f"No encoding of {wire.dtype} is known.")
    return _join(lead, [*codes, _join(lead, _planes(scale)).reshape(-1)])


def decode(x: Array | np.ndarray, wire: Wire) -> Any:
    """Decode bytes to float32 numbers: the inverse of `encode`, but for rounding."""
    lead = x.shape[:-1]
    x, size = x.reshape(-1), x.shape[-1]
    if wire.dtype == "bfloat16":
        numbers = _numbers(_split(x, lead, [1, 1]), jnp.bfloat16)
        return numbers.astype(jnp.float32).reshape(*lead, size // 2)
    blocks = size // wire.nbytes(wire.block)
    codes, scale = _split(x, lead, [size - 4 * blocks, 4 * blocks])
    if wire.dtype == "float4_e2m1fn":
        halves = [_from_nibbles(codes & 15), _from_nibbles(codes >> 4)]
        numbers = _join(lead, halves).reshape(-1)
    else:
        numbers = _numbers([codes], jnp.dtype(wire.dtype)).astype(jnp.float32)
    planes = _split(scale, lead, [1, 1, 1, 1])
    numbers = _times(numbers, _numbers(planes, jnp.float32), wire.block)
    return numbers.reshape(*lead, blocks * wire.block)


def _numpy_of(x: Array | np.ndarray) -> ModuleType:
    """Return the module whose functions compute on `x`: `numpy` for NumPy's arrays.

    Engines encode arrays of the host without JAX: no device is needed, and nothing is
    compiled for each shape.
    """
    return np if isinstance(x, np.ndarray) else jnp


# A compiler for TPUs takes minutes where a vector of millions of numbers becomes an
# array of a few long slices, or one of slices shorter than the 128 lanes of a register,
# and where blocks longer than these are an axis of their own. So what follows computes
# with vectors, and with arrays whose last axis has 128.
LANES = 128


def in_lanes(x: Array | np.ndarray) -> Any:
    """Return `[..., c]` as `[..., c / 128, 128]`, or as it is if 128 does not divide c.

    NumPy's arrays stay as they are.
    """
    if isinstance(x, np.ndarray) or x.shape[-1] % LANES:
        return x
    return x.reshape(*x.shape[:-1], x.shape[-1] // LANES, LANES)


def _join(lead: tuple[int, ...], parts: list[Any]) -> Any:
    """Join `[*lead, c_i]`, which are given as vectors, to `[*lead, c]`."""
    xp, count = _numpy_of(parts[0]), math.prod(lead)
    shaped = [x.reshape(*lead, x.size // count if count else 0) for x in parts]
    size = sum(x.shape[-1] for x in shaped)
    tiled = [in_lanes(x) for x in shaped]
    if {x.ndim for x in tiled} == {len(lead) + 2}:
        return xp.concatenate(tiled, axis=-2).reshape(*lead, size)
    return xp.concatenate(shaped, axis=-1)


def _split(x: Any, lead: tuple[int, ...], shares: list[int]) -> list[Any]:
    """Cut `[*lead, c]`, given as a vector, along its last axis: vectors, by shares."""
    size = x.size // max(1, math.prod(lead))
    ends = [size * end // max(1, sum(shares)) for end in itertools.accumulate(shares)]
    sizes = [b - a for a, b in itertools.pairwise([0, *ends])]
    x, unit = x.reshape(*lead, size), 1
    if not isinstance(x, np.ndarray) and not any(c % LANES for c in sizes):
        x, unit = in_lanes(x), LANES
    ends, axis = [end // unit for end in ends[:-1]], len(lead)
    return [part.reshape(-1) for part in _numpy_of(x).split(x, ends, axis=axis)]


def _largest(x: Any, block: int) -> Any:
    """Return the largest number of each block of consecutive ones of a vector."""
    xp = _numpy_of(x)
    if xp is np or x.size % LANES or block % LANES:
        return xp.max(x.reshape(-1, block), axis=-1)
    of_lanes, count = jnp.max(x.reshape(-1, LANES), axis=-1), block // LANES
    return functools.reduce(jnp.maximum, [of_lanes[i::count] for i in range(count)])


def _times(x: Any, factor: Any, block: int) -> Any:
    """Multiply a vector, each block of consecutive numbers by a factor of its own."""
    if isinstance(x, np.ndarray) or x.size % LANES or LANES % block and block % LANES:
        return (x.reshape(-1, block) * factor[:, None]).reshape(-1)
    if block > LANES:
        # The factor of each 128 numbers, in a sum of as many terms as a block has of
        # these, of which all others are 0.
        count, zero = block // LANES, jnp.zeros((), factor.dtype)
        gaps = [(i, count - 1 - i, count - 1) for i in range(count)]
        every = functools.reduce(
            operator.add, [lax.pad(factor, zero, [g]) for g in gaps]
        )
        every = lax.optimization_barrier(every)  # else some compute it for each number
        return (x.reshape(-1, LANES) * every[:, None]).reshape(-1)
    x, factor = x.reshape(-1, LANES), factor.reshape(-1, LANES // block)
    of_lane = lax.broadcasted_iota(jnp.int32, x.shape, 1) // block
    every = factor[:, :1]
    for i in range(1, LANES // block):
        every = jnp.where(of_lane == i, factor[:, i : i + 1], every)
    return (x * every).reshape(-1)


# Not `bitcast_convert_type` to an array with the bytes of each number along a new, last
# axis: of that, the compiler for TPUs takes minutes for a million numbers.
def _planes(x: Array | np.ndarray) -> list[Any]:
    """Return the bytes of numbers: of all the lowest, then of all the next."""
    size = x.dtype.itemsize
    bits = _view(x, np.dtype(f"uint{8 * size}"))
    # Compilers keep a shift by 0 bits.
    shifted = [bits >> (8 * i) if i else bits for i in range(size)]
    return [x.astype(np.uint8) for x in shifted]


def _numbers(planes: list[Any], dtype: DTypeLike) -> Any:
    """Read bytes as numbers of a dtype: the inverse of `_planes`."""
    wide = np.dtype(f"uint{8 * len(planes)}")
    first, *more = (plane.astype(wide) for plane in planes)
    bits = [first, *(plane << (8 * i) for i, plane in enumerate(more, 1))]
    return _view(functools.reduce(operator.or_, bits), dtype)


def _view(x: Array | np.ndarray, dtype: DTypeLike) -> Any:
    """Return the same bits as numbers of another dtype of the same size."""
    if isinstance(x, np.ndarray):
        return np.ascontiguousarray(x).view(np.dtype(dtype))
    return lax.bitcast_convert_type(x, dtype)


# Between the magnitudes of float4_e2m1fn, which are 0, 0.5, 1, 1.5, 2, 3, 4 and 6: a
# number on a bound is rounded to the even code.
_BOUNDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def _to_nibbles(x: Array | np.ndarray) -> Array | np.ndarray:
    """Round numbers to float4_e2m1fn: uint8, the codes in the lower four bits.

    `encode` packs the first half of the numbers into the lower bits of bytes, the other
    half into the higher ones: to take every other number costs a compiler for TPUs as
    much as `_planes` says. Compilers lack conversions to 4-bit floats. So the three
    bits of a magnitude are computed by comparisons: they count how many of the seven
    bounds between neighboring magnitudes it exceeds. The fourth bit is the sign.
    """
    xp = _numpy_of(x)
    size = xp.abs(x)
    code = xp.signbit(x).astype(np.uint8) << 3
    for lower, bound in enumerate(_BOUNDS):
        above = size >= bound if lower % 2 else size > bound
        code = code + above.astype(np.uint8)
    return code


def _from_nibbles(x: Array | np.ndarray) -> Array | np.ndarray:
    """Convert codes of float4_e2m1fn to float32, whose bits they are but for a shift.

    Only 0 and 0.5, which is subnormal in four bits, are not. A table costs more.
    """
    xp, half = _numpy_of(x), np.uint32(126 << 23)
    code = x.astype(np.uint32)
    size = code & 7
    bits = xp.where(size > 1, (size << 22) + half, size * half)
    return _view(bits | ((code & 8) << 28), np.float32)
