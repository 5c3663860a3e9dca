"""Models in a group, sharded over other mesh axes as large models are written.

Covers: drjax._sharding.layout, drjax._sharding.execute, drjax._primitives.map_fn.
"""

import contextlib
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import drjax
from tests.helpers import models
from tests.helpers.cases import checkerboard
from tests.helpers.meshes import AUTO, EXPLICIT, make_mesh

AXES = {"clients": 2, "fsdp": 2, "tensor": 2}
RNG = np.random.RandomState(0)
X = RNG.randn(8, 10).astype(np.float32)
TABLE = RNG.randn(4, 16, 8).astype(np.float32)
TOKENS = RNG.randint(0, 12, (4, 4, 6))
eight = drjax.program(clients=8)


# ---------------------------------------------------------------------------------
# A shard_map of the model's own


def _with_its_sum(x, **kwargs):
    """x plus its sum, which is computed by a collective over the model's axis."""
    fn = lambda x: x + lax.psum(x.sum(), "data")
    return jax.shard_map(fn, in_specs=P("data"), out_specs=P("data"), **kwargs)(x)


SHARDED = {
    "whole mesh": lambda mesh: lambda x: _with_its_sum(x, mesh=mesh),
    "whole mesh, an axis": lambda mesh: (
        lambda x: _with_its_sum(x, mesh=mesh, axis_names={"data"})
    ),
    "mesh in context": lambda mesh: _with_its_sum,
    "mesh in context, an axis": lambda mesh: (
        lambda x: _with_its_sum(x, axis_names={"data"})
    ),
    "unchecked": lambda mesh: lambda x: _with_its_sum(x, mesh=mesh, check_vma=False),
    "made outside": lambda mesh: jax.shard_map(
        lambda x: x + lax.psum(x.sum(), "data"), mesh=mesh, in_specs=P("data"),
        out_specs=P("data"),
    ),
}  # fmt: skip
LAYOUTS = {
    "sharding constraint": lambda mesh: (
        lambda x: lax.with_sharding_constraint(x, jax.NamedSharding(mesh, P("data")))
    ),
    "device_put": lambda mesh: (
        lambda x: jax.device_put(x, jax.NamedSharding(mesh, P("data")))
    ),
    "jit": lambda mesh: jax.jit(
        lambda x: 1 * x, in_shardings=jax.NamedSharding(mesh, P("data"))
    ),
}
HOW = {
    "set_mesh": (jax.set_mesh, False),
    "with mesh": (lambda mesh: mesh, False),
    "mesh=": (lambda mesh: contextlib.nullcontext(), True),
}


