"""The plan: a program's normal form, as data.

A plan alternates between one server and n groups. Round by round:

    server stage -> broadcast and scatter -> local stage, once a group -> reduce

Every stage is a closed jaxpr without drjax primitives of the plan's own partition.
Whatever a later round needs is either a global value, which the server keeps, or a
partitioned value, whose slice i only group i keeps. This module holds data only:
`drjax.make_plan` builds plans, and backends run them.
"""

import collections
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from drjax._errors import DrjaxTypeError, DrjaxValueError
from drjax._partition import Partition, integer_of
from drjax._plan.wire import Wire as Wire


@dataclass(frozen=True)
class Value:
    """A value that stages exchange: its name and type, without an array.

    Attributes:
      name: Unique in the plan; derived from names of arguments and functions.
      shape: Its shape; of a partitioned value, the shape of one group's slice.
      dtype: Its dtype.
      partitioned: Whether it is a partitioned value, with a slice for each group; if
        not, it is a global value.
      nbytes: Its size in bytes; of a partitioned value, that of one slice.
      axis: Of a partitioned value, the group axis of the whole array; of a global value
        0.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Any
    partitioned: bool
    nbytes: int
    axis: int = 0

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}[{','.join(map(str, self.shape))}]"


class Exported(Protocol):
    """The facts that a plan needs of the exported functions of a stage.

    The functions themselves are `drjax._plan_file.exported_stage.ExportedStage`.
    """

    @property
    def custom_calls(self) -> tuple[str, ...]:
        """The names of the custom calls in the code of the functions."""
        ...

    @property
    def origin(self) -> dict[str, Any]:
        """How the functions were exported, as JSON data for a plan file's manifest.

        The dict has the versions of the software, the platforms, the precision, and the
        implementations of random keys.
        """
        ...


@dataclass(frozen=True)
class Stage:
    """Computation without communication.

    Attributes:
      name: For people: the functions that it fuses.
      inputs: The values that it takes. A local stage takes global values whole, and of
        partitioned values the group's slice.
      outputs: The values that it returns: global values on the server, slices in a
        group.
      jaxpr: A `jax.extend.core.ClosedJaxpr` from inputs to outputs. That of a local
        stage takes the group index, int32 `[]`, as its first argument.
      exported: Its functions as a plan file has them, if it was exported or loaded from
        a file; else None.
      inner: Of a local stage that runs building blocks over an inner level, in each
        group, the plan of that work: from the group index and the inputs to the
        outputs. None: it has no such blocks, or what it does with them has no plan.
    """

    name: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    jaxpr: Any
    exported: Exported | None = None
    inner: "Plan | None" = None

    @property
    def empty(self) -> bool:
        """Whether the stage has no outputs, so that backends skip it."""
        return not self.outputs


@dataclass(frozen=True)
class Reduce:
    """One combination of all groups' slices into a global value.

    Attributes:
      op: `sum`, `mean`, `max`, `min` or `gather` (all slices, in order).
      source: The partitioned value that is reduced.
      result: The global value that it gives.
      wire: How a sum or mean is encoded between devices; None: it is not encoded.
      sharded: Whether the devices of a mesh have parts of the result, not all of it;
        "auto": only if the axes of the mesh are Auto.
      secure: Of a secure sum, the least number of groups to sum: no process but a
        group's own may see its slice. 0: the sum is not secure.
    """

    op: str
    source: Value
    result: Value
    wire: Wire | None = None
    sharded: bool | str = False
    secure: int = 0

    @property
    def nbytes(self) -> int:
        """The bytes of one group's slice as it is communicated."""
        if self.wire is None:
            return self.source.nbytes
        return self.wire.nbytes(math.prod(self.source.shape))


