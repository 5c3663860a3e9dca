"""The first steps of every building block: resolve the partition, check the operands.

Input: the arguments of a building block. Output: the parameters `partition` and `mesh`
of its primitives, and leaves that have the types of operands on that mesh.
"""

from collections.abc import Callable
from typing import Any

import jax

from drjax._api.trace_map import call_mapped
from drjax._api.validate import flatten_partitioned
from drjax._context import resolve_partition
from drjax._sharding.execute import as_operand
from drjax._sharding.layout import find_mesh, make_layout

PyTree = Any
MeshLike = jax.sharding.Mesh | jax.sharding.AbstractMesh | None
PartitionLike = Any


def resolve(block: str, mesh, partition) -> dict[str, Any]:
    """The parameters `partition` and `mesh` with which a block binds its primitives.

    Args:
      block: The name of the building block, for errors.
      mesh: The block's argument, or None for the program's mesh, or that in context.
      partition: The block's argument, or None for the program's partition.

    Raises:
      ScopeError: There is no partition, or the block may not be called in the
        surrounding mapped function.
      DrjaxTypeError, DrjaxValueError: The argument `partition` is no partition.
      MeshError: The mesh does not fit the partition.
    """
    resolved, mesh = resolve_partition(block, mesh, partition)
    return {"partition": resolved, "mesh": find_mesh(resolved, mesh)}


def group_axis_size(params: dict[str, Any]) -> int:
    """The size of the group axis that partitioned arguments need.

    `params` are the parameters that `resolve` returns.
    """
    return make_layout(**params).group_axis_size


def bind_partitioned(block: str, x: PyTree, mesh, partition, bind: Callable) -> PyTree:
    """Bind the primitives of a block for each leaf of its partitioned argument.

    Args:
      block: The name of the building block, for errors.
      x: Its argument, a tree of leaves `[n, *s]`, which are checked.
      mesh: The block's argument, or None for the program's mesh, or that in context.
      partition: The block's argument, or None for the program's partition.
      bind: Binds primitives for one leaf, `bind(leaf, partition=, mesh=)`, and returns
        the result.

    Returns:
      The tree of results.
    """
    params = resolve(block, mesh, partition)
    leaves, tree = flatten_partitioned(
        block, x, params["partition"], group_axis_size(params)
    )
    layout = make_layout(**params)
    return tree.unflatten([bind(as_operand(x, layout, True), **params) for x in leaves])


def bind_global(leaves, params: dict[str, Any], bind: Callable) -> list:
    """Bind the primitives of a block for each leaf of its global argument.

    Args:
      leaves: The leaves, arrays.
      params: The parameters `partition` and `mesh`, as `resolve` returns them.
      bind: Binds primitives for one leaf, `bind(leaf, partition=, mesh=)`, and returns
        the result.

    Returns:
      The list of results.
    """
    layout = make_layout(**params)
    return [bind(as_operand(x, layout, False), **params) for x in leaves]


def map_leaves(fn, *leaves, partition, mesh):
    """Bind `map_fn` for a function of arrays.

    Args:
      fn: The function of one group, from arrays to an array or a tree of arrays; it is
        traced at each call.
      *leaves: Partitioned values, `[n, *s]`.
      partition: The partition.
      mesh: The mesh, or None.

    Returns:
      What `fn` returns, with leaves `[n, *t]`.
    """
    tree = jax.tree_util.tree_structure((0,) * len(leaves))
    return call_mapped(fn, list(leaves), tree, partition=partition, mesh=mesh)
