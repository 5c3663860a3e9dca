"""What one device does in a compiled program: flops and collectives, loops counted.

Input: `compiled.as_text()`. JAX has no parser of it, and the compiler's own
cost analysis counts the body of a loop once, however often it runs; this counts it as
often as the loop's metadata says, or else the constant in its condition, which is right
for loops that count up from zero by one, as those of `lax.scan` do. Both branches of a
conditional count.
"""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np

from benchmarks import hlo

_HEADER = re.compile(r"^\s*(ENTRY\s+)?%?([\w.\-]+)\s*\(.*\{\s*$")
_START = re.compile(r"^\s*(?:ROOT\s+)?%?([\w.\-]+)\s*=\s*")
_CALLED = re.compile(
    r"\b(?:calls|body|to_apply|called_computations|branch_computations|"
    r"true_computation|false_computation)=(\{[^}]*\}|%?[\w.\-]+)"
)
_CHAIN = re.compile(r'channel_id=(\d+).*chain_id="(\d+)"')


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction: its name, shape, opcode, operands, and what follows these."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    rest: str


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective, and how often it runs.

    Attributes:
      kind: As `benchmarks.hlo.Collective.kind`.
      bytes: Of its results on one device, each time; of what is reduced, where the
        result is a share of it.
      times: How often it runs.
      axes: The mesh axes over which it communicates; `"?"` if it is unlike any.
    """

    kind: str
    bytes: int
    times: int
    axes: tuple[str, ...]


class Module:
    """A parsed program.

    Args:
      text: The HLO text.
      mesh: Sizes of the mesh's axes by name, major first, to name axes of collectives.
    """

    def __init__(self, text: str, mesh: dict[str, int]):
        self.mesh = mesh
        self.computations: dict[str, list[Instruction]] = {}
        self.entry = ""
        current: list[Instruction] = []
        for line in text.splitlines():
            line = hlo.COMMENT.sub("", line)
            if header := _HEADER.match(line):
                current = self.computations.setdefault(header[2], [])
                self.entry = header[2] if header[1] else self.entry
            elif start := _START.match(line):
                if parsed := _instruction(start[1], line[start.end() :]):
                    current.append(parsed)

    @cached_property
    def _instructions(self) -> dict[str, Instruction]:
        return {x.name: x for xs in self.computations.values() for x in xs}

    @cached_property
    def shapes(self) -> dict[str, str]:
        return {name: x.shape for name, x in self._instructions.items()}

    @cached_property
    def times(self) -> dict[str, int]:
        """How often each computation runs."""
        counts: Counter[str] = Counter()

        def visit(name: str, times: int) -> None:
            counts[name] += times
            for x in self.computations.get(name, ()):
                again = self.trips(x) if x.opcode == "while" else 1
                for called in _called(x):
                    visit(called, times * again)

        visit(self.entry, 1)
        return dict(counts)

    def trips(self, loop: Instruction) -> int:
        """How often the body of a loop runs.

        Raises:
          ValueError: Its condition compares with no constant.
        """
        if known := re.search(r'known_trip_count":\{"n":"(\d+)"', loop.rest):
            return int(known[1])
        (name,) = re.findall(r"condition=%?([\w.\-]+)", loop.rest)
        condition = {x.name: x for x in self.computations[name]}
        constants = [
            bound
            for x in condition.values()
            if x.opcode == "compare" and "direction=LT" in x.rest
            for bound in [self._bound(loop, condition[x.operands[1]])]
            if bound is not None
        ]
        if len(constants) != 1:
            raise ValueError(f"The loop {loop.name} does not count to a constant.")
        return constants[0]

    def _bound(self, loop: Instruction, x: Instruction) -> int | None:
        """A constant in a loop's condition; or outside, given to it from the start."""
        if x.opcode == "get-tuple-element":
            everywhere = self._instructions
            index = int(re.findall(r"index=(\d+)", x.rest)[0])
            x = everywhere[everywhere[loop.operands[0]].operands[index]]
            while x.opcode == "copy":
                x = everywhere[x.operands[0]]
        return int(x.operands[0]) if x.opcode == "constant" else None

    def _running(self) -> Iterator[tuple[str, Instruction, int]]:
        for name, times in self.times.items():
            for x in self.computations[name]:
                yield name, x, times

    @property
    def flops(self) -> int:
        """Operations of products of matrices and of convolutions."""
        return sum(times * self._flops(x) for _, x, times in self._running())

    def _flops(self, x: Instruction) -> int:
        if x.opcode not in ("dot", "convolution"):
            return 0
        left, right = (_dims(self.shapes[name]) for name in x.operands)
        out = _dims(x.shape)
        if x.opcode == "dot":
            (contracted,) = re.findall(r"lhs_contracting_dims=\{([\d,]*)\}", x.rest)
            sizes = [left[int(i)] for i in contracted.split(",") if i]
            return 2 * math.prod(out) * math.prod(sizes)
        return 2 * _products(x.rest, left, right, out)

    @cached_property
    def collectives(self) -> list[Collective]:
        """The collectives, in the order in which they stand in the text.

        The TPU compiler spreads a collective over several fusions, which it computes
        meanwhile: each is a link of one chain, which is one collective.
        """
        result, chains = [], set()
        for computation, x, times in self._running():
            if (kind := hlo.kind_of(x.opcode, computation)) is None:
                continue
            if link := _CHAIN.search(x.rest):
                if link.groups() in chains:
                    continue
                chains.add(link.groups())
            group = _first_group(x.rest, math.prod(self.mesh.values()))
            size = hlo.payload(x.opcode, x.shape)
            size *= len(group) if x.opcode.startswith("reduce-scatter") else 1
            result.append(Collective(kind, size, times, self._axes(x.rest, group)))
        return result

    def overlaps(self, kind: str) -> tuple[int, int]:
        """Asynchronous collectives of a kind, and those that overlap with products.

        The text of a compiled program is in the order in which a device starts its
        instructions: those between the start of a collective and its end run at the
        same time.
        """
        overlapped = []
        for xs in self.computations.values():
            ends = {x.operands[0]: i for i, x in enumerate(xs) if x.operands}
            for i, x in enumerate(xs):
                if x.opcode == f"{kind}-start":
                    meanwhile = xs[i + 1 : ends[x.name]]
                    overlapped.append(any(map(self._multiplies, meanwhile)))
        return len(overlapped), sum(overlapped)

    def _multiplies(self, x: Instruction) -> bool:
        """Whether an instruction is, or calls, a product of matrices."""
        inside = (y for name in _called(x) for y in self.computations.get(name, ()))
        return x.opcode in ("dot", "convolution") or any(map(self._multiplies, inside))

    def _axes(self, text: str, group: np.ndarray) -> tuple[str, ...]:
        """The axes along which the members of a group of replicas lie apart."""
        places = np.unravel_index(group, tuple(self.mesh.values()))
        apart = [len(set(x.tolist())) for x in places]
        axes = [a for a, size in zip(self.mesh, apart, strict=True) if size > 1]
        whole = math.prod(self.mesh[a] for a in axes) == len(group)
        return tuple(axes) if whole or "source_target_pairs" in text else ("?",)


