"""Layers with explicit collectives: the program on one device, and their counts.

Covers: experiments.
"""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import drjax
from experiments import collectives
from tests.helpers import cases


@cases.checkerboard(15, name=collectives.LAYERS, shape=[(2, 1, 4), (2, 2, 2)])
@pytest.mark.usefixtures("leaks_unchecked")  # JAX finds its own of shard_map
def test_layers_with_explicit_collectives(name, shape):
    layer, draw = collectives.LAYERS[name], np.random.default_rng(0)
    axes = (collectives.GROUPS, collectives.X, collectives.Y)
    mesh = jax.make_mesh(shape, axes, axis_types=(AxisType.Auto,) * 3)
    y, wide = shape[2], 16
    with jax.enable_x64(True):
        weights = {
            key: draw.normal(size=size) / 4
            for key, size in layer.shapes(y, wide, 32).items()
        }
        xs = draw.normal(size=(2, 16, wide))
        whole, parts = (
            jax.value_and_grad(collectives.program(layer, 2, by_devices), (0, 1))
            for by_devices in (False, True)
        )
        expected = jax.jit(whole)(weights, xs)
        on = lambda spec: NamedSharding(mesh, spec)
        lying = {key: on(spec) for key, spec in layer.weights.items()}
        lie = jax.jit(
            collectives.outputs(layer, 2),
            in_shardings=(lying, on(P(collectives.GROUPS, *layer.x))),
        )
        with jax.set_mesh(mesh):
            result = jax.jit(parts)(weights, xs)
            report = drjax.collectives(lie)(weights, xs)
    same = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-13)
    jax.tree.map(same, result, expected)
    expected = layer.collectives(y)
    if "all-reduce" in expected:  # the compiler puts them together
        expected["all-reduce"] = 1
    assert report.counts == expected
