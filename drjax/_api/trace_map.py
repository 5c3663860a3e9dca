"""From a Python function on pytrees to a bound `map_fn` equation.

Input: a function, and checked leaves `[n, *s]`. Output: its results, `[n, *t]`.

The function is traced at each call, as cheaply as `jax.make_jaxpr`, so that an eager
program never acts on a stale closure or global; executables are shared by the
structural hash of the jaxpr (`_primitives/dispatch_cache.py`), so that nothing is
compiled twice.
"""

from collections.abc import Callable
from typing import Any

import jax

from drjax import _compat
from drjax._api.validate import (
    as_array,
    check_accepts,
    check_plain_function,
    function_name,
)
from drjax._context import name_in_program
from drjax._errors import DrjaxError, MeshError
from drjax._partition import Partition
from drjax._primitives.map_fn import broadcast_consts, map_fn_p, trace_group
from drjax._sharding.execute import as_operand
from drjax._sharding.layout import Layout, make_layout


def call_mapped(fn: Callable, leaves, tree, *, partition: Partition, mesh: Any):
    """Trace a function of pytrees for one group, and bind `map_fn` for it.

    It is traced at each call. The arrays that `fn` closes over are broadcast.

    Args:
      fn: The mapped function. It takes pytrees of one group's arrays `[*s]` as
        positional arguments, and returns a pytree of arrays or numbers.
      leaves: The leaves of all its arguments, partitioned arrays `[n, *s]`.
      tree: The `PyTreeDef` of the tuple of its arguments.
      partition: The partition, of n groups.
      mesh: The mesh to shard the partition over; None: the program runs locally.

    Returns:
      A tree with the structure of the result of `fn`, with partitioned leaves
      `[n, *t]`.

    Raises:
      DrjaxTypeError: `fn` is async or a generator function, its signature does not fit
        its arguments, or it returns a leaf that is neither an array nor a number.
      MeshError: `fn` communicates or shards over the partition's own mesh axes.
    """
    layout = make_layout(partition, mesh)
    leaves = [as_operand(x, layout, True) for x in leaves]
    avals = tuple(_compat.typeof(x) for x in leaves)
    name = function_name(fn)
    jaxpr, out_tree, consts = _trace(fn, tree, avals, layout, name)
    params = {"partition": partition, "mesh": mesh, "name": name_in_program(name)}
    operands = [*broadcast_consts(consts, **params), *leaves]
    outs = map_fn_p.bind(*operands, jaxpr=jaxpr, **params)
    # The results, too, are visible on the mesh: they may depend on no operand.
    return out_tree.unflatten([as_operand(y, layout, True) for y in outs])


def _trace(fn, tree, avals, layout: Layout, name: str):
    """Trace a function of pytrees for one group, and check what it does.

    Args:
      fn: The mapped function, from pytrees of arrays to a pytree of arrays or numbers.
      tree: The `PyTreeDef` of the tuple of its positional arguments.
      avals: The types of the partitioned leaves of these arguments, `[n, *s]`.
      layout: The layout of the groups.
      name: The name of the function, for errors.

    Returns:
      `(jaxpr, out_tree, consts)`: the closed per-group jaxpr, the `PyTreeDef` of the
      result of `fn`, and the list of the arrays and tracers that `fn` closes over. The
      inputs of the jaxpr are `consts`, and then the leaves of the arguments.

    Raises:
      DrjaxTypeError: `fn` is async or a generator function, its signature does not fit
        its arguments, or it returns a leaf that is neither an array nor a number.
      MeshError: `fn` communicates or shards over the partition's own mesh axes.
    """
    out_tree: Any = None

    def flat_fn(*leaves):
        nonlocal out_tree
        out = fn(*tree.unflatten(leaves))
        paths, out_tree = jax.tree_util.tree_flatten_with_path(out)
        what, fix = f"the result of {name}", "Return arrays, numbers or None."
        return [as_array("map_fn", what, *leaf, fix) for leaf in paths]

    check_plain_function("drjax.map_fn", fn)
    try:
        jaxpr, consts = trace_group(flat_fn, avals, layout, name)
    except DrjaxError:
        raise
    except (NameError, NotImplementedError, TypeError, ValueError) as error:
        if isinstance(error, NameError) and names_own_axis(error, layout):
            raise _collective_error(layout, name) from error
        if isinstance(error, TypeError):
            check_accepts(fn, tree.unflatten(avals))
        raise
    if collective_axes(jaxpr) & set(layout.partition.mesh_axes):
        raise _collective_error(layout, name)
    if layout.sharded:
        _check_shardings(jaxpr, consts, layout, name)
    return jaxpr, out_tree, consts


def _check_shardings(jaxpr, consts, layout: Layout, name: str) -> None:
    """Raise `MeshError` if a mapped function uses the mesh axes of the groups.

    It sees one group only, and the groups are sharded over these axes. It is an error
    if an array that it closes over is sharded over one, or if a parameter of an
    equation in it names one, as that of a sharding constraint.

    Args:
      jaxpr: The closed per-group jaxpr.
      consts: The arrays and tracers that the function closes over.
      layout: The layout of the groups.
      name: The name of the function, for the error.
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


def _shards_over(jaxpr, axes: tuple[str, ...]) -> bool:
    """Whether a mapped function shards a value over these axes, which is an error.

    The function sees one group, and the groups themselves are sharded over the axes.
    The parameters of all equations are searched, and inner jaxprs at any depth.
    Building blocks are skipped: their parameter `partition` names the mesh axes of an
    inner level of groups, not a sharding of this group's values.

    Args:
      jaxpr: The jaxpr of the mapped function, open or closed.
      axes: The names of the mesh axes.
    """
    return any(
        any(mentions(value, axes) for value in eqn.params.values())
        or any(_shards_over(inner, axes) for inner in _compat.jaxprs_in(eqn.params))
        for eqn in _compat.open_jaxpr(jaxpr).eqns
        if "partition" not in eqn.params
    )


def mentions(value: Any, axes: tuple[str, ...]) -> bool:
    """Whether a value is a sharding or spec over one of these mesh axes.

    Args:
      value: A `NamedSharding`, a `PartitionSpec`, a tuple or list, which is searched,
        or any other parameter of an equation, for which the result is False.
      axes: The names of the mesh axes.
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

    Args:
      error: The error that tracing the mapped function raised.
      layout: The layout of the partition. The axis names are the name of the partition
        and those of its mesh axes.

    Returns:
      True if the error is about one of these names, else False.
    """
    own = layout.partition.name, *layout.partition.mesh_axes
    return _compat.unbound_axis(error) in own


def _collective_error(layout: Layout, name: str) -> MeshError:
    """Make the error for a mapped function that communicates over the partition's axes.

    Args:
      layout: The layout of the partition.
      name: The name of the mapped function.

    Returns:
      The error, for the caller to raise.
    """
    return MeshError(
        f"The function {name} given to drjax.map_fn uses a collective over the axis of "
        f"partition {layout.partition} itself, {layout.partition.mesh_axes}; it sees "
        "one group only. Return the value and combine it outside with "
        "drjax.reduce_sum, drjax.reduce_max or drjax.gather; for the group's index "
        "use drjax.partition_index()."
    )


def collective_axes(jaxpr) -> set[str]:
    """The names of the axes over which a jaxpr has collectives or takes an axis index.

    Args:
      jaxpr: The jaxpr, open or closed; its inner jaxprs at any depth are searched.
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
