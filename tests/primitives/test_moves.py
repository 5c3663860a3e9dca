"""Slices that move between groups: values, derivatives, batches, dtypes, and bytes.

Covers: drjax._primitives.moves, drjax._api.moves.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import drjax
from drjax._primitives.moves import take_p
from tests.helpers.cases import checkerboard
from tests.helpers.exchanges import exchanges_of_large_programs
from tests.helpers.groups import TREES, assert_trees_equal, four
from tests.helpers.meshes import groups_and_meshes, in_mesh, make_mesh
from tests.helpers.raising import X3, raises, three

# The number of groups, and the mesh.
MESHES = groups_and_meshes(
    "none", "one each", "two each", "uneven", "model", "explicit", "explicit other axis"
)
INDEX = np.array([3, 1, 1, 0, 2, 5, 5, 4], np.int32)  # cut to n
PERMUTATION = np.array([2, 5, 0, 7, 4, 1, 6, 3], np.int32)


def index_of(n: int):
    return INDEX[:n] % n


def permutation_of(n: int) -> list[int]:
    return [int(i) for i in PERMUTATION if i < n]


def put_by_numpy(x, index, into, add=False):
    result = np.array(into)
    for j, i in enumerate(index):
        result[i] = result[i] + x[j] if add else x[j]
    return result


# A block, and its meaning: `(x, index as the program has it, the index)`.
MOVES = {
    "take": (lambda x, i, n: drjax.take(x, i), lambda x, n: x[index_of(n)]),
    "take, known": (
        lambda x, i, n: drjax.take(x, index_of(n)),
        lambda x, n: x[index_of(n)],
    ),
    "permutation": (
        lambda x, i, n: drjax.take(x, permutation_of(n)),
        lambda x, n: x[np.array(permutation_of(n))],
    ),
    "put": (
        lambda x, i, n: drjax.put(x, i, into=2 * x),
        lambda x, n: put_by_numpy(x, index_of(n), 2 * x),
    ),
    "put, added": (
        lambda x, i, n: drjax.put(x, i, into=x, add=True),
        lambda x, n: put_by_numpy(x, index_of(n), x, add=True),
    ),
    "put by a permutation": (
        lambda x, i, n: drjax.put(x, permutation_of(n)),
        lambda x, n: put_by_numpy(x, permutation_of(n), 0 * x),
    ),
    "put into zeros": (
        lambda x, i, n: drjax.put(x, index_of(n)),
        lambda x, n: put_by_numpy(x, index_of(n), 0 * x),
    ),
    "shift": (lambda x, i, n: drjax.shift(x, 1), lambda x, n: np.roll(x, 1, 0)),
    "shift back": (lambda x, i, n: drjax.shift(x, -3), lambda x, n: np.roll(x, -3, 0)),
}


def program_of(name: str, n: int):
    """`(x, index) -> moved x`, with work of the groups before and after."""

    @drjax.program(clients=n)
    def f(x, index):
        moved = MOVES[name][0](drjax.map_fn(jnp.sin, x), index, n)
        return drjax.map_fn(jnp.multiply, (moved, x))

    return f


def loss_of(name: str, n: int):
    def loss(x, index):
        squares = drjax.map_fn(lambda y: y**2, program_of(name, n)(x, index))
        return drjax.reduce_sum(squares).sum()

    return drjax.program(clients=n)(loss)


def arguments(n: int):
    x = np.random.RandomState(0).randn(n, 3).astype(np.float32)
    return x, jnp.asarray(index_of(n))


def directional(name: str, x, n: int, direction):
    """The derivative of the loss along a direction, by differences in float64."""

    def loss(x):
        return ((MOVES[name][1](np.sin(x), n) * x) ** 2).sum()

    x, h = x.astype(np.float64), 1e-6
    return (loss(x + h * direction) - loss(x - h * direction)) / (2 * h)


def assert_value_and_gradient(run, name: str, n: int) -> None:
    """They are those of NumPy, and of differences."""
    x, index = arguments(n)
    result = run(program_of(name, n))(x, index)
    want = MOVES[name][1](np.sin(x), n) * x
    np.testing.assert_allclose(result, want, rtol=1e-5, atol=1e-6)
    direction = np.cos(np.arange(3 * n)).reshape(n, 3)
    grad = run(jax.grad(loss_of(name, n)))(x, index)
    expected = directional(name, x, n, direction)
    np.testing.assert_allclose((grad * direction).sum(), expected, rtol=1e-3)


@pytest.mark.sampled
@checkerboard(13, mesh=MESHES, name=MOVES)
def test_values_and_gradients(name, mesh):
    n, make = MESHES[mesh]
    with in_mesh(make and make()):
        for run in (jax.jit, functools.partial(drjax.jit, groups_per_step=1)):
            assert_value_and_gradient(run, name, n)


@pytest.mark.sampled
@pytest.mark.parametrize("name", MOVES)
def test_plans(name):
    n = 5
    x, index = arguments(n)
    both = jax.value_and_grad(loss_of(name, n))
    plan = drjax.make_plan(both)(x, index)
    result = drjax.backends.reference.compile(plan)(x, index)
    for a, b in zip(result, jax.jit(both)(x, index), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["take", "put, added", "permutation"])
@pytest.mark.parametrize("axes", [(0, None), (None, 0), (1, 1)])
def test_batches(name, axes):
    n = 4
    x, index = arguments(n)
    xs = np.stack([x, 2 * x], axes[0]) if axes[0] is not None else x
    other = (index + 1) % n
    indices = index if axes[1] is None else jnp.stack([index, other], axes[1])
    grad = jax.grad(loss_of(name, n))
    result = jax.jit(jax.vmap(grad, axes))(xs, indices)
    for b in range(2):
        want = grad(
            x if axes[0] is None else np.take(xs, b, axes[0]),
            index if axes[1] is None else (index, other)[b],
        )
        np.testing.assert_allclose(result[b], want, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_second_derivatives():
    n = 4
    x, index = arguments(n)
    loss = lambda x: loss_of("take", n)(x, index)
    direct = lambda x: jnp.sum((jnp.sin(x)[index] * x) ** 2)
    result = jax.jit(jax.hessian(loss))(x)
    np.testing.assert_allclose(result, jax.hessian(direct)(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "move", [lambda x: drjax.shift(x, 1), lambda x: drjax.take(x, [2, 0, 1])]
)
def test_transposing_twice_gives_the_program_back(move):
    f = three(move)
    transposed = lambda ct: jax.linear_transpose(f, X3)(ct)[0]
    twice = lambda x: jax.linear_transpose(transposed, X3)(x)[0]
    assert str(jax.make_jaxpr(twice)(X3)) == str(jax.make_jaxpr(f)(X3))
    np.testing.assert_array_equal(transposed(f(X3)), X3)


DTYPES = ("float32", "bfloat16", "float16", "complex64", "int8", "uint32", "bool",
          "float8_e4m3fn")  # fmt: skip


@pytest.mark.sampled
@checkerboard(7, dtype=DTYPES, mesh=["none", "two each", "uneven"])
def test_moves_copy_bits(dtype, mesh):
    n, make = MESHES[mesh]
    x = jnp.asarray(np.random.RandomState(0).randn(n, 2)).astype(dtype)
    if jnp.issubdtype(x.dtype, jnp.floating):
        x = x.at[1].set(jnp.nan).at[0].set(-0.0)
    index = jnp.asarray(index_of(n))
    f = drjax.program(clients=n)(
        lambda x, i: (drjax.take(x, i), drjax.shift(x, 2), drjax.put(x, i))
    )
    with in_mesh(make and make()):
        taken, shifted, put = jax.jit(f)(x, index)
    as_bytes = lambda x: np.asarray(x).tobytes()
    assert taken.dtype == shifted.dtype == put.dtype == x.dtype
    assert as_bytes(taken) == as_bytes(x[index])
    assert as_bytes(shifted) == as_bytes(jnp.roll(x, 2, 0))


@pytest.mark.parametrize("mesh", ["none", "two each"])
def test_keys(mesh):
    n, make = MESHES[mesh]
    keys, index = jax.random.split(jax.random.key(3), n), jnp.asarray(index_of(n))
    f = drjax.program(clients=n)(lambda k, i: (drjax.take(k, i), drjax.shift(k, 1)))
    with in_mesh(make and make()):
        taken, shifted = jax.jit(f)(keys, index)
    assert (taken == keys[index]).all() and (shifted == jnp.roll(keys, 1)).all()


@pytest.mark.parametrize("name", TREES)
def test_trees(name):
    x = TREES[name]()
    move = four(lambda x: drjax.take(x, [2, 2, 0, 1]))
    want = jax.tree.map(lambda x: x[np.array([2, 2, 0, 1])], x)
    assert_trees_equal(move(x), want)
    moved = four(lambda x: drjax.put(drjax.shift(x, -1), [0, 1, 2, 3], into=x))(x)
    assert_trees_equal(moved, jax.tree.map(lambda x: np.roll(x, -1, 0), x))


# ---------------------------------------------------------------------------------
# Communication


def communicated(move, n=16, jit=jax.jit):
    """What collectives, and the bytes of each, for float32 [n, 100]."""
    f, x = jit(drjax.program(clients=n)(move)), np.ones((n, 100), np.float32)
    with jax.set_mesh(make_mesh({"clients": 8})):
        x = drjax.shard(x, partition={"clients": n})
        report = drjax.collectives(f)(x)
    return report.counts, {c.result_bytes for c in report.collectives}


@pytest.mark.parametrize("jit", [jax.jit, drjax.jit])
@pytest.mark.parametrize("k, permutes", [(1, 1), (-1, 1), (2, 1), (3, 2), (0, 0)])
def test_a_shift_sends_what_changes_its_device(k, permutes, jit):
    collectives, sizes = communicated(lambda x: drjax.shift(x, k), jit=jit)
    assert collectives == ({"collective-permute": permutes} if permutes else {})
    if abs(k) == 1:  # one of the two slices of a device
        assert sizes == {400}


def test_a_permutation_needs_a_permute_for_each_group_of_a_device_at_most():
    permutation = np.random.RandomState(0).permutation(16)
    collectives, _ = communicated(lambda x: drjax.take(x, permutation))
    assert [*collectives] == ["collective-permute"]
    assert collectives["collective-permute"] <= 2


@pytest.mark.parametrize("mesh", [None, {"clients": 4}])
def test_slices_in_reverse_order_are_copied_at_once(mesh):
    run = drjax.program(clients=16)(lambda x: drjax.take(x, [*range(16)][::-1]))
    with in_mesh(mesh and make_mesh(mesh)):
        text = jax.jit(run).lower(np.ones((16, 100), np.float32)).as_text()
    assert text.count("stablehlo.reverse") == 1


@pytest.mark.sampled
@checkerboard(5, mesh=MESHES, name=MOVES)
def test_values_and_gradients_by_the_exchanges_of_large_programs(name, mesh):
    n, make = MESHES[mesh]
    with in_mesh(make and make()), exchanges_of_large_programs():
        assert_value_and_gradient(jax.jit, name, n)


@pytest.mark.parametrize(
    "move",
    [
        lambda x: drjax.take(x, np.zeros(16, int)),
        lambda x: drjax.put(x, np.zeros(16, int), add=True),
    ],
)
def test_of_a_known_index_a_slice_is_sent_to_a_device_once(move):
    collectives, sizes = communicated(move)
    assert collectives == {"all-to-all": 1} and sizes == {8 * 400}


@pytest.mark.parametrize("jit", [jax.jit, drjax.jit])
def test_a_permutation_of_many_is_one_all_to_all(jit):
    """Also backwards; the ledger counts the bytes that are sent."""
    n = 512
    permutation = np.random.RandomState(0).permutation(n)
    weights = np.arange(n, dtype=np.float32)[:, None]

    def loss(x):
        taken = drjax.take(drjax.map_fn(jnp.sin, x), permutation)
        return jnp.sum(drjax.map_fn(jnp.square, taken) * weights)

    f = drjax.program(clients=n)(lambda x: drjax.take(x, permutation))
    grad = jax.grad(drjax.program(clients=n)(loss))
    x = np.random.RandomState(1).randn(n, 100).astype(np.float32)
    with jax.set_mesh(make_mesh({"clients": 8})):
        xs = drjax.shard(x, partition={"clients": n})
        report = drjax.collectives(jit(f))(xs)
        assert report.counts == {"all-to-all": 1}
        plan = drjax.make_plan(f)(x)
        assert (
            plan.communication(8).reduced_per_device()
            == report.by_kind["all-to-all"].bytes
        )
        assert drjax.collectives(jit(grad))(xs).counts["all-to-all"] == 2
        np.testing.assert_array_equal(jit(f)(xs), x[permutation])
        inverse = np.argsort(permutation)
        want = 2 * np.sin(x) * np.cos(x) * weights[inverse]
        np.testing.assert_allclose(jit(grad)(xs), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "move",
    [
        lambda x: drjax.take(x, jnp.zeros(16, int)),
        lambda x: drjax.put(x, jnp.zeros(16, int), add=True),
    ],
)
@pytest.mark.parametrize("jit", [jax.jit, drjax.jit])
def test_an_index_that_is_data_is_one_reduce_scatter(move, jit):
    collectives, _ = communicated(move, jit=jit)
    assert sum(collectives.values()) == 1
    assert {*collectives} <= {"reduce-scatter", "all-reduce"}  # CPU may have no other


# ---------------------------------------------------------------------------------
# Errors


NOTHING: Any = None
RAGGED: Any = [[1], [2, 3]]
NESTED: Any = [[1, 2]]
FRACTION: Any = 1.0


@pytest.mark.parametrize(
    "call, error, text",
    [
        (lambda x: drjax.take(x, 1), drjax.DrjaxTypeError, "take needs as index [k] i"),
        (lambda x: drjax.take(x, x), drjax.DrjaxTypeError, "take needs as index [k] i"),
        (lambda x: drjax.take(x, NOTHING), drjax.DrjaxTypeError, "take needs as index"),
        (lambda x: drjax.take(x, RAGGED), drjax.DrjaxTypeError, "take needs as"),
        (lambda x: drjax.take(x, NESTED), drjax.DrjaxValueError, "shape [1,2]."),
        (lambda x: drjax.put(x, [0, 3, 0]), drjax.DrjaxValueError,
         "groups between -3 and 2, got 3. To have it dropped, pass a JAX array."),
        (lambda x: drjax.take(x, np.array([0, -4, 0], np.int8)), drjax.DrjaxValueError,
         "groups between -3 and 2, got -4. To have it clamped, pass a JAX array."),
        (lambda x: drjax.put(x, [0, 1, 2], into=[x]), drjax.DrjaxValueError,
         "drjax.put needs x and into of one structure"),
        (lambda x: drjax.put(x, [0, 1, 2], into=x.astype(int)), drjax.DrjaxValueError,
         "drjax.put needs x and into of the same shapes and dtypes"),
        (lambda x: drjax.put(jax.random.split(jax.random.key(0), 3), [0, 0, 1],
                             add=True),
         drjax.DrjaxTypeError, "drjax.put needs leaves that are numbers"),
        (lambda x: drjax.put(jax.random.split(jax.random.key(0), 3), [0, 2, 1],
                             add=True),
         drjax.DrjaxTypeError, "drjax.put needs leaves that are numbers"),
        (lambda x: drjax.shift(x, FRACTION), drjax.DrjaxTypeError,
         "drjax.shift needs a Python integer, got float: 1.0."),
        (lambda x: drjax.shift(x, True), drjax.DrjaxTypeError, "a Python integer"),
    ],
)  # fmt: skip
def test_errors(call, error, text):
    raises(error, text, three(call), jnp.asarray(X3))


@pytest.mark.parametrize("run", [lambda f: f, jax.jit, drjax.jit])
def test_an_index_out_of_bounds_that_is_data(run):
    """`take` and `select` clamp it and `put` drops it, eagerly too."""
    f = three(
        lambda x, i: (
            drjax.take(x, i),
            drjax.put(x, i, add=True),
            drjax.put(x, i, into=x + 5),
            [drjax.select(x, i[j]) for j in range(3)],
        )
    )
    taken, added, put, selected = run(f)(jnp.asarray(X3), jnp.array([7, -9, -1]))
    np.testing.assert_array_equal(taken, [2.0, 0.0, 2.0])
    np.testing.assert_array_equal(added, [0.0, 0.0, 2.0])
    np.testing.assert_array_equal(put, [5.0, 6.0, 2.0])
    np.testing.assert_array_equal(selected, [2.0, 0.0, 2.0])


@pytest.mark.parametrize("run", [lambda f: f, jax.jit, drjax.jit])
def test_select_the_best_of_no_group(run):
    """The index is then n, which is clamped."""
    f = three(lambda x: drjax.select(x, drjax.reduce_argmax(x, where=x > 9)))
    assert run(f)(jnp.asarray(X3)) == 2.0


OUT_OF_BOUNDS = np.array([1, -3, 99, 0, 8, -1, 2**31 - 1, -(2**31)], np.int32)


@pytest.mark.sampled
@checkerboard(5, mesh=MESHES, run=["eager", "jit", "drjax", "plan"])
def test_a_slice_that_put_drops_gets_no_cotangent(mesh, run):
    """Whatever the devices are; of `take`, the group to which it clamps gets it."""
    n, make = MESHES[mesh]
    index = jnp.asarray(np.resize(OUT_OF_BOUNDS, n))
    weights = np.arange(1.0, n + 1, dtype=np.float32)
    dropped = jnp.where((index >= -n) & (index < n), index, n)

    @drjax.program(clients=n)
    def f(x, i):
        moved = drjax.put(x, i, add=True), drjax.put(x, i), drjax.take(x, i)
        scaled = lambda added, put, taken: added + 3 * put + 10 * taken
        return jnp.sum(drjax.map_fn(scaled, moved) * weights)

    def by_numpy():
        grad = np.zeros(n)
        for j, i in enumerate(np.asarray(dropped)):
            last = i < n and all(k % n != i % n or k == n for k in dropped[j + 1 :])
            grad[j] += 0 if i == n else (1 + 3 * last) * weights[i]
        for j, i in enumerate(np.asarray(index)):
            i = int(i) + n if i < 0 else int(i)
            grad[min(max(i, 0), n - 1)] += 10 * weights[j]
        return grad

    grad, x = jax.grad(f), jnp.ones(n)
    with in_mesh(make and make()):
        compiled = {"jit": jax.jit, "drjax": drjax.jit}.get(run, lambda f: f)(grad)
        if run == "plan":
            compiled = jax.jit(
                drjax.backends.xla.compile(drjax.make_plan(grad)(x, index))
            )
        np.testing.assert_array_equal(compiled(x, index), by_numpy())


@pytest.mark.sampled
@checkerboard(3, mesh=MESHES, dtype=["float32", "bool", "key"])
def test_the_primitive_take_fills_in_zeros(mesh, dtype):
    n, make = MESHES[mesh]
    partition = drjax.Partition("clients", n)
    for k in (n, 3 * n):
        index = jnp.asarray(np.resize(OUT_OF_BOUNDS, k))
        x = jax.random.split(jax.random.key(0), n)
        x = x if dtype == "key" else jnp.ones(n, dtype)
        with in_mesh(make and make()) as mesh_:
            take = lambda x, i: take_p.bind(x, i, partition=partition, mesh=mesh_)
            taken = jax.jit(take)(x, index)
        raw = lambda x: jax.random.key_data(x) if dtype == "key" else x[:, None]
        inside = ((index >= 0) & (index < n))[:, None]
        want = np.where(inside, raw(x)[index.clip(0, n - 1)], 0)
        np.testing.assert_array_equal(raw(taken), want)


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "uint64"])
def test_a_numpy_index_of_a_small_dtype(dtype):
    """There may be more groups than the dtype holds."""
    n = min(np.iinfo(dtype).max + 1, 300)
    x, index = np.arange(n, dtype=np.float32), (np.arange(n) // 2).astype(dtype)
    f = lambda x: (drjax.take(x, index), drjax.put(x, index, add=True))
    taken, added = drjax.program(clients=n)(f)(x)
    np.testing.assert_array_equal(taken, x[index])
    np.testing.assert_array_equal(added, np.bincount(index, x, n))


@pytest.mark.parametrize("dtype", ["int64", "uint64", "int8", "uint32"])
def test_an_index_of_another_dtype(dtype):
    f = jax.jit(three(lambda x, i: (drjax.take(x, i), drjax.put(x, i, add=True))))
    with jax.enable_x64(True):
        highest = jnp.iinfo(dtype).max
        taken, added = f(jnp.asarray(X3), jnp.array([1, highest, highest - 1], dtype))
    np.testing.assert_array_equal(taken, [1.0, 2.0, 2.0])
    np.testing.assert_array_equal(added, [0.0, 0.0, 0.0])


def test_an_index_that_is_partitioned_has_no_plan():
    f = three(lambda x: drjax.take(x, drjax.map_fn(jnp.int32, x)))
    raises(drjax.PlanError, "It needs a global value.", drjax.make_plan(f), X3)
