"""From a Python function on pytrees to a bound `map_fn` equation.

The per-group trace is cached where that is safe, so that an eager program whose body
defines its mapped function anew at each call compiles nothing the second time. The
key is the function's code together with everything that the code can see: closed-over
values, defaults and referenced globals. If any of these is not an immutable value, a
part of a numerical library, or again such a function (arrays, tracers, objects, users'
modules and classes), there is no key and the function is traced afresh.
"""

import dis
import functools
import types
from collections.abc import Callable
from typing import Any

import jax

from drjax import _compat
from drjax._errors import DrjaxError, MeshError
from drjax._functions import check_accepts, check_plain_function, function_name
from drjax._map import map_fn_p, trace_group
from drjax._partition import Partition
from drjax._primitives import broadcast_p
from drjax._sharding import as_operand, has_explicit_axes, layout
from drjax._trees import as_array

_ATOMS = (type(None), bool, int, float, complex, str, bytes)
_IMPORT = dis.opmap["IMPORT_NAME"]
_MAX_DEPTH = 4


class _Uncacheable(Exception):
    pass


def call_mapped(fn: Callable, leaves, tree, *, partition: Partition, mesh: Any):
    """Bind `map_fn` for `fn(*tree)` on checked, partitioned leaves."""
    where = layout(partition, mesh)
    leaves = [as_operand(x, where, True) for x in leaves]
    avals = tuple(_compat.typeof(x) for x in leaves)
    name = function_name(fn)
    try:
        key = (_code_key(fn, 0), tree, avals, where)
    except _Uncacheable:
        key = None
    found = None if key is None else _traces.get(key)
    if found is None:
        found = _trace(fn, tree, avals, where, name)
        if key is not None and not found[2]:
            _traces.put(key, found)
    jaxpr, out_tree, consts = found
    consts = [broadcast_p.bind(c, partition=partition, mesh=mesh) for c in consts]
    outs = map_fn_p.bind(
        *consts, *leaves, jaxpr=jaxpr, partition=partition, mesh=mesh, name=name
    )
    return out_tree.unflatten(outs)


_traces = _compat.TraceCache(maxsize=1024)


def _trace(fn, tree, avals, where, name):
    out_tree = None

    def flat_fn(*leaves):
        nonlocal out_tree
        out = fn(*tree.unflatten(leaves))
        paths, out_tree = jax.tree_util.tree_flatten_with_path(out)
        what, fix = f"the result of {name}", "Return arrays, numbers or None."
        return [as_array("map_fn", what, *found, fix) for found in paths]

    check_plain_function("drjax.map_fn", fn)
    try:
        jaxpr, consts = trace_group(flat_fn, avals, where, name)
    except DrjaxError:
        raise
    except (NameError, NotImplementedError, TypeError, ValueError) as error:
        if isinstance(error, NameError) and _names_own_axis(str(error), where):
            raise _collective_error(where, name) from error
        if has_explicit_axes(where.mesh) and _is_closure_error(str(error)):
            raise _closure_error(where, name) from error
        if isinstance(error, TypeError):
            check_accepts(fn, tree.unflatten(avals))
        raise
    if _compat.collective_axes(jaxpr) & set(where.partition.mesh_axes):
        raise _collective_error(where, name)
    return jaxpr, out_tree, consts


def _is_closure_error(text: str) -> bool:
    return "Closing over inputs to shard_map" in text or "context mesh" in text


def _closure_error(where, name):
    return MeshError(
        f"The function {name} given to drjax.map_fn closes over an array of a mesh "
        f"with Explicit axes {where.mesh.axis_names}; JAX cannot do that in code that "
        "is manual over the partition's axes. Pass the array as an argument: "
        f"drjax.map_fn({name}, (drjax.broadcast(params), x))."
    )


def _names_own_axis(text: str, where) -> bool:
    """Whether JAX complains about an unbound axis, and it is the partition's own."""
    return any(
        f"unbound axis name: {axis}." in text
        for axis in (where.partition.name, *where.partition.mesh_axes)
    )


def _collective_error(where, name):
    return MeshError(
        f"The function {name} given to drjax.map_fn uses a collective over the axis of "
        f"partition {where.partition} itself, {where.partition.mesh_axes}; it sees "
        "one group only. Return the value and combine it outside with "
        "drjax.reduce_sum, drjax.reduce_max or drjax.gather; for the group's number "
        "use drjax.partition_index()."
    )


# ---------------------------------------------------------------------------------
# Keys for functions


def _code_key(value: Any, depth: int):
    """A hashable that determines what tracing `value` does, or raise _Uncacheable."""
    if isinstance(value, _ATOMS):
        return (type(value), repr(value) if isinstance(value, float) else value)
    if depth > _MAX_DEPTH:
        raise _Uncacheable
    if isinstance(value, tuple) and type(value) is tuple:
        return tuple(_code_key(v, depth + 1) for v in value)
    if _is_library_object(value):
        return value
    if not isinstance(value, types.FunctionType):
        raise _Uncacheable
    try:
        cells = tuple(c.cell_contents for c in value.__closure__ or ())
    except ValueError:  # a cell that is not filled yet
        raise _Uncacheable from None
    defaults = (value.__defaults__ or (), tuple((value.__kwdefaults__ or {}).items()))
    names = _global_names(value.__code__)
    if names is None:
        raise _Uncacheable
    seen = {n: value.__globals__[n] for n in names if n in value.__globals__}
    if any(v is value for v in (*cells, *seen.values())):  # recursive
        raise _Uncacheable
    return (
        value.__code__,
        _code_key(cells, depth),
        _code_key(defaults, depth),
        tuple((n, _code_key(v, depth + 1)) for n, v in seen.items()),
    )


def _is_library_object(value: Any) -> bool:
    """Whether `value` is a module, type or function that does not change."""
    if isinstance(value, types.ModuleType):
        return _compat.is_library(value.__name__)
    if isinstance(value, type):
        return _compat.is_library(value.__module__)
    if isinstance(value, types.BuiltinFunctionType):  # a method of an object changes
        owner = value.__self__
        return isinstance(owner, types.ModuleType) and _is_library_object(owner)
    return _compat.is_library_function(value)


@functools.lru_cache(maxsize=4096)
def _global_names(code: types.CodeType) -> tuple[str, ...] | None:
    """Names that a code object may look up as globals; None if it imports modules."""
    if _IMPORT in code.co_code[::2]:
        return None
    found = set(code.co_names)
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            inner = _global_names(const)
            if inner is None:
                return None
            found.update(inner)
    return tuple(sorted(found))
