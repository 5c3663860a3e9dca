"""`drjax.jit` of the same function compiles once, and does not keep it alive.

Covers: drjax._jit.jit, drjax._jit.jit_primitive.
"""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import drjax
from tests.helpers.compiled import compilations
from tests.helpers.raising import X8, eight


def test_a_function_is_planned_and_compiled_once():
    traced = []

    @eight
    def program(w, x):
        traced.append("program")
        return drjax.reduce_sum(drjax.map_fn(jnp.multiply, (drjax.broadcast(w), x)))

    w, x = jnp.float32(2), jnp.asarray(X8)
    with jax.check_tracer_leaks(False):
        for call in (program, jax.jit(program), jax.tree_util.Partial(program)):
            drjax.jit(call)(w, x)
            traced.clear()
            with compilations() as compiled:
                for _ in range(3):
                    assert float(drjax.jit(call)(w, x)) == 56
            assert (compiled, traced) == ([], []), call
        plain = drjax.jit(program).lower(w, x).as_text()
        in_loop = drjax.jit(program, groups_per_step=2).lower(w, x).as_text()
        assert "stablehlo.while" in in_loop and "stablehlo.while" not in plain


def total(x):
    return drjax.reduce_sum(drjax.map_fn(jnp.sin, x))


@pytest.mark.parametrize(
    "program", [jax.jit(eight(total)), eight(jax.jit(total))],
    ids=["a jit", "wraps a jit"],
)  # fmt: skip
def test_a_function_that_is_or_wraps_a_jit_is_lowered_as_its_plan(program):
    with jax.check_tracer_leaks(False):
        step, x = drjax.jit(program, groups_per_step=2), jnp.asarray(X8)
        assert "stablehlo.while" in step.lower(x).as_text()
        assert "stablehlo.while" in step.trace(x).lower().as_text()
        assert "stablehlo.while" in export.export(step)(x).mlir_module()
        assert step.eval_shape(x).shape == ()
        assert step.__wrapped__ is program and step.__name__ == "total"


def test_what_is_compiled_does_not_keep_the_function():
    class Model:
        def __init__(self, scale):
            self.scale = scale

        def loss(self, x):
            return drjax.reduce_sum(drjax.map_fn(lambda a: self.scale * a, x))

    def make(scale):
        model = Model(scale)
        program = eight(lambda x: model.loss(x))
        return weakref.ref(model), program, drjax.jit(program)

    with jax.check_tracer_leaks(False):
        alive, program, step = make(2.0)
        del program
        assert step(X8) == drjax.jit(step)(X8) == 56  # what jit gives keeps it
        gc.collect()
        assert step(np.stack([X8, X8], 1)).shape == (2,) and alive() is not None
        del step
        gc.collect()
        assert alive() is None
        # Methods are equal if their objects are, and die at once.
        first, second = Model(2.0), Model(3.0)
        for model, value in ((first, 56), (second, 84), (first, 56)):
            assert eight(drjax.jit(model.loss))(X8) == value
