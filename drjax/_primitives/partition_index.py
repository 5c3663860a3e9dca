"""The primitive `partition_index`: the index of each group.

Input: no operands. Output: in a program, the partitioned value `int32 [n]`, y_i = i.
Inside a mapped function (`per_group=True`), the index of the group, `int32 []`.

`map_fn` runs its function under a vmap whose axis name is a `GroupAxis`. The batching
rule recognizes that axis, however deep in scans, conditionals and nested programs the
equation stands. Under any other axis the equation is unbatched: its value is the same
for the whole batch. There is no derivative rule, as it has no operands.

Where each device has one group, no vmap runs it: `with_index_of_device` replaces the
equation by those that compute the index from the position of the device.

Invariants: the index depends on the group only, never on devices or blocks. A padded
slot has the index of its device's first group, as it has that group's operands; where
one vmap has the slots of all devices, that is group 0.
Sharp edges: the equation closes over nothing, so inner jits may cache it; a per-group
equation outside a map has no value, and its execution rule asserts that.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax
from jax.interpreters import batching

from drjax import _compat
from drjax._compat.types import (
    Array,
    Aval,
    ClosedJaxpr,
    DeviceArray,
    Eqn,
    Mesh,
    PartitionedArray,
)
from drjax._jaxprs import walk
from drjax._partition import Partition
from drjax._primitives import registration
from drjax._primitives.registration import AxisData
from drjax._sharding.avals import index_aval, partitioned_aval
from drjax._sharding.execute import all_group_indices, shard_map_over_devices, vary
from drjax._sharding.layout import Layout, make_layout
from drjax._sharding.padding import copy_index_to_padding

partition_index_p = registration.new_block("partition_index")


@dataclass(frozen=True)
class GroupAxis:
    """The axis name of a vmap over the groups of a partition: of one device, or all.

    JAX passes it to batching rules. That of `partition_index` compares its partition
    with that of the equation, so that the vmap of a nested program gives no index of
    the outer partition. No name in users' code is equal to it. `mesh` is that of the
    layout, or None.
    """

    partition: Partition
    mesh: Any


# Cached, so that lowering a jaxpr twice gives the same object, and later caches hit.
@_compat.weakref_lru_cache
def with_index_of_device(jaxpr: ClosedJaxpr, layout: Layout) -> ClosedJaxpr:
    """Replace the index of the only group of a device, in the jaxpr of that group.

    The jaxpr has the types of a device's code. One without the index is returned.
    """

    def rule(eqn: Eqn) -> list[Eqn] | None:
        if eqn.params.get("partition") != layout.partition:
            return None
        if eqn.primitive is partition_index_p and eqn.params["per_group"]:
            return _index_equations(eqn, layout)
        return [eqn]  # an equal partition in its jaxpr is that of an inner program

    return walk.rewrite_equations(jaxpr, rule)


def _index_equations(eqn: Eqn, layout: Layout) -> list[Eqn]:
    """Make the equations that compute the index `eqn` from the device's position."""
    sizes = dict(layout.mesh.shape_tuple) if layout.mesh is not None else {}
    with eqn.ctx.manager:
        index = lambda: lax.squeeze(layout.group_indices(), (0,))
        env = [(axis, sizes[axis]) for axis in layout.axes]
        traced = _compat.open_jaxpr(jax.make_jaxpr(index, axis_env=env)())
    names, eqns = walk.copy_equations(traced.eqns, [])
    result = {names[traced.outvars[0]]: eqn.outvars[0]}
    return [
        new.replace(
            outvars=walk.substitute(new.outvars, result),
            effects=eqn.effects,  # none: that of a named axis means nothing to lowering
            source_info=eqn.source_info,
        )
        for new in eqns
    ]


def execute_partition_index(
    *, partition: Partition, mesh: Mesh | None, per_group: bool
) -> PartitionedArray:
    """Compute all group indices of a program, 0 to n - 1, int32 `[n]`.

    `per_group` has to be False. In a mapped function it is True; the value there comes
    from the batching rule, and the equation is never executed.
    """
    assert not per_group, "a group's index exists only inside a mapped function"
    layout = make_layout(partition, mesh)

    def body(indices: DeviceArray) -> list[DeviceArray]:
        return [vary(indices, layout.axes)]

    return shard_map_over_devices(layout, body, [], [], [True], with_indices=True)[0]


def _partition_index_abstract_eval(
    *, partition: Partition, mesh: Mesh | None, per_group: bool
) -> Aval:
    if per_group:
        return index_aval()
    return partitioned_aval(index_aval(), make_layout(partition, mesh))


def _partition_index_batch(
    axis_data: AxisData,
    args: Sequence[Array],
    dims: Sequence,
    *,
    partition: Partition,
    mesh: Mesh | None,
    per_group: bool,
) -> tuple[Array, int | None]:
    """Batching rule of `partition_index`: under a vmap over groups, it gives indices.

    The vmap is over the groups of the equation if its axis name is a `GroupAxis` with
    an equal partition. Its size is a number of slots (places for one group): of all
    devices, of one device, or fewer. Returns the group index of each slot, int32
    `[slots]`, and 0. A padded slot has the index of the group whose slices it holds
    copies of: group 0 if the vmap is over the slots of all devices, else the first
    group of its device.

    Under any other vmap, and if `per_group` is False, the equation is bound again
    without a batch dimension, as its value is the same for the whole batch.
    """
    axis = axis_data.name
    if per_group and isinstance(axis, GroupAxis) and axis.partition == partition:
        layout = make_layout(axis.partition, axis.mesh)
        # The size of the axis tells the lowering: by vmap, it has the slots of all
        # devices; in a shard_map, those of one device, or fewer (work with effects).
        if layout.sharded and axis_data.size == layout.num_slots != layout.per_device:
            return copy_index_to_padding(layout, all_group_indices(layout), 0), 0
        # In a user's shard_map over the partition's axes, types of one group do not
        # vary over them.
        with _compat.without_vma() if layout.manual else contextlib.nullcontext():
            indices = layout.group_indices()
        indices = copy_index_to_padding(layout, indices, indices[:1])[: axis_data.size]
        return (indices if layout.manual else vary(indices, layout.axes)), 0
    # Another axis: an inner vmap of the user's, or of another partition.
    index = partition_index_p.bind(partition=partition, mesh=mesh, per_group=per_group)
    return index, None


registration.register_execution(partition_index_p, execute_partition_index)
partition_index_p.def_abstract_eval(_partition_index_abstract_eval)
batching.fancy_primitive_batchers[partition_index_p] = _partition_index_batch
