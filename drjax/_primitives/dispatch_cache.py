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

from collections.abc import Callable, Hashable
from typing import Any, TypeAlias

import jax
import numpy as np

from drjax import _compat
from drjax._compat.jax_types import Literal
from drjax._compat.types import Atom, ClosedJaxpr, Eqn, OpenJaxpr
from drjax._jaxprs.prng_keys import to_raw

_RULES_DO_NOT_COUNT = ("custom_jvp_call", "custom_vjp_call")
_NAMES = ("name", "debug_info")
Rest: TypeAlias = tuple[tuple[str, Hashable], ...]  # the keywords but `jaxpr`
More: TypeAlias = Callable[[Eqn], tuple]


def _nothing(eqn: Eqn) -> tuple:
    return ()


class _Unknown(Exception):
    """Raised if a jaxpr has no structural key: it holds a constant or a JAX array."""

    pass


def structure(jaxpr: ClosedJaxpr | OpenJaxpr) -> Hashable | None:
    """Compute a structural (alpha-equivalence) key of a jaxpr, closed or open.

    Jaxprs with equal keys compute the same, so that they can share an executable: they
    differ only in the names of variables and functions, source lines, and the
    derivative rules of `custom_jvp` and `custom_vjp`. None if the jaxpr has constants,
    or parameters of equations that are JAX arrays or unhashable.
    """
    return _hashable(lambda: _jaxpr_key(jaxpr))


def code_key(jaxpr: ClosedJaxpr) -> Hashable | None:
    """Compute a key of a jaxpr by which it is lowered to the same code, but for lines.

    Names of functions and scopes, and the values of constants, are part of it. None if
    it has no key, as for `structure`.
    """

    def key() -> tuple:
        # A constant that is a tracer has no value.
        consts = [np.asarray(to_raw(x)) for x in _compat.jaxpr_consts(jaxpr)]
        keys = [value_key(x, _jaxpr_key) for x in consts]
        return _open_jaxpr_key(_compat.open_jaxpr(jaxpr), _names_of), *keys

    return _hashable(key)


