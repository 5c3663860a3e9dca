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
from typing import Any, TypeVar

from drjax.plan import Loop, Move, Plan, Round, Stage, Value


class Environment:
    """The arrays of one run of a plan: a mapping from `drjax.plan.Value` to array.

    Values are looked up by their name.

    Attributes:
      arrays: A dict from the name of a value to its array. Each backend has its own
        kind of arrays: JAX or numpy arrays, tracers, or objects that read an array
        later.
    """

    def __init__(self) -> None:
        self.arrays: dict[str, Any] = {}

    def __contains__(self, value: Value) -> bool:
        return value.name in self.arrays

    def __getitem__(self, value: Value) -> Any:
        return self.arrays[value.name]

    def __setitem__(self, value: Value, array: Any) -> None:
        self.arrays[value.name] = array

    def read(self, values: Iterable[Value]) -> list:
        """Return the arrays of these values as a list, in the order of the values.

        Raises:
          KeyError: A value has no array.
        """
        return [self[value] for value in values]

    def write(self, values: Iterable[Value], arrays: Iterable) -> None:
        """Set the arrays of these values, given in the order of the values.

        Arrays that the values had before are replaced.
        """
        for value, array in zip(values, arrays, strict=True):
            self[value] = array

    def updated(self, arrays: dict[str, Any]) -> "Environment":
        """Return a copy of the environment with other arrays for some values.

        This environment is not changed.

        Args:
          arrays: A dict from the names of these values to their new arrays.
        """
        copy = Environment()
        copy.arrays = self.arrays | arrays
        return copy


class PlanInterpreter(abc.ABC):
    """Runs a plan round by round: `interpreter(inputs)` returns its outputs.

    Inputs and outputs are lists of arrays, in the order of `plan.inputs` and
    `plan.outputs`. A backend is a subclass: it defines how a server stage, the groups
    of a round and a loop run.

    Attributes:
      plan: The plan.
    """

    plan: Plan

    def __call__(self, inputs: Iterable) -> list:
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
        """Run a server stage: read its inputs from `env`, write its outputs to `env`.

        Args:
          stage: The server stage.
          env: The arrays of all values that were computed so far; it is changed.
        """

    @abc.abstractmethod
    def scatter(self, slices: Value, whole: Any) -> Any:
        """Convert a global array to this backend's array of a partitioned value.

        Group i gets slice i.

        Args:
          slices: The partitioned value that the scatter gives.
          whole: The array of the global value, `[..., n, ...]`, whose n slices lie
            along axis `slices.axis`.

        Returns:
          The array of `slices`, with the n slices along the axis along which this
          backend has the groups: axis 0, or `slices.axis`.
        """

    @abc.abstractmethod
    def run_groups(self, index: int, env: Environment) -> None:
        """Run the local stage of a round for all groups, and its reductions and folds.

        It reads the inputs of the stage from `env`. It writes to `env` the results of
        the reductions and folds, and the slices of those outputs of the stage that are
        read after it.

        Args:
          index: The index of the round in `plan.rounds`, from 0.
          env: The arrays of all values that were computed so far; it is changed.
        """

    @abc.abstractmethod
    def move(self, move: Move, slices: Any, index: Any = None) -> Any:
        """Move slices between groups by a permute, a take or a put_add.

        A permute has `result[i] = slices[move.sources[i]]`, and a take
        `result[i] = slices[index[i]]`. A put_add starts from zeros, and for each i adds
        `slices[i]` to `result[index[i]]`.

        Here `x[i]` is slice i of x, along the axis that the backend has for groups. A
        take of an index that is out of bounds gives zeros, and a put_add drops it.

        Args:
          move: The move.
          slices: The array of `move.source`, with the slices of all groups; or, if the
            source is a population, a global value `[N, *s]` with its N slices along
            axis 0.
          index: The array of `move.index`, int32 with one index for each slice of the
            result of a take, or for each slice of the source of a put_add. None for a
            permute.

        Returns:
          The array of `move.result`: with the slices along the same axis as those of
          other partitioned values of the backend; or, for a population, along axis 0.
        """

    @abc.abstractmethod
    def run_loop(self, index: int, loop: Loop, inputs: list) -> list:
        """Run a loop of a round, whose bodies are plans.

        It may be a scan, a while loop, a cond, a single run of a plan over another
        partition (`loop.op == "program"`), or work on each coordinate of gathered
        slices (`"columns"`), which `_all_columns.run_columns` does at once.

        Args:
          index: The index of the loop's round in `plan.rounds`, from 0.
          loop: The loop.
          inputs: The arrays of `loop.inputs`, in order; partitioned ones have their
            slices along the axis that the backend has for groups.

        Returns:
          A list of the arrays of `loop.outputs`, in order and in the same layout.
        """


# ---------------------------------------------------------------------------------
# Liveness


def reads_after_server(a_round: Round) -> Iterator[Value]:
    """Iterate over the values that a round reads after its server stage has run.

    They are read by its scatters, local stage, reductions, folds, moves and loops, and
    are yielded in this order; a value that is read twice comes twice. The inputs of the
    server stage itself are not among them. The liveness of values is computed from
    them.

    Args:
      a_round: The round.
    """
    yield from (whole for whole, _ in a_round.scatter)
    yield from a_round.local.inputs
    yield from (reduce.source for reduce in a_round.reduces)
    yield from (value for fold in a_round.folds for value in fold.inputs)
    # Bodies are plans with values of their own: only the loop's inputs are read.
    for communication in (*a_round.moves, *a_round.loops):
        yield from communication.inputs


def names_read_last(plan: Plan) -> list[list[str]]:
    """Return the names of the values that each round is the last to read.

    A backend can drop their arrays after the round. The last server stage of the plan
    and the plan's outputs are read after all rounds, so their values are in no list. A
    value that nothing reads is in no list either.

    Returns:
      One list of names for each of `plan.rounds`, in order.
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
    """Split a list of one element for each input of a while loop into three parts.

    Args:
      loop: The while loop.
      xs: A sequence in the order of `loop.inputs`, such as these values or their
        arrays.

    Returns:
      `(constants of the condition, constants of the body, carried values)`: three
      lists, which are consecutive parts of `xs`.
    """
    first, second = loop.consts[0], sum(loop.consts)
    return [*xs[:first]], [*xs[first:second]], [*xs[second:]]


def split_scan(loop: Loop, xs: Sequence[T]) -> tuple[list[T], list[T], list[T]]:
    """Split a list with one element for each input of a scan into its three parts.

    Args:
      loop: The scan.
      xs: A sequence in the order of `loop.inputs`, such as these values or their
        arrays.

    Returns:
      `(constants, carried values, stacks)`: three lists, which are consecutive parts of
      `xs`. Stacks are the `xs` of `lax.scan`: each step takes one entry of every stack.
    """
    first = sum(loop.consts)
    second = first + loop.carry
    return [*xs[:first]], [*xs[first:second]], [*xs[second:]]
