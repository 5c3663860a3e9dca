"""Custom calls: the code outside StableHLO that stages call, and the list of it.

Input: the StableHLO of a stage, or a decoded plan. Output: the names of the custom
calls, or a `PlanFileError` if one is not on the list.

XLA calls such code by its name, with operands that the file chooses. `ALLOWED` are
those that `plan.save` writes for programs without kernels: linear algebra, a
permutation, allocation and placement, and names that XLA replaces by StableHLO. Not in
it, though `jax.export` counts them as stable: kernels, which are code of their own
(`tpu_custom_call`, `mosaic_gpu_v2`), `tf.call_tf_function`, and shardings, which JAX
writes as operations of Shardy. Whatever runs Python is refused, also if a user allows
it by name.

Invariants: `check_allowed` reads what the manifest declares, before the code of any
stage is read; `check_declared` then compares that with the code.

Sharp edges: the list is no sandbox. jaxlib's linear algebra believes the shapes that a
file gives it, and so does MLIR's reader the offsets: both can be made to write where
they should not. docs/plan_files.md says so to users.
"""

import contextlib
import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import sdy, stablehlo

from drjax._errors import PlanFileError
from drjax._plan.normal_form import exported_stages
from drjax._sharding.group_mesh import MeshAxes
from drjax.plan import Plan

_OF_JAX = {"shape_assertion"}  # checked when shapes become known
_LAPACK = {
    "cdsz": "geqrf gesdd getrf gtsv potrf trsm",
    "ds": "orgqr syevd",
    "cz": "heevd ungqr",
}
_CUSOLVER = "geqrf gesvd gesvdj getrf orgqr potrf syevd"
ALLOWED = frozenset(
    {
        *(
            f"lapack_{t}{name}_ffi"
            for types, names in _LAPACK.items()
            for t in types
            for name in names.split()
        ),
        *(f"cusolver_{name}_ffi" for name in _CUSOLVER.split()),
        "cu_lu_pivots_to_permutation",
        "cu_threefry2x32_ffi",
        "cusparse_gtsv2_ffi",
        "Eigh",
        "LuDecomposition",
        "ProductOfElementaryHouseholderReflectors",
        "Qr",
        "AllocateBuffer",
        "ApproxTopK",
        "annotate_device_placement",
        "stablehlo.dynamic_approx_top_k",
        "stablehlo.dynamic_reduce_window",
        "stablehlo.dynamic_rng_bit_generator",
        "stablehlo.dynamic_top_k",
    }
)
# Operations that exchange data with the host outside of any custom call.
_OF_HOST = {f"stablehlo.{name}" for name in ("infeed", "outfeed", "recv", "send")}
_NAMES_OF_CALLS = [b"custom_call", b"infeed", b"outfeed", b"recv", b"send"]
# What calls Python: a file has no Python function, only the address or number of one
# in another process, so that the call ends this process. Refused whatever is allowed.
_OF_PYTHON = re.compile("python.*callback|CustomSPMDPartitioning", re.IGNORECASE)
_BYTECODE = b"ML\xefR"


def check_allowed(
    path: Path | str, plan: Plan, allowed: Collection[str] | None
) -> None:
    """Check that a plan declares no custom calls but those in `ALLOWED` or `allowed`.

    Only declarations are read; `check_declared` compares them with the code. None
    allows all that do not call Python.
    """
    for location, _, exported in exported_stages(plan):
        calls = set(exported.custom_calls)
        if of_python := sorted(filter(_OF_PYTHON.search, calls)):
            raise PlanFileError(
                f"The plan file {path} calls back into Python in {location}: "
                f"{_shown(of_python)}. The function is not in the file, so that the "
                "call would end the process. Take it out of the program, and save the "
                "plan again."
            )
        if allowed is not None and (unknown := sorted(calls - ALLOWED - {*allowed})):
            raise PlanFileError(
                f"The plan file {path} makes custom calls in {location} that are not "
                f"on the list of those that plans may make: {_shown(unknown)}. They "
                "run code outside of the file with operands that it chooses. If you "
                "trust who wrote it, pass the names to "
                "drjax.load_plan(path, custom_calls=[...])."
            )


def _shown(names: list[str]) -> str:
    """Some names as text: a forged manifest may have any number, of any length."""
    return ", ".join(repr(name[:100]) for name in names[:5])


def check_declared(
    stage: str, declared: Collection[str], called: Iterable[Collection[str]]
) -> None:
    """Check that the functions of a stage call exactly what the manifest declares.

    `called` has for each function the names of the custom calls in its code.
    `ValueError`: their union is not `declared`.
    """
    # Equal, not a subset: `inspect` prints what is declared, without reading code.
    if set(declared) != set().union(*called):
        raise ValueError(f"stage {stage} calls other code than it is said to")


@contextlib.contextmanager
def parsed_module(stablehlo_code: bytes) -> Iterator[Any]:
    """Parse StableHLO, a portable artifact in MLIR bytecode, to an MLIR module.

    The module is valid only inside the `with` block. `ValueError`: the artifact is no
    MLIR bytecode. MLIR also reads text, which JAX never writes.
    """
    if not stablehlo_code.startswith(_BYTECODE):
        raise ValueError("its code is no MLIR bytecode")
    with ir.Context() as context:
        for dialect in (sdy, stablehlo):
            dialect.register_dialect(context)
        yield stablehlo.deserialize_portable_artifact(context, stablehlo_code)


def custom_calls_in(stablehlo_code: bytes) -> set[str]:
    """Return the names of the custom calls in StableHLO code, a portable artifact.

    Custom calls of all functions and regions count, even of functions that are never
    called, and so do operations that exchange data with the host, such as
    `stablehlo.infeed`. The shape assertions that JAX adds do not count.
    """
    # Bytecode has the names of its operations as they are. Where a file is loaded, all
    # code is parsed, whatever this says.
    if not any(name in stablehlo_code for name in _NAMES_OF_CALLS):
        return set()
    return calls_and_meshes_in(stablehlo_code)[0]


def calls_and_meshes_in(stablehlo_code: bytes) -> tuple[set[str], set[MeshAxes]]:
    """Return `custom_calls_in`, and the meshes over which the code is sharded.

    An empty mesh, as of values that are replicated, does not count.
    """
    names, meshes = set[str](), set[MeshAxes]()

    def collect(op: ir.Operation) -> ir.WalkResult:
        if op.name == "stablehlo.custom_call":
            names.add(ir.StringAttr(op.attributes["call_target_name"]).value)
        elif op.name in _OF_HOST:
            names.add(op.name)
        elif op.name == "sdy.mesh":
            mesh = sdy.MeshAttr(op.attributes["mesh"])
            axes = [sdy.MeshAxisAttr(axis) for axis in mesh.axes]
            meshes.add(tuple((axis.name, axis.size) for axis in axes))
        return ir.WalkResult.ADVANCE

    with parsed_module(stablehlo_code) as module:
        module.operation.walk(collect)
    return names - _OF_JAX, meshes - {()}
