"""`drjax.jit` on meshes with more axes than the partition's: models inside a group.

Covers: drjax._jit.jit, drjax._jit.jit_primitive, drjax._sharding.eval_on_mesh,
drjax._sharding.planning_context, drjax._compat.retype_mesh.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import drjax
from tests.helpers.cases import checkerboard
from tests.helpers.compiled import temp_bytes
from tests.helpers.meshes import AUTO, EXPLICIT, in_mesh_of, make_mesh

pytestmark = pytest.mark.usefixtures("leaks_unchecked")

N = 8
MESH = {"clients": 4, "model": 2}
W = np.random.RandomState(0).normal(0, 0.1, (16, 32)).astype(np.float32)
X = np.random.RandomState(1).normal(0, 1, (N, 4, 16)).astype(np.float32)
program = drjax.program(clients=N)


def constrained(w, x):
    w = jax.lax.with_sharding_constraint(w, P(None, "model"))
    h = jax.lax.with_sharding_constraint(jnp.tanh(x @ w), P(None, "model"))
    return jnp.mean(h**2)


def by_shard_map(w, x):
    def part(w, x):
        return jax.lax.psum(jnp.sum(jnp.tanh(x @ w) ** 2), "model")

    return jax.shard_map(
        part, in_specs=(P(None, "model"), P()), out_specs=P(), axis_names={"model"}
    )(w, x)


def mean_loss(loss):
    @program
    def mean(w, x):
        return drjax.reduce_mean(drjax.map_fn(loss, (drjax.broadcast(w), x)))

    return mean


@program
def rounds(w, x):
    """Constraints in the work of the groups and in that of the server."""

    def body(w, _):
        gradient = drjax.map_fn(jax.grad(constrained), (drjax.broadcast(w), x))
        w = w - 0.1 * drjax.reduce_mean(gradient)
        return jax.lax.with_sharding_constraint(w, P(None, "model")), None

    return jnp.sum(jax.lax.scan(body, w, None, length=3)[0] ** 2)


def placed(mesh):
    put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
    return put(W, None, "model"), put(X, "clients")


PROGRAMS = {
    "constraints": mean_loss(constrained),
    "shard_map": mean_loss(by_shard_map),
    "rounds": rounds,
}


@checkerboard(5, name=PROGRAMS, step=[1, None])
def test_models_sharded_inside_a_group(name, step):
    fn, mesh = PROGRAMS[name], make_mesh(MESH)
    gradient = jax.value_and_grad(fn)
    with jax.set_mesh(mesh):
        args = placed(mesh)
        want = jax.jit(gradient)(*args)
        planned = drjax.jit(gradient, groups_per_step=step)
        outside = jax.value_and_grad(drjax.jit(fn, groups_per_step=step))
        for result in planned(*args), outside(*args):
            jax.tree.map(
                lambda a, b: np.testing.assert_allclose(a, b, 1e-4, 1e-6), result, want
            )
        ours, plain = (drjax.collectives(f)(*args).counts for f in (planned, gradient))
        assert set(ours) == set(plain) == {"all-reduce"}
        assert ours["all-reduce"] <= plain["all-reduce"]


def test_models_stay_sharded():
    """A device needs half of what it needs without the other axis."""
    fn = drjax.jit(jax.grad(mean_loss(constrained)), groups_per_step=1)
    args = (np.ones((256, 512), np.float32), np.ones((N, 4, 256), np.float32))
    with in_mesh_of(MESH):
        two = temp_bytes(fn, *args)
    with in_mesh_of({"clients": 4, "model": 1}):
        one = temp_bytes(fn, *args)
    assert two < 0.7 * one


@pytest.mark.sampled
@pytest.mark.parametrize("step", [1, None])
@pytest.mark.parametrize("kinds", [(EXPLICIT, EXPLICIT), (AUTO, EXPLICIT)])
def test_explicit_axes(kinds, step):
    @program
    def fn(x, w):
        return drjax.reduce_sum(drjax.map_fn(jnp.square, x) * w[None])

    mesh = make_mesh(MESH, kinds)
    x, w = np.arange(32.0).reshape(N, 4), np.arange(4.0)
    with jax.set_mesh(mesh):
        x = jax.device_put(x.astype(np.float32), NamedSharding(mesh, P("clients")))
        w = jax.device_put(w.astype(np.float32), NamedSharding(mesh, P("model")))
        scalar = lambda *args: jnp.sum(fn(*args))
        for f in fn, jax.grad(scalar, (0, 1)):
            result = drjax.jit(f, groups_per_step=step)(x, w)
            jax.tree.map(np.testing.assert_allclose, result, jax.jit(f)(x, w))


@pytest.mark.sampled
@pytest.mark.parametrize("step", [None, 1])
@pytest.mark.parametrize("kinds", [(EXPLICIT, EXPLICIT), (AUTO, EXPLICIT)])
def test_gradients_of_slices_on_explicit_axes(kinds, step):
    """They contract the axis over which the model is sharded."""
    loss = mean_loss(lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2))
    both = jax.value_and_grad(loss, (0, 1))
    want = jax.jit(both)(W, X)
    mesh = make_mesh({"clients": 4, "model": 2}, kinds)
    with jax.set_mesh(mesh):
        args = placed(mesh) if kinds[0] == EXPLICIT else (placed(mesh)[0], X)
        result = drjax.jit(both, groups_per_step=step)(*args)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
    jax.tree.map(close, result, want)


def test_nested_programs_use_their_own_axis():
    inner = drjax.program(clients=4)
    outer = drjax.program(pods=4)

    @inner
    def pod(w, x):
        products = drjax.map_fn(jnp.multiply, (drjax.broadcast(w), x))
        return jnp.log(1 + drjax.reduce_mean(products) ** 2)

    @outer
    def fn(w, x):
        return drjax.reduce_mean(drjax.map_fn(pod, (drjax.broadcast(w), x)))

    args = jnp.float32(2), jnp.arange(16.0, dtype=jnp.float32).reshape(4, 4)
    want = jax.value_and_grad(fn)(*args)
    with in_mesh_of({"pods": 2, "clients": 4}):
        planned = drjax.jit(jax.value_and_grad(fn), groups_per_step=1)
        result = planned(*args)
        counts = drjax.collectives(planned)(*args).counts
        assert counts["all-reduce"] > 1  # one over the clients
    for a, b in zip(result, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_shardings_of_arguments_and_results():
    fn, mesh = mean_loss(lambda w, x: jnp.mean((x @ w) ** 2)), make_mesh({"clients": 8})
    whole, slices = NamedSharding(mesh, P()), NamedSharding(mesh, P("clients"))
    halves = NamedSharding(mesh, P(None, "clients"))
    with jax.set_mesh(mesh):
        step = drjax.jit(
            jax.grad(fn), in_shardings=(whole, slices), out_shardings=halves,
            groups_per_step=1,
        )  # fmt: skip
        result = step(W, X)
    assert result.sharding == halves
    np.testing.assert_allclose(result, jax.grad(fn)(W, X), rtol=1e-5, atol=1e-7)


def test_make_plan_points_to_drjax_jit():
    with in_mesh_of(MESH):
        with pytest.raises(drjax.PlanError, match="drjax.jit plans the function with"):
            drjax.make_plan(PROGRAMS["constraints"])(W, X)
        with pytest.raises(drjax.PlanError, match="drjax.jit plans the function with"):
            drjax.check(PROGRAMS["shard_map"])(W, X)


@pytest.mark.parametrize("n", [3, 4])
@pytest.mark.parametrize("whole", [False, True])
def test_gradients_of_what_is_scattered_implicitly(n, whole):
    """There, JAX reshards the cotangent from the mesh's type to one without a mesh."""

    @drjax.program(clients=n)
    def f(x, y):
        return drjax.reduce_sum(drjax.map_fn(jnp.cos, x + drjax.map_fn(jnp.sin, y)))

    x, y = jnp.arange(1.0, n + 1), jnp.linspace(0.1, 0.9, n)
    expected = jax.grad(f)(x, y)
    derivative = drjax.jit(jax.grad(f)) if whole else jax.grad(drjax.jit(f))
    with in_mesh_of({"clients": 3}):
        np.testing.assert_allclose(derivative(x, y), expected, rtol=1e-6)


def test_what_a_loop_carries_begins_without_a_sharding():
    """On Explicit axes, types in loops must not change from step to step."""

    @drjax.program(clients=4)
    def f(m, x):
        def step(carry, _):
            m, x = carry
            x = drjax.map_fn(lambda a, b: jnp.sin(a * b), (x, drjax.broadcast(m)))
            return (m + drjax.reduce_mean(x), x), None

        return jax.lax.scan(step, (m, x), None, length=3)[0]

    m, x = np.ones(3, np.float32), np.ones((4, 3), np.float32)
    expected = jax.jit(f)(m, x)
    with jax.set_mesh(make_mesh({"clients": 2}, (EXPLICIT,))):
        for result, want in zip(
            drjax.jit(f)(jnp.asarray(m), jnp.asarray(x)), expected, strict=True
        ):
            np.testing.assert_allclose(result, want, rtol=1e-6)
