"""A value next to its gradient is summed where the gradient is: no work is done twice.

Covers: drjax._planner.later_sums, drjax._planner.rounds.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import drjax
from benchmarks.residuals import matrix_operations
from tests.helpers.cases import checkerboard
from tests.helpers.meshes import in_mesh_of

N, SIZE = 8, 16
W = jnp.asarray(np.random.RandomState(0).randn(SIZE, SIZE), jnp.float32)
X = jnp.asarray(np.random.RandomState(1).randn(N, 32, SIZE), jnp.float32)
FORWARD = 2 * 2 * 32 * SIZE * SIZE * N
program = drjax.program(clients=N)


def loss(w, x):
    return jnp.mean(jnp.tanh(jnp.tanh(x @ w) @ w) ** 2)


def losses(w, x):
    return drjax.map_fn(loss, (drjax.broadcast(w), x))


def weights(x):
    return drjax.map_fn(lambda x: jnp.sum(x[0] ** 2), x)


def weighted(w, x):
    return drjax.reduce_weighted_mean(losses(w, x), weights(x))


def masked(w, x):
    return drjax.reduce_mean(losses(w, x), where=jnp.arange(N) % 2 == 0)


def with_metric(w, x):
    slices = losses(w, x)
    return drjax.reduce_weighted_mean(slices, weights(x)), drjax.reduce_mean(slices)


def of_mean(w, x):
    """Its gradient needs the mean in the groups: nothing waits."""
    return jnp.sin(drjax.reduce_mean(losses(w, x)))


def of_largest(w, x):
    """The losses are computed in the first round anyway."""
    slices = losses(w, x)
    return drjax.reduce_max(slices) + drjax.reduce_mean(slices)


def spread(w, x):
    """Each group needs the mean."""
    slices = losses(w, x)
    mean = drjax.broadcast(drjax.reduce_mean(slices))
    return drjax.reduce_mean(drjax.map_fn(lambda a, b: (a - b) ** 2, (slices, mean)))


# The forward passes of values and gradients, one group at a time, without the last
# product's derivative in the data.
PROGRAMS = {
    weighted: (False, 2.5),
    with_metric: (True, 2.5),
    of_mean: (False, 3.5),
    of_largest: (False, None),
    spread: (False, None),
    masked: (False, None),  # a branch
}


def derivative(fn):
    return jax.value_and_grad(program(fn), has_aux=PROGRAMS[fn][0])


@checkerboard(2, fn=list(PROGRAMS), step=[1, 3], shape=[None, {"clients": 4}])
def test_values_and_gradients(fn, step, shape):
    expected = jax.jit(derivative(fn))(W, X)
    with in_mesh_of(shape):
        result = drjax.jit(derivative(fn), groups_per_step=step)(W, X)
    close = lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-6)
    jax.tree.map(close, result, expected)


@pytest.mark.parametrize("fn", [fn for fn, (_, n) in PROGRAMS.items() if n])
def test_forward_passes(fn):
    run = drjax.jit(derivative(fn), groups_per_step=1)
    passes = matrix_operations(run.lower(W, X).compile()) / FORWARD
    assert passes == pytest.approx(PROGRAMS[fn][1])


@pytest.mark.parametrize("fn", PROGRAMS)
def test_the_number_of_rounds_stays(fn):
    plan = drjax.make_plan(derivative(fn))(W, X)
    assert len(plan.rounds) == {of_largest: 3, spread: 3}.get(fn, 2)
    if fn in (weighted, with_metric):  # of the weights
        assert len(plan.rounds[0].reduces) == 1
    run = drjax.backends.in_process.compile(plan)
    close = lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-6)
    jax.tree.map(close, run(W, X), jax.jit(derivative(fn))(W, X))


def test_ordered_effects_stay_in_order():
    seen = []

    def noted(w, x):
        slices = losses(w, x)
        jax.debug.callback(seen.append, drjax.reduce_mean(slices), ordered=True)
        return drjax.reduce_weighted_mean(slices, weights(x))

    run = drjax.jit(jax.value_and_grad(program(noted)), groups_per_step=1)
    value, _ = run(W, X)
    jax.effects_barrier()
    assert len(seen) == 1 and jnp.isfinite(value)
