"""When a function returns zeros, and when that is not known.

Covers: drjax._jaxprs.zeros.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from drjax import _compat
from drjax._jaxprs import zeros
from drjax._primitives.segments import place_in_segment, slice_of_segment

X = jnp.asarray(np.random.RandomState(0).randn(4, 4), jnp.float32)


def pulled_back(work):
    """The gradient of work whose result counts only if it is chosen."""
    return lambda p, x: jax.grad(lambda x: jnp.sum(jnp.where(p, work(x), 0.0)))(x)


def scanned(x):
    step = lambda h, w: (jnp.tanh(h @ x) + w[None], jnp.sin(h))
    h, ys = lax.scan(step, x, x)
    return h + ys.sum(0)


# From a number that is 0 for a group that is left out, and its slice.
ZEROS = {
    "where": lambda p, x: jnp.where(p, x, 0),
    "the other value": lambda p, x: jnp.where(~p, 0, x),
    "with an array of conditions": lambda p, x: jnp.where(jnp.full((4, 1), p), x, 0),
    "a segment": lambda p, x: place_in_segment(jnp.where(p, 0, 1), x, 0, 0),
    "of several": lambda p, x: place_in_segment(jnp.where(p, 2, 3), x, 3, 0),
    "of a table": lambda p, x: slice_of_segment(jnp.where(p, 1, 4), x),
    "linear": lambda p, x: -jnp.where(p, x, 0).T[1:].reshape(-1) / 3 @ X.ravel()[:12],
    "a product": lambda p, x: jnp.exp(x) * jnp.where(p, x, 0) ** 2,
    "a sum": lambda p, x: jnp.where(p, x, 0) + jnp.where(p, 1.0, 0) * jnp.pad(x, 0),
    "in a jit": lambda p, x: jax.jit(lambda y: jnp.sin(y) @ X)(jnp.where(p, x, 0)),
    "a gradient": pulled_back(lambda x: jnp.tanh(x @ x)),
    "of a scan": pulled_back(scanned),
    "of a checkpoint": pulled_back(jax.checkpoint(scanned)),
    "of a branch": pulled_back(
        lambda x: lax.cond(x[0, 0] > 0, jnp.sin, lambda x: x @ x, x)
    ),
    "of a concatenation": pulled_back(lambda x: jnp.concatenate([x, x.T])[1:6]),
    "of a maximum": pulled_back(lambda x: jnp.max(x, 0)),
    "zeros": lambda p, x: jnp.zeros(4),
}
OTHERS = {
    "a slice": lambda p, x: x,
    "another number": lambda p, x: jnp.where(p, x, 1),
    "one of two": lambda p, x: jnp.where(p, x, 0) + x,
    "cosine": lambda p, x: jnp.cos(jnp.where(p, x, 0)),
    "a product with what may be 0": lambda p, x: x * jnp.float32(p),
    "ones around": lambda p, x: place_in_segment(jnp.where(p, 0, 1), x, 0, 1),
    "carried": lambda p, x: lax.scan(
        lambda h, w: (h + w, None), jnp.where(p, x, 0), jnp.stack([x, x])
    )[0],
    "one branch": lambda p, x: lax.cond(
        x[0, 0] > 0, lambda y: y, lambda y: y + 1, jnp.where(p, x, 0)
    ),
    "a loop": lambda p, x: lax.while_loop(
        lambda y: y[0, 0] > 0, lambda y: y + 1, jnp.where(p, x, 0)
    ),
    "below zero": lambda p, x: jnp.where(p, x, 0) ** -1,
}


def conditions(fn):
    jaxpr, consts = _compat.without_consts(jax.make_jaxpr(fn)(jnp.bool_(True), X))
    return jaxpr, consts, zeros.zero_results(jaxpr)[0]


@pytest.mark.parametrize("name", ZEROS)
def test_zeros(name):
    jaxpr, consts, cases = conditions(ZEROS[name])
    assert cases
    holds = lambda value, x: jnp.all((value == x.number) == x.equal)
    for case in cases:
        own, used = _compat.select_outputs(jaxpr, [x.var for x in case])
        for chosen in (False, True):
            args = [*consts, jnp.bool_(chosen), X]
            values = _compat.jaxpr_as_fun(own)(
                *(x for x, u in zip(args, used, strict=True) if u)
            )
            result = _compat.jaxpr_as_fun(jaxpr)(*args)[0]
            if all(map(holds, values, case)):
                assert not jnp.any(result)
            else:
                assert chosen


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_not_known_to_be_zeros(name):
    assert conditions(OTHERS[name])[-1] == zeros.NEVER


def test_either_and_both():
    p, q = jax.make_jaxpr(jnp.add)(X, X).jaxpr.invars
    a, b = (frozenset({frozenset({zeros.Condition(x, 0, True)})}) for x in (p, q))
    assert zeros.both() == zeros.ALWAYS
    assert zeros.both(a, zeros.ALWAYS) == a
    assert zeros.both(a, zeros.NEVER) == zeros.NEVER
    assert [len(case) for case in zeros.both(a, b)] == [2]
    assert zeros.both(a, a | zeros.both(a, b)) == a
