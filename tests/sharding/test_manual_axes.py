"""Programs inside a user's own `jax.shard_map`.

Over the partition's axes the blocks act on the groups that the device holds; over
other axes they keep working on the whole partition.

Covers: drjax._sharding.layout, drjax._sharding.execute, drjax._compat.trace_context.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import drjax
from tests.helpers.every_block import X, assert_close, data_for, make_program
from tests.helpers.meshes import AUTO, EXPLICIT, in_mesh, make_mesh

N = 8
EVERYTHING = make_program(N)


def inside(mesh, check_vma, transform=lambda f: f, n=N):
    """The program in a shard_map over its own axis; x is replicated, data by groups."""
    f = transform(make_program(n))
    axis_names = {"clients"}

    def body(x, data):
        return f(x, data)

    return jax.shard_map(
        body, mesh=mesh, axis_names=axis_names, check_vma=check_vma,
        in_specs=(P(), P("clients")), out_specs=P(),
    )  # fmt: skip


SHAPES = [{"clients": 8}, {"clients": 4, "model": 2}]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_value_and_gradient_through_a_shard_map_over_the_partition(shape):
    data = data_for(N)
    expected = jax.value_and_grad(EVERYTHING, (0, 1))(X, data)
    mesh = make_mesh(shape)
    with in_mesh(mesh):
        result = jax.jit(jax.value_and_grad(inside(mesh, True), (0, 1)))(X, data)
        unchecked = jax.jit(inside(mesh, False))(X, data)
    assert_close(result, expected)
    assert_close(unchecked, expected[0])


def test_gradient_inside_a_shard_map_over_the_partition():
    mesh = make_mesh({"clients": 4})
    data = data_for(N)
    with in_mesh(mesh):
        result = jax.jit(inside(mesh, True, jax.grad))(X, data)
    assert_close(result, jax.grad(EVERYTHING)(X, data))


def test_gradients_without_varying_types_over_the_partition_are_an_error():
    """JAX's cotangents mean two things there: one of them would be wrong by m."""
    mesh = make_mesh({"clients": 4})
    through = jax.grad(inside(mesh, False))
    within = inside(mesh, False, jax.grad)
    with in_mesh(mesh):
        for f in (through, within):
            with pytest.raises(drjax.MeshError, match="Leave out check_vma=False"):
                jax.jit(f)(X, data_for(N))


@pytest.mark.parametrize("check_vma", [True, False])
def test_partitioned_results_of_a_shard_map_over_the_partition(check_vma):
    mesh = make_mesh({"clients": 4}, EXPLICIT)

    @drjax.program(clients=N)
    def f(x, data):
        assert data.shape == (2, 3)
        y = drjax.broadcast(x)
        assert y.shape == (2, 3)
        i = drjax.partition_index()
        numbers = drjax.map_fn(lambda _: drjax.partition_index(), y)
        return y * data, i, numbers, drjax.scatter(drjax.gather(data)[::-1])

    with in_mesh(mesh):
        mapped = jax.shard_map(
            f, in_specs=(P(), P("clients")), out_specs=P("clients"), check_vma=check_vma
        )
        data = jax.device_put(data_for(N), jax.NamedSharding(mesh, P("clients")))
        y, i, numbers, back = jax.jit(mapped)(X, data)
    np.testing.assert_allclose(y, X * data_for(N), rtol=1e-6)
    assert i.tolist() == numbers.tolist() == list(range(N))
    assert (np.asarray(back) == data_for(N)[::-1]).all()


