"""The plan: a program's normal form, a list of steps, and its rounds as a view.

A plan alternates between one server and n groups. Round by round:

    server stage -> broadcast and scatter -> local stage, once a group -> reduce

Every stage is a closed jaxpr without drjax primitives of the plan's own partition.
Whatever a later round needs is either a global value, which the server keeps, or a
partitioned value, whose slice i only group i keeps. This module holds data only:
`drjax.make_plan` builds plans, and backends run them.
"""

import functools
import itertools
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from drjax._errors import PlanError
from drjax._partition import Partition
from drjax._plan import methods, uses
from drjax._plan.exchanges import Broadcast, Fold, Gather, Move, Reduce, Scatter
from drjax._plan.exported import Exported
from drjax._plan.ledger import Ledger, Message, checked_devices
from drjax._plan.loops import Columns
from drjax._plan.record import Record
from drjax._plan.rules import Rules
from drjax._plan.steps import Exchange, Loop, Stage, Step
from drjax._plan.value import Value

S = TypeVar("S", bound=Step)


@dataclass(frozen=True)
class Round(Record):
    """One round of a plan: everything between two communications.

    A view of the steps of a plan. They are, in this order: one stage of the server,
    broadcasts, scatters, one stage of the groups, reductions and gathers, moves of
    slices, folds, and loops. Stages may be empty.

    Attributes:
      steps: The steps.
    """

    steps: tuple[Step, ...]

    def all(self, kind: type[S]) -> tuple[S, ...]:
        """The steps of a class, in their order."""
        return tuple(step for step in self.steps if isinstance(step, kind))

    @functools.cached_property
    def server(self) -> Stage:
        """Global computation that the round's communication needs."""
        return self.all(Stage)[0]

    @property
    def broadcast(self) -> tuple[Value, ...]:
        """Global values of which each group receives a copy."""
        return tuple(step.source for step in self.all(Broadcast))

    @property
    def scatter(self) -> tuple[tuple[Value, Value], ...]:
        """Pairs of a global value and its slices, of which group i receives slice i."""
        return tuple((step.source, step.result) for step in self.all(Scatter))

    @functools.cached_property
    def local(self) -> Stage:
        """The computation of one group."""
        return self.all(Stage)[1]

    @property
    def reduces(self) -> tuple[Reduce | Gather, ...]:
        """Reductions of the groups' results, and gathers, communicated together."""
        return tuple(s for s in self.steps if isinstance(s, Reduce | Gather))

    @functools.cached_property
    def partials(self) -> tuple[Reduce, ...]:
        """The reductions that consist of partial reductions, all except gathers."""
        return self.all(Reduce)

    @functools.cached_property
    def folds(self) -> tuple[Fold, ...]:
        """Folds of the groups' states, with the reductions."""
        return self.all(Fold)

    @property
    def moves(self) -> tuple[Move, ...]:
        """Moves of slices between groups, after the local stage."""
        return self.all(Move)

    @property
    def loops(self) -> tuple[Loop, ...]:
        """Loops that start after the reductions and moves."""
        return self.all(Loop)

    @functools.cached_property
    def sources(self) -> tuple[tuple[str, Value], ...]:
        """What of the local stage is combined while it runs, with the operations.

        They are those of `combined`: `(op, value)` of each reduction, and then
        `("fold", leaf)` of the states of each fold.
        """
        folded = [(fold.op, value) for fold in self.folds for value in fold.sources]
        return (*((r.op, r.source) for r in self.partials), *folded)

    @functools.cached_property
    def combined(self) -> tuple[Value, ...]:
        """The results of what combines the local stage's outputs while it runs.

        They are those of the reductions, and then of the folds.
        """
        steps = (*self.partials, *self.folds)
        return tuple(value for step in steps for value in step.outputs)


