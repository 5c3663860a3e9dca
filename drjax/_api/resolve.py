"""The first steps of every building block: resolve the partition, check the operands.

Input: the arguments of a building block. Output: the parameters `partition` and `mesh`
of its primitives, and leaves that have the types of operands on that mesh.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax

from drjax._api.trace_map import call_mapped
from drjax._api.validate import flatten_partitioned
from drjax._context import resolve_partition
from drjax._sharding.execute import as_operand
from drjax._sharding.layout import find_mesh, make_layout

PyTree = Any
# For type checkers, a block returns the type of its tree. Leaves of results are arrays
# of JAX, and those of arguments too; but `broadcast` also takes numbers, and `shard`
# NumPy arrays, so that their results are of any type.
Tree = TypeVar("Tree")
MeshLike = jax.sharding.Mesh | jax.sharding.AbstractMesh | None
PartitionLike = Any


def resolve(block: str, mesh, partition) -> dict[str, Any]:
    """Resolve the partition and the mesh on which a building block acts.

    Args:
      block: The name of the building block, for errors.
      mesh: Its argument `mesh=`; None: the program's mesh, or else the one in context.
      partition: Its argument `partition=`, a `Partition`, a mapping `{"clients": n}` or
        a program; None: the program's partition.

    Returns:
      `{"partition": partition, "mesh": mesh}`, the parameters with which the building
      block binds its primitives. The mesh is None if the building block runs locally:
      there is no mesh; it has none of the partition's axes; an enclosing function is
      mapped over groups on one of these axes; or a program is being traced for a plan
      under the mesh in context (`planning(True)`), outside mapped functions.

    Raises:
      ScopeError: `partition` is None, outside of programs or in a mapped function in
        which no inner level is left to act on; or `partition` is not the program's, and
        an enclosing mapped function is over a partition of the same name.
      DrjaxTypeError, DrjaxValueError: `partition` does not define a partition.
      MeshError: The mesh differs from the one in context, has only some of the
        partition's axes, or cannot divide the groups.
    """
    resolved, mesh = resolve_partition(block, mesh, partition)
    return {"partition": resolved, "mesh": find_mesh(resolved, mesh)}


def group_axis_size(params: dict[str, Any]) -> int:
    """The size of the group axis that partitioned arguments of a building block need.

    It is n, the number of groups; inside a user's `shard_map` over the partition's
    axes, the number of groups of a device.

    Args:
      params: `{"partition": partition, "mesh": mesh}`. If the mesh is None, the program
        runs locally.
    """
    return make_layout(**params).group_axis_size


def bind_partitioned(block: str, x: PyTree, mesh, partition, bind: Callable) -> PyTree:
    """Check a partitioned argument of a block, and bind primitives for each leaf.

    Args:
      block: The name of the building block, for errors.
      x: The argument, a tree of arrays `[n, *s]`.
      mesh: The argument `mesh=` of the building block; None: the program's mesh, or
        else the one in context.
      partition: Its argument `partition=`; None: the program's partition.
      bind: `bind(leaf, partition=, mesh=)` binds primitives for one leaf, and returns
        the result, an array.

    Returns:
      A tree with the structure of `x`, of the results of `bind`.

    Raises:
      ScopeError: `partition` is None, outside of programs or in a mapped function in
        which no inner level is left to act on; or `partition` is not the program's, and
        an enclosing mapped function is over a partition of the same name.
      DrjaxTypeError: A leaf is not an array or number, or `partition` is no partition.
      DrjaxValueError: A leaf has another leading axis than n.
      MeshError: The mesh differs from the one in context, has only some of the
        partition's axes, or cannot divide the groups.
    """
    params = resolve(block, mesh, partition)
    leaves, tree = partitioned_leaves(block, x, params)
    return tree.unflatten([bind(leaf, **params) for leaf in leaves])


def partitioned_leaves(block: str, x: PyTree, params: dict[str, Any]):
    """Check and flatten a partitioned argument of a building block.

    Args:
      block: The name of the building block, for errors.
      x: The argument, a tree of arrays `[n, *s]`.
      params: `{"partition": partition, "mesh": mesh}`. If the mesh is None, the program
        runs locally.

    Returns:
      `(leaves, tree structure)`: the list of leaves as JAX arrays, and a `PyTreeDef`.
      On a mesh with Explicit axes, the leaves are resharded over the partition's axes
      along their group axis.

    Raises:
      DrjaxTypeError: A leaf is not an array or number.
      DrjaxValueError: A leaf has another leading axis than n.
    """
    size, layout = group_axis_size(params), make_layout(**params)
    leaves, tree = flatten_partitioned(block, x, params["partition"], size)
    return [as_operand(leaf, layout, True) for leaf in leaves], tree


def bind_global(leaves, params: dict[str, Any], bind: Callable) -> list:
    """Bind the primitives of a building block for each leaf of a global argument.

    On a mesh with Explicit axes, each leaf is resharded first, so that the partition's
    axes do not shard it.

    Args:
      leaves: The leaves of the argument, JAX arrays.
      params: `{"partition": partition, "mesh": mesh}`. If the mesh is None, the program
        runs locally.
      bind: `bind(leaf, partition=, mesh=)` binds primitives for one leaf, and returns
        the result, an array.

    Returns:
      The list of results, one for each leaf.
    """
    layout = make_layout(**params)
    return [bind(as_operand(x, layout, False), **params) for x in leaves]


def map_leaves(fn, *leaves, partition, mesh):
    """Bind one `map_fn` for a function of arrays.

    Args:
      fn: The mapped function, `fn(*slices)`: it takes one group's slice `[*s]` of each
        of `leaves`, and returns an array or a tree of arrays. It is traced at each
        call.
      *leaves: Partitioned arrays, `[n, *s]`.
      partition: The partition, of n groups.
      mesh: The mesh to shard the partition over; None: the program runs locally.

    Returns:
      A tree with the structure of the result of `fn`, with partitioned leaves
      `[n, *t]`.
    """
    tree = jax.tree_util.tree_structure((0,) * len(leaves))
    return call_mapped(fn, list(leaves), tree, partition=partition, mesh=mesh)