@pytest.mark.parametrize(
    "check_vma", [True, pytest.param(False, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=str)
def test_inside_a_shard_map_over_another_axis(kind, check_vma):
    mesh = make_mesh({"data": 2, "clients": 4}, (AUTO, kind))
    xs, data = jnp.stack([X, 2 * X]), data_for(N)
    expected = [jax.value_and_grad(EVERYTHING, (0, 1))(x, data) for x in xs]

    def body(xs, data):
        value, (dx, ddata) = jax.value_and_grad(EVERYTHING, (0, 1))(xs[0], data)
        return value[None], (dx[None], ddata[None])

    with in_mesh(mesh):
        mapped = jax.shard_map(
            body, axis_names={"data"}, check_vma=check_vma,
            in_specs=(P("data"), P()), out_specs=P("data"),
        )  # fmt: skip
        if check_vma:  # else the gradient in data is already summed over the axis
            vary = lambda d: lax.pcast(d, ("data",), to="varying")
            mapped = jax.shard_map(
                lambda xs, d: body(xs, vary(d)), axis_names={"data"},
                in_specs=(P("data"), P()), out_specs=P("data"),
            )  # fmt: skip
        result = jax.jit(mapped)(xs, data)
    assert_close(result, jax.tree.map(lambda *x: jnp.stack(x), *expected))


@pytest.mark.parametrize("check_vma", [True, False])
def test_gradient_through_a_shard_map_over_another_axis(check_vma):
    mesh = make_mesh({"data": 2, "clients": 4})
    xs, data = jnp.stack([X, 2 * X]), data_for(N)

    def total(f):
        return lambda xs, data: jnp.sum(f(xs, data) ** 2)

    with in_mesh(mesh):
        mapped = jax.shard_map(
            lambda xs, d: EVERYTHING(xs[0], d)[None], axis_names={"data"},
            in_specs=(P("data"), P()), out_specs=P("data"), check_vma=check_vma,
        )  # fmt: skip
        result = jax.jit(jax.grad(total(mapped), (0, 1)))(xs, data)
    vmapped = jax.vmap(EVERYTHING, (0, None))
    assert_close(result, jax.grad(total(vmapped), (0, 1))(xs, data))


def test_scans_inside_a_mapped_function_under_inherited_check_vma():
    """Constants in the mapped function, and a loop with a carry from an argument."""
    mesh = make_mesh({"data": 2, "clients": 4})

    @drjax.program(clients=N)
    def f(x):
        def g(a):
            step = lambda c, _: (c * jnp.arange(3.0) + drjax.partition_index(), None)
            return lax.scan(step, a, None, length=2)[0]

        return drjax.reduce_sum(drjax.map_fn(g, drjax.broadcast(x)))

    with in_mesh(mesh):
        mapped = jax.shard_map(
            f, axis_names={"data"}, in_specs=P("data"), out_specs=P("data")
        )
        result = jax.jit(mapped)(jnp.concatenate([X, 2 * X]))
    assert_close(result, jnp.concatenate([f(X), f(2 * X)]))


def test_uneven_partition_inside_a_shard_map_is_an_error():
    mesh = make_mesh({"clients": 4})
    with in_mesh(mesh), pytest.raises(drjax.MeshError, match="multiple of 4"):
        inside(mesh, True, n=10)(X, jnp.zeros((12, 3)))


def test_only_some_of_the_axes_manual_is_an_error():
    mesh = make_mesh({"dcn": 4, "ici": 2})
    f = drjax.program(clients=8, mesh_axes=("dcn", "ici"))(
        lambda x: drjax.reduce_sum(drjax.broadcast(x))
    )
    with in_mesh(mesh), pytest.raises(drjax.MeshError, match=r"only \['dcn'\]"):
        jax.shard_map(f, axis_names={"dcn"}, in_specs=P(), out_specs=P())(1.0)


def test_two_manual_axes_carry_the_partition():
    mesh = make_mesh({"dcn": 4, "ici": 2})
    axes = ("ici", "dcn")
    f = make_program(16, mesh_axes=axes)
    with in_mesh(mesh):
        mapped = jax.shard_map(f, in_specs=(P(), P(axes)), out_specs=P())
        result = jax.jit(jax.value_and_grad(mapped, (0, 1)))(X, data_for(16))
    assert_close(result, jax.value_and_grad(make_program(16), (0, 1))(X, data_for(16)))