@dataclass(frozen=True)
class Plan(Record):
    """A program in normal form. Print it to read it.

    Attributes:
      name: The program's name.
      partition: The partition of its groups; None if it calls no building block, so
        that the server computes everything.
      steps: The steps, in the order in which they run: those of each round, and then
        the last stage of the server.
      inputs: The values of the program's arguments, flat.
      outputs: The values of its results, flat.
      in_tree: The pytree structure of `(args, kwargs)`; None in the body of a loop.
      out_tree: The pytree structure of the result; None in the body of a loop.
      open_groups: Whether nothing in it depends on the number of groups, so that it
        runs with any: see `with_groups`. False in the body of a loop.
    """

    name: str
    partition: Partition | None
    steps: tuple[Step, ...]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    in_tree: Any
    out_tree: Any
    open_groups: bool = False

    @property
    def size(self) -> int:
        """n, the number of groups; 0 without a partition."""
        return 0 if self.partition is None else self.partition.size

    @functools.cached_property
    def rounds(self) -> tuple[Round, ...]:
        """The rounds, as few as data dependencies allow.

        Reductions that do not depend on each other are in one round.
        """
        of_server = lambda step: isinstance(step, Stage) and not step.local
        starts = [i for i, step in enumerate(self.steps) if of_server(step)]
        pairs = zip(starts[:-1], starts[1:], strict=True)
        return tuple(Round(self.steps[start:end]) for start, end in pairs)

    @property
    def server(self) -> Stage:
        """The server stage after the last round."""
        last = self.steps[-1]
        assert isinstance(last, Stage)
        return last

    @property
    def levels(self) -> tuple[Partition, ...]:
        """The partitions of the program's levels, outermost first; () without one."""
        own = () if self.partition is None else (self.partition,)
        stages = [step for step in self.steps if isinstance(step, Stage)]
        below = [stage.inner.levels for stage in stages if stage.inner is not None]
        below += [body.levels[1:] for step in self.steps for body in step.bodies]
        return own + max(below, key=len, default=())

    @property
    def group_mesh(self) -> tuple[tuple[str, int], ...]:
        """Names and sizes of the axes of the mesh that each group needs.

        Such as `(("model", 4),)`; () if a group runs on one device. See the argument
        `group_mesh` of `drjax.make_plan`.
        """
        return next((stage.mesh for _, stage in self.stages() if stage.mesh), ())

    def stages(self) -> Iterator[tuple[str, Stage]]:
        """All stages in the order in which they run, as `(location, stage)` pairs.

        A location is text, such as `round 1, groups` or `round 1, scan, round 2,
        server`. The stages of a loop's bodies are listed once, and those of an inner
        level after the local stage that runs them.
        """
        for number, a_round in enumerate(self.rounds, 1):
            folds = itertools.count()
            for step in a_round.steps:
                for location, stage in step.stages():
                    if isinstance(step, Fold):
                        location = f"fold {next(folds)}"
                    yield f"round {number}, {location}", stage
        yield "server", self.server

    def loops(self) -> Iterator[Loop]:
        """All loops of a plan, and those in their bodies, each before those in it."""
        for step in self.steps:
            if isinstance(step, Loop):
                yield step
                for body in step.bodies:
                    yield from body.loops()

    def kept(self) -> frozenset[str]:
        """The names of the values that are needed after their stage, not only reduced.

        They are the inputs of local stages, moves and loops, the operands of gathers,
        and the plan's outputs. Of these a local stage returns the groups' slices; of
        its other outputs backends need partial reductions only.
        """
        return self._kept

    @functools.cached_property
    def _kept(self) -> frozenset[str]:
        return uses.kept(self)

    def with_groups(self, n: int) -> "Plan":
        """The same plan for another number of groups.

        Args:
          n: The number of groups, a positive integer.

        Raises:
          PlanError: The plan may depend on its number of groups: it was made without
            `open_groups=True`.
          DrjaxTypeError, DrjaxValueError: `n` is not a positive integer.

        Example:
          >>> import drjax, jax.numpy as jnp
          >>> mean = drjax.program(clients=4)(drjax.reduce_mean)
          >>> plan = drjax.make_plan(mean, open_groups=True)(jnp.arange(4.0))
          >>> run = drjax.backends.reference.compile(plan.with_groups(3))
          >>> print(run(jnp.arange(3.0)))
          1.0
        """
        if n == self.size:
            return self
        if not self.open_groups:
            raise PlanError(
                f"{self.name} is a plan for {self.size} groups, and may depend on that "
                "number. drjax.make_plan(..., open_groups=True) makes one for any."
            )
        return resized(self, n)

    def communication(
        self, devices: int | Mapping[str, int] = 1, *, code: bool = False
    ) -> Ledger:
        """Bytes between the server and the groups, and between devices.

        Args:
          devices: m, the number of devices over which the groups are divided, those
            along the mesh axes of the partition: not those that share a group's model
            (see `Ledger.reduced_per_device`); of several levels a dict from their
            names, as `{"pods": 2, "groups": 4}`. A number is that of the outermost
            level, and the others are not divided.
          code: Whether to export the stages, too, and count the bytes of those of the
            groups: the code that each client of Flower gets once.

        Raises:
          DrjaxTypeError: `devices` is not an integer, or a dict with one.
          DrjaxValueError: It is less than 1, or a name is that of no level.
          PlanFileError: With `code`, a stage cannot be exported.

        Example:
          >>> import drjax, jax.numpy as jnp
          >>> mean = drjax.program(clients=4)(drjax.reduce_mean)
          >>> plan = drjax.make_plan(mean)(jnp.zeros((4, 10), jnp.float32))
          >>> plan.communication().up()
          40
        """
        messages = tuple(_communicated(self, "", (), ()))
        ledger = Ledger(self.partition, 1, messages)
        counts = checked_devices(ledger.levels, devices)
        own = "" if self.partition is None else self.partition.name
        if code:
            nbytes = methods.call("Plan.communication", self)
            ledger = replace(ledger, code=nbytes)
        return replace(
            ledger, devices=counts.get(own, 1), devices_of=tuple(counts.items())
        )

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
        methods.call("Plan.draw", self, path)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a plan file, which runs without the source of this program.

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
        methods.call("Plan.save", self, path)

    def __reduce__(self) -> tuple[Any, ...]:
        # As a plan file: jaxprs have no pickled form.
        return methods.call("Plan.__reduce__", self)

    def __str__(self) -> str:
        return methods.call("Plan.__str__", self)


