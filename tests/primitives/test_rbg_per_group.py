"""What a group draws depends on its key only: with every kind of key, everywhere.

Covers: drjax._primitives.rbg_per_group.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import drjax
from drjax._primitives.rbg_per_group import rewrite_draws
from tests.helpers.cases import checkerboard
from tests.helpers.meshes import AUTO, in_mesh, make_mesh

N = 6
clients = drjax.program(clients=N)


def numbers(key):
    return jax.random.normal(key, (3,))


def in_loops(key):
    def step(total, key):
        again = jax.lax.fori_loop(0, 2, lambda i, t: t + numbers(key)[i], total)
        return again, jax.lax.cond(again > 0, numbers, lambda k: 2 * numbers(k), key)

    return jax.lax.scan(step, jnp.float32(0), jax.random.split(key, 3))[1]


def in_a_vmap(key):
    return jax.vmap(numbers)(jax.random.split(key, 2))


def old_keys(key):
    raw = jax.random.key_data(key)
    if raw.shape == (4,):
        bits = jax.lax.rng_bit_generator(raw, (2,))[1]
        return bits.astype(jnp.float32)
    return numbers(key)


def derivative(key):
    return jax.grad(lambda x: jnp.sum(jnp.sin(x * numbers(key))))(1.0)


DRAWS = (
    numbers, in_loops, in_a_vmap, old_keys, derivative,
    lambda key: jax.random.gamma(key, 2.0), lambda key: jax.random.permutation(key, 5),
    jax.jit(lambda key: jax.random.bernoulli(key, 0.4, (4,)).astype(jnp.float32)),
)  # fmt: skip
MESHES = {
    "two": lambda: make_mesh({"clients": 2}),
    "uneven": lambda: make_mesh({"clients": 4}),
    "model": lambda: make_mesh({"clients": 3, "model": 2}, AUTO),
}


def program_of(draw):
    def one(key):
        return draw(jax.random.fold_in(key, drjax.partition_index()))

    return clients(lambda key: drjax.gather(drjax.map_fn(one, drjax.broadcast(key))))


@functools.cache
def alone(draw, impl):
    """What each group draws, one at a time and without any batch."""
    key = jax.random.key(5, impl=impl)
    run = jax.jit(lambda key, i: draw(jax.random.fold_in(key, i)))
    return np.stack([run(key, i) for i in range(N)])


@pytest.mark.sampled
@checkerboard(7, draw=DRAWS, impl=["rbg", "unsafe_rbg"])
def test_bits_depend_on_the_key_of_the_group_only(draw, impl):
    f, key = program_of(draw), jax.random.key(5, impl=impl)
    expected = alone(draw, impl)
    np.testing.assert_allclose(jax.jit(f)(key), expected, rtol=1e-6)
    result = drjax.jit(f, groups_per_step=4)(key)
    np.testing.assert_allclose(result, expected, rtol=1e-6)


@checkerboard(5, mesh=[None, *MESHES], impl=["threefry2x32", "rbg", "unsafe_rbg"])
def test_bits_do_not_depend_on_devices(mesh, impl):
    f, key = program_of(numbers), jax.random.key(5, impl=impl)
    expected = alone(numbers, impl)
    same = lambda result: np.testing.assert_allclose(result, expected, rtol=1e-6)
    with in_mesh(mesh and MESHES[mesh]()):
        same(jax.jit(f)(key))
        same(drjax.jit(f, groups_per_step=1)(key))
    if mesh is None:
        same(f(key))
        same(drjax.backends.reference.compile(drjax.make_plan(f)(key))(key))


def test_what_draws_is_changed_and_nothing_else():
    def of(impl):
        return jax.make_jaxpr(in_loops)(jax.random.key(0, impl=impl))

    jaxpr = of("threefry2x32")
    assert rewrite_draws(jaxpr) is jaxpr
    text = str(rewrite_draws(of("rbg")))
    assert text.count("drjax_draw_per_key") > 1
    assert "random_split" in text and " random_bits[" not in text
    assert str(rewrite_draws(of("unsafe_rbg"))).count("random_split[") == 0


def test_sums_within_the_map_draw_once():
    """A gradient whose sum could be made within the map, were there no loop."""

    @clients
    def f(w, key, x):
        def one(w, key, x):
            noise = jax.random.normal(jax.random.fold_in(key, 1), x.shape)
            return jnp.sum(jnp.tanh((x + noise) @ w))

        return drjax.reduce_mean(drjax.map_fn(one, (*drjax.broadcast((w, key)), x)))

    args = jnp.ones((3, 2)), jax.random.key(1, impl="rbg"), jnp.ones((N, 4, 3))
    for run in (jax.jit, drjax.jit):
        step = run(jax.grad(f))
        assert step.lower(*args).as_text().count("rng_bit_generator") == 1
