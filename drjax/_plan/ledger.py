"""The ledger: what a plan communicates, and its bytes, by round and by level.

Input: messages, one for each value that is communicated in a round. Output: `Ledger`,
with totals for each level. Sharp edges: `drjax.plan` exports it and makes the messages.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from drjax._errors import DrjaxTypeError, DrjaxValueError
from drjax._partition import Partition, integer_of
from drjax._plan.exchanges import Move
from drjax._plan.record import Record
from drjax._plan.steps import Exchange
from drjax._plan.value import Value
from drjax._plan.wire import Wire

_WIDTH = 9  # of the column of rounds, at least


@dataclass(frozen=True)
class Message(Record):
    """One value that is communicated in one round.

    Attributes:
      round: The round, from 1; in a loop `2.scan.1`, the first round of its body; of an
        inner level `2.groups.1`, its first round in each group of the outer one.
      step: The exchange of the plan.
      value: The value that is communicated.
      nbytes: Bytes for each group, each time.
      times: How often, as one factor for each loop around it: its number of steps, or
        its name if only a run determines that number. A branch counts as run.
      levels: The partitions of nested programs, outermost first. The groups of the last
        one send or receive the value; they are inside groups of the others.
    """

    round: str
    step: Exchange
    value: Value
    nbytes: int
    times: tuple[int | str, ...] = ()
    levels: tuple[Partition, ...] = ()

    @property
    def op(self) -> str:
        """What is done with the value, as text.

        `broadcast` or `scatter` (down); the reduction (up): `sum`, `mean`, `max`,
        `min`, `gather` or `fold`; or a move between groups: `permute`, `take` or
        `put_add`.
        """
        return self.step.op

    @property
    def wire(self) -> Wire | None:
        """Of a reduction how it is encoded; `nbytes` are those of the encoded slice."""
        return getattr(self.step, "wire", None)

    @property
    def secure(self) -> int:
        """Of a secure sum, the least number of groups that it sums; else 0."""
        return getattr(self.step, "secure", 0)

    @property
    def sources(self) -> tuple[int, ...]:
        """Of a move that is known, the groups as in its step; else ()."""
        return getattr(self.step, "sources", ())

    @property
    def population(self) -> int:
        """The number of slices of the population between which and groups it moves.

        0 if it is no move between a population and its cohort of groups.
        """
        step = self.step
        ends = (step.source, step.result) if isinstance(step, Move) else ()
        return sum(end.shape[0] for end in ends if not end.partitioned)

    @property
    def between(self) -> bool:
        """Whether the value is communicated from groups to groups."""
        return self.step.direction == "between"

    @property
    def down(self) -> bool:
        """Whether the value is communicated from the server to the groups."""
        return self.step.direction == "down"

    def line(self, width: int) -> str:
        """Format the message as a line of text for the printed ledger.

        Args:
          width: The width of its first column, the round, in letters.
        """
        times = "".join(f" × {t}" for t in self.times)
        head = f"{self.round:>{width}}  {self.op:9}"
        how = (f" as {self.wire}" if self.wire else "") + ", secure" * bool(self.secure)
        return f"{head}  {_digits(self.nbytes):>13}  {self.value}{how}{times}"

    def __str__(self) -> str:
        return self.line(_WIDTH)


@dataclass(frozen=True)
class Ledger(Record):
    """The communication of a plan. Print it to read it.

    On m devices a broadcast costs nothing, as every device has the server's value. Of a
    reduction, each device sends one value of the size of a slice (of an encoded one,
    the total that the devices then exchange, an m-th part of that, is not counted). Of
    a gather, a device sends the slices of its groups; of a move that is known, those
    of them that leave the device, and what pads them; of another move, the slices of
    all groups.

    Attributes:
      partition: The plan's partition; None if it calls no building block.
      devices: m, the number of devices.
      messages: A `Message` for each value that is communicated, in each round.
      devices_of: For each level, by name, the number of devices that share its groups;
        a tuple of pairs. Default: 1 but for the outermost.
      code: Bytes of the code of the groups' stages, which each client of Flower gets
        once, whatever the number of rounds; None if it was not asked for. They are no
        part of the totals.
    """

    partition: Partition | None
    devices: int
    messages: tuple[Message, ...]
    devices_of: tuple[tuple[str, int], ...] = ()
    code: int | None = None

    def down(self, round: int | str | None = None, over: str | None = None) -> int:
        """Bytes from the server to each group, in one round or in all.

        Args:
          round: The number of the round, or text such as `2.scan.1`; None: all rounds.
          over: The name of a level; None: the outermost. The server of an inner level
            is a group of the outer one.
        """
        return self._total(round, over, lambda m: m.nbytes * m.down)

    def up(self, round: int | str | None = None, over: str | None = None) -> int:
        """Bytes from each group to the server, in one round or in all.

        Args:
          round: The number of the round, or text such as `2.scan.1`; None: all rounds.
          over: The name of a level; None: the outermost. The server of an inner level
            is a group of the outer one.
        """
        up = lambda m: m.nbytes * (not m.down and not m.between)
        return self._total(round, over, up)

    def between(self, round: int | str | None = None, over: str | None = None) -> int:
        """Bytes from each group to other groups, in one round or in all.

        Args:
          round: The number of the round, or text such as `2.scan.1`; None: all rounds.
          over: The name of a level; None: the outermost. The server of an inner level
            is a group of the outer one.
        """
        return self._total(round, over, lambda m: m.nbytes * m.between)

    def reduced_per_device(
        self, round: int | str | None = None, over: str | None = None
    ) -> int:
        """Bytes that each device puts into collectives, in one round or in all.

        These are bytes of whole values over the axes of the partition. Where a value is
        sharded over other axes, as with model parallelism in a group, each device puts
        in its shard only, and what the group's own work communicates over these axes is
        not counted: `drjax.collectives` reads both from the compiled function.

        Args:
          round: The number of the round, or text such as `2.scan.1`; None: all rounds.
          over: The name of a level; None: the outermost. The server of an inner level
            is a group of the outer one.
        """
        slices = lambda m: m.nbytes * self._slices_per_device(m)
        return self._total(round, over, slices)

    def _slices_per_device(self, message: Message) -> int:
        """Count the slices that one device puts into all collectives of a message.

        A message of an inner level is one collective for each of the device's groups of
        the outer levels. 0 if the groups of its level are on one device. How often a
        loop repeats the message is not counted.
        """
        *outer, partition = message.levels
        devices = self._devices(partition.name, not outer)
        if devices == 1:
            return 0
        times = 1
        for i, around in enumerate(outer):
            times *= -(-around.size // self._devices(around.name, i == 0))
        return times * message.step.slices_per_device(partition.size, devices)

    def _devices(self, name: str | None, outermost: bool) -> int:
        """Return the number of devices that share the groups of a level.

        Of an inner level that `devices_of` does not name it is 1. `name` None: the only
        level.
        """
        if outermost or name is None:
            return self.devices
        return dict(self.devices_of).get(name, 1)

    @property
    def open_loops(self) -> tuple[str, ...]:
        """The names of loops with an unknown number of steps; totals count one step."""
        times = [t for m in self.messages for t in m.times]
        return tuple(dict.fromkeys(t for t in times if isinstance(t, str)))

    @property
    def levels(self) -> tuple[str, ...]:
        """The names of the levels, outermost first; () without one."""
        first = () if self.partition is None else (self.partition.name,)
        inner = (m.levels[-1].name for m in self.messages if len(m.levels) > 1)
        return tuple(dict.fromkeys((*first, *inner)))

    def _is_outermost(self, over: str | None) -> bool:
        """Return whether `over`, a level's name or None, means the outermost level."""
        return over is None or over == self.levels[0]

    def _crosses_level(self, message: Message, over: str | None) -> bool:
        """Return whether the groups of a level send or receive the value of a message.

        They do so from or to their server, or between each other. A message of an inner
        level is not one of the outer level, and the reverse.
        """
        if self._is_outermost(over):
            return len(message.levels) == 1
        return len(message.levels) > 1 and message.levels[-1].name == over

    def _total(
        self,
        round: int | str | None,
        over: str | None,
        nbytes: Callable[[Message], int],
    ) -> int:
        """Sum `nbytes` over the messages of a level, each times how often it is sent.

        Loops with an unknown number of steps count as one step.
        """
        if over is not None and over not in self.levels:
            raise DrjaxValueError(f"over= needs one of {[*self.levels]}, got {over!r}.")
        total = 0
        for message in self.messages:
            chosen = round is None or message.round == str(round)
            if chosen and self._crosses_level(message, over):
                steps = (t for t in message.times if isinstance(t, int))
                total += nbytes(message) * math.prod(steps)
        return total

    def __str__(self) -> str:
        width = max([_WIDTH, *(len(m.round) for m in self.messages)])
        head = f"{'round':>{width}}  {'':9}  {'bytes a group':>13}  value"
        lines = [m.line(width) for m in self.messages]
        named = self.levels if len(self.levels) > 1 else (None,)
        totals = list(map(self._total_line, named))
        if self.open_loops:
            totals[-1] += f"; for one step of {', '.join(self.open_loops)}"
        if self.code is not None:
            totals.append(f"code: {_digits(self.code)} bytes to each client, once")
        return "\n".join([head, *lines, *totals])

    def _total_line(self, over: str | None) -> str:
        """Format the total bytes of a level as the last line of the printed ledger.

        `over` None: there is one level, which is not named.
        """
        devices = self._devices(over, self._is_outermost(over))
        between = self.between(over=over)
        between = f" and {_digits(between)} between groups" if between else ""
        where = "total" if over is None else f"total over {over}"
        reduced = _digits(self.reduced_per_device(over=over))
        on = "on one device" if devices == 1 else f"on {devices} devices"
        return (
            f"{where}: {_digits(self.down(over=over))} bytes down and "
            f"{_digits(self.up(over=over))} up{between} for each group; {on} "
            f"{reduced} bytes reduced per device"
        )


def checked_devices(
    names: Sequence[str], devices: int | Mapping[str, int]
) -> dict[str, int]:
    """Check the argument of `Plan.communication`, and return it as a dict from levels.

    `names` are those of the plan's levels, outermost first; a number of devices is that
    of the outermost level. Without levels the name is "".
    """
    if not isinstance(devices, Mapping):
        devices = dict.fromkeys(names[:1] or [""], devices)
    elif unknown := set(devices) - set(names):
        raise DrjaxValueError(
            f"communication needs devices of the levels {[*names]}, got "
            f"{sorted(unknown)}."
        )
    return {name: _checked_count(count) for name, count in devices.items()}


def _checked_count(devices: int) -> int:
    """Check a number of devices that a user passed, and return it as an `int`."""
    count = integer_of(devices)
    if count is None:
        raise DrjaxTypeError(
            f"communication needs devices as a positive int, got {devices!r}."
        )
    if count < 1:
        raise DrjaxValueError(
            f"communication needs at least one device, got devices={devices}."
        )
    return count


def _digits(number: object) -> str:
    """Format a number with separators, `12,300`; a symbolic one as JAX prints it."""
    return f"{number:,}" if isinstance(number, int) else str(number)
