"""Programs of different sizes never mix, nothing is stale, nothing is traced twice.

Covers: drjax._context, drjax._partition, drjax._primitives.dispatch_cache.
"""

import concurrent.futures
import threading
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import drjax
from tests.helpers.cases import checkerboard
from tests.helpers.compiled import compilations
from tests.helpers.meshes import in_mesh, in_mesh_of, make_mesh

eight = drjax.program(clients=8)
X8 = np.arange(8, dtype=np.float32)


# ---------------------------------------------------------------------------------
# Sizes never mix


@jax.jit
def shared_jit(x):
    return drjax.broadcast(x)


@jax.checkpoint
def shared_checkpoint(x):
    return drjax.broadcast(jnp.sin(x))


def scan_body(carry, _):
    return carry + drjax.reduce_sum(drjax.broadcast(jnp.float32(1))), None


def shared_scan(x):
    return lax.scan(scan_body, x, length=2)[0]


shared_grad = jax.grad(lambda x: drjax.reduce_sum(drjax.broadcast(x)))
shared_branch = lambda x: drjax.broadcast(x)

HELPERS = {
    "jit": (shared_jit, lambda n: np.full(n, 2.0)),
    "checkpoint": (shared_checkpoint, lambda n: np.full(n, np.sin(2.0))),
    "scan": (shared_scan, lambda n: np.float32(2 + 2 * n)),
    "grad": (shared_grad, lambda n: np.float32(n)),
    "cond": (
        lambda x: lax.cond(x > 0, shared_branch, shared_branch, x),
        lambda n: np.full(n, 2.0),
    ),
    "vmap": (jax.vmap(shared_jit, axis_size=1), lambda n: np.full((1, n), 2.0)),
}


@pytest.mark.sampled
@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("helper", HELPERS)
def test_helpers_shared_by_programs_of_different_sizes(helper, jitted):
    fn, expected = HELPERS[helper]
    x = jnp.array([2.0], jnp.float32) if helper == "vmap" else jnp.float32(2.0)
    for name, n in [("a", 3), ("a", 5), ("b", 5), ("a", 3), ("b", 4), ("a", 5)]:
        program = drjax.program(placements={name: n})(fn)
        np.testing.assert_allclose(
            (jax.jit(program) if jitted else program)(x), expected(n), rtol=1e-6
        )


def test_helpers_shared_by_different_meshes():
    program = eight(lambda x: drjax.map_fn(jnp.square, shared_jit(x)))
    for shape in ({"clients": 8}, None, {"clients": 2}, {"data": 4}, {"clients": 8}):
        mesh = None if shape is None else make_mesh(shape)
        with in_mesh(mesh):
            y = jax.jit(program)(jnp.float32(3))
        np.testing.assert_array_equal(y, np.full(8, 9.0))
        assert y.sharding.num_devices == (mesh.devices.size if mesh else 1)


def test_a_jitted_helper_inside_a_mapped_function_sees_its_own_group():
    number = jax.jit(lambda a: a * 0 + drjax.partition_index())
    for n in (3, 5, 3):
        program = drjax.program(clients=n)(lambda x: drjax.map_fn(number, x))
        np.testing.assert_array_equal(program(np.ones(n)), np.arange(n))


def test_partition_size_in_a_shared_helper():
    helper = jax.jit(lambda x: x * drjax.partition_size())
    for n in (3, 5, 3):
        assert drjax.program(clients=n)(helper)(1) == n
        inside = drjax.program(clients=n)(lambda x: drjax.map_fn(helper, x))
        np.testing.assert_array_equal(inside(np.ones(n)), np.full(n, n))
    with pytest.raises(drjax.ScopeError):
        helper(1)


def test_threads_of_different_sizes():
    barrier = threading.Barrier(6)

    def work(n):
        barrier.wait(timeout=60)
        values = []
        for _ in range(5):
            program = drjax.program(clients=n)(
                lambda x: drjax.reduce_sum(drjax.map_fn(jnp.square, shared_jit(x)))
            )
            values += [float(program(jnp.float32(2))), float(jax.jit(program)(2.0))]
            values.append(float(jax.grad(program)(2.0)))
        return values

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        sizes = range(2, 8)
        for n, values in zip(sizes, pool.map(work, sizes), strict=True):
            assert values == [4.0 * n, 4.0 * n, 4.0 * n] * 5


def test_a_thread_started_by_a_program_is_outside_of_it():
    @eight
    def program():
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            with pytest.raises(drjax.ScopeError, match="outside a program"):
                pool.submit(drjax.partition_size).result()
        return drjax.partition_size()

    assert program() == 8


# ---------------------------------------------------------------------------------
# Nothing is stale


