"""A parser of HLO text: computations, instructions, and how often loops run.

Input: `compiled.as_text()`, HLO after partitioning, of which JAX has no parser: shapes
are those of one device. Output: a `Module`.

Invariants: every instruction that a device may run is yielded once for each path of
calls that leads to it, with the loops around it.

Sharp edges: the text is no stable format, so that whatever is not known raises or is
None, and is never guessed. Both branches of a conditional run, as far as this module
knows. What is public is in `report`; this module may change in any version.
"""

import dataclasses
import math
import re
from collections.abc import Iterator
from functools import cached_property

_COMMENT = re.compile(r"/\*.*?\*/")
_HEADER = re.compile(r"^\s*(ENTRY\s+)?%?([\w.\-]+)\s*\(.*\{\s*$")
_START = re.compile(r"^\s*(?:ROOT\s+)?%?([\w.\-]+)\s*=\s*")
_ROOT = re.compile(r"^\s*ROOT\s")
_CALLED = re.compile(
    r"\b(condition|calls|body|to_apply|called_computations|branch_computations|"
    r"true_computation|false_computation)=(\{[^}]*\}|%?[\w.\-]+)"
)
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\]")
_BITS = {"pred": 8, "token": 0, "opaque": 0}


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction of an HLO module.

    Attributes:
      name: Its name, unique in the module.
      shape: The shape of its result as text, such as `(f32[3,8]{1,0}, s32[])`.
      opcode: What it does, such as `all-reduce-start`.
      operands: The names of its operands; of a constant or a parameter, the text in the
        parentheses: the number, or the index of the parameter.
      attributes: The text after the operands, such as `, channel_id=1`.
      root: Whether its result is that of its computation.
    """

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    root: bool

    @property
    def called(self) -> list[tuple[str, str]]:
        """The computations that it calls, as `(attribute, name)` pairs.

        The attribute says what for, such as `body` or `condition` of a while.
        """
        if self.opcode in ("async-update", "async-done"):
            return []  # they name what their start runs
        return [
            (attribute, name)
            for attribute, names in _CALLED.findall(self.attributes)
            for name in re.findall(r"[\w.\-]+", names)
        ]


@dataclasses.dataclass(frozen=True)
class Running:
    """An instruction, and one path of calls by which the program runs it.

    Attributes:
      instruction: The instruction.
      computation: The name of the computation that has it.
      loops: The `while` instructions around it, outermost first.
      times: How often it runs in one call of the program; None: that is not known.
    """

    instruction: Instruction
    computation: str
    loops: tuple[Instruction, ...]
    times: int | None


class Module:
    """A parsed HLO module, which is a compiled program.

    Attributes:
      name: Its name, such as `jit_step`.
      devices: The number of devices that run it together.
      scheduled: Whether its instructions are in the order in which a device runs them.
      computations: The instructions of each computation, by its name.
      entry: The name of the computation that starts.
    """

    def __init__(self, text: str) -> None:
        header = re.search(r"^HloModule ([^\s,]+)(.*)", text, re.M)
        self.name, attributes = header.groups() if header else ("", "")
        self.scheduled = "is_scheduled=true" in attributes
        sizes = re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", attributes)
        self.devices = math.prod(map(int, sizes))
        self.computations: dict[str, list[Instruction]] = {}
        self.entry = ""
        self._trip_counts: dict[str, int | None] = {}
        current: list[Instruction] = []
        for line in text.splitlines():
            line = _COMMENT.sub("", line)
            if header := _HEADER.match(line):
                current = self.computations.setdefault(header[2], [])
                self.entry = header[2] if header[1] else self.entry
            elif start := _START.match(line):
                root = _ROOT.match(line) is not None
                if parsed := _instruction(start[1], line[start.end() :], root):
                    current.append(parsed)

    @cached_property
    def instructions(self) -> dict[str, Instruction]:
        """All instructions, by name."""
        return {x.name: x for xs in self.computations.values() for x in xs}

    def running(self) -> Iterator[Running]:
        """Yield each instruction that runs, once for each path of calls to it.

        They come from the entry on. All instructions of a computation come before those
        of the computations that it calls.
        """
        yield from self._running(self.entry, (), 1)

    def _running(
        self, computation: str, loops: tuple[Instruction, ...], times: int | None
    ) -> Iterator[Running]:
        """Yield the instructions of a computation, and then of those that it calls.

        `loops` are the `while` instructions around it, outermost first, and `times` is
        how often it runs in one call of the program; None: that is not known.
        """
        for x in self.computations.get(computation, ()):
            yield Running(x, computation, loops, times)
        for x in self.computations.get(computation, ()):
            loop = x.opcode == "while"
            trips = self.trip_count(x) if loop else 1
            for attribute, name in x.called:
                runs = None
                if times is not None and trips is not None:
                    # A condition runs once more than its body.
                    runs = times * (trips + (attribute == "condition"))
                yield from self._running(name, (*loops, x) if loop else loops, runs)

    # ------------------------------------------------------------------------------
    # Trip counts
    #
    # A loop `while i < b` runs ceil((b - a) / c) times, if i is a at first, c is added
    # to it in each step, and all three are constants. The CPU's and the GPU's compiler
    # write the count; the TPU's does not.

    def trip_count(self, loop: Instruction) -> int | None:
        """Return how often the body of a loop runs, each time that the loop runs.

        None: it is not known. The first call records the number for later ones.
        """
        if loop.name not in self._trip_counts:
            self._trip_counts[loop.name] = self._trip_count(loop)
        return self._trip_counts[loop.name]

    def _trip_count(self, loop: Instruction) -> int | None:
        """Compute what `trip_count` returns.

        The compiler may have written the number. Otherwise the loop must be `while i <
        b`, where `i` is its state or an element of it, with constants for the start of
        `i`, for `b`, and for what each step adds to `i`, at least 1.
        """
        if known := re.search(r'known_trip_count":\{"n":"(\d+)"', loop.attributes):
            return int(known[1])
        called = dict(loop.called)
        compare = self._root(called["condition"])
        if compare.instruction.opcode != "compare":
            return None
        counter, bound = self._operands(compare)
        place = self._place(counter)
        if place is None or "direction=LT" not in compare.instruction.attributes:
            return None
        start = self._constant(self._initial(loop, place))
        end, step = self._constant(bound), self._step(called["body"], place)
        if start is None or end is None or step is None or step < 1:
            return None
        return max(0, -(-(end - start) // step))

    def _step(self, body: str, place: int) -> int | None:
        """Return the constant that the body of a loop adds to an element of its state.

        `place` is that of `_place`. None if the body does anything else with it.
        """
        add = self._carried(body, place)
        if add.instruction.opcode != "add":
            return None
        operands = self._operands(add)
        steps = [x for x in operands if self._place(x) != place]
        return self._constant(steps[0]) if len(steps) == 1 else None

    def _constant(self, x: "_Source") -> int | None:
        """Return the integer that a value always is; None if it is no such constant.

        A value is constant if a `constant` instruction computes it; or if it is an
        element of a loop's state, starts as a constant, and is returned unchanged by
        the loop's body.
        """
        opcode, operands = x.instruction.opcode, x.instruction.operands
        if opcode == "constant":
            return int(operands[0]) if re.fullmatch(r"-?\d+", operands[0]) else None
        loop, place = None, self._place(x)
        if opcode == "get-tuple-element":
            carried = self.instructions[operands[0]]
            loop = self._loop_of.get(carried.name) if place is not None else carried
            place = _index(x.instruction)
        elif opcode == "parameter":
            loop = self._loop_of.get(x.instruction.name)
        if loop is None or place is None or loop.opcode != "while":
            return None
        if self._place(self._carried(dict(loop.called)["body"], place)) != place:
            return None
        return self._constant(self._initial(loop, place))

    @cached_property
    def _loop_of(self) -> dict[str, Instruction]:
        """The `while` of each parameter that is a loop's state, by its name.

        The parameters are those of all loops' bodies and conditions.
        """
        return {
            x.name: loop
            for loop in self.instructions.values()
            if loop.opcode == "while"
            for _, name in loop.called
            for x in self.computations[name]
            if x.opcode == "parameter"
        }

    def _place(self, x: "_Source") -> int | None:
        """Return which element of a loop's state a value of its body or condition is.

        The state is what a `while` passes from step to step, the parameter of its body
        and of its condition. The result is the index of the element, if the state is a
        tuple; -1 if the value is the whole state; None if it is neither.
        """
        if x.instruction.name in self._loop_of:
            return -1
        if x.instruction.opcode != "get-tuple-element":
            return None
        of_loop = x.instruction.operands[0] in self._loop_of
        return _index(x.instruction) if of_loop else None

    def _initial(self, loop: Instruction, place: int) -> "_Source":
        """Find the value with which an element (`_place`) of a loop's state starts."""
        return self._element(self._source(loop.operands[0]), place)

    def _carried(self, body: str, place: int) -> "_Source":
        """Find the value that a loop's body returns for an element of its state."""
        return self._element(self._root(body), place)

    def _element(self, x: "_Source", place: int) -> "_Source":
        """Find the instruction that computes one element of a value; of -1 the value.

        If it is not the result of a `tuple` instruction, its elements are not known,
        and `x` itself is returned.
        """
        if place < 0 or x.instruction.opcode != "tuple":
            return x
        return self._source(x.instruction.operands[place], x.calls)

    def _operands(self, x: "_Source") -> list["_Source"]:
        """Find the instructions that compute the operands of an instruction."""
        return [self._source(name, x.calls) for name in x.instruction.operands]

    def _root(self, computation: str) -> "_Source":
        """Find the instruction that computes the result of a computation.

        It may be in a fusion or call that the computation makes.
        """
        (root,) = [x for x in self.computations[computation] if x.root]
        return self._source(root.name)

    def _source(self, name: str, calls: tuple[Instruction, ...] = ()) -> "_Source":
        """Find the instruction that computes a value, through copies and calls.

        A copy leads to its operand, a get-tuple-element to that operand of the `tuple`,
        a fusion or call to the root of its computation, and a parameter of one to the
        operand of the call. The instruction that none of these rules leads on from is
        the source. `name` is that of the instruction whose result is the value, and
        `calls` are the fusions and calls in which that runs, outermost first.
        """
        x = self.instructions[name]
        while True:
            if x.opcode in _COPIES:
                x = self.instructions[x.operands[0]]
            elif x.opcode in ("fusion", "call"):
                ((_, computation),) = x.called
                calls = (*calls, x)
                (x,) = [y for y in self.computations[computation] if y.root]
            elif x.opcode == "parameter" and calls:
                x = self.instructions[calls[-1].operands[int(x.operands[0])]]
                calls = calls[:-1]
            elif (index := _index(x)) is not None:
                whole = self._source(x.operands[0], calls)
                if whole.instruction.opcode != "tuple":
                    return _Source(x, calls)
                x = self.instructions[whole.instruction.operands[index]]
                calls = whole.calls
            else:
                return _Source(x, calls)


