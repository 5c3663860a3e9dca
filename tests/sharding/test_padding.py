"""Sizes that devices do not divide: padding decides no control flow and no effect.

Covers: drjax._sharding.padding.
"""

import itertools

import jax
import jax.numpy as jnp
import lineax
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback

import drjax
from tests.helpers.cases import checkerboard
from tests.helpers.meshes import make_mesh

# n groups on so many devices: some devices with fewer, one without any, most without.
SIZES = [(6, 4), (7, 4), (3, 8), (10, 4), (1, 2)]
RUNS = {
    "eager": lambda f: f,
    "jax.jit": jax.jit,
    "drjax.jit": drjax.jit,
    "one at a time": lambda f: drjax.jit(f, groups_per_step=1),
    "two at a time": lambda f: drjax.jit(f, groups_per_step=2),
}
every_size = pytest.mark.parametrize("n, devices", SIZES)
every_second_size = checkerboard(size=SIZES)
sizes_and_runs = checkerboard(4, size=SIZES, run=RUNS)


def slices(n):
    return jnp.arange(1.0, n + 1)


def meshes(devices, model=False):
    return make_mesh({"clients": devices} | ({"model": 2} if model else {}))


def _endless_for_zero(x):
    """A loop that ends for every positive number, and never for zero."""
    more = lambda c: c[0] < 100.0
    return lax.while_loop(more, lambda c: (c[0] * 1.7, c[1] + 1), (x, jnp.int32(0)))[1]


@pytest.mark.sampled
@sizes_and_runs
def test_loops_end(run, size):
    n, devices = size

    @drjax.program(clients=n)
    def steps(x):
        result = drjax.map_fn(_endless_for_zero, x)
        return drjax.reduce_sum(result), drjax.reduce_max(result), drjax.gather(result)

    expected = steps(slices(n))
    with jax.set_mesh(meshes(devices)):
        result = RUNS[run](steps)(slices(n))
    jax.tree.map(np.testing.assert_array_equal, result, expected)


@pytest.mark.parametrize("run", ["jax.jit", "one at a time"])
def test_loops_end_with_a_model_axis(run):
    steps = drjax.program(clients=3)(
        lambda x: drjax.reduce_sum(drjax.map_fn(_endless_for_zero, x))
    )
    with jax.set_mesh(meshes(4, model=True)):
        assert RUNS[run](steps)(slices(3)) == steps(slices(3))


@pytest.mark.sampled
@pytest.mark.parametrize("run", ["jax.jit", "one at a time"])
@pytest.mark.parametrize("n", [3, 5])
def test_loops_end_where_the_compiler_partitions_the_groups(run, n):
    """With look-ups on a mesh with two other axes; see `map_fn.py`."""
    mesh = make_mesh({"clients": 2, "fsdp": 2, "tensor": 2})
    table = slices(12).reshape(4, 3)

    def work(x, i):
        return _endless_for_zero(x) + table[i].sum() + drjax.partition_index()

    @drjax.program(clients=n)
    def f(x):
        return drjax.reduce_mean(drjax.map_fn(work, (x, drjax.partition_index() % 4)))

    expected = f(slices(n))
    with jax.set_mesh(mesh):
        np.testing.assert_allclose(RUNS[run](f)(slices(n)), expected, rtol=1e-6)


@sizes_and_runs
def test_loops_over_the_index_end(run, size):
    """Padded slots have the index of a group, not one that is n or more."""
    n, devices = size

    @drjax.program(clients=n)
    def f(x):
        def work(x):
            i = drjax.partition_index()
            last = jnp.where(i < n, i, jnp.int32(2**30))
            return lax.while_loop(lambda j: j < last, lambda j: j + 1, 0) * x

        return drjax.reduce_sum(drjax.map_fn(work, x))

    with jax.set_mesh(meshes(devices)):
        result = RUNS[run](f)(slices(n))
    assert result == sum(i * (i + 1) for i in range(n))


@pytest.mark.parametrize("run", ["jax.jit", "one at a time"])
def test_padding_has_the_index_and_the_slice_of_the_first_group(run):
    """A pure function is also called for padding: here, after groups 3 and 4."""
    seen = []

    def record(i, x):
        seen.append((int(i), float(x)))
        return x

    @drjax.program(clients=5)
    def f(x):
        work = lambda x: jax.pure_callback(
            record, x, drjax.partition_index(), x, vmap_method="sequential"
        )
        return drjax.reduce_sum(drjax.map_fn(work, x))

    with jax.set_mesh(meshes(2)):
        assert RUNS[run](f)(slices(5)) == 15
    assert sorted(seen) == [(i, i + 1) for i in (0, 1, 2, 3, 3, 4)]


@pytest.mark.sampled
@sizes_and_runs
def test_effects_happen_for_groups_only(run, size):
    n, devices = size
    calls = []

    @drjax.program(clients=n)
    def f(x):
        def work(x):
            record = lambda i, x: calls.append((int(i), float(x)))
            io_callback(record, None, drjax.partition_index(), x)
            return 2 * x

        return drjax.reduce_sum(drjax.map_fn(work, x))

    with jax.set_mesh(meshes(devices)):
        total = RUNS[run](f)(slices(n))
        jax.effects_barrier()
    assert total == n * (n + 1)
    assert sorted(calls) == [(i, i + 1.0) for i in range(n)]


