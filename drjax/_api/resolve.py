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
      mesh: Its argument of that name, or None for the program's mesh, or that in
        context.
      partition: Its argument of that name, or None for the program's partition.
    """
    resolved, mesh = resolve_partition(block, mesh, partition)
    return {"partition": resolved, "mesh": find_mesh(resolved, mesh)}


def group_axis_size(params: dict[str, Any]) -> int:
    """The leading axis that partitioned arguments need, with these parameters."""
    return make_layout(**params).group_axis_size


def bind_partitioned(block: str, x: PyTree, mesh, partition, bind: Callable) -> PyTree:
    """A block with a partitioned argument: `bind(leaf, partition=, mesh=)` of leaves.

    Args:
      block: The name of the building block, for errors.
      x: Its argument, a tree of leaves `[n, *s]`, which are checked.
      mesh: As for `resolve`.
      partition: As for `resolve`.
      bind: Binds primitives for one leaf, and returns the result.

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
    """`bind(leaf, partition=, mesh=)` of global leaves, in a list.

    Args:
      leaves: The leaves, checked.
      params: The parameters, as `resolve` returns them.
      bind: Binds primitives for one leaf, and returns the result.
    """
    layout = make_layout(**params)
    return [bind(as_operand(x, layout, False), **params) for x in leaves]


def map_leaves(fn, *leaves, partition, mesh):
    """Bind `map_fn` for a function of arrays, one or a tree of arrays as result.

    Args:
      fn: The function of one group; it is traced at each call.
      *leaves: Partitioned values, `[n, *s]`.
      partition: The partition.
      mesh: The mesh, or None.
    """
    tree = jax.tree_util.tree_structure((0,) * len(leaves))
    return call_mapped(fn, list(leaves), tree, partition=partition, mesh=mesh)
