"""The demand of a secure sum holds for derivatives: which sums of a plan are secure.

Covers: drjax._planner.secure_cotangents.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import drjax
from tests.helpers.raising import raises

N = 4
X = np.random.RandomState(0).rand(N, 3).astype(np.float32)
M = np.ones(3, np.float32)


@drjax.program(clients=N)
def loss(model, x):
    """A secure sum of the groups' losses, of three groups at least."""
    cube = lambda m, x: jnp.sum((m * x - 1) ** 3)
    y = drjax.map_fn(cube, (drjax.broadcast(model), x))
    return drjax.reduce_sum(y, secure=True, min_groups=3)


def demands(fn, *args):
    """Of each sum in the plan, at any depth of loops, how secure it is."""
    return sorted(
        r.secure
        for plan in _plans(drjax.make_plan(fn)(*args))
        for a_round in plan.rounds
        for r in a_round.reduces
    )


def _plans(plan):
    yield plan
    for loop in plan.loops():
        yield from loop.bodies


def two(model, x):
    """The same twice, by server steps on the gradient."""
    step = lambda m, _: (m - 0.1 * jax.grad(loss)(m, x), None)
    return jax.lax.scan(step, model, length=2)[0]


def train(model, x):
    """A loss after a step that is itself derived: MAML over a secure sum."""
    return loss(model - 0.1 * jax.grad(loss)(model, x), x)


def while_loop(model, x):
    step = lambda s: (s[0] + 1, s[1] - 0.1 * jax.grad(loss)(s[1], x))
    return jax.lax.while_loop(lambda s: s[0] < 3, step, (0, model))[1]


def branches(model, x):
    step = lambda m: m - 0.1 * jax.grad(loss)(m, x)
    return jax.lax.cond(model[0] > 0, step, lambda m: m, model)


hvp = lambda m, x: jax.jvp(jax.grad(loss), (m, x), (m, x))[1]
double = lambda m, x: jax.grad(lambda m: jax.grad(loss)(m, x) @ m)(m)


@pytest.mark.parametrize(
    "fn",
    [
        loss, jax.grad(loss), jax.value_and_grad(loss), jax.hessian(loss), hvp, double,
        two, train, jax.grad(train), while_loop, branches, jax.jit(jax.grad(loss)),
        jax.grad(jax.checkpoint(loss)), drjax.jit(jax.grad(loss)),
        jax.grad(lambda m, x: two(m, x).sum()),
        lambda m, x: jax.vmap(jax.grad(loss), (0, None))(jnp.stack([m, 2 * m]), x),
        lambda m, x: drjax.program(clients=N)(drjax.reduce_mean)(
            jax.grad(loss, argnums=1)(m, x)
        ),
    ],
)  # fmt: skip
def test_all_sums_of_a_derivative_are_secure(fn):
    of_sums = demands(fn, M, X)
    assert of_sums and {*of_sums} == {3}


def test_sums_of_other_values_stay_plain():
    @drjax.program(clients=N)
    def both(model, x):
        count = drjax.reduce_sum(drjax.map_fn(lambda x: x > 0.5, x))
        plain = drjax.map_fn(jnp.vdot, (drjax.broadcast(model), x))
        # Of an equation without operands, too.
        index = drjax.reduce_sum(drjax.partition_index())
        return loss(model, x), (count, drjax.reduce_sum(plain), index)

    assert demands(jax.value_and_grad(both, has_aux=True), M, X) == [0, 0, 0, 3, 3]
    plain = lambda m, x: both(m, x)[1][1]
    assert demands(jax.grad(plain), M, X) == [0]


def test_the_largest_demand_holds():
    @drjax.program(clients=N)
    def twice(model, x):
        y = drjax.map_fn(lambda m, x: jnp.sin(m * x), (drjax.broadcast(model), x))
        few = drjax.reduce_sum(y, secure=True, min_groups=2)
        return jnp.sum(few) + jnp.sum(
            drjax.reduce_sum(y, secure=True, min_groups=4) ** 2
        )

    plan = drjax.make_plan(jax.grad(twice))(M, X)
    assert plan.rounds[-1].reduces[-1].secure == 4


def test_cotangents_that_leave_their_group_otherwise_are_refused():
    @drjax.program(clients=N)
    def largest(model, x):
        return drjax.reduce_max(jax.grad(loss, argnums=1)(model, x))

    text = "is of cotangents of a secure sum, of which no process but a group's own may"
    raises(drjax.PlanError, text, drjax.make_plan(largest), M, X)
    # In one process it runs: no one else is there.
    np.testing.assert_allclose(drjax.jit(largest)(M, X), largest(M, X), rtol=1e-6)
    folded = lambda m, x: drjax.reduce(
        jnp.maximum, jax.grad(loss, argnums=1)(m, x), jnp.full(3, -jnp.inf)
    )
    raises(
        drjax.PlanError, text, drjax.make_plan(drjax.program(clients=N)(folded)), M, X
    )


def test_transposing_twice_gives_the_sum():
    total = drjax.program(clients=N)(lambda x: drjax.reduce_sum(x, secure=True))
    once = lambda ct: jax.linear_transpose(total, X)(ct)[0]
    (eqn,) = jax.make_jaxpr(once)(M).eqns
    assert eqn.primitive is drjax.primitives.broadcast_p and eqn.params["secure"] == 2
    twice = lambda x: jax.linear_transpose(once, M)(x)[0]
    (eqn,) = jax.make_jaxpr(twice)(X).eqns
    assert eqn.primitive is drjax.primitives.reduce_sum_p and eqn.params["secure"] == 2


def test_plans_with_the_demand_compute_the_same(tmp_path):
    for fn in (jax.grad(train), two):
        plan = drjax.make_plan(fn)(M, X)
        plan.save(tmp_path / "plan.drjax")
        for each in (plan, drjax.load_plan(tmp_path / "plan.drjax")):
            run = drjax.backends.reference.compile(each)
            np.testing.assert_allclose(run(M, X), fn(M, X), rtol=2e-5)
