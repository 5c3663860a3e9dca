"""One group on a device runs without vmap: kernels that have no batching rule work.

Covers: drjax._primitives.map_fn, drjax._primitives.partition_index.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import drjax
from tests.helpers.meshes import AUTO, EXPLICIT, in_mesh, make_mesh


@jax.custom_batching.custom_vmap
def refuses(x):
    return jnp.sin(x)


@refuses.def_vmap
def _(size, batched, x):
    raise NotImplementedError("the kernel has no batching rule")


@jax.custom_vjp
def kernel(x):
    return refuses(x)


kernel.defvjp(lambda x: (refuses(x), x), lambda x, ct: (ct * refuses(x + np.pi / 2),))


def foreign(x):
    """A kernel of another language, which JAX does not batch by default."""
    return jax.ffi.ffi_call("any_kernel", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


def work(k, m, x):
    """Loops, branches and the group's index around the kernel `k`."""
    step = lambda c, _: (k(c) + 0.1 * drjax.partition_index() * c, None)
    y = lax.scan(step, m * x, None, length=2)[0]
    y = lax.cond(drjax.partition_index() % 2 == 0, k, lambda y: 2 * y, y)
    more = lambda c: (c[0] + 1, k(c[1]) * jnp.cos(1.0 * drjax.partition_index()))
    return lax.while_loop(lambda c: c[0] < 2, more, (0, lax.stop_gradient(y)))[1] + y


def loss(k, n, m, x):
    @drjax.program(clients=n)
    def program(m, x):
        ys = drjax.map_fn(functools.partial(work, k), (drjax.broadcast(m), x))
        return drjax.reduce_mean(ys), drjax.map_fn(jnp.sum, ys)

    mean, sums = program(m, x)
    return jnp.sum(jnp.sin(mean)) + jnp.sum(jnp.cos(sums))


def assert_close(got, expected):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


AXES = {
    "none": (1, None, AUTO),
    "one device": (1, {"clients": 1}, AUTO),
    "auto": (4, {"clients": 4}, AUTO),
    "explicit": (4, {"clients": 4}, EXPLICIT),
    "empty devices": (3, {"clients": 4}, AUTO),
    "auto model": (4, {"clients": 4, "model": 2}, AUTO),
    "explicit model": (4, {"clients": 4, "model": 2}, EXPLICIT),
    "mixed": (4, {"model": 2, "clients": 4}, (AUTO, EXPLICIT)),
}
COMPILERS = {"eager": lambda f: f, "jit": jax.jit, "drjax.jit": drjax.jit}


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("axes", AXES)
def test_values_and_gradients(axes, compiler):
    n, shape, kind = AXES[axes]
    m, x = jnp.float32(1.3), jnp.arange(n * 3, dtype=jnp.float32).reshape(n, 3) / 7
    both = lambda k: jax.value_and_grad(functools.partial(loss, k, n), (0, 1))
    expected = both(jnp.sin)(m, x)
    with in_mesh(None if shape is None else make_mesh(shape, kind)):
        got = COMPILERS[compiler](both(kernel))(m, x)
    assert_close(got, expected)


def test_one_group_at_a_time_where_a_device_has_several():
    n, x = 8, jnp.arange(24.0).reshape(8, 3) / 40
    run = lambda k: functools.partial(loss, k, n, jnp.float32(1.3))
    with in_mesh(make_mesh({"clients": 4})):
        with pytest.raises(NotImplementedError, match="no batching rule"):
            jax.jit(run(kernel))(x)
        got = drjax.jit(jax.grad(run(kernel)), groups_per_step=1)(x)
    assert_close(got, jax.grad(run(jnp.sin))(x))


@pytest.mark.once
@pytest.mark.parametrize("kind", (AUTO, EXPLICIT))
def test_in_two_levels(kind):
    def run(k, x):
        @drjax.program(pods=2, groups=2)
        def program(x):
            scaled = lambda x: k(x) * (drjax.partition_index() + 1)
            each = lambda x: k(x) + drjax.partition_index(over="pods")
            total = drjax.reduce_sum(drjax.map_fn(scaled, x), over="groups")
            return drjax.reduce_sum(drjax.map_fn(each, total, over="pods"), over="pods")

        return jnp.sum(jnp.sin(program(x)))

    x = jnp.arange(12.0).reshape(2, 2, 3) / 10
    expected = jax.value_and_grad(functools.partial(run, jnp.sin))(x)
    with in_mesh(make_mesh({"pods": 2, "groups": 2}, kind)):
        for compiler in COMPILERS.values():
            got = compiler(jax.value_and_grad(functools.partial(run, kernel)))(x)
            assert_close(got, expected)


@pytest.mark.parametrize("check", (True, False))
def test_in_a_shard_map_of_the_user(check):
    program = drjax.program(clients=4)(
        lambda f, x: drjax.map_fn(lambda x: f(x) + drjax.partition_index(), x)
    )
    x = jnp.arange(12.0).reshape(4, 3) / 10

    def run(f, spec, axes, x):
        mapped = functools.partial(program, f)
        on_devices = jax.shard_map(
            mapped, mesh=make_mesh(axes), in_specs=spec, out_specs=P("clients"),
            check_vma=check,
        )  # fmt: skip
        return jax.jit(on_devices)(x)

    one = run(kernel, P("clients"), {"clients": 4}, x)
    np.testing.assert_allclose(one, np.sin(x) + np.arange(4)[:, None], rtol=1e-6)
    # With a collective of the model's own, over another axis of the same shard_map.
    of_sum = lambda x: kernel(lax.psum(x, "model"))
    axes, two = {"clients": 4, "model": 2}, jnp.concatenate([x, x], 1)
    both = run(of_sum, P("clients", "model"), axes, two)
    np.testing.assert_allclose(both, np.sin(2 * x) + np.arange(4)[:, None], rtol=1e-6)


def test_an_inner_program_over_an_equal_partition_has_its_own_index():
    program = drjax.program(clients=1)
    inner = program(
        lambda x: drjax.reduce_sum(
            drjax.map_fn(lambda x: refuses(x) + drjax.partition_index(), x)
        )
    )
    outer = program(
        lambda x: drjax.reduce_sum(
            drjax.map_fn(lambda x: inner(x) + 5 + drjax.partition_index(), x)
        )
    )
    x = jnp.ones((1, 1, 2))
    np.testing.assert_allclose(jax.jit(outer)(x), jnp.sin(x[0, 0]) + 5)


@pytest.mark.parametrize("kind", (AUTO, EXPLICIT))
def test_kernels_of_other_languages_are_lowered_for_one_group(kind):
    program = drjax.program(clients=8)(
        lambda x: drjax.reduce_sum(drjax.map_fn(foreign, x))
    )
    x = jax.ShapeDtypeStruct((8, 4, 5), jnp.float32)
    with in_mesh(make_mesh({"clients": 8}, kind)):
        for compiler in (jax.jit, drjax.jit):
            text = compiler(program).lower(x).as_text()
            (call,) = [line for line in text.splitlines() if "any_kernel" in line]
            assert "(tensor<4x5xf32>) -> tensor<4x5xf32>" in call