@dataclass(frozen=True)
class Fold:
    """One fold of all groups' states into a global state, in the order of the groups.

    Attributes:
      combine: The associative function of two states, as a stage: of the values that it
        closes over, then the leaves of the left state, and those of the right one. Its
        outputs are `results`.
      init: The leaves of the neutral state, global values.
      sources: The leaves of the groups' states, partitioned values.
      results: The leaves of the fold, global values.
      commutative: Whether states may be combined in any order.
    """

    combine: Stage
    init: tuple[Value, ...]
    sources: tuple[Value, ...]
    results: tuple[Value, ...]
    commutative: bool = False

    @property
    def consts(self) -> tuple[Value, ...]:
        """The global values that the function closes over."""
        return self.combine.inputs[: -2 * len(self.sources)]

    @property
    def inputs(self) -> tuple[Value, ...]:
        """The values that the fold reads."""
        return (*self.consts, *self.init, *self.sources)

    @property
    def nbytes(self) -> int:
        """The bytes of one group's state."""
        return sum(v.nbytes for v in self.sources)


# The moves of slices between groups, by the names of their primitives.
MOVES = ("permute", "take", "put_add")


@dataclass(frozen=True)
class Move:
    """One move of slices from groups to groups.

    Attributes:
      op: `permute`, `take` or `put_add`, as the primitives in `drjax.primitives`.
      source: The partitioned value whose slices move.
      result: The partitioned value that it gives, of the type of `source`.
      sources: Of a permute, for each group the group whose slice it gets; else ().
      index: Of a take, a global value, int32 `[n]`: for each group the group whose
        slice it gets. Of a put_add, for each group the group to whose slice its own is
        added; n: to none. Of a permute None.
    """

    op: str
    source: Value
    result: Value
    sources: tuple[int, ...] = ()
    index: Value | None = None

    @property
    def nbytes(self) -> int:
        """The bytes of one group's slice."""
        return self.source.nbytes

    @property
    def inputs(self) -> tuple[Value, ...]:
        """The values that the move reads: `source`, and `index` if there is one."""
        return (self.source,) if self.index is None else (self.source, self.index)


@dataclass(frozen=True)
class Loop:
    """A loop or branch whose steps communicate: it runs plans of its own.

    Attributes:
      op: `scan`, `while` or `cond`.
      name: Unique in the plan.
      inputs: Of a scan constants, carried values and stacks (`xs`); of a while the
        constants of its condition and of its body, and carried values; of a cond the
        index of the branch and the operands of every branch.
      outputs: Of a scan the carried values and stacks (`ys`); of a while the carried
        values; of a cond the results of the branch. In a stack of partitioned values
        each slice has the steps along its axis 0.
      bodies: A plan for each body: (body,) of a scan, (condition, body) of a while, the
        branches of a cond.
      consts: The number of constants: (of the body,) of a scan, (of the condition, of
        the body) of a while, () of a cond.
      carry: The number of carried values; 0 of a cond.
      length: The number of steps of a scan; None of a while or a cond.
      reverse: Whether a scan runs from its last step to its first.
    """

    op: str
    name: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    bodies: tuple["Plan", ...]
    consts: tuple[int, ...] = ()
    carry: int = 0
    length: int | None = None
    reverse: bool = False


@dataclass(frozen=True)
class Round:
    """One round of the program: everything between two communications.

    Attributes:
      server: The server stage: global computation that the round's communication needs.
      broadcast: Global values of which each group receives a copy.
      scatter: Pairs (global `[n, *s]`, partitioned `[*s]`): group i receives slice i.
      local: The local stage: the computation of one group.
      reduces: Reductions of the groups' results, communicated together.
      moves: Moves of slices between groups, after the local stage.
      loops: Loops that start after the reductions and moves.
      folds: Folds of the groups' states, with the reductions.
    """

    server: Stage
    broadcast: tuple[Value, ...]
    scatter: tuple[tuple[Value, Value], ...]
    local: Stage
    reduces: tuple[Reduce, ...]
    moves: tuple[Move, ...] = ()
    loops: tuple[Loop, ...] = ()
    folds: tuple[Fold, ...] = ()

    @property
    def partials(self) -> list[Reduce]:
        """The reductions that consist of partial reductions: all except gathers."""
        return [r for r in self.reduces if r.op != "gather"]