LEARNING_RATE = 2.0
SETTINGS = types.SimpleNamespace(rate=2.0)
MODULE: Any = types.ModuleType("settings")
TABLE = {"rate": 2.0}


class Config:
    rate = 2.0


def test_values_that_change_between_eager_calls():
    global LEARNING_RATE
    number, array, method = 2.0, np.float32(2.0), TABLE.get
    helper = lambda a: a * number  # closes over a cell that changes

    def scaled(a, rate=SETTINGS):
        return a * rate.rate

    program = eight(
        lambda x: [
            drjax.map_fn(lambda a: a * number, x),
            drjax.map_fn(lambda a: a * array, x),
            drjax.map_fn(lambda a: helper(a), x),
            drjax.map_fn(lambda a: a * LEARNING_RATE, x),
            drjax.map_fn(lambda a: a * Config.rate, x),
            drjax.map_fn(lambda a: a * MODULE.rate, x),
            drjax.map_fn(lambda a: a * method("rate"), x),
            drjax.map_fn(scaled, x),
        ]
    )
    for value in (2.0, 3.0, -0.0, 0.0, 2.0, 2, True):
        number, array, LEARNING_RATE = value, np.float32(value), value
        Config.rate = MODULE.rate = TABLE["rate"] = SETTINGS.rate = value
        for y in program(X8):
            np.testing.assert_array_equal(y, X8 * value)
            np.testing.assert_array_equal(np.signbit(y), np.signbit(X8 * value))


def test_dtypes_and_structures_that_change_between_eager_calls():
    program = eight(lambda x: drjax.map_fn(lambda t: jax.tree.map(lambda a: a, t), x))
    for x in ([X8], [X8.astype(int)], {"a": X8}, [X8, None], [X8, X8 > 1]):
        y = program(x)
        assert jax.tree.structure(y) == jax.tree.structure(x)
        assert jax.tree.map(lambda a: a.dtype, y) == jax.tree.map(
            lambda a: jnp.asarray(a).dtype, x
        )


def test_configurations_that_change_between_eager_calls():
    program = eight(lambda x: drjax.map_fn(lambda a: a @ a, x))
    x = np.ones((8, 4, 4), np.float32)
    for precision in ("highest", "default", None):
        with jax.default_matmul_precision(precision):
            lowered = jax.make_jaxpr(program)(x)
            assert ("HIGHEST" in str(lowered)) == (precision == "highest")
            np.testing.assert_array_equal(program(x), np.full_like(x, 4))


# ---------------------------------------------------------------------------------
# Nothing is traced or compiled twice


W = jnp.float32(3.0)


def make_programs():
    """Programs whose mapped functions are new at each call of the program."""
    return {
        "lambda": eight(lambda x: drjax.map_fn(lambda a: a * 2, x)),
        "closure over a number": eight(lambda x, k=2: drjax.map_fn(lambda a: a * k, x)),
        "closure over an array": eight(lambda x: drjax.map_fn(lambda a: a * W, x)),
        "custom_jvp": eight(lambda x: drjax.map_fn(lambda a: jax.nn.silu(a * W), x)),
        "scan and cond": eight(
            lambda x: drjax.map_fn(
                lambda a: lax.fori_loop(
                    0, 2, lambda i, c: lax.cond(c > 1, jnp.sin, jnp.cos, c), a
                ),
                x,
            )
        ),
        "gradient inside": eight(
            lambda x: drjax.map_fn(jax.grad(lambda a: jnp.sin(a) * a), x)
        ),
        "random": eight(
            lambda x: drjax.map_fn(
                lambda a: a + jax.random.normal(jax.random.key(0), ()), x
            )
        ),
        "every block": eight(
            lambda x: drjax.map_fn(
                lambda a, *b: a + sum(b),
                (
                    x, drjax.broadcast(drjax.reduce_sum(x)),
                    drjax.broadcast(drjax.reduce_weighted_mean(x, x)),
                    drjax.broadcast(drjax.reduce_max(x, )),
                    drjax.broadcast(drjax.select(x, 2)),
                    drjax.scatter(drjax.gather(x)),
                    drjax.broadcast(drjax.reduce_mean(x, where=x > 1)),
                ),
            )
        ),
    }  # fmt: skip


@checkerboard(9, name=make_programs(), mesh=[None, {"clients": 2}])
def test_a_second_eager_call_compiles_nothing(name, mesh):
    x = jnp.asarray(X8)
    with in_mesh_of(mesh), jax.check_tracer_leaks(False):
        first = make_programs()[name]
        first(x)
        # The same function, and another one made by the same code.
        for program in (first, make_programs()[name]):
            with compilations() as compiled:
                program(x)
            assert compiled == []
        total = lambda x: first(x).sum()
        jax.grad(total)(x)
        with compilations() as compiled:
            jax.grad(total)(x)
        assert compiled == []


