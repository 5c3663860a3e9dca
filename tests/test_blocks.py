"""Every building block over every kind of tree and dtype, and inside every feature."""

import dataclasses
import functools
import inspect
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.experimental import io_callback
from jax.sharding import PartitionSpec as P

import drjax
from tests.meshes import EXPLICIT, in_mesh, in_mesh_of, make_mesh

N = 4
four = drjax.program(clients=N)


class Pair(NamedTuple):
    first: Any
    second: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
    params: Any
    step: Any
    name: str = dataclasses.field(metadata={"static": True}, default="static")


def rows(*shape, dtype: Any = np.float32, seed=0):
    """Random `[N, *shape]` numbers that 16-bit floats hold exactly."""
    return np.random.RandomState(seed).randint(-8, 8, (N, *shape)).astype(dtype)


def nnx_state():
    return jax.tree.map(
        lambda x: jnp.asarray(rows()), nnx.state(nnx.Dict(a=nnx.Param(0.0)))
    )


TREES = {
    "array": lambda: rows(2),
    "dict": lambda: {"a": rows(), "b": {"c": rows(2, 3)}},
    "list": lambda: [rows(), [rows(2)]],
    "tuple": lambda: (rows(), rows(2)),
    "named tuple": lambda: Pair(rows(), rows(3)),
    "dataclass": lambda: State(rows(2), rows(dtype=np.int32)),
    "nnx.State": nnx_state,
    "None leaves": lambda: {"a": None, "b": rows()},
    "None": lambda: None,
    "empty": lambda: {},
    "empty array": lambda: rows(0, 2),
    "jax array": lambda: jnp.asarray(rows(2)),
}
MESHES = [None, {"clients": 2}]


