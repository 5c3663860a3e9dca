"""Jaxprs compared by what they compute, so that equal ones share one executable.

An eager call whose mapped function closes over arrays is traced afresh each time
(that is never stale, and cheap), but must not be compiled afresh. `structure` turns a
jaxpr into a hashable in which variables are numbered; two jaxprs with equal
structures compute the same. Names, sources and the derivative rules of `custom_jvp`
and `custom_vjp` do not count: an executable only ever runs the primal computation.
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
    pass


def structure(jaxpr) -> Any | None:
    """A hashable that is equal for jaxprs that compute the same, or None."""
    try:
        key = _jaxpr_key(jaxpr)
        hash(key)
    except (_Unknown, TypeError):
        return None
    return key


def _jaxpr_key(jaxpr):
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
        eqns.append((eqn.primitive, ins, outs, params, eqn.ctx))
    avals = tuple(var.aval for var in (*jaxpr.constvars, *jaxpr.invars))
    return avals, tuple(eqns), tuple(atom(x) for x in jaxpr.outvars)


def _is_rule(value) -> bool:
    return callable(value) and not isinstance(value, _compat.JAXPR_TYPES)


def _value_key(value):
    """A key for a parameter; 1, 1.0 and True differ, and so do 0.0 and -0.0."""
    if isinstance(value, _compat.JAXPR_TYPES):
        return _jaxpr_key(value)
    if isinstance(value, tuple | list):
        return (type(value), *(_value_key(v) for v in value))
    if isinstance(value, dict):
        return (dict, *((k, _value_key(v)) for k, v in value.items()))
    if isinstance(value, np.ndarray | np.generic):
        return (type(value), value.dtype, value.shape, value.tobytes())
    if isinstance(value, float | complex):
        return (type(value), repr(value))
    if isinstance(value, jax.Array):
        raise _Unknown
    return (type(value), value)


class _ByStructure:
    """A jaxpr that is equal to another one with the same structure."""

    def __init__(self, key, jaxpr):
        self._key, self._hash, self.jaxpr = key, hash(key), jaxpr

    def __hash__(self):
        return self._hash

    def __eq__(self, other):
        return isinstance(other, _ByStructure) and self._key == other._key


def cache_by_params(make: Callable) -> Callable:
    """Cache `make(**params)`; jaxprs among the parameters go by their structure.

    The caches are bounded, and an entry never keeps alive the jaxpr it was made for.
    """

    @_compat.cache(max_size=512, trace_context_in_key=False)
    def by_structure(found, rest):
        return make(jaxpr=found.jaxpr, **dict(rest))

    @_compat.weakref_lru_cache(trace_context_in_key=False)
    def by_jaxpr(jaxpr, rest):
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
