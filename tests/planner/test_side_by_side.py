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
from drjax.engines.core import worker
from tests.helpers.cases import checkerboard
from tests.helpers.meshes import make_mesh
from tests.helpers.plan_files import saved

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


@pytest.mark.usefixtures("leaks_unchecked")
@pytest.mark.once
@pytest.mark.sampled
@checkerboard(2, f=FUNCTIONS)
def test_values(f, tmp_path):
    args = arguments()
    want = jax.jit(f)(*args)
    plan = drjax.make_plan(f)(*args)
    jax.tree.map(near, reference.compile(plan)(*args), want)
    jax.tree.map(near, drjax.jit(f, groups_per_step=2)(*args), want)
    for each in (plan, saved(plan, tmp_path / "plan.drjax")):
        jax.tree.map(near, in_process.compile(each, block_size=3)(*args), want)


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


def test_a_failure_in_the_cohort_is_an_error():
    """Groups of the cohort are none of the plan's, which may be dropped."""

    @drjax.program(clients=N)
    def f(data, ids):
        total = drjax.reduce_sum(drjax.map_fn(jnp.sqrt, data))
        cohort = drjax.take(data, ids, partition=COHORT_OF)
        logs = drjax.map_fn(lambda x: jnp.log(x - 1), cohort, partition=COHORT_OF)
        return total, drjax.reduce_sum(logs, partition=COHORT_OF)

    _, data, ids = arguments()
    data = np.abs(data) + 2
    plan = drjax.make_plan(f)(data, ids)
    run = in_process.compile(plan, check_nans=True, min_groups=5)
    jax.tree.map(near, run(data, ids), f(data, ids))
    data[ids[2]] = 0.5  # of which the logarithm is NaN
    with pytest.raises(drjax.EngineError, match=r"2.program.0.1.* NaN") as e:
        run(data, ids)
    assert e.value.group == 2 and not run.report.dropped
    # With a dropped group, NaNs of the cohort may be its own.
    data[ids[2]] = -1
    run = in_process.compile(plan, on_error="drop", check_nans=True, min_groups=5)
    total, logs = run(data, ids)
    assert [*run.report.dropped] == [15] and np.isnan(logs).all()
    near(total, np.sqrt(np.delete(data, 15, 0)).sum(0))


def test_a_call_goes_on_in_the_cohort(tmp_path, monkeypatch):
    """What was saved of the groups of one partition is not taken for the other's."""
    args = arguments()
    plan = drjax.make_plan(rounds)(*args)
    run, real, left = in_process.compile(plan, checkpoint=tmp_path), worker.run, [5]

    def killed(*request):
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return real(*request)

    with monkeypatch.context() as m:
        m.setattr(worker, "run", killed)
        with pytest.raises(KeyboardInterrupt):
            run(*args)
    jax.tree.map(near, run(*args), jax.jit(rounds)(*args))
    assert run.report.resumed and len(run.report.stages) < 9


def test_collectives_are_those_of_the_two_programs():
    model, data, ids = arguments()
    with jax.set_mesh(make_mesh({"clients": 4})):
        data = drjax.shard(data, partition={"clients": N})
        for f in (a_round, gradient, rounds):
            run = drjax.jit(f)
            jax.tree.map(near, run(model, data, ids), jax.jit(f)(model, data, ids))
            reports = [drjax.collectives(g)(model, data, ids) for g in (run, f)]
            assert reports[0].counts == reports[1].counts