def rounds_of(plan: Plan) -> Iterator[tuple[Plan, Round]]:
    """Iterate over the rounds of a plan and of its loops' bodies, in a fixed order.

    With each comes the plan, or loop body, that it is in. The index of a round in this
    order identifies its local stage, for an engine's driver and its workers. The rounds
    in a round's loops come directly after that round.
    """
    for a_round in plan.rounds:
        yield plan, a_round
        for step in a_round.steps:
            for body in step.bodies:
                yield from rounds_of(body)


def exported_stages(plan: Plan) -> Iterator[tuple[str, Stage, Exported]]:
    """Iterate over the stages that were exported, with location and functions."""
    for location, stage in plan.stages():
        if stage.exported is not None:
            yield location, stage, stage.exported


def resized(plan: Plan, n: int) -> Plan:
    """Copy a plan for n groups: its steps and values, and the bodies of its loops.

    What is over another partition stays, as values have the shapes of slices.
    """
    own = plan.partition
    assert own is not None
    new = replace(own, size=n)

    def sized(x: object) -> Any:
        if isinstance(x, Partition):
            return new if x == own else x
        if isinstance(x, Record):
            names = {f.name for f in fields(x)}
            # An inner level is a partition of its own, also if it is an equal one.
            old = {name: getattr(x, name) for name in names - {"inner"}}
            changed = {k: y for k, v in old.items() if (y := sized(v)) is not v}
            return replace(x, **changed) if changed else x
        if isinstance(x, tuple):
            items = tuple(map(sized, x))
            return x if all(a is b for a, b in zip(items, x, strict=True)) else items
        return x

    return sized(plan)


# -------------------------------------------------------------------------------------
# The ledger


def _communicated(
    plan: Plan,
    prefix: str,
    times: tuple[int | str, ...],
    outer: tuple[Partition, ...],
) -> Iterator[Message]:
    """Yield a `Message` for each value that a plan communicates, step by step.

    `prefix` is the text before the round's number in `Message.round`: empty, for the
    body of a loop such as `2.scan.`, or for an inner level such as `2.tasks.`, with the
    name of its partition. `times` is `Message.times`: one factor for each loop around
    the plan. `outer` are the partitions of the levels around it, outermost first.
    """
    levels = outer if plan.partition is None else (*outer, plan.partition)
    for number, a_round in enumerate(plan.rounds, 1):
        for step in a_round.steps:
            yield from _messages(step, f"{prefix}{number}", times, levels, outer)


# The messages of a step: of its round, which may be in loops and in groups of `outer`.
_messages: Rules[Iterator[Message]] = Rules("Plan.communication")


@_messages.rule(Stage)
def _of_stage(
    stage: Stage,
    label: str,
    times: tuple[int | str, ...],
    levels: tuple[Partition, ...],
    outer: tuple[Partition, ...],
) -> Iterator[Message]:
    if stage.inner is not None:
        within = f"{label}.{stage.inner.levels[0].name}."
        yield from _communicated(stage.inner, within, times, levels)


@_messages.rule(Exchange)
def _of_exchange(
    step: Exchange,
    label: str,
    times: tuple[int | str, ...],
    levels: tuple[Partition, ...],
    outer: tuple[Partition, ...],
) -> Iterator[Message]:
    for value, nbytes in step.messages():
        yield Message(label, step, value, nbytes, times, levels)


@_messages.rule(Loop)
def _of_loop(
    loop: Loop,
    label: str,
    times: tuple[int | str, ...],
    levels: tuple[Partition, ...],
    outer: tuple[Partition, ...],
) -> Iterator[Message]:
    for body in loop.bodies:
        yield from _communicated(
            body, f"{label}.{loop.name}.", times + loop.times, outer
        )


@_messages.rule(Columns)
def _of_columns(loop: Columns, *_: Any) -> Iterator[Message]:
    # What workers get of the server's work is no communication of the groups.
    return iter(())
