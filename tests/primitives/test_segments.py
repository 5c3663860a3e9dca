"""Reductions by segment: as `jax.ops.segment_sum` on each device, and its derivatives.

Covers: drjax._primitives.segments, drjax._api.max_and_min.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import drjax
from drjax._primitives.segments import (
    InSegments,
    buckets_of_groups,
    place_in_segment,
    placements,
    reduce_segments,
    slice_of_segment,
)
from tests.helpers.cases import checkerboard
from tests.helpers.meshes import EXPLICIT, in_mesh, make_mesh

N, NUM, D, DEVICES = 32, 50, 200, 4
AXIS, K = "clients", N // DEVICES
BY = np.arange(N) * 7 % NUM


def own_segments():
    return lax.dynamic_slice_in_dim(jnp.asarray(BY), lax.axis_index(AXIS) * K, K)


def handwritten(local, collective):
    """A reduction of the slices of each device, and one of the devices."""

    def of_device(x):
        return collective(local(x, own_segments(), NUM), AXIS)

    return jax.shard_map(of_device, in_specs=P(AXIS), out_specs=P())


def mean_handwritten(x):
    add = handwritten(jax.ops.segment_sum, lax.psum)
    return add(x) / add(jnp.ones(N))[:, None]


REDUCTIONS = {
    "reduce_sum": handwritten(jax.ops.segment_sum, lax.psum),
    "reduce_mean": mean_handwritten,
    "reduce_max": handwritten(jax.ops.segment_max, lax.pmax),
    "reduce_min": handwritten(jax.ops.segment_min, lax.pmin),
}
RUNS = {
    "jax.jit": jax.jit,
    "drjax.jit": drjax.jit,
    "one at a time": functools.partial(drjax.jit, groups_per_step=1),
    "three at a time": functools.partial(drjax.jit, groups_per_step=3),
}


def placed():
    x = np.random.RandomState(0).randn(N, D).astype(np.float32)
    return jax.device_put(x, P(AXIS))


def reduction(block, derivative):
    fn = lambda x: getattr(drjax, block)(x, by=BY, num=NUM)
    loss = jax.grad(lambda x: jnp.sum(finite(fn(x)) ** 2))
    return drjax.program(clients=N)(loss if derivative else fn)


def finite(y):
    return jnp.where(jnp.isfinite(y), y, 0)


@checkerboard(8, block=REDUCTIONS, run=RUNS)
def test_values_cost_no_more_than_hand_written_code(block, run):
    with in_mesh(make_mesh({AXIS: DEVICES})):
        x = placed()
        ours: Any = jax.jit(RUNS[run](reduction(block, False))).lower(x).compile()
        best: Any = jax.jit(REDUCTIONS[block]).lower(x).compile()
        np.testing.assert_allclose(ours(x), best(x), rtol=1e-6)
    # NaN wins in a pmax by the order of integers: one more array of the result.
    ordered = 4 * NUM * D if block in ("reduce_max", "reduce_min") else 0
    temp = [c.memory_analysis().temp_size_in_bytes for c in (ours, best)]
    # A step of the loop has slices of three groups.
    assert temp[0] <= 1.02 * temp[1] + ordered + 2 * 4 * D
    flops = [c.cost_analysis()["flops"] for c in (ours, best)]
    assert flops[0] <= 1.02 * flops[1] + 3 * ordered


@pytest.mark.usefixtures("leaks_unchecked")  # of shard_map's derivative
@checkerboard(4, block=["reduce_sum", "reduce_mean"], run=RUNS)
def test_gradients_cost_no_more_than_hand_written_code(block, run):
    loss = lambda x: jnp.sum(finite(REDUCTIONS[block](x)) ** 2)
    with in_mesh(make_mesh({AXIS: DEVICES})):
        x = placed()
        ours: Any = jax.jit(RUNS[run](reduction(block, True))).lower(x).compile()
        best: Any = jax.jit(jax.grad(loss)).lower(x).compile()
        np.testing.assert_allclose(ours(x), best(x), rtol=1e-5, atol=1e-6)
    temp = [c.memory_analysis().temp_size_in_bytes for c in (ours, best)]
    # A step of the loop has slices of three groups.
    assert temp[0] <= 1.02 * temp[1] + 6 * 4 * D
    flops = [c.cost_analysis()["flops"] for c in (ours, best)]
    assert flops[0] <= 1.05 * flops[1]


@pytest.mark.once
@checkerboard(4, block=["reduce_max", "reduce_min"], run=RUNS)
def test_gradients_of_extrema_have_no_array_of_all_segments_of_a_group(block, run):
    with in_mesh(make_mesh({AXIS: DEVICES})):
        x = placed()
        f: Any = jax.jit(RUNS[run](reduction(block, True))).lower(x).compile()
        plain = lambda x: getattr(jax.ops, f"segment_{block[7:]}")(x, BY, NUM)
        expected = jax.grad(lambda x: jnp.sum(finite(plain(x)) ** 2))(np.asarray(x))
        np.testing.assert_allclose(f(x), expected, rtol=1e-6)
    in_segments = f.memory_analysis().temp_size_in_bytes / (4 * NUM * D)
    assert in_segments <= 5.5 < K


def test_a_mesh_of_many_axes_writes_all_places():
    """There XLA cannot scatter: the values are those of one device."""
    x, by = placed_on(None), jnp.asarray(BY[:8] % 3)
    fn = drjax.program(clients=8)(
        lambda x, by: (
            drjax.reduce_sum(x, by=by, num=3),
            drjax.reduce_max(x, by=by, num=3),
            jax.grad(lambda x: jnp.sum(drjax.reduce_max(x, by=by, num=3) ** 2))(x),
        )
    )
    expected = fn(x, by)
    axes = {AXIS: 2, "data": 2, "model": 2}
    for types in ((), (EXPLICIT,)):
        with in_mesh(make_mesh(axes, *types)):
            own = placed_on(P(AXIS, None) if types else P(AXIS, "model"))
            jax.tree.map(
                functools.partial(np.testing.assert_allclose, rtol=1e-5),
                jax.jit(fn)(own, by),
                expected,
            )


def placed_on(spec):
    x = np.random.RandomState(0).randn(8, 4).astype(np.float32)
    return jnp.asarray(x) if spec is None else jax.device_put(x, spec)


@checkerboard(6, block=[*REDUCTIONS], bad=[np.inf, -np.inf, np.nan], run=RUNS)
def test_infinities_reach_their_segment_only(block, bad, run):
    n = 7
    x = jnp.arange(1.0, n + 1).at[2].set(bad)
    by = jnp.array([0, 1, 2, 1, 0, 3, -1])
    x = jnp.stack([x, x], 1)
    fn = drjax.program(clients=n)(lambda x: getattr(drjax, block)(x, by=by, num=4))

    def loss(x, f):
        return jnp.sum(f(x)[jnp.array([0, 1, 3])] ** 2)

    y = RUNS[run](fn)(x)
    gradient = drjax.program(clients=n)(jax.grad(lambda x: loss(x, fn)))(x)
    kept = jnp.array([0, 1, 3])
    finite = fn(x.at[2].set(5.0))
    np.testing.assert_array_equal(y[kept], finite[kept])
    np.testing.assert_array_equal(y[2], jnp.full(2, bad))
    assert np.isfinite(gradient[jnp.array([0, 1, 3, 4, 5])]).all()
    if not np.isnan(bad):
        assert (gradient[2] == 0).all()
    assert (gradient[6] == 0).all()


@pytest.mark.once
@pytest.mark.sampled
@pytest.mark.parametrize(
    "dtype", ["bool", "int8", "uint8", "int32", "float8_e4m3fn", "bfloat16", "float16"]
)
def test_dtypes(dtype):
    x = jnp.asarray(np.random.RandomState(1).randint(0, 9, (N, 3)), dtype)
    mean = "int32" if dtype in ("bool", "int8", "uint8") else dtype
    for block in ("sum", "max", "min"):
        fn = drjax.program(clients=N)(
            lambda x, block=block: getattr(drjax, f"reduce_{block}")(x, by=BY, num=NUM)
        )
        wide = x.astype("float32" if x.dtype.kind in "fV" else "int32")
        local = getattr(jax.ops, f"segment_{block}")(wide, BY, NUM)
        some = np.unique(BY)
        for run in RUNS.values():
            y = run(fn)(x)
            assert y.dtype == (mean if block == "sum" and dtype != "uint8" else y.dtype)
            np.testing.assert_array_equal(
                np.asarray(y[some], "float32"), np.asarray(local[some], "float32")
            )


def test_compensated_sums_are_exact():
    """Of a large and many small numbers; each segment by itself."""
    n = 3000
    x = jnp.full((n, 2), 2.0**-12).at[:3].set(4096.0)
    by = jnp.arange(n) % 3
    fn = drjax.program(clients=n)(lambda x: drjax.reduce_sum(x, by=by, num=3))
    exact = 4096 + (n // 3 - 1) * 2.0**-12
    for step in (1, 2):
        y = drjax.jit(fn, groups_per_step=step)(x)
        np.testing.assert_allclose(y, jnp.full((3, 2), exact), rtol=1.2e-7)


MANY = 20_000


@checkerboard(
    5,
    mesh=["none", "uneven", "even"],
    run=["jax.jit", "drjax.jit", "one chunk of four"],
    block=["reduce_sum", "reduce_mean"],
)
def test_sums_of_many_groups_are_as_exact_as_sums_of_arrays(mesh, run, block):
    """Numbers of one sign, of which a scatter loses two digits."""
    n = MANY + (mesh == "uneven")
    x = np.random.RandomState(0).rand(n, 2).astype(np.float32)
    by, where = np.arange(n) % 3, np.arange(n) % 5 != 4
    runs = {**RUNS, "one chunk of four": functools.partial(
        drjax.jit, groups_per_step=n // 8
    )}  # fmt: skip

    @drjax.program(clients=n)
    def fn(x):
        return getattr(drjax, block)(x, by=by, num=3, where=where)

    of = lambda x, dtype: np.stack(
        [
            getattr(x[(by == j) & where].astype(dtype), block.removeprefix("reduce_"))(
                0, dtype=dtype
            )
            for j in range(3)
        ]
    )
    exact = of(x, np.float64)
    with in_mesh(None if mesh == "none" else make_mesh({AXIS: 4})):
        result, back = jax.vjp(runs[run](fn), x)
        (ct,) = back(jnp.ones((3, 2)))
    assert np.abs(np.asarray(result) / exact - 1).max() < 4 * np.finfo(np.float32).eps
    each = np.bincount(by[where], minlength=3)
    share = 1 if block == "reduce_sum" else 1 / each[by][:, None]
    np.testing.assert_allclose(ct, where[:, None] * share * np.ones(2), rtol=1e-6)


def test_buckets_of_groups_take_no_more_memory_than_their_slices():
    buckets = lambda k, num, ufunc=np.add, dtype=jnp.float32: buckets_of_groups(
        ufunc, InSegments(jnp.zeros(k, jnp.int32), jnp.zeros((k, 2), dtype), num)
    )
    assert buckets(1000, 3) == 1
    assert buckets(10_000, 3) == 100
    assert buckets(10_000, 50) == 25
    assert buckets(10_000, 5000) == 1
    assert buckets(10_000, 3, np.maximum) == buckets(10_000, 3, dtype=jnp.int32) == 1


def test_transposes():
    table, slice_ = jnp.arange(12.0).reshape(4, 3), jnp.arange(3.0)
    for segment in range(5):
        own = jnp.int32(segment)
        place = lambda x, own=own: place_in_segment(own, x, 4, 0)
        read = lambda y, own=own: slice_of_segment(own, y)
        np.testing.assert_array_equal(
            jnp.vdot(place(slice_), table), jnp.vdot(slice_, read(table))
        )
        (of_place,) = jax.linear_transpose(place, slice_)(table)
        (of_read,) = jax.linear_transpose(read, table)(slice_)
        np.testing.assert_array_equal(of_place, read(table))
        np.testing.assert_array_equal(of_read, place(slice_))
        np.testing.assert_array_equal(jax.jvp(place, (slice_,), (slice_,))[1], of_read)
        filled = lambda x, own=own: place_in_segment(own, x, 4, 7)
        np.testing.assert_array_equal(jax.jvp(filled, (slice_,), (slice_,))[1], of_read)


@pytest.mark.parametrize("dims", [(0, None), (None, 0), (None, 1), (0, 0), (0, 1)])
def test_batches(dims):
    segments = jnp.array([2, 0, 4, 1])
    own = segments if dims[0] == 0 else segments[0]
    slices = jnp.arange(24.0).reshape(4, 2, 3)
    tables = jnp.arange(120.0).reshape(4, 5, 2, 3)[:, :4]
    for fn, x in (
        (lambda own, x: place_in_segment(own, x, 4, -1), slices),
        (slice_of_segment, tables),
    ):
        x = x[1] if dims[1] is None else jnp.moveaxis(x, 0, dims[1])
        count = len(segments)
        expected = [
            fn(
                own if dims[0] is None else own[i],
                x if dims[1] is None else jnp.take(x, i, axis=dims[1]),
            )
            for i in range(count)
        ]
        np.testing.assert_array_equal(jax.vmap(fn, dims)(own, x), jnp.stack(expected))


def test_placements_are_found_behind_barriers():
    def fn(own, x):
        placed = place_in_segment(own, 2 * x, 4, 0)
        return x, lax.optimization_barrier(placed), placed + 1

    results = placements(jax.make_jaxpr(fn)(jnp.int32(1), jnp.ones(2)))
    assert [(i, x.num, x.fill) for i, x in results.items()] == [(1, 4, 0)]


def test_what_is_around_slices_must_be_neutral():
    x = jnp.arange(1.0, 9)
    by = jnp.arange(8) % 2

    @drjax.program(clients=8)
    def fn(x):
        around = lambda own, x: place_in_segment(own, x, 2, 1)
        return drjax.reduce_sum(drjax.map_fn(around, (by, x)))

    for run in RUNS.values():
        np.testing.assert_array_equal(run(fn)(x), jnp.array([20.0, 24.0]))


def test_padding_is_in_no_segment():
    x = InSegments(jnp.array([0, 1, 1]), jnp.array([1.0, 2.0, 3.0]), 2)
    np.testing.assert_array_equal(
        reduce_segments(np.add, x, 0, jnp.float32), jnp.array([1.0, 5.0])
    )
    with in_mesh(make_mesh({AXIS: 2})):
        fn = drjax.program(clients=3)(
            lambda x: drjax.reduce_min(x, by=[0, 1, 1], num=2)
        )
        y = jax.jit(fn)(jnp.array([1.0, 2.0, 3.0]))
        np.testing.assert_array_equal(y, jnp.array([1.0, 2.0]))


def test_two_levels_reduce_slices_of_both():
    sizes = {"pods": 2, "groups": 16}
    by = np.arange(32).reshape(2, 16) % NUM
    x = np.random.RandomState(0).randn(2, 16, D).astype(np.float32)
    for block in ("reduce_sum", "reduce_max"):
        fn = drjax.program(placements=sizes)(
            lambda x, block=block: getattr(drjax, block)(x, by=by, num=NUM)
        )
        plain = getattr(jax.ops, f"segment_{block[7:]}")
        expected = plain(x.reshape(32, D), by.ravel(), NUM)
        with in_mesh(mesh := make_mesh({"pods": 2, "groups": 2})):
            own = jax.device_put(x, NamedSharding(mesh, P("pods", "groups")))
            f: Any = jax.jit(fn).lower(own).compile()
            np.testing.assert_allclose(f(own), expected, rtol=1e-6)
        assert f.memory_analysis().temp_size_in_bytes <= 3.2 * 4 * NUM * D
