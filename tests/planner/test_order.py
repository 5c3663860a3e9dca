"""Barriers and ordered effects keep the order of the program in plans.

Covers: drjax._planner.fences, drjax._planner.rounds.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import drjax
from drjax.backends import reference
from tests.helpers.cases import N
from tests.helpers.plan_files import program, saved

X = np.linspace(0, 1, 3 * N, dtype=np.float32).reshape(N, 3)
W = np.ones(3, np.float32)


@program
def late(w, x):
    """The groups go on with `y` only when the server has the mean."""
    y = drjax.map_fn(lambda w, x: jnp.sin(w * x), (drjax.broadcast(w), x))
    w = w - drjax.reduce_mean(y)
    y, w = lax.optimization_barrier((y, w))
    z = drjax.map_fn(lambda y, w: jnp.cos(y) + w, (y, drjax.broadcast(w)))
    return drjax.reduce_sum(z), z


@program
def early(w, x):
    """The server doubles `w` only when the groups have computed `y`."""
    y = drjax.map_fn(jnp.sin, x)
    y, w = lax.optimization_barrier((y, w))
    return drjax.map_fn(jnp.add, (y, drjax.broadcast(2 * w)))


@program
def in_a_loop(w, x):
    return lax.scan(lambda w, _: (late(w, x)[0], None), w, None, length=2)[0]


FENCED = {f.__name__: f for f in (late, early, in_a_loop)}


def barriers(stage):
    return str(stage.jaxpr).count("optimization_barrier")


def test_what_waits_for_a_reduction():
    plan = drjax.make_plan(late)(W, X)
    first, second = plan.rounds
    assert [barriers(r.local) for r in plan.rounds] == [0, 1]
    assert barriers(second.server) == 1
    assert "sin" not in str(second.local.jaxpr), "done once, before the barrier"
    # The barrier of the groups has the new `w`, which they take anyway.
    (barrier,) = (e for e in second.local.jaxpr.eqns if "barrier" in e.primitive.name)
    assert len(barrier.invars) == 2
    assert [v.name for v in second.broadcast] != [v.name for v in first.broadcast]
    assert len(second.broadcast) == 1, "nothing more is sent"


def test_what_waits_for_the_groups():
    plan = drjax.make_plan(early)(W, X)
    assert len(plan.rounds) == 2
    assert "mul" in str(plan.rounds[1].server.jaxpr)
    assert "mul" not in str(plan.rounds[0].server.jaxpr)


@pytest.mark.parametrize("name", FENCED)
def test_values(name, tmp_path):
    fn = FENCED[name]
    want = jax.jit(fn)(W, X)
    plan = drjax.make_plan(fn)(W, X)
    for each in (plan, saved(plan, tmp_path / "plan.drjax")):
        run = reference.compile(each)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, 1e-5), run(W, X), want
        )
    for k in (None, 1):
        run = drjax.jit(fn, groups_per_step=k)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, 1e-5), run(W, X), want
        )
        assert run.lower(W, X).as_text().count("optimization_barrier") >= 1


@pytest.mark.parametrize("name", FENCED)
def test_derivatives(name):
    loss = lambda w, x: sum(map(jnp.sum, jax.tree.leaves(FENCED[name](w, x))))
    batched = jax.vmap(jax.grad(loss), (0, None)), np.stack([W, 2 * W])
    for fn, w in ((jax.grad(loss), W), (jax.jacfwd(loss), W), batched):
        got, want = drjax.jit(fn)(w, X), jax.jit(fn)(w, X)
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_ordered_effects_of_the_server():
    log = []

    def logged(name, x):
        jax.debug.callback(lambda _: log.append(name), x, ordered=True)

    @program
    def f(m, x):
        total = drjax.reduce_sum(x)
        logged("total", total)
        logged("model", m)  # depends on no communication
        work = lambda x, t: x * t
        again = drjax.reduce_sum(drjax.map_fn(work, (x, drjax.broadcast(total))))
        logged("again", again)
        logged("last", m)
        return again

    x = jnp.arange(float(N))
    plan = drjax.make_plan(f)(W[0], x)
    for run in (f, jax.jit(f), drjax.jit(f), reference.compile(plan)):
        log.clear()
        jax.block_until_ready(run(W[0], x))
        jax.effects_barrier()
        assert log == ["total", "model", "again", "last"]
