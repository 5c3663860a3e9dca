"""The plan: a program's normal form, as data.

A plan alternates between one server and n groups. Round by round:

    server stage -> broadcast and scatter -> local stage, once a group -> reduce

Every stage is a closed jaxpr without drjax primitives of the plan's own partition.
Whatever a later round needs is either a global value, which the server keeps, or a
partitioned value, whose slice i only group i keeps. This module holds data only:
`drjax.make_plan` builds plans, and backends run them.
"""

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drjax._errors import PlanError
from drjax._partition import Partition


@dataclass(frozen=True)
class Value:
    """A value that stages exchange.

    Attributes:
      name: Unique in the plan; derived from names of arguments and functions.
      shape: Its shape; of a partitioned value, the shape of one group's slice.
      dtype: Its dtype.
      partitioned: Whether it lives once for each group, or once.
      nbytes: Its size in bytes; of a partitioned value, that of one slice.
      axis: Of a partitioned value, the axis along which whole arrays stack the slices.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Any
    partitioned: bool
    nbytes: int
    axis: int = 0

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Stage:
    """Computation without communication.

    Attributes:
      name: For people: the functions that it fuses.
      inputs: A local stage takes global values whole, and of partitioned values the
        group's slice.
      outputs: Global values on the server, slices in a group.
      jaxpr: A `jax.extend.core.ClosedJaxpr` from inputs to outputs. That of a local
        stage takes the group index, int32 `[]`, as its first argument.
      exported: Of a stage read from a file, its functions as the file has them: a
        `drjax._plan_file.exported_stage.ExportedStage`.
    """

    name: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    jaxpr: Any
    exported: Any = None

    @property
    def empty(self) -> bool:
        return not self.outputs


@dataclass(frozen=True)
class Reduce:
    """One combination of all groups' slices into a global value.

    Attributes:
      op: `sum`, `mean`, `max`, `min` or `gather` (all slices, in order).
      source: The partitioned value.
      result: The global value.
    """

    op: str
    source: Value
    result: Value


@dataclass(frozen=True)
class Loop:
    """A loop or branch whose steps communicate: it runs plans of its own.

    Attributes:
      op: `scan`, `while` or `cond`.
      name: Unique in the plan.
      inputs: Of a scan constants, carried values and stacks; of a while the constants
        of its condition and of its body, and carried values; of a cond the index of
        the branch and what every branch takes.
      outputs: Of a scan the carried values and stacks. In a stack of partitioned
        values each slice has the steps along its axis 0.
      bodies: (body,) of a scan, (condition, body) of a while, the branches of a cond.
      consts: How many constants a scan has; those of a while's condition and body.
      carry: How many carried values.
      length: The number of steps of a scan.
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
      server: Global computation that the round's communication needs.
      broadcast: Global values of which each group receives a copy.
      scatter: Pairs (global `[n, *s]`, partitioned `[*s]`): group i receives slice i.
      local: The computation of one group.
      reduces: Reductions of the groups' results, communicated together.
      loops: Loops that start after the reductions.
    """

    server: Stage
    broadcast: tuple[Value, ...]
    scatter: tuple[tuple[Value, Value], ...]
    local: Stage
    reduces: tuple[Reduce, ...]
    loops: tuple[Loop, ...] = ()

    @property
    def partials(self) -> list[Reduce]:
        """The reductions that partial reductions compose: all but gathers."""
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
      server: The global work after the last round.
      inputs: The program's arguments, flat.
      outputs: Its results, flat.
      in_tree: Structure of `(args, kwargs)`.
      out_tree: Structure of the result.
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

    def stages(self) -> Iterator[tuple[str, Stage]]:
        """All stages in the order in which they run, each with its location."""
        for number, a_round in enumerate(self.rounds, 1):
            yield f"round {number}, server", a_round.server
            yield f"round {number}, groups", a_round.local
            for loop in a_round.loops:
                for body in loop.bodies:
                    for location, stage in body.stages():
                        yield f"round {number}, {loop.name}, {location}", stage
        yield "server", self.server

    def kept(self) -> frozenset[str]:
        """Names of the partitioned values that are live after their stage."""
        kept = {v.name for v in self.outputs}
        for a_round in self.rounds:
            kept |= {v.name for v in a_round.local.inputs}
            kept |= {r.source.name for r in a_round.reduces if r.op == "gather"}
            kept |= {v.name for loop in a_round.loops for v in loop.inputs}
        return frozenset(kept)

    def communication(self, devices: int = 1) -> "Ledger":
        """Bytes between the server and the groups, and between devices.

        Args:
          devices: m, the number of devices over which the groups are divided.

        Example:
          >>> import drjax, jax.numpy as jnp
          >>> mean = drjax.program(clients=4)(drjax.reduce_mean)
          >>> plan = drjax.make_plan(mean)(jnp.zeros((4, 10), jnp.float32))
          >>> plan.communication().up()
          40
        """
        return Ledger(self.partition, devices, tuple(_communicated(self, "", ())))

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
      op: `broadcast` or `scatter` (down), or the reduction (up).
      value: The value that is communicated.
      nbytes: Bytes for each group, each time.
      times: How often, one factor for each loop around it: its number of steps, or
        its name if only a run determines it. A branch counts as run.
    """

    round: str
    op: str
    value: Value
    nbytes: int
    times: tuple[int | str, ...] = ()

    @property
    def down(self) -> bool:
        return self.op in ("broadcast", "scatter")

    def __str__(self) -> str:
        times = "".join(f" × {t}" for t in self.times)
        head = f"{self.round:>9}  {self.op:9}"
        return f"{head}  {_digits(self.nbytes):>13}  {self.value}{times}"


