"""From a Python function on pytrees to a bound `map_fn` equation.

Input: a function, and checked leaves `[n, *s]`. Output: its results, `[n, *t]`.

The function is traced at each call, as cheaply as `jax.make_jaxpr`, so that an eager
program never acts on a stale closure or global. If the jaxpr is the same as one before,
that one is bound (`_primitives/dispatch_cache.py`): executables and derivatives are
cached by it, so that nothing is compiled or linearized twice.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from drjax import _compat
from drjax._api.validate import (
    as_array,
    check_accepts,
    check_plain_function,
    function_name,
)
from drjax._compat.types import (
    Array,
    Aval,
    ClosedJaxpr,
    Mesh,
    OpenJaxpr,
    PartitionedArray,
    PyTree,
    PyTreeDef,
)
from drjax._context import name_in_program
from drjax._errors import DrjaxError, MeshError
from drjax._partition import Partition
from drjax._primitives.dispatch_cache import shared_jaxpr
from drjax._primitives.map_fn import broadcast_consts, map_fn_p, trace_group
from drjax._sharding.execute import as_operand
from drjax._sharding.group_mesh import explicit_inside
from drjax._sharding.layout import Layout, make_layout


def call_mapped(
    fn: Callable[..., PyTree],
    leaves: Sequence[PartitionedArray],
    tree: PyTreeDef,
    *,
    partition: Partition,
    mesh: Mesh | None,
) -> PyTree:
    """Trace a function of pytrees for one group, and bind `map_fn` for it.

    It is traced at each call. It takes pytrees of one group's slices as positional
    arguments; `tree` is the structure of their tuple. The arrays that it closes over
    are broadcast. The result has the structure of its result, with leaves `[n, *t]`.
    """
    layout = make_layout(partition, mesh)
    leaves = [as_operand(x, layout, True) for x in leaves]
    avals = tuple(_compat.typeof(x) for x in leaves)
    name = function_name(fn)
    jaxpr, out_tree, consts = _trace(fn, tree, avals, layout, name)
    jaxpr = shared_jaxpr(jaxpr)
    params = {"partition": partition, "mesh": mesh, "name": name_in_program(name)}
    operands = [*broadcast_consts(consts, **params), *leaves]
    outs = map_fn_p.bind(*operands, jaxpr=jaxpr, **params)
    # The results, too, are visible on the mesh: they may depend on no operand.
    return out_tree.unflatten([as_operand(y, layout, True) for y in outs])


_TUPLES = (
    "A plain tuple is unpacked into the arguments of the function; wrap it as "
    "((a, b),), or use a list, to pass it as one argument."
)


def _trace(
    fn: Callable[..., PyTree],
    tree: PyTreeDef,
    avals: tuple[Aval, ...],
    layout: Layout,
    name: str,
) -> tuple[ClosedJaxpr, PyTreeDef, list[Array]]:
    """Trace a function of pytrees for one group, and check what it does.

    `avals` are the types of partitioned leaves, `[n, *s]`. The per-group jaxpr takes
    the arrays and tracers that the function closes over, which are returned last, and
    then the leaves of its arguments. The other structure is that of its result.
    """
    out_tree: Any = None

    def flat_fn(*leaves: Array) -> list[Array]:
        nonlocal out_tree
        out = fn(*tree.unflatten(leaves))
        paths, out_tree = jax.tree_util.tree_flatten_with_path(out)
        what, fix = f"the result of {name}", "Return arrays, numbers or None."
        return [as_array("map_fn", what, *leaf, fix) for leaf in paths]

    run = explicit_inside(flat_fn)

    check_plain_function("drjax.map_fn", fn)
    try:
        jaxpr, consts = trace_group(run, avals, layout, name)
    except DrjaxError:
        raise
    except (NameError, NotImplementedError, TypeError, ValueError) as error:
        if isinstance(error, NameError) and names_own_axis(error, layout):
            raise _collective_error(layout, name) from error
        if isinstance(error, TypeError):
            check_accepts("drjax.map_fn", fn, tree.unflatten(avals), _TUPLES)
        raise
    if collective_axes(jaxpr) & set(layout.partition.mesh_axes):
        raise _collective_error(layout, name)
    if layout.sharded:
        _check_shardings(jaxpr, consts, layout, name)
    return jaxpr, out_tree, consts


def _check_shardings(
    jaxpr: ClosedJaxpr, consts: Sequence[Array], layout: Layout, name: str
) -> None:
    """Raise `MeshError` if a mapped function uses the mesh axes of the groups.

    It sees one group only, and the groups are sharded over these axes. It is an error
    if an array that it closes over is sharded over one, or if a parameter of an
    equation in it names one, as that of a sharding constraint.
    """
    if any(mentions(_compat.typeof(c).sharding, layout.axes) for c in consts):
        raise MeshError(
            f"The function {name} given to drjax.map_fn closes over an array that is "
            f"sharded over {layout.axes}, along which the groups of "
            f"{layout.partition} are. Pass it as an argument: "
            f"drjax.map_fn({name}, (drjax.broadcast(params), x))."
        )
    if _shards_over(jaxpr, layout.axes):
        raise MeshError(
            f"The function {name} given to drjax.map_fn shards a value over "
            f"{layout.axes}, along which the groups of {layout.partition} are; it sees "
            "one group only. Leave these axes out of its shardings and specs."
        )


def _shards_over(jaxpr: ClosedJaxpr | OpenJaxpr, axes: tuple[str, ...]) -> bool:
    """Return whether a mapped function shards a value over these axes, at any depth.

    That is an error: the function sees one group, and the groups themselves are sharded
    over the axes. Building blocks are skipped: their parameter `partition` names the
    mesh axes of an inner level of groups, not a sharding of this group's values.
    """
    return any(
        any(mentions(value, axes) for value in eqn.params.values())
        or any(_shards_over(inner, axes) for inner in _compat.jaxprs_in(eqn.params))
        for eqn in _compat.open_jaxpr(jaxpr).eqns
        if "partition" not in eqn.params
    )


def mentions(value: object, axes: tuple[str, ...]) -> bool:
    """Return whether a value is a sharding or spec over one of these mesh axes.

    It may be any parameter of an equation. Tuples and lists are searched.
    """
    if isinstance(value, jax.sharding.NamedSharding):
        value = value.spec
    if isinstance(value, jax.sharding.PartitionSpec):
        named = (a if isinstance(a, tuple) else (a,) for a in value)
        return any(axis in axes for entry in named for axis in entry)
    if isinstance(value, tuple | list):
        return any(mentions(part, axes) for part in value)
    return False


def names_own_axis(error: NameError, layout: Layout) -> bool:
    """Decide whether JAX's error says that an axis name of the partition is unbound.

    That is how JAX refuses a collective of a mapped function over its own partition,
    such as `lax.psum(x, "clients")`.
    """
    own = layout.partition.name, *layout.partition.mesh_axes
    return _compat.unbound_axis(error) in own


def _collective_error(layout: Layout, name: str) -> MeshError:
    """Make the error for a mapped function that communicates over its partition."""
    return MeshError(
        f"The function {name} given to drjax.map_fn uses a collective over the axis of "
        f"partition {layout.partition} itself, {layout.partition.mesh_axes}; it sees "
        "one group only. Return the value and combine it outside with "
        "drjax.reduce_sum, drjax.reduce_max or drjax.gather; for the group's index "
        "use drjax.partition_index()."
    )


def collective_axes(jaxpr: ClosedJaxpr | OpenJaxpr) -> set[str]:
    """Return the names of the axes over which a jaxpr, at any depth, communicates.

    To take an axis index counts, too.
    """
    axis_names: set[str] = set()
    for eqn in _compat.open_jaxpr(jaxpr).eqns:
        if eqn.primitive.name not in ("pvary", "pcast"):  # casts of types only
            axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
            axes = axes if isinstance(axes, tuple | list) else (axes,)
            axis_names.update(axis for axis in axes if isinstance(axis, str))
        for inner in _compat.jaxprs_in(eqn.params):
            axis_names |= collective_axes(inner)
    return axis_names
