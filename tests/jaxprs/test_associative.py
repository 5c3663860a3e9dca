"""Functions that are not associative are found on the first groups; others are not.

Covers: drjax._jaxprs.associative, drjax._planner.check.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import drjax
from tests.helpers.cases import checkerboard
from tests.helpers.folds import FOLDS, data
from tests.helpers.raising import raises

N = 4


def program(combine, init, states=lambda x: x, **options):
    @drjax.program(clients=N)
    def f(x):
        return drjax.reduce(combine, drjax.map_fn(states, x), init, **options)

    return f


def both(f, *args):
    """The two that try the function: `check`, and the reference backend."""
    run = drjax.backends.reference.compile(drjax.make_plan(f)(*args))
    return {"check": drjax.check(f), "reference": run}


def average(a, b):
    return (a + b) / 2


WRONG = {
    "average": (average, 0.0, lambda x: x),
    "difference": (jnp.subtract, 0.0, lambda x: x),
    "power": (lambda a, b: jnp.abs(a) ** jnp.tanh(b), 1.0, lambda x: x),
    "moving average": (lambda a, b: 0.9 * a + 0.1 * b, 0.0, lambda x: x),
    "integers": (lambda a, b: 2 * a + b, 0, lambda x: (9 * x).astype(jnp.int32)),
    "bfloat16": (average, 0.0, lambda x: x.astype(jnp.bfloat16)),
}


@checkerboard(1, name=WRONG, which=["check", "reference"])
def test_what_is_not_associative(name, which):
    combine, init, states = WRONG[name]
    x = jnp.asarray(data(N, 3))
    run = both(program(combine, init, states), x)[which]
    text = (
        "given to drjax.reduce needs to be associative, but of the states a, b, c of "
        "groups 0, 1, 2"
    )
    raises(drjax.DrjaxValueError, text, run, x)


def test_the_error_has_both_results():
    text = (
        "average(average(a, b), c) has leaf 0 = [2.25], and average(a, average(b, c)) "
        "has leaf 0 = [1.75]."
    )
    x = jnp.arange(1.0, N + 1)[:, None]
    raises(drjax.DrjaxValueError, text, drjax.check(program(average, 0.0)), x)


def test_what_does_not_commute():
    x = jnp.asarray(data(N, 3, 3))
    for run in both(
        program(jnp.matmul, np.eye(3, dtype="f"), commutative=True), x
    ).values():
        text = "needs to be commutative with commutative=True"
        raises(drjax.DrjaxValueError, text, run, x)


def loud(scale):
    return lambda x: scale * (1 + x / 1000)


FOLDED = FOLDS["chan"]
RIGHT = {
    "sum": (jnp.add, 0.0, lambda x: x),
    "sum that cancels": (jnp.add, 0.0, lambda x: 1e7 * jnp.sign(x) + x),
    "sum of float16": (jnp.add, 0.0, lambda x: (100 * x).astype(jnp.float16)),
    "sum of bfloat16": (jnp.add, 0.0, lambda x: (100 * x).astype(jnp.bfloat16)),
    "sum of float8": (jnp.add, 0.0, lambda x: x.astype(jnp.float8_e4m3fn)),
    "product": (jnp.multiply, 1.0, lambda x: 1e3 * x),
    "logaddexp": (jnp.logaddexp, -jnp.inf, lambda x: 50 * x),
    "logaddexp of infinities": (jnp.logaddexp, -jnp.inf, lambda x: jnp.log(x)),
    "maximum": (jnp.maximum, -jnp.inf, lambda x: x),
    "integers that overflow": (jnp.add, 0, lambda x: (x * 2**30).astype(jnp.int32) * 9),
    "exclusive or": (jnp.bitwise_xor, 0, lambda x: (99 * x).astype(jnp.int32)),
    "variance far from zero": (FOLDED[0], FOLDED[1], lambda x: {
        "n": jnp.float32(1.0), "mean": 1e6 + x, "m2": 0 * x}),
    "matrices": (jnp.matmul, np.eye(3, dtype="f"), lambda x: jnp.outer(x, 9 * x)),
    "keys": (lambda a, b: b, jax.random.key(0), lambda x: jax.random.key(
        (9 * x[0]).astype(jnp.uint32))),
}  # fmt: skip
for _name, (_combine, _init, _states) in FOLDS.items():
    RIGHT[f"folds: {_name}"] = (
        _combine,
        _init,
        lambda x, states=_states: jax.tree.map(lambda y: y[0], states(x[None])),
    )


@pytest.mark.parametrize("name", RIGHT)
def test_rounding_is_no_difference(name):
    combine, init, states = RIGHT[name]
    for seed in range(3):
        x = jnp.asarray(np.random.RandomState(seed).randn(N, 3).astype(np.float32))
        with jax.numpy_rank_promotion("allow"):
            for run in both(program(combine, init, states), x).values():
                run(x)


def test_what_check_does_not_try():
    """Types alone, two groups, tracers, and programs that depend on n."""
    f = program(average, 0.0)
    x = data(N, 3)
    drjax.check(f)(jax.ShapeDtypeStruct(x.shape, x.dtype))
    two = drjax.program(clients=2)(lambda x: drjax.reduce(average, x, 0.0))
    drjax.check(two)(x[:2])
    jax.jit(lambda x: drjax.check(f)(x) and x)(x)

    @drjax.program(clients=N)
    def depends(x):
        return drjax.reduce(average, x + np.arange(4.0, dtype="f")[:, None], 0.0)

    drjax.check(depends)(x)
