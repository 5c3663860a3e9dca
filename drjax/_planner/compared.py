"""Whether a program may tell two roundings of a value apart.

Input: the equations of an inlined jaxpr, and one of their variables. Output: whether
what is computed from it are continuous functions only, so that another rounding of it
changes results as little as any rounding does.

Invariants: comparisons, indices, integers and equations that are not known here may
tell them apart; so may loops, whose bodies are not looked into.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp

from drjax import _compat
from drjax._compat.jax_types import Literal
from drjax._compat.types import Atom, Eqn, Var
from drjax._jaxprs.walk import CALLS
from drjax._primitives.map_fn import ZERO_FOR_ZEROS
from drjax.primitives import broadcast_p, map_fn_p, reduce_mean_p, reduce_sum_p

_CONTINUOUS = frozenset(
    """add add_any asinh atan atan2 broadcast_in_dim concatenate conv_general_dilated
    convert_element_type copy copy_p cos cosh cumsum div dot_general
    drjax_place_in_segment erf exp exp2 expand_dims expm1 integer_pow log log1p
    logistic mul neg one_minus_square pad pow reduce_sum reshape rev rsqrt sin sinh
    slice split sqrt square squeeze stack stop_gradient sub tan tanh transpose
    unstack""".split()
)
_BLOCKS = {broadcast_p, reduce_mean_p, reduce_sum_p}


def is_only_added(eqns: Sequence[Eqn], var: Var) -> bool:
    """Whether only continuous functions of a variable are computed."""
    return _reached(eqns, {var}) is not None


def _reached(eqns: Iterable[Eqn], start: set[Any]) -> set[Any] | None:
    """Find what depends on some variables; None: not only by continuous functions."""
    reached: set[Any] = {*start}
    for eqn in eqns:
        hit = [not isinstance(v, Literal) and v in reached for v in eqn.invars]
        if not any(hit):
            continue
        outs = _results(eqn, hit)
        if outs is None:
            return None
        reached.update(outs)
    return reached


def _results(eqn: Eqn, hit: list[bool]) -> list[Atom] | None:
    name = eqn.primitive.name
    if eqn.params.get("name") == ZERO_FOR_ZEROS:
        # It compares with 0 what would give a NaN.
        return [*eqn.outvars]
    if name in CALLS or eqn.primitive is map_fn_p:
        raw = _compat.open_jaxpr(eqn.params[CALLS.get(name, "jaxpr")])
        more = len(raw.invars) - len(hit)
        inputs = zip(raw.invars, [False] * more + hit, strict=True)
        reached = _reached(raw.eqns, {v for v, h in inputs if h})
        if reached is None:
            return None
        pairs = zip(eqn.outvars, raw.outvars, strict=True)
        return [v for v, x in pairs if not isinstance(x, Literal) and x in reached]
    continuous = name in _CONTINUOUS or eqn.primitive in _BLOCKS
    # A predicate, or a segment, is an integer.
    continuous |= name == "select_n" and not hit[0]
    is_real = all(jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in eqn.outvars)
    return [*eqn.outvars] if continuous and is_real else None
