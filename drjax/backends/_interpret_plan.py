"""The interpreter of plans: the loop over rounds that backends share.

    for each round: server stage -> scatter -> groups, reductions -> moves -> loops
    then the last server stage

Input: a plan and its inputs. Output: its outputs. A backend is a `PlanInterpreter`: it
says how a server stage, the groups of a round and a loop run. The reference backend
runs them in this process, the XLA backend traces them, and an engine's driver sends the
groups to workers.

Invariants: what a stage reads was written before. A value is dropped after the round
that reads it last, so that memory holds only values that are live.

Sharp edges: this module never looks into arrays. Whether they are tracers, JAX's or
numpy's arrays, and along which axis a partitioned value has its slices, is the
backend's own.
"""

import abc
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias, TypeVar

from drjax.plan import Loop, Move, Plan, Round, Stage, Value

# As the backend has it: an array of JAX or numpy, a tracer, or an object that reads an
# array later.
BackendArray: TypeAlias = Any


class Environment:
    """The arrays of one run of a plan: a mapping from `drjax.plan.Value` to array.

    Values are looked up by their name, the keys of `arrays`.
    """

    def __init__(self) -> None:
        self.arrays: dict[str, Any] = {}

    def __contains__(self, value: Value) -> bool:
        return value.name in self.arrays

    def __getitem__(self, value: Value) -> BackendArray:
        return self.arrays[value.name]

    def __setitem__(self, value: Value, array: BackendArray) -> None:
        self.arrays[value.name] = array

    def read(self, values: Iterable[Value]) -> list[BackendArray]:
        """Return the arrays of these values, in this order; each must have one."""
        return [self[value] for value in values]

    def write(self, values: Iterable[Value], arrays: Iterable[BackendArray]) -> None:
        """Set the arrays of these values, in this order; earlier ones are replaced."""
        for value, array in zip(values, arrays, strict=True):
            self[value] = array

    def updated(self, arrays: dict[str, BackendArray]) -> "Environment":
        """Return a copy with other arrays, by the names of their values."""
        copy = Environment()
        copy.arrays = self.arrays | arrays
        return copy


class PlanInterpreter(abc.ABC):
    """Runs a plan round by round: `interpreter(inputs)` returns its outputs.

    Inputs and outputs are lists of arrays, in the order of `plan.inputs` and
    `plan.outputs`. A backend is a subclass: it defines how a server stage, the groups
    of a round and a loop run. Partitioned values have their slices along the axis that
    the backend has for groups: always axis 0, or `Value.axis`. Rounds are numbered by
    their index in `plan.rounds`, from 0.
    """

    plan: Plan

    def __call__(self, inputs: Iterable[BackendArray]) -> list[BackendArray]:
        plan, env = self.plan, Environment()
        env.write(plan.inputs, inputs)
        read_last = names_read_last(plan)
        for index, a_round in enumerate(plan.rounds):
            self.run_server(a_round.server, env)
            # After the server stage, which may compute what is scattered.
            for whole, slices in a_round.scatter:
                env[slices] = self.scatter(slices, env[whole])
            self.run_groups(index, env)
            for move in a_round.moves:
                env[move.result] = self.move(move, *env.read(move.inputs))
            # Last, as a loop may start with results of the round's reductions.
            for loop in a_round.loops:
                outputs = self.run_loop(index, loop, env.read(loop.inputs))
                env.write(loop.outputs, outputs)
            for name in read_last[index]:
                # Not all are there: a backend need not keep what it only reduces.
                env.arrays.pop(name, None)
        self.run_server(plan.server, env)
        return env.read(plan.outputs)

    @abc.abstractmethod
    def run_server(self, stage: Stage, env: Environment) -> None:
        """Run a server stage: it reads its inputs in `env`, and writes its outputs."""

    @abc.abstractmethod
    def scatter(self, slices: Value, whole: BackendArray) -> BackendArray:
        """Convert a global array to this backend's array of a partitioned value.

        Group i gets slice i. `whole` has its n slices along `slices.axis`; the result
        has them along the backend's axis.
        """

    @abc.abstractmethod
    def run_groups(self, index: int, env: Environment) -> None:
        """Run the local stage of a round for all groups, and its reductions and folds.

        It reads the inputs of the stage from `env`. It writes to `env` the results of
        the reductions and folds, and the slices of those outputs of the stage that are
        read after it.
        """

    @abc.abstractmethod
    def move(
        self, move: Move, slices: BackendArray, index: BackendArray | None = None
    ) -> BackendArray:
        """Move slices between groups by a permute, a take or a put_add.

        A permute has `result[i] = slices[move.sources[i]]`, and a take
        `result[i] = slices[index[i]]`. A put_add starts from zeros, and for each i adds
        `slices[i]` to `result[index[i]]`.

        Here `x[i]` is slice i of x, along the axis that the backend has for groups; of
        a population, a global value `[N, *s]`, along axis 0. A take of an index that is
        out of bounds gives zeros, and a put_add drops it. `index`, int32, is None for a
        permute.
        """

    @abc.abstractmethod
    def run_loop(
        self, index: int, loop: Loop, inputs: list[BackendArray]
    ) -> list[BackendArray]:
        """Run a loop of a round, whose bodies are plans; return its outputs.

        It may be a scan, a while loop, a cond, a single run of a plan over another
        partition (`loop.op == "program"`), or work on each coordinate of gathered
        slices (`"columns"`), which `_all_columns.run_columns` does at once.
        """


