"""The bytes of encoded numbers: what `Wire` says, between devices and to engines.

Input: float32 numbers and a `Wire`. Output: bytes, and back: float32 numbers. Arrays of
NumPy are encoded without JAX, as engines do on the host.

To add a dtype: an entry in `_WIRES` of `_plan/wire.py`, one in `_LARGEST` and a case in
`encode` and `decode` here, and a case in tests/primitives/test_device_sums.py. Sharp
edges: a number of several bytes is stored plane by plane.
"""

import functools
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
    xp = _numpy_of(x)
    if wire.dtype == "bfloat16":
        return _bytes(x.astype(jnp.bfloat16))
    blocks = x.reshape(*x.shape[:-1], x.shape[-1] // wire.block, wire.block)
    scale = xp.max(xp.abs(blocks), axis=-1) / np.float32(_LARGEST[wire.dtype])
    # A subnormal scale has too few digits to divide by.
    scale = xp.where(scale < jnp.finfo(jnp.float32).tiny, np.float32(0), scale)
    scale = xp.where(xp.isfinite(scale), scale, np.float32(np.nan))
    inverse = xp.where(scale > 0, 1 / scale, np.float32(0))
    scaled = (blocks * inverse[..., None]).reshape(x.shape)
    match wire.dtype:
        case "int8":
            codes = _bytes(xp.clip(xp.round(scaled), -127, 127).astype(jnp.int8))
        case "float8_e4m3fn":
            codes = _bytes(xp.clip(scaled, -448, 448).astype(jnp.float8_e4m3fn))
        case "float4_e2m1fn":
            codes = _pack_nibbles(scaled)
        case _:
            raise NotImplementedError(f"No encoding of {wire.dtype} is known.")
    return xp.concatenate([codes, _bytes(scale)], axis=-1)


def decode(x: Array | np.ndarray, wire: Wire) -> Any:
    """Decode bytes to float32 numbers: the inverse of `encode`, but for rounding."""
    if wire.dtype == "bfloat16":
        return _numbers(x, jnp.bfloat16).astype(jnp.float32)
    blocks = x.shape[-1] // wire.nbytes(wire.block)
    codes, scale = _numpy_of(x).split(x, [x.shape[-1] - 4 * blocks], axis=-1)
    scale = _numbers(scale, jnp.float32)
    if wire.dtype == "float4_e2m1fn":
        numbers = _unpack_nibbles(codes)
    else:
        numbers = _numbers(codes, jnp.dtype(wire.dtype)).astype(jnp.float32)
    numbers = numbers.reshape(*scale.shape, wire.block) * scale[..., None]
    return numbers.reshape(*x.shape[:-1], blocks * wire.block)


def _numpy_of(x: Array | np.ndarray) -> ModuleType:
    """Return the module whose functions compute on `x`: `numpy` for NumPy's arrays.

    Engines encode arrays of the host without JAX: no device is needed, and nothing is
    compiled for each shape.
    """
    return np if isinstance(x, np.ndarray) else jnp


# Not `bitcast_convert_type` to an array with the bytes of each number along a new, last
# axis: of that, the compiler for TPUs takes minutes for a million numbers.
def _bytes(x: Array | np.ndarray) -> Any:
    """Return the bytes of numbers `[..., c]`: of all the lowest, then of all the next.

    They are uint8 `[..., c * itemsize]`.
    """
    xp, size = _numpy_of(x), x.dtype.itemsize
    bits = _view(x, np.dtype(f"uint{8 * size}"))
    planes = [(bits >> (8 * i)).astype(np.uint8) for i in range(size)]
    return xp.concatenate(planes, axis=-1)


def _numbers(x: Array | np.ndarray, dtype: DTypeLike) -> Any:
    """Read bytes as numbers of a dtype: the inverse of `_bytes`."""
    xp, size = _numpy_of(x), np.dtype(dtype).itemsize
    wide = np.dtype(f"uint{8 * size}")
    planes = xp.split(x, size, axis=-1)
    bits = [plane.astype(wide) << (8 * i) for i, plane in enumerate(planes)]
    return _view(functools.reduce(operator.or_, bits), dtype)


def _view(x: Array | np.ndarray, dtype: DTypeLike) -> Any:
    """Return the same bits as numbers of another dtype of the same size."""
    if isinstance(x, np.ndarray):
        return np.ascontiguousarray(x).view(np.dtype(dtype))
    return lax.bitcast_convert_type(x, dtype)


# The magnitudes of float4_e2m1fn, by their codes, and the bounds between them: a number
# on a bound is rounded to the even code.
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BOUNDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def _pack_nibbles(x: Array | np.ndarray) -> Array | np.ndarray:
    """Round numbers `[..., 2c]` to float4_e2m1fn, two in each byte of uint8 `[..., c]`.

    The first half of the numbers is in the lower four bits: to take every other number
    costs a compiler for TPUs as much as `_bytes` says. Compilers lack conversions to
    4-bit floats. So the three bits of a magnitude are computed by comparisons: they
    count how many of the seven bounds between neighboring magnitudes it exceeds. The
    fourth bit is the sign.
    """
    xp = _numpy_of(x)
    size = xp.abs(x)
    code = xp.signbit(x).astype(np.uint8) << 3
    for lower, bound in enumerate(_BOUNDS):
        above = size >= bound if lower % 2 else size > bound
        code = code + above.astype(np.uint8)
    low, high = xp.split(code, 2, axis=-1)
    return low | (high << 4)


def _unpack_nibbles(x: Array | np.ndarray) -> Array | np.ndarray:
    """Convert bytes with two float4_e2m1fn codes each to float32 numbers.

    It decodes what `_pack_nibbles` returns: uint8 `[..., c]` to float32 `[..., 2c]`.
    """
    xp = _numpy_of(x)
    codes = xp.concatenate([x & 15, x >> 4], axis=-1)
    magnitude = xp.asarray(_MAGNITUDES, np.float32)[codes & 7]
    return xp.where(codes >= 8, -magnitude, magnitude)
