"""Equations that a pass did not change are staged as they are, not bound again.

Covers: drjax._planner.trace_stages, drjax._compat.jaxprs, drjax._compat.write_jaxpr,
    drjax.backends.xla.chunked_stage.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import drjax
from benchmarks import first_calls
from benchmarks.long_programs import LONG_PROGRAMS
from drjax._compat import jaxprs, write_jaxpr
from drjax._planner import trace_stages
from drjax.backends.xla import chunked_stage

pytestmark = pytest.mark.usefixtures("leaks_unchecked")
COUNT = 200


@pytest.fixture
def bound(monkeypatch):
    """The primitives that JAX evaluates abstractly to stage them."""
    trace = jaxprs.pe.DynamicJaxprTrace
    names, original = [], trace.default_process_primitive

    def process(self, primitive, *args, **kwargs):
        names.append(primitive.name)
        return original(self, primitive, *args, **kwargs)

    monkeypatch.setattr(trace, "default_process_primitive", process)
    return names


@pytest.mark.parametrize("where", LONG_PROGRAMS)
def test_equations_are_bound_once(where, bound):
    """By the user's trace; a few others begin and end stages."""
    program, types = LONG_PROGRAMS[where](COUNT)
    drjax.make_plan(program)(*types)
    assert COUNT <= bound.count("sin") + bound.count("mul") <= COUNT + 2


@pytest.mark.parametrize("where", ["between maps", "on the server"])
def test_so_are_they_for_xla(where, bound):
    """Also under the vmap over groups."""
    program, types = LONG_PROGRAMS[where](COUNT)
    drjax.jit(program).lower(*types)
    assert bound.count("sin") + bound.count("mul") <= COUNT + 2


def mixed(x, w):
    """Types, scalars, constants and scopes that change from equation to equation."""
    with jax.named_scope("scope"):
        y = drjax.map_fn(lambda x: (x > 0.5, x.astype(jnp.float16), x), x)
    flag, low, x = y
    z = jnp.where(flag, x * 2, low.astype(jnp.float32)) + w[0]
    z = lax.clamp(0.0, z, jnp.max(w)) + np.arange(4.0, dtype=np.float32)
    server = jnp.sin(w).sum() * jnp.float32(2) + 3
    server = jnp.where(server > 1, server, jnp.int32(4)) ** 2
    return drjax.reduce_mean(z) + server, z, drjax.reduce_max(drjax.map_fn(abs, z))


def descends(x, w):
    """Rounds of which the derivative has maps, pointwise work and broadcasts."""
    for _ in range(2):
        step = lambda w, x: w - 0.1 * jnp.tanh(w * x) / 3
        copies = drjax.map_fn(step, (drjax.broadcast(w), x))
        w = drjax.reduce_mean(copies + 0 * drjax.partition_index()[:, None])
    return jnp.sum(w)


@pytest.mark.parametrize("fn", [mixed, descends, jax.grad(descends)])
def test_written_stages_are_those_that_are_traced(fn, monkeypatch):
    program = drjax.program(clients=4)(fn)
    args = jnp.linspace(0, 1, 4), jnp.arange(3.0) + 1
    stages = lambda: [
        (stage.name, str(stage.jaxpr))
        for _, stage in drjax.make_plan(program)(*args).stages()
    ]
    written = stages()

    def refuse(*_):
        raise write_jaxpr.NotWritten

    monkeypatch.setattr(write_jaxpr.Writer, "__init__", refuse)
    monkeypatch.setattr(trace_stages._compat, "jaxpr_of_equations", refuse)
    assert written == stages()


def test_most_stages_are_written(monkeypatch):
    traced = []
    monkeypatch.setattr(
        trace_stages, "_trace", lambda name, *_, **__: traced.append(name)
    )
    gradient = jax.grad(first_calls._total(first_calls._rounds(3)))
    rounds = lambda count: (gradient, first_calls._arguments())
    for make in (*LONG_PROGRAMS.values(), rounds):
        program, types = make(COUNT)
        drjax.make_plan(program)(*types)
    assert not traced


def test_leaves_of_a_reduction_are_not_batched(monkeypatch):
    mean = drjax.program(clients=4)(drjax.reduce_mean)
    leaves = [jnp.arange(4.0 * i).reshape(4, i) for i in range(1, 9)]
    monkeypatch.setattr(chunked_stage, "over_groups", None)
    for a, b in zip(drjax.jit(mean)(leaves), leaves, strict=True):
        np.testing.assert_allclose(a, b.mean(0), rtol=1e-6)


@pytest.mark.parametrize("step", [None, 1, 3])
def test_values(step):
    program = drjax.program(clients=4)(mixed)
    args = jnp.linspace(0, 1, 4), jnp.arange(3.0) + 1
    expected = jax.jit(program)(*args)
    plan = drjax.make_plan(program)(*args)
    for run in (
        drjax.backends.reference.compile(plan),
        drjax.jit(program, groups_per_step=step),
        jax.jit(drjax.backends.xla.compile(plan, groups_per_step=step)),
    ):
        for a, b in zip(run(*args), expected, strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_allclose(a, b, rtol=1e-6)
