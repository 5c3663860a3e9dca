"""The interpreter of plans: the loop over rounds that backends share.

    for each round: server stage -> scatter -> groups, reductions -> loops
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

from drjax.plan import Loop, Plan, Round, Stage, Value


class Environment:
    """The arrays of one run of a plan, by the names of the plan's values."""

    def __init__(self) -> None:
        self.arrays: dict[str, Any] = {}

    def __contains__(self, value: Value) -> bool:
        return value.name in self.arrays

    def __getitem__(self, value: Value) -> Any:
        return self.arrays[value.name]

    def __setitem__(self, value: Value, array: Any) -> None:
        self.arrays[value.name] = array

    def read(self, values: Iterable[Value]) -> list:
        """The arrays of these values, in order."""
        return [self[value] for value in values]

    def write(self, values: Iterable[Value], arrays: Iterable) -> None:
        """Set the arrays of these values."""
        for value, array in zip(values, arrays, strict=True):
            self[value] = array

    def updated(self, arrays: dict[str, Any]) -> "Environment":
        """A copy, with more arrays by name; this one stays as it is."""
        copy = Environment()
        copy.arrays = self.arrays | arrays
        return copy


class PlanInterpreter(abc.ABC):
    """Runs a plan round by round: `interpreter(inputs)` returns its outputs, flat.

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
            for whole, slices in a_round.scatter:
                env[slices] = self.scatter(slices, env[whole])
            self.run_groups(index, env)
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
        """Write the outputs of a server stage."""

    @abc.abstractmethod
    def scatter(self, slices: Value, whole: Any) -> Any:
        """The array of a partitioned value, from the global array of all slices."""

    @abc.abstractmethod
    def run_groups(self, index: int, env: Environment) -> None:
        """Write the results of a round's reductions, and slices that are read later.

        Args:
          index: The index of the round in the plan, from 0.
          env: The values so far.
        """

    @abc.abstractmethod
    def run_loop(self, index: int, loop: Loop, inputs: list) -> list:
        """The outputs of a loop; `index`: that of its round."""


# ---------------------------------------------------------------------------------
# Liveness


def reads_after_server(a_round: Round) -> Iterator[Value]:
    """The values that a round reads once its server stage is done."""
    yield from (whole for whole, _ in a_round.scatter)
    yield from a_round.local.inputs
    yield from (reduce.source for reduce in a_round.reduces)
    for loop in a_round.loops:
        yield from loop.inputs


def names_read_last(plan: Plan) -> list[list[str]]:
    """For each round the names of the values that no later round reads.

    What the last server stage reads, or the plan returns, is in none of the lists.
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
    """`(constants of the condition, constants of the body, carried values)`.

    Args:
      loop: A while loop.
      xs: One item for each of its inputs, such as its array.
    """
    first, second = loop.consts[0], sum(loop.consts)
    return [*xs[:first]], [*xs[first:second]], [*xs[second:]]


def split_scan(loop: Loop, xs: Sequence[T]) -> tuple[list[T], list[T], list[T]]:
    """`(constants, carried values, stacks)`; see `split_while`."""
    first = sum(loop.consts)
    second = first + loop.carry
    return [*xs[:first]], [*xs[first:second]], [*xs[second:]]
