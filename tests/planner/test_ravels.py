"""Products and reductions of all elements of raveled partitioned values, in plans.

Covers: drjax._planner.ravels.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import drjax
from tests.helpers.plan_files import program
from tests.helpers.raising import raises

X = np.cos(np.arange(24, dtype=np.float32)).reshape(8, 3)
RAVELED = {
    "vdot": lambda y: jnp.vdot(y, jnp.cos(y)),
    "sum": lambda y: jnp.sum(y.ravel()),
    "max": lambda y: jnp.max(y.ravel()),
    "solved": lambda y: jax.scipy.sparse.linalg.cg(lambda v: 2 * v, y, maxiter=2)[0],
}


def program_of(name):
    return program(lambda x: RAVELED[name](drjax.map_fn(jnp.sin, x)))


@pytest.mark.parametrize("name", RAVELED)
def test_values(name):
    fn = program_of(name)
    np.testing.assert_allclose(drjax.jit(fn)(X), fn(X), rtol=1e-5, atol=1e-6)


def test_the_gradient_of_a_solution():
    loss = jax.grad(lambda x: jnp.sum(jnp.sin(program_of("solved")(x))))
    np.testing.assert_allclose(drjax.jit(loss)(X), loss(X), rtol=1e-5, atol=1e-6)


def test_a_product_is_one_sum_of_scalars():
    (a_round,) = drjax.make_plan(program_of("vdot"))(X).rounds
    assert [(r.op, r.source.shape) for r in a_round.reduces] == [("sum", ())]


def test_other_work_on_raveled_values_is_refused():
    for work in (lambda y: jnp.sort(y.ravel()), lambda y: y.ravel()[1:] * y.sum()):
        fn = program(lambda x, work=work: work(drjax.map_fn(jnp.sin, x)))
        raises(drjax.PlanError, "reshape at", drjax.make_plan(fn), X)
