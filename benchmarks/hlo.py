"""Count the collectives of a compiled program and their bytes, from its HLO text.

What goes in is `compiled.as_text()`, HLO after partitioning: shapes are those of one
device, so bytes are per device. Sharp edges:

* A variadic collective has a tuple as its shape and counts once, with all its bytes.
* An asynchronous pair counts once, at its `-start`. The start of an all-gather, a
  collective-permute or a reduce-scatter yields (operands, results, contexts...), of
  which only the results are the payload; the start of an all-reduce yields its
  results alone.
* `async-start` wraps a computation that holds the collective itself, which is counted
  there.
* TPUs write a reduce-scatter as a fusion `all-reduce-scatter` around an all-reduce.
* A collective in a loop's body counts once, not once for each iteration.
"""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

KINDS = (
    "all-reduce", "all-gather", "all-to-all", "ragged-all-to-all", "reduce-scatter",
    "collective-permute", "collective-broadcast",
)  # fmt: skip

_BITS = {"pred": 8, "token": 0, "opaque": 0}
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\]")
_COMMENT = re.compile(r"/\*.*?\*/")
_COMPUTATION = re.compile(r"^\s*(?:ENTRY\s+)?%?([\w.\-]+)\s*\(.*\{\s*$")
_INSTRUCTION = re.compile(
    r"^\s*(?:ROOT\s+)?%?[\w.\-]+\s*=\s*"
    r"(?P<shape>[\w\[\]{}(),:*<=\s.#-]*?)\s*"
    rf"(?<![\w-])(?P<kind>{'|'.join(KINDS)})(?P<phase>-start|-done)?\("
)


@dataclass(frozen=True)
class Collective:
    """One collective of one device's program.

    Attributes:
      kind: The HLO opcode without `-start`, one of `KINDS`.
      bytes: The size of its results on one device.
    """

    kind: str
    bytes: int


def collectives(text: str) -> list[Collective]:
    """The collectives in an HLO text, in the order in which they stand there.

    Example:
      >>> from benchmarks.hlo import collectives
      >>> collectives("%a = f32[4]{0} all-reduce(%x), to_apply=%add")
      [Collective(kind='all-reduce', bytes=16)]
    """
    found, computation = [], ""
    for line in text.splitlines():
        line = _COMMENT.sub("", line)
        if header := _COMPUTATION.match(line):
            computation = header[1]
        elif match := _INSTRUCTION.match(line):
            kind, phase = match["kind"], match["phase"]
            if phase == "-done":
                continue
            if kind == "all-reduce" and computation.startswith("all-reduce-scatter"):
                kind = "reduce-scatter"
            shape = match["shape"]
            if phase == "-start" and kind != "all-reduce":
                shape = _results_of_start(shape)
            found.append(Collective(kind, shape_bytes(shape)))
    return found


def summary(found: Iterable[Collective]) -> dict[str, tuple[int, int]]:
    """For each kind, how many there are and their bytes together."""
    counts, sizes = Counter(), Counter()
    for collective in found:
        counts[collective.kind] += 1
        sizes[collective.kind] += collective.bytes
    return {kind: (counts[kind], sizes[kind]) for kind in sorted(counts)}


def shape_bytes(shape: str) -> int:
    """Bytes of all arrays in a shape such as `(f32[3,8]{1,0}, s32[])`."""
    total = 0
    for dtype, dims in _ARRAY.findall(shape):
        size = _bits(dtype)
        for dim in dims.split(","):
            size *= int(dim.strip("<=") or 1)
        total += -(-size // 8)
    return total


def _bits(dtype: str) -> int:
    if dtype in _BITS:
        return _BITS[dtype]
    digits = re.search(r"\d+", dtype)
    if digits is None:
        raise ValueError(f"An HLO shape has the unknown element type {dtype!r}.")
    return int(digits[0])  # f32, bf16, s4, u8, c64, f8e4m3fn: the first number


def _results_of_start(shape: str) -> str:
    """The second element of the tuple `(operands, results, contexts...)`."""
    parts, depth, start = [], 0, 1
    for i, char in enumerate(shape):
        if char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        if (char == "," and depth == 1) or (char == ")" and depth == 0):
            parts.append(shape[start:i])
            start = i + 1
    return parts[1] if len(parts) > 1 else shape
