"""All numbers of a tree as one array, without collectives between its shards.

Covers: drjax._primitives.shards_in_lanes.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from drjax._primitives.shards_in_lanes import ravel_shards, unravel_shards
from drjax.compiled import read_hlo
from tests.helpers.compiled import hlo_text
from tests.helpers.meshes import make_mesh

SHAPES = [(), (3,), (0, 4), (7, 5), (8, 128), (5, 256), (4, 3, 512), (2, 384)]


def tree_of(shapes, dtypes=("float32", "bfloat16")):
    draw = np.random.default_rng(0).normal
    return [
        jnp.asarray(draw(size=shape), dtypes[i % len(dtypes)])
        for i, shape in enumerate(shapes)
    ]


@pytest.mark.parametrize("block", [1, 64, 128, 384])
@pytest.mark.parametrize("parts", [1, 2, 8])
@pytest.mark.parametrize("devices", [1, 4])
def test_what_is_raveled_is_unraveled(devices, parts, block):
    tree = tree_of(SHAPES)
    axes = {"model": devices} if devices > 1 else {}
    with jax.set_mesh(make_mesh({"model": devices})):
        x = jax.jit(lambda tree: ravel_shards(tree, parts, block, axes))(tree)
        back = jax.jit(unravel_shards)(x, tree)
    assert x.shape[:2] == (parts, devices) and x.shape[-1] == 128
    assert x.shape[2] * 128 % block == 0, "a block has numbers of one part"
    assert jnp.sum(x != 0) == sum(x.size for x in tree)
    for want, got in zip(tree, back, strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)


def test_a_tree_without_numbers():
    x = ravel_shards(tree_of([(0,)]), 2, 64, {})
    assert x.size == 0
    assert unravel_shards(x, tree_of([(0,)]))[0].shape == (0,)


def test_devices_ravel_what_they_have():
    mesh = make_mesh({"model": 4})
    specs = {(8, 512): P(None, "model"), (256, 128): P("model"), (4,): P("model")}
    tree = [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip(tree_of(specs), specs.values(), strict=True)
    ]

    def there_and_back(tree):
        x = ravel_shards(tree, 2, 64, {"model": 4})
        return x, unravel_shards(2 * x, tree)

    with jax.set_mesh(mesh):
        assert not read_hlo(hlo_text(there_and_back, tree))
