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
    "all-reduce",
    "all-gather",
    "all-to-all",
    "ragged-all-to-all",
    "reduce-scatter",
    "collective-permute",
    "collective-broadcast",
)

_BITS = {"pred": 8, "token": 0, "opaque": 0}
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\]")
COMMENT = re.compile(r"/\*.*?\*/")
_COMPUTATION = re.compile(r"^\s*(?:ENTRY\s+)?%?([\w.\-]+)\s*\(.*\{\s*$")
_INSTRUCTION = re.compile(
    r"^\s*(?:ROOT\s+)?%?[\w.\-]+\s*=\s*"
    r"(?P<shape>[\w\[\]{}(),:*<=\s.#-]*?)\s*"
    rf"(?<![\w-])(?P<opcode>(?:{'|'.join(KINDS)})(?:-start|-done)?)\("
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
    result, computation = [], ""
    for line in text.splitlines():
        line = COMMENT.sub("", line)
        if header := _COMPUTATION.match(line):
            computation = header[1]
        elif match := _INSTRUCTION.match(line):
            opcode = match["opcode"]
            if (kind := kind_of(opcode, computation)) is not None:
                result.append(Collective(kind, payload(opcode, match["shape"])))
    return result


def kind_of(opcode: str, computation: str) -> str | None:
    """The kind of a collective, from its opcode and where it stands; None: no start."""
    kind = opcode.removesuffix("-start")
    if kind == "all-reduce" and computation.startswith("all-reduce-scatter"):
        return "reduce-scatter"
    return kind if kind in KINDS else None


def payload(opcode: str, shape: str) -> int:
    """Bytes of a collective's results."""
    if opcode.endswith("-start") and opcode != "all-reduce-start":
        shape = _results_of_start(shape)
    return shape_bytes(shape)


def summary(result: Iterable[Collective]) -> dict[str, tuple[int, int]]:
    """For each kind, how many there are and their bytes together."""
    counts, sizes = Counter(), Counter()
    for collective in result:
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
    parts = split(shape[1:])
    return parts[1] if len(parts) > 1 else shape


def split(text: str) -> list[str]:
    """The parts of a list, between commas, up to where its parenthesis is closed."""
    parts, depth, start = [], 1, 0
    for i, char in enumerate(text):
        if char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        if (char == "," and depth == 1) or depth == 0:
            parts.append(text[start:i])
            start = i + 1
        if depth == 0:
            break
    return parts
