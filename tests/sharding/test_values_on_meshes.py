"""Values and derivatives do not depend on the mesh, its axis types, or how it is given.

Every test compares with the same program run without a mesh.

Covers: drjax._sharding.layout, drjax._sharding.execute.
"""

import contextlib
import functools
import logging
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import drjax
from drjax._sharding.layout import slices_of_devices
from tests.helpers.cases import some
from tests.helpers.compiled import flops
from tests.helpers.every_block import DX, X, assert_close, data_for, make_program
from tests.helpers.meshes import AUTO, EXPLICIT, in_mesh, make_mesh

MESHES = {
    "auto": ({"clients": 8}, AUTO),
    "auto model": ({"clients": 4, "model": 2}, AUTO),
    "model first": ({"model": 2, "clients": 4}, AUTO),
    "explicit": ({"clients": 8}, EXPLICIT),
    "explicit model": ({"clients": 4, "model": 2}, EXPLICIT),
    "explicit, auto model": ({"clients": 4, "model": 2}, (EXPLICIT, AUTO)),
    "auto, explicit model": ({"clients": 4, "model": 2}, (AUTO, EXPLICIT)),
    "one device": ({"clients": 1}, AUTO),
    "no axis": ({"data": 8}, AUTO),
    "no axis, explicit": ({"data": 8}, EXPLICIT),
}


def derivatives(f):
    """Value, gradients in both arguments, and jvp, in one function."""

    def run(x, dx, data):
        return {
            "value_and_grad": jax.value_and_grad(f)(x, data),
            "jvp": jax.jvp(lambda x: f(x, data), (x,), (dx,)),
            "grad in data": jax.grad(f, 1)(x, data),
        }

    return run


@functools.cache
def expected_for(n: int):
    return jax.jit(derivatives(make_program(n)))(X, DX, data_for(n))


def check(n, context=None, jit=True, block=None, **keywords):
    """Compare the program, on a mesh given in some way, with the one without mesh."""
    run = derivatives(make_program(n, block, **keywords))
    with context or contextlib.nullcontext():
        result = (jax.jit(run) if jit else run)(*map(jnp.asarray, (X, DX, data_for(n))))
    assert_close(result, expected_for(n))


# ---------------------------------------------------------------------------------
# How the mesh is given


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    some(MESHES, "auto model", marks=pytest.mark.slow),
)
def test_mesh_in_context(name):
    check(8, in_mesh(make_mesh(*MESHES[name])))


@pytest.mark.slow
@pytest.mark.parametrize("name", some(MESHES, "auto, explicit model"))
def test_mesh_argument_of_the_program(name):
    check(8, mesh=make_mesh(*MESHES[name]))


@pytest.mark.slow
@pytest.mark.parametrize("name", some(MESHES, "auto model"))
def test_mesh_argument_of_each_block(name):
    check(8, block={"mesh": make_mesh(*MESHES[name])})


@pytest.mark.slow
@pytest.mark.parametrize("name", some(MESHES, "auto model"))
def test_mesh_argument_within_the_same_mesh_in_context(name):
    mesh = make_mesh(*MESHES[name])
    check(8, in_mesh(mesh), mesh=mesh)