def test_different_programs_compile_differently():
    results = []
    for k in (17, 18, 17):
        program = eight(lambda x, k=k: drjax.map_fn(lambda a: a * k, x))
        with compilations() as compiled, jax.check_tracer_leaks(False):
            results.append(program(jnp.asarray(X8)))
        assert bool(compiled) == (len(results) < 3)
    np.testing.assert_array_equal(results, [17 * X8, 18 * X8, 17 * X8])


def test_a_jitted_program_is_traced_once():
    traced = []

    @jax.jit
    @eight
    def program(x):
        traced.append("program")

        def local(a):
            traced.append("group")
            return a * 2

        return drjax.reduce_sum(drjax.map_fn(local, x))

    for _ in range(3):
        program(X8)
    assert traced == ["program", "group"]
    jax.jit(jax.grad(program))(X8)
    assert traced == ["program", "group"]  # differentiation does not trace again


def test_a_map_is_traced_once_for_all_its_groups():
    traced = []
    eight(lambda x: drjax.map_fn(lambda a: traced.append(0), x))(X8)
    assert len(traced) == 1


# ---------------------------------------------------------------------------------
# Programs inside JAX's transformations


@eight
def total(x, w):
    return drjax.reduce_sum(drjax.map_fn(lambda a: jnp.sin(a) * w, x))


def expected_total(x, w):
    return (np.sin(x) * w).sum(0)


MESHES = [None, {"clients": 4}]


@pytest.mark.parametrize("mesh", MESHES)
def test_vmap_over_a_program(mesh):
    xs = np.stack([X8, 2 * X8, 3 * X8])
    with in_mesh_of(mesh):
        for axis in (0, 1):
            batch = np.moveaxis(xs, 0, axis)
            y = jax.jit(jax.vmap(total, (axis, None)))(batch, 2.0)
            np.testing.assert_allclose(y, expected_total(xs.T, 2.0), rtol=1e-5)
        y = jax.vmap(total, (None, 0))(X8, np.array([1, 2], np.float32))
    np.testing.assert_allclose(y, expected_total(X8, 1.0) * np.array([1, 2]), rtol=1e-5)


@pytest.mark.sampled
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("jitted", [False, True])
def test_loops_and_branches_over_a_program(mesh, jitted):
    maybe_jit = jax.jit if jitted else lambda f: f
    step = lambda c, _: (total(jnp.asarray(X8), c), None)
    one = float(expected_total(X8, 1.0))
    with in_mesh_of(mesh):
        scanned = maybe_jit(lambda w: lax.scan(step, w, length=3)[0])(1.0)
        np.testing.assert_allclose(scanned, one**3, rtol=1e-4)
        grad = maybe_jit(jax.grad(lambda w: lax.scan(step, w, length=3)[0]))(1.0)
        np.testing.assert_allclose(grad, one**3, rtol=1e-4)
        looped = maybe_jit(
            lambda w: lax.while_loop(
                lambda c: c[0] < 2, lambda c: (c[0] + 1, total(X8, c[1])), (0, w)
            )[1]
        )(1.0)
        np.testing.assert_allclose(looped, one**2, rtol=1e-4)
        for chosen, expected in ((0, one), (1, one * 2)):
            branches = [lambda w: total(X8, w), lambda w: total(X8, 2 * w)]
            switched = maybe_jit(lambda i, w, b=branches: lax.switch(i, b, w))
            np.testing.assert_allclose(switched(chosen, 1.0), expected, rtol=1e-5)
            cond = maybe_jit(lambda p, w, b=branches: lax.cond(p, *b, w))
            np.testing.assert_allclose(cond(chosen == 0, 1.0), expected, rtol=1e-5)


@pytest.mark.parametrize("mesh", MESHES)
def test_blocks_inside_loops_and_branches_of_a_program(mesh):
    @eight
    def rounds(w, x):
        def one_round(w, _):
            local = drjax.map_fn(lambda w, a: w + 0.1 * a, (drjax.broadcast(w), x))
            w = drjax.reduce_mean(local)
            return lax.cond(
                w > 3, lambda w: drjax.reduce_mean(x) + w, lambda w: w, w
            ), w

        return lax.scan(one_round, w, length=4)

    expected, w = [], 1.0
    for _ in range(4):
        w += 0.1 * X8.mean()
        expected.append(w)
        w += X8.mean() if w > 3 else 0
    with in_mesh_of(mesh):
        last, means = jax.jit(rounds)(1.0, X8)
        slope = jax.jit(jax.grad(lambda w: rounds(w, X8)[0]))(1.0)
    np.testing.assert_allclose(means, expected, rtol=1e-5)
    np.testing.assert_allclose(last, w, rtol=1e-5)
    np.testing.assert_allclose(slope, 1.0, rtol=1e-5)
