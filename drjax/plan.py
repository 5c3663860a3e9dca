"""The plan: a program's normal form, as data.

A plan alternates between one server and n groups. Round by round:

    server stage -> broadcast and scatter -> local stage, once a group -> reduce

Every stage is a closed jaxpr without drjax primitives of the plan's own partition.
Whatever a later round needs is either a global value, which the server keeps, or a
partitioned value, whose slice i only group i keeps. This module holds data only:
`drjax.make_plan` builds plans, and backends run them.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from drjax._errors import PlanError
from drjax._partition import Partition
from drjax._plan.exported import Exported as Exported
from drjax._plan.ledger import MOVES as MOVES
from drjax._plan.ledger import Ledger as Ledger
from drjax._plan.ledger import Message as Message
from drjax._plan.ledger import checked_devices
from drjax._plan.record import Record
from drjax._plan.reduce import Reduce as Reduce
from drjax._plan.value import Value as Value
from drjax._plan.wire import Wire as Wire


@dataclass(frozen=True)
class Stage(Record):
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
class Fold(Record):
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


@dataclass(frozen=True)
class Move(Record):
    """One move of slices from groups to groups.

    Attributes:
      op: `permute`, `take` or `put_add`, as the primitives in `drjax.primitives`.
      source: The partitioned value whose slices move; or a population, of which the
        groups are a cohort: a global value, `[N, *s]`.
      result: The partitioned value that it gives, or a population.
      sources: Of a permute, for each group the group whose slice it gets; else ().
      index: Of a take, int32: for each slice of `result` that of `source`. Of a
        put_add, for each slice of `source` that of `result`, if there is one.
    """

    op: str
    source: Value
    result: Value
    sources: tuple[int, ...] = ()
    index: Value | None = None

    @property
    def population(self) -> int:
        """N, the number of slices of a population; 0 if there is none."""
        return sum(v.shape[0] for v in (self.source, self.result) if not v.partitioned)

    @property
    def nbytes(self) -> int:
        """The bytes of one group's slice."""
        return (self.source if self.source.partitioned else self.result).nbytes

    @property
    def inputs(self) -> tuple[Value, ...]:
        """The values that the move reads, `source`, and `index` if there is one."""
        return (self.source,) if self.index is None else (self.source, self.index)


@dataclass(frozen=True)
class Loop(Record):
    """A loop, a branch, or work on coordinates: it runs plans of its own.

    Attributes:
      op: `scan`, `while`, `cond`; `program`: a plan over another partition, whose
        inputs and outputs are global values here; or `columns`: of `reduce_columns`,
        one round whose groups are the coordinates of gathered slices. Its inputs and
        outputs are global values, too. It is work of the server, which may share it.
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
class Round(Record):
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
        """The reductions that consist of partial reductions, all except gathers."""
        return [r for r in self.reduces if r.op != "gather"]


@dataclass(frozen=True)
class Plan(Record):
    """A program in normal form. Print it to read it.

    Attributes:
      name: The program's name.
      partition: The partition of its groups; None if it calls no building block, so
        that the server computes everything.
      rounds: The rounds, as few as data dependencies allow: reductions that do not
        depend on each other are in one round.
      server: The server stage after the last round.
      inputs: The values of the program's arguments, flat.
      outputs: The values of its results, flat.
      in_tree: The pytree structure of `(args, kwargs)`; None in the body of a loop.
      out_tree: The pytree structure of the result; None in the body of a loop.
      open_groups: Whether nothing in it depends on the number of groups, so that it
        runs with any: see `with_groups`. False in the body of a loop.
    """

    name: str
    partition: Partition | None
    rounds: tuple[Round, ...]
    server: Stage
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    in_tree: Any
    out_tree: Any
    open_groups: bool = False

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

    def loops(self) -> Iterator[Loop]:
        """All loops of a plan, and those in their bodies, each before those in it."""
        for a_round in self.rounds:
            for loop in a_round.loops:
                yield loop
                for body in loop.bodies:
                    yield from body.loops()

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
        return replace(_resized(self, self.partition, n), open_groups=True)

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
            from drjax._plan_file.group_stages import bytes_of_code

            ledger = replace(ledger, code=bytes_of_code(self))
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
        from drjax._drawing.draw import draw

        draw(self, path)

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
        from drjax._plan_file.save import save

        save(self, path)

    def __reduce__(self) -> tuple[Any, ...]:
        from drjax._plan_file.save import pickled

        return pickled(self)  # as a plan file: jaxprs have no pickled form

    def __str__(self) -> str:
        from drjax._drawing.print_plan import lines

        return "\n".join(lines(self))


def _resized(plan: Plan, own: Partition | None, n: int) -> Plan:
    """Copy a plan for n groups of a partition, with the bodies of its loops.

    Only the size of the partition changes: values have the shapes of slices. A plan
    over another partition than `own` is returned itself.
    """
    if own is None or plan.partition != own:
        return plan
    resized = lambda loop: replace(
        loop, bodies=tuple(_resized(body, own, n) for body in loop.bodies)
    )
    rounds = (replace(r, loops=tuple(map(resized, r.loops))) for r in plan.rounds)
    return replace(plan, partition=replace(own, size=n), rounds=tuple(rounds))


def _communicated(
    plan: Plan,
    prefix: str,
    times: tuple[int | str, ...],
    outer: tuple[Partition, ...],
) -> Iterator[Message]:
    """Yield a `Message` for each value that a plan communicates, round by round.

    Of each round, they come in this order: broadcasts, scatters, the messages of an
    inner level, reductions, folds, moves, and the messages of the bodies of loops.

    `prefix` is the text before the round's number in `Message.round`: empty, for the
    body of a loop such as `2.scan.`, or for an inner level such as `2.tasks.`, with the
    name of its partition. `times` is `Message.times`: one factor for each loop around
    the plan. `outer` are the partitions of the levels around it, outermost first.
    """
    levels = outer if plan.partition is None else (*outer, plan.partition)
    for number, a_round in enumerate(plan.rounds, 1):
        label = f"{prefix}{number}"

        def message(
            op: str, value: Value, nbytes: int, label: str = label, **options: Any
        ) -> Message:
            return Message(label, op, value, nbytes, times, levels=levels, **options)

        for value in a_round.broadcast:
            yield message("broadcast", value, value.nbytes)
        for _, scattered in a_round.scatter:
            yield message("scatter", scattered, scattered.nbytes)
        if (inner := a_round.local.inner) is not None:
            within = f"{label}.{inner.levels[0].name}."
            yield from _communicated(inner, within, times, levels)
        for r in a_round.reduces:
            yield message(r.op, r.source, r.nbytes, wire=r.wire, secure=r.secure)
        for fold in a_round.folds:
            for value in fold.sources:
                yield message("fold", value, value.nbytes)
        for move in a_round.moves:
            options = {"sources": move.sources, "population": move.population}
            yield message(move.op, move.source, move.nbytes, **options)
        for loop in a_round.loops:
            # What workers get of the server's work is no communication of the groups.
            if loop.op == "columns":
                continue
            steps: tuple[int | str, ...] = ()
            if loop.op in ("scan", "while"):
                steps = (loop.name if loop.length is None else loop.length,)
            for body in loop.bodies:
                within = f"{label}.{loop.name}."
                yield from _communicated(body, within, times + steps, outer)
