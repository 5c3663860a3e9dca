"""A program inside another program's mapped function: pods of clients.

Covers: drjax._api.program, drjax._api.trace_map.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import drjax
from tests.helpers.cases import checkerboard, some
from tests.helpers.every_block import X, assert_close
from tests.helpers.meshes import AUTO, EXPLICIT, in_mesh, in_mesh_of, make_mesh

MESHES: dict[str, Any] = {
    "none": None,
    "both": ({"pods": 2, "clients": 4}, AUTO),
    "both, model": ({"pods": 2, "clients": 2, "model": 2}, AUTO),
    "inner first": ({"clients": 4, "pods": 2}, AUTO),
    "explicit": ({"pods": 2, "clients": 4}, EXPLICIT),
    "mixed": ({"pods": 2, "clients": 4}, (AUTO, EXPLICIT)),
    "only outer": ({"pods": 2}, AUTO),
    "only inner": ({"clients": 4}, AUTO),
}


def in_mesh_named(name: str):
    return in_mesh(make_mesh(*MESHES[name]) if MESHES[name] else None)


def make_nested(pods: int, clients: int):
    """A function of x [3]: MAML-like steps in each pod, an average over the pods."""

    @drjax.program(clients=clients)
    def pod(x, scale):
        def loss(y, scale, number):
            return jnp.sum(jnp.sin(y * scale + number / clients) ** 2)

        def fit(y, scale):
            number = drjax.partition_index() + 10 * drjax.partition_index(
                partition={"pods": pods}
            )
            return loss(y - 0.1 * jax.grad(loss)(y, scale, number), scale, number)

        losses = drjax.map_fn(fit, drjax.broadcast((x, scale)))
        return drjax.reduce_mean(losses) + drjax.reduce_max(losses)

    @drjax.program(pods=pods)
    def train(x):
        scales = drjax.map_fn(lambda i: 1.0 + i / pods, drjax.partition_index())
        values = drjax.map_fn(pod, (drjax.broadcast(x), scales))
        return drjax.reduce_mean(values)

    return train


def in_python_loops(pods: int, clients: int, x):
    total = []
    for p in range(pods):
        scale, losses = 1.0 + p / pods, []
        for c in range(clients):
            number = c + 10 * p
            loss = lambda y, s=scale, i=number: jnp.sum(
                jnp.sin(y * s + i / clients) ** 2
            )
            losses.append(loss(x - 0.1 * jax.grad(loss)(x)))
        losses = jnp.stack(losses)
        total.append(losses.mean() + losses.max())
    return jnp.stack(total).mean()


def expected_for(pods: int, clients: int):
    return jax.value_and_grad(lambda x: in_python_loops(pods, clients, x))(X)


@pytest.mark.sampled
@pytest.mark.usefixtures("leaks_unchecked")
@checkerboard(7, sizes=[(4, 8), (2, 4)], name=MESHES)
def test_value_and_gradient(name, sizes):
    f = make_nested(*sizes)
    with in_mesh_named(name):
        result = jax.jit(jax.value_and_grad(f))(X)
    assert_close(result, expected_for(*sizes), 5e-5)


@pytest.mark.parametrize("sizes", some([(2, 6), (4, 3), (3, 4), (3, 5)], (4, 3)))
def test_sizes_that_do_not_divide(sizes):
    f = make_nested(*sizes)
    with in_mesh(make_mesh({"pods": 2, "clients": 4})):
        result = jax.jit(jax.value_and_grad(f))(X)
    assert_close(result, expected_for(*sizes), 5e-5)


@pytest.mark.parametrize("name", some(MESHES, "both"))
def test_eager(name):
    f = make_nested(4, 4)
    with in_mesh_named(name):
        result = f(X)
    assert_close(result, in_python_loops(4, 4, X), 5e-5)


@pytest.mark.parametrize("name", some(MESHES, "none", "both", "mixed"))
def test_index_of_both_levels(name):
    @drjax.program(clients=8)
    def inner(x):
        pod = drjax.partition_index(partition={"pods": 4})
        number = lambda y: (
            100 * drjax.partition_index(partition={"pods": 4})
            + (drjax.partition_index())
        )
        return pod, drjax.partition_index(), drjax.map_fn(number, drjax.broadcast(x))

    @drjax.program(pods=4)
    def outer(x):
        return drjax.map_fn(inner, drjax.broadcast(x))

    with in_mesh_named(name):
        pod, client, both = jax.jit(outer)(1.0)
    assert pod.tolist() == [0, 1, 2, 3]
    assert (np.asarray(client) == np.arange(8)).all()
    assert (np.asarray(both) == 100 * np.arange(4)[:, None] + np.arange(8)).all()


def test_closures_over_the_outer_groups_values():
    @drjax.program(clients=8)
    def inner(x):
        return drjax.reduce_sum(drjax.map_fn(lambda i: i * x, drjax.partition_index()))

    @drjax.program(pods=4)
    def outer(x):
        return drjax.map_fn(inner, drjax.broadcast(x))

    for shape in (None, {"clients": 4}, {"pods": 2, "clients": 4}):
        with in_mesh_of(shape):
            assert jax.jit(outer)(2.0).tolist() == [56.0] * 4


def test_both_levels_are_sharded():
    @drjax.program(clients=8)
    def inner(x):
        return drjax.map_fn(jnp.sin, drjax.broadcast(x))

    @drjax.program(pods=4)
    def outer(x):
        return drjax.map_fn(inner, drjax.broadcast(x))

    with in_mesh(make_mesh({"pods": 2, "clients": 4})):
        y = jax.jit(outer)(X)
    assert y.shape == (4, 8, 3)
    assert y.sharding.shard_shape(y.shape) == (2, 2, 3)


# ---------------------------------------------------------------------------------
# Inner scopes: the name, or the mesh axis, of an enclosing program


def same_names(inner: Any):
    """A function of x [3] and y [4, 3], with an inner program over 2, 3 or 4 groups."""

    @inner
    def within(x, y):
        def one(a):
            number = 1.0 + drjax.partition_index()
            return jnp.sin(a * x * number) * y + drjax.partition_size()

        return drjax.reduce_mean(drjax.map_fn(one, drjax.broadcast(y)))

    @drjax.program(partition_size=4)
    def outer(x, y):
        number = lambda a: within(x, a * drjax.partition_index())
        return drjax.reduce_sum(drjax.map_fn(number, y))

    def expected(x, y):
        size = inner(drjax.partition_size)()
        total = jnp.zeros(3)
        for i in range(4):
            a = y[i] * i
            for j in range(size):
                total += (jnp.sin(a * x * (1.0 + j)) * a + size) / size
        return total

    return outer, expected


INNER = {
    "another size": drjax.program(partition_size=2),
    "the same size": drjax.program(partition_size=4),
    "the same axis": drjax.program(clients=3, mesh_axes="partition_size"),
    "one of the axes": drjax.program(clients=2, mesh_axes=("data", "partition_size")),
}
INNER_MESHES = {
    "none": None,
    "auto": ({"partition_size": 4}, AUTO),
    "explicit": ({"partition_size": 4}, EXPLICIT),
    "two axes": ({"data": 2, "partition_size": 2}, AUTO),
}


@pytest.mark.sampled
@checkerboard(5, inner=INNER, name=INNER_MESHES)
def test_a_program_of_the_same_name_or_axis_is_an_inner_scope(inner, name):
    fn, expected = same_names(INNER[inner])
    y = jnp.arange(12.0).reshape(4, 3) / 10
    with in_mesh(make_mesh(*INNER_MESHES[name]) if INNER_MESHES[name] else None):
        result = jax.jit(jax.value_and_grad(lambda x, y: fn(x, y).sum(), (0, 1)))(X, y)
        streamed = drjax.jit(fn, groups_per_step=1)(X, y)
    plain = jax.value_and_grad(lambda x, y: expected(x, y).sum(), (0, 1))
    assert_close(result, plain(X, y), 5e-5)
    assert_close(streamed, expected(X, y), 5e-5)


@pytest.mark.parametrize("inner", INNER)
def test_inner_scopes_have_plans(inner):
    fn, expected = same_names(INNER[inner])
    y = jnp.arange(12.0).reshape(4, 3) / 10
    plan = drjax.make_plan(fn)(X, y)
    assert [len(plan.rounds), str(plan.partition)] == [1, "partition_size:4"]
    for backend in (drjax.backends.reference, drjax.backends.xla):
        assert_close(backend.compile(plan)(X, y), expected(X, y), 5e-5)


def test_a_program_that_calls_itself_in_its_groups():
    @drjax.program(partition_size=2)
    def halve(x, depth=3):
        parts = x.reshape(2, -1)
        if depth == 1:
            return drjax.reduce_sum(drjax.map_fn(jnp.sum, parts))
        return drjax.reduce_sum(drjax.map_fn(lambda a: halve(a, depth - 1), parts))

    for shape in (None, {"partition_size": 2}):
        with in_mesh_of(shape):
            assert float(jax.jit(halve)(jnp.arange(16.0))) == 120.0


@checkerboard(
    9,
    name=MESHES,
    of=["argument", "map", "reduction", "index", "key", "tree"],
)
def test_closures_of_inner_functions_over_an_outer_groups_values(name, of):
    """The innermost function closes over what the outer group computed or got."""

    @drjax.program(clients=4)
    def inner(value, data):
        return drjax.reduce_sum(drjax.map_fn(lambda d: jnp.sum(value * d), data))

    def one(x, data):
        if of == "map":
            x = jnp.cumsum(jnp.sin(x))
        if of == "index":
            x = x * drjax.partition_index()
        if of == "key":
            key = jax.random.fold_in(jax.random.key(0), drjax.partition_index())
            x = x * jax.random.uniform(key, (3,))
        if of == "reduction":
            x = x * inner(x, data)
        if of == "tree":
            tree = {"x": x, "data": data}
            total = drjax.program(clients=4)(
                lambda: drjax.reduce_sum(
                    drjax.map_fn(lambda d: tree["x"] @ d, tree["data"])
                )
            )
            return total()
        return inner(x, data)

    @drjax.program(pods=4)
    def outer(x, data):
        return drjax.reduce_sum(drjax.map_fn(one, (x, data)))

    x = jnp.arange(12.0).reshape(4, 3) / 10
    data = jnp.sin(jnp.arange(48.0)).reshape(4, 4, 3)
    gradient = jax.value_and_grad(outer, (0, 1))
    expected = gradient(x, data)
    with in_mesh_named(name):
        assert_close(jax.jit(gradient)(x, data), expected, 5e-5)
        assert_close(drjax.jit(gradient)(x, data), expected, 5e-5)
        assert_close(outer(x, data), expected[0], 5e-5)
