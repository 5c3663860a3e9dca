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
from collections.abc import Iterable
from typing import Any, ClassVar, TypeAlias

from drjax._plan import uses
from drjax.plan import (
    Broadcast,
    Fold,
    Loop,
    Move,
    Plan,
    Reduce,
    Rules,
    Scatter,
    Stage,
    Value,
)

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

    `rules` is the backend's table, based on `RULES`: it runs a step, as
    `rules(step, interpreter, index, env)`, by reading from `env` and writing to it.
    """

    plan: Plan
    rules: ClassVar[Rules[None]]

    def __call__(self, inputs: Iterable[BackendArray]) -> list[BackendArray]:
        plan, env = self.plan, Environment()
        env.write(plan.inputs, inputs)
        read_last = iter(uses.read_last(plan))
        for index, a_round in enumerate(plan.rounds):
            for step in a_round.steps:
                self.rules(step, self, index, env)
                for name in next(read_last):
                    # Not all are there: a backend need not keep what it only combines.
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
        the reductions and folds, unless the backend has rules of its own for these, and
        the slices of those outputs of the stage that are read after it.
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
        """Run a loop of a round, whose bodies are plans; return its outputs."""


# -------------------------------------------------------------------------------------
# The rules that backends share

RULES: Rules[None] = Rules("The interpreter of plans")


@RULES.rule(Stage)
def _stage(stage: Stage, run: PlanInterpreter, index: int, env: Environment) -> None:
    if stage.local:
        run.run_groups(index, env)
    else:
        run.run_server(stage, env)


@RULES.rule(Broadcast, Reduce, Fold)
def _with_the_groups(*_: Any) -> None:
    """Nothing: the groups take copies, and are combined where they run."""


@RULES.rule(Scatter)
def _scatter(step: Scatter, run: PlanInterpreter, index: int, env: Environment) -> None:
    env[step.result] = run.scatter(step.result, env[step.source])


@RULES.rule(Move)
def _move(step: Move, run: PlanInterpreter, index: int, env: Environment) -> None:
    env[step.result] = run.move(step, *env.read(step.inputs))


@RULES.rule(Loop)
def _loop(loop: Loop, run: PlanInterpreter, index: int, env: Environment) -> None:
    env.write(loop.outputs, run.run_loop(index, loop, env.read(loop.inputs)))
