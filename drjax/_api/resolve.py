"""The first steps of every building block: resolve the partition, check the operands.

Input: the arguments of a building block. Output: the parameters `partition` and `mesh`
of its primitives, and leaves that have the types of operands on that mesh.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax

from drjax._api.trace_map import call_mapped
from drjax._api.validate import flatten_partitioned
from drjax._compat.types import (
    Array,
    GlobalArray,
    Mesh,
    PartitionedArray,
    PyTree,
    PyTreeDef,
)
from drjax._context import OF_LIBRARY, resolve_partition
from drjax._partition import Partition
from drjax._sharding.execute import as_operand
from drjax._sharding.layout import Placement, find_mesh, make_layout

MeshLike = Mesh | None
PartitionLike = Any
BlockParams: TypeAlias = Placement  # as `resolve` returns it


def resolve(block: str, mesh: MeshLike, partition: PartitionLike) -> BlockParams:
    """Resolve the partition and the mesh on which a building block acts.

    The arguments are those of the block. The partition is by default the program's; the
    mesh is the program's, or else the one in context. The mesh in the result is None if
    the building block runs locally: `find_mesh` says when.
    """
    resolved, mesh = resolve_partition(block, mesh, partition)
    return {"partition": resolved, "mesh": find_mesh(resolved, mesh)}


def group_axis_size(params: BlockParams) -> int:
    """Return the size of the group axis that partitioned arguments of a block need.

    It is n, the number of groups; inside a user's `shard_map` over the partition's
    axes, the number of groups of a device.
    """
    return make_layout(**params).group_axis_size


def bind_partitioned(
    block: str,
    x: PyTree,
    mesh: MeshLike,
    partition: PartitionLike,
    bind: Callable[..., PyTree],
) -> PyTree:
    """Check a partitioned argument of a block, and bind primitives for each leaf.

    The result has the structure of `x`, with what `bind(leaf, partition=, mesh=)`
    returns in the place of a leaf `[n, *s]`.
    """
    params = resolve(block, mesh, partition)
    leaves, tree = partitioned_leaves(block, x, params)
    return tree.unflatten([bind(leaf, **params) for leaf in leaves])


def partitioned_leaves(
    block: str, x: PyTree, params: BlockParams
) -> tuple[list[PartitionedArray], PyTreeDef]:
    """Check and flatten a partitioned argument of a building block.

    On a mesh with Explicit axes, the leaves are resharded over the partition's axes
    along their group axis.
    """
    size, layout = group_axis_size(params), make_layout(**params)
    leaves, tree = flatten_partitioned(block, x, params["partition"], size)
    return [as_operand(leaf, layout, True) for leaf in leaves], tree


def bind_global(
    leaves: Sequence[GlobalArray], params: BlockParams, bind: Callable[..., Array]
) -> list[Array]:
    """Bind primitives for each leaf of a global argument of a building block.

    `bind(leaf, partition=, mesh=)` does it for one. On a mesh with Explicit axes, each
    leaf is resharded first, so that the partition's axes do not shard it.
    """
    layout = make_layout(**params)
    return [bind(as_operand(x, layout, False), **params) for x in leaves]


def map_leaves(
    block: str,
    fn: Callable[..., PyTree],
    *leaves: PartitionedArray,
    partition: Partition,
    mesh: MeshLike,
) -> PyTree:
    """Bind one `map_fn` for a function of one group's slice of each leaf.

    The function is traced at each call. Plans and profiles name it by the block.
    """
    named = lambda *slices: fn(*slices)
    named.__name__ = OF_LIBRARY + block
    tree = jax.tree_util.tree_structure((0,) * len(leaves))
    return call_mapped(named, list(leaves), tree, partition=partition, mesh=mesh)
