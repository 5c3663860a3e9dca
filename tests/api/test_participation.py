"""Groups that take part in reductions: masks, segments, defaults, and arg-extrema.

Covers: drjax._api.participation, drjax._api.max_and_min, drjax._api.reductions.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import drjax
from tests.helpers.cases import checkerboard
from tests.helpers.compiled import temp_bytes
from tests.helpers.groups import TREES, assert_trees_equal, four
from tests.helpers.meshes import EXPLICIT, in_mesh, make_mesh
from tests.helpers.raising import KEYS3, X3, raises, three

# The number of groups, and the mesh.
MESHES = {
    "none": (5, None),
    "two each": (8, lambda: make_mesh({"clients": 4})),
    "uneven": (7, lambda: make_mesh({"clients": 4})),
    "model": (6, lambda: make_mesh({"clients": 2, "model": 2})),
    "explicit": (8, lambda: make_mesh({"clients": 4}, EXPLICIT)),
    "explicit model": (6, lambda: make_mesh({"clients": 2, "model": 2}, EXPLICIT)),
}
NUM = 4  # segment 2 has no group
SEGMENTS = np.array([1, 0, 1, -1, 3, 0, 4, 3], np.int32)  # cut to n
TAKEN = np.array([True, False, True, True, True, True, False, False])
LOWEST = {"reduce_max": -np.inf, "reduce_min": np.inf}


def arguments(n: int):
    """Slices `[n, 4]`, weights, masks and segments."""
    x = np.random.RandomState(0).randn(n, 4).astype(np.float32)
    weights = np.abs(np.sin(np.arange(1.0, n + 1))).astype(np.float32)
    return x, weights, TAKEN[:n], SEGMENTS[:n]


def plain(block: str, x, weights, taken, default):
    """The reduction over the groups of a mask, `[*s]`, by jax.numpy."""
    mask = taken.reshape(-1, *[1] * (x.ndim - 1))
    if block in LOWEST:
        y = getattr(jnp, block[7:])(x, axis=0, where=mask, initial=LOWEST[block])
        return y if default is None else jnp.where(taken.any(), y, default)
    if block == "reduce_sum":
        return jnp.sum(x, axis=0, where=mask)
    w = jnp.ones(len(x)) if block == "reduce_mean" else weights
    w = jnp.where(taken, w, 0)
    total = w.sum()
    mean = jnp.tensordot(w, x, 1) / jnp.where(total == 0, 1, total)
    return jnp.where(total == 0, jnp.nan if default is None else default, mean)


def plain_by(block: str, x, weights, taken, segments, default):
    """The same for each segment, `[NUM, *s]`."""
    masks = [taken & (segments == k) for k in range(NUM)]
    return jnp.stack([plain(block, x, weights, mask, default) for mask in masks])


# The reduction, and whether it has a mask, segments, and a default.
REDUCTIONS: dict[str, tuple[str, bool, bool, float | None]] = {
    "sum by": ("reduce_sum", False, True, None),
    "sum by, where": ("reduce_sum", True, True, None),
    "mean by": ("reduce_mean", False, True, 0.5),
    "mean by, where": ("reduce_mean", True, True, None),
    "weighted by": ("reduce_weighted_mean", False, True, -2),
    "weighted, where": ("reduce_weighted_mean", True, False, 1.0),
    "max by": ("reduce_max", False, True, None),
    "max where": ("reduce_max", True, False, None),
    "min by, where": ("reduce_min", True, True, 0.0),
    "min where": ("reduce_min", True, False, 3.0),
}


def program_of(name: str, n: int):
    """`(x, weights, taken, segments) -> ` the reduction of the sines of x."""
    block, masked, by, default = REDUCTIONS[name]

    @drjax.program(clients=n)
    def f(x, weights, taken, segments):
        options: dict[str, Any] = {"where": taken} if masked else {}
        if by:
            options.update(by=segments, num=NUM)
        if block != "reduce_sum":
            options["default"] = default
        args = [weights] if block == "reduce_weighted_mean" else []
        y = drjax.map_fn(jnp.sin, x)
        return getattr(drjax, block)(y, *args, **options)

    return f


def plain_of(name: str):
    block, masked, by, default = REDUCTIONS[name]

    def f(x, weights, taken, segments):
        taken = taken if masked else jnp.ones_like(taken)
        if by:
            return plain_by(block, jnp.sin(x), weights, taken, segments, default)
        return plain(block, jnp.sin(x), weights, taken, default)

    return f


def loss_of(f):
    """A loss of the finite results of f, and these results."""

    def loss(x, weights, taken, segments):
        y = f(x, weights, taken, segments)
        finite = jnp.where(jnp.isfinite(y), y, 0.0)
        return jnp.sum(finite**2 * jnp.arange(1, 1 + finite.size).reshape(y.shape)), y

    return loss


def assert_all_close(actual, expected):
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    jax.tree.map(close, actual, expected)


@functools.cache
def expected_of(name: str, n: int):
    loss = loss_of(plain_of(name))
    return jax.jit(jax.grad(loss, (0, 1), has_aux=True))(*arguments(n))


@pytest.mark.sampled
@checkerboard(14, mesh=MESHES, name=REDUCTIONS)
def test_values_and_gradients(name, mesh):
    n, make = MESHES[mesh]
    grad = jax.grad(loss_of(program_of(name, n)), (0, 1), has_aux=True)
    with in_mesh(make and make()):
        x, *rest = map(jnp.asarray, arguments(n))
        if "model" in mesh:
            x = jax.device_put(x, P("clients", "model"))
        for run in (jax.jit, functools.partial(drjax.jit, groups_per_step=1)):
            assert_all_close(run(grad)(x, *rest), expected_of(name, n))


@pytest.mark.sampled
@checkerboard(5, name=REDUCTIONS)
def test_plans(name):
    args = arguments(5)
    grad = jax.grad(loss_of(program_of(name, 5)), (0, 1), has_aux=True)
    plan = drjax.make_plan(grad)(*args)
    result = drjax.backends.reference.compile(plan)(*args)
    assert_all_close(result, expected_of(name, 5))


@checkerboard(5, name=REDUCTIONS)
def test_forward_mode_and_batches(name):
    x, *rest = map(jnp.asarray, arguments(5))
    xs = jnp.stack([x, -2 * x], 1)

    def f(f):
        def derivative(x, d):
            y, dy = jax.jvp(lambda x: f(x, *rest), (x,), (d,))
            return y, jnp.where(jnp.isfinite(y), dy, 0.0)

        return derivative

    batched = lambda g: jax.jit(jax.vmap(f(g), (1, None)))(xs, jnp.cos(x))
    assert_all_close(batched(program_of(name, 5)), batched(plain_of(name)))


def test_batches_of_masks_and_segments():
    x, _, taken, segments = map(jnp.asarray, arguments(5))
    f = drjax.program(clients=5)(
        lambda taken, by: drjax.reduce_sum(x, where=taken, by=by, num=NUM)
    )
    masks, ids = jnp.stack([taken, ~taken]), jnp.stack([segments, segments + 1], 1)
    result, f = jax.jit(jax.vmap(f, (0, 1)))(masks, ids), jax.jit(f)
    for b in range(2):
        np.testing.assert_allclose(result[b], f(masks[b], ids[:, b]), rtol=1e-6)


@checkerboard(3, block=["reduce_mean", "reduce_max", "reduce_min"])
def test_left_out_slices_do_not_leak(block):
    """Infinities and NaNs of groups without a segment, forward and backward."""
    x = jnp.array([[jnp.nan, jnp.inf], [2.0, 3.0], [-jnp.inf, jnp.nan]])
    reduce = three(
        lambda x: getattr(drjax, block)(x, by=[7, 0, -1], num=2, default=0.0)
    )
    y, dy = jax.jit(lambda x: jax.jvp(reduce, (x,), (x,)))(x)
    np.testing.assert_array_equal(y, [[2.0, 3.0], [0.0, 0.0]])
    np.testing.assert_array_equal(dy, [[2.0, 3.0], [0.0, 0.0]])
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(reduce(x) ** 2)))(x)
    np.testing.assert_array_equal(gradient, [[0.0, 0.0], [4.0, 6.0], [0.0, 0.0]])


def test_left_out_weights_do_not_leak():
    x, w = jnp.array([jnp.nan, 2.0, 3.0]), jnp.array([1.0, 1.0, jnp.inf])
    mean = three(
        lambda x, w: drjax.reduce_weighted_mean(x, w, where=[False, True, False])
    )
    assert mean(x, w) == 2.0
    for gradient in jax.jit(jax.grad(mean, (0, 1)))(x, w):
        assert jnp.isfinite(gradient).all()


# Reductions over no group, by a mask or by weights.
OF_NO_GROUP = {
    "reduce_mean": lambda x, none, **k: drjax.reduce_mean(x, where=none, **k),
    "reduce_weighted_mean": lambda x, none, **k: drjax.reduce_weighted_mean(
        x, 0 * x, **k
    ),
    "reduce_max": lambda x, none, **k: drjax.reduce_max(x, where=none, **k),
    "reduce_min": lambda x, none, **k: drjax.reduce_min(x, where=none, **k),
}


@checkerboard(4, block=OF_NO_GROUP)
def test_default(block):
    def f(x, default):
        y = OF_NO_GROUP[block](x, np.zeros(3, bool), default=default)
        return y * drjax.reduce_sum(x)

    x = jnp.arange(1.0, 4.0)
    for run in (jax.jit, drjax.jit):
        value, gradients = run(jax.value_and_grad(three(f), (0, 1)))(x, 2.0)
        assert value == 12.0
        np.testing.assert_array_equal(gradients[0], [2.0, 2.0, 2.0])
        assert gradients[1] == 6.0
    derivative = lambda x: jax.jvp(lambda x: three(f)(x, 2), (x,), (x,))
    primal, tangent = jax.jit(derivative)(x)
    assert (primal, tangent) == (12.0, 12.0)
    hessian = jax.jit(jax.hessian(lambda x: three(f)(x, 2)))(x)
    np.testing.assert_array_equal(hessian, np.zeros((3, 3)))


def test_default_of_a_tree_with_several_dtypes():
    x = {"a": jnp.ones((3, 2), jnp.bfloat16), "b": jnp.arange(3, dtype=jnp.int8),
         "c": jnp.array([True, True, False])}  # fmt: skip
    none = np.zeros(3, bool)
    f = three(lambda x: drjax.reduce_max(x, where=none, default=True))
    largest = jax.jit(f)(x)
    assert jax.tree.map(lambda x: x.dtype, largest) == jax.tree.map(
        lambda x: x.dtype, x
    )
    assert largest["b"] == 1 and largest["c"]
    f = three(lambda x: drjax.reduce_mean(x, where=none, default=0.5))
    mean = jax.jit(f)(x)
    assert_trees_equal(
        mean,
        {"a": np.full(2, 0.5, jnp.bfloat16), "b": np.float32(0.5),
         "c": np.float32(0.5)},
    )  # fmt: skip


@checkerboard(3, dtype=["bfloat16", "int8", "uint32", "bool", "complex64"])
def test_dtypes(dtype):
    x = jnp.asarray(np.random.RandomState(0).randint(0, 3, (4, 2))).astype(dtype)
    by = jnp.array([0, 1, 0, 5], jnp.uint8)
    total, mean = four(
        lambda x: (
            drjax.reduce_sum(x, by=by, num=2),
            drjax.reduce_mean(x, by=by, num=2),
        )
    )(x)
    want = jnp.stack([x[np.array([0, 2])].sum(0), x[1:2].sum(0)])
    assert total.dtype == want.dtype
    np.testing.assert_array_equal(total, want)
    want = jnp.stack([x[np.array([0, 2])].mean(0), x[1]])
    assert mean.dtype == x[:1].mean(0).dtype
    np.testing.assert_array_equal(mean, want.astype(mean.dtype))
    if dtype != "complex64":
        largest = four(lambda x: drjax.reduce_max(x, by=by, num=2))(x)
        want = jnp.stack([x[np.array([0, 2])].max(0), x[1]])
        assert largest.dtype == x.dtype
        np.testing.assert_array_equal(largest, want)


@checkerboard(4, name=TREES)
def test_trees(name):
    x = TREES[name]()
    by = np.array([1, 0, 1, 2])
    want = jax.tree.map(lambda x: np.stack([x[1], x[0] + x[2], x[3]]), x)
    assert_trees_equal(four(lambda x: drjax.reduce_sum(x, by=by, num=3))(x), want)
    want = jax.tree.map(lambda x: jnp.argmax(jnp.asarray(x), axis=0), x)
    assert_trees_equal(four(drjax.reduce_argmax)(x), want)


@checkerboard(2, dtype=["int64", "uint64", "int8"])
def test_segments_of_another_dtype(dtype):
    f = jax.jit(three(lambda x, by: drjax.reduce_sum(x, by=by, num=300)))
    with jax.enable_x64(True):
        last = min(2**32, int(jnp.iinfo(dtype).max))
        result = f(X3, jnp.array([1, last, 0], dtype))
    want = np.zeros(300)
    want[0] = 2.0
    if last < 300:
        want[last] = 1.0
    np.testing.assert_array_equal(result, want)


# ---------------------------------------------------------------------------------
# Arg-extrema and selection


ARGS = {
    "reduce_argmax": (jnp.argmax, -np.inf),
    "reduce_argmin": (jnp.argmin, np.inf),
}


@checkerboard(9, mesh=MESHES, block=ARGS)
def test_arg_extrema(block, mesh):
    n, make = MESHES[mesh]
    plain_arg, lowest = ARGS[block]
    x = np.random.RandomState(1).randint(-1, 2, (n, 40)).astype(np.float32)
    x[1, :3], x[3, 1:5], x[:, 5] = np.nan, np.nan, lowest
    taken = TAKEN[:n]

    @drjax.program(clients=n)
    def f(x, taken):
        reduce = getattr(drjax, block)
        return reduce(x), reduce(drjax.map_fn(jnp.sin, x), where=taken)

    kept = jnp.where(taken[:, None], jnp.sin(x), lowest)
    with in_mesh(make and make()):
        args = jnp.asarray(x), jnp.asarray(taken)
        if "model" in mesh:
            args = jax.device_put(args[0], P("clients", "model")), args[1]
        for run in (jax.jit, functools.partial(drjax.jit, groups_per_step=1)):
            index, chosen = run(f)(*args)
            assert index.dtype == chosen.dtype == jnp.int32
            np.testing.assert_array_equal(index, plain_arg(x, axis=0))
            want = np.where(np.isinf(x[0]), 0, plain_arg(kept, axis=0))
            np.testing.assert_array_equal(np.delete(chosen, 5), np.delete(want, 5))


def test_arg_extrema_in_a_plan():
    def f(x):
        i = drjax.reduce_argmax(drjax.map_fn(lambda x: jnp.sin(x).sum(), x))
        return i, drjax.select(x, i).sum()

    x = arguments(5)[0]
    both = jax.value_and_grad(lambda x: drjax.program(clients=5)(f)(x)[::-1],
                              has_aux=True)  # fmt: skip
    want = both(x)
    assert want[0][1] == np.sin(x).sum(1).argmax()
    plan = drjax.make_plan(both)(x)
    assert_all_close(drjax.backends.reference.compile(plan)(x), want)


@checkerboard(3, block=ARGS, dtype=["bfloat16", "int8", "uint32", "bool"])
def test_arg_extrema_of_dtypes(block, dtype):
    x = jnp.asarray([[0, 2], [3, 1], [3, 1], [0, 2]]).astype(dtype)
    reduce = getattr(drjax, block)
    index, chosen, none = four(
        lambda x: (
            reduce(x),
            reduce(x, where=[False, False, True, True]),
            reduce(x, where=[False] * 4),
        )
    )(x)
    np.testing.assert_array_equal(index, ARGS[block][0](x, axis=0))
    np.testing.assert_array_equal(chosen, 2 + ARGS[block][0](x[2:], axis=0))
    np.testing.assert_array_equal(none, [4, 4])


def test_arg_extrema_have_no_gradient():
    f = four(lambda x: drjax.reduce_argmax(x) * drjax.reduce_sum(x))
    x = jnp.array([1.0, 5.0, 2.0, 5.0])
    for run in (lambda f: f, drjax.jit):
        np.testing.assert_array_equal(run(jax.grad(f))(x), np.ones(4))
        assert run(jax.vmap(f))(jnp.stack([x, -x])).tolist() == [13.0, 0.0]
    index, tangent = jax.jvp(four(drjax.reduce_argmin), (x,), (x,))
    assert index == 0 and tangent.dtype == jax.dtypes.float0


@checkerboard(4, mesh=["uneven", "two each", "explicit", "none"])
def test_selection_among_groups(mesh):
    n, make = MESHES[mesh]
    x, _, taken, _ = arguments(n)
    x[~taken] = np.nan
    f = drjax.program(clients=n)(lambda x, i, w: drjax.select(x, i, where=w).sum())
    with in_mesh(make and make()):
        args = jnp.asarray(x), jnp.asarray(taken)
        for run in (jax.jit, drjax.jit):
            both = run(jax.value_and_grad(f))
            for i in (1, -1, n + 3):
                value, gradient = both(args[0], jnp.int32(i), args[1])
                chosen = np.flatnonzero(taken)[min(i, taken.sum() - 1)]
                np.testing.assert_allclose(value, x[chosen].sum(), rtol=1e-6)
                want = np.zeros_like(x)
                want[chosen] = 1
                np.testing.assert_array_equal(gradient, want)
        assert f(jnp.abs(args[0]), 0, ~args[1] & args[1]) == 0.0


def test_selection_of_keys():
    keys = KEYS3()
    f = three(lambda k: drjax.select(k, 1, where=[True, False, True]))
    assert jax.jit(f)(keys) == keys[2]


# ---------------------------------------------------------------------------------
# Communication and memory


@pytest.mark.parametrize("block", ["reduce_sum", "reduce_max"])
def test_segments_are_one_all_reduce(block):
    f = drjax.program(clients=16)(
        lambda x, by: getattr(drjax, block)(x, by=by, num=NUM)
    )
    with jax.set_mesh(make_mesh({"clients": 8})):
        x = drjax.shard(np.ones((16, 10), np.float32), partition={"clients": 16})
        by = drjax.shard(np.zeros(16, np.int32), partition={"clients": 16})
        report = drjax.collectives(f)(x, by)
        assert report.counts == {"all-reduce": 1}
        transposed = jax.jit(lambda ct: jax.vjp(lambda x: f(x, by), x)[1](ct))
        if block == "reduce_sum":  # each group looks up its segment
            assert not drjax.collectives(transposed)(f(x, by)).counts


def test_arg_extrema_gather_nothing():
    with jax.set_mesh(make_mesh({"clients": 8})):
        x = drjax.shard(np.ones((16, 10), np.float32), partition={"clients": 16})
        report = drjax.collectives(drjax.program(clients=16)(drjax.reduce_argmax))(x)
    assert report.counts == {"all-reduce": 2}


def test_memory_of_segments_does_not_grow_with_n():
    def step(n):
        f = drjax.program(clients=n)(
            lambda x, by: drjax.reduce_mean(x, by=by, num=8, default=0.0)
        )
        grad = jax.grad(lambda x, by: jnp.sum(f(x, by) ** 2))
        args = np.ones((n, 1000), np.float32), np.zeros(n, np.int32)
        return temp_bytes(drjax.jit(grad, groups_per_step=1), *args)

    assert step(256) < step(16) + 100_000


def test_inside_a_manual_shard_map():
    program = drjax.program(clients=8)
    x, _, taken, segments = map(jnp.asarray, arguments(8))

    @program
    def f(x, taken, by):
        return (
            drjax.reduce_sum(x, by=by, num=NUM),
            drjax.reduce_mean(x, where=taken, by=by, num=NUM, default=0.0),
            drjax.reduce_argmax(x, where=taken),
            drjax.select(x, 1, where=taken),
        )

    want = jax.jit(f)(x, taken, segments)
    with jax.set_mesh(make_mesh({"clients": 4})):
        mapped = jax.shard_map(f, in_specs=P("clients"), out_specs=P())
        assert_all_close(jax.jit(mapped)(x, taken, segments), want)


# ---------------------------------------------------------------------------------
# Errors

TYPE, VALUE = drjax.DrjaxTypeError, drjax.DrjaxValueError
WORD: Any = "two"
LIST: Any = [0.0]
OBJECT: Any = object()
ARRAY: Any = np.array(2)
RAGGED: Any = [[0], [1, 2]]
INTEGERS: Any = [1, 0, 1]
ERRORS = [
    (lambda x: drjax.reduce_sum(x, by=[0, 1, 1]), TYPE,
     "reduce_sum with by= needs the number of segments as num=, a Python integer, got "
     "none."),
    (lambda x: drjax.reduce_max(x, num=2), TYPE, "got num=2 without by=."),
    (lambda x: drjax.reduce_sum(x, by=[0, 1, 1], num=ARRAY), TYPE,
     "a Python integer, got ndarray"),
    (lambda x: drjax.reduce_sum(x, by=[0, 1, 1], num=True), TYPE, "got bool: True"),
    (lambda x: drjax.reduce_mean(x, by=[0, 1, 1], num=0), VALUE,
     "reduce_mean needs a positive number of segments, got num=0."),
    (lambda x: drjax.reduce_mean(x, by=[0, 1, 1], num=2**40), VALUE, "number of seg"),
    (lambda x: drjax.reduce_min(x, by=x, num=2), TYPE,
     "reduce_min needs by= as [3] integers, got dtype float32. Write for instance"),
    (lambda x: drjax.reduce_min(x, by=x > 1, num=2), TYPE, "got dtype bool."),
    (lambda x: drjax.reduce_sum(x, by=WORD, num=2), TYPE, "got str: 'two'."),
    (lambda x: drjax.reduce_sum(x, by=RAGGED, num=2), TYPE, "got list: [[0"),
    (lambda x: drjax.reduce_sum(x, by=[0, 1], num=2), VALUE,
     "the segment of each group of clients:3, got shape (2,)."),
    (lambda x: drjax.reduce_sum(x, by=1, num=2), VALUE, "got shape ()."),
    (lambda x: drjax.reduce_sum(x, by=[2**70, 0, 1], num=2), TYPE, "[3] integers, got"),
    (lambda x: drjax.reduce_max(x, where=INTEGERS), TYPE,
     "reduce_max needs where= as bool [3], got dtype int32."),
    (lambda x: drjax.reduce_argmin(x, where=[True]), VALUE,
     "reduce_argmin needs where= as bool [3], one for each group of clients:3"),
    (lambda x: drjax.select(x, 0, where=x), TYPE, "select needs where= as bool [3]"),
    (lambda x: drjax.reduce_argmax(1j * x), TYPE, "reduce_argmax needs leaves with"),
    (lambda x: drjax.reduce_argmax(KEYS3()), TYPE, "reduce_argmax needs leaves that"),
    (lambda x: drjax.reduce_mean(x, default=WORD), TYPE,
     "reduce_mean needs default= as one number for all leaves, got str: 'two'."),
    (lambda x: drjax.reduce_mean(x, default=LIST), TYPE, "all leaves, got list"),
    (lambda x: drjax.reduce_mean(x, default=OBJECT), TYPE, "default= as one number"),
    (lambda x: drjax.reduce_mean(x, default=x), VALUE, "all leaves, got shape (3,)."),
    (lambda x: drjax.reduce_mean(x, default=KEYS3()[0]), TYPE, "got dtype key<"),
    (lambda x: drjax.reduce_mean(x, default=1j), TYPE,
     "reduce_mean got default= of dtype complex64, but a leaf whose result has dtype "
     "float32. Pass a default"),
    (lambda x: drjax.reduce_max(x.astype(int), default=0.5), TYPE, "of dtype float32"),
    (lambda x: drjax.reduce_max(x.astype("int8"), default=300), VALUE,
     "reduce_max got default=300, but a leaf whose result has dtype int8. Pass"),
    (lambda x: drjax.reduce_min(x.astype("uint8"), default=-1), VALUE, "default=-1, b"),
]  # fmt: skip


@pytest.mark.parametrize("call, error, text", ERRORS)
def test_errors(call, error, text):
    raises(error, text, three(call), jnp.asarray(X3))
