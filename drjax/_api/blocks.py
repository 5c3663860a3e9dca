"""The building blocks over pytrees, but for the reductions.

Input: a tree, and optionally a mesh and a partition. Output: a tree of results.
Invariants: every leaf is checked before a primitive is bound.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import core

import drjax._api.checkify_groups  # registers rules # noqa: F401
from drjax._api.collective_options import collective_options
from drjax._api.levels import (
    Outer,
    Over,
    check_alone,
    check_axes,
    in_next_level,
    mesh_argument,
    over_levels,
    select_levels,
)
from drjax._api.resolve import (
    MeshLike,
    PartitionLike,
    bind_global,
    bind_partitioned,
    group_axis_size,
    resolve,
)
from drjax._api.trace_map import call_mapped
from drjax._api.validate import checks_keywords, flatten, flatten_partitioned
from drjax._compat.types import Array, PyTree, Tree
from drjax._context import current_scope, resolve_partition
from drjax._errors import DrjaxTypeError
from drjax._jaxprs.prng_keys import on_raw
from drjax._partition import (
    Partition,
    as_partition,
    attached_levels,
)
from drjax._primitives.collectives import broadcast_p, gather_p, scatter_p
from drjax._primitives.partition_index import partition_index_p
from drjax._sharding.execute import as_operand
from drjax._sharding.layout import host_sharding, make_layout


def _inwards(block: str) -> Outer:
    """Make the function that runs `broadcast` or `scatter` over several levels.

    It runs the building block over the outermost level, and then, in each group of that
    one, over the inner levels.
    """

    def outer(
        arguments: dict[str, Any], inner: Callable[..., PyTree], over: tuple[str, ...]
    ) -> PyTree:
        run = broadcast if block == "broadcast" else scatter
        x = run(arguments["x"], over=over[0], **mesh_argument(arguments))
        return inner(**{**arguments, "x": x})

    return outer


def _gather_outwards(
    arguments: dict[str, Any], inner: Callable[..., PyTree], over: tuple[str, ...]
) -> PyTree:
    """Run `gather` over several levels: over the inner ones first, then the outermost.

    `result` is for the gather over the outermost level only. What is gathered has the
    leading axes of all levels. It is global if `over` has all levels of the program.
    """
    options = {k: arguments.pop(k) for k in ("result",) if k in arguments}
    options |= mesh_argument(arguments)
    return gather(inner(**arguments), over=over[0], **options)


def _map_inwards(
    arguments: dict[str, Any], inner: Callable[..., PyTree], over: tuple[str, ...]
) -> PyTree:
    """Run `map_fn` over several levels: over the inner ones, in each outer group.

    A map over the inner levels, in each group of the outermost one, is a map over all
    of them, so `inner` does everything.
    """
    return inner(**arguments)


def _index_outwards(
    arguments: dict[str, Any], inner: Callable[..., PyTree], over: tuple[str, ...]
) -> PyTree:
    """Run `partition_index` over several levels, with one count for all of them.

    The index of a group is `i * size + j`: i is the index of the outermost group that
    it is in, j its index over the inner levels, and `size` the product of the numbers
    of groups of these. It has the leading axes of all levels.
    """
    size = math.prod(p.size for p in current_scope().open_levels if p.name in over[1:])
    first = partition_index(over=over[0], **mesh_argument(arguments))
    within = inner(**arguments)
    return first.reshape(-1, *[1] * (within.ndim - 1)) * size + within


@over_levels("x", outer=_inwards("broadcast"), own_axes=True)
def broadcast(
    x: PyTree,
    *,
    over: Over = None,
    mesh: MeshLike = None,
    partition: PartitionLike = None,
) -> PyTree:
    """Give each of the n groups a copy of a global value. No communication.

    The transpose is `drjax.reduce_sum`: the cotangent of the value is the sum of the
    cotangents of the groups' copies.

    Args:
      x: Tree of global arrays `[*s]` (numbers too), any dtype, typed keys included.
      over: In a program with several levels, as `@drjax.program(pods=2, groups=4)`, the
        name of a level, or a tuple of names: the levels to act on. On a level inside
        another one, each group of the outer level acts by itself, and the partitioned
        arguments and results have the leading axes of both. Default: all levels.
      mesh: The mesh. Default: the program's, then the one in context.
      partition: The partition to broadcast over. Default: the program's partition.

    Returns:
      The same tree with leaves `[n, *s]`, partitioned; over pods and groups
      `[pods, groups, *s]`. With `over="groups"`, from leaves `[pods, *s]`.

    Raises:
      ScopeError: No partition in force.
      DrjaxTypeError: A leaf is not an array.

    Example:
      >>> import drjax
      >>> print(drjax.program(partition_size=3)(drjax.broadcast)(2.0))
      [2. 2. 2.]

    Source: Rush et al. 2024, section 3.
    """
    params = resolve("broadcast", mesh, partition)
    leaves, tree = flatten("broadcast", x)
    return tree.unflatten(bind_global(leaves, params, broadcast_p.bind))


@over_levels("arg", outer=_map_inwards)
def map_fn(
    fn: Callable[..., Tree],
    arg: PyTree,
    *,
    over: Over = None,
    mesh: MeshLike = None,
    partition: PartitionLike = None,
) -> Tree:
    """Apply a function to each group's values. No communication.

    Args:
      fn: Called once, by tracing, with one group's values. It may close over
        arrays and tracers (which are then broadcast) and use all of JAX except
        collectives over the partition's own axis.
      arg: Tree of partitioned arrays `[n, *s]`. A plain tuple is unpacked into the
        arguments of `fn`; a list or a NamedTuple is one argument.
      over: As for `drjax.broadcast`. With `over="pods"` the function sees one pod, and
        building blocks inside it act on the levels within.
      mesh: As for `drjax.broadcast`.
      partition: As for `drjax.broadcast`.

    Returns:
      What `fn` returns, with leaves `[n, *t]`, partitioned.

    Raises:
      ScopeError: No partition in force.
      DrjaxValueError: A leaf has another leading axis than n.
      DrjaxTypeError: A leaf of the argument or of the result is not an array.
      MeshError: `fn` uses a collective over the partition's own mesh axes, or shards
        a value over them.

    Example:
      >>> import drjax, jax.numpy as jnp
      >>> @drjax.program(partition_size=2)
      ... def f(x, y):
      ...     return drjax.map_fn(lambda a, b: a * b, (x, y))
      >>> print(f(jnp.array([1.0, 2.0]), jnp.array([3.0, 4.0])))
      [3. 8.]

    Source: Rush et al. 2024, section 3.
    """
    if not callable(fn):
        raise DrjaxTypeError(
            "drjax.map_fn needs a function and then its argument, "
            f"drjax.map_fn(fn, arg), got {type(fn).__name__} as the function: {fn!r}."
        )
    params = resolve("map_fn", mesh, partition)
    if partition is None:
        fn = in_next_level(fn)
    args = arg if type(arg) is tuple else (arg,)
    leaves, tree = flatten_partitioned(
        "map_fn", args, params["partition"], group_axis_size(params), "args"
    )
    return call_mapped(fn, leaves, tree, **params)


@over_levels("x", outer=_gather_outwards)
def gather(
    x: Tree,
    *,
    result: str | None = None,
    over: Over = None,
    mesh: MeshLike = None,
    partition: PartitionLike = None,
) -> Tree:
    """All groups' slices as a global value. One all-gather on a mesh.

    Args:
      x: Tree of partitioned arrays `[n, *s]`.
      result: "sharded": on a mesh each device has a part of the slices of all groups,
        by an all-to-all, along the first axis of `[*s]` whose size the devices divide.
        Leaves without such an axis, and results without a mesh, are returned whole, as
        by default: each device has the whole result.
      over: As for `drjax.broadcast`.
      mesh: As for `drjax.broadcast`.
      partition: As for `drjax.broadcast`.

    Returns:
      The same tree, global leaves `[n, *s]`.

    Raises:
      ScopeError, DrjaxValueError, DrjaxTypeError: As for `drjax.reduce_sum`.

    Example:
      >>> import drjax, jax.numpy as jnp
      >>> f = drjax.program(partition_size=3)(lambda x: drjax.gather(x).cumsum())
      >>> print(f(jnp.arange(3.0)))
      [0. 1. 3.]

    Source: `all_gather_invariant` of JAX note 17111.
    """
    options = collective_options("gather", None, result)
    bind = functools.partial(gather_p.bind, **options)
    return bind_partitioned("gather", x, mesh, partition, bind)


@over_levels("x", outer=_inwards("scatter"))
def scatter(
    x: Tree,
    *,
    over: Over = None,
    mesh: MeshLike = None,
    partition: PartitionLike = None,
) -> Tree:
    """Give slice i of a global value to group i. No communication.

    Args:
      x: Tree of global arrays `[n, *s]`.
      over: As for `drjax.broadcast`.
      mesh: As for `drjax.broadcast`.
      partition: As for `drjax.broadcast`.

    Returns:
      The same tree, partitioned leaves `[n, *s]`. The transpose of `drjax.gather`.

    Raises:
      ScopeError, DrjaxValueError, DrjaxTypeError: As for `drjax.reduce_sum`.

    Example:
      >>> import drjax, jax.numpy as jnp
      >>> @drjax.program(partition_size=3)
      ... def f(x):
      ...     return drjax.map_fn(jnp.square, drjax.scatter(x))
      >>> print(f(jnp.arange(3.0)))
      [0. 1. 4.]

    Source: `pscatter` of JAX note 17111.
    """
    params = resolve("scatter", mesh, partition)
    resolved = params["partition"]
    leaves, tree = flatten_partitioned("scatter", x, resolved, resolved.size)
    return tree.unflatten(bind_global(leaves, params, scatter_p.bind))


@checks_keywords
def partition_index(
    *, over: Over = None, mesh: MeshLike = None, partition: PartitionLike = None
) -> jax.Array:
    """The group indices, 0 to n - 1. No communication.

    Args:
      over: As for `drjax.broadcast`.
      mesh: As for `drjax.broadcast`.
      partition: Default: the program's; inside a mapped function, the one mapped over.

    Returns:
      In a program: partitioned int32 `[n]`. Inside the function given to
      `drjax.map_fn`: this group's index, int32 `[]`. It depends on the group only,
      never on devices, so `jax.random.fold_in(key, drjax.partition_index())` gives
      each group its own reproducible randomness.

    Raises:
      ScopeError: No partition in force.

    Example:
      >>> import drjax
      >>> print(drjax.program(partition_size=3)(drjax.partition_index)())
      [0 1 2]
    """
    mapped = _mapped_partitions("partition_index", over, partition)
    if not mapped:
        return _indices(over=over, mesh=mesh, partition=partition)
    index: Any = 0
    for each in mapped:
        of_group = partition_index_p.bind(partition=each, mesh=None, per_group=True)
        index = of_group if each is mapped[0] else index * each.size + of_group
    return index


@checks_keywords
def partition_size(*, over: Over = None, partition: PartitionLike = None) -> int:
    """The number n of groups, a Python int.

    Args:
      over: As for `drjax.broadcast`: the number of groups of these levels.
      partition: Default: the program's; inside a mapped function, the one mapped over.

    Raises:
      ScopeError: No partition in force.

    Example:
      >>> import drjax
      >>> drjax.program(partition_size=3)(drjax.partition_size)()
      3
    """
    acted_on = _mapped_partitions("partition_size", over, partition)
    if not acted_on and partition is None and current_scope().partition is not None:
        open_levels = current_scope().open_levels
        acted_on = select_levels("partition_size", over, open_levels)
    elif not acted_on:
        levels = attached_levels(partition)
        acted_on = select_levels("partition_size", over, levels) if levels else ()
    if not acted_on:
        acted_on = (resolve_partition("partition_size", None, partition)[0],)
    return math.prod(p.size for p in acted_on)


@checks_keywords
def shard(
    tree: PyTree, mesh: MeshLike = None, *, partition: PartitionLike = None
) -> PyTree:
    """Place host data `[n, ...]` over the mesh axes of the partition.

    Args:
      tree: Tree of arrays `[n, *s]`. With several processes, each passes the whole
        array and stores the slices of its own devices only.
      mesh: The mesh. Default: the program's, then the one in context.
      partition: A `drjax.Partition`, a mapping `{"clients": n}`, or a program.
        Default: the program's partition.

    Returns:
      The tree, with each leaf divided over the devices by groups. If n is not a
      multiple of the number of devices, as 10 clients on 8 devices, JAX cannot store
      uneven shards: each device stores the whole leaf, which is logged as a warning,
      and a jitted program divides it. Without a mesh that
      has the partition's axes, the leaves are placed on the default device.

    Raises:
      ScopeError, DrjaxValueError, DrjaxTypeError: As for `drjax.reduce_sum`.

    Example:
      >>> import drjax, numpy as np
      >>> x = drjax.shard(np.zeros((8, 2)), partition={"clients": 8})
      >>> x.shape
      (8, 2)
    """
    levels = (
        current_scope().open_levels if partition is None else attached_levels(partition)
    )
    if len(levels) > 1:
        return _shard_levels(tree, mesh, levels)
    resolved, mesh = resolve_partition("shard", mesh, partition)
    size = resolved.size
    leaves, treedef = flatten_partitioned("shard", tree, resolved, size, "tree")
    sharding = host_sharding(resolved, mesh)
    return treedef.unflatten([_place(leaf, sharding) for leaf in leaves])


# ---------------------------------------------------------------------------------
# What several building blocks need


def _shard_levels(tree: PyTree, mesh: MeshLike, levels: Sequence[Partition]) -> PyTree:
    """Place host data `[n_0, n_1, ...]` over the mesh axes of several levels.

    The axis of a level is divided over the mesh axes of that level; it stays whole if
    the mesh lacks these, or if their devices do not divide the number of groups. If the
    mesh lacks the axes of all levels, or there is none, the arrays are on the default
    device.
    """
    check_axes("shard", {"tree": tree}, levels, mesh)
    leaves, treedef = flatten("shard", tree, "tree")
    mesh = current_scope().mesh if mesh is None else mesh
    placed = [host_sharding(p, mesh) for p in levels]
    on_mesh = [s for s in placed if s is not None]
    if not on_mesh:
        return treedef.unflatten(leaves)
    entries = [None if s is None else (*s.spec, None)[0] for s in placed]
    sharding = jax.NamedSharding(on_mesh[0].mesh, jax.P(*entries))
    return treedef.unflatten([_place(leaf, sharding) for leaf in leaves])


def _place(leaf: Array, sharding: jax.sharding.Sharding | None) -> Array:
    """Put an array on the devices of a sharding, also if there are several processes.

    The array, which may have typed keys, has the whole value in this process, or is a
    global one that several processes hold. Each process stores the shards of its own
    devices.
    """
    if sharding is None:
        return leaf
    if isinstance(leaf, core.Tracer) or sharding.is_fully_addressable:
        return jax.device_put(leaf, sharding)
    if not leaf.is_fully_addressable:  # several processes hold it already
        return jax.jit(lambda x: x, out_shardings=sharding)(leaf)

    def placed(x: Array) -> Array:
        host = np.asarray(x)  # each process places the slices of its own devices
        return jax.make_array_from_callback(host.shape, sharding, lambda i: host[i])

    return on_raw(placed, leaf)


@over_levels(outer=_index_outwards)
def _indices(
    *, over: Over = None, mesh: MeshLike = None, partition: PartitionLike = None
) -> jax.Array:
    """Return the indices of all groups as a partitioned value, int32 `[n]`.

    `drjax.partition_index` calls it, unless it refers to a partition of which the
    running code sees one group only. It is a function of its own, so that `over_levels`
    can map it over the outer levels; with these, it has the leading axes of all levels.
    """
    params = resolve("partition_index", mesh, partition)
    index = partition_index_p.bind(**params, per_group=False)
    return as_operand(index, make_layout(**params), True)


def _mapped_partitions(
    block: str, over: Over, partition: PartitionLike
) -> tuple[Partition, ...]:
    """Return the partitions of enclosing mapped functions that a block refers to.

    The building blocks `partition_index` and `partition_size` may be called in a mapped
    function, about the groups of which it sees one. But if a level or a program inside
    that function is ambient (`current_scope().partition` is not None), they are about
    that one by default.

    The partitions are outermost first. () if the block refers to none: it then acts on
    `partition`, or if that is None on the ambient partition.

    * With `partition`: it alone if an enclosing function is mapped over it; else (),
      also if it is a program with several levels.
    * Without `partition`, and no partition is ambient: the partition of the innermost
      mapped function; or if all levels of its program are mapped over, those that
      `over` names, by default all. () outside of mapped functions.
    * Without `partition`, and one is ambient: the levels that `over` names if all of
      them are mapped over; else (), also if `over` is None.
    """
    scope = current_scope()
    if partition is not None:
        if len(attached_levels(partition)) > 1:
            return ()
        explicit = as_partition(partition)
        if explicit not in scope.mapped:
            return ()
        check_alone(block, over)
        return (explicit,)
    if scope.partition is None:
        mapped = scope.mapped_levels
        return select_levels(block, over, mapped) if mapped else ()
    mapped = tuple(p for p in scope.levels if p in scope.mapped)
    names = (over,) if isinstance(over, str) else over or ()
    if names and {p.name for p in mapped}.issuperset(names):
        return select_levels(block, over, mapped)
    return ()
