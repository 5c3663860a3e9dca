"""`drjax.shard`: host data over the mesh axes of a partition.

Covers: drjax._api.blocks.
"""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import drjax
from drjax._sharding.layout import _log_copies
from tests.helpers.meshes import AUTO, EXPLICIT, in_mesh, make_mesh


def tree_for(n: int):
    rng = np.random.default_rng(n)
    return {
        "x": rng.normal(size=(n, 3)).astype(np.float32),
        "label": np.arange(n),
        "device": jnp.ones((n, 2, 2)),
        "none": None,
    }


def assert_same(result, tree):
    jax.tree.map(np.testing.assert_array_equal, result, jax.tree.map(jnp.asarray, tree))


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=str)
@pytest.mark.parametrize("n", [8, 16])
def test_slices_are_divided(n, kind):
    mesh = make_mesh({"clients": 8}, kind)
    result = drjax.shard(tree_for(n), mesh, partition={"clients": n})
    assert_same(result, tree_for(n))
    for leaf in jax.tree.leaves(result):
        assert leaf.sharding.shard_shape(leaf.shape)[0] == n // 8


@pytest.mark.parametrize("n", [10, 3])
def test_sizes_that_do_not_divide_are_replicated(n):
    mesh = make_mesh({"clients": 8})
    result = drjax.shard(tree_for(n), mesh, partition={"clients": n})
    assert_same(result, tree_for(n))
    assert all(x.sharding.is_fully_replicated for x in jax.tree.leaves(result))

    @drjax.program(clients=n)
    def f(tree):
        return drjax.reduce_sum(drjax.map_fn(lambda t: t["x"], tree))

    with in_mesh(mesh):
        y = jax.jit(f)(result)
    np.testing.assert_allclose(y, tree_for(n)["x"].sum(0), rtol=1e-5, atol=1e-6)


def test_copies_are_logged_once(caplog):
    """Each device stores the slices of all 10 clients: it should not be a surprise."""
    mesh = make_mesh({"members": 8})
    _log_copies.cache_clear()
    with caplog.at_level(logging.WARNING, "drjax"):
        for n in (8, 10, 10, 16):
            drjax.shard(np.zeros((n, 3)), mesh, partition={"members": n})
    (message,) = caplog.messages
    assert message.startswith(
        "drjax.shard: 8 devices do not divide the groups of members:10, and"
    )


def test_mesh_in_context_and_without():
    assert_same(drjax.shard(tree_for(8), partition={"clients": 8}), tree_for(8))
    mesh = make_mesh({"clients": 4, "model": 2})
    with in_mesh(mesh):
        result = drjax.shard(np.ones((8, 3)), partition={"clients": 8})
    assert result.sharding == jax.NamedSharding(mesh, P("clients"))
    with in_mesh(make_mesh({"data": 8})):
        assert_same(drjax.shard(tree_for(8), partition={"clients": 8}), tree_for(8))


def test_several_axes():
    mesh = make_mesh({"dcn": 4, "ici": 2})
    partition = drjax.Partition("clients", 16, mesh_axes=("ici", "dcn"))
    result = drjax.shard(np.arange(16), mesh, partition=partition)
    assert result.tolist() == list(range(16))
    assert result.sharding == jax.NamedSharding(mesh, P(("ici", "dcn")))


def test_partition_of_a_program_and_its_mesh():
    mesh = make_mesh({"clients": 8})

    @drjax.program(clients=8, mesh=mesh)
    def f(x):
        return drjax.reduce_sum(drjax.shard(x))

    assert f(np.arange(8)) == jax.jit(f)(jnp.arange(8)) == 28
    with in_mesh(mesh):
        result = drjax.shard(np.arange(8), partition=f)
    assert result.sharding.spec == P("clients")


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=str)
def test_inside_a_jitted_program(kind):
    @drjax.program(clients=16)
    def f(x):
        return drjax.map_fn(jnp.sin, drjax.shard(x))

    with in_mesh(make_mesh({"clients": 8}, kind)):
        y = jax.jit(f)(jnp.arange(16.0))
        dy = jax.jit(jax.grad(lambda x: f(x).sum()))(jnp.arange(16.0))
    assert y.sharding.shard_shape(y.shape) == (2,)
    np.testing.assert_allclose(y, np.sin(np.arange(16.0)), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(dy, np.cos(np.arange(16.0)), rtol=1e-5, atol=1e-6)


@pytest.mark.sampled
@pytest.mark.parametrize("n", [8, 10])
def test_typed_keys(n):
    mesh = make_mesh({"clients": 8})
    keys = jax.random.split(jax.random.key(0), n)
    result = drjax.shard(keys, mesh, partition={"clients": n})
    assert (jax.random.key_data(result) == jax.random.key_data(keys)).all()

    @drjax.program(clients=n)
    def f(keys):
        draws = drjax.map_fn(jax.random.normal, keys)
        return drjax.reduce_sum(draws), drjax.select(keys, 2), drjax.gather(keys)

    expected = f(keys)
    with in_mesh(mesh):
        total, key, slices = jax.jit(f)(result)
    np.testing.assert_allclose(total, expected[0], rtol=1e-5)
    assert (jax.random.key_data(key) == jax.random.key_data(expected[1])).all()
    assert (jax.random.key_data(slices) == jax.random.key_data(keys)).all()


def test_wrong_leading_axis():
    with pytest.raises(drjax.DrjaxValueError, match=r"tree\['x'\]: shape \(7, 2\)"):
        drjax.shard({"x": np.ones((7, 2))}, partition={"clients": 8})
