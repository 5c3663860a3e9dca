"""The ledger: what a plan communicates, and its bytes, by round and by level.

Input: messages, one for each value that is communicated in a round. Output: `Ledger`,
with totals for each level. Sharp edges: `drjax.plan` exports it and makes the messages.
"""

import collections
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from drjax._errors import DrjaxTypeError, DrjaxValueError
from drjax._partition import Partition, integer_of
from drjax._plan.value import Value
from drjax._plan.wire import Wire

# The moves of slices between groups, by the names of their primitives.
MOVES = ("permute", "take", "put_add")

_WIDTH = 9  # of the column of rounds, at least


@dataclass(frozen=True)
class Message:
    """One value that is communicated in one round.

    Attributes:
      round: The round, from 1; in a loop `2.scan.1`, the first round of its body; of an
        inner level `2.groups.1`, its first round in each group of the outer one.
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
      levels: The partitions over whose groups it is, outermost first: the last one has
        the groups that send or receive it, and the others those around them.
      population: Of a move between groups its `Move.population`.
    """

    round: str
    op: str
    value: Value
    nbytes: int
    times: tuple[int | str, ...] = ()
    sources: tuple[int, ...] = ()
    wire: Wire | None = None
    secure: int = 0
    levels: tuple[Partition, ...] = ()
    population: int = 0

    @property
    def between(self) -> bool:
        """Whether the value is communicated from groups to groups."""
        return self.op in MOVES

    @property
    def down(self) -> bool:
        """Whether the value is communicated from the server to the groups."""
        return self.op in ("broadcast", "scatter")

    def line(self, width: int) -> str:
        """The line of text on the message, with a column of `width` for its round."""
        times = "".join(f" × {t}" for t in self.times)
        head = f"{self.round:>{width}}  {self.op:9}"
        how = (f" as {self.wire}" if self.wire else "") + ", secure" * bool(self.secure)
        return f"{head}  {_digits(self.nbytes):>13}  {self.value}{how}{times}"

    def __str__(self) -> str:
        return self.line(_WIDTH)


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
      devices_of: For each level, by name, the number of devices that share its groups;
        a tuple of pairs. Default: 1 but for the outermost.
    """

    partition: Partition | None
    devices: int
    messages: tuple[Message, ...]
    devices_of: tuple[tuple[str, int], ...] = ()

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

        Args:
          round: The number of the round, or text such as `2.scan.1`; None: all rounds.
          over: The name of a level; None: the outermost. The server of an inner level
            is a group of the outer one.
        """
        slices = lambda m: m.nbytes * self._slices_per_device(m)
        return self._total(round, over, slices)

    def _slices_per_device(self, message: Message) -> int:
        """The number of slices that a device puts into all collectives of a message.

        It multiplies the message's bytes in `reduced_per_device`. An inner level has
        one collective for each of the device's outer groups. 0 on one device.
        """
        *outer, partition = message.levels
        devices = self._devices(partition.name, not outer)
        if devices == 1:
            return 0
        times = 1
        for i, around in enumerate(outer):
            times *= -(-around.size // self._devices(around.name, i == 0))
        return times * self._slices(message, partition.size, devices)

    def _devices(self, name: str | None, outermost: bool) -> int:
        """The number of devices that share the groups of a level.

        Args:
          name: The name of the level; None if the plan has one level only.
          outermost: Whether it is the outermost level.
        """
        if outermost or name is None:
            return self.devices
        return dict(self.devices_of).get(name, 1)

    def _slices(self, message: Message, size: int, devices: int) -> int:
        """The number of slices that a device puts into one collective of a message.

        Args:
          message: The message.
          size: n, the number of groups of its level.
          devices: m, the number of devices that share them.
        """
        per_device = -(-size // devices)
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
        if not message.between:
            return 1
        # A take is one reduce-scatter of zeros and slices, for all groups; if it gives
        # more slices than it takes, it is an all-gather of these.
        other = message.population or size
        source, result = (size, other) if message.value.partitioned else (other, size)
        return -(-source // devices) if result > source else result

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
        """Whether `over`, the name of a level or None, is the outermost level."""
        return over is None or over == self.levels[0]

    def _crosses_level(self, message: Message, over: str | None) -> bool:
        """Whether a message crosses the border of a level.

        That is: between its groups and their server, or from group to group.

        Args:
          message: The message.
          over: The name of the level; None: the outermost one.
        """
        if self._is_outermost(over):
            return len(message.levels) == 1
        return len(message.levels) > 1 and message.levels[-1].name == over

    def _total(self, round, over, nbytes) -> int:
        """Sum bytes over the messages of a level, each times how often it is sent.

        Args:
          round: The number of the round, or text such as `2.scan.1`; None: all rounds.
          over: The name of the level; None: the outermost.
          nbytes: A function from a `Message` to the bytes that count, each time; 0 for
            messages that do not.

        Returns:
          The sum. Loops with an unknown number of steps count once.

        Raises:
          DrjaxValueError: There is no such level.
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
        return "\n".join([head, *lines, *totals])

    def _total_line(self, over: str | None) -> str:
        """The line of text on the bytes of a level.

        Args:
          over: Its name; None: there is one level.
        """
        devices = self._devices(over, self._is_outermost(over))
        between = self.between(over=over)
        between = f" and {_digits(between)} between groups" if between else ""
        where = "total" if over is None else f"total over {over}"
        reduced = _digits(self.reduced_per_device(over=over))
        return (
            f"{where}: {_digits(self.down(over=over))} bytes down and "
            f"{_digits(self.up(over=over))} up{between} for each group; on {devices} "
            f"devices {reduced} bytes reduced per device"
        )


def checked_devices(names: Sequence[str], devices: Any) -> dict[str, int]:
    """Check the numbers of devices that share the groups of levels.

    Args:
      names: The names of the levels, outermost first.
      devices: The argument of `Plan.communication`: a number, or a dict from names.

    Returns:
      A dict from names; {} if there are none.

    Raises:
      DrjaxTypeError: A number is no integer.
      DrjaxValueError: A number is less than 1, or a name is that of no level.
    """
    if not isinstance(devices, Mapping):
        devices = dict.fromkeys(names[:1] or [""], devices)
    elif unknown := set(devices) - set(names):
        raise DrjaxValueError(
            f"communication needs devices of the levels {[*names]}, got "
            f"{sorted(unknown)}."
        )
    return {name: _checked_count(count) for name, count in devices.items()}


def _checked_count(devices: Any) -> int:
    """Check a number of devices, and return it as an `int`.

    Raises:
      DrjaxTypeError: It is not an integer.
      DrjaxValueError: It is less than 1.
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
    return count


def _digits(number) -> str:
    """A number as text with separators: `12,300`; a symbolic one as JAX prints it."""
    return f"{number:,}" if isinstance(number, int) else str(number)
