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
from drjax._compat.types import ClosedJaxpr, Eqn, OpenJaxpr
from drjax._errors import PlanFileError
from drjax._jaxprs.prng_keys import is_key, key_impl
from drjax._jaxprs.provenance import source_line

WIDE = {np.dtype(t) for t in ("int64", "uint64", "float64", "complex128")}
# Under vmap, keys of other implementations may draw bits that depend on the batch.
_SAME_IN_BATCHES = {"threefry2x32"}


@dataclass(frozen=True)
class StageFeatures:
    """What one stage, or several together, need of the process that loads them.

    Attributes:
      wide: Whether there are 64-bit values.
      keys: The names of the implementations of random keys, such as `threefry2x32`.
      sequential: Whether the groups of a batch must run one after another, because a
        batched stage would draw other random bits, or because it could be exported for
        a symbolic number of groups, but not run.
    """

    wide: bool
    keys: frozenset[str]
    sequential: bool


def features_of(jaxpr: ClosedJaxpr | OpenJaxpr, location: str) -> StageFeatures:
    """Find in the jaxpr of a stage what it needs of the process that loads it.

    `location` is its round and kind, for errors: `round 1, groups`. `PlanFileError`:
    the stage calls back into Python.
    """
    dtypes, names, changes_size = set(), set(), False
    for x in _inside(jaxpr):
        if hasattr(x, "primitive"):
            _check(x, location)
            names.add(x.primitive.name)
            changes_size |= _changes_item_size(x)
        else:
            dtypes.add(getattr(x.aval, "dtype", None))
    dtypes.discard(None)
    keys = frozenset(key_impl(dtype) for dtype in dtypes if is_key(dtype))
    # Raw rbg keys are unsigned integers: only the primitive shows that bits are drawn.
    draws_otherwise = bool(keys - _SAME_IN_BATCHES) or "rng_bit_generator" in names
    return StageFeatures(bool(dtypes & WIDE), keys, draws_otherwise or changes_size)


def merge(features: Iterable[StageFeatures]) -> StageFeatures:
    """Combine the features of stages: flags by `or`, names of keys by union."""
    features = list(features)
    keys = frozenset(key for one in features for key in one.keys)
    return StageFeatures(
        any(c.wide for c in features), keys, any(c.sequential for c in features)
    )


def _inside(jaxpr: ClosedJaxpr | OpenJaxpr) -> Iterator[Any]:
    """Yield all equations and variables of a jaxpr, and of those inside it.

    The variables are the `constvars` and `invars` of each jaxpr and the `outvars` of
    each equation. They come mixed with the equations: an equation first, then its
    results, then its inner jaxprs.
    """
    raw = _compat.open_jaxpr(jaxpr)
    yield from (*raw.constvars, *raw.invars)
    for eqn in raw.eqns:
        yield eqn
        yield from eqn.outvars
        for inner in _compat.jaxprs_in(eqn.params):
            yield from _inside(inner)


def _changes_item_size(eqn: Eqn) -> bool:
    """Return whether an equation is a bitcast to a dtype of another item size.

    Its result has one more or one less dimension. StableHLO cannot refine the shape of
    such a result from a symbolic batch dimension.
    """
    if eqn.primitive.name != "bitcast_convert_type":
        return False
    # A dimension is added or removed for the ratio of the sizes, which may be in bits.
    return len(eqn.invars[0].aval.shape) != len(eqn.outvars[0].aval.shape)


def _check(eqn: Eqn, location: str) -> None:
    """Raise `PlanFileError` if an equation calls back into Python.

    A file cannot hold the callback.
    """
    name = eqn.primitive.name
    # `jax.debug.print` has a primitive of its own, which is no callback by name.
    if "callback" in name or name == "debug_print":
        raise PlanFileError(
            f"{location} calls back into Python: {name} at {source_line(eqn)}. A "
            "plan file runs without its source: take the call out, or return what it "
            "needs as a result."
        )
