"""A stage in the forms in which a file holds it: functions exported by JAX.

    server stage    one(*consts, *inputs) -> outputs
    local stage     one(*consts, group, *inputs) -> outputs
                    batch(*consts, mask, groups, *inputs) -> (*partials, *rows)

`one` is the work of one group, int32 `[]`. `batch` is that of b groups, int32 `[b]`,
for any b: of partitioned inputs it takes a row for each, of global ones the value. Of
those groups whose `mask`, bool `[b]`, is true it gives the partial sum, maximum or
minimum for each reduction of the round but a gather, and it gives all rows that are
needed later. 16-bit floats are added up in float32. PRNG keys pass as raw data.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from drjax._errors import PlanFileError
from drjax.plan import Stage, Value

PLATFORMS = ("cpu", "cuda", "tpu")


@dataclass(frozen=True)
class Form:
    """One exported function.

    Attributes:
      exported: What `jax.export.Exported.serialize` gave.
      stablehlo: The StableHLO in it, as a portable artifact.
      source: Where it is from, for errors.
    """

    exported: bytes
    stablehlo: bytes
    source: str

    @functools.cached_property
    def function(self) -> Any:
        """The `jax.export.Exported`.

        Raises:
          PlanFileError: This version of JAX cannot read it.
        """
        try:
            found = export.deserialize(bytearray(self.exported))
            found.mlir_module()  # of a version of StableHLO that is understood
        except Exception as error:
            raise PlanFileError(
                f"This JAX, {jax.__version__}, cannot read {self.source}: "
                f"{type(error).__name__}: {error}. JAX reads what versions some months "
                "older wrote, and newer ones by some weeks: save the plan anew with a "
                "version near this one."
            ) from error
        return found


@dataclass(frozen=True)
class Forms:
    """What a file holds of one stage.

    Attributes:
      one: The work of the server, or of one group.
      batch: Of a local stage, the work of many groups.
      text: The jaxpr of `one`, for people.
      consts: Large arrays that the stage takes besides its inputs; raw data of keys.
      custom_calls: Names of the code outside StableHLO that it calls.
      origin: Where and how it was exported, as the manifest tells it.
    """

    one: Form
    batch: Form | None
    text: str
    consts: tuple[np.ndarray, ...]
    custom_calls: tuple[str, ...]
    origin: dict[str, Any]


def run_batch(stage: Stage, rows: Sequence[Value], mask, groups, inputs):
    """The batch form of a stage from a file: `(partial results, rows)`.

    Args:
      rows: The outputs of the stage that it gives as rows.
      mask: Which groups count, bool `[b]`.
      groups: Their numbers, int32 `[b]`.
      inputs: Those of the stage; a row for each group of partitioned ones.
    """
    forms = stage.forms
    raw = map(to_raw, inputs)
    outs = forms.batch.function.call(*forms.consts, mask, groups, *raw)
    count = len(outs) - len(rows)
    found = [from_raw(y, v.dtype) for y, v in zip(outs[count:], rows, strict=True)]
    return outs[:count], found


# ---------------------------------------------------------------------------------
# Keys


def is_key(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


@functools.lru_cache(maxsize=64)
def key_impl(dtype: Any) -> str:
    """The name of the implementation of keys of this dtype."""
    found: list[str] = []
    note = lambda key: found.append(str(jax.random.key_impl(key)))
    jax.eval_shape(note, jax.ShapeDtypeStruct((), dtype))
    return found[0]


def key_dtype(impl: str) -> Any:
    return jax.eval_shape(lambda: jax.random.key(0, impl=impl)).dtype


def to_raw(x: Any) -> Any:
    return jax.random.key_data(x) if is_key(x.dtype) else x


def from_raw(x: Any, dtype: Any) -> Any:
    if is_key(dtype):
        return jax.random.wrap_key_data(x, impl=key_impl(dtype))
    return x


def raw_type(value: Value) -> jax.ShapeDtypeStruct:
    """The type under which a value passes into and out of a form."""
    return jax.eval_shape(to_raw, jax.ShapeDtypeStruct(value.shape, value.dtype))
