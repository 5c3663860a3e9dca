"""Values: eager and jitted, on every mesh, against numpy.

Covers: drjax._primitives.collectives, drjax._primitives.extrema,
drjax._primitives.map_fn, drjax._primitives.partition_index.
"""

import jax
import pytest

from tests.helpers import cases
from tests.helpers.cases import assert_close, grid, on_mesh


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
