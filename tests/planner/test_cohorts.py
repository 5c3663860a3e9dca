"""Cohorts of a population: `data[ids]` outside of programs, in plans.

Covers: drjax._planner.implicit_communication,
drjax._planner.partitioning.propagation_rules.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import drjax
from drjax.backends import in_process, reference
from tests.helpers.cases import checkerboard
from tests.helpers.compiled import temp_bytes
from tests.helpers.meshes import EXPLICIT, make_mesh

N, COHORT, D = 40, 8, 6
IDS = np.array([3, 39, 3, 17, 0, 8, 21, 39])
SAMPLES = {
    "indexed": lambda data, ids: data[ids],
    "taken": lambda data, ids: jnp.take(data, ids, axis=0),
    "clipped": lambda data, ids: jnp.take(data, 2 * ids, axis=0, mode="clip"),
    "along another axis": lambda data, ids: data.T[:, ids].T,
}
near = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)


@drjax.program(clients=COHORT)
def a_round(s, x):
    y = drjax.map_fn(lambda x, s: jnp.tanh(x * s), (x, drjax.broadcast(s)))
    return s + drjax.reduce_mean(y)


def derivatives(sample):
    """Value, gradient, and the derivative of the gradient, of a loss of a cohort."""

    def loss(s, data, ids):
        return jnp.sum(a_round(s, sample(data, ids)) ** 2)

    grad = jax.grad(loss, (0, 1))

    def second(s, data, ids):
        return jax.jvp(lambda s, data: grad(s, data, ids), (s, data), (s, data))[1]

    return lambda *args: (loss(*args), grad(*args), second(*args))


def arguments():
    data = np.random.RandomState(0).randn(N, D).astype(np.float32)
    return np.linspace(0.5, 1, D, dtype=np.float32), data, IDS


@pytest.mark.sampled
@checkerboard(3, name=SAMPLES)
def test_values_and_derivatives(name):
    f = derivatives(SAMPLES[name])
    want = jax.jit(f)(*arguments())
    plan = drjax.make_plan(f)(*arguments())
    jax.tree.map(near, reference.compile(plan)(*arguments()), want)
    jax.tree.map(near, in_process.compile(plan, block_size=3)(*arguments()), want)
    jax.tree.map(near, drjax.jit(f, groups_per_step=2)(*arguments()), want)


@pytest.mark.parametrize(
    "shape, kind", [({"clients": 4}, None), ({"clients": 2, "model": 2}, EXPLICIT)]
)
def test_on_meshes(shape, kind):
    f = derivatives(SAMPLES["indexed"])
    want = jax.jit(f)(*arguments())
    mesh = make_mesh(shape, kind) if kind else make_mesh(shape)
    with jax.set_mesh(mesh):
        jax.tree.map(near, drjax.jit(f, groups_per_step=1)(*arguments()), want)


def test_the_plan_scatters_the_cohort():
    """No group gets the population; in the ledger there is one slice for each."""
    f = lambda s, data, ids: a_round(s, data[ids])
    plan = drjax.make_plan(f)(*arguments())
    (first,) = plan.rounds
    assert [v.name for v in first.broadcast] == ["s"]
    assert plan.communication().down() == 2 * D * 4
    # An array that is smaller than what is read of it goes to the groups, as before.
    few = drjax.make_plan(f)(np.ones(D), np.ones((3, D)), IDS % 3)
    assert "data" in [v.name for v in few.rounds[0].broadcast]


def test_resident_data_stays_where_it_is():
    """Bytes and memory are those of the cohort, as jax.jit's, not of the population."""
    n, d = 4096, 512
    f = lambda s, data, ids: a_round(s, data[ids])
    mesh = make_mesh({"clients": 8})
    with jax.set_mesh(mesh):
        data = jax.device_put(np.ones((n, d), "f"), NamedSharding(mesh, P("clients")))
        args = np.ones(d, np.float32), data, IDS
        for fn in (f, jax.value_and_grad(lambda *args: f(*args).sum(), 0)):
            run = drjax.jit(fn)
            moved = sum(
                c.result_bytes for c in drjax.collectives(run)(*args).collectives
            )
            assert moved <= 2 * COHORT * d * 4
            assert temp_bytes(run, *args) <= 4 * COHORT * d * 4
        near(drjax.jit(f)(*args), f(*args))
