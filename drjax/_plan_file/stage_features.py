"""What is in a stage: callbacks, which no file can hold, wide values, random keys.

And what code it calls outside StableHLO (*custom calls*). XLA calls that code by its
name, with operands that the file chooses. `ALLOWED` are those that `plan.save` writes
for programs without kernels: linear algebra, a permutation, allocation and placement,
and names that XLA replaces by StableHLO. Not in it, though `jax.export` counts them as
stable: kernels, which are code of their own (`tpu_custom_call`, `mosaic_gpu_v2`),
`tf.call_tf_function`, and shardings, as stages have no mesh. Whatever runs Python is
in neither list.

The list is no sandbox. jaxlib's linear algebra believes the shapes that a file gives
it, and so does MLIR's reader the offsets: both can be made to write where they should
not. docs/plan_files.md says so to users.
"""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import sdy, stablehlo

from drjax import _compat
from drjax._errors import PlanFileError
from drjax._jaxprs.prng_keys import is_key, key_impl
from drjax._jaxprs.provenance import source_line

WIDE = {np.dtype(t) for t in ("int64", "uint64", "float64", "complex128")}
_SAME_IN_BATCHES = {"threefry2x32"}


@dataclass(frozen=True)
class StageFeatures:
    """What is in a stage, or in several.

    Attributes:
      wide: Whether there are 64-bit values.
      keys: The implementations of random keys.
      sequential: Whether the groups of a batch must run one after another, as the
        stage draws random bits that would be others in a batch.
    """

    wide: bool
    keys: frozenset[str]
    sequential: bool


def features_of(jaxpr: Any, location: str) -> StageFeatures:
    """What is in a stage.

    Args:
      jaxpr: That of the stage.
      location: Round and stage, for errors.

    Raises:
      PlanFileError: The stage calls back into Python.
    """
    dtypes, names = set(), set()
    for x in _inside(jaxpr):
        if hasattr(x, "primitive"):
            _check(x, location)
            names.add(x.primitive.name)
        else:
            dtypes.add(getattr(x.aval, "dtype", None))
    dtypes.discard(None)
    keys = frozenset(key_impl(dtype) for dtype in dtypes if is_key(dtype))
    sequential = bool(keys - _SAME_IN_BATCHES) or "rng_bit_generator" in names
    return StageFeatures(bool(dtypes & WIDE), keys, sequential)


def merge(features: Iterable[StageFeatures]) -> StageFeatures:
    """What is in several stages."""
    features = list(features)
    keys = frozenset(key for one in features for key in one.keys)
    return StageFeatures(
        any(c.wide for c in features), keys, any(c.sequential for c in features)
    )


def _inside(jaxpr: Any) -> Iterator[Any]:
    """All equations and variables, however deep."""
    raw = _compat.open_jaxpr(jaxpr)
    yield from (*raw.constvars, *raw.invars)
    for eqn in raw.eqns:
        yield eqn
        yield from eqn.outvars
        for inner in _compat.jaxprs_in(eqn.params):
            yield from _inside(inner)


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
_BYTECODE = b"ML\xefR"


@contextlib.contextmanager
def opened(stablehlo_code: bytes) -> Iterator[Any]:
    """The module of a portable artifact.

    Raises:
      ValueError: It is none. MLIR reads text as well, but JAX writes bytecode only.
    """
    if not stablehlo_code.startswith(_BYTECODE):
        raise ValueError("its code is no MLIR bytecode")
    with ir.Context() as context:
        for dialect in (sdy, stablehlo):
            dialect.register_dialect(context)
        yield stablehlo.deserialize_portable_artifact(context, stablehlo_code)


def custom_calls(stablehlo_code: bytes) -> set[str]:
    """The names of the code outside StableHLO that a portable artifact calls.

    In all of its functions and regions, also in those that nothing calls.
    """
    names = set()

    def look(op) -> ir.WalkResult:
        if op.name == "stablehlo.custom_call":
            names.add(ir.StringAttr(op.attributes["call_target_name"]).value)
        elif op.name in _OF_HOST:
            names.add(op.name)
        return ir.WalkResult.ADVANCE

    with opened(stablehlo_code) as module:
        module.operation.walk(look)
    return names - _OF_JAX


def _check(eqn: Any, location: str) -> None:
    name = eqn.primitive.name
    if "callback" in name or name == "debug_print":
        raise PlanFileError(
            f"{location} calls back into Python: {name} at {source_line(eqn)}. A "
            "plan file runs without its source: take the call out, or return what it "
            "needs as a result."
        )
