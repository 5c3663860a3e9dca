"""Structural hashing of jaxprs, so that alpha-equivalent ones share one executable.

An eager call whose mapped function closes over arrays is traced at each call: that is
never stale, and cheap. It must not be compiled at each call.

Input: a jaxpr. Output: `structure`, a hashable in which variables are numbered in the
order of their definitions; and `cache_by_params`, a cache with such keys.

Invariants: jaxprs with equal structures compute the same. Names, source lines, and the
derivative rules of `custom_jvp` and `custom_vjp` are not part of a structure, as an
executable only ever runs the primal computation. Literals compare by type and bits.
Sharp edges: a jaxpr with constants, or with an array or another unhashable value in its
parameters, has no structure; it is compiled once for each jaxpr object.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal

from drjax import _compat

_RULES_DO_NOT_COUNT = ("custom_jvp_call", "custom_vjp_call")
_NAMES = ("name", "debug_info")


class _Unknown(Exception):
    """A value that has no structural key."""

    pass


def structure(jaxpr) -> Any | None:
    """A hashable that is equal for jaxprs that differ in names of variables only.

    None if the jaxpr has constants, or parameters that are JAX arrays or unhashable.
    """
    try:
        key = _jaxpr_key(jaxpr)
        hash(key)
    except (_Unknown, TypeError):
        return None
    return key


def _jaxpr_key(jaxpr):
    """A key, equal for alpha-equivalent jaxprs; raises `_Unknown` if there is none.

    Nested tuples: the types of inputs; for each equation its primitive, operands,
    types of results, parameters and context; and the results. A variable is its number
    in the order of definitions.
    """
    # To compare constants would read them from the device, at every dispatch.
    if _compat.jaxpr_consts(jaxpr):
        raise _Unknown
    jaxpr = _compat.open_jaxpr(jaxpr)
    numbers: dict[Any, int] = {}
    for var in (*jaxpr.constvars, *jaxpr.invars):
        numbers[var] = len(numbers)

    def atom(x):
        if isinstance(x, Literal):
            return (_value_key(x.val), x.aval)
        return numbers[x]

    eqns = []
    for eqn in jaxpr.eqns:
        ins = tuple(atom(x) for x in eqn.invars)
        for var in eqn.outvars:
            numbers[var] = len(numbers)
        outs = tuple(var.aval for var in eqn.outvars)
        has_rules = eqn.primitive.name in _RULES_DO_NOT_COUNT
        params = tuple(
            (name, _value_key(value))
            for name, value in sorted(eqn.params.items())
            if name not in _NAMES and not (has_rules and _is_rule(value))
        )
        # The context holds the mesh and the precision under which it was traced.
        eqns.append((eqn.primitive, ins, outs, params, eqn.ctx))
    avals = tuple(var.aval for var in (*jaxpr.constvars, *jaxpr.invars))
    return avals, tuple(eqns), tuple(atom(x) for x in jaxpr.outvars)


def _is_rule(value) -> bool:
    """Whether a parameter's value is a Python function, as derivative rules are."""
    return callable(value) and not isinstance(value, _compat.JAXPR_TYPES)


def _value_key(value):
    """A key for the value of a parameter or literal; `_Unknown` for a `jax.Array`.

    1, 1.0 and True have different keys, and so have 0.0 and -0.0.
    """
    if isinstance(value, _compat.JAXPR_TYPES):
        return _jaxpr_key(value)
    if isinstance(value, tuple | list):
        return (type(value), *(_value_key(v) for v in value))
    if isinstance(value, dict):
        return (dict, *((k, _value_key(v)) for k, v in value.items()))
    if isinstance(value, np.ndarray | np.generic):
        return (type(value), value.dtype, value.shape, value.tobytes())
    # repr distinguishes 0.0 from -0.0, and equals itself for NaN.
    if isinstance(value, float | complex):
        return (type(value), repr(value))
    if isinstance(value, jax.Array):
        raise _Unknown
    return (type(value), value)


class _ByStructure:
    """A cache key that holds a jaxpr, equal for jaxprs with the same structure.

    Args:
      key: What `structure` returned for the jaxpr.
      jaxpr: The jaxpr.
    """

    def __init__(self, key, jaxpr):
        self._key, self._hash, self.jaxpr = key, hash(key), jaxpr

    def __hash__(self):
        return self._hash

    def __eq__(self, other):
        return isinstance(other, _ByStructure) and self._key == other._key


def cache_by_params(make: Callable) -> Callable:
    """Cache the function `make` by its keywords; `jaxpr=` is compared by structure.

    There are three caches: for parameters without a jaxpr, for the identity of a jaxpr
    (a weak reference, the fast path), and for its structure. They are bounded. JAX's
    trace context is not in their keys, as `jax.jit` has it in its own.
    """

    @_compat.cache(max_size=512, trace_context_in_key=False)
    def by_structure(key, rest):
        return make(jaxpr=key.jaxpr, **dict(rest))

    @_compat.weakref_lru_cache(trace_context_in_key=False)
    def by_jaxpr(jaxpr, rest):
        # A copy: if the result held the key itself, its weak reference never died.
        key, copy = structure(jaxpr), jaxpr.replace()
        if key is None:
            return make(jaxpr=copy, **dict(rest))
        return by_structure(_ByStructure(key, copy), rest)

    @_compat.cache(trace_context_in_key=False)
    def by_value(rest):
        return make(**dict(rest))

    def cached(jaxpr=None, **params):
        rest = tuple(params.items())
        return by_value(rest) if jaxpr is None else by_jaxpr(jaxpr, rest)

    return cached
