"""Algorithms whose groups keep state from call to call."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import drjax

D = 6  # of the model


def gradient(model, x, y):
    return x.T @ (x @ model - y) / len(y)


def scaffold(n, steps=3, rate=0.1):
    """SCAFFOLD (Karimireddy et al., 2020): client i keeps its control variate c_i."""

    @drjax.program(clients=n)
    def scaffold(model, control, controls, data):
        def work(model, control, c, x, y):
            step = lambda m, _: (m - rate * (gradient(m, x, y) - c + control), None)
            own, _ = jax.lax.scan(step, model, length=steps)
            new = c - control + (model - own) / (steps * rate)
            return own - model, new - c, new

        shared = drjax.broadcast((model, control))
        moves, changes, controls = drjax.map_fn(work, (*shared, controls, *data))
        move, change = drjax.reduce_mean((moves, changes))
        return model + move, control + change, controls

    return scaffold


SCAFFOLD_KEEP = {2: 2}


def diloco(n, steps=3):
    """DiLoCo (Douillard et al., 2023): worker i keeps the state of its inner Adam."""

    @drjax.program(workers=n)
    def diloco(state, data):
        def adam(carry, _, x, y):
            model, inner = carry
            g = gradient(model, x, y)
            m = 0.9 * inner["m"] + 0.1 * g
            v = 0.99 * inner["v"] + 0.01 * g * g
            model = model - 0.05 * m / (jnp.sqrt(v) + 1e-3)
            return (model, {"m": m, "v": v, "count": inner["count"] + 1}), None

        def work(model, inner, x, y):
            step = lambda carry, t: adam(carry, t, x, y)
            (own, inner), _ = jax.lax.scan(step, (model, inner), length=steps)
            return model - own, inner

        model = state["model"]
        args = drjax.broadcast(model), state["inner"], *data
        moves, inner = drjax.map_fn(work, args)
        momentum = 0.9 * state["momentum"] + drjax.reduce_mean(moves)
        model = model - 0.7 * momentum
        loss = jnp.sum(model**2)
        return {"model": model, "momentum": momentum, "inner": inner}, loss

    return diloco


DILOCO_KEEP = {(0, "inner"): (0, "inner")}


def personalization(n, steps=3, rate=0.01):
    """FedPer (Arivazhagan et al., 2019): client i keeps its head."""

    @drjax.program(clients=n)
    def personalization(base, heads, data):
        def work(base, head, x, y):
            def step(layers, _):
                base, head = layers
                g = gradient(base * head, x, y)
                return (base - rate * g * head, head - rate * g * base), None

            return jax.lax.scan(step, (base, head), length=steps)[0]

        bases, heads = drjax.map_fn(work, (drjax.broadcast(base), heads, *data))
        return drjax.reduce_mean(bases), heads

    return personalization


PERSONALIZATION_KEEP = {1: 1}


def data_of(group):
    """The data of one group: x and y."""
    random = np.random.default_rng(group)
    x = random.normal(size=(8, D)).astype(np.float32)
    return x, (x @ np.arange(D) + group).astype(np.float32)


def data(n):
    """The data of n groups, stacked."""
    return tuple(
        np.stack(column) for column in zip(*map(data_of, range(n)), strict=True)
    )


def scaffold_start(n):
    zeros = np.zeros(D, np.float32)
    return zeros, zeros, np.zeros((n, D), np.float32)


def diloco_start(n):
    zeros = np.zeros((n, D), np.float32)
    inner = {"m": zeros, "v": zeros + 0, "count": np.zeros(n, np.int32)}
    model = np.zeros(D, np.float32)
    return {"model": model, "momentum": model, "inner": inner}


def personalization_start(n):
    return np.ones(D, np.float32), np.zeros((n, D), np.float32)


def scaffold_plan(n):
    return drjax.make_plan(scaffold(n))(*scaffold_start(n), data(n))


def diloco_plan(n):
    return drjax.make_plan(diloco(n))(diloco_start(n), data(n))


def personalization_plan(n):
    return drjax.make_plan(personalization(n))(*personalization_start(n), data(n))


def run_scaffold(run, start, rounds, data) -> Any:
    """The state after some calls of `run`."""
    state = start
    for _ in range(rounds):
        state = run(*state, data)
    return state


def run_diloco(run, start, rounds, data) -> Any:
    """The state after some calls of `run`."""
    state = start
    for _ in range(rounds):
        state, _ = run(state, data)
    return state


# ---------------------------------------------------------------------------------
# On clients, who begin by themselves


def first_control(group):
    """The control variate of a client before the first round."""
    return np.random.default_rng(1000 + group).normal(size=D).astype(np.float32)


def inner_zeros():
    """One worker's state of DiLoCo before the first round."""
    zeros = np.zeros(D, np.float32)
    return {"m": zeros, "v": zeros, "count": np.int32(0)}


def zeros(group):
    """The head of a client before the first round."""
    return np.zeros(D, np.float32)


class Algorithm(NamedTuple):
    """An algorithm and how it is called."""

    plan: Callable  # for n groups
    start: Callable  # the state of n groups, with what they keep
    run: Callable
    keep: dict
    first: Callable  # what a client has before the first round, by its group index


ALGORITHMS = {
    "scaffold": Algorithm(
        scaffold_plan, scaffold_start, run_scaffold, SCAFFOLD_KEEP, first_control
    ),
    "diloco": Algorithm(
        diloco_plan, diloco_start, run_diloco, DILOCO_KEEP, lambda group: inner_zeros()
    ),
    "personalization": Algorithm(
        personalization_plan,
        personalization_start,
        run_scaffold,
        PERSONALIZATION_KEEP,
        zeros,
    ),
}


def kept_of(state):
    """What the groups keep."""
    return state["inner"] if isinstance(state, dict) else state[-1]


def with_kept(state, kept):
    """The state with something else in the place of what the groups keep."""
    if isinstance(state, dict):
        return state | {"inner": kept}
    return *state[:-1], kept


def on_clients(name, clients) -> Any:
    """For a plan by its name: how to run it, the state to begin with, and `keep`.

    `clients` is the argument of an engine whose clients have the groups' data.
    """
    algorithm = ALGORITHMS[name]
    start = with_kept(algorithm.start(1), clients)
    return algorithm.run, start, algorithm.keep


def without_kept(state):
    """The arrays of a state, without handles."""
    leaves = jax.tree.leaves(state)
    return [np.asarray(x) for x in leaves if not hasattr(x, "fetch")]


def expected_on_clients(name, n, rounds):
    """By the reference backend: the arrays of the server, and the slices that stay.

    Returns:
      `(arrays, slices)`; the slices are a list, for each round, of arrays `[n, D]`.
    """
    from drjax.backends import reference

    algorithm = ALGORITHMS[name]
    state: Any = algorithm.start(n)
    compiled, slices = reference.compile(algorithm.plan(n)), []
    if name == "scaffold":
        slices.append(np.stack([*map(first_control, range(n))]))
        state = with_kept(state, slices[0])
    for _ in range(rounds):
        state = algorithm.run(compiled, state, 1, data(n))
        leaves = jax.tree.leaves(kept_of(state))
        slices += [np.asarray(x) for x in leaves if x.ndim == 2]
    return without_kept(with_kept(state, None)), slices
