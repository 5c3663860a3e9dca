"""Where the jaxprs of plans are traced: without devices, or beside a group's own.

A plan is free of devices, so that it is traced outside any mesh. But a mesh may have
axes besides those that carry the partition, over which the model in each group is
sharded. Then the work of a group is bound to a mesh on which the partition's axes are
Manual, and `drjax.jit` traces everything there.
"""

import contextlib

import jax
from jax.sharding import AxisType

from drjax import _compat
from drjax._partition import Partition
from drjax._scope import planned_axes
from drjax._sharding import find_mesh, layout


@contextlib.contextmanager
def planning(axes: tuple[str, ...]):
    """The context of the jaxprs that plans are made of.

    Args:
      axes: The mesh axes to make Manual; (): without any mesh.
    """
    if not axes:
        with _compat.without_mesh(), planned_axes(()):
            yield
        return
    mesh = jax.sharding.get_abstract_mesh()
    mesh = mesh.update_axis_types(dict.fromkeys(axes, AxisType.Manual))
    with jax.sharding.use_abstract_mesh(mesh), planned_axes(axes):
        yield


def outside_meshes():
    """The context for work on jaxprs: what it is, or without any mesh."""
    return contextlib.nullcontext() if planned_axes.value else planning(())


def may_shard_models() -> bool:
    """Whether the mesh in context may have axes besides those of a partition."""
    mesh = jax.sharding.get_abstract_mesh()
    return len(mesh.axis_names) > 1 and set(mesh.axis_types) == {AxisType.Auto}


def axes_to_plan(partition: Partition | None) -> tuple[str, ...]:
    """What to give to `planning` for programs over this partition."""
    if partition is None or not may_shard_models():
        return ()
    where = layout(partition, find_mesh(partition))
    return where.axes if len(where.axes) < len(where.abstract_mesh.axis_names) else ()
