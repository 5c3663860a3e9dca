"""The primitive `write_groups`: the host takes the results of groups while it runs.

Input: the index of a group, int32 `[]`, and a leaf of its results, `[*s]`; under a
vmap, those of k groups, `[k]` and `[k, *s]`. Output: zeros, int32 as the indices, to
wait for. `writer` is the number of what takes them, `leaf` of which leaf these are, and
`n` the number of groups.

A program that writes the results of its groups has them in no result: they are work of
each group. So a loop over chunks of groups holds those of a chunk.

Invariants: pure for the compiler, as to write again what was written changes nothing:
slots of padding have copies of another group's results. No derivative rule: nobody
reads what is written. Sharp edges: on the host, writers are found by their number in
`WRITERS`, and only while a call runs.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import batching
from jax.interpreters.mlir import LoweringRuleContext

from drjax import _compat
from drjax._compat.types import Array, Aval
from drjax._primitives import registration
from drjax._primitives.chunks_on_host import first_and_count, manual, other_axes

write_groups_p = registration.new_primitive("write_groups")
# The same in the code of a device, at the end: the call of the host.
on_host_p = registration.new_primitive("write_groups_on_host")

# `writer(leaf, n, low, slices)` takes those of the groups from `low` on, `[k, *s]`.
Writer = Callable[[int, int, int, np.ndarray], None]
WRITERS: dict[int, Writer] = {}


def _on_host(index: Any, slices: Any, *, writer: int, leaf: int, n: int) -> np.ndarray:
    """Pass on the groups of a chunk."""
    index, slices = np.asarray(index), np.asarray(slices)
    if index.size and writer in WRITERS:
        first, count = first_and_count(index)
        stack = slices.reshape(index.size, *slices.shape[index.ndim :])
        WRITERS[writer](leaf, n, first, stack[:count])
    return np.zeros(index.shape, np.int32)


def _write(index: Array, slices: Array, **params: int) -> Array:
    write = lambda index, slices: on_host_p.bind(index, slices, **params)
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.manual_axes and (others := other_axes(mesh)):
        write = manual(others, write)
    return write(index, slices)


def _abstract_eval(index: Aval, slices: Aval, **_: int) -> Aval:
    return _compat.ShapedArray(index.shape, jnp.dtype("int32"))


def _lower_on_host(
    ctx: LoweringRuleContext, *operands: Any, **params: int
) -> Sequence[Any]:
    call = lambda index, slices: (_on_host(index, slices, **params),)
    return _compat.call_host(ctx, call, operands)


def _batch(
    args: Sequence[Array], dims: Sequence[int | None], **params: int
) -> tuple[Array, int]:
    """Write the results of a batch of groups at once."""
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    index, slices = (
        batching.bdim_at_front(x, d, size) for x, d in zip(args, dims, strict=True)
    )
    return write_groups_p.bind(index, slices, **params), 0


on_host_p.def_impl(lambda *args, **params: jnp.asarray(_on_host(*args, **params)))
on_host_p.def_abstract_eval(_abstract_eval)
_compat.register_lowering_rule(on_host_p, _lower_on_host)
registration.register_execution(write_groups_p, _write)
write_groups_p.def_abstract_eval(_abstract_eval)
batching.primitive_batchers[write_groups_p] = _batch
