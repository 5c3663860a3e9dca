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

    Attributes:
      arrays: The arrays by the name of their value. Each backend has its own kind: JAX
        or numpy arrays, tracers, or objects that read an array later.
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
        """The arrays of these values, in the order of the values."""
        return [self[value] for value in values]

    def write(self, values: Iterable[Value], arrays: Iterable) -> None:
        """Set the arrays of these values, in the order of the values."""
        for value, array in zip(values, arrays, strict=True):
            self[value] = array

    def updated(self, arrays: dict[str, Any]) -> "Environment":
        """A copy of the environment with other arrays for some values.

        Args:
          arrays: These arrays, by the names of the values.
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
        """Run a server stage: read its inputs from `env`, write its outputs to it."""

    @abc.abstractmethod
    def scatter(self, slices: Value, whole: Any) -> Any:
        """Scatter a global array: convert it to the array of the partitioned value.

        Args:
          slices: The partitioned value.
          whole: The global array `[..., n, ...]`, whose slices lie along `slices.axis`.

        Returns:
          The array of `slices`, with the slices along the axis that the backend uses.
        """

    @abc.abstractmethod
    def run_groups(self, index: int, env: Environment) -> None:
        """Run the local stage of a round for all groups, its reductions and folds.

        It reads the inputs of the stage from `env`, and writes to `env` the results of
        the reductions and folds, and those outputs of the stage that are read later as
        slices.

        Args:
          index: The index of the round in the plan, from 0.
          env: The arrays so far.
        """

    @abc.abstractmethod
    def move(self, move: Move, slices: Any, index: Any = None) -> Any:
        """Move slices between groups.

        Args:
          move: The move.
          slices: The array of `move.source`.
          index: The array of `move.index`; None if it has none.

        Returns:
          The array of `move.result`, with the slices along the same axis as `slices`.
        """

    @abc.abstractmethod
    def run_loop(self, index: int, loop: Loop, inputs: list) -> list:
        """Run a loop of a round: a scan, while or cond whose bodies are plans.

        Args:
          index: The index of the loop's round in the plan, from 0.
          loop: The loop.
          inputs: The arrays of `loop.inputs`, in order.

        Returns:
          The arrays of `loop.outputs`, in order.
        """


# ---------------------------------------------------------------------------------
# Liveness


def reads_after_server(a_round: Round) -> Iterator[Value]:
    """The values that a round reads after its server stage, for their liveness.

    They are read by its scatters, local stage, reductions, folds, moves and loops; some
    occur more than once.
    """
    yield from (whole for whole, _ in a_round.scatter)
    yield from a_round.local.inputs
    yield from (reduce.source for reduce in a_round.reduces)
    yield from (value for fold in a_round.folds for value in fold.inputs)
    # Bodies are plans with values of their own: only the loop's inputs are read.
    for communication in (*a_round.moves, *a_round.loops):
        yield from communication.inputs


def names_read_last(plan: Plan) -> list[list[str]]:
    """For each round, the names of the values that this round is the last to read.

    A backend can drop their arrays after the round. The last server stage of the plan
    and the plan's outputs count as later: the values that they read are in no list.

    Returns:
      One list of names for each round of the plan.
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
    """Split a list of one element for each input of a while loop into its three parts.

    Args:
      loop: The while loop.
      xs: The list, such as the values or the arrays of the inputs.

    Returns:
      `(constants of the condition, constants of the body, carried values)`, lists of
      elements of `xs`.
    """
    first, second = loop.consts[0], sum(loop.consts)
    return [*xs[:first]], [*xs[first:second]], [*xs[second:]]


def split_scan(loop: Loop, xs: Sequence[T]) -> tuple[list[T], list[T], list[T]]:
    """Split a list of one element for each input of a scan into its three parts.

    Args:
      loop: The scan.
      xs: The list, such as the values or the arrays of the inputs.

    Returns:
      `(constants, carried values, stacks)`, lists of elements of `xs`. Stacks are the
      `xs` of `lax.scan`: each step takes one entry of every stack.
    """
    first = sum(loop.consts)
    second = first + loop.carry
    return [*xs[:first]], [*xs[first:second]], [*xs[second:]]
