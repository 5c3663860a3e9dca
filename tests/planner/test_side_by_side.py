"""Programs over two partitions in one plan.

Covers: drjax._planner.side_by_side.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import drjax
from drjax.backends import in_process, reference
from tests.helpers.cases import checkerboard
from tests.helpers.meshes import make_mesh
from tests.helpers.raising import raises

near = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
N, COHORT, D = 16, 4, 3
COHORT_OF = {"clients": COHORT}


@drjax.program(clients=N)
def evaluate(model, data):
    """Of all clients."""
    loss = lambda model, x: jnp.sum((model - x) ** 2)
    losses = drjax.map_fn(loss, (drjax.broadcast(model), data))
    return losses, drjax.reduce_mean(losses)


@drjax.program(clients=COHORT)
def average(model, data):
    step = lambda model, x: model - 0.1 * jnp.tanh(model - x)
    return drjax.reduce_mean(drjax.map_fn(step, (drjax.broadcast(model), data)))


def a_round(model, data, ids):
    """All clients, a cohort, and again all clients."""
    before, loss = evaluate(model, data)
    model = average(model, drjax.take(data, ids, partition=COHORT_OF))
    after, new = evaluate(model, data)
    return model, loss - new, after - before


def gradient(model, data, ids):
    total = lambda *args: sum(jnp.sum(jnp.cos(y)) for y in a_round(*args))
    return jax.value_and_grad(total, (0, 1))(model, data, ids)


def rounds(model, data, ids):
    def step(model, _):
        model, *rest = a_round(model, data, ids)
        return model, rest

    return jax.lax.scan(step, model, length=3)


def gradient_of_rounds(model, data, ids):
    total = lambda model, data: sum(
        jnp.sum(jnp.cos(y)) for y in jax.tree.leaves(rounds(model, data, ids))
    )
    return jax.grad(total, (0, 1))(model, data)


def other_mesh_axes(model, data, ids):
    mean = drjax.program(clients=N, mesh_axes="data")(drjax.reduce_mean)
    return evaluate(model, data), mean(data)


def only_after(model, data, ids):
    """Pointwise work between blocks of one partition, and of both."""
    losses, mean = evaluate(model, data)
    weights = jax.nn.softmax(-losses)
    moved = average(model * mean, data[:COHORT])
    return evaluate(moved, data * weights[:, None])[0] * losses


def in_a_branch(model, data, ids):
    """One branch works on all clients, another one on the cohort."""

    def total(model, data):
        slices = drjax.map_fn(jnp.sin, data, partition={"clients": N})
        cohort = drjax.take(data, ids, partition=COHORT_OF)
        branches = (
            lambda model, slices, cohort: slices * jnp.sin(slices),
            lambda model, slices, cohort: slices * average(model, cohort)[None],
        )
        slices = jax.lax.switch(ids[0] % 2, branches, model, slices, cohort)
        return jnp.sum(jnp.cos(evaluate(model, slices)[1]))

    return jax.grad(total, (0, 1))(model, data)


def between_cohorts(model, data, ids):
    """Work on slices of all clients, between blocks of the cohort."""
    losses, mean = evaluate(model, data)
    model = average(model, data[:COHORT])
    return average(model * jnp.sum(losses * model[0]), data[:COHORT] * mean)


FUNCTIONS = [
    a_round,
    gradient,
    rounds,
    gradient_of_rounds,
    other_mesh_axes,
    only_after,
    in_a_branch,
    between_cohorts,
]


def arguments():
    r = np.random.RandomState(0)
    model, data = (r.randn(*s, D).astype(np.float32) for s in ((), (N,)))
    return model, data, jnp.array([3, 1, 15, 0])


@pytest.mark.sampled
@checkerboard(2, f=FUNCTIONS)
def test_values(f, tmp_path):
    args = arguments()
    want = jax.jit(f)(*args)
    plan = drjax.make_plan(f)(*args)
    jax.tree.map(near, reference.compile(plan)(*args), want)
    jax.tree.map(near, drjax.jit(f, groups_per_step=2)(*args), want)


def test_plans(tmp_path):
    """Rounds of the other partition, in text, ledger, picture and file."""
    args = arguments()
    plan = drjax.make_plan(a_round)(*args)
    assert plan.size == N and len(plan.rounds) == 3
    (loop,) = plan.rounds[1].loops
    (body,) = loop.bodies
    assert (loop.op, body.size, len(body.rounds)) == ("program", COHORT, 1)
    assert "over partition clients:4: mean(" in str(plan)
    ledger = plan.communication(devices=2)
    inner = [m for m in ledger.messages if m.round == "2.program.1"]
    assert [(m.op, m.levels[-1].size) for m in inner] == [("broadcast", 4), ("mean", 4)]
    plan.draw(tmp_path / "plan.svg")
    plan.save(tmp_path / "plan.drjax")
    loaded = drjax.load_plan(tmp_path / "plan.drjax")
    assert str(loaded) == str(plan)
    jax.tree.map(near, reference.compile(loaded)(*args), a_round(*args))
    text = "two partitions side by side, clients:16 and clients:4"
    raises(drjax.DrjaxValueError, text, in_process.compile, plan)


def test_collectives_are_those_of_the_two_programs():
    model, data, ids = arguments()
    with jax.set_mesh(make_mesh({"clients": 4})):
        data = drjax.shard(data, partition={"clients": N})
        for f in (a_round, gradient, rounds):
            run = drjax.jit(f)
            jax.tree.map(near, run(model, data, ids), jax.jit(f)(model, data, ids))
            reports = [drjax.collectives(g)(model, data, ids) for g in (run, f)]
            assert reports[0].counts == reports[1].counts
