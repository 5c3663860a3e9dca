"""Algorithms that move and combine groups: values, plans, gradients and bytes.

Each is a program in its natural form, next to its meaning in `jax.numpy`.

Covers: drjax._planner.make_plan, drjax._api.moves, drjax._api.column_reductions,
drjax._api.fold, drjax._api.collective_options.
"""

import collections
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import drjax
from drjax.backends import in_process, reference
from tests.helpers.cases import checkerboard
from tests.helpers.meshes import make_mesh

N, DEVICES, D = 32, 8, 4096
POPULATION = 512
SLICE = 4 * D  # bytes
RATE = 0.1

clients = drjax.program(clients=N)
near = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)


def gradient(model, x):
    """Of a loss of one group."""
    return jnp.tanh(model - x)


def descend(model, x):
    return model - RATE * gradient(model, x)


def each(fn):
    """A function of a model and the data of one group, of those of all groups."""
    return jax.vmap(fn, (None, 0))


# ---------------------------------------------------------------------------------
# Federated averaging of a sample of the clients


@clients
def average(model, x):
    return drjax.reduce_mean(drjax.map_fn(descend, (drjax.broadcast(model), x)))


def sampled(model, population, ids):
    return average(model, population[ids])


@clients
def taken(model, population, ids):
    return average(model, drjax.take(population, ids))


def sampled_plain(model, population, ids):
    return each(descend)(model, population[ids]).mean(0)


# ---------------------------------------------------------------------------------
# SCAFFOLD (Karimireddy et al., 2020), with the control variates of all clients


def scaffold_client(model, control, own_control, x):
    own = model - RATE * (gradient(model, x) - own_control + control)
    new = own_control - control + (model - own) / RATE
    return own - model, new - own_control, new


@clients
def scaffold(model, control, controls, population, ids):
    own, x = drjax.take((controls, population), ids)
    shared = drjax.broadcast((model, control))
    moves, changes, new = drjax.map_fn(scaffold_client, (*shared, own, x))
    move, change = drjax.reduce_mean((moves, changes))
    control += change * N / POPULATION
    return model + move, control, drjax.put(new, ids, into=controls)


def scaffold_plain(model, control, controls, population, ids):
    work = jax.vmap(scaffold_client, (None, None, 0, 0))
    moves, changes, new = work(model, control, controls[ids], population[ids])
    control += changes.mean(0) * N / POPULATION
    return model + moves.mean(0), control, controls.at[ids].set(new)


# ---------------------------------------------------------------------------------
# Gossip on a ring (Lian et al., 2017): no server


@clients
def gossip(models, x):
    neighbors = drjax.shift(models, 1), drjax.shift(models, -1)
    mix = lambda left, own, right, x: descend((left + own + right) / 3, x)
    return drjax.map_fn(mix, (neighbors[0], models, neighbors[1], x))


def gossip_plain(models, x):
    left, right = jnp.roll(models, 1, 0), jnp.roll(models, -1, 0)
    return descend((left + models + right) / 3, x)


# ---------------------------------------------------------------------------------
# Robust aggregation (Yin et al., 2018; Blanchard et al., 2017)


