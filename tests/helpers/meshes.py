"""The meshes that tests run on, by name."""

import contextlib
import functools
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from drjax._primitives import between_slices
from drjax._sharding import layout

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


def make_mesh(shape: dict[str, int], kind: Any = AUTO) -> jax.sharding.Mesh:
    """A mesh over the first devices; `kind` is one axis type or one for each axis."""
    count = 1
    for size in shape.values():
        count *= size
    kinds = kind if isinstance(kind, tuple) else (kind,) * len(shape)
    return jax.make_mesh(
        tuple(shape.values()), tuple(shape), axis_types=kinds,
        devices=jax.devices()[:count],
    )  # fmt: skip


def in_mesh(mesh: jax.sharding.Mesh | None):
    """The context of a mesh, or without one."""
    return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)


@contextlib.contextmanager
def in_slices(size: int):
    """So many consecutive devices are a TPU slice, and no value is too small."""
    forget = layout.axes_inside_slices.cache_clear, jax.clear_caches
    with pytest.MonkeyPatch.context() as patch:
        number = np.vectorize(lambda device: device.id // size)
        patch.setattr(layout, "_slices_of", number)
        patch.setattr(between_slices, "SMALL", 1)
        for each in forget:
            each()
        yield
    for each in forget:
        each()


def in_mesh_of(shape: dict[str, int] | None):
    """The context of an Auto mesh of this shape, or without one."""
    return in_mesh(None if shape is None else make_mesh(shape))


# By name: the number of groups, and how to make the mesh.
_GROUPS_AND_MESHES: dict[str, tuple[int, Any]] = {
    "none": (5, None),
    "one device": (3, {"clients": 1}),
    "one each": (4, {"clients": 4}),
    "two each": (8, {"clients": 4}),
    "uneven": (7, {"clients": 4}),
    "three each, uneven": (11, {"clients": 4}),
    "empty devices": (3, {"clients": 8}),
    "model": (6, {"clients": 2, "model": 2}),
    "explicit": (8, {"clients": 4}),
    "explicit model": (4, {"clients": 2, "model": 2}),
    # JAX 0.12 lowers no reduce-scatter on it.
    "explicit other axis": (6, {"model": 2, "clients": 3}),
    "other axis": (3, {"model": 2}),
}
_KINDS: dict[str, Any] = {
    "explicit": EXPLICIT,
    "explicit model": EXPLICIT,
    "explicit other axis": (EXPLICIT, AUTO),
    "other axis": EXPLICIT,
}


def groups_and_meshes(*names: str) -> dict[str, tuple[int, Any]]:
    """By name, a number of groups and a function that makes a mesh; None: no mesh."""
    table = {}
    for name in names:
        n, shape = _GROUPS_AND_MESHES[name]
        make = functools.partial(make_mesh, shape, _KINDS.get(name, AUTO))
        table[name] = n, None if shape is None else make
    return table
