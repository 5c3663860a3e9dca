"""An exported stage: the functions of a stage, exported by JAX, as a file holds them.

    server stage    per_group(*consts, *inputs) -> outputs
    local stage     per_group(*consts, group, *inputs) -> outputs
                    batched(*consts, mask, groups, *inputs) -> (*partials, *slices)

`per_group` is the work of one group, by its index, int32 `[]`. `batched` is that of b
groups, int32 `[b]`, for any b: of partitioned inputs it takes the groups' slices
`[b, ...]`, of global ones the value. It returns a partial reduction over those groups
whose `mask`, bool `[b]`, is true, for each reduction of the round but a gather, and the
slices of all outputs that are read later. 16-bit floats are added up in float32. PRNG
keys pass as raw data.

Input: bytes of `jax.export`. Output: functions that JAX can call and lower, but neither
differentiate nor batch.

Sharp edges: bytes are read when a function is first used, so that a file can be listed
without a JAX that reads it. Constants of the stage are arguments, not part of the code.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import jax
import numpy as np
from jax import export

from drjax._compat.types import Array
from drjax._errors import PlanFileError
from drjax._plan_file.custom_calls import calls_and_meshes_in
from drjax._sharding.group_mesh import MeshAxes
from drjax.plan import Stage

PLATFORMS = ("cpu", "cuda", "tpu")


@dataclass(frozen=True)
class ExportedFunction:
    """One function of a stage, exported by `jax.export` for all of `PLATFORMS`.

    Attributes:
      exported: The bytes of `jax.export.Exported.serialize`.
      stablehlo: The bytes of its StableHLO, a portable artifact.
      source: The name that errors give it: its location in a plan, as
        `round 1, groups`, or its member in a file.
    """

    exported: bytes
    stablehlo: bytes
    source: str

    @functools.cached_property
    def call(self) -> Callable[..., list[Array]]:
        """The function, to be called, also under `jax.jit`, but not to be transformed.

        It takes arrays, with random keys as raw key data, and returns a list of arrays.
        Under `jax.vmap`, `jax.jvp` or `jax.grad` a call raises `PlanFileError`, as JAX
        cannot transform exported functions; so does the property if this JAX cannot
        read the bytes.
        """
        # JAX would raise errors of its own that name no fix. Reverse mode begins with a
        # jvp, so that one rule refuses both modes.
        refuse = _refusal(self.source)
        call = jax.custom_batching.custom_vmap(self.function.call)
        call.def_vmap(refuse)
        call = jax.custom_jvp(call)
        call.defjvp(refuse)
        return call

    @property
    def function(self) -> export.Exported:
        """The function as a `jax.export.Exported`, deserialized at the first use."""
        return self._read[0]

    @property
    def meshes(self) -> set[MeshAxes]:
        """The meshes that its code names, which is deserialized first."""
        return self._read[2]

    @property
    def custom_calls(self) -> set[str]:
        """The names of the custom calls in the code, which is deserialized first."""
        return self._read[1]

    @functools.cached_property
    def _read(self) -> tuple[export.Exported, set[str], set[MeshAxes]]:
        """The deserialized function, and the custom calls and meshes in its code.

        The bytes are deserialized when the property is first read. `PlanFileError`:
        this version of JAX cannot read them.
        """
        try:
            function = export.deserialize(bytearray(self.exported))
            # Of the code that will run, whatever the manifest declares.
            return function, *calls_and_meshes_in(function.mlir_module_serialized)
        except Exception as error:
            raise PlanFileError(
                f"This JAX, {jax.__version__}, cannot read {self.source}: "
                f"{type(error).__name__}: {str(error)[:400]}. JAX reads what versions "
                "some months older wrote, and newer ones by some weeks: save the plan "
                "again with a version near this one."
            ) from error


def _refusal(source: str) -> Callable[..., NoReturn]:
    """Make a rule for `custom_vmap` and `custom_jvp` that raises `PlanFileError`.

    `source` is the name of the exported function in the error.
    """

    def refuse(*_: Any) -> NoReturn:
        raise PlanFileError(
            f"{source} is compiled: it can be run, but neither differentiated nor "
            "vmapped. Plan jax.grad(f) or jax.vmap(f) where the program f is, and save "
            "that."
        )

    return refuse


@dataclass(frozen=True)
class ExportedStage:
    """The exported functions of one stage, with what they need.

    All arrays are raw: random keys are their key data.

    Attributes:
      per_group: The function of a server stage, `(*consts, *inputs) -> outputs`; or of
        one group in a local stage, `(*consts, group index, *inputs) -> outputs`.
      batched: The function of b groups in a local stage, for any b: `(*consts, mask,
        group indices, *inputs) -> (*partial reductions, *folded states,
        *slices)`. The mask, bool `[b]`, says which groups take part in reductions and
        folds. None for a server stage.
      sequential: Whether the groups of a batch run one after another.
      text: The jaxpr of `per_group` as text, for humans.
      consts: Large arrays and random keys, which the functions take as their first
        arguments.
      custom_calls: The names of the custom calls in the code of both functions.
      origin: The versions, platforms, precision and implementations of random keys of
        the export, as in the manifest.
    """

    per_group: ExportedFunction
    batched: ExportedFunction | None
    sequential: bool
    text: str
    consts: tuple[np.ndarray, ...]
    custom_calls: tuple[str, ...]
    origin: dict[str, Any]


def exported_of(stage: Stage) -> ExportedStage:
    """Return the exported functions of a stage, which is asserted to have them.

    It has none in a plan that was neither exported nor loaded from a file, and if the
    stage has no outputs.
    """
    assert isinstance(stage.exported, ExportedStage), stage.name
    return stage.exported


def batched_of(stage: Stage) -> ExportedFunction:
    """Return the batched function of a local stage, which is asserted to have one."""
    batched = exported_of(stage).batched
    assert batched is not None, stage.name
    return batched