def middle(c):
    """The mean without the quarters of the largest and of the smallest numbers."""
    return jnp.sort(c)[N // 4 : -N // 4].mean()


def robust(reduction):
    @clients
    def step(model, x):
        gradients = drjax.map_fn(gradient, (drjax.broadcast(model), x))
        return model - RATE * drjax.reduce_columns(reduction, gradients)

    return step


def robust_plain(reduction):
    columns = jax.vmap(reduction, 1)
    return lambda model, x: model - RATE * columns(each(gradient)(model, x))


def krum_scores(gram, faulty=5):
    """The sum of squared distances to the nearest other groups, of each group."""
    norms = jnp.diagonal(gram)
    distances = norms[:, None] + norms[None] - 2 * gram
    return jnp.sort(distances)[:, 1 : N - faulty - 1].sum(1)


@clients
def krum(model, x):
    gradients = drjax.map_fn(gradient, (drjax.broadcast(model), x))
    gram = drjax.reduce_columns(lambda c: jnp.outer(c, c), gradients, sum=True)
    return model - RATE * drjax.select(gradients, jnp.argmin(krum_scores(gram)))


def krum_plain(model, x):
    gradients = each(gradient)(model, x)
    scores = krum_scores(gradients @ gradients.T)
    return model - RATE * gradients[jnp.argmin(scores)]


# ---------------------------------------------------------------------------------
# Sums in int8, with error feedback (Seide et al., 2014)


def as_int8(y):
    """What int8 codes of blocks of 256 numbers hold of them."""
    blocks = y.reshape(-1, 256)
    scale = jnp.abs(blocks).max(1, keepdims=True) / 127
    return (jnp.round(blocks / scale) * scale).reshape(y.shape)


@clients
def feedback(model, errors, x):
    def work(model, error, x):
        target = gradient(model, x) + error
        return as_int8(target), target - as_int8(target)

    sent, errors = drjax.map_fn(work, (drjax.broadcast(model), errors, x))
    return model - RATE * drjax.reduce_mean(sent, wire="int8"), errors


def feedback_plain(model, errors, x):
    target = each(gradient)(model, x) + errors
    sent = jax.vmap(as_int8)(target)
    return model - RATE * sent.mean(0), target - sent


# ---------------------------------------------------------------------------------
# Population-based training (Jaderberg et al., 2017)


def survivors(losses):
    """For each member the one it continues: the worst quarter continues the best."""
    order, quarter = jnp.argsort(losses), N // 4
    return jnp.arange(N).at[order[-quarter:]].set(order[:quarter])


def train_member(model, rate, x):
    model = model - rate * gradient(model, x)
    return model, jnp.mean((model - x) ** 2)


@clients
def evolve(models, rates, x):
    models, losses = drjax.map_fn(train_member, (models, rates, x))
    models, rates = drjax.take((models, rates), survivors(drjax.gather(losses)))
    perturb = lambda rate, i: rate * jnp.where(i % 2 == 0, 0.8, 1.2)
    return models, drjax.map_fn(perturb, (rates, drjax.partition_index()))


@clients
def evolve_indexed(models, rates, x):
    """The same with the indexing of `jax.numpy`."""
    models, losses = drjax.map_fn(train_member, (models, rates, x))
    index = survivors(drjax.gather(losses))
    return models[index], rates[index] * jnp.where(jnp.arange(N) % 2 == 0, 0.8, 1.2)


def evolve_plain(models, rates, x):
    models, losses = jax.vmap(train_member)(models, rates, x)
    index = survivors(losses)
    return models[index], rates[index] * jnp.where(jnp.arange(N) % 2 == 0, 0.8, 1.2)


# ---------------------------------------------------------------------------------
# The best of a sweep over learning rates


@clients
def sweep(model, rates, x):
    models, losses = drjax.map_fn(train_member, (drjax.broadcast(model), rates, x))
    better = lambda a, b: jax.tree.map(
        lambda x, y: jnp.where(a["loss"] <= b["loss"], x, y), a, b
    )
    states = {"loss": losses, "rate": rates, "model": models}
    init = {"loss": jnp.inf, "rate": 0.0, "model": 0.0}
    return drjax.reduce(better, states, init)


def sweep_plain(model, rates, x):
    models, losses = jax.vmap(train_member, (None, 0, 0))(model, rates, x)
    best = jnp.argmin(losses)
    return {"loss": losses[best], "rate": rates[best], "model": models[best]}


# ---------------------------------------------------------------------------------
# A server whose optimizer is divided over the devices (as ZeRO: Rajbhandari et al.)


def momentum_step(state, mean):
    velocity = 0.9 * state["velocity"] + mean
    return {"model": state["model"] - RATE * velocity, "velocity": velocity}


@clients
def sharded_server(state, x):
    gradients = drjax.map_fn(gradient, (drjax.broadcast(state["model"]), x))
    return momentum_step(state, drjax.reduce_mean(gradients, result="sharded"))


def sharded_server_plain(state, x):
    return momentum_step(state, each(gradient)(state["model"], x).mean(0))


# ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Algorithm:
    """A program, what it means, its arguments, and the bytes of its collectives.

    Attributes:
      arguments: Of each argument `model` (a global array), `groups`, `population`,
        `ids`, `rates`, or a tree of these.
      bytes: By kind of collective, of the results on one of 8 devices, for n = 32
        groups of d = 4096 float32 numbers.
    """

    program: Callable
    plain: Callable
    arguments: tuple[Any, ...]
    bytes: dict[str, int]


COHORT = N * SLICE
COLUMNS = COHORT // DEVICES  # each device has all groups of its share of coordinates
ALGORITHMS = {
    "client sampling": Algorithm(
        sampled, sampled_plain, ("model", "population", "ids"),
        {"all-reduce": COHORT + SLICE, "all-gather": 128},
    ),
    "client sampling by take": Algorithm(
        taken, sampled_plain, ("model", "population", "ids"),
        {"reduce-scatter": COHORT // DEVICES, "all-reduce": SLICE},
    ),
    "SCAFFOLD": Algorithm(
        scaffold, scaffold_plain,
        ("model", "model", "population", "population", "ids"),
        {"reduce-scatter": 2 * COHORT // DEVICES, "all-reduce": 2 * SLICE,
         "all-gather": COHORT},
    ),
    "gossip": Algorithm(
        gossip, gossip_plain, ("groups", "groups"), {"collective-permute": 2 * SLICE}
    ),
    "median": Algorithm(
        robust(jnp.median), robust_plain(jnp.median), ("model", "groups"),
        {"all-to-all": COLUMNS},
    ),
    "trimmed mean": Algorithm(
        robust(middle), robust_plain(middle), ("model", "groups"),
        {"all-to-all": COLUMNS},
    ),
    "Krum": Algorithm(
        krum, krum_plain, ("model", "groups"),
        {"all-to-all": COLUMNS, "all-reduce": 4 * N * N + SLICE},
    ),
    "error feedback in int8": Algorithm(
        feedback, feedback_plain, ("model", "groups", "groups"),
        {"all-to-all": D + 4 * D // 256, "all-gather": D + 4 * D // 256},
    ),
    "population-based training": Algorithm(
        evolve, evolve_plain, ("groups", "rates", "groups"),
        {"all-gather": 4 * N, "reduce-scatter": (COHORT + 4 * N) // DEVICES},
    ),
    "population-based training, indexed": Algorithm(
        evolve_indexed, evolve_plain, ("groups", "rates", "groups"),
        {"all-gather": 4 * N, "reduce-scatter": (COHORT + 4 * N) // DEVICES},
    ),
    "best of a sweep": Algorithm(
        sweep, sweep_plain, ("model", "rates", "groups"),
        {"all-gather": DEVICES * (SLICE + 8)},
    ),
    "sharded server": Algorithm(
        sharded_server, sharded_server_plain,
        ({"model": "shard", "velocity": "shard"}, "groups"),
        {"reduce-scatter": SLICE // DEVICES, "all-gather": SLICE},
    ),
}  # fmt: skip

SHAPES = {
    "model": (), "shard": (), "groups": (N,), "population": (POPULATION,),
    "rates": (N,),
}  # fmt: skip


def arguments(name: str, d: int = D) -> tuple:
    """The arguments of an algorithm, with d numbers in each slice."""
    r = np.random.RandomState(0)

    def make(kind):
        if kind == "ids":
            return r.permutation(POPULATION)[:N].astype(np.int32)
        if kind == "rates":
            return r.uniform(0.05, 0.5, N).astype(np.float32)
        return r.randn(*SHAPES[kind], d).astype(np.float32)

    return jax.tree.map(make, ALGORITHMS[name].arguments)


def placed(name: str) -> tuple:
    """The arguments on the mesh: groups and populations are divided over it."""

    def place(kind, x):
        spec = jax.P() if kind in ("model", "ids") else jax.P("clients")
        return jax.device_put(x, jax.NamedSharding(jax.sharding.get_mesh(), spec))

    return jax.tree.map(place, ALGORITHMS[name].arguments, arguments(name))


@pytest.mark.sampled
@checkerboard(2, name=ALGORITHMS)
def test_values_and_bytes(name):
    one = ALGORITHMS[name]
    want = jax.jit(one.plain)(*arguments(name))
    with jax.set_mesh(make_mesh({"clients": DEVICES})):
        args = placed(name)
        run = drjax.jit(one.program)
        report = drjax.collectives(run)(*args)
        result = run(*args)
    tolerance = 2e-3 if "int8" in name else 1e-5
    jax.tree.map(functools.partial(near, atol=tolerance), result, want)
    results = collections.Counter()
    for each in report.collectives:
        results[each.kind] += each.result_bytes
    assert results == one.bytes


def gradient_of(fn: Callable) -> Callable:
    """Value and gradient of a loss of all results, in all arguments but indices."""

    def loss(inexact, others):
        args = [a if b is None else b for a, b in zip(inexact, others, strict=True)]
        out = fn(*args)
        return sum(jnp.sum(jnp.cos(y)) for y in jax.tree.leaves(out)), out

    def both(*args):
        is_index = [getattr(a, "dtype", None) == jnp.int32 for a in args]
        split = lambda keep: [
            a if flag is keep else None for a, flag in zip(args, is_index, strict=True)
        ]
        return jax.value_and_grad(loss, has_aux=True)(split(False), split(True))

    return both


@pytest.mark.once
@pytest.mark.sampled
@checkerboard(3, name=ALGORITHMS)
def test_plans_and_gradients(name):
    one, args = ALGORITHMS[name], arguments(name, 256)
    both = gradient_of(one.program)
    want = jax.jit(gradient_of(one.plain))(*args)
    plan = drjax.make_plan(both)(*args)
    jax.tree.map(near, reference.compile(plan)(*args), want)
    jax.tree.map(near, drjax.jit(both, groups_per_step=2)(*args), want)
    # On an engine without derivatives, whose stages take as long to export again.
    # Of one group, an engine encodes what it has rounded to these codes: exactly.
    size = 1 if "int8" in name else 9
    run = in_process.compile(drjax.make_plan(one.program)(*args), block_size=size)
    jax.tree.map(near, run(*args), want[0][1])
