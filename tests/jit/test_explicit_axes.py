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