def assert_trees_equal(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


ON_TREES = {
    "broadcast": (drjax.broadcast, lambda x: np.broadcast_to(x, (N, *x.shape))),
    "reduce_sum": (drjax.reduce_sum, lambda x: x.sum(0)),
    "reduce_mean": (drjax.reduce_mean, lambda x: x.mean(0, dtype=np.float32)),
    "reduce_max": (drjax.reduce_max, lambda x: x.max(0)),
    "reduce_min": (drjax.reduce_min, lambda x: x.min(0)),
    "reduce_weighted_mean": (
        lambda x: drjax.reduce_weighted_mean(x, np.array([0, 2, 0, 2])),
        lambda x: np.float32(x[1] + x[3]) / 2,
    ),
    "reduce_sum(where)": (
        lambda x: drjax.reduce_sum(x, where=[True, False, True, False]),
        lambda x: x[0] + x[2],
    ),
    "reduce_mean(where)": (
        lambda x: drjax.reduce_mean(x, where=[True, False, True, False]),
        lambda x: np.float32(x[0] + x[2]) / 2,
    ),
    "select": (lambda x: drjax.select(x, 2), lambda x: x[2]),
    "gather": (drjax.gather, lambda x: x),
    "scatter": (drjax.scatter, lambda x: x),
    "map_fn": (
        lambda x: drjax.map_fn(lambda x: jax.tree.map(lambda a: 2 * a, x), [x])[0],
        lambda x: 2 * x,
    ),
    "shard": (drjax.shard, lambda x: x),
}


@pytest.mark.parametrize("tree", TREES)
def test_trees(tree):
    x = TREES[tree]()
    jitted = [name for name in ON_TREES if name != "shard"]
    found = jax.jit(four(lambda x: [ON_TREES[name][0](x) for name in jitted]))(x)
    found = dict(zip(jitted, found, strict=True)) | {"shard": four(drjax.shard)(x)}
    for name, (_, expected) in ON_TREES.items():
        assert_trees_equal(
            found[name], jax.tree.map(lambda a, e=expected: e(np.asarray(a)), x)
        )


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("block", ON_TREES)
def test_trees_eagerly(block, mesh):
    fn, expected = ON_TREES[block]
    x = TREES["dict"]()
    with in_mesh_of(mesh):
        found = four(fn)(x)
    assert_trees_equal(found, jax.tree.map(lambda a: expected(np.asarray(a)), x))


def test_numbers_are_broadcast():
    for number in (2, 2.0, True, 2j, np.float32(2), np.int64(2), np.bool_(True)):
        y = four(drjax.broadcast)(number)
        assert y.shape == (N,) and (y == number).all()
        assert y.dtype == jnp.asarray(number).dtype
        assert y.weak_type == jnp.asarray(number).weak_type


def test_a_tuple_is_unpacked_and_others_are_one_argument():
    a, b = rows(), rows(seed=1)
    sum_all = lambda *args: sum(jax.tree.leaves(args)) * len(args)
    for arg, count in (
        ((a, b), 2), ([a, b], 1), (Pair(a, b), 1), ({"a": a, "b": b}, 1),
        (((a, b),), 1), (a, 1), ((a, None), 2),
    ):  # fmt: skip
        expected = count * sum(jax.tree.leaves(arg))
        assert_trees_equal(four(lambda x: drjax.map_fn(sum_all, x))(arg), expected)


# ---------------------------------------------------------------------------------
# Dtypes


FLOATS = [np.float32, jnp.bfloat16, np.float16]
OTHERS = [np.int8, np.uint8, np.int32, np.bool_, np.complex64, np.int64, np.float64]
DTYPES = [np.dtype(d) for d in (*FLOATS, *OTHERS)]


def of_dtype(dtype, *shape):
    x = rows(*shape)
    return (np.abs(x) if dtype.kind in "u" else x).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reductions_have_the_dtypes_of_jax_numpy(dtype):
    x, where = of_dtype(dtype, 3), np.array([True, False, True, True])
    blocks = {"sum": drjax.reduce_sum, "mean": drjax.reduce_mean}
    if dtype.kind != "c":
        blocks |= {"max": drjax.reduce_max, "min": drjax.reduce_min}

    @four
    def program(x):
        all_groups = {name: block(x) for name, block in blocks.items()}
        chosen = [drjax.reduce_sum(x, where), drjax.reduce_mean(x, where)]
        return all_groups, chosen

    def reference(x):
        chosen: dict[str, Any] = dict(axis=0, where=where[:, None])
        all_groups = {name: getattr(jnp, name)(x, axis=0) for name in blocks}
        return all_groups, [jnp.sum(x, **chosen), jnp.mean(x, **chosen)]

    expected = jax.jit(reference)(x)
    for found in (program(x), jax.jit(program)(x), jax.eval_shape(program, x)):
        for y, e in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            assert (y.dtype, y.shape) == (e.dtype, e.shape)
            if isinstance(y, jax.Array):
                rtol = 1e-2 if y.dtype == jnp.bfloat16 else 1e-3
                np.testing.assert_allclose(
                    np.asarray(y).astype(complex), np.asarray(e).astype(complex), rtol
                )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_blocks_that_keep_the_dtype(dtype):
    x = of_dtype(dtype, 3)

    @four
    def program(x):
        return [
            drjax.broadcast(x), drjax.gather(x), drjax.scatter(x), drjax.select(x, 1),
            drjax.map_fn(lambda a: a, x),
        ]  # fmt: skip

    expected = [np.broadcast_to(x, (N, N, 3)), x, x, x[1], x]
    abstract = jax.eval_shape(program, x)
    for y, e, a in zip(jax.jit(program)(x), expected, abstract, strict=True):
        assert y.dtype == a.dtype == jnp.asarray(x).dtype
        np.testing.assert_array_equal(y, e)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weighted_means_have_the_dtype_of_a_mean(dtype):
    x, w = of_dtype(dtype, 3), np.array([1, 0, 1, 1])
    wtypes = (np.float32, jnp.bfloat16, np.int32, np.uint8, np.bool_)

    @four
    def program(x):
        return [drjax.reduce_weighted_mean(x, w.astype(wtype)) for wtype in wtypes]

    dtype_of_mean = jax.eval_shape(lambda x: jnp.mean(x, axis=0), x).dtype
    expected = (x[0].astype(complex) + x[2] + x[3]) / 3
    for y, a in zip(jax.jit(program)(x), jax.eval_shape(program, x), strict=True):
        assert y.dtype == a.dtype == dtype_of_mean
        rtol = 1e-2 if y.dtype == jnp.bfloat16 else 2e-3
        np.testing.assert_allclose(np.asarray(y).astype(complex), expected, rtol=rtol)


@pytest.mark.parametrize("mesh", MESHES)
def test_sixteen_bits_neither_overflow_nor_lose_precision(mesh):
    n, rng = 4096, np.random.RandomState(0)
    many = drjax.program(clients=n)
    with in_mesh_of(mesh):
        big = np.full((n, 2), 60000, np.float16)
        w = np.full(n, 60000, np.float16)
        for mean in (
            many(drjax.reduce_mean)(big),
            many(drjax.reduce_mean)(big, np.arange(n) % 2 == 0),
            many(drjax.reduce_weighted_mean)(big, w),
            many(drjax.reduce_weighted_mean)(big, np.arange(n)),
        ):
            assert mean.dtype == jnp.float16
            np.testing.assert_array_equal(mean, np.float16(60000))
        for dtype in (jnp.bfloat16, jnp.float16):
            x = (1 + rng.rand(n)).astype(dtype)
            w = rng.rand(n).astype(dtype)
            x64, w64 = x.astype(np.float64), w.astype(np.float64)
            for mean, expected in (
                (many(drjax.reduce_weighted_mean)(x, w), (x64 * w64).sum() / w64.sum()),
                (many(drjax.reduce_mean)(x), x64.mean()),
            ):
                ulp = float(jnp.finfo(dtype).eps) * 2
                assert abs(float(mean) - expected) <= ulp
        exact = many(drjax.reduce_sum)(np.full(n, 0.25, dtype=jnp.bfloat16))
        assert float(exact) == n / 4


def test_weights_as_a_tree_and_as_leading_axes():
    x = {"a": rows(2), "b": rows(2, 3), "none": None}
    first = np.array([0, 1, 0, 0], np.float32)
    w = {"a": first, "b": rows(2, seed=3) ** 2 + 1, "none": None}
    y = four(drjax.reduce_weighted_mean)(x, w)
    np.testing.assert_allclose(y["a"], x["a"][1])
    wide = w["b"][:, :, None]
    np.testing.assert_allclose(y["b"], (wide * x["b"]).sum(0) / wide.sum(0), rtol=1e-5)


def test_weighted_mean_differentiates_in_values_and_in_weights_at_zero():
    x, w = rows(3) + 0.5, np.array([0, 1, 2, 0], np.float32)
    reference = lambda x, w: ((w[:, None] * x).sum(0) / w.sum()).sum()
    program = lambda x, w: four(drjax.reduce_weighted_mean)(x, w).sum()
    actual = jax.grad(program, (0, 1))(x, w)
    for a, b in zip(actual, jax.grad(reference, (0, 1))(x, w), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


@pytest.mark.parametrize("mesh", MESHES)
def test_select(mesh):
    x = np.array([[1, np.nan], [2, 3], [np.inf, 4], [np.nan, -np.inf]], np.float32)
    program = four(drjax.select)
    with in_mesh_of(mesh):
        for i in (0, -1, np.int8(-2)):
            y = four(lambda x, i=i: drjax.select(x, i))(x)
            np.testing.assert_array_equal(y, x[int(i)])
        traced = jax.jit(program)
        for i in (0, 1, 2, 3, -1, -4, np.uint8(3)):
            np.testing.assert_array_equal(traced(x, i), x[int(i)])
        grad = jax.grad(lambda x: program(x, 1).sum())(x)
        np.testing.assert_array_equal(grad, np.eye(4)[1][:, None] * np.ones(2))
        keys = jax.random.split(jax.random.key(7), N)
        z = rows() * 1j
        tree = {"key": keys, "flag": x > 1, "z": z, "none": None}
        got = four(lambda t: drjax.select(t, 1))(tree)
        assert got["key"] == keys[1] and got["none"] is None
        np.testing.assert_array_equal(got["flag"], (x > 1)[1])
        np.testing.assert_array_equal(got["z"], z[1])
    grids = jax.random.split(jax.random.key(7), (N, 2))
    assert (four(lambda k: drjax.select(k, 3))(grids) == grids[3]).all()


@pytest.mark.parametrize("mesh", [*MESHES, {"clients": 3}])
def test_typed_keys(mesh):
    key, keys = jax.random.key(1), jax.random.split(jax.random.key(2), N)

    @jax.jit
    @four
    def program(key, keys):
        return (
            drjax.broadcast(key), drjax.gather(keys), drjax.scatter(keys),
            drjax.map_fn(jax.random.split, keys), drjax.map_fn(jax.random.normal, keys),
        )  # fmt: skip

    with in_mesh_of(mesh):
        copies, gathered, scattered, split, draws = program(key, keys)
    assert (copies == key).all() and copies.shape == (N,)
    assert (gathered == keys).all() and (scattered == keys).all()
    assert (split == jax.vmap(jax.random.split)(keys)).all()
    np.testing.assert_allclose(draws, jax.vmap(jax.random.normal)(keys), rtol=1e-6)
    if N % (mesh or {"clients": 1})["clients"] == 0:
        with in_mesh_of(mesh):
            assert (four(drjax.shard)({"k": keys})["k"] == keys).all()


# ---------------------------------------------------------------------------------
# Mapped functions


W = jnp.array([1, 2, 3], jnp.float32)


@jax.custom_vjp
def doubled(x):
    return 2 * x


doubled.defvjp(lambda x: (2 * x, None), lambda _, ct: (3 * ct,))


@jax.custom_jvp
def tripled(x):
    return 3 * x


tripled.defjvp(lambda p, t: (3 * p[0], 4 * t[0]))

host_sin = lambda x: jax.pure_callback(
    np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="sequential"
)

FEATURES = {
    "closure over arrays": lambda a: (a * W).sum() + np.array([1, 2], np.float32).sum(),
    "jit": jax.jit(lambda a: a * W[0] + 1),
    "grad": jax.grad(lambda a: jnp.sin(a) * a),
    "hessian": jax.hessian(lambda a: a**3),
    "scan": lambda a: lax.scan(lambda c, x: (c * x, c), a, W)[0],
    "fori": lambda a: lax.fori_loop(0, 3, lambda i, c: c * a + i, 1.0),
    "cond": lambda a: lax.cond(a > 0, jnp.sin, jnp.cos, a),
    "cond on a constant": lambda a: lax.cond(W[0] > 0, jnp.sin, jnp.cos, a),
    "switch": lambda a: lax.switch(a.astype(int) % 2, [jnp.sin, lambda a: a * 2], a),
    "custom_vjp": lambda a: doubled(a) * a,
    "custom_jvp": lambda a: tripled(a) * a,
    "checkpoint": jax.checkpoint(lambda a: jnp.sin(jnp.sin(a))),
    "random": lambda a: a * jax.random.normal(jax.random.key(3), (2,)).sum(),
    "vmap": lambda a: jax.vmap(lambda b: a * b)(W).sum(),
    "vmap with collectives": lambda a: jax.vmap(
        lambda b: a * lax.psum(b, "inner"), axis_name="inner"
    )(W).sum(),
    "linalg": lambda a: jnp.linalg.inv(jnp.eye(2) * (a + 20))[0, 0],
    "sort": lambda a: jnp.sort(W * a)[0],
    "relu and softmax": lambda a: jax.nn.softmax(jax.nn.relu(W * a))[0],
}
ONLY_VALUES = {
    "while": lambda a: lax.while_loop(lambda c: c < 10, lambda c: c * c + 1, a),
    "pure_callback": host_sin,
}


FEATURE_X = np.array([-1.5, 0.5, 2.0, 3.5], np.float32)


@functools.cache
def expected_of_feature(feature):
    """Values and slopes of a feature, group by group."""
    fn = FEATURES.get(feature) or ONLY_VALUES[feature]
    fn = jax.jit(jax.value_and_grad(fn) if feature in FEATURES else fn)
    return jax.tree.map(lambda *ys: np.stack(ys), *[fn(a) for a in FEATURE_X])


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("feature", [*FEATURES, *ONLY_VALUES])
def test_features_inside_a_mapped_function(feature, mesh):
    fn = FEATURES.get(feature) or ONLY_VALUES[feature]

    def program(x):
        y = four(lambda x: drjax.map_fn(fn, x))(x)
        return y.sum(), y

    def value_and_slopes(x):
        if feature in ONLY_VALUES:
            return program(x)[1]
        (_, y), slopes = jax.value_and_grad(program, has_aux=True)(x)
        return y, slopes

    with in_mesh_of(mesh):
        found = jax.jit(value_and_slopes)(FEATURE_X)
    close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-6)
    jax.tree.map(close, found, expected_of_feature(feature))


def test_closures_over_tracers_are_broadcast():
    x = rows() + 0.5

    @four
    def program(w, x):
        local = jnp.sin(w)
        return drjax.reduce_sum(drjax.map_fn(lambda a: local * a + w, x))

    reference = lambda w, x: (jnp.sin(w) * x + w).sum()
    np.testing.assert_allclose(program(2.0, x), reference(2.0, x), rtol=1e-6)
    grads = jax.jit(jax.grad(program, (0, 1)))(2.0, x)
    for a, b in zip(grads, jax.grad(reference, (0, 1))(2.0, x), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    jaxpr = str(jax.make_jaxpr(jax.grad(program))(2.0, x))
    assert jaxpr.count("drjax_broadcast") >= 2 and "drjax_reduce_sum" in jaxpr
    batched = jax.vmap(program, (0, None))(jnp.array([1, 2], jnp.float32), x)
    np.testing.assert_allclose(
        batched, [reference(1.0, x), reference(2.0, x)], rtol=1e-6
    )


RESULTS = {
    "nothing": (lambda a: None, None),
    "an empty tree": (lambda a: {}, {}),
    "a constant": (lambda a: 1.5, np.full(N, 1.5, np.float32)),
    "an array closed over": (lambda a: W, np.tile(W, (N, 1))),
    "its argument": (lambda a: a, np.arange(N)),
    "a tree": (lambda a: {"a": (a, None), "p": Pair(a, [])},
               {"a": (np.arange(N), None), "p": Pair(np.arange(N), [])}),
    "twice the same": (lambda a: [a, a], [np.arange(N)] * 2),
    "a number of another dtype": (lambda a: a > 1, np.arange(N) > 1),
}  # fmt: skip


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("result", RESULTS)
def test_results_of_mapped_functions(result, mesh):
    fn, expected = RESULTS[result]
    program = four(lambda x: drjax.map_fn(fn, x))
    with in_mesh_of(mesh):
        assert_trees_equal(program(np.arange(N)), expected)
        assert_trees_equal(jax.jit(program)(np.arange(N)), expected)


@pytest.mark.parametrize("mesh", [*MESHES, {"clients": 3}])
@pytest.mark.parametrize("arg", [None, (), {}, []], ids=str)
def test_maps_without_operands_still_run_once_a_group(arg, mesh):
    program = four(lambda: drjax.map_fn(lambda *_: (1.0, drjax.partition_index()), arg))
    with in_mesh_of(mesh):
        for y in (program(), jax.jit(program)()):
            assert_trees_equal(y, (np.ones(N), np.arange(N)))


@pytest.mark.parametrize("mesh", MESHES)
def test_effects_inside_a_mapped_function(mesh, capfd):
    seen = []

    def note(a):
        seen.append(float(a))
        return np.float32(a) + 1

    @four
    def program(x):
        def local(a):
            jax.debug.print("group value {a}", a=a)
            return io_callback(note, jax.ShapeDtypeStruct((), jnp.float32), a)

        return drjax.map_fn(local, x)

    with in_mesh_of(mesh):
        np.testing.assert_allclose(jax.jit(program)(rows()), rows() + 1)
        jax.effects_barrier()
    assert sorted(seen) == sorted(rows().tolist())
    assert capfd.readouterr().out.count("group value") == N


def test_an_effect_whose_result_is_unused_still_happens():
    seen = []

    @jax.jit
    @four
    def program(x):
        drjax.map_fn(lambda a: jax.debug.callback(lambda a: seen.append(int(a)), a), x)
        return drjax.reduce_sum(x)

    program(np.arange(N))
    jax.effects_barrier()
    assert sorted(seen) == [0, 1, 2, 3]


@pytest.mark.parametrize("through", ["shard_map", "with_sharding_constraint"])
def test_sharding_over_another_axis_inside_a_group(through):
    def local(a):
        if through == "with_sharding_constraint":
            return lax.with_sharding_constraint(jnp.sin(a), P("model")).sum()
        inner = jax.shard_map(
            lambda b: lax.psum(jnp.sin(b).sum(), "model"), in_specs=P("model"),
            out_specs=P(), axis_names={"model"},
        )  # fmt: skip
        return inner(a)

    program = four(lambda x: drjax.reduce_sum(drjax.map_fn(local, x)))
    x = rows(4)
    mesh = make_mesh({"clients": 2, "model": 2})
    # The gradient of jax.shard_map alone fails JAX's check of leaks, too.
    with jax.set_mesh(mesh), jax.check_tracer_leaks(False):
        np.testing.assert_allclose(jax.jit(program)(x), np.sin(x).sum(), rtol=1e-5)
        grads = jax.jit(jax.grad(program))(x)
        np.testing.assert_allclose(grads, np.cos(x), rtol=1e-5)


# ---------------------------------------------------------------------------------
# Group numbers and randomness


@jax.custom_vjp
def scaled_backward(a):
    return a * drjax.partition_index()


scaled_backward.defvjp(
    lambda a: (scaled_backward(a), None),
    lambda _, ct: (ct * drjax.partition_index(partition={"clients": N}),),
)

I = lambda: drjax.partition_index().astype(jnp.float32)
NUMBERED = {
    "plain": lambda a: a * I(),
    "scan": lambda a: lax.scan(lambda c, _: (c + a * I() / 2, None), 0 * a, length=2)[
        0
    ],
    "cond": lambda a: lax.cond(a > 0, lambda a: a * I(), lambda a: I() * a, a),
    "switch": lambda a: lax.switch(
        drjax.partition_index(), [lambda a, i=i: a * i for i in range(N)], a
    ),
    "while": lambda a: a * lax.while_loop(lambda c: c < I(), lambda c: c + 1, 0.0),
    "jit": jax.jit(lambda a: a * I()),
    "vmap": lambda a: jax.vmap(lambda b: a * b * I() / 6)(W).sum(),
    "vmap without use": lambda a: jax.vmap(lambda b: I(), axis_size=2)(W[:2])[0] * a,
    "grad": lambda a: jax.grad(lambda a: a * a * I() / 2)(a),
    "checkpoint": jax.checkpoint(lambda a: a * I()),
    "custom_vjp backward": scaled_backward,
    "explicit": lambda a: a * drjax.partition_index(partition={"clients": N}),
}


@pytest.mark.parametrize("mesh", [None, {"clients": 3}])
@pytest.mark.parametrize("where", NUMBERED)
def test_the_groups_number_anywhere_in_a_mapped_function(where, mesh):
    x = np.array([-1.5, 0.5, 2.0, 3.5], np.float32)
    batch = np.stack([x, 2 * x], 1)
    program = lambda x: four(lambda x: drjax.map_fn(NUMBERED[where], x))(x)

    @jax.jit
    def each_way(x, batch):
        grads = jax.grad(lambda x: program(x).sum())(x)
        return program(x), grads, jax.vmap(program, 1, 1)(batch)

    with in_mesh_of(mesh):
        value, grads, batched = each_way(x, batch)
    np.testing.assert_allclose(value, x * np.arange(N), rtol=1e-6)
    np.testing.assert_allclose(grads, np.arange(N), rtol=1e-6)
    np.testing.assert_allclose(batched, batch * np.arange(N)[:, None], rtol=1e-6)


def test_randomness_belongs_to_the_group_not_to_the_device():
    @drjax.program(clients=8)
    def draw(key):
        def local(key):
            return jax.random.normal(jax.random.fold_in(key, drjax.partition_index()))

        return drjax.map_fn(local, drjax.broadcast(key))

    key = jax.random.key(5)
    expected = [jax.random.normal(jax.random.fold_in(key, i)) for i in range(8)]
    for shape in (None, {"clients": 3}, {"clients": 8}):
        with in_mesh_of(shape):
            np.testing.assert_array_equal(jax.jit(draw)(key), expected)


def test_partition_index_and_size_in_a_program():
    program = four(lambda: (drjax.partition_index(), drjax.partition_size()))
    index, size = program()
    assert size == N and type(size) is int and index.dtype == jnp.int32
    np.testing.assert_array_equal(index, np.arange(N))
    sizes = four(lambda x: drjax.map_fn(lambda a: a * drjax.partition_size(), x))
    np.testing.assert_array_equal(sizes(np.arange(N)), N * np.arange(N))


# ---------------------------------------------------------------------------------
# Nested programs


@drjax.program(pods=3)
def pod_total(x, w):
    """Each of three pods adds `w` times its number to `x`, times the outer number."""

    def local(a):
        outer = drjax.partition_index(partition={"clients": N})
        return a * w * (1 + drjax.partition_index()) + outer

    return drjax.reduce_sum(drjax.map_fn(local, drjax.broadcast(x)))


def nested(x, w):
    return four(lambda x: drjax.map_fn(lambda a: pod_total(a, w), x))(x)


@pytest.mark.parametrize(
    "mesh", [None, {"clients": 2}, {"pods": 3}, {"clients": 2, "pods": 3}]
)
def test_nested_programs(mesh):
    x = rows() + 0.5
    expected = x * 2.0 * 6 + 3 * np.arange(N)
    with in_mesh_of(mesh):
        np.testing.assert_allclose(nested(x, 2.0), expected, rtol=1e-6)
        np.testing.assert_allclose(jax.jit(nested)(x, 2.0), expected, rtol=1e-6)
        total = lambda x, w: nested(x, w).sum()
        dx, dw = jax.jit(jax.grad(total, (0, 1)))(x, 2.0)
        np.testing.assert_allclose(dx, np.full(N, 12.0), rtol=1e-6)
        np.testing.assert_allclose(dw, 6 * x.sum(), rtol=1e-5)


def test_a_program_called_by_a_program_has_its_own_partition():
    @drjax.program(other=3)
    def inner(x):
        return drjax.reduce_sum(drjax.broadcast(x)), drjax.partition_size()

    @four
    def outer(x):
        before = drjax.partition_size()
        y, size = inner(x)
        return drjax.reduce_sum(drjax.broadcast(y)), (
            before,
            size,
            drjax.partition_size(),
        )

    assert outer(1.0) == (12.0, (4, 3, 4))


def test_partition_argument_names_another_program():
    @four
    def outer(x):
        other = drjax.broadcast(x, partition={"other": 3})
        same = drjax.broadcast(x, partition=inner)
        return other, drjax.reduce_sum(same, partition=drjax.Partition("inner", 5))

    inner = drjax.program(inner=5)(lambda: None)
    other, total = outer(1.0)
    assert other.shape == (3,) and total == 5.0


# ---------------------------------------------------------------------------------
# Programs as Python functions


def test_programs_keep_name_docstring_and_signature():
    @four
    def program(x: int, *, scale: float = 2.0) -> int:
        """Doc."""
        return drjax.reduce_sum(drjax.broadcast(x * scale))

    assert program.__name__ == "program" and program.__doc__ == "Doc."
    parameters = inspect.signature(program).parameters
    assert list(parameters) == ["x", "scale"] and parameters["scale"].default == 2.0
    assert program.partition == drjax.Partition("clients", N)
    assert str(program.partition) == "clients:4"
    assert program(1, scale=3.0) == 12.0


def test_methods_static_and_class_methods():
    class Model:
        scale = 2.0

        @four
        def method(self, x):
            return drjax.map_fn(lambda a: a * self.scale, x)

        @staticmethod
        @four
        def static(x):
            return drjax.map_fn(lambda a: a * 3, x)

        @classmethod
        @four
        def of_class(cls, x):
            return drjax.map_fn(lambda a: a * cls.scale, x)

        @property
        @four
        def numbers(self):
            return drjax.partition_index()

    model, x = Model(), rows()
    np.testing.assert_array_equal(model.method(x), 2 * x)
    np.testing.assert_array_equal(model.static(x), 3 * x)
    np.testing.assert_array_equal(Model.of_class(x), 2 * x)
    np.testing.assert_array_equal(model.numbers, np.arange(N))


def test_partials_callables_jitted_functions_and_builtins():
    class Callable:
        def __call__(self, x):
            return drjax.reduce_sum(x)

    x = rows()
    for fn in (
        functools.partial(drjax.reduce_sum), Callable(), jax.jit(drjax.reduce_sum),
        drjax.reduce_sum,
    ):  # fmt: skip
        assert four(fn)(x) == x.sum()
    for fn in (jnp.sin, functools.partial(jnp.multiply, 2), abs, nnx.relu):
        y = four(lambda x, fn=fn: drjax.map_fn(fn, x))(jnp.asarray(x))
        np.testing.assert_allclose(y, fn(x), rtol=1e-6)


def test_recursion():
    @four
    def power(x, depth):
        if depth == 0:
            return drjax.reduce_sum(drjax.broadcast(x))
        return power(x, depth - 1) * drjax.partition_size()

    assert power(1.0, 3) == N**4

    sizes = []

    def tree(n):
        @drjax.program(clients=n)
        def level(x):
            below = x if n == 1 else tree(n - 1)(x)
            sizes.append(drjax.partition_size())
            return drjax.reduce_sum(drjax.broadcast(below))

        return level

    assert tree(4)(1.0) == 24.0 and sizes == [1, 2, 3, 4]


def test_an_error_inside_a_program_leaves_no_scope_behind():
    with pytest.raises(ZeroDivisionError):
        four(lambda: 1 / 0)()
    with pytest.raises(drjax.ScopeError):
        drjax.partition_size()


def test_names_imported_from_the_package():
    from drjax import broadcast, map_fn, reduce_sum

    assert four(lambda x: reduce_sum(map_fn(jnp.square, broadcast(x))))(3.0) == 36.0


@pytest.mark.parametrize("mesh", [None, {"clients": 3}])
def test_disable_jit(mesh):
    x = rows() + 0.5

    def program(x, w):
        return drjax.reduce_mean(drjax.map_fn(lambda a: jnp.sin(a) * w, x))

    with in_mesh_of(mesh), jax.disable_jit():
        value, grad = jax.value_and_grad(four(program))(jnp.asarray(x), 2.0)
    np.testing.assert_allclose(value, 2 * np.sin(x).mean(), rtol=1e-5)
    np.testing.assert_allclose(grad, 2 * np.cos(x) / N, rtol=1e-5)


@pytest.mark.parametrize("mesh", MESHES)
def test_export(mesh):
    x = rows(3) + 0.5

    @four
    def program(x, w):
        y = drjax.map_fn(lambda a, w: jnp.sin(a * w).sum(), (x, drjax.broadcast(w)))
        return drjax.reduce_mean(y)

    devices = mesh and make_mesh(mesh)
    with in_mesh(devices):
        # The derivative needs shardings on a mesh, as for hand-written jax.shard_map.
        rows_on = devices and jax.NamedSharding(devices, P("clients"))
        args = (
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows_on),
            jax.ShapeDtypeStruct((), x.dtype),
        )
        data = jax.export.export(jax.jit(program))(*args).serialize(vjp_order=1)
        loaded = jax.export.deserialize(data)
        np.testing.assert_allclose(loaded.call(x, 2.0), np.sin(2 * x).sum(1).mean(),
                                   rtol=1e-5)  # fmt: skip
        grad = jax.jit(jax.grad(loaded.call))(jnp.asarray(x), jnp.float32(2))
    np.testing.assert_allclose(grad, 2 * np.cos(2 * x) / N, rtol=1e-5)


def test_programs_on_explicit_meshes_take_any_tree():
    with jax.set_mesh(make_mesh({"clients": 2}, EXPLICIT)):
        for name in ("dataclass", "nnx.State", "None leaves", "empty"):
            x = TREES[name]()
            for block in ("reduce_sum", "broadcast", "select", "map_fn"):
                fn, expected = ON_TREES[block]
                found = four(fn)(x)
                assert_trees_equal(
                    found, jax.tree.map(lambda a, e=expected: e(np.asarray(a)), x)
                )


assert ml_dtypes  # numpy knows bfloat16
