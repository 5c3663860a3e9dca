"""From a Python function on pytrees to a bound `map_fn` equation.

Input: a function, and checked leaves `[n, *s]`. Output: its results, `[n, *t]`.

The function is traced at each call, as cheaply as `jax.make_jaxpr`, so that an eager
program never acts on a stale closure or global; executables are shared by the
structural hash of the jaxpr (`_primitives/dispatch_cache.py`), so that nothing is
compiled twice.
"""

import re
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
from drjax._errors import DrjaxError, MeshError
from drjax._partition import Partition
from drjax._primitives.map_fn import broadcast_consts, map_fn_p, trace_group
from drjax._sharding.execute import as_operand
from drjax._sharding.layout import Layout, make_layout


def call_mapped(fn: Callable, leaves, tree, *, partition: Partition, mesh: Any):
    """Bind `map_fn` for a function of pytrees.

    Args:
      fn: The function of one group.
      leaves: The leaves of its positional arguments, `[n, *s]`, checked.
      tree: The structure of the tuple of these arguments.
      partition: The partition.
      mesh: The mesh, or None.

    Returns:
      What `fn` returns, with leaves `[n, *t]`.
    """
    layout = make_layout(partition, mesh)
    leaves = [as_operand(x, layout, True) for x in leaves]
    avals = tuple(_compat.typeof(x) for x in leaves)
    name = function_name(fn)
    jaxpr, out_tree, consts = _trace(fn, tree, avals, layout, name)
    params = {"partition": partition, "mesh": mesh, "name": name}
    operands = [*broadcast_consts(consts, **params), *leaves]
    outs = map_fn_p.bind(*operands, jaxpr=jaxpr, **params)
    # The results, too, are visible on the mesh: they may depend on no operand.
    return out_tree.unflatten([as_operand(y, layout, True) for y in outs])


def _trace(fn, tree, avals, layout: Layout, name: str):
    """Trace a function of pytrees for one group.

    Args:
      fn: The function of one group.
      tree: The structure of the tuple of its positional arguments.
      avals: The types of their leaves, `[n, *s]`.
      layout: The layout of the groups.
      name: The name of the function, for errors.

    Returns:
      `(per-group jaxpr, structure of its result, closed-over values)`; the jaxpr takes
      these values as its first inputs.

    Raises:
      DrjaxTypeError: `fn` has another signature, or returns no arrays.
      MeshError: It communicates or shards over the partition's own axes.
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
        if isinstance(error, NameError) and _names_own_axis(str(error), layout):
            raise _collective_error(layout, name) from error
        if isinstance(error, TypeError):
            check_accepts(fn, tree.unflatten(avals))
        raise
    if _collective_axes(jaxpr) & set(layout.partition.mesh_axes):
        raise _collective_error(layout, name)
    if layout.sharded:
        _check_shardings(jaxpr, consts, layout, name)
    return jaxpr, out_tree, consts


def _check_shardings(jaxpr, consts, layout: Layout, name: str) -> None:
    """Raise `MeshError` if a mapped function shards over the partition's own axes.

    The groups lie along these axes, and the function sees one group only.

    Args:
      jaxpr: The per-group jaxpr.
      consts: The values that the function closes over.
      layout: The layout of the groups.
      name: The name of the function, for the error.
    """
    if any(_mentions(_compat.typeof(c).sharding, layout.axes) for c in consts):
        raise MeshError(
            f"The function {name} given to drjax.map_fn closes over an array that is "
            f"sharded over {layout.axes}, along which the groups of "
            f"{layout.partition} are. Pass it as an argument: "
            f"drjax.map_fn({name}, (drjax.broadcast(params), x))."
        )
    if _lays_out_over(jaxpr, layout.axes):
        raise MeshError(
            f"The function {name} given to drjax.map_fn shards a value over "
            f"{layout.axes}, along which the groups of {layout.partition} are; it sees "
            "one group only. Leave these axes out of its shardings and specs."
        )


def _lays_out_over(jaxpr, axes: tuple[str, ...]) -> bool:
    """Whether a sharding or a spec in a jaxpr mentions one of these mesh axes.

    Equations with a parameter `partition`, the building blocks, do not count.
    """
    return any(
        any(_mentions(value, axes) for value in eqn.params.values())
        or any(_lays_out_over(inner, axes) for inner in _compat.jaxprs_in(eqn.params))
        for eqn in _compat.open_jaxpr(jaxpr).eqns
        if "partition" not in eqn.params
    )


def _mentions(value: Any, axes: tuple[str, ...]) -> bool:
    """Whether `value`, a parameter, is a sharding or spec over one of these mesh axes.

    A tuple or list is if one of its elements is.
    """
    if isinstance(value, jax.sharding.NamedSharding):
        value = value.spec
    if isinstance(value, jax.sharding.PartitionSpec):
        named = (a if isinstance(a, tuple) else (a,) for a in value)
        return any(axis in axes for entry in named for axis in entry)
    if isinstance(value, tuple | list):
        return any(_mentions(part, axes) for part in value)
    return False


def _names_own_axis(text: str, layout: Layout) -> bool:
    """Whether a message of JAX says that one of the partition's axes is unbound."""
    match = re.search(r"unbound axis name: (\w+)", text)
    return match is not None and match[1] in (
        layout.partition.name, *layout.partition.mesh_axes,
    )  # fmt: skip


def _collective_error(layout: Layout, name: str) -> MeshError:
    """Make the error for a mapped function that communicates over the partition's axes.

    `name` is the name of the function.
    """
    return MeshError(
        f"The function {name} given to drjax.map_fn uses a collective over the axis of "
        f"partition {layout.partition} itself, {layout.partition.mesh_axes}; it sees "
        "one group only. Return the value and combine it outside with "
        "drjax.reduce_sum, drjax.reduce_max or drjax.gather; for the group's index "
        "use drjax.partition_index()."
    )


def _collective_axes(jaxpr) -> set[str]:
    """The mesh axes over which a jaxpr communicates or has an axis index."""
    axis_names: set[str] = set()
    for eqn in _compat.open_jaxpr(jaxpr).eqns:
        if eqn.primitive.name not in ("pvary", "pcast"):  # casts of types only
            axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
            axes = axes if isinstance(axes, tuple | list) else (axes,)
            axis_names.update(axis for axis in axes if isinstance(axis, str))
        for inner in _compat.jaxprs_in(eqn.params):
            axis_names |= _collective_axes(inner)
    return axis_names
