"""Programs that close over arrays: of the host, on a mesh, of an outer jit.

Covers: drjax._api.trace_map.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import drjax
from tests.helpers.cases import checkerboard
from tests.helpers.meshes import AUTO, EXPLICIT, make_mesh

N = 8
RNG = np.random.RandomState(0)
MODEL = RNG.randn(3).astype(np.float32)
DATA = RNG.randn(N, 5, 3).astype(np.float32), RNG.randn(N, 5).astype(np.float32)


@drjax.program(clients=N)
def loss(model, data):
    fit = lambda model, x, y: jnp.mean((jax.nn.relu(x @ model) - y) ** 2)
    return drjax.reduce_mean(drjax.map_fn(fit, (drjax.broadcast(model), *data)))


@functools.cache
def expected_value_and_grad():
    return jax.value_and_grad(loss)(MODEL, DATA)


@pytest.fixture(scope="module", autouse=True)
def _compute_expected():
    """On no mesh; and not while tests are collected."""
    expected_value_and_grad()


MESHES = {
    "Auto": lambda: make_mesh({"clients": 4}),
    "Auto, model": lambda: make_mesh({"clients": 4, "model": 2}),
    "Auto, two": lambda: make_mesh({"clients": 2, "fsdp": 2, "tensor": 2}),
    "Explicit": lambda: make_mesh({"clients": 4}, EXPLICIT),
    "Explicit, model": lambda: make_mesh({"clients": 4, "model": 2}, EXPLICIT),
    "both": lambda: make_mesh({"clients": 4, "model": 2}, (EXPLICIT, AUTO)),
}
# What plans a function of the model, and runs it.
RUNS = {
    "jax.jit": jax.jit,
    "drjax.jit": drjax.jit,
    "one at a time": lambda f: drjax.jit(f, groups_per_step=1),
    "plan": lambda f: (
        lambda model: jax.jit(drjax.backends.xla.compile(drjax.make_plan(f)(model)))(
            model
        )
    ),
    "reference": lambda f: (
        lambda model: drjax.backends.reference.compile(drjax.make_plan(f)(model))(model)
    ),
}


def assert_expected(result):
    for a, b in zip(result, expected_value_and_grad(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


@checkerboard(13, mesh=MESHES, run=RUNS)
def test_data_on_the_mesh(mesh, run):
    with jax.set_mesh(MESHES[mesh]()):
        data = drjax.shard(DATA, partition=loss)
        closed = lambda model: loss(model, data)
        assert_expected(RUNS[run](jax.value_and_grad(closed))(MODEL))
        value, _ = expected_value_and_grad()
        np.testing.assert_allclose(RUNS[run](closed)(MODEL), value, rtol=1e-5)


@checkerboard(13, mesh=MESHES, run=RUNS)
def test_parameters_that_come_from_a_jit_under_the_mesh(mesh, run):
    """The second round of a loop in which each round closes over the parameters."""
    with jax.set_mesh(MESHES[mesh]()):
        data = drjax.shard(DATA, partition=loss)
        model = MODEL
        for _ in range(2):
            closed = lambda shift, model=model: loss(model + shift, data)
            step = RUNS[run](jax.grad(closed))(jnp.zeros(3))
            model = jax.jit(lambda model, step: model - 0.1 * step)(model, step)
    other = MODEL
    for _ in range(2):
        other = other - 0.1 * jax.grad(loss)(other, DATA)
    np.testing.assert_allclose(model, other, rtol=1e-5)


@pytest.mark.sampled
@pytest.mark.parametrize("mesh", ["Auto", "Auto, model", "Explicit"])
@pytest.mark.parametrize("step", [None, 1])
def test_values_of_an_outer_jit(mesh, step):
    with jax.set_mesh(MESHES[mesh]()):

        @jax.jit
        def outer(model, data):
            scaled = jnp.where(model > 0, 2 * model, model) / 2 + model / 2
            scaled = scaled - jnp.where(model > 0, model / 2, 0)
            return drjax.jit(jax.value_and_grad(lambda m: loss(m + 0 * scaled, data)))(
                model
            )

        assert_expected(outer(MODEL, drjax.shard(DATA, partition=loss)))


@pytest.mark.sampled
@pytest.mark.parametrize("mesh", ["Auto", "Explicit"])
def test_keys_and_arrays_in_a_mapped_function(mesh):
    @drjax.program(clients=N)
    def noise(x, key, w):
        draw = lambda x: (
            x * w.sum()
            + jax.random.normal(jax.random.fold_in(key, drjax.partition_index()))
        )
        return drjax.reduce_sum(drjax.map_fn(draw, x))

    x, key, w = np.arange(8.0, dtype=np.float32), jax.random.key(3), jnp.arange(4.0)
    expected = noise(x, key, w)
    with jax.set_mesh(MESHES[mesh]()):
        key, w = jax.jit(lambda *x: x)(key, w)
        for run in RUNS.values():
            result = run(lambda x: noise(x, key, w))(x)
            np.testing.assert_allclose(result, expected, rtol=1e-5)


def test_check_of_a_closure():
    with jax.set_mesh(MESHES["Auto"]()):
        data = drjax.shard(DATA, partition=loss)
        text = str(drjax.check(lambda model: loss(model, data))(MODEL))
    assert "on mesh axis 'clients' of 4 devices" in text