@dataclass(frozen=True)
class Ledger:
    """The communication of a plan. Print it to read it.

    On m devices a broadcast costs nothing (every device has the server's value) and a
    reduction is one message a device; a gather is as large as the device's slices.

    Attributes:
      partition: The plan's partition.
      devices: m, the number of devices.
      messages: One for each value and round.
    """

    partition: Partition | None
    devices: int
    messages: tuple[Message, ...]

    def down(self, round: int | str | None = None) -> int:
        """Bytes from the server to each group, in one round or in all."""
        return self._total(round, lambda m: m.nbytes * m.down)

    def up(self, round: int | str | None = None) -> int:
        """Bytes from each group to the server, in one round or in all."""
        return self._total(round, lambda m: m.nbytes * (not m.down))

    def reduced_per_device(self, round: int | str | None = None) -> int:
        """Bytes that each device puts into collectives, in one round or in all."""
        if self.devices == 1 or self.partition is None:
            return 0
        slices = -(-self.partition.size // self.devices)
        return self._total(
            round,
            lambda m: 0 if m.down else m.nbytes * (slices if m.op == "gather" else 1),
        )

    @property
    def open_loops(self) -> tuple[str, ...]:
        """Loops with an unknown number of steps: totals count one step of them."""
        times = [t for m in self.messages for t in m.times]
        return tuple(dict.fromkeys(t for t in times if isinstance(t, str)))

    def _total(self, round, nbytes) -> int:
        total = 0
        for message in self.messages:
            if round is None or message.round == str(round):
                steps = (t for t in message.times if isinstance(t, int))
                total += nbytes(message) * math.prod(steps)
        return total

    def __str__(self) -> str:
        head = f"{'round':>9}  {'':9}  {'bytes a group':>13}  value"
        total = (
            f"total: {_digits(self.down())} bytes down and {_digits(self.up())} up for "
            f"each group; on {self.devices} devices "
            f"{_digits(self.reduced_per_device())} bytes reduced per device"
        )
        if self.open_loops:
            total += f"; for one step of {', '.join(self.open_loops)}"
        return "\n".join([head, *map(str, self.messages), total])


def _digits(number) -> str:
    """A number for people; one with symbolic dimensions as it is."""
    return f"{number:,}" if isinstance(number, int) else str(number)


def _communicated(plan: Plan, prefix: str, times: tuple[int | str, ...]) -> Iterator:
    for number, a_round in enumerate(plan.rounds, 1):
        label = f"{prefix}{number}"
        for value in a_round.broadcast:
            yield Message(label, "broadcast", value, value.nbytes, times)
        for _, scattered in a_round.scatter:
            yield Message(label, "scatter", scattered, scattered.nbytes, times)
        for reduce in a_round.reduces:
            source = reduce.source
            yield Message(label, reduce.op, source, source.nbytes, times)
        for loop in a_round.loops:
            steps: tuple[int | str, ...] = ()
            if loop.op != "cond":
                steps = (loop.name if loop.length is None else loop.length,)
            for body in loop.bodies:
                yield from _communicated(body, f"{label}.{loop.name}.", times + steps)


def check_known_shapes(plan: Plan, what: str) -> None:
    """Refuse a plan with symbolic dimensions.

    Raises:
      PlanError: An input has symbolic dimensions, so other values may have some too.
    """
    for value in plan.inputs:
        if not all(isinstance(size, int) for size in value.shape):
            raise PlanError(
                f"A plan can be {what} only if it has known shapes, but {value} has "
                "symbolic dimensions. Plan the program for the shapes that are needed, "
                "or export drjax.jit of it with jax.export."
            )
