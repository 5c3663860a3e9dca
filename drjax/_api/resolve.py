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
    resolved, mesh = resolve_partition(block, mesh, partition)
    return {"partition": resolved, "mesh": find_mesh(resolved, mesh)}


def group_axis_size(params: dict[str, Any]) -> int:
    return make_layout(**params).group_axis_size


def bind_partitioned(block: str, x: PyTree, mesh, partition, bind: Callable) -> PyTree:
    """Apply `bind(leaf, **params)` to the leaves of a partitioned tree."""
    params = resolve(block, mesh, partition)
    leaves, tree = flatten_partitioned(
        block, x, params["partition"], group_axis_size(params)
    )
    layout = make_layout(**params)
    return tree.unflatten([bind(as_operand(x, layout, True), **params) for x in leaves])


def bind_global(leaves, params: dict[str, Any], bind: Callable) -> list:
    """Apply `bind(leaf, **params)` to global leaves."""
    layout = make_layout(**params)
    return [bind(as_operand(x, layout, False), **params) for x in leaves]


def map_leaves(fn, *leaves, partition, mesh):
    """`map_fn` of a function of arrays with one result."""
    tree = jax.tree_util.tree_structure((0,) * len(leaves))
    return call_mapped(fn, list(leaves), tree, partition=partition, mesh=mesh)
