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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import export

from drjax._errors import PlanFileError
from drjax._jaxprs.prng_keys import from_raw, to_raw
from drjax._plan_file.custom_calls import custom_calls_in
from drjax.plan import Stage, Value

PLATFORMS = ("cpu", "cuda", "tpu")


@dataclass(frozen=True)
class ExportedFunction:
    """One exported function of a stage.

    Attributes:
      exported: The bytes of `jax.export.Exported.serialize`.
      stablehlo: The StableHLO in it, as a portable artifact.
      source: What errors call it: its location in a plan, or its member in a file.
    """

    exported: bytes
    stablehlo: bytes
    source: str

    @functools.cached_property
    def call(self) -> Callable[..., list]:
        """The function, to be called or lowered; to differentiate or batch it raises.

        Raises:
          PlanFileError: (when it is differentiated or batched) JAX cannot do that with
            exported functions; (when it is read) this JAX cannot read it.
        """
        refuse = _refusal(self.source)
        call = jax.custom_batching.custom_vmap(self.function.call)
        call.def_vmap(refuse)
        call = jax.custom_jvp(call)
        call.defjvp(refuse)
        return call

    @property
    def function(self) -> export.Exported:
        """The function, deserialized by JAX when it is first used."""
        return self._read[0]

    @property
    def custom_calls(self) -> set[str]:
        """The names of the custom calls in its code."""
        return self._read[1]

    @functools.cached_property
    def _read(self) -> tuple[export.Exported, set[str]]:
        """`(function, names of its custom calls)`, deserialized.

        Raises:
          PlanFileError: This version of JAX cannot read it.
        """
        try:
            function = export.deserialize(bytearray(self.exported))
            return function, custom_calls_in(function.mlir_module_serialized)
        except Exception as error:
            raise PlanFileError(
                f"This JAX, {jax.__version__}, cannot read {self.source}: "
                f"{type(error).__name__}: {error}. JAX reads what versions some months "
                "older wrote, and newer ones by some weeks: save the plan again with a "
                "version near this one."
            ) from error


def _refusal(source: str) -> Callable:
    """A rule for `custom_vmap` and `custom_jvp` that raises `PlanFileError`.

    `source` is what the error calls the exported function, which has no such rule.
    """

    def refuse(*_):
        raise PlanFileError(
            f"{source} is compiled: it can be run, but neither differentiated nor "
            "vmapped. Plan jax.grad(f) or jax.vmap(f) where the program f is, and save "
            "that."
        )

    return refuse


@dataclass(frozen=True)
class ExportedStage:
    """The exported functions of one stage, with what they need.

    Attributes:
      per_group: The work of the server, or of one group.
      batched: The work of many groups; None for a server stage.
      sequential: Whether the groups of a batch work one after another.
      text: The jaxpr of `per_group`, for people.
      consts: Large arrays that the functions take before the inputs; random keys as
        their key data.
      custom_calls: Names of the code outside StableHLO that the functions call.
      origin: The versions and platforms of the export, as in the manifest.
    """

    per_group: ExportedFunction
    batched: ExportedFunction | None
    sequential: bool
    text: str
    consts: tuple[np.ndarray, ...]
    custom_calls: tuple[str, ...]
    origin: dict[str, Any]


def run_batched(stage: Stage, kept: Sequence[Value], mask, groups, inputs):
    """Run the batched function of an exported local stage on b groups.

    Args:
      stage: The stage.
      kept: The outputs of the stage that the function returns as slices.
      mask: Which of the groups count in reductions, bool `[b]`.
      groups: The group indices, int32 `[b]`.
      inputs: The inputs of the stage, in order; of partitioned ones slices `[b, ...]`.

    Returns:
      `(partials, slices)`: a partial reduction for each reduction of the round but
      gathers, and the groups' slices `[b, ...]` of each output in `kept`.
    """
    exported = stage.exported
    raw = map(to_raw, inputs)
    outs = exported.batched.call(*exported.consts, mask, groups, *raw)
    count = len(outs) - len(kept)
    arrays = [from_raw(y, v.dtype) for y, v in zip(outs[count:], kept, strict=True)]
    return outs[:count], arrays
