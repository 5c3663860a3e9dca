"""`drjax.collectives`: what a compiled function communicates, and its memory.

Input: a function and its arguments, or a compiled function. Output: a `Report`, which
prints itself. Nothing runs.

Sharp edges of HLO, from which the numbers are read:

* Bytes are those that a device sends (`sent.py`), of all operands of a variadic one.
* An asynchronous pair is one, at its `-start`. The start of an all-gather, a
  collective-permute or a reduce-scatter yields (operands, results, contexts...); that
  of an all-reduce yields ((operands), results) on GPUs, else its results alone.
  `async-start` wraps a computation that holds the collective itself.
* TPUs write a reduce-scatter as a fusion `all-reduce-scatter` around an all-reduce,
  and spread a collective over several fusions, the links of a chain.
* Between TPU slices, over the data center's network, a collective is a `send` and a
  `recv` of the "megascale" runtime. The program is then that of one slice: devices are
  numbered within it, and the mesh's devices are those of all slices.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from drjax._compat.types import PyTree
from drjax._error_texts import called_in_two_steps
from drjax._errors import DrjaxTypeError, MeshError
from drjax._plan.as_text import bytes_as_text
from drjax._sharding.layout import axis_sizes, slices_of_devices
from drjax.compiled.hlo import Instruction, Module, Running, shape_bytes, split
from drjax.compiled.replica_groups import axes_of, devices_of, devices_of_slices
from drjax.compiled.schedule import Schedule
from drjax.compiled.sent import KINDS, sent_bytes

Key = TypeVar("Key")
_CHAIN = re.compile(r'channel_id=(\d+).*chain_id="(\d+)"')


@dataclass(frozen=True)
class WhileLoop:
    """A loop of a compiled function.

    Attributes:
      name: Its name in the HLO text, such as `while.3`.
      trip_count: How often its body runs each time that the loop runs; None: that is
        not known, as of a `jax.lax.while_loop`.
    """

    name: str
    trip_count: int | None

    def __str__(self) -> str:
        return f"{self.name} ({_known(self.trip_count)} times)"


@dataclass(frozen=True)
class Collective:
    """One collective of a compiled function, as each device runs it.

    Attributes:
      kind: Its HLO opcode, one of `all-reduce`, `all-gather`, `all-to-all`,
        `ragged-all-to-all`, `reduce-scatter`, `collective-permute`,
        `collective-broadcast`; `send` of one device to another.
      bytes: The bytes that one device sends, each time that it runs, by the formulas of
        `drjax.compiled.sent_bytes`.
      result_bytes: The bytes of its results on one device.
      axes: The mesh axes along which it communicates, major first; (): each device is
        alone. None: it is along no axes of the mesh, or the mesh is not known.
      devices: How many devices communicate with each other; of a permute, 2.
      loops: The loops around it, outermost first.
      times: How often it runs in one call; None: the trip count of a loop is not known.
      name: Its name in the HLO text.
      op_name: The JAX operation that it is from, such as `jit(step)/while/body/psum`;
        empty if the compiler does not say.
      between_slices: Whether it is over the data center's network: between TPU slices,
        or between hosts with GPUs, those of other processes.
      asynchronous: Whether it has a start and a done, between which a device may do
        other work. False also if the compiler does not say in which order it runs.
      hidden_by: The loops that a device runs between its start and its done.
      hidden_flops: The floating-point operations of matrix products and convolutions
        between its start and its done, on one device, of loops included; None: the
        trip count of a loop is not known.
    """

    kind: str
    bytes: int
    result_bytes: int
    axes: tuple[str, ...] | None
    devices: int
    loops: tuple[WhileLoop, ...]
    times: int | None
    name: str
    op_name: str
    between_slices: bool = False
    asynchronous: bool = False
    hidden_by: tuple[WhileLoop, ...] = ()
    hidden_flops: int | None = 0

    @property
    def hidden(self) -> bool:
        """Whether a device runs loops, or products of arrays, while it communicates."""
        return bool(self.hidden_by) or self.hidden_flops != 0


class Total(NamedTuple):
    """Some collectives together.

    Attributes:
      count: How many of them the compiled function has.
      bytes: The bytes that one device sends, each collective counted once.
      times: How often they run in one call; None: a trip count is not known.
      bytes_per_call: The bytes that one device sends in one call, in which each
        collective counts as often as it runs; None: a trip count is not known.
    """

    count: int
    bytes: int
    times: int | None
    bytes_per_call: int | None


@dataclass(frozen=True)
class Report:
    """The collectives of a compiled function, and its memory on one device. Print it.

    Attributes:
      name: The function's name.
      mesh: The sizes of the mesh axes by name, major first; empty if no mesh is known.
      devices: The number of devices that run it together.
      collectives: The collectives.
      argument_bytes: Bytes of the arguments on one device.
      output_bytes: Bytes of the results on one device.
      alias_bytes: Those of the results' bytes that are in the memory of donated
        arguments.
      temp_bytes: Bytes of memory for intermediate results on one device.
      peak_bytes: The most bytes of values that live at once on one device, arguments
        and results included. Alignment, fragments and what the compiler does not reuse
        are in `temp_bytes` only. On CPUs, where XLA's number leaves out intermediate
        results: arguments, results that are not in donated arguments, and `temp_bytes`
        together, all of which are allocated in a call.
    """

    name: str
    mesh: Mapping[str, int]
    devices: int
    collectives: tuple[Collective, ...]
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    peak_bytes: int

    @classmethod
    def of(cls, compiled: jax.stages.Compiled, mesh: Any = None) -> "Report":
        """Read a compiled function: `jax.jit(fn).lower(*args).compile()`.

        Args:
          compiled: The compiled function, for any platform, also for one that is not
            there (`jax.experimental.topologies`).
          mesh: The mesh whose axes are named in the report. Default: the mesh in
            context, or else that of the function's arguments and results.

        Raises:
          DrjaxTypeError: It is no compiled function, or the backend has no HLO text of
            it.
        """
        text = compiled.as_text() if isinstance(compiled, jax.stages.Compiled) else None
        memory = compiled.memory_analysis() if text else None
        if text is None or memory is None:
            raise DrjaxTypeError(
                "drjax.compiled.Report.of needs a compiled function whose backend has "
                "its HLO text and memory, jax.jit(fn).lower(*args).compile(), got "
                f"{type(compiled).__name__}."
            )
        module = Module(text)
        shardings = (compiled.input_shardings, compiled.output_shardings)
        sizes = axis_sizes(mesh, shardings)
        slice_of = slices_of_devices(mesh, shardings)
        places = _places(module, slice_of)
        return cls(
            module.name.removeprefix("jit_"),
            sizes,
            places.size,
            tuple(_read(module, sizes, places, slice_of)),
            memory.argument_size_in_bytes,
            memory.output_size_in_bytes,
            memory.alias_size_in_bytes,
            memory.temp_size_in_bytes,
            _peak_bytes(memory, shardings),
        )

    @property
    def total(self) -> Total:
        """All collectives together."""
        return _total(self.collectives)

    @property
    def counts(self) -> dict[str, int]:
        """How many collectives of each kind the compiled function has."""
        return {kind: total.count for kind, total in self.by_kind.items()}

    @property
    def by_kind(self) -> dict[str, Total]:
        """The collectives of each kind together."""
        return totals(self.collectives, lambda c: c.kind)

    @property
    def by_axes(self) -> dict[tuple[str, ...] | None, Total]:
        """The collectives along the same mesh axes together."""
        return totals(self.collectives, lambda c: c.axes)

    @property
    def by_loop(self) -> dict[WhileLoop | None, Total]:
        """The collectives of the same innermost loop together; of no loop by None."""
        return totals(self.collectives, lambda c: c.loops[-1] if c.loops else None)

    @property
    def hidden(self) -> Total:
        """The collectives during which a device computes, together."""
        return _total([c for c in self.collectives if c.hidden])

    @property
    def exposed(self) -> Total:
        """The collectives for which a device only waits, together."""
        return _total([c for c in self.collectives if not c.hidden])

    def __str__(self) -> str:
        title = f"{self.name}: on one device"
        if self.devices > 1:
            title = f"{self.name}: on one of {self.devices} devices"
        mesh = ", ".join(f"{name}:{size}" for name, size in self.mesh.items())
        title += f", mesh {mesh}" if mesh else ""
        memory = (
            ("arguments", self.argument_bytes),
            ("results", self.output_bytes),
            ("donated", self.alias_bytes),
            ("temporary", self.temp_bytes),
            ("peak", self.peak_bytes),
        )
        shown = ", ".join(f"{name} {bytes_as_text(n)}" for name, n in memory)
        lines = _table(self.collectives)
        if self.devices > 1 and not self.collectives:
            lines[0] += (
                ": devices exchange nothing. Groups are on different devices only if a "
                "mesh axis has the name of the partition"
            )
        lines += _hidden_lines(self.collectives)
        return "\n".join([title, *lines, f"  memory: {shown}"])


def collectives(fn: Callable, mesh: Any = None) -> Callable[..., Report]:
    """Compile a function and list its collectives, their bytes, and its memory.

    Args:
      fn: A function, which `jax.jit` compiles; or anything with the method `lower` of a
        `jax.jit`, such as the result of `jax.jit` or `drjax.jit`.
      mesh: The mesh whose axes are named in the report. Default: the mesh in context,
        or else that of the function's arguments and results.

    Returns:
      A function that takes the arguments of `fn` (or `jax.ShapeDtypeStruct`s with their
      shapes and shardings), compiles `fn` for them and returns a
      `drjax.compiled.Report`: print it. Nothing runs. Bytes are those that one device
      sends, by the formulas of `drjax.compiled.sent_bytes`. A collective in a loop
      counts once, and says how often it runs. Both branches of a conditional count.
      Between TPU slices, collectives are those of the data center's network. Of
      asynchronous ones it says behind which loops and operations they are hidden.

    Raises:
      DrjaxTypeError: `fn` is no function, or (when called) the backend has no HLO text
        of compiled functions.
      MeshError: (when called) `mesh` is no mesh.

    Example:
      >>> import drjax, jax, jax.numpy as jnp
      >>> @drjax.program(clients=4)
      ... def mean_square(x):
      ...     return drjax.reduce_mean(drjax.map_fn(jnp.square, x))
      >>> report = drjax.collectives(mean_square)(jnp.ones((4, 8)))
      >>> print(report.counts, report.output_bytes)  # without a mesh, nothing is sent
      {} 32

    Source: the HLO text of the compiled function, and XLA's `CompiledMemoryStats`.
    """
    if hasattr(mesh, "dtype"):  # the argument of `fn`
        text = called_in_two_steps("drjax.collectives", "mesh= as a mesh", mesh)
        raise MeshError(text)
    lower = getattr(fn, "lower", None)
    if not callable(fn):
        raise DrjaxTypeError(
            "drjax.collectives needs a function, or what jax.jit returns, got "
            f"{type(fn).__name__}. Of a compiled function: drjax.compiled.Report.of."
        )

    def reporter(*args: Any, **kwargs: Any) -> Report:
        lowered = (lower or jax.jit(fn).lower)(*args, **kwargs)
        return Report.of(lowered.compile(), mesh)

    return reporter


def read_hlo(
    text: str, mesh: Mapping[str, int] | None = None
) -> tuple[Collective, ...]:
    """Read the collectives from HLO text, as of another process: `compiled.as_text()`.

    Args:
      text: The HLO text, after partitioning.
      mesh: The sizes of the mesh axes by name, major first. Default: no axis is named.
        If the program is for several TPU slices, they lie along the major axes.

    Raises:
      ValueError: The text has an element type, or a way to write the devices of a
        collective, that is not known.
    """
    module = Module(text)
    return tuple(_read(module, mesh or {}, _places(module, ()), ()))


def totals(
    collectives: Iterable[Collective], key: Callable[[Collective], Key]
) -> dict[Key, Total]:
    """Add up the collectives that have the same key.

    Args:
      collectives: The collectives.
      key: From a collective to the key, such as `lambda c: c.kind`.

    Returns:
      A dict from each key to the `Total` of its collectives, in the order of the first
      collective of each.
    """
    groups: dict[Key, list[Collective]] = {}
    for collective in collectives:
        groups.setdefault(key(collective), []).append(collective)
    return {key: _total(group) for key, group in groups.items()}


# ---------------------------------------------------------------------------------
# Reading


def _peak_bytes(memory: Any, shardings: PyTree) -> int:
    """Return the most bytes that live at once, from XLA's `CompiledMemoryStats`.

    On CPUs, its peak counts arguments and results only.
    """
    devices = [
        device
        for sharding in jax.tree.leaves(shardings)
        if isinstance(sharding, jax.sharding.Sharding)
        for device in sharding.device_set
    ]
    if any(device.platform != "cpu" for device in devices):
        return memory.peak_memory_in_bytes
    new = memory.output_size_in_bytes - memory.alias_size_in_bytes
    held = memory.argument_size_in_bytes + new + memory.temp_size_in_bytes
    return max(held, memory.peak_memory_in_bytes)


def _places(module: Module, slice_of: Sequence[int]) -> np.ndarray:
    """Return the mesh positions of the devices, `[slices, devices of a slice]`.

    `slice_of` has the slice of each device of the mesh; without it, slices are major.
    """
    groups = [
        group
        for x in module.instructions.values()
        if _transfer_type(x)
        for group in devices_of_slices(x.attributes)
    ]
    slices = 1 + max((int(group[:, 0].max()) for group in groups), default=0)
    order = np.argsort(slice_of, kind="stable") if len(slice_of) else np.arange(0)
    known = len(set(slice_of))
    if known >= slices and len(order) == known * module.devices:
        return order.reshape(known, module.devices)
    return np.arange(slices * module.devices).reshape(slices, module.devices)


def _read(
    module: Module,
    mesh: Mapping[str, int],
    places: np.ndarray,
    slice_of: Sequence[int],
) -> Iterator[Collective]:
    """Yield the collectives of a parsed program; `places` are those of `_places`.

    `slice_of` has the slice of each device of the mesh: TPU slices send to each other,
    while GPUs of all hosts run one program, whose collectives join hosts.
    The start and the end of an asynchronous collective are one, and so are fusions that
    the compiler has marked as one chain.
    """
    schedule = Schedule(module)
    on_mesh = bool(mesh) and places.size == math.prod(mesh.values())
    slices = np.asarray(slice_of if len(slice_of) == places.size else [0] * places.size)
    for running, links in _links(module):
        x, kind = running.instruction, _kind(running) or ""
        between = _transfer_type(x) is not None
        if between:
            groups = devices_of_slices(x.attributes)
            on_places = [(g[:, 0], g[:, 1]) for g in groups]
        else:
            groups = devices_of(x.attributes, module.devices)
            on_places = [(0, g) for g in groups]  # all slices run the same program
        members, axes = len(groups[0]), None
        if on_mesh:
            positions = [places[index] for index in on_places]
            axes = axes_of(positions, kind in _PAIRWISE, mesh)
            between |= any(len({*slices[x].flat}) > 1 for x in positions)
        size = _whole_bytes(x, kind, members)
        under_way = schedule.under_way(links)
        loops = [y for y in under_way or () if y.opcode == "while"]
        op_name = re.search(r'op_name="([^"]*)"', x.attributes)
        yield Collective(
            kind,
            sent_bytes(kind, size, members),
            -(-size // members) if kind == "reduce-scatter" else size,
            axes,
            members,
            tuple(WhileLoop(y.name, module.trip_count(y)) for y in running.loops),
            running.times,
            x.name,
            op_name[1] if op_name else "",
            between,
            under_way is not None,
            tuple(WhileLoop(y.name, module.trip_count(y)) for y in loops),
            schedule.flops(under_way or ()),
        )


def _links(module: Module) -> list[tuple[Running, list[Instruction]]]:
    """The collectives that run, each with its links: itself, if it is in no chain.

    A chain may start before a loop, with links in each of its steps, and end after it.
    """
    every: list[tuple[Running, list[Instruction]]] = []
    chains: dict[tuple[str, ...], list[tuple[Running, list[Instruction]]]] = {}
    for running in module.running():
        if _kind(running) is None:
            continue
        x, loops = running.instruction, running.loops
        if named := _CHAIN.search(x.attributes):
            same = chains.setdefault(named.groups(), [])
            around = [
                y for first, y in same if first.loops == loops[: len(first.loops)]
            ]
            if around:
                around[0].append(x)
                continue
            same.append((running, [x]))
            every.append(same[-1])
        else:
            every.append((running, [x]))
    return every


_PAIRWISE = ("collective-permute", "send")


def _transfer_type(x: Instruction) -> str | None:
    """Return what is sent between TPU slices, such as `ALL_REDUCE`; else None."""
    if x.opcode != "send":
        return None
    named = re.search(r'_xla_megascale_transfer_type="(\w+)"', x.attributes)
    return named[1] if named else None


def _kind(running: Running) -> str | None:
    """Return the kind of a collective; None: it is none, or only the end of one."""
    x = running.instruction
    if x.opcode == "send":
        transfer = (_transfer_type(x) or "").lower().replace("_", "-")
        if transfer in KINDS:
            return transfer
        if transfer:
            return "collective-permute" if transfer == "one-to-one" else "send"
        # Others are to the host, as those of a callback.
        return None if "is_host_transfer=true" in x.attributes else "send"
    kind = x.opcode.removesuffix("-start")
    if kind == "all-reduce" and running.computation.startswith("all-reduce-scatter"):
        return "reduce-scatter"
    return kind if kind in KINDS else None


def _whole_bytes(x: Instruction, kind: str, members: int) -> int:
    """Return the bytes of a collective's whole value: see `sent_bytes`.

    An instruction that starts an asynchronous collective has a tuple of operands,
    results and contexts as its shape; that of an all-reduce may have results alone.
    That of a send between slices begins with its operand. The operand or the result of
    a ragged all-to-all is a buffer for what one device may send or receive at most.
    """
    parts = split(x.shape[1:]) if x.shape.startswith("(") else [x.shape]
    if x.opcode == "send":
        return shape_bytes(parts[0]) * (members if kind == "all-gather" else 1)
    shape = x.shape
    alone = x.opcode == "all-reduce-start" and not x.shape.startswith("((")
    if x.opcode.endswith("-start") and not alone:
        # (operands, results, contexts...)
        shape = parts[1] if len(parts) > 1 else shape
        if kind == "ragged-all-to-all":
            (sent, *_) = split(parts[0][1:])
            return min(shape_bytes(sent), shape_bytes(shape))
    # A TPU writes a reduce-scatter as an all-reduce, whose result is the whole value.
    scattered = x.opcode.startswith("reduce-scatter")
    return shape_bytes(shape) * (members if scattered else 1)


# ---------------------------------------------------------------------------------
# Totals, and text


def _total(group: Sequence[Collective]) -> Total:
    """Add up collectives: their number, their bytes, and how often they run.

    If it is not known of one of them how often it runs, the sums of runs and of bytes
    in all runs are None.
    """
    known = [(c.times, c.bytes) for c in group if c.times is not None]
    complete = len(known) == len(group)
    return Total(
        len(group),
        sum(c.bytes for c in group),
        sum(times for times, _ in known) if complete else None,
        sum(times * size for times, size in known) if complete else None,
    )


def _table(collectives: Sequence[Collective]) -> list[str]:
    """Format collectives as lines of text, with a line for those that are alike.

    They are alike if they have the same kind, mesh axes and loops.
    """
    if not collectives:
        return ["  no collectives"]
    lines = [
        (
            "collective",
            "mesh axes",
            "loops",
            "count",
            "sent",
            "times",
            "sent in a call",
        )
    ]
    together = totals(collectives, lambda c: (c.kind, c.axes, c.loops))
    for (kind, axes, loops), total in together.items():
        per_call = total.bytes_per_call
        lines.append(
            (
                kind,
                _axes(axes),
                " > ".join(map(str, loops)) or "none",
                str(total.count),
                bytes_as_text(total.bytes),
                _known(total.times),
                _bytes(per_call),
            )
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  " + "  ".join(map(str.ljust, x, widths)).rstrip() for x in lines]


def _hidden_lines(collectives: Sequence[Collective]) -> list[str]:
    """Say what is hidden, for each network, if anything is asynchronous."""
    if not any(c.asynchronous for c in collectives):
        return []
    lines = []
    for between, place in (True, "between slices"), (False, "on other networks"):
        own = [c for c in collectives if c.between_slices is between]
        hidden = _total([c for c in own if c.hidden]).bytes_per_call
        total = _total(own).bytes_per_call
        if own:
            sent = " of ".join(
                "?" if x is None else bytes_as_text(x) for x in (hidden, total)
            )
            lines.append(f"  hidden behind computation, {place}: {sent}")
    for c in collectives:
        if c.hidden:
            loops = ", ".join(map(str, c.hidden_by)) or "no loop"
            flops = "?" if c.hidden_flops is None else f"{c.hidden_flops:.3g}"
            lines.append(f"    {c.kind} ({_axes(c.axes)}): {loops}; {flops} flops")
    return lines


def _axes(axes: tuple[str, ...] | None) -> str:
    """Format mesh axes; `?` for None, which means that they are not known."""
    return "?" if axes is None else ", ".join(axes) or "none"


def _bytes(number: int | None) -> str:
    """Format bytes; `?` for None, which means that they are not known."""
    return "?" if number is None else bytes_as_text(number)


def _known(number: int | None) -> str:
    """Format a number; `?` for None, which means that it is not known."""
    return "?" if number is None else str(number)
