"""What a jaxpr compares an index with.

Covers: drjax._jaxprs.compared_index.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from drjax import _compat
from drjax._jaxprs.compared_index import Compared, compared

CHOSEN, OTHERS = jnp.array([1, 3, 3]), jnp.array([0, 2, 4])

# By a function of the index, of some indices and of a number: whether it says of each
# index if it is one of them, and what it returns then.
ONLY_COMPARED = {
    "equal": (lambda i, js, x: i == js, True),
    "unequal": (lambda i, js, x: js != i, False),
    "not": (lambda i, js, x: ~(i == js), False),
    "any": (lambda i, js, x: jnp.any(i == js), True),
    "all": (lambda i, js, x: jnp.all(i != js), False),
    "numbers": (lambda i, js, x: jnp.where(i == js, 7, 5), 7),
    "none of them": (lambda i, js, x: jnp.where(jnp.any(i == js), 0.0, 2.5), 0),
    "in a call": (lambda i, js, x: jax.jit(lambda a, b: (a == b)[None])(js, i), True),
    "views": (lambda i, js, x: jnp.broadcast_to(i, (3,)) == js, True),
    "exact": (lambda i, js, x: i.astype(np.uint32) == js.astype(np.uint32), True),
    "as a number": (lambda i, js, x: (i == js).astype(np.float32), 1),
    "computed": (lambda i, js, x: i == 2 * js - js, True),
}
MORE = {
    "less": lambda i, js, x: i < js,
    "another number": lambda i, js, x: jnp.where(i == js, x, 0.0),
    "not exact": lambda i, js, x: i.astype(np.int8) == js.astype(np.int8),
    "a float": lambda i, js, x: i.astype(np.float32) == js,
    "itself": lambda i, js, x: i == i,
    "both": lambda i, js, x: (i == js) & (x > 0),
    "all of them": lambda i, js, x: jnp.all(i == js),
    "one plus it": lambda i, js, x: i + 1 == js,
    "in a call": lambda i, js, x: jax.jit(lambda a: i == 2 * a)(js),
    "the indices": lambda i, js, x: js,
    "a constant": lambda i, js, x: 3,
}


def traced(fn):
    jaxpr = jax.make_jaxpr(fn)(jnp.int32(0), CHOSEN, jnp.float32(0))
    return _compat.without_consts(jaxpr)[0]


@pytest.mark.parametrize("fn, yes", ONLY_COMPARED.values(), ids=ONLY_COMPARED)
def test_only_a_comparison(fn, yes):
    (match,) = compared(traced(fn))
    assert isinstance(match, Compared) and match.yes == yes
    assert not isinstance(match.values, int)
    for indices, values in ((CHOSEN, {match.yes}), (OTHERS, {match.no})):
        for i in indices:
            result = np.asarray(fn(i, CHOSEN, 1.0))
            # An element for each value: of one that is not the index `no`.
            assert values <= {*result.flat} <= {match.yes, match.no}


@pytest.mark.parametrize("fn", MORE.values(), ids=MORE)
def test_more_than_a_comparison(fn):
    assert compared(traced(fn)) == [None]


def test_numbers_and_several_results():
    fn = lambda i, js, x: (i == 3, jnp.sin(x), jnp.where(i == 4, 0, 1))
    first, second, third = compared(traced(fn))
    assert first == Compared(3, True, False)
    assert second is None and third == Compared(4, 0, 1)
