"""The meshes that tests run on, by name."""

import contextlib
from typing import Any

import jax
from jax.sharding import AxisType

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


def in_mesh_of(shape: dict[str, int] | None):
    """The context of an Auto mesh of this shape, or without one."""
    return in_mesh(None if shape is None else make_mesh(shape))
