"""Effects in the work of groups: each group does each of them once, whoever asks.

Covers: drjax._primitives.map_fn.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import drjax
from tests.helpers.cases import checkerboard

N = 3
groups = drjax.program(clients=N)
pytestmark = pytest.mark.usefixtures("leaks_unchecked")  # JAX leaks tracers of effects

# What is differentiated, and how.
RUNS = {
    "as it is": lambda f: f,
    "jax.jit": jax.jit,
    "drjax.jit": drjax.jit,
    "one at a time": lambda f: drjax.jit(f, groups_per_step=1),
}
DERIVATIVES = {
    "value": lambda f: f,
    "gradient": jax.grad,
    "jit of gradient": lambda f: jax.jit(jax.grad(f)),
    "plan of gradient": lambda f: drjax.jit(jax.grad(f)),
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (x,)),
    "Hessian product": lambda f: lambda x: jax.jvp(jax.grad(f), (x,), (x,)),
}
every_run = pytest.mark.parametrize("run", RUNS)
every_third = checkerboard(3, run=RUNS, derivative=DERIVATIVES)
every_derivative = pytest.mark.parametrize("derivative", DERIVATIVES)


def _check(fn, run, derivative, times):
    """`fn(call)` is a program that calls `call(i, t)` in group i at time t."""
    x, calls = jnp.arange(1.0, N + 1), []

    def call(i, t):
        jax.debug.callback(lambda i, t: calls.append((int(i), int(t))), i, t)

    expected = DERIVATIVES[derivative](groups(fn(lambda i, t: None)))(x)
    result = DERIVATIVES[derivative](RUNS[run](groups(fn(call))))(x)
    jax.effects_barrier()
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5)
    jax.tree.map(close, result, expected)
    assert sorted(calls) == [(i, t) for i in range(N) for t in range(times)]


@pytest.mark.sampled
@every_third
def test_in_rounds_of_a_scan(run, derivative):
    """Also of values known before a derivative, which are not rematerialized."""

    def rounds(call):
        def work(x, t):
            call(drjax.partition_index(), t)
            return jnp.sin(x)

        def f(x):
            def step(total, t):
                slices = drjax.map_fn(work, (x, drjax.broadcast(t)))
                return total + t * drjax.reduce_sum(slices), None

            return lax.scan(step, 0.3, jnp.arange(2.0))[0] ** 2

        return f

    _check(rounds, run, derivative, times=2)


@pytest.mark.sampled
@every_third
def test_of_work_without_results(run, derivative):
    def program(call):
        def work(x):
            call(drjax.partition_index(), 0 * x)

        def f(x):
            drjax.map_fn(work, drjax.map_fn(jnp.cos, x))
            return drjax.reduce_sum(drjax.map_fn(jnp.sin, x))

        return f

    _check(program, run, derivative, times=1)
