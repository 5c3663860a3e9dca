"""What equations outside mapped functions mean for groups: sums and single rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import drjax
from drjax.backends import reference

N = 4
program = drjax.program(clients=N)
X = jnp.arange(12.0).reshape(N, 3) / 7


@program
def scalar(g, x):
    return drjax.reduce_sum(drjax.map_fn(jnp.sin, x) * jnp.sum(g)).sum()


@program
def vector(g, x):
    return drjax.reduce_sum(drjax.map_fn(jnp.sin, x) * g[None]).sum()


@program
def spread(g, x):
    rows = jnp.broadcast_to(g, (N, 3)) ** 2
    return drjax.reduce_mean(drjax.map_fn(jnp.sin, x) + rows * x).sum()


def rounds(g, x):
    step = lambda c, _: (0.1 * scalar(c * g, x), None)
    return jax.lax.scan(step, 1.0, None, length=3)[0]


@program
def first_and_last(g, x):
    y = drjax.map_fn(jnp.sin, x)
    return (y[0] * g + y[-1]).sum()


@program
def row_of_a_number(g, x):
    y = drjax.map_fn(jnp.sin, x)
    return (y[jnp.argmax(g)] * g).sum()


@program
def small_dimensions(g, x):
    """Dimensions of size one, which lax broadcasts without an equation."""
    y = drjax.map_fn(jnp.sin, x)
    y = y + jnp.arange(3.0)[None] * 0.1 - y[:, :1]
    return drjax.reduce_sum(jax.lax.mul(y, g[None])).sum()


def square(g):
    return jnp.outer(jnp.sin(g), jnp.cos(g))


@program
def product(g, x):
    """Its derivative in the matrix adds up products over the groups."""
    return drjax.reduce_sum(jnp.tanh(drjax.map_fn(jnp.sin, x) @ square(g))).sum()


@program
def product_of_an_argument(g, x):
    return drjax.reduce_mean(jnp.tanh(x @ square(g)) + (square(g) @ x.T).T).sum()


@program
def product_in_calls(g, x):
    """Names of derivatives are those of the calls."""

    @jax.checkpoint
    @jax.jit
    def layer(y, m):
        return jnp.tanh(jnp.einsum("ni,ij,nj->nj", y, m, y) @ m)

    def step(y, _):
        return layer(y, square(g)), None

    y = jax.lax.scan(step, drjax.map_fn(jnp.sin, x), None, length=2)[0]
    return drjax.reduce_mean(y).sum()


FUNCTIONS = [
    product,
    product_of_an_argument,
    product_in_calls,
    small_dimensions,
    scalar,
    vector,
    spread,
    pytest.param(rounds, marks=pytest.mark.slow),
    first_and_last,
    row_of_a_number,
]
TRANSFORMS = {
    "grad": lambda f: jax.grad(f, (0, 1)),
    "hessian": jax.hessian,
    "value_and_grad": jax.value_and_grad,
}


@pytest.mark.parametrize(
    "name",
    [
        "grad",
        pytest.param("hessian", marks=pytest.mark.slow),
        pytest.param("value_and_grad", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("fn", FUNCTIONS)
def test_they_are_reductions(fn, name):
    fn = TRANSFORMS[name](fn)
    args = jnp.arange(3.0), X
    wanted = jax.jit(fn)(*args)
    plan = drjax.make_plan(fn)(*args)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5)
    jax.tree.map(close, reference.compile(plan)(*args), wanted)
    jax.tree.map(close, drjax.jit(fn, groups_per_step=1)(*args), wanted)


def test_a_product_is_added_up_by_one_reduction():
    plan = drjax.make_plan(jax.grad(product))(jnp.arange(3.0), X)
    (only,) = plan.rounds
    assert [r.source.shape for r in only.reduces] == [(3, 3)]
    planned = drjax.jit(jax.vmap(jax.grad(product), (0, None)))
    g = jnp.ones((2, 3))
    want = jax.vmap(jax.grad(product), (0, None))(g, X)
    np.testing.assert_allclose(planned(g, X), want, rtol=1e-5)


def test_only_the_sum_over_the_other_axes_travels():
    plan = drjax.make_plan(jax.grad(scalar))(jnp.arange(3.0), X)
    (only,) = plan.rounds
    assert [r.source.shape for r in only.reduces] == [()]


SUMS = {
    "sum": jnp.sum,
    "mean": lambda y: y.mean(),
    "einsum": lambda y: jnp.einsum("ij->j", y).sum(),
    "lax": lambda y: jax.lax.reduce_sum(y, (0, 1)),
    "product": lambda y: (y.T @ y).sum(),
    "product in a checkpoint": lambda y: jax.checkpoint(lambda y: y.T @ y)(y).sum(),
}


@pytest.mark.parametrize("name", SUMS)
def test_sums_that_users_write_are_refused(name):
    fn = program(lambda x: SUMS[name](drjax.map_fn(jnp.sin, x)))
    for f in (fn, jax.value_and_grad(fn)):
        with pytest.raises(drjax.PlanError, match="may mix the rows"):
            drjax.make_plan(f)(X)
