"""What is done to the programs of the table, and what it must give."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import drjax
from tests.helpers.cases import CASES, N


def total(fn):
    """A scalar function: the sum of the results, over the groups by drjax."""

    @functools.wraps(fn)
    def scalar(*args):
        y = fn(*args)
        if fn.__name__ == "partitioned_result":
            y = drjax.reduce_sum(y, partition={"clients": N})
        return jnp.sum(y)

    return scalar


def rounds(fn):
    """Five rounds: each scales the global arguments by what the last one gave."""

    def loop(*args):
        def body(scale, _):
            scaled = [a if a.shape[:1] == (N,) else a * scale for a in args]
            return 0.9 * scale + 0.01 * total(fn)(*scaled), None

        return jax.lax.scan(body, jnp.float64(1.0), None, length=5)[0]

    return loop


def argnums(case):
    return tuple(range(len(case.args)))


TRANSFORMS = {
    "value": lambda case: case.fn,
    "grad": lambda case: jax.grad(total(case.fn), argnums(case)),
    "value_and_grad": lambda case: jax.value_and_grad(total(case.fn), argnums(case)),
    "hessian": lambda case: jax.hessian(total(case.fn), argnums(case)),
    "rounds": lambda case: rounds(case.fn),
    "grad of rounds": lambda case: jax.grad(rounds(case.fn), argnums(case)),
}


@functools.cache
def expected_of(index: int, name: str):
    case = CASES[index]
    with jax.enable_x64(True):
        return jax.jit(TRANSFORMS[name](case))(*map(jnp.asarray, case.args))


def expected(case, name):
    return expected_of([c.name for c in CASES].index(case.name), name)


def assert_same(result, reference):
    close = functools.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-9)
    jax.tree.map(close, result, reference)
