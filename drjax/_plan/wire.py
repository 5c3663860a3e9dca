"""How numbers are encoded while they are communicated: a part of a plan.

Input: the name of a dtype and a block size. Output: `Wire`, a checked record, which
tells the bytes of encoded numbers. Sharp edges: `drjax.plan` exports it; the encoding
itself is in `_primitives/wire_codes.py`.
"""

from dataclasses import dataclass
from typing import cast

from drjax._errors import DrjaxValueError
from drjax._partition import integer_of

# The dtypes of `Wire`: bits of a number, and how many numbers share a scale by default.
# To add one: see `_primitives/wire_codes.py`.
_WIRES = {
    "bfloat16": (16, 1),
    "int8": (8, 256),
    "float8_e4m3fn": (8, 256),
    "float4_e2m1fn": (4, 32),
}


@dataclass(frozen=True)
class Wire:
    """How numbers are encoded while they are communicated.

    Attributes:
      dtype: `bfloat16`, `int8`, `float8_e4m3fn` or `float4_e2m1fn`.
      block: How many consecutive numbers share a scale, which is a float32: their
        largest magnitude, divided by the largest number of the dtype. bfloat16, which
        has the range of float32, has no scale: 1. Default: 256 numbers, of 4 bits 32.
      collectives: How m devices add up. 2: by an all-to-all of parts, each of which one
        device adds up, and an all-gather of these sums, encoded again. 1: by an
        all-gather of all codes, which each device adds up. That sends m / 2 times as
        many bytes, waits for the network once, and rounds once.

    Raises:
      DrjaxValueError: There is no such dtype, block size or number of collectives.
    """

    dtype: str
    block: int = cast(int, None)  # `__post_init__` replaces it
    collectives: int = 2

    def __post_init__(self):
        if self.dtype not in _WIRES:
            raise DrjaxValueError(
                f"wire= needs a dtype of {', '.join(_WIRES)}, got {self.dtype!r}."
            )
        bits, default = _WIRES[self.dtype]
        block = default if self.block is None else integer_of(self.block)
        # Of 4 bits, two numbers share a byte; bfloat16 has no scales.
        if not block or block < 0 or block * bits % 8 or (bits == 16 and block > 1):
            raise DrjaxValueError(
                "wire= needs a positive block size, an even one for 4 bits, and 1 for "
                f"bfloat16, got {self.dtype!r} with {self.block!r}."
            )
        if (collectives := integer_of(self.collectives)) not in (1, 2):
            raise DrjaxValueError(
                f"Wire(collectives=) needs 1 or 2, got {self.collectives!r}."
            )
        object.__setattr__(self, "block", block)
        object.__setattr__(self, "collectives", collectives)

    def nbytes(self, count: int) -> int:
        """The bytes of `count` numbers in this encoding, with the scales of its blocks.

        Args:
          count: The number of numbers; they are padded to whole blocks.
        """
        bits, _ = _WIRES[self.dtype]
        blocks = -(-count // self.block)
        scales = 0 if self.dtype == "bfloat16" else 4 * blocks
        return blocks * self.block * bits // 8 + scales

    def __str__(self) -> str:
        numbers = self.dtype if self.block == 1 else f"{self.dtype}/{self.block}"
        return numbers + " in one collective" * (self.collectives == 1)