def _instruction(name: str, text: str) -> Instruction | None:
    end = _balanced(text) if text.startswith("(") else text.find(" ")
    if end < 0:
        return None
    shape, text = text[:end], text[end:].lstrip()
    opcode, paren, inside = text.partition("(")
    if not paren or not re.fullmatch(r"[a-z][\w\-]*", opcode):
        return None
    end = _balanced(paren + inside)
    operands = tuple(
        x.split()[-1].lstrip("%") for x in hlo.split(text[len(opcode) + 1 :]) if x
    )
    return Instruction(name, shape, opcode, operands, text[len(opcode) + end :])


def _balanced(text: str) -> int:
    """Where the parenthesis that opens the text is closed, and one more."""
    depth = 0
    for i, char in enumerate(text):
        depth += (char == "(") - (char == ")")
        if depth == 0:
            return i + 1
    return -1


def _called(x: Instruction) -> list[str]:
    called = []
    for names in _CALLED.findall(x.rest):
        called += re.findall(r"[\w.\-]+", names)
    return called


def _dims(shape: str) -> list[int]:
    (dims,) = re.findall(r"^\w+\[([\d,]*)\]", shape)
    return [int(size) for size in dims.split(",") if size]


def _products(
    text: str, left: Sequence[int], right: Sequence[int], out: Sequence[int]
) -> int:
    """Products of numbers in a convolution, those with padding left out."""
    (labels,) = re.findall(r"dim_labels=(\w+)->", text)
    (results,) = re.findall(r"dim_labels=\w+->(\w+)", text)
    ins, kernel = labels.split("_")
    count = right[kernel.index("i")]
    count *= out[results.index("b")] * out[results.index("f")]
    window = re.search(r"window=\{([^}]*)\}", text)
    fields = (
        dict(part.split("=") for part in window[1].split() if "=" in part)
        if window
        else {}
    )
    spatial = sorted(label for label in results if label.isdigit())
    read = lambda name, i, default: (
        fields[name].split("x")[i] if name in fields else default
    )
    for i, label in enumerate(spatial):
        taps = int(read("size", i, "1"))
        low = int(read("pad", i, "0_0").split("_")[0])
        stride, spread = int(read("stride", i, "1")), int(read("rhs_dilate", i, "1"))
        dilated = int(read("lhs_dilate", i, "1"))
        index = np.arange(out[results.index(label)])[:, None] * stride
        index = index + np.arange(taps) * spread - low
        inside = (index >= 0) & (index <= (left[ins.index(label)] - 1) * dilated)
        count *= int((inside & (index % dilated == 0)).sum())
    return count


