"""Values: eager and jitted, on every mesh, against numpy.

Covers: drjax._primitives.collectives, drjax._primitives.extrema,
drjax._primitives.map_fn, drjax._primitives.partition_index.
"""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from drjax._primitives.extrema import by_halves
from tests.helpers import cases
from tests.helpers.cases import assert_close, grid, on_mesh
from tests.helpers.meshes import in_mesh, make_mesh


@pytest.mark.sampled
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
@grid(shift=0)
def test_value(case, mesh_name, transform):
    with on_mesh(case, mesh_name) as args:
        assert_close(transform(case.fn)(*args), case.numpy(*case.args))


def test_every_mesh_and_case_is_met_by_default():
    (mark,) = [grid().args[1]]
    chosen = [p for p in mark if not p.marks]
    assert {p.values[1] for p in chosen} == set(cases.MESHES)
    assert {p.values[0].name for p in chosen} == {c.name for c in cases.CASES}


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("dtype", ["int64", "uint64"])
def test_extrema_by_halves_are_those_of_the_whole(dtype, largest):
    info = np.iinfo(dtype)
    draw = np.random.RandomState(0).randint(0, 3, (4, 50)).astype(dtype)
    high = np.random.RandomState(1).randint(0, 2, (4, 50)).astype(dtype) << 32
    x = np.concatenate([draw + high, info.max - draw - high, info.min + draw], 1)
    if dtype == "int64":
        x = np.concatenate([x, -draw, -high - draw], 1)
    with jax.enable_x64(True), in_mesh(make_mesh({"clients": 4})):
        run = jax.shard_map(
            lambda x: by_halves(x[0], ("clients",), largest),
            in_specs=P("clients"),
            out_specs=P(),
        )
        result = jax.jit(run)(x)
    np.testing.assert_array_equal(result, x.max(0) if largest else x.min(0))
