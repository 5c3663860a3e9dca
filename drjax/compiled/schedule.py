"""What a compiled function computes while a collective is under way.

Input: a parsed program, and the instruction of a collective. Output: the instructions
that the schedule has between its start and its done; and their floating-point
operations. The text of a scheduled module has instructions in the order in which a
device issues them.

Sharp edges: between TPU slices, a collective is a `send` and a `recv`; it is under way
from the later of the two to the first of `send-done` and `recv-done`. A collective
that a TPU spreads over several fusions, the links of a chain, is under way from the
first link to the last one, while each link computes, too. A done in another computation
than its start, as in the next step of a loop, is not seen.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from drjax.compiled.hlo import Instruction, Module, shape_dims

_RENDEZVOUS = re.compile(r'_xla_host_transfer_rendezvous="([^"]*)"')


class Schedule:
    """The order of a program's instructions, and how much each computes.

    `of_branches` combines the counts of the branches of a conditional.
    """

    def __init__(
        self, module: Module, of_branches: Callable[[list[int]], int] = min
    ) -> None:
        self._module, self._of_branches = module, of_branches
        # A module that is not scheduled has its instructions in any order.
        self._known = module.scheduled
        self._position = {
            x.name: (computation, i)
            for computation, xs in module.computations.items()
            for i, x in enumerate(xs)
        }
        self._callers = {
            called: x
            for xs in module.computations.values()
            for x in xs
            for _, called in x.called
        }
        self._flops: dict[str, int | None] = {}

    def under_way(self, links: Sequence[Instruction]) -> list[Instruction] | None:
        """List what is issued between start and done; None: it is synchronous.

        `links` is the collective; or all fusions over which it is spread, in order.
        """
        if not self._known:
            return None
        if len(links) > 1:
            return self._of_chain(links)
        (start,) = links
        caller = self._callers.get(self._position[start.name][0])
        if caller is not None and caller.opcode == "async-start":
            start = caller  # around the collective
        starts = [start]
        if start.opcode == "send":
            starts += self._receives(start)
        dones = [done for x in starts for done in self._dones(x)]
        if not dones:
            return None
        computation, first = max(self._position[x.name] for x in starts)
        last = min(self._position[x.name][1] for x in dones)
        return self._module.computations[computation][first + 1 : last]

    def _of_chain(self, links: Sequence[Instruction]) -> list[Instruction]:
        fusions = [self._callers.get(self._position[x.name][0], x) for x in links]
        computation, first = self._position[fusions[0].name]
        # Others are inside of loops between these.
        last = max(
            i for c, i in (self._position[x.name] for x in fusions) if c == computation
        )
        return self._module.computations[computation][first : last + 1]

    def _receives(self, send: Instruction) -> Iterator[Instruction]:
        """Find the `recv` of the collective of a `send`, if they say which."""
        named = _RENDEZVOUS.findall(send.attributes)
        for x in self._module.computations[self._position[send.name][0]]:
            if x.opcode == "recv" and named == _RENDEZVOUS.findall(x.attributes) != []:
                yield x

    def _dones(self, start: Instruction) -> Iterator[Instruction]:
        """Find the `-done` of a start, through `-update`s, in its computation."""
        names = {start.name}
        computation, place = self._position[start.name]
        for x in self._module.computations[computation][place + 1 :]:
            if names.intersection(x.operands):
                if x.opcode.endswith("-update"):
                    names.add(x.name)
                elif x.opcode.endswith("-done"):
                    yield x

    def flops(self, instructions: Sequence[Instruction]) -> int | None:
        """Count the operations of matrix products and convolutions, loops included.

        A product of two numbers and its addition count as two. Of the branches of a
        conditional, by default the one with the fewest counts. None: a trip count is
        not known.
        """
        return _total(map(self._flops_of, instructions))

    def _flops_of(self, x: Instruction) -> int | None:
        if x.name not in self._flops:
            own = self._own_flops(x)
            bodies = [
                self.flops(self._module.computations.get(name, ()))
                for attribute, name in x.called
                if attribute != "condition"
            ]
            inside = _total(
                bodies, self._of_branches if x.opcode == "conditional" else sum
            )
            if x.opcode == "while" and inside:
                times = self._module.trip_count(x)
                inside = None if times is None else times * inside
            self._flops[x.name] = None if inside is None else own + inside
        return self._flops[x.name]

    def _own_flops(self, x: Instruction) -> int:
        if x.opcode not in ("dot", "convolution"):
            return 0
        left, right = (
            shape_dims(self._module.instructions[y].shape) for y in x.operands[:2]
        )
        out_shape = shape_dims(x.shape)
        if x.opcode == "dot":
            listed = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", x.attributes)
            axes = listed[1].split(",") if listed and listed[1] else []
            return 2 * math.prod([*out_shape, *(left[int(axis)] for axis in axes)])
        return 2 * _products_of_convolution(x.attributes, left, right, out_shape)


def _products_of_convolution(
    attributes: str, left: list[int], right: list[int], out: list[int]
) -> int:
    """Count the products of numbers that are in the arrays.

    A compiler for TPUs writes a batch of matrix products as a convolution, most of
    whose products are with zeros between the numbers of its left operand.
    """
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", attributes)
    if labels is None:
        return math.prod(out) * math.prod(right)
    of_left, of_right, of_out = labels.groups()
    count = right[of_right.index("i")]
    for axis, size in zip(of_out, out, strict=True):
        if not axis.isdigit():
            count *= size
            continue
        window = _Window.of(attributes, int(axis))
        count *= window.products(left[of_left.index(axis)], size)
    return count


@dataclass(frozen=True)
class _Window:
    """How a convolution moves along a dimension, by the names of the attribute."""

    size: int = 1
    stride: int = 1
    pad: int = 0
    lhs_dilate: int = 1
    rhs_dilate: int = 1

    @classmethod
    def of(cls, attributes: str, axis: int) -> "_Window":
        listed = re.search(r"window=\{([^}]*)\}", attributes)
        pairs = (x.split("=") for x in listed[1].split()) if listed else ()
        # Of a padding the lower end alone says where the window starts.
        values = {k: int(v.split("x")[axis].split("_")[0]) for k, v in pairs}
        return cls(**{k: v for k, v in values.items() if k != "rhs_reversal"})

    def products(self, size: int, out: int) -> int:
        """Count the pairs of a place of `out` and one of the window that meet a number.

        The left operand has so many along the dimension.
        """
        starts = np.arange(out) * self.stride - self.pad

        def met(tap: int) -> int:
            x, rest = np.divmod(starts + tap * self.rhs_dilate, self.lhs_dilate)
            return int(np.sum((x >= 0) & (x < size) & (rest == 0)))

        return sum(map(met, range(self.size)))


def _total(
    numbers: Iterable[int | None], combine: Callable[[list[int]], int] = sum
) -> int | None:
    """Combine numbers; None if one of them is not known."""
    numbers = list(numbers)
    known = [x for x in numbers if x is not None]
    return combine(known) if len(known) == len(numbers) else None