_IOTA = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"


def _iota(sizes: str, order: str | None) -> np.ndarray:
    """Numbers from 0 in the shape of these sizes, its dimensions in this order."""
    shape = [int(x) for x in sizes.split(",")]
    every = np.arange(math.prod(shape)).reshape(shape)
    return every.transpose([int(x) for x in order.split(",")] if order else None)


def _first_group(text: str, devices: int) -> np.ndarray:
    """The members of the first group of replicas; without groups, all devices.

    Raises:
      ValueError: The groups are not written in one of the four known ways.
    """
    if pairs := re.search(r"source_target_pairs=\{\{(\d+),(\d+)\}", text):
        return np.array([int(pairs[1]), int(pairs[2])])
    if iota := re.search(rf"replica_groups=\[([\d,]+)\]<={_IOTA}", text):
        shape, *order = iota.groups()
        return _iota(*order).reshape([int(x) for x in shape.split(",")])[0]
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", text):
        return np.array([int(x) for x in listed[1].split(",")])
    ids = rf"(?:, device_ids=\({_IOTA}\))?"
    if axes := re.search(
        rf"replica_groups=mesh\[([^\]]*)\]{ids} \{{([^}}:]*)\}}", text
    ):
        mesh = dict(re.findall(r"'([^']+)'=(\d+)", axes[1]))
        chosen = re.findall(r"'([^']+)'", axes[4])
        sizes = list(map(int, mesh.values()))
        every = _iota(*axes.groups()[1:3]) if axes[2] else np.arange(math.prod(sizes))
        every = every.reshape(sizes)
        index = tuple(slice(None) if name in chosen else 0 for name in mesh)
        return every[index].ravel()
    if written := re.search(r"replica_groups=(?!\{\})\S+", text):
        raise ValueError(f"This way to write groups is not known: {written[0]}")
    return np.arange(devices)
