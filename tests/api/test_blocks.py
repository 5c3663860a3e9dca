"""Every building block over every kind of tree and dtype.

Covers: drjax._api.blocks, drjax._api.reductions, drjax._api.resolve,
drjax._primitives.select_slice.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import drjax
from tests.helpers.groups import (
    MESHES,
    TREES,
    N,
    Pair,
    assert_trees_equal,
    four,
    slices,
)
from tests.helpers.meshes import EXPLICIT, in_mesh_of, make_mesh

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


@pytest.mark.sampled
@pytest.mark.parametrize("tree", TREES)
def test_trees(tree):
    x = TREES[tree]()
    jitted = [name for name in ON_TREES if name != "shard"]
    result = jax.jit(four(lambda x: [ON_TREES[name][0](x) for name in jitted]))(x)
    result = dict(zip(jitted, result, strict=True)) | {"shard": four(drjax.shard)(x)}
    for name, (_, expected) in ON_TREES.items():
        assert_trees_equal(
            result[name], jax.tree.map(lambda a, e=expected: e(np.asarray(a)), x)
        )


@pytest.mark.sampled
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("block", ON_TREES)
def test_trees_eagerly(block, mesh):
    fn, expected = ON_TREES[block]
    x = TREES["dict"]()
    with in_mesh_of(mesh):
        result = four(fn)(x)
    assert_trees_equal(result, jax.tree.map(lambda a: expected(np.asarray(a)), x))


@pytest.mark.slow
def test_programs_on_explicit_meshes_take_any_tree():
    with jax.set_mesh(make_mesh({"clients": 2}, EXPLICIT)):
        for name in ("dataclass", "nnx.State", "None leaves", "empty"):
            x = TREES[name]()
            for block in ("reduce_sum", "broadcast", "select", "map_fn"):
                fn, expected = ON_TREES[block]
                result = four(fn)(x)
                assert_trees_equal(
                    result, jax.tree.map(lambda a, e=expected: e(np.asarray(a)), x)
                )


@pytest.mark.slow
def test_numbers_are_broadcast():
    for number in (2, 2.0, True, 2j, np.float32(2), np.int64(2), np.bool_(True)):
        y = four(drjax.broadcast)(number)
        assert y.shape == (N,) and (y == number).all()
        assert y.dtype == jnp.asarray(number).dtype
        assert y.weak_type == jnp.asarray(number).weak_type


def test_a_tuple_is_unpacked_and_others_are_one_argument():
    a, b = slices(), slices(seed=1)
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
    x = slices(*shape)
    return (np.abs(x) if dtype.kind in "u" else x).astype(dtype)


@pytest.mark.sampled
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
    for result in (program(x), jax.jit(program)(x), jax.eval_shape(program, x)):
        for y, e in zip(
            jax.tree.leaves(result), jax.tree.leaves(expected), strict=True
        ):
            assert (y.dtype, y.shape) == (e.dtype, e.shape)
            if isinstance(y, jax.Array):
                rtol = 1e-2 if y.dtype == jnp.bfloat16 else 1e-3
                np.testing.assert_allclose(
                    np.asarray(y).astype(complex), np.asarray(e).astype(complex), rtol
                )


@pytest.mark.sampled
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


@pytest.mark.sampled
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


@pytest.mark.sampled
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
    x = {"a": slices(2), "b": slices(2, 3), "none": None}
    first = np.array([0, 1, 0, 0], np.float32)
    w = {"a": first, "b": slices(2, seed=3) ** 2 + 1, "none": None}
    y = four(drjax.reduce_weighted_mean)(x, w)
    np.testing.assert_allclose(y["a"], x["a"][1])
    wide = w["b"][:, :, None]
    np.testing.assert_allclose(y["b"], (wide * x["b"]).sum(0) / wide.sum(0), rtol=1e-5)


@pytest.mark.slow
def test_weighted_mean_differentiates_in_values_and_in_weights_at_zero():
    x, w = slices(3) + 0.5, np.array([0, 1, 2, 0], np.float32)
    reference = lambda x, w: ((w[:, None] * x).sum(0) / w.sum()).sum()
    program = lambda x, w: four(drjax.reduce_weighted_mean)(x, w).sum()
    actual = jax.grad(program, (0, 1))(x, w)
    for a, b in zip(actual, jax.grad(reference, (0, 1))(x, w), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


@pytest.mark.sampled
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
        z = slices() * 1j
        tree = {"key": keys, "flag": x > 1, "z": z, "none": None}
        got = four(lambda t: drjax.select(t, 1))(tree)
        assert got["key"] == keys[1] and got["none"] is None
        np.testing.assert_array_equal(got["flag"], (x > 1)[1])
        np.testing.assert_array_equal(got["z"], z[1])
    grids = jax.random.split(jax.random.key(7), (N, 2))
    assert (four(lambda k: drjax.select(k, 3))(grids) == grids[3]).all()


@pytest.mark.sampled
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


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.float16], ids=str)
@pytest.mark.parametrize("block", [drjax.reduce_max, drjax.reduce_min])
def test_nan_wins_on_every_mesh(block, dtype):
    x = np.arange(8.0).reshape(8, 1) * [1, -1, 1, 0] + [0, 0, np.nan, -0.0]
    x[3, 0], x[5, 1] = np.nan, -np.inf
    local = np.max if block is drjax.reduce_max else np.min
    f = drjax.program(clients=8)(block)
    for mesh in (None, {"clients": 8}, {"clients": 4}):
        with in_mesh_of(mesh):
            y = jax.jit(f)(jnp.asarray(x, dtype))
        assert y.dtype == dtype
        np.testing.assert_array_equal(y.astype(np.float32), local(x, axis=0))


def test_means_of_wide_integers_under_x64():
    with jax.enable_x64(True):
        x = jnp.full(N, 2**40 + 1)
        mean = four(drjax.reduce_mean)(x)
        weighted = four(lambda x: drjax.reduce_weighted_mean(x, jnp.ones(N)))(x)
    assert mean.dtype == weighted.dtype == jnp.float64
    assert float(mean) == float(weighted) == 2.0**40 + 1


def test_float8_means():
    x = jnp.ones(N, jnp.float8_e4m3fn)
    for f in (drjax.reduce_mean, lambda x: drjax.reduce_weighted_mean(x, jnp.ones(N))):
        assert four(f)(x).dtype == x.dtype and float(four(f)(x)) == 1.0


def test_the_mean_of_more_groups_than_float16_can_count_has_a_gradient():
    n, half = 70000, jnp.float16  # the largest number in float16 is 65504

    @drjax.program(clients=n)
    def mean(w, x):
        products = drjax.map_fn(lambda w, x: w * x, (drjax.broadcast(w), x))
        return drjax.reduce_mean(products)

    gradient = jax.grad(mean)(half(2), jnp.ones(n, half))
    assert gradient.dtype == half and abs(float(gradient) - 1) < 0.01


@pytest.mark.parametrize("block", ["reduce_sum", "reduce_max", "reduce_min"])
def test_reductions_of_python_numbers_have_the_same_type_under_jit(block):
    @drjax.program(clients=301)
    def scaled(x, scale):
        ones = drjax.map_fn(lambda x: jnp.where(x > 0, 1.0, 0.0), x)
        return scale * getattr(drjax, block)(ones)

    args = jnp.ones(301), jnp.ones((), jnp.bfloat16)
    for run in (scaled, jax.jit(scaled), drjax.jit(scaled)):
        y = run(*args)
        assert y.dtype == jnp.float32 and not y.weak_type
        assert float(y) == (301 if block == "reduce_sum" else 1)


@pytest.mark.parametrize("dtype", ["int64", "uint64", "uint32"])
def test_select_clamps_wide_indices(dtype):
    program = jax.jit(drjax.program(clients=3)(drjax.select))
    with jax.enable_x64(True):
        x = jnp.arange(3.0)
        for i in (2**31, 2**32 - 1, 2**32):
            if i <= jnp.iinfo(dtype).max:
                assert program(x, jnp.asarray(i, dtype)) == 2
        assert program(x, jnp.asarray(1, dtype)) == 1
        if dtype == "int64":
            for i, expected in ((-1, 2), (-3, 0), (-(2**31) - 1, 0), (-(2**32), 0)):
                assert program(x, jnp.int64(i)) == expected
