"""Abstract evaluation promises exactly the type that the lowering returns.

For every primitive, dtype and kind of mesh: shape, dtype, weak type, sharding, and the
manual axes over which a value varies. Nothing is compiled.

Covers: drjax._primitives.collectives, drjax._primitives.extrema,
drjax._primitives.map_fn, drjax._primitives.partition_index, drjax._sharding.avals,
drjax._compat.jax_types, drjax._compat.types.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import drjax
from drjax import _compat
from drjax._primitives import collectives, extrema, map_fn, partition_index
from drjax._primitives.map_fn import trace_group
from drjax._sharding.execute import as_operand
from drjax._sharding.layout import find_mesh, make_layout
from tests.helpers.meshes import AUTO, EXPLICIT, in_mesh, make_mesh

MESHES = {
    "none": None,
    "auto": ({"clients": 8}, AUTO),
    "explicit": ({"clients": 4, "model": 2}, EXPLICIT),
    "explicit, auto model": ({"clients": 4, "model": 2}, (EXPLICIT, AUTO)),
    "auto, explicit model": ({"clients": 4, "model": 2}, (AUTO, EXPLICIT)),
    "no axis": ({"model": 8}, EXPLICIT),
}
DTYPES = ("float32", "bfloat16", "float16", "complex64", "int8", "uint32", "bool")


def lowerings():
    """Name -> (primitive, lowering, whether the operand is partitioned)."""
    p = collectives
    yield "broadcast", (p.broadcast_p, p.execute_broadcast, False)
    yield "reduce_sum", (p.reduce_sum_p, p.execute_reduce_sum, True)
    yield "reduce_mean", (p.reduce_mean_p, p.execute_reduce_mean, True)
    yield "gather", (p.gather_p, p.execute_gather, True)
    yield "scatter", (p.scatter_p, p.execute_scatter, None)
    for name in ("max", "min"):
        identity = extrema.lowest if name == "max" else extrema.highest
        local = extrema._local_extremum(getattr(jnp, name), identity)
        execute = extrema._executor(local, name == "max")
        primitive = getattr(extrema, f"reduce_{name}_p")
        yield f"reduce_{name}", (primitive, execute, True)


CASES = dict(lowerings())


def types_of(f, *args) -> list[Any]:
    return [v.aval for v in jax.make_jaxpr(f)(*args).jaxpr.outvars]


def assert_same_type(promised, returned):
    for a, b in zip(promised, returned, strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        assert a.weak_type == b.weak_type
        assert a.manual_axis_type == b.manual_axis_type
        if not (a.sharding.mesh.empty or b.sharding.mesh.empty):
            assert a.sharding == b.sharding, (a, b)


def supports(name: str, dtype: str) -> bool:
    if name in ("reduce_max", "reduce_min"):
        return dtype != "complex64"
    if name == "reduce_mean":
        return jnp.issubdtype(dtype, jnp.inexact)
    return dtype != "bool" or name != "reduce_sum"


@pytest.mark.sampled
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", CASES)
def test_primitives(name, mesh):
    primitive, execute, partitioned = CASES[name]
    mesh = MESHES[mesh] and make_mesh(*MESHES[mesh])
    partition = drjax.Partition("clients", 8)
    with in_mesh(mesh):
        params = {"partition": partition, "mesh": find_mesh(partition)}
        for dtype in filter(functools.partial(supports, name), DTYPES):
            shape = (4,) if partitioned is False else (8, 4)
            x = np.ones(shape, np.dtype(jnp.dtype(dtype)))

            def operand(x):
                return as_operand(
                    jnp.asarray(x), make_layout(**params), bool(partitioned)
                )

            assert_same_type(
                types_of(lambda x: primitive.bind(operand(x), **params), x),
                types_of(lambda x: execute(operand(x), **params), x),
            )


@pytest.mark.parametrize("mesh", MESHES)
def test_map_fn_and_index(mesh):
    mesh = MESHES[mesh] and make_mesh(*MESHES[mesh])
    partition = drjax.Partition("clients", 8)

    def fn(x, y):
        scalar = jnp.sum(x * y)
        return [x + y, scalar, scalar > 0, jnp.zeros((3,), jnp.bfloat16), y[:2]]

    with in_mesh(mesh):
        params = {"partition": partition, "mesh": find_mesh(partition)}
        layout = make_layout(**params)

        def both(run):
            def f(x, y):
                args = [as_operand(jnp.asarray(v), layout, True) for v in (x, y)]
                avals = [_compat.typeof(v) for v in args]
                jaxpr, _ = trace_group(fn, avals, layout, "fn")
                return run(*args, jaxpr=jaxpr, **params, name="fn")

            return types_of(f, np.ones((8, 4), np.float32), np.ones((8, 4), np.float32))

        assert_same_type(both(map_fn.map_fn_p.bind), both(map_fn.execute_map))
        index = {**params, "per_group": False}
        assert_same_type(
            types_of(lambda: partition_index.partition_index_p.bind(**index)),
            types_of(lambda: partition_index.execute_partition_index(**index)),
        )


@pytest.mark.parametrize("name", ["explicit", "explicit, auto model"])
def test_types_that_users_see(name):
    """On Explicit axes, a partitioned value has the partition's axis in its type."""
    mesh = make_mesh(*MESHES[name])
    model = "model" if name == "explicit" else None

    @drjax.program(clients=8)
    def f(w):
        y = drjax.broadcast(w)
        z = drjax.map_fn(jnp.sin, y)
        return y, z, drjax.reduce_sum(z), drjax.gather(z)

    with in_mesh(mesh):
        w = jax.device_put(
            np.ones((4, 6), np.float32), jax.NamedSharding(mesh, P(model))
        )
        y, z, total, slices = (a.sharding.spec for a in types_of(f, w))
    assert y == z == P("clients", model, None)
    assert total == P(model, None)
    assert slices == P(None, model, None)


@pytest.mark.parametrize("check_vma", [True, False])
def test_types_inside_a_shard_map(check_vma):
    """Varying axes: what broadcast adds, reduce takes away."""
    partition = drjax.Partition("clients", 8)

    def body(x):
        params = {"partition": partition, "mesh": find_mesh(partition)}
        for primitive, execute, partitioned in CASES.values():
            length = {True: 2, None: 8, False: None}[partitioned]
            operand = x if length is None else jnp.zeros((length, 3)) + x[None]
            if partitioned:
                operand = jax.lax.pcast(operand, ("clients",), to="varying")
            assert_same_type(
                types_of(lambda v, p=primitive: p.bind(v, **params), operand),
                types_of(lambda v, e=execute: e(v, **params), operand),
            )
        return x

    with in_mesh(make_mesh({"clients": 4})):
        jax.make_jaxpr(
            jax.shard_map(body, in_specs=P(), out_specs=P(), check_vma=check_vma)
        )(np.ones(3, np.float32))