@pytest.mark.sampled
@pytest.mark.filterwarnings("ignore:`with mesh.` context manager has been deprecated")
@checkerboard(
    other=[{"data": 2}, {"data": 2, "one": 1}],
    layer_name=[*SHARDED, *LAYOUTS],
    how=HOW,
)
def test_meshes_given_inside_a_group(layer_name, how, other):
    mesh = make_mesh({"clients": 2, **other})
    layer: Any = (SHARDED | LAYOUTS)[layer_name](mesh)
    context, mesh_arg = HOW[how]
    mesh_argument: Any = {"mesh": mesh} if mesh_arg else {}

    @eight
    def f(x):
        return drjax.map_fn(lambda x: jnp.sin(layer(x)), x, **mesh_argument)

    expected = X + X.sum(1, keepdims=True) if layer_name in SHARDED else X
    with context(mesh):
        result = jax.jit(f)(X)
        gradient = jax.jit(jax.grad(lambda x: jnp.sum(f(x) ** 2)))(X)
    np.testing.assert_allclose(result, np.sin(expected), rtol=1e-5, atol=1e-6)
    ct = 2 * np.sin(expected) * np.cos(expected)
    if layer_name in SHARDED:
        ct = ct + ct.sum(1, keepdims=True)
    np.testing.assert_allclose(gradient, ct, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("spec", [P(), P(None)], ids=str)
@pytest.mark.parametrize("shape", [{"clients": 4}, {"clients": 4, "one": 1}], ids=str)
def test_a_constraint_without_axes(shape, spec):
    """Layers with optional axes write it; all axes may be the partition's."""
    with jax.set_mesh(make_mesh(shape)):
        layer = lambda x: jnp.sin(lax.with_sharding_constraint(x, spec))
        f = eight(lambda x: drjax.map_fn(layer, x))
        for run in (jax.jit, drjax.jit):
            np.testing.assert_allclose(run(f)(X), np.sin(X), rtol=1e-5)
            result = run(jax.grad(lambda x: jnp.sum(f(x))))(X)
            np.testing.assert_allclose(result, np.cos(X), rtol=1e-4, atol=1e-6)


@pytest.mark.sampled
@pytest.mark.parametrize("layer_name", SHARDED)
def test_gradients_within_a_group_stay_in_it(layer_name):
    """The derivative of a shard_map over all axes adds up over the model's alone."""
    mesh = make_mesh({"clients": 4, "data": 2})
    layer = SHARDED[layer_name](mesh)
    steps = lambda x: x - 0.1 * jax.grad(lambda x: jnp.sum(layer(x) ** 2))(x)
    y = X + X.sum(1, keepdims=True)
    expected = X - 0.2 * (y + y.sum(1, keepdims=True))
    with jax.set_mesh(mesh):
        for run in (jax.jit, lambda f: drjax.jit(f, groups_per_step=1)):
            result = run(eight(lambda x: drjax.map_fn(steps, x)))(X)
            np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.sampled
@checkerboard(
    other=[{"tensor": 2}, {"fsdp": 2, "tensor": 2}],
    run=[jax.jit, drjax.jit],
    check_vma=[True, False],
)
def test_a_vmap_in_a_shard_map_of_the_model(other, run, check_vma):
    """Attention: its own vmaps are inside; with two axes, look-ups choose vmap."""
    heads = P(None, None, "tensor")
    attend = jax.shard_map(
        functools.partial(jax.nn.dot_product_attention, is_causal=True),
        in_specs=(heads,) * 3, out_specs=heads, check_vma=check_vma,
    )  # fmt: skip

    def loss(table, tokens):
        q = table[tokens].reshape(*tokens.shape, 2, 4)
        return jnp.sum(attend(q, jnp.sin(q), q) ** 2)

    @drjax.program(clients=4)
    def step(table, tokens):
        work = jax.value_and_grad(loss)
        return drjax.reduce_mean(drjax.map_fn(work, (drjax.broadcast(table), tokens)))

    shape = {"clients": 2, **other}
    with jax.set_mesh(make_mesh(shape)):
        alone = jax.jit(jax.value_and_grad(loss))
        each = [alone(TABLE[0], t) for t in TOKENS]
        expected = jax.tree.map(lambda *ys: np.mean(ys, 0), *each)
        placed = jax.device_put(TABLE[0], P("tensor", shape.get("fsdp") and "fsdp"))
        result = run(step)(placed, TOKENS)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5),
        result, expected,
    )  # fmt: skip


@pytest.mark.parametrize("kinds", [(EXPLICIT, AUTO), (EXPLICIT, EXPLICIT)], ids=str)
def test_a_whole_mesh_with_explicit_axes(kinds):
    mesh = make_mesh({"clients": 2, "data": 2}, kinds)

    def layer(x):
        if kinds[1] == EXPLICIT:
            x = jax.sharding.reshard(x, P("data"))
        return _with_its_sum(x, mesh=mesh)

    with jax.set_mesh(mesh):
        result = jax.jit(eight(lambda x: drjax.map_fn(layer, x)))(X)
    np.testing.assert_allclose(result, X + X.sum(1, keepdims=True), rtol=1e-5)


# ---------------------------------------------------------------------------------
# Look-ups in tables that are sharded over two axes

LOOK_UPS = {
    "rows": lambda t, k: t[k],
    "columns": lambda t, k: t[:, k % 8],
    "along": lambda t, k: jnp.take_along_axis(t, jnp.resize(k, (16, 8)), 0),
    "update": lambda t, k: t.at[k].add(1.0),
}
PLACEMENTS = [
    P("clients", "fsdp", "tensor"),
    P("clients", "tensor", "fsdp"),
    P("clients", ("fsdp", "tensor")),
    P("clients", None, ("fsdp", "tensor")),
    P("clients", "fsdp"),
]