@dataclasses.dataclass(frozen=True)
class _Source:
    """The instruction that computes a value, and where it runs.

    Attributes:
      instruction: The instruction.
      calls: The fusions and calls in which it runs, outermost first.
    """

    instruction: Instruction
    calls: tuple[Instruction, ...]


_COPIES = ("bitcast", "copy", "copy-done", "copy-start", "opt-barrier")


def _index(x: Instruction) -> int | None:
    """Return the index of a get-tuple-element; None for any other instruction."""
    if x.opcode != "get-tuple-element":
        return None
    return int(re.findall(r"index=(\d+)", x.attributes)[0])


def _instruction(name: str, text: str, root: bool) -> Instruction | None:
    """Parse an instruction; None: the line is no instruction.

    `text` is the line after the `=`: shape, opcode, operands and attributes.
    """
    end = _balanced(text) if text.startswith("(") else text.find(" ")
    if end < 0:
        return None
    shape, text = text[:end], text[end:].lstrip()
    opcode, paren, inside = text.partition("(")
    if not paren or not re.fullmatch(r"[a-z][\w\-]*", opcode):
        return None
    end = _balanced(paren + inside)
    operands = tuple(
        x.split()[-1].lstrip("%") for x in split(text[len(opcode) + 1 :]) if x.strip()
    )
    attributes = text[len(opcode) + end :]
    return Instruction(name, shape, opcode, operands, attributes, root)


