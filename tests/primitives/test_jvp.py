"""Forward mode: jvp, linearize, jvp of jvp, against differences of numpy.

Covers: drjax._primitives.collectives, drjax._primitives.extrema,
drjax._primitives.map_fn, drjax._primitives.partition_index.
"""

import jax
import jax.numpy as jnp
import pytest

from tests.helpers.cases import (
    assert_close,
    difference,
    directions,
    grid,
    on_mesh,
    second_difference,
)


def _tangents(args):
    return tuple(jnp.asarray(d) for d in directions(args))


@pytest.mark.sampled
@grid(shift=1, every=3)
def test_jvp(case, mesh_name):
    with on_mesh(case, mesh_name) as args:
        value, tangent = jax.jvp(jax.jit(case.fn), args, _tangents(case.args))
        assert_close(value, case.numpy(*case.args))
        assert_close(tangent, difference(case.numpy, case.args), 1e-8)


@pytest.mark.sampled
@grid(shift=2, every=7)
def test_linearize(case, mesh_name):
    with on_mesh(case, mesh_name) as args:
        value, linear = jax.linearize(case.fn, *args)
        assert_close(value, case.numpy(*case.args))
        tangent = jax.jit(linear)(*_tangents(case.args))
        assert_close(tangent, difference(case.numpy, case.args), 1e-8)


@grid(shift=3, every=7)
def test_jvp_of_jvp(case, mesh_name):
    with on_mesh(case, mesh_name) as args:

        def first(*args):
            return jax.jvp(case.fn, args, _tangents(case.args))[1]

        _, second = jax.jvp(jax.jit(first), args, _tangents(case.args))
        assert_close(second, second_difference(case.numpy, case.args), 1e-6)
