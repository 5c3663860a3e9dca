"""The context of a trace: meshes, and varying-manual-axes (VMA) checking.

Input: nothing, a value, or its type. Output: what JAX's trace context or the type says.
Sharp edge: each thread has a context of its own.
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import jax
import numpy as np
from jax._src import config, core, mesh, sharding_impls

from drjax._compat.types import Aval


def check_vma() -> bool:
    """Return whether the code being traced is inside a `shard_map(check_vma=True)`.

    Only then do types say over which Manual mesh axes a value varies (VMA).
    """
    return config._check_vma.value


def without_vma() -> contextlib.AbstractContextManager[None]:
    """Make a context in which no VMA is checked, as in a `shard_map(check_vma=False)`.

    VMA are the varying manual axes: the Manual mesh axes over which a value differs.
    """
    return config._check_vma(False)


def disable_jit() -> bool:
    """Return whether the code runs under `jax.disable_jit`."""
    return config.disable_jit.value


def is_concrete(x: object) -> bool:
    """Return whether the value of `x` is known, also if a tracer holds it."""
    return core.is_concrete(x)


def under_trace() -> bool:
    """Return whether a transformation or jit is active: nothing runs eagerly."""
    return not isinstance(core.trace_ctx.trace, core.EvalTrace)


def legacy_mesh() -> jax.sharding.Mesh | None:
    """Return the mesh of a surrounding `with mesh:` block; None if there is none."""
    physical = mesh.thread_resources.env.physical_mesh
    return None if physical.empty else physical


def concrete_mesh() -> jax.sharding.Mesh:
    """Return the mesh that `jax.set_mesh` set, with its devices, also while tracing.

    It is an empty mesh if none is set.
    """
    return mesh.get_concrete_mesh()


def replace_aval(
    aval: Aval,
    shape: Sequence[int],
    sharding: jax.sharding.Sharding,
    varying: Iterable[str],
) -> Aval:
    """Copy a type with another shape, sharding, and set of varying axes.

    The sharding is on an abstract mesh. The varying axes are the Manual mesh axes over
    which a value of the new type differs between devices.
    """
    mat = aval.manual_axis_type.update(varying=frozenset(varying))
    return aval.update(shape=shape, sharding=sharding, manual_axis_type=mat)


def varying(aval: Aval) -> frozenset[str]:
    """Return the Manual mesh axes over which a value of this type differs."""
    return aval.manual_axis_type.varying


@contextlib.contextmanager
def computing_constants() -> Iterator[None]:
    """Make a context in which equations on constants run at once, while tracing.

    There is no mesh in it: its devices may be those of a topology that is not there.
    """
    with without_mesh(), jax.ensure_compile_time_eval():
        yield


@contextlib.contextmanager
def without_mesh() -> Iterator[None]:
    """Make a context without any mesh, of `jax.set_mesh` or of a `with mesh:` block.

    The mesh is in context again after it. Its devices are gone, too, so that arrays
    that are computed meanwhile are on the default device, and have no mesh.
    """
    resources, legacy = mesh.thread_resources, config.mesh_context_manager
    env, entered = resources.env, legacy.swap_local(())
    empty = mesh.Mesh(np.empty((), object), ())
    resources.env = env.with_mesh(empty)
    try:
        with (
            sharding_impls._internal_use_concrete_mesh(empty),
            jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())),
        ):
            yield
    finally:
        resources.env = env
        legacy.set_local(entered)