@dataclass(frozen=True)
class Plan:
    """A program in normal form. Print it to read it.

    Attributes:
      name: The program's name.
      partition: The partition of its groups; None if it calls no building block, so
        that the server computes everything.
      rounds: As few as its dependencies allow: as many reduce as there are reductions
        in sequence.
      server: The server stage after the last round.
      inputs: The values of the program's arguments, flat.
      outputs: The values of its results, flat.
      in_tree: The pytree structure of `(args, kwargs)`; None in the body of a loop.
      out_tree: The pytree structure of the result; None in the body of a loop.
    """

    name: str
    partition: Partition | None
    rounds: tuple[Round, ...]
    server: Stage
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    in_tree: Any
    out_tree: Any

    @property
    def size(self) -> int:
        """n, the number of groups; 0 without a partition."""
        return 0 if self.partition is None else self.partition.size

    @property
    def levels(self) -> tuple[Partition, ...]:
        """The partitions of the program's levels, outermost first; () without one."""
        own = () if self.partition is None else (self.partition,)
        inner = (r.local.inner for r in self.rounds if r.local.inner is not None)
        bodies = (body for r in self.rounds for loop in r.loops for body in loop.bodies)
        below = [plan.levels for plan in inner]
        below += [body.levels[1:] for body in bodies]
        return own + max(below, key=len, default=())

    def stages(self) -> Iterator[tuple[str, Stage]]:
        """All stages in the order in which they run, as `(location, stage)` pairs.

        A location is text, such as `round 1, groups` or `round 1, scan, round 2,
        server`. The stages of a loop's bodies are listed once, and those of an inner
        level after the local stage that runs them.
        """
        for number, a_round in enumerate(self.rounds, 1):
            yield f"round {number}, server", a_round.server
            yield f"round {number}, groups", a_round.local
            if a_round.local.inner is not None:
                for location, stage in a_round.local.inner.stages():
                    yield f"round {number}, groups, {location}", stage
            for i, fold in enumerate(a_round.folds):
                yield f"round {number}, fold {i}", fold.combine
            for loop in a_round.loops:
                for body in loop.bodies:
                    for location, stage in body.stages():
                        yield f"round {number}, {loop.name}, {location}", stage
        yield "server", self.server

    def kept(self) -> frozenset[str]:
        """The names of the values that are needed after their stage, not only reduced.

        They are the inputs of local stages, moves and loops, the operands of gathers,
        and the plan's outputs. Of these a local stage returns the groups' slices; of
        its other outputs backends need partial reductions only.
        """
        kept = {v.name for v in self.outputs}
        for a_round in self.rounds:
            kept |= {v.name for v in a_round.local.inputs}
            kept |= {r.source.name for r in a_round.reduces if r.op == "gather"}
            kept |= {v.name for x in (*a_round.moves, *a_round.loops) for v in x.inputs}
        return frozenset(kept)

    def communication(self, devices: int = 1) -> "Ledger":
        """Bytes between the server and the groups, and between devices.

        Args:
          devices: m, the number of devices over which the groups are divided.

        Raises:
          DrjaxTypeError: `devices` is not an integer.
          DrjaxValueError: It is less than 1.

        Example:
          >>> import drjax, jax.numpy as jnp
          >>> mean = drjax.program(clients=4)(drjax.reduce_mean)
          >>> plan = drjax.make_plan(mean)(jnp.zeros((4, 10), jnp.float32))
          >>> plan.communication().up()
          40
        """
        count = integer_of(devices)
        if count is None:
            raise DrjaxTypeError(
                f"communication needs devices as a positive int, got {devices!r}."
            )
        if count < 1:
            raise DrjaxValueError(
                f"communication needs at least one device, got devices={devices}."
            )
        return Ledger(self.partition, count, tuple(_communicated(self, "", ())))

    def draw(self, path: str | Path) -> None:
        """Write a picture: the server on top, groups below, time from left to right.

        Args:
          path: A file that ends in `.svg` or `.png`. Missing folders are created.

        Raises:
          DrjaxValueError: The path ends otherwise.
          ImportError: matplotlib is not installed.

        Example:
          >>> import drjax, jax.numpy as jnp
          >>> mean = drjax.program(clients=4)(drjax.reduce_mean)
          >>> drjax.make_plan(mean)(jnp.arange(4.0)).draw("runs/plans/mean.svg")
        """
        from drjax._drawing.draw import draw

        draw(self, path)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a file that runs without this program's source; see docs/plan_files.md.

        Args:
          path: The file, by custom `.drjax`. Missing folders are created. A path, or
            a URL such as `gs://bucket/plan.drjax` of any file system that fsspec knows.

        Raises:
          PlanFileError: A stage calls back into Python, or has no compiled form for
            one of cpu, cuda and tpu, or a pytree needs its class to be reconstructed;
            or the file cannot be written, and an earlier one is unchanged.

        Example:
          >>> import drjax, jax.numpy as jnp
          >>> mean = drjax.program(clients=4)(drjax.reduce_mean)
          >>> drjax.make_plan(mean)(jnp.arange(4.0)).save("runs/plans/mean.drjax")
          >>> plan = drjax.load_plan("runs/plans/mean.drjax")
          >>> print(drjax.backends.reference.compile(plan)(jnp.arange(4.0)))
          1.5
        """
        from drjax._plan_file.save import save

        save(self, path)

    def __str__(self) -> str:
        from drjax._drawing.text import lines

        return "\n".join(lines(self))


@dataclass(frozen=True)
class Message:
    """One value that is communicated in one round.

    Attributes:
      round: The round, from 1; in a loop `2.scan.1`, the first round of its body.
      op: `broadcast` or `scatter` (down); the reduction (up): `sum`, `mean`, `max`,
        `min`, `gather` or `fold`; or a move between groups: `permute`, `take` or
        `put_add`.
      value: The value that is communicated.
      nbytes: Bytes for each group, each time.
      times: How often, as one factor for each loop around it: its number of steps, or
        its name if only a run determines that number. A branch counts as run.
      sources: Of a permute, for each group the group whose slice it gets; else ().
      wire: Of a reduction how it is encoded; `nbytes` are those of the encoded slice.
      secure: Of a reduction its `Reduce.secure`.
    """

    round: str
    op: str
    value: Value
    nbytes: int
    times: tuple[int | str, ...] = ()
    sources: tuple[int, ...] = ()
    wire: Wire | None = None
    secure: int = 0

    @property
    def between(self) -> bool:
        """Whether the value is communicated from groups to groups."""
        return self.op in MOVES

    @property
    def down(self) -> bool:
        """Whether the value is communicated from the server to the groups."""
        return self.op in ("broadcast", "scatter")

    def __str__(self) -> str:
        times = "".join(f" × {t}" for t in self.times)
        head = f"{self.round:>9}  {self.op:9}"
        how = (f" as {self.wire}" if self.wire else "") + ", secure" * bool(self.secure)
        return f"{head}  {_digits(self.nbytes):>13}  {self.value}{how}{times}"


@dataclass(frozen=True)
class Ledger:
    """The communication of a plan. Print it to read it.

    On m devices a broadcast costs nothing (every device has the server's value) and a
    reduction is one message a device (of an encoded one, the total that follows is not
    counted: an m-th part of it); a gather is as large as the device's slices, a
    permute as those that leave the device, another move as the slices of all groups.

    Attributes:
      partition: The plan's partition; None if it calls no building block.
      devices: m, the number of devices.
      messages: A `Message` for each value that is communicated, in each round.
    """

    partition: Partition | None
    devices: int
    messages: tuple[Message, ...]

    def down(self, round: int | str | None = None) -> int:
        """Bytes from the server to each group, in one round or in all.

        Args:
          round: The number of the round, or text such as `2.scan.1`; None: all rounds.
        """
        return self._total(round, lambda m: m.nbytes * m.down)

    def up(self, round: int | str | None = None) -> int:
        """Bytes from each group to the server, in one round or in all.

        Args:
          round: The number of the round, or text such as `2.scan.1`; None: all rounds.
        """
        return self._total(round, lambda m: m.nbytes * (not m.down and not m.between))

    def between(self, round: int | str | None = None) -> int:
        """Bytes from each group to other groups, in one round or in all.

        Args:
          round: The number of the round, or text such as `2.scan.1`; None: all rounds.
        """
        return self._total(round, lambda m: m.nbytes * m.between)

    def reduced_per_device(self, round: int | str | None = None) -> int:
        """Bytes that each device puts into collectives, in one round or in all.

        Args:
          round: The number of the round, or text such as `2.scan.1`; None: all rounds.
        """
        if self.devices == 1 or self.partition is None:
            return 0
        return self._total(round, lambda m: m.nbytes * self._slices_per_device(m))

    def _slices_per_device(self, message: Message) -> int:
        """The number of slices that a device puts into the collective of a message."""
        size = 0 if self.partition is None else self.partition.size
        per_device = -(-size // self.devices)
        if message.down:
            return 0
        if message.op == "gather":
            return per_device
        if message.op == "permute":
            leaving = collections.Counter(
                source // per_device
                for group, source in enumerate(message.sources)
                if source // per_device != group // per_device
            )
            return max(leaving.values(), default=0)
        # A take is one reduce-scatter of zeros and slices, for all groups.
        return size if message.between else 1

    @property
    def open_loops(self) -> tuple[str, ...]:
        """The names of loops with an unknown number of steps; totals count one step."""
        times = [t for m in self.messages for t in m.times]
        return tuple(dict.fromkeys(t for t in times if isinstance(t, str)))

    def _total(self, round, nbytes) -> int:
        """Sum a number of bytes over messages, each multiplied by its number of times.

        Args:
          round: The number of the round, or text such as `2.scan.1`; None: all rounds.
          nbytes: A function from a `Message` to its bytes, each time.
        """
        total = 0
        for message in self.messages:
            if round is None or message.round == str(round):
                steps = (t for t in message.times if isinstance(t, int))
                total += nbytes(message) * math.prod(steps)
        return total

    def __str__(self) -> str:
        head = f"{'round':>9}  {'':9}  {'bytes a group':>13}  value"
        between = self.between()
        between = f" and {_digits(between)} between groups" if between else ""
        total = (
            f"total: {_digits(self.down())} bytes down and {_digits(self.up())} up"
            f"{between} for each group; on {self.devices} devices "
            f"{_digits(self.reduced_per_device())} bytes reduced per device"
        )
        if self.open_loops:
            total += f"; for one step of {', '.join(self.open_loops)}"
        return "\n".join([head, *map(str, self.messages), total])


def _digits(number) -> str:
    """A number as text: `12,300`; a symbolic one as JAX prints it."""
    return f"{number:,}" if isinstance(number, int) else str(number)


def _communicated(plan: Plan, prefix: str, times: tuple[int | str, ...]) -> Iterator:
    """The `Message`s of a plan, in the order of its rounds, also those in loops.

    Args:
      plan: The plan, or the plan of a loop's body.
      prefix: The common prefix of its rounds: empty, or for a body `2.scan.`.
      times: `Message.times` of its messages: one factor for each loop around the plan.
    """
    for number, a_round in enumerate(plan.rounds, 1):
        label = f"{prefix}{number}"
        for value in a_round.broadcast:
            yield Message(label, "broadcast", value, value.nbytes, times)
        for _, scattered in a_round.scatter:
            yield Message(label, "scatter", scattered, scattered.nbytes, times)
        for r in a_round.reduces:
            yield Message(label, r.op, r.source, r.nbytes, times, (), r.wire, r.secure)
        for fold in a_round.folds:
            for value in fold.sources:
                yield Message(label, "fold", value, value.nbytes, times)
        for move in a_round.moves:
            yield Message(label, move.op, move.source, move.nbytes, times, move.sources)
        for loop in a_round.loops:
            steps: tuple[int | str, ...] = ()
            if loop.op != "cond":
                steps = (loop.name if loop.length is None else loop.length,)
            for body in loop.bodies:
                yield from _communicated(body, f"{label}.{loop.name}.", times + steps)
