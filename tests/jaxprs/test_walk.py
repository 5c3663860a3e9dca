"""Walks over jaxprs, on small programs whose equations are known.

Covers: drjax._jaxprs.walk.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import jaxpr_as_fun

from drjax import _compat
from drjax._jaxprs import walk


def raw(fn, *args):
    return _compat.open_jaxpr(jax.make_jaxpr(fn)(*args))


def names(eqns):
    return [eqn.primitive.name for eqn in eqns]


def program(x, y):
    a = jnp.sin(x)
    b = jnp.cos(y)
    return a * 2.0, b + a


def test_definitions_and_variables():
    jaxpr = raw(program, 1.0, 2.0)
    definition = walk.definitions(jaxpr.eqns)
    assert len(definition) == 4
    assert not set(jaxpr.invars) & set(definition)
    mul = definition[jaxpr.outvars[0]]
    assert len(mul.invars) == 2
    assert walk.variables(mul.invars) == [jaxpr.eqns[0].outvars[0]]


def test_live_equations():
    jaxpr = raw(program, 1.0, 2.0)
    assert names(walk.live_equations(jaxpr.eqns, jaxpr.outvars[:1])) == ["sin", "mul"]
    assert walk.live_equations(jaxpr.eqns, jaxpr.outvars) == list(jaxpr.eqns)
    effect = raw(lambda x: (jax.debug.callback(print, x), x)[1], 1.0)
    assert len(walk.live_equations(effect.eqns, [])) == 1


def test_backward_slices_start_where_they_may_not_enter():
    jaxpr = raw(program, 1.0, 2.0)
    definition = walk.definitions(jaxpr.eqns)
    eqns, starts = walk.backward_slice(jaxpr.outvars[1:], definition)
    assert sorted(names(eqns.values())) == ["add", "cos", "sin"]
    assert set(starts) == set(jaxpr.invars)
    outside = lambda var, eqn: eqn.primitive.name != "sin"
    eqns, starts = walk.backward_slice(jaxpr.outvars[1:], definition, outside)
    assert sorted(names(eqns.values())) == ["add", "cos"]
    assert set(starts) == {jaxpr.invars[1], jaxpr.eqns[0].outvars[0]}


def test_copies_have_fresh_variables_and_the_same_values():
    closed = jax.make_jaxpr(program)(1.0, 2.0)
    jaxpr = _compat.open_jaxpr(closed)
    fresh, eqns = walk.copy_equations(jaxpr.eqns, jaxpr.invars)
    old = {v for eqn in jaxpr.eqns for v in eqn.outvars}
    assert not old & {v for eqn in eqns for v in eqn.outvars}
    copy = jaxpr.replace(
        invars=walk.substitute(jaxpr.invars, fresh),
        eqns=eqns,
        outvars=walk.substitute(jaxpr.outvars, fresh),
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )
    run = jaxpr_as_fun(_compat.closed(copy))
    assert run(1.0, 2.0) == jaxpr_as_fun(closed)(1.0, 2.0)


def test_equations_at_any_depth():
    def loops(x):
        return lax.fori_loop(0, 3, lambda i, x: lax.cond(x > 0, jnp.sin, jnp.cos, x), x)

    jaxpr = raw(loops, 1.0)
    assert {"sin", "cos"} <= set(names(walk.deep_equations(jaxpr)))
    closed = lambda eqn: eqn.primitive.name != "cond"
    assert not {"sin", "cos"} & set(names(walk.deep_equations(jaxpr, closed)))


def test_operands_of_loops():
    def loops(a, b, c, xs):
        c, ys = lax.scan(lambda c, x: (c + a, x * b), c, xs)
        return lax.while_loop(lambda c: c < a, lambda c: c + b, c), ys

    jaxpr = raw(loops, 1.0, 2.0, 3.0, jnp.ones(4))
    (scan,) = [e for e in jaxpr.eqns if e.primitive.name == "scan"]
    (loop,) = [e for e in jaxpr.eqns if e.primitive.name == "while"]
    a, b, c, xs = jaxpr.invars
    assert walk.split_scan(scan, scan.invars) == ([a, b], [c], [xs])
    assert walk.split_while(loop, loop.invars) == ([a], [b], scan.outvars[:1])


def test_scans_of_other_sizes():
    jaxpr = raw(
        lambda c, xs: lax.scan(lambda c, x: (c + x, c), c, xs), 1.0, jnp.ones(4)
    )
    (scan,) = jaxpr.eqns
    c, stack = jaxpr.invars
    params = _compat.scan_size_params(scan, 1, 1, 2)
    assert params.keys() <= scan.params.keys()
    wider = scan.replace(invars=[c, c, stack, stack], params=scan.params | params)
    assert walk.split_scan(wider, wider.invars) == ([c], [c], [stack, stack])
