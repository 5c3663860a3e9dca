"""Equal traces of a mapped function share one jaxpr, and what is derived of it.

Covers: drjax._primitives.dispatch_cache, drjax._api.trace_map.
"""

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters import ad, batching, mlir

import drjax
from drjax._primitives.dispatch_cache import code_key, same_source, shared_jaxpr
from drjax.primitives import map_fn_p

N = 4


def mapped_jaxprs(fn, *args):
    """The jaxprs of all `map_fn` equations of a function, by identity."""
    eqns = jax.make_jaxpr(fn)(*args).eqns
    return [eqn.params["jaxpr"] for eqn in eqns if eqn.primitive is map_fn_p]


def rounds(work):
    @drjax.program(clients=N)
    def program(w, x):
        for i in range(3):
            each = drjax.map_fn(
                lambda w, x, i=i: work(w, x, i), (drjax.broadcast(w), x)
            )
            w = drjax.reduce_mean(each)
        return w

    return program


ARGS = jnp.float32(0.5), jnp.arange(float(N))


def test_rounds_in_a_loop_have_one_jaxpr():
    jaxprs = mapped_jaxprs(rounds(lambda w, x, i: jnp.sin(w * x)), *ARGS)
    assert len(jaxprs) == 3 and len({*map(id, jaxprs)}) == 1


def relu(w, x, i):
    return jax.nn.relu(w * x)


DIFFERENT = {
    "a number": lambda w, x, i: w * x + i,
    "a rule of derivatives": relu,
}


@pytest.mark.parametrize("work", DIFFERENT.values(), ids=DIFFERENT)
def test_what_may_differ_has_jaxprs_of_its_own(work):
    program = rounds(work)
    assert len({*map(id, mapped_jaxprs(program, *ARGS))}) == 3
    w, x = ARGS

    def plain(w):
        for i in range(3):
            w = jnp.mean(jax.vmap(lambda x, w=w, i=i: work(w, x, i))(x))
        return w

    np.testing.assert_allclose(program(w, x), plain(w), rtol=1e-6)
    np.testing.assert_allclose(jax.grad(program)(w, x), jax.grad(plain)(w), rtol=1e-6)


def test_rules_with_equal_values_stay_apart():
    """Two functions that compute the same, with other derivatives."""

    def scaled(factor):
        square = jax.custom_jvp(lambda x: x * x)
        square.defjvp(lambda xs, ts: (xs[0] * xs[0], factor * xs[0] * ts[0]))
        return square

    @drjax.program(clients=N)
    def program(x):
        total = 0.0
        for factor in (2.0, 5.0):
            total += drjax.reduce_sum(drjax.map_fn(scaled(factor), x))
        return total

    x = jnp.arange(float(N))
    np.testing.assert_allclose(jax.grad(program)(x), 7 * x)


def test_lines_of_source_stay_apart():
    @drjax.program(clients=N)
    def program(x):
        y = drjax.map_fn(lambda x: jnp.sin(x), x)
        z = drjax.map_fn(lambda x: jnp.sin(x), x)
        return drjax.reduce_sum(drjax.map_fn(jnp.add, (y, z)))

    first, second, _ = mapped_jaxprs(program, ARGS[1])
    assert first is not second
    assert same_source(first) != same_source(second)
    assert code_key(first) == code_key(second)


def test_eager_gradients_are_linearized_once():
    linearized = []
    sine = jax.extend.core.Primitive("sine")
    sine.def_impl(jnp.sin)
    sine.def_abstract_eval(lambda x: x)
    mlir.register_lowering(sine, mlir.lower_fun(jnp.sin, multiple_results=False))
    batching.primitive_batchers[sine] = lambda xs, dims: (sine.bind(*xs), dims[0])

    def derive(xs, ts):
        linearized.append(1)
        return sine.bind(*xs), jnp.cos(xs[0]) * ts[0]

    ad.primitive_jvps[sine] = derive

    @drjax.program(clients=N)
    def program(w, x):
        work = lambda w, x: sine.bind(w * x)
        return drjax.reduce_sum(drjax.map_fn(work, (drjax.broadcast(w), x)))

    with jax.check_tracer_leaks(False):
        values = [jax.grad(program)(*ARGS) for _ in range(5)]
    assert len(linearized) == 1
    assert len({float(v) for v in values}) == 1


def test_an_eager_function_is_traced_at_each_call():
    """As it may read what has changed."""
    factors = [2.0, 3.0]

    @drjax.program(clients=N)
    def program(x):
        return drjax.reduce_sum(drjax.map_fn(lambda x: x * factors[0], x))

    x = jnp.ones(N)
    assert float(program(x)) == 2 * N
    factors.pop(0)
    assert float(program(x)) == 3 * N


def test_constants_and_callbacks_have_no_key():
    closed = jax.make_jaxpr(lambda x: x + jnp.arange(3.0))(jnp.ones(3))
    printed = jax.make_jaxpr(lambda x: jax.debug.print("{}", x))(1.0)
    for jaxpr in (closed, printed):
        assert shared_jaxpr(jaxpr) is jaxpr
