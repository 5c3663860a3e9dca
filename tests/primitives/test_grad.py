"""Reverse mode: grad, value_and_grad, and second order both ways, against numpy.

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


def scalar(case):
    """The case's result, weighted into one number, and the same in numpy."""

    def fn(*args):
        y = case.fn(*args)
        return jnp.sum(jnp.cos(jnp.arange(y.size).reshape(y.shape)) * y)

    def reference(*args):
        y = case.numpy(*args)
        return (jnp.cos(jnp.arange(y.size)) * y.reshape(-1)).sum()

    return fn, reference


def along(grads, args):
    """The directional derivative that a gradient gives."""
    pairs = zip(grads, directions(args), strict=True)
    return sum(jnp.sum(g * jnp.asarray(d)) for g, d in pairs)


@pytest.mark.sampled
@grid(shift=4, every=5)
def test_grad(case, mesh_name):
    with on_mesh(case, mesh_name) as args:
        fn, reference = scalar(case)
        argnums = tuple(range(len(args)))
        value, grads = jax.jit(jax.value_and_grad(fn, argnums))(*args)
        assert_close(value, reference(*case.args))
        assert_close(along(grads, case.args), difference(reference, case.args), 1e-8)


@grid(shift=5, every=7)
def test_jvp_of_grad(case, mesh_name):
    with on_mesh(case, mesh_name) as args:
        fn, reference = scalar(case)
        grad = jax.grad(fn, tuple(range(len(args))))
        tangents = tuple(jnp.asarray(d) for d in directions(case.args))
        _, hvp = jax.jit(lambda *args: jax.jvp(grad, args, tangents))(*args)
        want = second_difference(reference, case.args)
        assert_close(along(hvp, case.args), want, 1e-6)


@pytest.mark.sampled
@grid(shift=6, every=9)
def test_grad_of_grad(case, mesh_name):
    with on_mesh(case, mesh_name) as args:
        fn, reference = scalar(case)
        argnums = tuple(range(len(args)))

        def slope(*args):
            return along(jax.grad(fn, argnums)(*args), case.args)

        hvp = jax.jit(jax.grad(slope, argnums))(*args)
        want = second_difference(reference, case.args)
        assert_close(along(hvp, case.args), want, 1e-6)


@grid(shift=7, every=9)
def test_jacobians_agree(case, mesh_name):
    with on_mesh(case, mesh_name) as args:
        forward = jax.jit(jax.jacfwd(case.fn))(*args)
        reverse = jax.jit(jax.jacrev(case.fn))(*args)
        assert_close(forward, reverse)
