"""An exchange in two legs, with work of the groups behind each of them.

Input: a sum whose devices have parts of it, as of `result="sharded"`, and what groups
compute meanwhile. Output: the whole sum.

Numbers in few bits take two collectives: an all-to-all, after which each device adds up
its part, and an all-gather of these parts. With the work of groups in two halves,

    parts = reduce_sum(x, wire=..., result="sharded")        the first leg
    ...                                                      half of the work
    parts = received_after([parts], work, sharded=True)
    whole = complete(parts, wire)                            the second leg
    ...                                                      the other half
    whole = received_after([whole], work)

a compiler can hide both. The compilers for TPUs and GPUs wait for what was sent before
such work if they like to, that for GPUs always; an `optimization_barrier` does not keep
them from that. So `received_after` makes a dependency that is none: of the
results on whether each number of the work has some bits, or none.

Invariants: both are the identity but for the rounding of `wire`, also of tangents, and
under a vmap. Sharp edges: in a plan `received_after` is a fence of the server, and
`complete` work of the server, of which devices are known when it is lowered.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad, batching
from jax.sharding import AxisType

from drjax._compat.types import Array, Aval, GlobalArray, Mesh, PartitionedArray
from drjax._partition import Partition
from drjax._plan.wire import Wire
from drjax._primitives import registration
from drjax._primitives.between_slices import (
    by_network,
    on_parts,
)
from drjax._primitives.device_sums import all_gather_bytes, scattered_axis
from drjax._primitives.wire_codes import decode, encode
from drjax._sharding.execute import shard_map_over_devices, sharded_spec
from drjax._sharding.layout import (
    Placement,
    devices_in_context,
    find_mesh,
    make_layout,
)


def auto_devices_in_context(partition: Partition) -> int:
    """Over how many devices the mesh in context, of Auto axes, divides the groups."""
    types = set(jax.sharding.get_abstract_mesh().axis_types)
    return devices_in_context(partition) if types == {AxisType.Auto} else 1


def is_divided(partition: Partition) -> bool:
    """Whether the mesh in context, of Auto axes, divides the groups over devices."""
    return auto_devices_in_context(partition) > 1


# ---------------------------------------------------------------------------------
# received_after: global values, and a partitioned one for which they wait

received_after_p = registration.new_primitive("received_after", multiple_results=True)
_WITH_ASYNCHRONOUS_COLLECTIVES = "tpu", "cuda", "rocm"


def received_after(
    xs: Sequence[GlobalArray],
    work: PartitionedArray,
    on: Placement,
    sharded: bool = False,
) -> list[GlobalArray]:
    """Return global values that nothing reads before `work`, floats, is computed.

    `sharded`: the devices have parts of them.
    """
    return received_after_p.bind(*xs, work, sharded=sharded, **on)


def _execute_received_after(
    *operands: Array, partition: Partition, mesh: Mesh | None, sharded: bool
) -> list[GlobalArray]:
    *xs, work = operands
    layout = make_layout(partition, mesh)
    if not layout.sharded or layout.uneven:
        return list(lax.optimization_barrier(operands)[:-1])

    def by_order(work: Array, *xs: Array) -> list[Array]:
        return list(lax.optimization_barrier((work, *xs))[1:])

    def by_data(work: Array, *xs: Array) -> list[Array]:
        bits = lax.bitcast_convert_type(work.real.astype(jnp.float32), jnp.int32)
        always = jnp.all(lax.population_count(bits) >= 0)
        return [jnp.where(always, x, jnp.zeros_like(x)) for x in xs]

    def body(work: Array, *xs: Array) -> Sequence[Array]:
        platforms = dict.fromkeys(_WITH_ASYNCHRONOUS_COLLECTIVES, by_data)
        return lax.platform_dependent(work, *xs, **platforms, default=by_order)

    of_parts = lambda x: sharded_spec(layout, scattered_axis(layout, x.shape))
    specs = [of_parts(x) if sharded else False for x in xs]
    # Without VMA checking: the results would vary as `work` does.
    return shard_map_over_devices(
        layout, body, [work, *xs], [True, *specs], specs, check_vma=False
    )


registration.register_execution(received_after_p, _execute_received_after)
received_after_p.def_abstract_eval(lambda *avals, **_: list(avals[:-1]))


def _received_after_jvp(
    primals: Sequence[Array], tangents: Sequence[Any], **params: Any
) -> tuple[list[Array], list[Any]]:
    return received_after_p.bind(*primals, **params), list(tangents[:-1])


ad.primitive_jvps[received_after_p] = _received_after_jvp
batching.primitive_batchers[received_after_p] = lambda xs, dims, **_: (
    xs[:-1],
    dims[:-1],
)

# ---------------------------------------------------------------------------------
# complete: numbers of which the devices have parts -> all of them on each

complete_p = registration.new_primitive("complete")


def complete(x: GlobalArray, wire: Wire, partition: Partition) -> GlobalArray:
    """Gather float32 numbers, of which devices have parts, in codes of a `wire`.

    Of `[m, d, *s]` on m devices, each has a part `[1, d, *s]`, and each of d devices
    inside a slice whole blocks, `[1, 1, *s]`.
    """
    return complete_p.bind(x, partition=partition, wire=wire)


def _execute_complete(
    x: GlobalArray, *, partition: Partition, wire: Wire
) -> GlobalArray:
    layout = make_layout(partition, find_mesh(partition))
    axis = scattered_axis(layout, x.shape) if layout.sharded else None
    if axis is None or layout.devices == 1:
        return x

    def gather(x: Array) -> list[Array]:
        every = all_gather_bytes(layout.axes, encode(x.reshape(-1), wire))
        return [decode(every, wire).reshape(-1, *x.shape[1:])]

    def divided(inside: tuple[str, ...], x: Array) -> list[Array]:
        return [on_parts(inside, lambda x: gather(x)[0], x, 1, out=1)]

    body = lambda x: by_network(layout.axes, gather, divided, [x])
    spec = sharded_spec(layout, axis)
    return shard_map_over_devices(layout, body, [x], [spec], [False])[0]


def _complete_abstract_eval(x: Aval, **_: Any) -> Aval:
    return x.update(weak_type=False)


registration.register_execution(complete_p, _execute_complete)
complete_p.def_abstract_eval(_complete_abstract_eval)
ad.primitive_jvps[complete_p] = lambda primals, tangents, **params: (
    complete_p.bind(*primals, **params),
    tangents[0],
)
batching.primitive_batchers[complete_p] = lambda xs, dims, **_: (xs[0], dims[0])
