"""The context in which the jaxprs of plans are traced: no devices, or the ambient mesh.

Input: a function that traces. Output: its jaxpr, free of devices and of mesh types
unless `drjax.jit` asks for the mesh in context.

A plan that leaves the process is free of devices, so it is traced outside any mesh.
What `drjax.jit` plans stays under the mesh in context: the work of a group may be
sharded over mesh axes other than the partition's, and functions may close over
arrays on the mesh. On a mesh with Explicit axes types carry shardings, of which a plan
has no record: functions are traced outside the mesh or, if they close over its arrays,
under it, and these types are removed afterwards.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeVar

import jax
from jax.sharding import AxisType

from drjax import _compat
from drjax._compat import retype_mesh
from drjax._compat.types import ClosedJaxpr
from drjax._context import planned

T = TypeVar("T")


@contextlib.contextmanager
def planning(bound: bool) -> Iterator[None]:
    """Make the context manager in which a program is traced for a plan.

    A plan has no mesh in its equations, so building blocks bind their primitives
    without one. `bound` says whether `drjax.jit` will run the plan under the mesh in
    context. If so, that mesh stays in context, but building blocks bind it only inside
    mapped functions, for an inner partition; outside, an argument `mesh=` has no
    effect. If not, no mesh is in context, so that the plan may leave the process; a
    building block binds a mesh only if its own argument `mesh=`, or that of the
    program, names one.
    """
    if not bound:
        with _compat.without_mesh(), planned(False):
            yield
        return
    mesh = jax.sharding.get_abstract_mesh()
    with jax.sharding.use_abstract_mesh(mesh), planned(True):
        yield


def outside_meshes() -> contextlib.AbstractContextManager[None]:
    """Make the context manager in which the planner traces equations of its own.

    No building block in them may bind a mesh. Inside `planning(True)`, none does.
    """
    return contextlib.nullcontext() if planned.value else planning(False)


def is_bound() -> bool:
    """Decide whether `drjax.jit` plans a program under the mesh in context.

    It does if all axes of that mesh are Auto: types then have no shardings, which a
    plan could not record. Without a mesh, or if an axis is Explicit or Manual, the
    program is traced outside the mesh, if JAX allows that.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty and set(mesh.axis_types) == {AxisType.Auto}


# What JAX raises where it refuses to trace: cotangents with axes and without fail an
# assertion.
_REFUSALS = (AssertionError, NotImplementedError, RuntimeError, ValueError)


def trace_without_mesh(
    trace: Callable[[], tuple[ClosedJaxpr, T]],
) -> tuple[ClosedJaxpr, T]:
    """Trace a function outside any mesh; if JAX refuses, under the mesh in context.

    JAX refuses some functions that close over arrays on the mesh. The jaxpr that is
    traced under the mesh is then copied with types that have no mesh. `trace` returns
    the jaxpr and any other value; it may be called twice.

    The error of the trace outside any mesh is raised again if it is not about the mesh,
    if no mesh is in context, or if the jaxpr traced under that mesh has a `shard_map`
    or a sharding constraint.
    """
    mesh = jax.sharding.get_abstract_mesh()
    try:
        with planning(False):
            jaxpr, rest = trace()
        if not _takes_from_mesh(jaxpr):
            return jaxpr, rest
    except _REFUSALS as error:
        if mesh.empty or not _compat.is_about_a_mesh(error):
            raise
        with planning(True):
            jaxpr, rest = trace()
        if _compat.is_bound_to_devices(jaxpr):
            raise
    with planning(False):
        return retype_mesh.without_mesh_types(jaxpr), rest


def _takes_from_mesh(jaxpr: ClosedJaxpr) -> bool:
    """Return whether an input or constant of a jaxpr has a type with a mesh.

    That is so if the traced function closes over an array on the mesh.
    """
    raw = _compat.open_jaxpr(jaxpr)
    return any(
        isinstance(v.aval, _compat.ShapedArray) and not v.aval.sharding.mesh.empty
        for v in (*raw.constvars, *raw.invars)
    )
