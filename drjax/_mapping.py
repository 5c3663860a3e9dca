"""From a Python function on pytrees to a bound `map_fn` equation.

The per-group trace is cached where that is safe, so that an eager program whose body
defines its mapped function anew at each call compiles nothing the second time. The
key is the function's code together with everything that the code can see: closed-over
values, defaults and referenced globals. If any of these is not an immutable value, a
module or again such a function (arrays, tracers, objects), there is no key and the
function is traced afresh.
"""

import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from drjax import _compat
from drjax._errors import DrjaxError, MeshError
from drjax._map import map_fn_p, trace_group
from drjax._partition import Partition
from drjax._primitives import broadcast_p
from drjax._sharding import as_operand, has_explicit_axes, layout
from drjax._trees import as_array

_ATOMS = (type(None), bool, int, float, complex, str, bytes, types.ModuleType, type)
_MAX_DEPTH = 4


class _Uncacheable(Exception):
    pass


def call_mapped(fn: Callable, leaves, tree, *, partition: Partition, mesh: Any):
    """Bind `map_fn` for `fn(*tree)` on checked, partitioned leaves."""
    where = layout(partition, mesh)
    leaves = [as_operand(x, where, True) for x in leaves]
    avals = tuple(_compat.typeof(x) for x in leaves)
    name = getattr(fn, "__name__", type(fn).__name__)
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
        return [as_array("map_fn", f"the result of {name} at ", *p) for p in paths]

    try:
        jaxpr, consts = trace_group(flat_fn, avals, where, name)
    except DrjaxError:
        raise
    except NameError as error:
        raise _explain_unbound_axis(error, where, name) or error from error
    except (NotImplementedError, ValueError, TypeError) as error:
        if has_explicit_axes(where.mesh) and "mesh" in str(error):
            raise _explicit_closure_error(where, name) from error
        raise
    if has_explicit_axes(where.mesh) and any(
        getattr(jnp.asarray(c).sharding, "mesh", None) is not None for c in consts
    ):
        pass
    return jaxpr, out_tree, consts


def _explicit_closure_error(where, name):
    return MeshError(
        f"The function {name} given to drjax.map_fn cannot be traced for one group: on "
        f"a mesh with Explicit axes {where.mesh.axis_names} JAX cannot close over "
        "arrays in code that is manual over the partition's axes. Pass them as "
        f"arguments: drjax.map_fn({name}, (drjax.broadcast(params), x)). If it closes "
        "over nothing, see JAX's error above."
    )


def _explain_unbound_axis(error: NameError, where, name) -> Exception | None:
    text = str(error)
    for axis in (where.partition.name, *where.partition.mesh_axes):
        if "unbound axis name" in text and axis in text:
            return MeshError(
                f"The function {name} given to drjax.map_fn uses a collective over "
                f"{axis!r}, the axis of partition {where.partition} itself; it sees "
                "one group only. Return the value and combine it outside with "
                "drjax.reduce_sum, drjax.reduce_max or drjax.gather; for the group's "
                "number use drjax.partition_index()."
            )
    return None


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
    if isinstance(value, types.BuiltinFunctionType):
        return value
    if _compat.is_library_function(value):
        return value
    if not isinstance(value, types.FunctionType):
        raise _Uncacheable
    try:
        cells = tuple(c.cell_contents for c in value.__closure__ or ())
    except ValueError:  # a cell that is not filled yet
        raise _Uncacheable from None
    defaults = (value.__defaults__ or (), tuple((value.__kwdefaults__ or {}).items()))
    seen = {n: value.__globals__[n] for n in _names(value.__code__, value.__globals__)}
    if value in cells or value in seen.values():  # recursive
        raise _Uncacheable
    return (
        value.__code__,
        _code_key(cells, depth),
        _code_key(defaults, depth),
        tuple((n, _code_key(v, depth + 1)) for n, v in seen.items()),
    )


def _names(code: types.CodeType, namespace: dict[str, Any]) -> list[str]:
    """The globals that a code object and the functions inside it refer to."""
    found = [n for n in code.co_names if n in namespace]
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            found += _names(const, namespace)
    return sorted(set(found))