# ---------------------------------------------------------------------------------
# Liveness


def reads_after_server(a_round: Round) -> Iterator[Value]:
    """Iterate over the values that a round reads after its server stage has run.

    They are read by its scatters, local stage, reductions, folds, moves and loops, and
    are yielded in this order; a value that is read twice comes twice. The inputs of the
    server stage itself are not among them. The liveness of values is computed from
    them.
    """
    yield from (whole for whole, _ in a_round.scatter)
    yield from a_round.local.inputs
    yield from (reduce.source for reduce in a_round.reduces)
    yield from (value for fold in a_round.folds for value in fold.inputs)
    # Bodies are plans with values of their own: only the loop's inputs are read.
    for communication in (*a_round.moves, *a_round.loops):
        yield from communication.inputs


def names_read_last(plan: Plan) -> list[list[str]]:
    """Return for each of `plan.rounds` the names of the values that it reads last.

    A backend can drop their arrays after the round. The last server stage of the plan
    and the plan's outputs are read after all rounds, so their values are in no list. A
    value that nothing reads is in no list either.
    """
    last: dict[str, int] = {}
    for index, a_round in enumerate(plan.rounds):
        for value in (*a_round.server.inputs, *reads_after_server(a_round)):
            last[value.name] = index
    names: list[list[str]] = [[] for _ in plan.rounds]
    after_rounds = {v.name for v in (*plan.server.inputs, *plan.outputs)}
    for name, index in last.items():
        if name not in after_rounds:
            names[index].append(name)
    return names


# ---------------------------------------------------------------------------------
# Inputs of loops


T = TypeVar("T")


def split_while(loop: Loop, xs: Sequence[T]) -> tuple[list[T], list[T], list[T]]:
    """Split a list in the order of a while loop's inputs into three parts.

    They are constants of the condition, constants of the body, and carried values.
    """
    first, second = loop.consts[0], sum(loop.consts)
    return [*xs[:first]], [*xs[first:second]], [*xs[second:]]


def split_scan(loop: Loop, xs: Sequence[T]) -> tuple[list[T], list[T], list[T]]:
    """Split a list in the order of a scan's inputs into three parts.

    They are constants, carried values, and stacks, the `xs` of `lax.scan`: each step
    takes one entry of every stack.
    """
    first = sum(loop.consts)
    second = first + loop.carry
    return [*xs[:first]], [*xs[first:second]], [*xs[second:]]