@sizes_and_runs
def test_checks_that_hold_for_every_group_hold(run, size):
    """As libraries write them: a callback that raises, for instance for a zero."""
    n, devices = size

    @drjax.program(clients=n)
    def f(x):
        def work(x):
            def refuse(x):
                assert x > 0, "zero"

            lax.cond(x > 0, lambda: None, lambda: jax.debug.callback(refuse, x))
            return 1 / x

        return drjax.reduce_mean(drjax.map_fn(work, x))

    with jax.set_mesh(meshes(devices)):
        result = RUNS[run](f)(slices(n))
        jax.effects_barrier()
    np.testing.assert_allclose(result, np.mean(1 / np.arange(1, n + 1)), rtol=1e-6)


@pytest.mark.sampled
@every_second_size
def test_gradients(size):
    n, devices = size

    @drjax.program(clients=n)
    def loss(w, x):
        fit = lambda w, x: jnp.sqrt(x) * jnp.log(x * w) / x
        return drjax.reduce_mean(drjax.map_fn(fit, (drjax.broadcast(w), x)))

    both = jax.value_and_grad(loss, (0, 1))
    expected = both(2.0, slices(n))
    with jax.set_mesh(meshes(devices)):
        for run in RUNS.values():
            result = run(both)(2.0, slices(n))
            close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5)
            jax.tree.map(close, result, expected)


def sizes_with_and_without_effects():
    """Every second size, with or without effects; all where it is slow."""
    for (i, size), effects in itertools.product(enumerate(SIZES), (False, True)):
        marks = () if i % 2 == 0 and effects == (i > 0) else pytest.mark.slow
        yield pytest.param(*size, effects, marks=marks)


@pytest.mark.sampled
@pytest.mark.parametrize("n, devices, effects", [*sizes_with_and_without_effects()])
def test_keys(n, devices, effects):
    def work(key):
        if effects:
            jax.debug.callback(lambda: None)
        return jax.random.split(key), jax.random.normal(key)

    f = drjax.program(clients=n)(lambda keys: drjax.gather(drjax.map_fn(work, keys)))
    keys = jax.random.split(jax.random.key(0), n)
    expected_keys, expected = f(keys)
    with jax.set_mesh(meshes(devices)):
        for run in RUNS.values():
            new_keys, result = run(f)(keys)
            assert (new_keys == expected_keys).all()
            np.testing.assert_array_equal(result, expected)


@pytest.mark.sampled
@pytest.mark.parametrize("k", [1, 3, 4])
def test_bits_in_chunks(k):
    """Functions of bits may differ in the last one, as XLA compiles them otherwise."""

    @drjax.program(clients=6)
    def f(key):
        def draw(key):
            key = jax.random.fold_in(key, drjax.partition_index())
            exact = {
                "key": jax.random.key_data(key),
                "bits": jax.random.bits(key, (5,)),
                "uniform": jax.random.uniform(key, (5,)),
                "permutation": jax.random.permutation(key, 6),
            }
            return exact, jax.random.normal(key, (5,))

        return drjax.map_fn(draw, drjax.broadcast(key))

    key = jax.random.key(5)
    exact, normal = jax.jit(f)(key)
    in_chunks, close = drjax.jit(f, groups_per_step=k)(key)
    jax.tree.map(np.testing.assert_array_equal, in_chunks, exact)
    np.testing.assert_allclose(close, normal, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("n", [6, 10])
def test_no_collective_more_than_for_even_sizes(n):
    def report(n):
        loss = drjax.program(clients=n)(
            lambda w, x: drjax.reduce_mean(
                drjax.map_fn(lambda w, x: jnp.sin(w * x), (drjax.broadcast(w), x))
            )
        )
        return drjax.collectives(jax.value_and_grad(loss))(2.0, slices(n))

    with jax.set_mesh(meshes(4)):
        assert report(n).counts == report(8).counts == {"all-reduce": 1}


@pytest.mark.sampled
@pytest.mark.usefixtures("leaks_unchecked")
@pytest.mark.parametrize("n", [6, 8])
@pytest.mark.parametrize("run", ["jax.jit", "drjax.jit"])
def test_solvers_that_check_for_singular_matrices(run, n):
    """lineax raises for a padded zero matrix, and compares types when it is lowered."""

    @drjax.program(clients=n)
    def f(matrices):
        def solve(a):
            return lineax.linear_solve(
                lineax.MatrixLinearOperator(a), jnp.ones(2)
            ).value

        return jnp.sum(drjax.reduce_mean(drjax.map_fn(solve, matrices)))

    matrices = np.random.RandomState(0).rand(n, 2, 2).astype(np.float32) + 2 * np.eye(2)
    matrices = jnp.asarray(matrices, jnp.float32)
    solutions = np.linalg.solve(matrices, np.ones((n, 2, 1), np.float32))
    with jax.set_mesh(meshes(4)):
        value, grad = RUNS[run](jax.value_and_grad(f))(matrices)
    np.testing.assert_allclose(value, solutions.mean(0).sum(), rtol=1e-5)
    inverses = np.linalg.inv(np.swapaxes(matrices, 1, 2))
    cotangents = -(inverses @ np.ones((2, 1))) @ np.swapaxes(solutions, 1, 2) / n
    np.testing.assert_allclose(grad, cotangents, rtol=1e-4, atol=1e-6)
