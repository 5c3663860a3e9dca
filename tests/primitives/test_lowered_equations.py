"""Equations that are merged when they are lowered, and what is known about them.

Covers: drjax._primitives.lowered_equations, drjax._primitives.contract_groups.
"""

import gc
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import drjax
from drjax._primitives import lowered_equations
from tests.helpers.compiled import hlo_text
from tests.helpers.meshes import EXPLICIT, in_mesh_of, make_mesh

N = 16
W, X = jnp.ones((7, 11)), jnp.ones((N, 5, 7))
clients = drjax.program(clients=N)
# The weights of each group of a device, or of all groups.
COPIES = re.compile(r"f32\[(2|16),7,11\]")


@clients
def loss(w, x):
    y = drjax.map_fn(lambda w, x: jnp.sum(jnp.tanh(x @ w)), (drjax.broadcast(w), x))
    return drjax.reduce_mean(y)


@pytest.mark.parametrize("shape", [None, {"clients": 8}], ids=str)
def test_a_gradient_holds_no_copy_for_each_group(shape):
    """The broadcast and the sum of its cotangents are merged into the maps."""
    with in_mesh_of(shape):
        assert not COPIES.search(hlo_text(jax.value_and_grad(loss), W, X))


@clients
def product(w, x):
    y = drjax.map_fn(lambda w, x: x.T @ (x @ w), (drjax.broadcast(w), x))
    return drjax.reduce_sum(y)


def test_a_sum_within_the_map_contracts_the_groups():
    text = jax.jit(product).lower(W, X).as_text()
    assert "contracting_dims = [0, 2] x [0, 1]" in text


@pytest.mark.parametrize("shape", [None, {"clients": 8}], ids=str)
def test_a_sum_in_each_branch_is_right(shape):
    """A value that is defined in one branch may not be used in the other one."""

    @clients
    def f(flag, w, x):
        y = drjax.map_fn(lambda w, x: x.T @ (x @ w), (drjax.broadcast(w), x))
        total = lambda: drjax.reduce_sum(y)
        return jax.lax.cond(flag, total, lambda: total() + drjax.reduce_sum(-y))

    with in_mesh_of(shape):
        run = jax.jit(f)
        assert jnp.array_equal(run(True, W, X), product(W, X))
        assert not run(False, W, X).any()


def test_a_broadcast_over_another_partition_is_not_merged():
    @drjax.program(others=N)
    def f(w, x):
        y = drjax.broadcast(w, partition={"clients": N})
        return drjax.map_fn(lambda w, x: jnp.sum(x @ w), (y, x))

    text = jax.jit(f).lower(W, X).as_text()
    assert "batching_dims = [0] x [0]" in text


def test_what_is_known_of_a_module_is_deleted_with_it():
    run: Any = jax.jit(loss)
    lowered = run.lower(W, X)
    known = len(lowered_equations._by_module)
    assert known > 0
    del lowered
    run.clear_cache()
    gc.collect()
    assert len(lowered_equations._by_module) < known


def test_a_sum_within_the_map_has_the_sharding_of_each_groups_product():
    """The gradients of both uses of w are added in one sharding."""

    @drjax.program(clients=8)
    def penalized(w, x):
        group_loss = lambda w, x: jnp.sum(jnp.sin(x @ w)) + jnp.sum(w**2)
        return drjax.reduce_mean(drjax.map_fn(group_loss, (drjax.broadcast(w), x)))

    w, x = jnp.ones((4, 2)), jnp.linspace(-2, 1, 160).reshape(8, 5, 4)
    expected = jax.grad(penalized)(w, x)
    mesh = make_mesh({"clients": 4, "model": 2}, EXPLICIT)
    with jax.set_mesh(mesh):
        w = jax.device_put(w, jax.NamedSharding(mesh, P("model")))
        x = jax.device_put(x, jax.NamedSharding(mesh, P("clients")))
        result = jax.jit(jax.grad(penalized))(w, x)
    assert jax.typeof(result).sharding == jax.typeof(w).sharding
    np.testing.assert_allclose(result, expected, rtol=1e-5)


# ---------------------------------------------------------------------------------
# What is lowered


def products(fn, *args) -> int:
    return jax.jit(fn).lower(*args).as_text().count("stablehlo.dot_general")


LAYERS = 4


def mean_loss(weights, x, reduce_groups):
    def one(weights, x):
        for w in weights:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    return reduce_groups(one, weights, x)


def by_program(one, weights, x):
    program = drjax.program(clients=8)
    mapped = lambda w, x: drjax.map_fn(one, (drjax.broadcast(w), x))
    return program(lambda w, x: drjax.reduce_mean(mapped(w, x)))(weights, x)


def by_vmap(one, weights, x):
    return jnp.mean(jax.vmap(one, (None, 0))(weights, x))


@pytest.mark.parametrize("devices", [1, 4, 8])
def test_a_gradient_is_lowered_once(devices):
    """The sums take what the map computes; only their last products are both ways."""
    weights, x = [jnp.eye(8)] * LAYERS, jnp.ones((8, 4, 8))
    mine, hand = (
        jax.value_and_grad(lambda w, x, f=f: mean_loss(w, x, f))
        for f in (by_program, by_vmap)
    )
    with in_mesh_of({"clients": devices} if devices > 1 else None):
        assert products(mine, weights, x) <= products(hand, weights, x) + LAYERS


def test_equal_equations_are_traced_once(monkeypatch):
    traced, make_jaxpr = [], jax.make_jaxpr

    def counting(fn, *args, **kwargs):
        traced.append(fn)
        return make_jaxpr(fn, *args, **kwargs)

    @drjax.program(clients=4)
    def moved(xs):
        copies = drjax.broadcast(xs)
        return drjax.reduce_sum(drjax.map_fn(lambda xs: [2 * x for x in xs], copies))

    stage = jax.jit(moved).trace([jnp.ones(5)] * 100)
    monkeypatch.setattr(jax, "make_jaxpr", counting)
    stage.lower()
    assert len(traced) <= 2  # a broadcast and a sum