@contextlib.contextmanager
def legacy(mesh):
    """JAX warns those who enter a mesh; nothing of ours warns inside."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        mesh.__enter__()
    try:
        yield
    finally:
        mesh.__exit__(None, None, None)


@pytest.mark.slow
@pytest.mark.parametrize("name", some(["auto", "auto model", "no axis"], "auto model"))
def test_legacy_context(name):
    check(8, legacy(make_mesh(*MESHES[name])))


def eager_results(**keywords) -> Any:
    @drjax.program(clients=8, **keywords)
    def f(x, data):
        y = drjax.map_fn(jnp.multiply, (drjax.broadcast(x), data))
        return drjax.reduce_max(y), drjax.scatter(drjax.gather(y)), drjax.select(y, 1)

    @drjax.program(clients=8, **keywords)
    def g(x, data):
        fit = lambda y, slice_: jnp.tanh(y * slice_) * drjax.partition_index()
        return drjax.reduce_mean(drjax.map_fn(fit, (drjax.broadcast(x), data))).sum()

    x, data = jnp.asarray(X), jnp.asarray(data_for(8))
    return f(x, data), jax.value_and_grad(g)(x, data), jax.grad(g, 1)(x, data)


@pytest.mark.sampled
@pytest.mark.parametrize("name", some(MESHES, "auto model", "explicit"))
def test_eager(name):
    with in_mesh(make_mesh(*MESHES[name])):
        result = eager_results()
    assert_close(result, eager_results())
    if name == "auto model":
        assert result[0][1].sharding.spec == P("clients")


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["auto", "auto model"])
def test_eager_with_mesh_argument(name):
    assert_close(eager_results(mesh=make_mesh(*MESHES[name])), eager_results())


def test_partition_index_alone_with_mesh_argument():
    """It has no operand from which jit could learn about the mesh."""
    index = drjax.program(clients=16, mesh=make_mesh({"clients": 8}))(
        lambda: drjax.partition_index()
    )
    for f in (index, jax.jit(index)):
        assert f().tolist() == list(range(16))
        assert f().sharding.shard_shape((16,)) == (2,)


def test_hessian():
    @drjax.program(clients=8)
    def f(x, data):
        y = drjax.map_fn(lambda a, b: jnp.sin(a * b), (drjax.broadcast(x), data))
        return jnp.sum(drjax.reduce_mean(y) ** 2)

    expected = jax.hessian(f)(X, data_for(8))
    for name in ("auto model", "explicit model"):
        with in_mesh(make_mesh(*MESHES[name])):
            assert_close(jax.jit(jax.hessian(f))(X, data_for(8)), expected)


# ---------------------------------------------------------------------------------
# Sizes and several axes


@pytest.mark.slow
@pytest.mark.parametrize("n", some([16, 24], 24))
@pytest.mark.parametrize("name", some(["auto", "explicit model"], "explicit model"))
def test_several_groups_on_a_device(n, name):
    check(n, in_mesh(make_mesh(*MESHES[name])))


@pytest.mark.slow
@pytest.mark.parametrize("n", some([10, 3], 10))
@pytest.mark.parametrize("name", some(["auto", "auto model"], "auto"))
def test_sizes_that_do_not_divide(n, name):
    check(n, in_mesh(make_mesh(*MESHES[name])))


@pytest.mark.slow
@pytest.mark.grid
@pytest.mark.parametrize("n", [10, 3])
def test_sizes_that_do_not_divide_in_other_ways(n):
    mesh = make_mesh({"clients": 8})
    check(n, mesh=mesh)
    check(n, legacy(mesh))
    check(n, in_mesh(mesh), jit=False)


IN_ORDER, REVERSED = ("dcn", "ici"), ("ici", "dcn")


@pytest.mark.slow
@pytest.mark.parametrize(
    "axes", some([IN_ORDER, REVERSED], IN_ORDER, marks=pytest.mark.slow), ids=str
)
@pytest.mark.parametrize(
    "kind",
    some([AUTO, EXPLICIT, (AUTO, EXPLICIT), (EXPLICIT, AUTO)], EXPLICIT),
    ids=str,
)
def test_partition_on_two_mesh_axes(axes, kind):
    mesh = make_mesh({"dcn": 4, "ici": 2}, kind)
    check(16, in_mesh(mesh), mesh_axes=axes)


@pytest.mark.slow
@pytest.mark.parametrize("n", [6, 10])
def test_partition_on_two_mesh_axes_that_does_not_divide(n):
    mesh = make_mesh({"dcn": 4, "ici": 2})
    check(n, in_mesh(mesh), mesh_axes=("dcn", "ici"))


def test_group_order_follows_the_order_of_mesh_axes():
    mesh = make_mesh({"dcn": 4, "ici": 2})
    for axes in (("dcn", "ici"), ("ici", "dcn")):
        program = drjax.program(clients=8, mesh_axes=axes)
        with in_mesh(mesh):
            index = jax.jit(program(lambda: drjax.partition_index()))()
        assert index.tolist() == list(range(8))
        assert index.sharding.is_equivalent_to(
            jax.NamedSharding(mesh, P(axes)), index.ndim
        )


def test_uneven_partition_on_explicit_axes_is_an_error():
    @drjax.program(clients=10)
    def f(x):
        return drjax.reduce_sum(drjax.broadcast(x))

    with in_mesh(make_mesh({"clients": 8}, EXPLICIT)):
        with pytest.raises(drjax.MeshError, match="use 16 groups and leave the last"):
            f(1.0)


def test_returned_uneven_value_is_gathered():
    @drjax.program(clients=10)
    def f(x):
        return drjax.map_fn(lambda a: a * drjax.partition_index(), drjax.broadcast(x))

    with in_mesh(make_mesh({"clients": 8})):
        y = jax.jit(f)(2.0)
    assert y.tolist() == [2.0 * i for i in range(10)]
    assert y.sharding.is_fully_replicated


def test_uneven_values_are_really_sharded_inside_jit():
    """Each device works on 2 of 10 groups, not on all."""

    @drjax.program(clients=10)
    def f(x):
        y = drjax.map_fn(lambda a: a @ a, drjax.broadcast(x))
        return drjax.reduce_sum(y)

    x = jnp.ones((32, 32))
    one = flops(jnp.matmul, x, x)
    with in_mesh(make_mesh({"clients": 8})):
        per_device = flops(f, x)
    assert per_device < 2.5 * one


# ---------------------------------------------------------------------------------
# One program, several meshes


@pytest.mark.slow
def test_one_program_on_several_meshes_in_turn():
    f = jax.jit(jax.value_and_grad(make_program(8)))
    expected = f(X, data_for(8))
    meshes = [make_mesh({"clients": 8}), make_mesh({"clients": 2}), None] * 2
    for mesh in meshes:
        with in_mesh(mesh):
            assert_close(f(X, data_for(8)), expected)


def test_mesh_without_the_axis_is_logged_once(caplog):
    @drjax.program(hospitals=4)
    def f(x):
        return drjax.reduce_sum(drjax.map_fn(jnp.sin, drjax.broadcast(x)))

    with caplog.at_level(logging.INFO, "drjax"), in_mesh(make_mesh({"wards": 2})):
        for _ in range(2):
            f(1.0)
            jax.jit(f)(1.0)
    [record] = [r for r in caplog.records if r.name == "drjax"]
    assert record.levelno == logging.INFO
    assert record.getMessage() == (
        "mesh with axes ('wards',) has no axis ('hospitals',): the program runs locally"
    )


def test_mesh_argument_that_differs_from_the_mesh_in_context():
    f = drjax.program(clients=8, mesh=make_mesh({"clients": 4}))(drjax.broadcast)
    with in_mesh(make_mesh({"clients": 8})):
        with pytest.raises(drjax.MeshError, match=r"\(clients: 4\), but the mesh in"):
            f(1.0)


def test_mesh_with_only_some_of_the_axes():
    f = drjax.program(clients=8, mesh_axes=("dcn", "ici"))(drjax.broadcast)
    with in_mesh(make_mesh({"ici": 8})):
        with pytest.raises(drjax.MeshError, match=r"lacks \['dcn'\]"):
            f(1.0)


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=str)
def test_vmap_over_a_mesh_axis(kind):
    """`spmd_axis_name`: several programs at once, along another axis of the mesh."""

    @drjax.program(clients=8)
    def f(x, data):
        y = drjax.map_fn(lambda a, b: jnp.tanh(a * b), (drjax.broadcast(x), data))
        return drjax.reduce_mean(y), y

    xs = jnp.stack([X, DX])
    expected = jax.vmap(f, (0, None))(xs, data_for(8))
    mesh = make_mesh({"data": 2, "clients": 4}, kind)
    name = "data" if kind == AUTO else None
    with in_mesh(mesh):
        xs = jax.device_put(xs, jax.NamedSharding(mesh, P("data")))
        mapped = jax.vmap(f, (0, None), spmd_axis_name=name)
        result = jax.jit(mapped)(xs, data_for(8))
        grads = jax.jit(
            jax.grad(lambda xs, d: mapped(xs, d)[0].sum())
        )(xs, data_for(8))  # fmt: skip
    assert_close(result, expected)
    assert_close(grads, jax.vmap(jax.grad(lambda x, d: f(x, d)[0].sum()), (0, None))(
        jnp.stack([X, DX]), data_for(8)
    ))  # fmt: skip
    assert result[1].sharding.shard_shape(result[1].shape) == (1, 2, 3)


class OfASlice:
    """A device of a TPU slice."""

    platform, device_kind, process_index = "tpu", "TPU v5", 0

    def __init__(self, number):
        self.id, self.slice_index = number, number // 2


def test_the_slices_of_the_devices_of_a_mesh_that_is_passed_or_of_arguments():
    devices: Any = np.array([OfASlice(i) for i in range(4)])
    mesh = jax.sharding.Mesh(devices, ("clients",))
    of_mesh = NamedSharding(mesh, P("clients"))
    assert slices_of_devices(mesh, None) == (0, 0, 1, 1)
    assert slices_of_devices(None, [None, of_mesh]) == (0, 0, 1, 1)
    assert slices_of_devices(mesh.abstract_mesh, None) == ()
    assert slices_of_devices(make_mesh({"clients": 4}), None) == ()
