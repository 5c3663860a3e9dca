"""The primitive `partition_index`: which group is this?

Outside a mapped function it is the partitioned value `int32 [n]`. Inside one, it is
an equation without operands that yields this group's index, `int32 []`
(`per_group=True`). `map_fn` runs its function under a vmap whose axis name is a
`GroupAxis`; the batching rule below recognises that axis, however deep in scans,
conditionals and nested programs the equation stands, and any other axis leaves it
alone. As the equation closes over nothing, it is safe inside cached inner jits.
"""

from dataclasses import dataclass
from typing import Any

from jax.interpreters import batching

from drjax._partition import Partition
from drjax._primitives import registration
from drjax._sharding.avals import number_aval, partitioned_aval
from drjax._sharding.execute import all_row_numbers, on_devices, vary
from drjax._sharding.layout import layout
from drjax._sharding.padding import own_numbers

partition_index_p = registration.new_primitive("partition_index")


@dataclass(frozen=True)
class GroupAxis:
    """The axis name of the vmap over the groups that one device holds, or over all."""

    partition: Partition
    mesh: Any


def _partition_index(*, partition, mesh, per_group):
    assert not per_group, "a group's index exists only inside a mapped function"
    where = layout(partition, mesh)

    def body(numbers):
        return [vary(numbers, where.axes)]

    return on_devices(where, body, [], [], [True], numbered=True)[0]


def _partition_index_abstract_eval(*, partition, mesh, per_group):
    if per_group:
        return number_aval(partition)
    return partitioned_aval(number_aval(None), layout(partition, mesh))


def _partition_index_batch(axis_data, args, dims, *, partition, mesh, per_group):
    axis = axis_data.name
    if per_group and isinstance(axis, GroupAxis) and axis.partition == partition:
        where = layout(axis.partition, axis.mesh)
        if where.sharded and axis_data.size == where.padded != where.per_device:
            return own_numbers(where, all_row_numbers(where), 0), 0
        numbers = where.row_numbers()
        numbers = own_numbers(where, numbers, numbers[:1])[: axis_data.size]
        return vary(numbers, where.axes), 0
    index = partition_index_p.bind(partition=partition, mesh=mesh, per_group=per_group)
    return index, None


registration.register_execution(partition_index_p, _partition_index)
partition_index_p.def_abstract_eval(_partition_index_abstract_eval)
batching.fancy_primitive_batchers[partition_index_p] = _partition_index_batch