@pytest.mark.sampled
@checkerboard(
    4,
    look_up=LOOK_UPS,
    tokens=[P("clients"), P("clients", "fsdp")],
    placement=PLACEMENTS,
)
def test_look_ups_in_sharded_tables(look_up, tokens, placement):
    """XLA aborts for these where the partition's axes are Manual."""
    mesh = make_mesh(AXES)

    @drjax.program(clients=4)
    def f(table, tokens):
        result = drjax.map_fn(LOOK_UPS[look_up], (table, tokens))
        return drjax.reduce_mean(drjax.map_fn(lambda y: jnp.sum(y**2), result))

    both = jax.value_and_grad(f)
    expected = both(TABLE, TOKENS)
    shardings = tuple(jax.NamedSharding(mesh, spec) for spec in (placement, tokens))
    with jax.set_mesh(mesh):
        runs: list[Any] = [jax.jit(both, in_shardings=shardings)]
        if placement == PLACEMENTS[0]:
            runs.append(drjax.jit(both, groups_per_step=1, in_shardings=shardings))
        for run in runs:
            result = run(TABLE, TOKENS)
            for a, b in zip(result, expected, strict=True):
                np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5)


# ---------------------------------------------------------------------------------
# Reductions of narrow floats

MESHES = {
    "no other": {"clients": 4},
    "one other": {"clients": 4, "model": 2},
    "one of size one": {"clients": 4, "model": 1},
    "two others": AXES,
}
REDUCTIONS = {
    "sum": drjax.reduce_sum,
    "mean": drjax.reduce_mean,
    "where": lambda x: drjax.reduce_mean(x, where=jnp.arange(8) != 3),
    "max": drjax.reduce_max,
}


@pytest.mark.sampled
@checkerboard(4, shape=MESHES, dtype=["bfloat16", "float16"])
def test_reductions_of_narrow_floats(shape, dtype):
    mesh = make_mesh(MESHES[shape])
    x = jnp.asarray(RNG.randint(-8, 8, (8, 3)), dtype)

    @eight
    def f(x):
        y = drjax.map_fn(lambda x: 2 * x, x)
        return [reduce(y) for reduce in REDUCTIONS.values()]

    loss = lambda x: jnp.float32(sum(jnp.sum(y**2) for y in f(x)))
    expected, slope = f(x), jax.grad(loss)(x)
    with jax.set_mesh(mesh):
        for run in (jax.jit, drjax.jit):
            for a, b in zip(run(f)(x), expected, strict=True):
                assert a.dtype == b.dtype == dtype
                np.testing.assert_allclose(a, b, rtol=0.01)
            np.testing.assert_allclose(run(jax.grad(loss))(x), slope, rtol=0.02)


@pytest.mark.parametrize("dtype, unit", [("bfloat16", 2.0**-8), ("float16", 2.0**-11)])
def test_the_rounding_of_narrow_sums_has_a_bound(dtype, unit):
    """As the page on determinism says. CPUs add bfloat16 of devices in float32."""
    x = jnp.asarray(RNG.randn(8, 1000), dtype)
    exact = np.asarray(x, np.float64)
    of_devices = exact.reshape(4, 2, 1000).sum(1)
    with jax.set_mesh(make_mesh({"clients": 4})):
        result = jax.jit(eight(drjax.reduce_sum))(x)
    error = np.abs(np.asarray(result, np.float64) - exact.sum(0))
    summed = np.abs(of_devices).sum(0)
    bound = 4 * summed if dtype == "float16" else summed + np.abs(exact.sum(0))
    assert (error <= 1.01 * unit * bound).all()  # second-order terms
    assert (error > 0).any()


def test_a_sum_of_narrow_floats_is_one_all_reduce():
    with jax.set_mesh(make_mesh(AXES)):
        narrow = jnp.ones((8, 3), "bfloat16")
        report = drjax.collectives(eight(drjax.reduce_sum))(narrow)
    assert report.counts == {"all-reduce": 1}


# ---------------------------------------------------------------------------------
# Results that depend on no operand

CONSTANTS = {
    "zeros": jnp.zeros_like,
    "index": lambda x: drjax.partition_index(),
    "key": lambda x: jax.random.normal(jax.random.key(0), (3,)),
    "zero gradient": jax.grad(lambda x: jnp.sum(jnp.sign(x))),
}


