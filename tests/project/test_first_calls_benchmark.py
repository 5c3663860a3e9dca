"""The two sides of a row of `benchmarks.first_calls` compute the same.

Covers: benchmarks.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import drjax
from benchmarks import first_calls
from tests.helpers.meshes import in_mesh_of

pytestmark = pytest.mark.usefixtures("leaks_unchecked")


def test_rounds():
    ours, theirs = first_calls._rounds(2), first_calls._rounds_in_a_loop(2)
    args = first_calls._arguments()
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5)
    jax.tree.map(close, jax.jit(ours)(*args), jax.jit(theirs)(*args))


def test_float4():
    x = jax.random.normal(jax.random.key(0), (first_calls.N, 64, 128))
    with in_mesh_of({"clients": first_calls.DEVICES}):
        theirs = jax.jit(first_calls._float4_hand_written())(x)
        program = drjax.program(clients=first_calls.N)(drjax.reduce_sum)
        ours = jax.jit(lambda x: program(x, wire="float4_e2m1fn"))(x)
    size = jnp.linalg.norm(x.sum(0))
    for total in (ours, theirs):
        assert jnp.linalg.norm(total - x.sum(0)) < 0.2 * size


def test_table():
    rows = [r for r in first_calls.ROWS if r.name.startswith("eager")]
    results = first_calls.measure(rows, 2, show_progress=False)
    table = first_calls.markdown(results)
    assert table.count("\n| eager") == len(rows) == 2
