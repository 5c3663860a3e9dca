"""Rounds that repeat are traced once for XLA, and compute what they did.

Covers: drjax.backends.xla.mesh_interpreter.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import drjax
from drjax.backends.xla.chunked_stage import ChunkedStage
from tests.helpers.meshes import in_mesh_of

N = 8
ARGS = jnp.float32(0.5), jnp.arange(float(N)), jnp.zeros(N)


def rounds(count, scale=lambda i: 2.0):
    """Rounds in a Python loop, with a state in the groups."""

    @drjax.program(clients=N)
    def program(w, x, state):
        for i in range(count):

            def work(w, x, state, i=i):
                new = 0.1 * jax.nn.relu(jnp.sin(w * x * scale(i)) + state)
                return new, 0.5 * state + new

            each, state = drjax.map_fn(work, (drjax.broadcast(w), x, state))
            w = drjax.reduce_mean(each)
        return w, state

    return program


@pytest.fixture
def traced(monkeypatch):
    runs, original = [], ChunkedStage.run

    def run(self, *args):
        runs.append(self.stage.name)
        return original(self, *args)

    monkeypatch.setattr(ChunkedStage, "run", run)
    return runs


@pytest.mark.parametrize("mesh", [None, {"clients": 4}])
@pytest.mark.parametrize("step", [None, 1])
def test_as_many_traces_as_rounds_that_differ(step, mesh, traced):
    counts = []
    with in_mesh_of(mesh), jax.check_tracer_leaks(False):
        for count in (5, 10):
            traced.clear()
            program = rounds(count)
            actual = drjax.jit(program, groups_per_step=step)(*ARGS)
            counts.append(len(traced))
            for a, b in zip(actual, jax.jit(program)(*ARGS), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-5)
    assert counts[0] == counts[1] < 5


@pytest.mark.parametrize("step", [None, 1])
def test_rounds_with_other_numbers_stay_apart(step, traced):
    program = rounds(4, scale=float)
    with jax.check_tracer_leaks(False):
        actual = drjax.jit(program, groups_per_step=step)(*ARGS)
    assert len(traced) == 4
    for a, b in zip(actual, jax.jit(program)(*ARGS), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
