"""Programs with several levels, `@drjax.program(pods=2, groups=4)`, and `over=`.

Covers: drjax._api.levels, drjax._api.blocks, drjax._api.reductions,
    drjax._api.max_and_min, drjax._api.select, drjax._primitives.partial_reduction.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import drjax
from drjax._partition import as_partition
from tests.helpers.cases import checkerboard, some
from tests.helpers.compiled import compiled
from tests.helpers.meshes import AUTO, EXPLICIT, in_mesh, make_mesh
from tests.helpers.raising import raises

BOTH = {"pods": 2, "groups": 4}
MESHES: dict[str, Any] = {
    "none": None,
    "both": (BOTH, AUTO),
    "inner first": ({"groups": 4, "pods": 2}, AUTO),
    "explicit": (BOTH, EXPLICIT),
    "mixed": (BOTH, (AUTO, EXPLICIT)),
    "model": ({"pods": 2, "groups": 2, "model": 2}, AUTO),
    "only outer": ({"pods": 2}, AUTO),
    "only inner": ({"groups": 4}, EXPLICIT),
}
RNG = np.random.RandomState(0)
X = jnp.asarray(RNG.randn(4, 8, 3), jnp.float32)
W = jnp.abs(X[..., 0])
WHERE = X[..., 1] > 0
BY = jnp.asarray(RNG.randint(0, 3, (4, 8)))
SWAP = jnp.array([1, 0, 2, 3, 4, 5, 7, 6])

two = drjax.program(pods=4, groups=8)
PROGRAM: Any = two(lambda x: x)


def in_mesh_named(name: str):
    return in_mesh(make_mesh(*MESHES[name]) if MESHES[name] else None)


def by_segment(reduce: Callable, x, fill, num: int):
    chosen = lambda i: jnp.where((BY == i)[..., None], x, fill)
    return jnp.stack([reduce(chosen(i), (0, 1)) for i in range(num)])


def weighted(x, w, axes):
    return (x * w[..., None]).sum(axes) / w.sum(axes)[..., None]


def indexed(a):
    return (
        drjax.partition_index()
        + 100 * drjax.partition_index(over="pods")
        + 1000 * drjax.partition_index(over="groups")
        + 10_000 * drjax.partition_size()
        + 0 * a.sum()
    )


INDICES = jnp.arange(32).reshape(4, 8)
# For each block and `over=`: the block of x [4, 8, 3], and the same of jax.numpy.
TABLE: dict[str, tuple[Callable, Callable]] = {
    "broadcast": (
        lambda x: drjax.broadcast(x[0, 0]),
        lambda x: jnp.broadcast_to(x[0, 0], (4, 8, 3)),
    ),
    "broadcast in pods": (
        lambda x: drjax.broadcast(x.sum(1), over="groups"),
        lambda x: jnp.broadcast_to(x.sum(1)[:, None], (4, 8, 3)),
    ),
    "map": (
        lambda x: drjax.map_fn(lambda a, b: a * b, (x, W)),
        lambda x: x * W[..., None],
    ),
    "map of pods": (
        lambda x: drjax.map_fn(lambda a: jnp.cumsum(a, 0), x, over="pods"),
        lambda x: jnp.cumsum(x, 1),
    ),
    "closure": (
        lambda x: drjax.map_fn(lambda a: a * W.mean(), x),
        lambda x: x * W.mean(),
    ),
    "sum": (lambda x: drjax.reduce_sum(x), lambda x: x.sum((0, 1))),
    "sum in pods": (lambda x: drjax.reduce_sum(x, over="groups"), lambda x: x.sum(1)),
    "sum over pods": (lambda x: drjax.reduce_sum(x, over="pods"), lambda x: x.sum(0)),
    "sum by name": (
        lambda x: drjax.reduce_sum(x, over=("groups", "pods"), where=WHERE),
        lambda x: (x * WHERE[..., None]).sum((0, 1)),
    ),
    "sum by segment": (
        lambda x: drjax.reduce_sum(x, by=BY, num=4),
        lambda x: by_segment(jnp.sum, x, 0.0, 4),
    ),
    "mean": (lambda x: drjax.reduce_mean(x), lambda x: x.mean((0, 1))),
    "mean in pods": (
        lambda x: drjax.reduce_mean(x, over="groups"),
        lambda x: x.mean(1),
    ),
    "mean of some": (
        lambda x: drjax.reduce_mean(x, where=WHERE),
        lambda x: weighted(x, WHERE, (0, 1)),
    ),
    "mean without groups": (
        lambda x: drjax.reduce_mean(x, where=WHERE & False, default=3.0),
        lambda x: jnp.full(3, 3.0) + 0 * x.sum((0, 1)),
    ),
    "weighted mean": (
        lambda x: drjax.reduce_weighted_mean(x, W),
        lambda x: weighted(x, W, (0, 1)),
    ),
    "weighted mean in pods": (
        lambda x: drjax.reduce_weighted_mean(x, W, over="groups"),
        lambda x: weighted(x, W, 1),
    ),
    "max": (lambda x: drjax.reduce_max(x), lambda x: x.max((0, 1))),
    "max in pods": (lambda x: drjax.reduce_max(x, over="groups"), lambda x: x.max(1)),
    "max by segment": (
        lambda x: drjax.reduce_max(x, by=BY, num=4, default=7.0)[:3],
        lambda x: by_segment(jnp.max, x, -jnp.inf, 3),
    ),
    "min": (
        lambda x: drjax.reduce_min(x, where=WHERE),
        lambda x: jnp.where(WHERE[..., None], x, jnp.inf).min((0, 1)),
    ),
    "gather": (lambda x: drjax.gather(x).cumsum(1), lambda x: x.cumsum(1)),
    "scatter": (lambda x: drjax.scatter(x), lambda x: x),
    "select in pods": (
        lambda x: drjax.select(x, 2, over="groups"),
        lambda x: x[:, 2],
    ),
    "take in pods": (
        lambda x: drjax.take(x, SWAP, over="groups"),
        lambda x: x[:, SWAP],
    ),
    "put in pods": (
        lambda x: drjax.put(x, SWAP, into=2 * x, over="groups"),
        lambda x: x[:, SWAP],
    ),
    "shift in pods": (
        lambda x: drjax.shift(x, 1, over="groups"),
        lambda x: jnp.roll(x, 1, 1),
    ),
    "shift of pods": (
        lambda x: drjax.shift(x, 1, over="pods"),
        lambda x: jnp.roll(x, 1, 0),
    ),
    "columns in pods": (
        lambda x: drjax.reduce_columns(jnp.median, x, over="groups"),
        lambda x: jnp.median(x, 1),
    ),
    "fold in pods": (
        lambda x: drjax.reduce(jnp.add, x, 0.0, over="groups"),
        lambda x: x.sum(1),
    ),
    "used further": (
        lambda x: drjax.reduce_sum(
            drjax.map_fn(
                lambda a, b: a * b,
                (
                    x,
                    drjax.broadcast(
                        drjax.map_fn(
                            jnp.sin, drjax.reduce_sum(x, over="groups"), over="pods"
                        ),
                        over="groups",
                    ),
                ),
            )
        ),
        lambda x: (x * jnp.sin(x.sum(1))[:, None]).sum((0, 1)),
    ),
}
# Without a derivative.
INTEGERS: dict[str, tuple[Callable, Callable]] = {
    "argmax in pods": (
        lambda x: drjax.reduce_argmax(x, over="groups"),
        lambda x: x.argmax(1),
    ),
    "index": (lambda x: drjax.partition_index(), lambda x: INDICES),
    "index in pods": (
        lambda x: drjax.partition_index(over="groups"),
        lambda x: jnp.broadcast_to(jnp.arange(8), (4, 8)),
    ),
    "index of pods": (
        lambda x: drjax.partition_index(over="pods"),
        lambda x: jnp.arange(4),
    ),
    "index in a map": (
        lambda x: drjax.map_fn(indexed, x),
        lambda x: INDICES + 100 * (INDICES // 8) + 1000 * (INDICES % 8) + 320_000,
    ),
    "index in a map of pods": (
        lambda x: drjax.map_fn(
            lambda a: (
                drjax.partition_index()
                + 10 * drjax.partition_index(over="pods")
                + 100 * drjax.partition_size()
            ),
            x,
            over="pods",
        ),
        lambda x: jnp.arange(8)[None] + 10 * jnp.arange(4)[:, None] + 800,
    ),
}


def assert_close(result, expected):
    np.testing.assert_allclose(result, expected, rtol=2e-5, atol=1e-5)


@pytest.mark.usefixtures("leaks_unchecked")
@checkerboard(21, name=MESHES, block=TABLE)
def test_values_and_gradients(name, block):
    fn, plain = TABLE[block]
    scalar = lambda f: lambda x: jnp.sum(jnp.cos(f(x)) @ jnp.arange(1.0, 4.0))
    with in_mesh_named(name):
        assert_close(jax.jit(two(fn))(X), plain(X))
        gradient = jax.jit(jax.grad(scalar(two(fn))))(X)
    assert_close(gradient, jax.grad(scalar(plain))(X))


@pytest.mark.sampled
@pytest.mark.parametrize("name", some(MESHES, "none", "both", "explicit"))
@pytest.mark.parametrize("block", INTEGERS)
def test_indices(name, block):
    fn, plain = INTEGERS[block]
    with in_mesh_named(name):
        result = jax.jit(two(fn))(X)
    assert (np.asarray(result) == np.asarray(plain(X))).all()


@pytest.mark.parametrize("block", some(TABLE, "sum", "max", "map", "used further"))
def test_eager(block):
    fn, plain = TABLE[block]
    with in_mesh_named("both"):
        assert_close(two(fn)(X), plain(X))
    assert_close(two(fn)(X), plain(X))


@pytest.mark.sampled
@pytest.mark.parametrize("sizes", some([(3, 5), (2, 5), (3, 8), (5, 2)], (3, 5)))
@pytest.mark.parametrize("block", ["reduce_sum", "reduce_mean", "reduce_max"])
def test_sizes_that_do_not_divide(sizes, block):
    x = jnp.asarray(RNG.randn(*sizes, 3), jnp.float32)
    program = drjax.program(pods=sizes[0], groups=sizes[1])
    reduce = getattr(drjax, block)
    fn = program(lambda x, m: reduce(drjax.map_fn(lambda a: jnp.sin(a * m), x)).sum())
    plain = getattr(jnp, block.removeprefix("reduce_"))
    expected = lambda x, m: plain(jnp.sin(x * m[None, None]), axis=(0, 1)).sum()
    m = jnp.arange(1.0, 4.0)
    with in_mesh_named("both"):
        value, gradients = jax.jit(jax.value_and_grad(fn, (0, 1)))(x, m)
    assert_close(value, expected(x, m))
    jax.tree.map(assert_close, gradients, jax.grad(expected, (0, 1))(x, m))


def test_padding_of_both_levels_is_no_extremum():
    """Padded slots hold zeros, which are larger than all numbers of the groups."""
    x = -1 - np.abs(RNG.randn(3, 5, 3)).astype(np.float32)
    extrema = lambda x: (drjax.reduce_max(x), drjax.reduce_min(-x))
    with in_mesh_named("both"):
        result = jax.jit(drjax.program(pods=3, groups=5)(extrema))(x)
    jax.tree.map(assert_close, result, (x.max((0, 1)), (-x).min((0, 1))))


def test_low_precision():
    x = jnp.full((4, 8), 3.0, jnp.bfloat16)
    with in_mesh_named("both"):
        total, mean = jax.jit(
            two(lambda x: (drjax.reduce_sum(x), drjax.reduce_mean(x)))
        )(x)
    assert total.dtype == mean.dtype == jnp.bfloat16
    assert (float(total), float(mean)) == (96.0, 3.0)


def test_three_levels():
    program = drjax.program(regions=2, pods=2, groups=3)
    x = jnp.arange(24.0).reshape(2, 2, 3, 2)
    fn = program(
        lambda x: (
            drjax.reduce_sum(drjax.map_fn(jnp.sin, x)),
            drjax.reduce_mean(x, over=("regions", "groups")),
            drjax.reduce_weighted_mean(x, x[..., 0], over=("pods", "groups")),
            drjax.partition_index(),
        )
    )
    w = x[..., :1]
    expected = (
        jnp.sin(x).sum((0, 1, 2)),
        x.mean((0, 2)),
        (x * w).sum((1, 2)) / w.sum((1, 2)),
        jnp.arange(12).reshape(2, 2, 3),
    )
    jax.tree.map(assert_close, fn(x), expected)
    with in_mesh(make_mesh({"regions": 2, "pods": 2, "groups": 2})):
        jax.tree.map(assert_close, jax.jit(fn)(x), expected)


# ---------------------------------------------------------------------------------
# Communication


@two
def loss(model, data):
    def one(model, x):
        return jnp.sum(jnp.tanh(x @ model) ** 2)

    return drjax.reduce_mean(drjax.map_fn(one, (drjax.broadcast(model), data)))


MODEL = jnp.asarray(RNG.randn(3, 16), jnp.float32)


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
@pytest.mark.parametrize("block", ["sum", "max", "min", "mean"])
def test_a_reduction_over_both_is_one_collective(block, kind):
    with in_mesh(make_mesh(BOTH, kind)):
        x = drjax.shard(X, partition=PROGRAM)
        report = drjax.collectives(two(TABLE[block][0]))(x)
    if kind == EXPLICIT and jax.__version_info__ < (0, 12):
        # There, JAX gathers what is sharded over the inner axis, in and out of a map.
        assert report.counts["all-reduce"] == 2
        return
    assert report.counts == {"all-reduce": 1}
    (collective,) = report.collectives
    assert collective.result_bytes == 12


def test_the_gradient_of_a_loss_is_one_collective_for_each_result():
    with in_mesh(make_mesh(BOTH)):
        data = drjax.shard(X, partition=PROGRAM)
        report = drjax.collectives(jax.grad(loss))(MODEL, data)
        assert report.counts == {"all-reduce": 1}
        result = jax.jit(jax.value_and_grad(loss))(MODEL, data)
    assert_close(result[0], jnp.mean(jnp.sum(jnp.tanh(X @ MODEL) ** 2, -1)))
    plain = lambda m: jnp.mean(jnp.sum(jnp.tanh(X @ m) ** 2, -1))
    assert_close(result[1], jax.grad(plain)(MODEL))


@pytest.mark.parametrize("over, bytes_", [("groups", 2 * 12), ("pods", 8 // 4 * 12)])
def test_a_reduction_over_one_level_is_a_collective_over_its_axis(over, bytes_):
    with in_mesh(make_mesh(BOTH)):
        x = drjax.shard(X, partition=PROGRAM)
        report = drjax.collectives(two(lambda x: drjax.reduce_sum(x, over=over)))(x)
    (collective,) = report.collectives
    assert (collective.kind, collective.result_bytes) == ("all-reduce", bytes_)


def test_a_sum_that_is_used_at_both_levels_is_two_collectives():
    def fn(x):
        sums = drjax.reduce_sum(x, over="groups")
        return sums, drjax.reduce_sum(sums, over="pods")

    with in_mesh(make_mesh(BOTH)):
        x = drjax.shard(X, partition=PROGRAM)
        assert drjax.collectives(two(fn))(x).counts == {"all-reduce": 2}
        sums, total = jax.jit(two(fn))(x)
    assert_close(sums, X.sum(1))
    assert_close(total, X.sum((0, 1)))


def test_the_summands_of_a_gradient_need_no_memory():
    """Where the model is closed over: there, the sum stands with the map of a group."""
    model = jnp.ones((64, 512))
    data = jnp.ones((32, 32, 2, 64))

    @drjax.program(pods=32, groups=32)
    def loss(model, data):
        return drjax.reduce_sum(drjax.map_fn(lambda x: jnp.sum((x @ model) ** 2), data))

    with in_mesh(make_mesh(BOTH)):
        placed = drjax.shard(data, partition=loss)
        memory = compiled(jax.grad(loss), model, placed).memory_analysis()
    gradients_of_a_device = model.nbytes * (32 // 2) * (32 // 4)
    assert memory.temp_size_in_bytes < gradients_of_a_device / 4


def test_shard_places_data_over_both_axes():
    with in_mesh(make_mesh(BOTH)):
        placed = drjax.shard({"x": X}, partition=PROGRAM)["x"]
        within = two(lambda: drjax.shard(X))()
        assert placed.sharding.shard_shape(X.shape) == (2, 2, 3)
        assert within.sharding == placed.sharding
    assert drjax.shard(X, partition=PROGRAM).shape == X.shape


def test_a_mesh_that_is_passed():
    mesh = make_mesh(BOTH)
    program = drjax.program(pods=4, groups=8, mesh=mesh)
    fn = program(lambda x: drjax.reduce_sum(drjax.map_fn(jnp.sin, x)))
    assert_close(jax.jit(fn)(X), jnp.sin(X).sum((0, 1)))
    assert_close(fn(X), jnp.sin(X).sum((0, 1)))


def test_mesh_axes_of_levels():
    levels = drjax.program(pods=4, groups=8, mesh_axes={"groups": ("a", "b")})
    program: Any = levels(lambda x: drjax.reduce_sum(x))
    with in_mesh(make_mesh({"pods": 2, "a": 2, "b": 2})):
        placed = drjax.shard(X, partition=program)
        assert placed.sharding.shard_shape(X.shape) == (2, 2, 3)
        assert_close(jax.jit(program)(placed), X.sum((0, 1)))


# ---------------------------------------------------------------------------------
# Declarations and errors


def test_the_attribute_partition_has_the_levels():
    levels = (drjax.Partition("pods", 4), drjax.Partition("groups", 8))
    assert PROGRAM.partition == levels
    by_name: Any = drjax.program(placements={"pods": 4, "groups": 8})(lambda x: x)
    assert by_name.partition == levels
    assert drjax.partition_size(partition=by_name) == 32
    assert drjax.partition_size(partition=by_name, over="groups") == 8
    assert_close(drjax.reduce_sum(X, partition=by_name), X.sum((0, 1)))


def test_over_in_a_program_with_one_partition():
    one = drjax.program(clients=4)
    assert_close(one(lambda x: drjax.reduce_sum(x, over="clients"))(X), X.sum(0))
    text = "drjax.reduce_sum(over=) needs one or more of ['clients']"
    raises(drjax.DrjaxValueError, text, one(lambda: drjax.reduce_sum(X, over="pods")))


@pytest.mark.parametrize("over", ["group", ("pods", "pods"), ()])
def test_names_that_are_no_levels(over):
    text = "drjax.broadcast(over=) needs one or more of ['pods', 'groups'], the levels"
    result = raises(
        drjax.DrjaxValueError, text, two(lambda: drjax.broadcast(1.0, over=over))
    )
    assert f"got {over!r}" in result


def test_over_that_is_no_name():
    text = "drjax.map_fn(over=) needs the name of a level, or a tuple of names, got int"
    raises(
        drjax.DrjaxTypeError,
        text,
        two(lambda: drjax.map_fn(jnp.sin, X, over=1)),  # pyright: ignore
    )


def test_blocks_that_act_on_one_level():
    for block in (
        lambda: drjax.select(X, 0),
        lambda: drjax.take(X, SWAP),
        lambda: drjax.shift(X, 1),
        lambda: drjax.reduce_columns(jnp.median, X),
        lambda: drjax.reduce(jnp.add, X, 0.0),
        lambda: drjax.reduce_argmax(X),
    ):
        text = " acts on one level at a time, but the program has levels pods:4 and "
        result = raises(drjax.DrjaxValueError, text, two(block))
        assert "Pass over='pods' or over='groups'." in result


def test_over_with_an_explicit_partition():
    text = "names levels of a program, but it is called with partition="
    call = lambda: drjax.broadcast(1.0, over="pods", partition={"pods": 2})
    raises(drjax.DrjaxValueError, text, call)
    mapped = lambda x: drjax.partition_index(over="pods", partition={"groups": 8})
    raises(drjax.DrjaxValueError, text, two(lambda: drjax.map_fn(mapped, X)))
    text = "partition= needs one partition, got a program with levels pods:4 and "
    raises(drjax.DrjaxValueError, text, lambda: as_partition(PROGRAM))


# Blocks that act on several levels, and those that act on one.
OF_SEVERAL: dict[str, Callable] = {
    "map_fn": lambda x, **k: drjax.map_fn(lambda a: a, x, **k),
    "gather": lambda x, **k: drjax.gather(x, **k),
    "scatter": lambda x, **k: drjax.scatter(x, **k),
    "reduce_sum": lambda x, **k: drjax.reduce_sum(x, **k),
    "reduce_mean": lambda x, **k: drjax.reduce_mean(x, **k),
    "reduce_mean(where)": lambda x, **k: drjax.reduce_mean(x, where=W > 0, **k),
    "reduce_weighted_mean": lambda x, **k: drjax.reduce_weighted_mean(x, W, **k),
    "reduce_max": lambda x, **k: drjax.reduce_max(x, **k),
    "reduce_min": lambda x, **k: drjax.reduce_min(x, **k),
}
OF_ONE: dict[str, Callable] = {
    "broadcast": lambda x, **k: drjax.broadcast(x, **k),
    "reduce_argmax": lambda x, **k: drjax.reduce_argmax(x, **k),
    "reduce_argmin": lambda x, **k: drjax.reduce_argmin(x, **k),
    "reduce_columns": lambda x, **k: drjax.reduce_columns(jnp.median, x, **k),
    "reduce": lambda x, **k: drjax.reduce(jnp.add, x, {"ok": 0, "bad": 0}, **k),
    "select": lambda x, **k: drjax.select(x, 0, **k),
    "take": lambda x, **k: drjax.take(x, SWAP, **k),
    "put": lambda x, **k: drjax.put(x, SWAP, **k),
    "shift": lambda x, **k: drjax.shift(x, 1, **k),
}
BOTH_LEVELS = ("pods", "groups")
CALLS = [
    *((block, over) for block in OF_SEVERAL for over in (None, "groups", BOTH_LEVELS)),
    *((block, "groups") for block in OF_ONE),
]


@pytest.mark.parametrize("block, over", CALLS)
def test_values_without_the_axes_of_levels(block, over):
    """The error names the block that was called, and shows whole shapes."""
    call = (OF_SEVERAL | OF_ONE)[block]
    outer = block in ("broadcast", "take", "put")
    axes = "[4, ...] of level pods:4" if outer else "[4, 8, ...] of levels pods:4 and"
    text = f"drjax.{block.split('(')[0]} needs values with the leading axes {axes}"
    x = {"ok": W, "bad": jnp.ones(32)}
    result = raises(drjax.DrjaxValueError, text, two(lambda x: call(x, over=over)), x)
    name = "arg" if block == "map_fn" else "x"
    assert f"but got:\n  {name}['bad']: shape (32,)\n" in result
    assert "ok" not in result
    fix = (
        f"Divide its first axis: {name}['bad'].reshape(4, 8, *{name}['bad'].shape[1:])."
    )
    assert outer or fix in result


def test_values_with_axes_of_other_levels():
    text = "drjax.reduce_mean needs values with the leading axes [4, 8, ...] of levels "
    result = raises(
        drjax.DrjaxValueError, text, two(lambda: drjax.reduce_mean(X[:, 0]))
    )
    assert "If it has one slice for each of pods:4, pass over='pods'." in result
    result = raises(drjax.DrjaxValueError, text, two(lambda: drjax.reduce_mean(X[0])))
    assert "use drjax.broadcast to give each group a copy" in result
    where = lambda: drjax.reduce_mean(X, where=[True] * 8)
    result = raises(drjax.DrjaxValueError, text, two(where))
    assert "but got:\n  where: shape (8,)\n" in result
    text = "drjax.shard needs values with the leading axes [4, 8, ...] of levels pods:4"
    for x in (X[0], X[:, 0]):
        result = raises(drjax.DrjaxValueError, text, drjax.shard, x, partition=PROGRAM)
        assert "Give each group one slice" in result and "over=" not in result


SUMS = [block for block in OF_SEVERAL if "mean" in block or "sum" in block]
OPTIONS: dict[str, dict[str, Any]] = {
    "needs wire= as a dtype": {"wire": 8},
    "needs result= as": {"result": "whole"},
    "with wire= needs leaves of real floats, got complex64": {"wire": "int8"},
}


@pytest.mark.parametrize("text", OPTIONS)
@pytest.mark.parametrize("over", [None, "groups"])
@pytest.mark.parametrize("block", SUMS)
def test_wrong_options_over_levels(block, over, text):
    options = {"over": over} | OPTIONS[text]
    call = two(lambda x: OF_SEVERAL[block](x, **options))
    raises(drjax.DrjaxError, f"drjax.{block.split('(')[0]} {text}", call, X + 1j)


@pytest.mark.parametrize("block", SUMS)
def test_keys_in_reductions_over_levels(block):
    keys = jax.random.split(jax.random.key(0), X.shape[:2])
    text = f"drjax.{block.split('(')[0]} needs leaves that are numbers, got dtype key"
    raises(drjax.DrjaxTypeError, text, two(OF_SEVERAL[block]), keys)


def test_sizes_of_levels_as_the_size_of_one():
    text = "Levels are keywords of their own: @drjax.program(pods=2, groups=4)"
    raises(drjax.DrjaxTypeError, text, drjax.program, partition_size=BOTH)


@pytest.mark.parametrize("axes", ["pods", ("pods", "groups"), {"pod": "a"}])
def test_mesh_axes_that_are_no_mapping_from_levels(axes):
    text = "mesh_axes= of a program with several levels needs a mapping from their "
    raises(
        drjax.DrjaxValueError,
        text,
        lambda: drjax.program(pods=2, groups=3, mesh_axes=axes),
    )


def test_a_block_inside_a_function_mapped_over_both():
    call = two(lambda: drjax.map_fn(lambda x: drjax.reduce_sum(x), X))
    text = "drjax.reduce_sum was called inside the function given to drjax.map_fn over "
    raises(drjax.ScopeError, text + "partition groups:8", call)
    call = two(
        lambda: drjax.map_fn(lambda x: drjax.reduce_sum(x, partition=PROGRAM), X)
    )
    raises(drjax.ScopeError, "inside a function mapped over them", call)
    other = drjax.program(pods=2, groups=3)(lambda: None)
    call = two(lambda: drjax.map_fn(lambda x: drjax.reduce_sum(x, partition=other), X))
    raises(drjax.ScopeError, "inside a function mapped over them", call)
