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


@pytest.mark.usefixtures("leaks_unchecked")
@checkerboard(4, sizes=[(4, 8), (2, 4)], name=MESHES)
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
