"""`drjax.jit` on Explicit axes: types of arguments, results and derivatives.

Covers: drjax._jit.jit_primitive, drjax._sharding.execute,
drjax._sharding.eval_on_mesh.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import drjax
from tests.helpers.meshes import AUTO, EXPLICIT, make_mesh

N = 4


@drjax.program(clients=N)
def loss(w, x):
    products = drjax.map_fn(lambda w, x: jnp.sin(w * x), (drjax.broadcast(w), x))
    return drjax.reduce_mean(products).sum()


def hessian_product(fn, w, x):
    return jax.jvp(lambda *a: jax.grad(fn, (0, 1))(*a), (w, x), (w + 1, x + 1))[1]


@pytest.mark.sampled
@pytest.mark.parametrize("spec", [P(), P("clients")], ids=["replicated", "sharded"])
@pytest.mark.parametrize("runner", [lambda fn: fn, jax.jit], ids=["eager", "jit"])
def test_derivatives_have_the_types_of_their_arguments(spec, runner):
    """JAX refuses cotangents whose sharding is not that of the argument."""
    w, x = np.linspace(0.1, 1, 3), np.linspace(-1, 1, 3 * N).reshape(N, 3)
    gradient = lambda w, x: jax.grad(drjax.jit(loss), (0, 1))(w, x)
    product = lambda w, x: hessian_product(drjax.jit(loss), w, x)
    mesh = make_mesh({"clients": N}, (EXPLICIT,))
    with jax.set_mesh(mesh):
        args = jnp.asarray(w), jax.device_put(jnp.asarray(x), NamedSharding(mesh, spec))
        results = [runner(fn)(*args) for fn in (gradient, product)]
    shardings = [jax.typeof(a).sharding for a in args]
    for result in results:
        assert [jax.typeof(r).sharding for r in result] == shardings
    plain = [np.asarray(a) for a in args]
    expected = [jax.grad(loss, (0, 1))(*plain), hessian_product(loss, *plain)]
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, 1e-5), results, expected)


def test_arrays_without_operands_belong_to_the_mesh():
    """The zeros that a cotangent is written into had a type without the mesh."""

    @drjax.program(clients=N)
    def one_group(g, x):
        y = drjax.map_fn(jnp.sin, x)
        i = jnp.int32(N * g)
        return (g * jax.lax.dynamic_index_in_dim(y, i, 0, keepdims=False)).sum()

    gradient = jax.grad(one_group, (0, 1))
    g, x = np.float32(0.6), np.ones((N, 2), np.float32)
    expected = gradient(g, x)
    mesh = make_mesh({"model": 2, "clients": 2}, (EXPLICIT, AUTO))
    with jax.set_mesh(mesh):
        result = drjax.jit(gradient)(jnp.asarray(g), jnp.asarray(x))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, 1e-5), result, expected)


W, X = np.linspace(-1, 1, 8).reshape(4, 2), np.linspace(-2, 1, 160).reshape(8, 5, 4)
SHARDED_OVER_MODEL = {
    "first axis of w": (P("model"), P("clients")),
    "x": (P(), P("clients", None, "model")),
    "contracted dimension": (P("model"), P("clients", None, "model")),
}
GROUP_LOSSES = {
    "penalty": lambda w, x: jnp.sum(jnp.sin(x @ w)) + jnp.sum(w**2),
    "residual": lambda w, x: jnp.sum(jnp.sin(x @ w)) + jnp.sum(jnp.sin(x)),
}


def mean_over_groups(group_loss, penalty=0.0):
    @drjax.program(clients=8)
    def mean(w, x):
        losses = drjax.map_fn(group_loss, (drjax.broadcast(w), x))
        return drjax.reduce_mean(losses) + penalty * jnp.sum(w**2)

    return mean


def assert_equal_on_a_model_mesh(run, fn, specs):
    w, x = W.astype(np.float32), X.astype(np.float32)
    expected = fn(w, x)
    mesh = make_mesh({"clients": 4, "model": 2}, EXPLICIT)
    with jax.set_mesh(mesh):
        pairs = zip((w, x), specs, strict=True)
        args = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in pairs]
        result = run(*args)
    jax.tree.map(lambda y, e: np.testing.assert_allclose(y, e, 1e-4, 1e-5),
                 result, expected)  # fmt: skip


@pytest.mark.parametrize("mapped", [False, True], ids=["value", "map_fn"])
def test_a_gradient_in_a_function_that_closes_over_sharded_arrays(mapped):
    """JAX refused the sum of cotangents of which one has the mesh's type."""
    x = np.linspace(0.1, 1, N)
    triple = lambda x: drjax.map_fn(lambda x: 3 * x, x) if mapped else 3 * x
    loss = lambda x, c: drjax.reduce_mean(triple(x)) + drjax.reduce_mean(c * x)
    mesh = make_mesh({"clients": N}, (EXPLICIT,))
    with jax.set_mesh(mesh):
        sharding = NamedSharding(mesh, P("clients"))
        x_on_mesh, c = (jax.device_put(jnp.asarray(a), sharding) for a in (x, x**2))
        planned = drjax.jit(drjax.program(clients=N)(jax.grad(lambda x: loss(x, c))))
        result = planned(x_on_mesh)
    np.testing.assert_allclose(result, (3 + x**2) / N, 1e-6)


