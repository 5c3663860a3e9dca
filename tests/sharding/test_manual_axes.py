"""Programs inside a user's own `jax.shard_map`.

Over the partition's axes the blocks act on the groups that the device holds; over
other axes they keep working on the whole partition.

Covers: drjax._sharding.layout, drjax._sharding.execute, drjax._compat.trace_context,
drjax.backends.xla.compile_plan, drjax.backends.xla.chunked_stage,
drjax._jit.jit_primitive.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import drjax
from drjax.backends.xla import reuse_accumulators
from tests.helpers.cases import checkerboard
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


@pytest.mark.sampled
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


@pytest.mark.once
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


@pytest.mark.sampled
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


@pytest.mark.slow
def test_two_manual_axes_carry_the_partition():
    mesh = make_mesh({"dcn": 4, "ici": 2})
    axes = ("ici", "dcn")
    f = make_program(16, mesh_axes=axes)
    with in_mesh(mesh):
        mapped = jax.shard_map(f, in_specs=(P(), P(axes)), out_specs=P())
        result = jax.jit(jax.value_and_grad(mapped, (0, 1)))(X, data_for(16))
    assert_close(result, jax.value_and_grad(make_program(16), (0, 1))(X, data_for(16)))


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_plan_does_not_run_in_a_shard_map_over_the_partition(check_vma):
    """It has all groups: on each device it would reduce over the first of them."""

    @drjax.program(clients=N)
    def total(x):
        return drjax.reduce_sum(drjax.map_fn(lambda a: a * 1.0, drjax.scatter(x)))

    x = jnp.arange(1.0, 9.0)
    plan = drjax.make_plan(total)(x)
    planned = [drjax.jit(total, groups_per_step=k) for k in (None, 1, "auto")]
    planned += [drjax.backends.xla.compile(plan, groups_per_step=k) for k in (None, 1)]
    with in_mesh(make_mesh({"clients": 4})):
        mapped = lambda f: jax.jit(
            jax.shard_map(f, in_specs=P(), out_specs=P(), check_vma=check_vma)
        )
        assert mapped(total)(x) == 36
        for f in planned:
            with pytest.raises(drjax.MeshError, match="Use jax.jit of the program"):
                mapped(f)(x)


@pytest.mark.sampled
@pytest.mark.parametrize(("n", "devices"), [(8, 2), (4, 3)])
def test_a_plan_in_chunks_in_a_shard_map_over_another_axis(n, devices, monkeypatch):
    """Of three devices, one has none of four groups."""
    monkeypatch.setattr(reuse_accumulators, "LARGE", 0)

    @drjax.program(clients=n)
    def f(x, data):
        y = drjax.map_fn(lambda x, d: jnp.tanh(x * d), (drjax.broadcast(x), data))
        return 2 * drjax.reduce_mean(y), drjax.reduce_max(y)

    x, data = jnp.float32(2), jnp.linspace(0, 1, n)
    plan = drjax.make_plan(f)(x, data)
    compiled = drjax.backends.xla.compile(plan, groups_per_step=1)
    with in_mesh(make_mesh({"clients": devices, "data": 2})):
        for run in (drjax.jit(f, groups_per_step=1), compiled):
            mapped = jax.shard_map(
                run, axis_names={"data"}, in_specs=(P(), P()), out_specs=P()
            )
            assert_close(jax.jit(mapped)(x, data), f(x, data))


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=str)
@pytest.mark.parametrize("step", [None, 1])
def test_a_plan_of_data_that_vary_over_another_axis(step, kind):
    @drjax.program(clients=N)
    def f(x, data):
        square = lambda x, d: jnp.mean(jnp.tanh(d @ x) ** 2)
        return drjax.reduce_mean(drjax.map_fn(square, (drjax.broadcast(x), data)))

    planned, x = drjax.jit(f, groups_per_step=step), jnp.ones(3)
    datas = jnp.asarray(np.random.RandomState(0).normal(size=(2, N, 4, 3)))
    value = lambda x, d: planned(x, d[0])[None]
    # The gradient in `x`, which does not vary, is summed over the axis.
    within = lambda x, d: jax.grad(planned)(x, d[0])
    expected = [jax.value_and_grad(f)(x, data) for data in datas]
    values, slopes = map(jnp.stack, zip(*expected, strict=True))
    with in_mesh(make_mesh({"data": 2, "clients": 4}, (AUTO, kind))):
        mapped = lambda fn, out: jax.shard_map(
            fn, axis_names={"data"}, in_specs=(P(), P("data")), out_specs=out
        )
        through = jax.grad(lambda x: mapped(value, P("data"))(x, datas).sum())
        assert_close(jax.jit(mapped(value, P("data")))(x, datas), values)
        assert_close(jax.jit(mapped(within, P()))(x, datas), slopes.sum(0))
        assert_close(jax.jit(through)(x), slopes.sum(0))
        with pytest.raises(ValueError, match="out_specs"):
            jax.jit(mapped(lambda x, d: value(x, d)[0], P()))(x, datas)


# Of one group's slice, and a global value that the mapped function closes over.
CLOSURES = {
    "product": lambda a, w: a * w,
    "alone": lambda a, w: jnp.sin(w),
    "with the index": lambda a, w: a * w * drjax.partition_index() + w,
    "constants": lambda a, w: a * jnp.arange(3.0) + w,
    "carried": lambda a, w: lax.scan(lambda c, _: (jnp.sin(c), c), w, length=3)[0] * a,
    "scanned": lambda a, w: lax.scan(lambda c, _: (c * w, c), 0 * a + w, length=3)[0],
    "looped": lambda a, w: lax.fori_loop(
        0, 3, lambda i, c: c * a * i + w * drjax.partition_index(), a
    ),
    "branches": lambda a, w: lax.cond(
        drjax.partition_index() % 2 == 0, lambda: a * w, lambda: a + w
    ),
    "vmapped": lambda a, w: jax.vmap(lambda s: a * s)(w).sum(0),
    "checkpoint": lambda a, w: jax.checkpoint(lambda a: jnp.sin(a * w))(a),
    "gradient": lambda a, w: jax.grad(lambda a: jnp.sin(a * w).sum())(a),
    "random": lambda a, w: a * w * jax.random.normal(
        jax.random.fold_in(jax.random.key(0), drjax.partition_index()), (3,)
    ),
}  # fmt: skip


@pytest.mark.sampled
@checkerboard(
    9, name=CLOSURES, axes=[("clients",), ("clients", "model")], inside=[0, 1]
)
def test_closures_in_a_shard_map_over_the_partition(name, axes, inside):
    """Values that do not vary over the devices: their cotangents are added up once."""
    fn = CLOSURES[name]
    f = drjax.program(clients=8)(
        lambda x, w: drjax.reduce_mean(drjax.map_fn(lambda a: fn(a, w), x)).sum()
    )
    x, w = jnp.arange(24.0).reshape(8, 3) / 10, jnp.arange(1.0, 4)
    want = jax.value_and_grad(f, (0, 1))(x, w)
    specs = P("clients"), P()
    sharded = functools.partial(
        jax.shard_map, mesh=make_mesh({"clients": 4, "model": 2}), in_specs=specs,
        axis_names=set(axes),
    )  # fmt: skip
    if inside:
        grad = sharded(lambda x, w: jax.grad(f, (0, 1))(x, w), out_specs=specs)
        result = sharded(f, out_specs=P())(x, w), jax.jit(grad)(x, w)
    else:
        result = jax.jit(jax.value_and_grad(sharded(f, out_specs=P()), (0, 1)))(x, w)
    for a, b in zip(jax.tree.leaves(result), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