@pytest.mark.filterwarnings("ignore:`with mesh.` context manager has been deprecated")
@checkerboard(
    shape=["no other", "two others"], fn=CONSTANTS, how=["mesh=", "with mesh"]
)
def test_mapped_results_without_operands(fn, shape, how):
    mesh = make_mesh(MESHES[shape])
    context, mesh_arg = HOW[how]
    mesh_argument: Any = {"mesh": mesh} if mesh_arg else {}

    @eight
    def f(x):
        y = drjax.map_fn(CONSTANTS[fn], x, **mesh_argument)
        return y, drjax.reduce_sum(y, **mesh_argument)

    y = np.stack([CONSTANTS[fn](x) if fn != "index" else i for i, x in enumerate(X)])
    expected = y, y.sum(0)
    with context(mesh):
        result = jax.jit(f)(X)
    for a, b in zip(result, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


# ---------------------------------------------------------------------------------
# Layers as in large models


def wide(x):
    return np.asarray(x, np.float32)


@functools.cache
def round_of_a_model(dtype):
    """The arguments of a round, and what each group alone makes of it."""
    params = models.initial(dtype)
    tokens = np.random.RandomState(2).randint(0, 16, (4, 2, 8))
    alone = make_mesh(AXES | {"clients": 1})
    with jax.set_mesh(alone):
        one = jax.jit(models.local_sgd(alone))
        changes = [one(params, t) for t in tokens]
    mean = jax.tree.map(lambda *x: np.mean(list(map(wide, x)), 0), *changes)
    return params, tokens, jax.tree.map(lambda p, x: wide(p) + x, params, mean)


@checkerboard(4, dtype=["float32", "bfloat16"], how=["jax.jit", "drjax.jit"])
def test_a_round_of_a_model_with_two_axes(how, dtype):
    params, tokens, expected = round_of_a_model(dtype)
    mesh = make_mesh(AXES)
    with jax.set_mesh(mesh):
        place = lambda x, spec: jax.device_put(x, jax.NamedSharding(mesh, spec))
        placed = jax.tree.map(place, params, models.SPECS)
        run = jax.jit if how == "jax.jit" else lambda f: drjax.jit(f, 1)
        result = run(models.diloco_round(mesh, 4))(placed, place(tokens, P("clients")))
    tolerance = 2e-5 if dtype == "float32" else 0.02
    close = lambda a, b: np.testing.assert_allclose(
        wide(a), b, rtol=tolerance, atol=tolerance
    )
    jax.tree.map(close, result, expected)


@pytest.mark.parametrize("run", [jax.jit, drjax.jit])
def test_a_shard_map_of_the_model_beside_look_ups_gathers_no_groups(run):
    double = jax.shard_map(lambda x: 2 * x, in_specs=P("fsdp"), out_specs=P("fsdp"))

    def work(x):
        return double(x).at[jnp.arange(2)].add(1.0)

    x = np.ones((4, 8, 8), np.float32)
    fn = run(drjax.program(clients=4)(lambda x: drjax.map_fn(work, x)))
    with jax.set_mesh(make_mesh(AXES)):
        own = jax.device_put(x, P("clients", "fsdp"))
        assert not drjax.collectives(fn)(own).collectives
        np.testing.assert_array_equal(fn(own).sum(axis=(1, 2)), [128 + 2 * 8] * 4)


def test_groups_stay_apart_where_the_compiler_partitions_them():
    """Its only collective over the groups is that of the mean."""
    mesh = make_mesh({"clients": 4, "fsdp": 2, "one": 1})
    f = drjax.program(clients=4)(
        lambda t, k: drjax.reduce_mean(drjax.map_fn(LOOK_UPS["rows"], (t, k)))
    )
    with jax.set_mesh(mesh):
        report = drjax.collectives(f)(TABLE, TOKENS)
    assert report.counts == {"all-reduce": 1}


@pytest.mark.sampled
@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("step", [None, 1])
def test_fewer_groups_than_devices(n, step):
    """Each device has sums of its own, also one without groups."""
    work = lambda t, k: (t[k].sum(0), t[k] ** 2)

    @drjax.program(clients=n)
    def f(table, tokens):
        total, slices = drjax.map_fn(work, (drjax.broadcast(table), tokens))
        return drjax.reduce_sum(total), drjax.reduce_max(slices), slices

    t, k = TABLE[0], TOKENS[:n, 0]
    with jax.set_mesh(make_mesh({"data": 2, "clients": 2, "model": 2})):
        result = drjax.jit(f, groups_per_step=step)(t, k)
        for x, y in zip(result, jax.jit(f)(t, k), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5)
    np.testing.assert_allclose(result[0], t[k].sum((0, 1)), rtol=1e-5)
