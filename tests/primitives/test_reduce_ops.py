"""Running sums over chunks of groups: their digits, and the memory that they take.

Covers: drjax._primitives.reduce_ops, drjax._primitives.contract_groups.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import drjax
from drjax._primitives import reduce_ops
from tests.helpers.compiled import temp_bytes
from tests.helpers.meshes import in_mesh_of

pytestmark = pytest.mark.usefixtures("leaks_unchecked")
MANY = 10**6


def mean_over(n):
    return drjax.program(clients=n)(
        lambda x: drjax.reduce_mean(drjax.map_fn(lambda x: x * jnp.ones(2), x))
    )


@pytest.mark.sampled
@pytest.mark.parametrize("mesh", [None, {"clients": 4}])
@pytest.mark.parametrize("step", [1, 7, 999])
def test_a_mean_of_a_million_groups_has_all_digits(mesh, step):
    slices = np.random.default_rng(0).random(MANY, np.float32)
    for x in (slices, np.full(MANY, 0.1, np.float32)):
        with in_mesh_of(mesh):
            result = drjax.jit(mean_over(MANY), groups_per_step=step)(x)
            expected = jax.jit(mean_over(MANY))(x)
        exact = np.mean(x, dtype=np.float64)
        # The compiler adds up the 999 of a chunk, in one loop.
        np.testing.assert_allclose(result, exact, rtol=1.2e-7 if step < 10 else 4e-7)
        np.testing.assert_allclose(expected, exact, rtol=1.2e-7)


def test_large_sums_have_all_digits_from_many_steps_on():
    many = reduce_ops.MANY_STEPS
    wide = reduce_ops.FEW_NUMBERS + 1
    errors = []
    for n in (many, many + 1):
        f = drjax.program(clients=n)(
            lambda w: drjax.reduce_mean(drjax.map_fn(jnp.sin, drjax.broadcast(w)))
        )
        w = np.full(wide, 0.1, np.float32)
        result = drjax.jit(f, groups_per_step=1)(w)
        errors.append(np.max(np.abs(result / np.float64(np.sin(w)) - 1)))
    assert errors[1] < 1.2e-7 < errors[0] < 1e-4  # as the docs say


def test_counts_are_exact_beyond_the_integers_of_float32():
    n = 2**24 + 8
    count = drjax.program(clients=n)(
        lambda w: drjax.reduce_sum(drjax.map_fn(lambda w: w, drjax.broadcast(w)))
    )
    assert drjax.jit(count, groups_per_step=1)(jnp.float32(1)) == n
    assert drjax.jit(count, groups_per_step=3)(jnp.float32(1)) == n


def test_the_host_adds_float32_in_float64():
    slices = np.array([2**24 - 1, 2, -2, 1 - 2**24, 3], np.float32)
    plan = drjax.make_plan(drjax.program(clients=5)(drjax.reduce_sum))(slices)
    result = np.asarray(drjax.backends.reference.compile(plan)(slices))
    assert result == 3 and result.dtype == np.float32


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.complex64])
def test_infinite_sums_are_those_of_jax(dtype):
    n, largest = 6, np.finfo(dtype).max
    total = drjax.program(clients=n)(drjax.reduce_sum)
    slices = np.ones((n, 6), dtype)
    slices[1, 0] = slices[4, 0] = np.inf
    slices[2, 1], slices[3, 1] = np.inf, -np.inf
    slices[0, 2] = np.nan
    slices[2, 3] = slices[3, 3] = largest
    slices[5, 4] = -np.inf
    result = drjax.jit(total, groups_per_step=1)(slices)
    np.testing.assert_array_equal(result, jax.jit(total)(slices))


def indexed(w, x):
    return jnp.sin(w * x) * (1 + drjax.partition_index())


@pytest.mark.sampled
@pytest.mark.parametrize("transform", [lambda f: f, jax.value_and_grad])
@pytest.mark.parametrize("mesh", [None, {"clients": 4}])
@pytest.mark.parametrize("step", [1, 10])
def test_memory_does_not_grow_with_n(mesh, step, transform):
    def of(n):
        @drjax.program(clients=n)
        def f(w, x):
            return drjax.reduce_mean(drjax.map_fn(indexed, (drjax.broadcast(w), x)))

        return drjax.jit(transform(f), groups_per_step=step)

    with in_mesh_of(mesh):
        few, many = (
            temp_bytes(of(n), jnp.float32(2), drjax.shard(
                np.ones(n, np.float32), partition={"clients": n}
            ))
            for n in (10_000, 1_000_000)
        )  # fmt: skip
    assert many == few