def _balanced(text: str) -> int:
    """Return the position after the parenthesis that closes the first; else -1."""
    depth = 0
    for i, char in enumerate(text):
        depth += (char == "(") - (char == ")")
        if depth == 0:
            return i + 1
    return -1


def split(text: str) -> list[str]:
    """Split a list at its commas, up to the parenthesis that closes it.

    `text` is what comes after the opening parenthesis; what comes after the closing one
    is ignored. Commas inside inner parentheses, brackets and braces do not count.
    `[""]` for an empty list.
    """
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


def shape_dims(shape: str) -> list[int]:
    """Return the dimensions of an array's shape such as `f32[3,8]{1,0}`."""
    array = _ARRAY.search(shape)
    return [int(x.strip("<=")) for x in array[2].split(",") if x] if array else []


def shape_bytes(shape: str) -> int:
    """Add up the bytes of all arrays in a shape such as `(f32[3,8]{1,0}, s32[])`.

    `ValueError` if an element type is not known.
    """
    total = 0
    for dtype, dims in _ARRAY.findall(shape):
        size = _bits(dtype)
        for dim in dims.split(","):
            size *= int(dim.strip("<=") or 1)
        total += -(-size // 8)
    return total


def _bits(dtype: str) -> int:
    """Return the number of bits of an HLO element type, such as 16 for `bf16`.

    `ValueError` if it is not known.
    """
    if dtype in _BITS:
        return _BITS[dtype]
    digits = re.search(r"\d+", dtype)
    if digits is None:
        raise ValueError(f"An HLO shape has the unknown element type {dtype!r}.")
    return int(digits[0])  # f32, bf16, s4, u8, c64, f8e4m3fn: the first number