def shared_jaxpr(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """Return an earlier jaxpr that is the same, lines of source included, if there is.

    A function that is traced again, as in an unrolled loop or at each eager call, so
    has one jaxpr, by whose identity JAX caches derivatives, batches and lowered code.
    A jaxpr with a rule of derivatives is no other's: rules may close over anything.
    """
    key = _hashable(lambda: _jaxpr_key(jaxpr, _source_without_rules))
    return jaxpr if key is None else _first(_ByStructure(key, jaxpr))


def same_source(jaxpr: ClosedJaxpr) -> Hashable | None:
    """Compute a key as `structure` does, of which lines of source are a part."""
    return _hashable(lambda: _jaxpr_key(jaxpr, _source_of))


def _names_of(eqn: Eqn) -> tuple:
    return str(eqn.params.get("name")), str(eqn.source_info.name_stack)


def _source_of(eqn: Eqn) -> tuple:
    # With all frames, so that calls from two lines are two.
    return *_names_of(eqn), eqn.source_info.traceback


def _source_without_rules(eqn: Eqn) -> tuple:
    if any(_is_rule(value) for value in eqn.params.values()):
        raise _Unknown
    return _source_of(eqn)


def _hashable(make: Callable[[], Hashable]) -> Hashable | None:
    """Return a key that `make` makes; None if there is none, or it is unhashable."""
    try:
        return _Hashed(make())
    except (_Unknown, TypeError):
        return None


def _jaxpr_key(jaxpr: ClosedJaxpr | OpenJaxpr, more: More = _nothing) -> tuple:
    """Compute the structural key of a jaxpr; raise `_Unknown` if it has constants."""
    # To compare constants would read them from the device, at every dispatch.
    if _compat.jaxpr_consts(jaxpr):
        raise _Unknown
    return _open_jaxpr_key(_compat.open_jaxpr(jaxpr), more)


class _Hashed:
    """A key that is hashed once, as jaxprs in equations are in the keys of many."""

    __slots__ = ("_hash", "_key")

    def __init__(self, key: Hashable) -> None:
        self._key, self._hash = key, hash(key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other or not isinstance(other, _Hashed):
            return self is other
        return self._hash == other._hash and self._key == other._key


@_compat.weakref_lru_cache(trace_context_in_key=False)
def _inner_key(jaxpr: ClosedJaxpr | OpenJaxpr, more: More) -> _Hashed:
    return _Hashed(_jaxpr_key(jaxpr, more))


def _open_jaxpr_key(jaxpr: OpenJaxpr, more: More) -> tuple:
    """Compute the structural key of a jaxpr, equal for alpha-equivalent jaxprs.

    It has the types of inputs; for each equation its primitive, operands, types of
    results, parameters and context, and what `more` returns; and the results. A
    variable is represented by its number in the order of definitions. The key is
    unhashable if a parameter is. Raises `_Unknown` if a parameter is a JAX array, or a
    jaxpr with constants.
    """
    inner_key = lambda inner: _inner_key(inner, more)
    numbers: dict[Any, int] = {}
    for var in (*jaxpr.constvars, *jaxpr.invars):
        numbers[var] = len(numbers)

    def atom(x: Atom) -> int | tuple:
        if isinstance(x, Literal):
            return (value_key(x.val, inner_key), x.aval)
        return numbers[x]

    eqns = []
    for eqn in jaxpr.eqns:
        ins = tuple(atom(x) for x in eqn.invars)
        for var in eqn.outvars:
            numbers[var] = len(numbers)
        outs = tuple(var.aval for var in eqn.outvars)
        params = parameter_keys(eqn, inner_key)
        # The context holds the mesh and the precision under which it was traced.
        eqns.append((eqn.primitive, ins, outs, params, eqn.ctx, *more(eqn)))
    avals = tuple(var.aval for var in (*jaxpr.constvars, *jaxpr.invars))
    return avals, tuple(eqns), tuple(atom(x) for x in jaxpr.outvars)


def parameter_keys(
    eqn: Eqn, jaxpr_key: Callable[..., Any]
) -> tuple[tuple[str, Any], ...]:
    """Compute keys of the parameters of an equation, by which equations are compared.

    The parameters `name` and `debug_info`, and the derivative rules of `custom_jvp` and
    `custom_vjp` are left out, as they do not change what the equation computes. Each
    other parameter has a pair `(name, key)`, sorted by name, with its `value_key`.
    Equal keys mean equal values, provided that those of `jaxpr_key` do.
    """
    has_rules = eqn.primitive.name in _RULES_DO_NOT_COUNT
    return tuple(
        (name, value_key(value, jaxpr_key))
        for name, value in sorted(eqn.params.items())
        if name not in _NAMES and not (has_rules and _is_rule(value))
    )


def _is_rule(value: object) -> bool:
    """Whether `value` is a Python callable or JAX's wrapper of one, not a jaxpr.

    It distinguishes the derivative rules among the parameters of a `custom_jvp_call` or
    `custom_vjp_call` equation.
    """
    is_function = callable(value) or hasattr(value, "call_wrapped")
    return is_function and not isinstance(value, _compat.JAXPR_TYPES)


def value_key(value: object, jaxpr_key: Callable[..., Any]) -> Any:
    """Compute a key for the value of an equation's parameter, or of a literal.

    Values with equal keys have the same type and are equal: 1, 1.0 and True have
    different keys. Python's floats and complex numbers are compared by their `repr`,
    and NumPy's scalars and arrays by dtype, shape and bytes: 0.0 and -0.0 have
    different keys. The elements of a tuple, list or dict get keys of their own, and a
    jaxpr the one that `jaxpr_key` returns. Any other object is compared by `==`; the
    key is unhashable if it is. Raises `_Unknown` for a `jax.Array`.
    """
    if isinstance(value, _compat.JAXPR_TYPES):
        return jaxpr_key(value)
    if isinstance(value, tuple | list):
        return (type(value), *(value_key(v, jaxpr_key) for v in value))
    if isinstance(value, dict):
        pairs = ((k, value_key(v, jaxpr_key)) for k, v in value.items())
        return (dict, *pairs)
    if isinstance(value, np.ndarray | np.generic):
        return (type(value), value.dtype, value.shape, value.tobytes())
    # repr distinguishes 0.0 from -0.0, and equals itself for NaN.
    if isinstance(value, float | complex):
        return (type(value), repr(value))
    if isinstance(value, jax.Array):
        raise _Unknown
    return (type(value), value)


class _ByStructure:
    """A cache key that holds a jaxpr, equal for jaxprs with the same structural key.

    `key` is what `structure(jaxpr)` returns; `==` and `hash` ignore the jaxpr itself.
    """

    def __init__(self, key: Hashable, jaxpr: ClosedJaxpr) -> None:
        self._key, self._hash, self.jaxpr = key, hash(key), jaxpr

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ByStructure) and self._key == other._key


@_compat.cache(max_size=512, trace_context_in_key=False)
def _first(key: _ByStructure) -> ClosedJaxpr:
    return key.jaxpr


def cache_by_params(make: Callable[..., Callable]) -> Callable[..., Callable]:
    """Cache a function's results by its keywords; `jaxpr=` is compared by structure.

    A jaxpr is looked up by its identity first (a weak reference, the fast path), and
    then by its structural key, which `structure` computes, so that a new trace of the
    same function finds the results of the old one. A jaxpr without such a key is looked
    up by identity only. The other keywords must be hashable, and in the same order. The
    caches are bounded. JAX's trace context is not in their keys: the results are jitted
    functions, and `jit` has it in its own cache keys.

    `make(**params)` returns a jitted function. Its keyword `jaxpr` is a copy of the
    jaxpr; it is left out if there is none.
    """

    @_compat.cache(max_size=512, trace_context_in_key=False)
    def by_structure(key: _ByStructure, rest: Rest) -> Callable:
        return make(jaxpr=key.jaxpr, **dict(rest))

    @_compat.weakref_lru_cache(trace_context_in_key=False)
    def by_jaxpr(jaxpr: ClosedJaxpr, rest: Rest) -> Callable:
        # A copy: if the result held the key itself, its weak reference never died.
        key, copy = structure(jaxpr), jaxpr.replace()
        if key is None:
            return make(jaxpr=copy, **dict(rest))
        return by_structure(_ByStructure(key, copy), rest)

    @_compat.cache(trace_context_in_key=False)
    def by_value(rest: Rest) -> Callable:
        return make(**dict(rest))

    def cached(jaxpr: ClosedJaxpr | None = None, **params: Any) -> Callable:
        rest = tuple(params.items())
        return by_value(rest) if jaxpr is None else by_jaxpr(jaxpr, rest)

    return cached
