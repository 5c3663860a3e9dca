"""The mesh of one group: devices that share the work of a group, in a plan.

Input: the mesh of `make_plan(group_mesh=)`, or one that mapped functions close over.
Output: the context in which a program is traced for it; and in a worker, the same mesh
of its own devices, or of those of all processes that work on a group together. A plan
has the names and sizes of the axes alone, a `MeshAxes`.

Invariants: all axes are Auto, but inside of the mapped functions of an Explicit mesh:
types outside of mapped functions have no shardings, of which a plan has no record.

Sharp edges: only work of groups may name these axes. The server has no mesh.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, Sharding
from jax.sharding import PartitionSpec as P

from drjax import _compat
from drjax._compat.types import ClosedJaxpr, OpenJaxpr
from drjax._context import group_mesh, planned
from drjax._errors import DrjaxTypeError, DrjaxValueError, MeshError, PlanError
from drjax._jaxprs.elementwise import ELEMENTWISE

MeshAxes: TypeAlias = tuple[tuple[str, int], ...]  # names and sizes, in their order

# What states a sharding or communicates, with the parameter that has the mesh.
_BOUND = {
    "mesh_cast": "dst_sharding",
    "reshard": "dst_sharding",
    "shard_map": "mesh",
    "sharding_constraint": "sharding",
}


def checked(mesh: object) -> AbstractMesh:
    """Return the argument `group_mesh` of `make_plan` without devices."""
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise DrjaxTypeError(
            "group_mesh= needs a jax.sharding.AbstractMesh or Mesh, got "
            f"{type(mesh).__name__}. Write jax.sharding.AbstractMesh((4,), "
            '("model",)).'
        )
    abstract = mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh
    kinds = set(abstract.axis_types)
    if kinds not in ({AxisType.Auto}, {AxisType.Explicit}):
        raise DrjaxValueError(
            "group_mesh= needs axes that are all Auto or all Explicit, got "
            f"{abstract}. Other axes are those of a surrounding jax.shard_map."
        )
    return abstract


def axes_of(mesh: AbstractMesh) -> MeshAxes:
    """Return the names and sizes of the axes of a mesh."""
    return tuple(zip(mesh.axis_names, mesh.axis_sizes, strict=True))


def _auto(mesh: AbstractMesh) -> AbstractMesh:
    """Copy a mesh with Auto axes."""
    return mesh.update_axis_types(dict.fromkeys(mesh.axis_names, AxisType.Auto))


def lowering_for(
    axes: MeshAxes, jaxpr: ClosedJaxpr
) -> contextlib.AbstractContextManager[Any]:
    """Make the context in which the code of one group is lowered; nothing without axes.

    A mesh that the code closes over may name a kind of device, as the context must.
    """
    if not axes:
        return contextlib.nullcontext()
    names, sizes = zip(*axes, strict=True)
    mesh = mesh_in(jaxpr) or AbstractMesh(sizes, names)
    return jax.sharding.use_abstract_mesh(_auto(mesh))


@contextlib.contextmanager
def planning_for(mesh: AbstractMesh | None) -> Iterator[None]:
    """Make the context in which a program is traced and planned for a mesh of a group.

    None: for a group on one device, in the context as it is.
    """
    if mesh is None:
        yield
        return
    with (
        _compat.without_mesh(),
        jax.sharding.use_abstract_mesh(_auto(mesh)),
        planned(True),
        group_mesh(mesh),
    ):
        yield


def explicit_inside(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a mapped function, of flat arrays, for an Explicit mesh of its group.

    Its arguments come replicated over the group's devices. On an Auto mesh, and without
    one, it is `fn` itself.
    """
    mesh = group_mesh.value
    if mesh is None or AxisType.Explicit not in mesh.axis_types:
        return fn
    if AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types:
        return fn  # inside of another mapped function

    def run(*args: Any) -> Any:
        specs = tuple(P() for _ in args)
        return jax.sharding.explicit_axes(fn, in_sharding=specs)(*args)

    # Equations of an inner jit stay in the context in which they were traced.
    return jax.jit(run)


def is_bound(jaxpr: ClosedJaxpr | OpenJaxpr) -> bool:
    """Return whether code names axes of a mesh, at any depth."""
    return _compat.has_primitive(jaxpr, tuple(_BOUND))


