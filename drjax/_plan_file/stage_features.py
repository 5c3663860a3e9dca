"""What a stage needs of the file and of the process that loads it.

Input: the jaxpr of a stage. Output: `StageFeatures`: whether it has 64-bit values,
which random keys, and whether its groups must run one after another. Callbacks, which
no file can hold, are an error.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from drjax import _compat
from drjax._errors import PlanFileError
from drjax._jaxprs.prng_keys import is_key, key_impl
from drjax._jaxprs.provenance import source_line

WIDE = {np.dtype(t) for t in ("int64", "uint64", "float64", "complex128")}
_SAME_IN_BATCHES = {"threefry2x32"}


@dataclass(frozen=True)
class StageFeatures:
    """What one stage, or several together, need of the process that loads them.

    Attributes:
      wide: Whether there are 64-bit values.
      keys: The names of the implementations of random keys.
      sequential: Whether the groups of a batch must run one after another, as the
        stage draws random bits that would be others in a batch.
    """

    wide: bool
    keys: frozenset[str]
    sequential: bool


def features_of(jaxpr: Any, location: str) -> StageFeatures:
    """The features of a stage.

    Args:
      jaxpr: The jaxpr of the stage.
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
    """The features of several stages together: each that some stage has."""
    features = list(features)
    keys = frozenset(key for one in features for key in one.keys)
    return StageFeatures(
        any(c.wide for c in features), keys, any(c.sequential for c in features)
    )


def _inside(jaxpr: Any) -> Iterator[Any]:
    """All equations and variables of a jaxpr and of the jaxprs in its equations."""
    raw = _compat.open_jaxpr(jaxpr)
    yield from (*raw.constvars, *raw.invars)
    for eqn in raw.eqns:
        yield eqn
        yield from eqn.outvars
        for inner in _compat.jaxprs_in(eqn.params):
            yield from _inside(inner)


def _check(eqn: Any, location: str) -> None:
    """Check that an equation does not call back into Python.



    `location` says round and stage, for errors.

    Raises:
      PlanFileError: The equation does.
    """
    name = eqn.primitive.name
    if "callback" in name or name == "debug_print":
        raise PlanFileError(
            f"{location} calls back into Python: {name} at {source_line(eqn)}. A "
            "plan file runs without its source: take the call out, or return what it "
            "needs as a result."
        )