def test_a_product_that_contracts_a_sharded_dimension():
    fn = mean_over_groups(lambda w, x: jnp.sum(x @ w))
    specs = SHARDED_OVER_MODEL["contracted dimension"]
    assert_equal_on_a_model_mesh(drjax.jit(fn), fn, specs)


@pytest.mark.sampled
@pytest.mark.parametrize("specs", SHARDED_OVER_MODEL)
@pytest.mark.parametrize("group_loss", GROUP_LOSSES)
def test_gradients_of_values_with_several_uses(group_loss, specs):
    """A product's cotangent and that of another use may differ in their sharding."""
    fn = mean_over_groups(GROUP_LOSSES[group_loss])
    gradient, specs = jax.grad(fn, (0, 1)), SHARDED_OVER_MODEL[specs]
    assert_equal_on_a_model_mesh(drjax.jit(gradient), gradient, specs)
    by_plan = jax.grad(drjax.jit(fn), (0, 1))
    assert_equal_on_a_model_mesh(by_plan, gradient, specs)


def test_gradients_of_a_penalty_outside_of_the_groups():
    fn = mean_over_groups(lambda w, x: jnp.sum(jnp.sin(x @ w)), 0.1)
    specs = SHARDED_OVER_MODEL["first axis of w"]
    assert_equal_on_a_model_mesh(drjax.jit(jax.grad(fn)), jax.grad(fn), specs)


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_arrays_computed_at_compile_time_are_constants_of_the_plan(kind):
    """They had the type of the mesh in context, which a plan cannot export."""

    def table(x):
        with jax.ensure_compile_time_eval():
            values = jnp.sin(jnp.arange(3.0))
        return x * values

    program = drjax.program(clients=8)(lambda x: drjax.gather(drjax.map_fn(table, x)))
    x = jnp.ones((8, 3))
    with jax.set_mesh(make_mesh({"clients": 8}, kind)):
        plan = drjax.make_plan(program)(x)
        results = [
            drjax.backends.in_process.compile(plan)(x), jax.jit(program)(x),
            drjax.jit(program)(x), drjax.jit(program, groups_per_step=1)(x),
        ]  # fmt: skip
    for result in results:
        np.testing.assert_allclose(
            result, np.ones((8, 3)) * np.sin(range(3)), rtol=1e-6
        )


def _gamma(key, a):
    return jnp.sum(jax.random.gamma(key, a))


def _dirichlet(key, a):
    return jnp.sum(jax.random.dirichlet(key, a) ** 2)


def _multivariate_normal(key, a):
    covariance = jnp.eye(3) + jnp.outer(a, a)
    return jnp.sum(jax.random.multivariate_normal(key, a, covariance))


@pytest.mark.once
@pytest.mark.sampled
@pytest.mark.parametrize("draw", [_multivariate_normal, _gamma, _dirichlet])
@pytest.mark.parametrize("axes", [{"clients": 4}, {"clients": 2, "model": 2}])
def test_derivatives_of_draws_that_jax_traces_on_auto_axes(axes, draw):
    """JAX makes Explicit axes Auto in these: residuals have types of that mesh."""
    keys, x = jax.random.split(jax.random.key(0), N), jnp.ones((N, 3)) + 1
    program = drjax.program(clients=N)(
        lambda keys, x: drjax.reduce_sum(drjax.map_fn(draw, (keys, x)))
    )
    expected = jax.grad(lambda x: jax.vmap(draw)(keys, x).sum())(x)
    with jax.set_mesh(make_mesh(axes, EXPLICIT)):
        for jit in (lambda fn: fn, jax.jit, drjax.jit):
            got = jit(jax.grad(program, 1))(keys, x)
            np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
