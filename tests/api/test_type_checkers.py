"""What type checkers see: a decorated function has its own signature.

Pyright checks this file, in the gate's job `types`: the types that are asserted, and
that each line with an `ignore` is an error. As a test, it runs what it says.

Covers: drjax._api.program.
"""

# pyright: reportUnnecessaryTypeIgnoreComment=true

from collections.abc import Callable
from typing import NamedTuple, assert_type

import jax
import jax.numpy as jnp
import pytest

import drjax


class State(NamedTuple):
    weights: jax.Array
    steps: int


@drjax.program(clients=2)
def train(state: State, *, rate: float = 0.1) -> State:
    """A round."""
    return State(state.weights * (1 - rate), state.steps + 1)


class Trainer:
    @drjax.program(clients=2)
    def train(self, state: State) -> State:
        return train(state)

    @classmethod
    @drjax.program(clients=2)
    def initial(cls, size: int) -> State:
        return State(jnp.ones(size), 0)

    @staticmethod
    @drjax.program(clients=2)
    def total(state: State) -> jax.Array:
        return state.weights.sum()


START = State(jnp.ones(3), 0)


def test_a_program_has_its_own_signature():
    assert_type(train(START, rate=0.5), State)
    assert getattr(train, "partition") == drjax.Partition("clients", 2)  # noqa: B009
    assert train.__name__ == "train"
    function: Callable[[State], State] = train
    assert function(START).steps == 1
    with pytest.raises(TypeError):
        train(START, speed=0.5)  # pyright: ignore[reportCallIssue]
    with pytest.raises(AttributeError):
        train(3.0)  # pyright: ignore[reportArgumentType]


def test_methods_are_bound():
    assert_type(Trainer().train(START), State)
    assert_type(Trainer.train(Trainer(), START), State)
    assert_type(Trainer().initial(3), State)
    assert_type(Trainer.total(START), jax.Array)
    assert_type(Trainer().total(START), jax.Array)
    assert Trainer().initial(3).weights.shape == (3,)
    with pytest.raises(TypeError):
        Trainer().train()  # pyright: ignore[reportCallIssue]


def test_the_result_of_jit_has_the_signature_and_methods_of_a_jit():
    step = drjax.jit(train, groups_per_step=1)
    assert_type(step(START, rate=0.5), State)
    assert_type(step.lower(START), jax.stages.Lowered)
    tuned = drjax.jit(train, "tune")
    with pytest.raises(AttributeError):
        tuned.trace(START)  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(TypeError):
        step(START, speed=0.5)  # pyright: ignore[reportCallIssue]
    scale: float = train(START).weights  # pyright: ignore[reportAssignmentType]
    assert jnp.shape(scale) == (3,)


@drjax.program(clients=2)
def a_round(state: State, data: jax.Array) -> State:
    def local(state: State, x: jax.Array) -> State:
        return State(state.weights - x, state.steps)

    copies = drjax.broadcast(state)
    trained = assert_type(drjax.map_fn(local, (copies, data)), State)
    assert_type(drjax.gather(trained), State)
    assert_type(drjax.reduce_max(data), jax.Array)
    assert_type(drjax.take(data, [1, 0]), jax.Array)
    return assert_type(drjax.reduce_mean(trained), State)


def test_blocks_keep_the_type_of_a_tree():
    assert a_round(START, jnp.ones((2, 3))).weights.sum() == 0