def mesh_in(
    jaxpr: ClosedJaxpr | OpenJaxpr, mapped_only: bool = False
) -> AbstractMesh | None:
    """Return the mesh that code names; None: none. Two meshes are a `PlanError`.

    It is Explicit if its axes are so anywhere: elsewhere they are Auto. With
    `mapped_only`, only functions count that building blocks in the code map.
    """
    meshes = set(_meshes_in(jaxpr, mapped_only))
    if len(named := {axes_of(mesh) for mesh in meshes}) > 1:
        shown = " and ".join(sorted(map(as_text, named)))
        raise PlanError(
            f"The functions of the groups close over different meshes, {shown}. A "
            "group has one: name its axes alone, as in P('model'), and pass the mesh "
            "to drjax.make_plan(..., group_mesh=)."
        )
    # JAX takes the mesh of an array of devices for another than one without a kind.
    known = lambda mesh: getattr(mesh, "abstract_device", None) is not None
    explicit = lambda mesh: AxisType.Explicit in mesh.axis_types
    return max(meshes, key=lambda mesh: (known(mesh), explicit(mesh)), default=None)


def _meshes_in(
    jaxpr: ClosedJaxpr | OpenJaxpr, mapped_only: bool
) -> Iterator[AbstractMesh]:
    for eqn in _compat.open_jaxpr(jaxpr).eqns:
        name = eqn.primitive.name
        if name in ELEMENTWISE:  # most equations
            continue
        if not mapped_only and name in _BOUND:
            value = eqn.params[_BOUND[name]]
            mesh = getattr(value, "mesh", value)
            abstract = mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh
            if not abstract.empty:
                yield abstract
        # In a shard_map, its axes are Manual.
        if name != "shard_map":
            for inner in _compat.jaxprs_in(eqn.params):
                yield from _meshes_in(
                    inner, mapped_only and "partition" not in eqn.params
                )


# -------------------------------------------------------------------------------------
# In a worker


def devices_of(axes: MeshAxes) -> int:
    """Return how many devices a mesh needs; 1 without axes."""
    return math.prod(size for _, size in axes)


def as_text(axes: MeshAxes) -> str:
    """Write axes as people do: `model=4` or `fsdp=2, model=4`."""
    return ", ".join(f"{name}={size}" for name, size in axes)


def lack_of_devices(axes: MeshAxes, devices: int, where: str, fix: str) -> str:
    """Say that `where`, such as `this process`, has too few devices; "" if it has not.

    `fix` is how it gets more.
    """
    needed = devices_of(axes)
    if devices >= needed:
        return ""
    return (
        f"The plan runs each group on a mesh of {as_text(axes)}, which needs {needed} "
        f"devices, and {where} has {devices}. {fix}"
    )


_spanning = False


def span_processes() -> None:
    """Let meshes of groups have devices of all of JAX's processes, from now on.

    Each of them must then run the same groups in the same order.
    """
    global _spanning
    _spanning = True


def spans_processes() -> bool:
    """Return whether other processes work on the same groups."""
    return _spanning


def devices_of_processes() -> list[list[Any]]:
    """Return the devices for groups by process, of each process as many."""
    if not _spanning:
        return [jax.local_devices()]
    processes = range(jax.process_count())
    devices = [jax.local_devices(process_index=i) for i in processes]
    return [x[: min(map(len, devices))] for x in devices]


@functools.cache
def local_mesh(axes: MeshAxes) -> Mesh:
    """Make a mesh of the first devices of this process; `MeshError`: it has too few.

    After `span_processes` each process has an equal part of it.
    """
    by_process = devices_of_processes()
    fix = (
        "Give it more (on CPUs, set JAX_NUM_CPU_DEVICES before JAX starts), or plan "
        "for a smaller group_mesh."
    )
    if text := lack_of_devices(axes, sum(map(len, by_process)), "this process", fix):
        raise MeshError(text)
    of_each = devices_of(axes) // len(by_process)
    devices = [x for own in by_process for x in own[:of_each]]
    names, sizes = zip(*axes, strict=True)
    kinds = (AxisType.Auto,) * len(names)
    return jax.make_mesh(sizes, names, axis_types=kinds, devices=devices)


def in_local_mesh(axes: MeshAxes) -> contextlib.AbstractContextManager[Any]:
    """Make the context for work of a group: `local_mesh`, or without axes, nothing."""
    return jax.set_mesh(local_mesh(axes)) if axes else contextlib.nullcontext()


def put_whole(x: np.ndarray, sharding: Sharding) -> jax.Array:
    """Put an array on a mesh of a group; each process has the whole array."""
    if sharding.is_fully_addressable:
        return jax.device_put(x, sharding)
    # `device_put` would compare the arrays of all processes.
    return jax.make_array_from_callback(x.shape, sharding, lambda i: x[i])


def read_whole(x: Any) -> np.ndarray:
    """Read an array; other processes that have parts of it must do so, too."""
    if isinstance(x, jax.Array) and not (
        x.is_fully_addressable or x.is_fully_replicated
    ):
        return np.asarray(multihost_utils.process_allgather(x, tiled=True))
    return np.asarray(x)
