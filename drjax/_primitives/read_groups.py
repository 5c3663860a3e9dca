"""The primitive `read_groups`: a group's data, which the host reads when it runs.

Input: the number of a reader, int32 `[]`, and the index of a group, int32 `[]`; under a
vmap, those of k groups, `[k]`. Output: the leaves of the group's data, `[*s]` or
`[k, *s]`. `slots` is how many groups each device has, so that readers know where the
groups of another device begin.

A program that reads the data of its groups has them in no operand: they are work of
each group. So a loop over chunks of groups holds those of a chunk, and a backward pass
that rematerializes reads them again.

Invariants: pure, as a reader gives the same data each time. No derivative rule, as its
operands are integers. Sharp edges: on the host, readers are found by their number in
`READERS`, while the compiled program has the number only: it is the same program for
other data of these types.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import batching
from jax.interpreters.mlir import LoweringRuleContext

from drjax import _compat
from drjax._compat.types import Array, Atom, Aval, ClosedJaxpr, Eqn, OpenJaxpr
from drjax._errors import EngineError
from drjax._jaxprs import walk
from drjax._primitives import registration
from drjax._primitives.chunks_on_host import first_and_count, manual, other_axes

read_groups_p = registration.new_primitive("read_groups", multiple_results=True)
# The same in the code of a device, at the end: the call of the host.
on_host_p = registration.new_primitive("read_groups_on_host", multiple_results=True)
# At the end of a program that has read: `raise_unread`.
raise_unread_p = registration.new_primitive("raise_unread")

# `reader(low, high, slots, copies)` reads the groups from `low` to before `high`, the
# leaves `[high - low, *s]`, for a device that has `slots` groups, and for others that
# have the same: `copies` of them.
Reader = Callable[[int, int, int, int], Sequence[np.ndarray]]
READERS: dict[int, Reader] = {}
_WIDE = {"float64", "int64", "uint64", "complex128"}


def raise_unread(numbers: Sequence[Array], outs: Sequence[Array]) -> list[Array]:
    """Return results, or raise an error if the data of a reader could not be read.

    Of several devices, an error of one while they run would let others wait forever, so
    that data that cannot be read are NaN until the end. `outs` are all results, and
    global: no device waits for another one when the first one has them. `numbers` are
    those of the readers.
    """
    probes = [x.ravel()[0] for x in outs if x.size]

    def check(*operands: Array) -> Array:
        return raise_unread_p.bind(*operands, count=len(numbers))

    # Each device raises: a later program, which takes the results, runs on none.
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.axis_names:
        check = manual(other_axes(mesh), check)
    done = check(*numbers, *probes) == 0
    # Only what a result needs is run. Random keys and the like have no zeros.
    used = [i for i, x in enumerate(outs) if jnp.issubdtype(x.dtype, np.number)][:1]
    first = {i: jnp.where(done, outs[i], 0).astype(outs[i].dtype) for i in used}
    return [first.get(i, x) for i, x in enumerate(outs)]


def readers_among_arguments(jaxpr: ClosedJaxpr) -> list[int]:
    """Return the positions of the arguments that are numbers of readers.

    They are followed back from where data are read by them, also through what returns
    them: a derivative of a branch takes them from the results of that branch.
    """
    raw = _compat.open_jaxpr(jaxpr)
    is_number = _numbers_among_arguments(raw, [False] * len(raw.outvars))
    return [i for i, x in enumerate(is_number) if x]


def _numbers_among_arguments(jaxpr: OpenJaxpr, is_number: Sequence[bool]) -> list[bool]:
    """Mark the arguments that are numbers of readers; `is_number` marks results."""
    marked = zip(jaxpr.outvars, is_number, strict=True)
    numbers: set[Any] = set(walk.variables(x for x, mark in marked if mark))
    for eqn in reversed(jaxpr.eqns):
        outs = [v in numbers for v in eqn.outvars]
        if eqn.primitive is read_groups_p:
            numbers.update(walk.variables(eqn.invars[:1]))
        elif bodies := _bodies(eqn):
            for body, operands, results in bodies:
                if not any(outs) and not _compat.has_primitive(body, _NAMES):
                    continue
                of_body = outs if results else [False] * len(body.outvars)
                marks = _numbers_among_arguments(body, of_body)
                marked = zip(operands, marks, strict=True)
                numbers.update(walk.variables(x for x, mark in marked if mark))
        elif any(outs):  # copies or selects it
            same = [x for x in eqn.invars if x.aval.dtype == jnp.int32]
            numbers.update(walk.variables(same))
    return [v in numbers for v in jaxpr.invars]


_NAMES = (read_groups_p.name,)


def _bodies(eqn: Eqn) -> list[tuple[OpenJaxpr, Sequence[Atom], bool]]:
    """List the jaxprs of a loop, branch, call or map, with the operands that they take.

    The last element tells whether their results are those of the equation.
    """
    if eqn.primitive.name == "while":
        of_condition, of_body, carry = walk.split_while(eqn, eqn.invars)
        condition, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
        return [
            (_compat.open_jaxpr(condition), [*of_condition, *carry], False),
            (_compat.open_jaxpr(body), [*of_body, *carry], True),
        ]
    bodies = []
    for inner in map(_compat.open_jaxpr, _compat.jaxprs_in(eqn.params)):
        # The branches of a cond do not take its index.
        operands = eqn.invars[max(0, len(eqn.invars) - len(inner.invars)) :]
        if len(operands) == len(inner.invars):  # else it combines two values
            results = len(inner.outvars) == len(eqn.outvars)
            bodies.append((inner, operands, results))
    return bodies


def _raise_on_host(*operands: Any, count: int) -> np.ndarray:
    for number in operands[:count]:
        reader: Any = READERS.get(int(np.ravel(number)[0]))
        if reader is not None:
            reader.raise_error()
    return np.zeros((), np.int32)


def _types_of(
    index: Any, types: Iterable[jax.ShapeDtypeStruct]
) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct((*index.shape, *t.shape), t.dtype) for t in types]


def _on_host(
    number: Any,
    index: Any,
    *,
    types: tuple[jax.ShapeDtypeStruct, ...],
    slots: int,
    copies: int,
) -> list[np.ndarray]:
    """Read the groups of a chunk."""
    index = np.asarray(index)
    if not index.size:
        return [np.zeros(t.shape, t.dtype) for t in _types_of(index, map(_sent, types))]
    reader = READERS.get(int(np.ravel(number)[0]))
    if reader is None:
        raise EngineError(
            "The Groups whose data a program reads were deleted before it ran. Keep a "
            "reference to them until you have its results."
        )
    first, count = first_and_count(index)
    leaves = reader(first, first + count, slots, copies)
    if count < index.size:
        # Padding has another group's data: here that of the first.
        slot = np.arange(index.size)
        leaves = [x[np.where(slot < count, slot, 0)] for x in leaves]
    return [_to_send(x, t, index.shape) for x, t in zip(leaves, types, strict=True)]


def _sent(t: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """The type as which the host sends it: 64 bits as uint32, at the end.

    JAX would cast what the host sends to 32 bits in a thread where x64 is not enabled.
    """
    if t.dtype.name not in _WIDE:
        return t
    return jax.ShapeDtypeStruct((*t.shape, t.dtype.itemsize // 4), np.uint32)


def _to_send(
    x: np.ndarray, t: jax.ShapeDtypeStruct, shape: tuple[int, ...]
) -> np.ndarray:
    if _sent(t) is not t:
        x = np.ascontiguousarray(x).reshape(*x.shape, 1).view(np.uint32)
    return x.reshape((*shape, *x.shape[1:]))


def _received(x: Array, t: jax.ShapeDtypeStruct) -> Array:
    if _sent(t) is t:
        return x
    if not np.issubdtype(t.dtype, np.complexfloating):
        return jax.lax.bitcast_convert_type(x, t.dtype)
    parts = jax.lax.bitcast_convert_type(x.reshape(*x.shape[:-1], 2, 2), np.float64)
    return jax.lax.complex(parts[..., 0], parts[..., 1])


def _read(
    number: Array,
    index: Array,
    *,
    types: tuple[jax.ShapeDtypeStruct, ...],
    slots: int,
) -> list[Array]:
    mesh = jax.sharding.get_abstract_mesh()
    others = other_axes(mesh)
    copies = math.prod(mesh.shape[a] for a in others) if mesh.manual_axes else 1
    params = {"types": types, "slots": slots, "copies": copies}

    def read(number: Array, index: Array) -> list[Array]:
        return on_host_p.bind(number, index, **params)

    if mesh.manual_axes and others:
        read = manual(others, read)
    outs = read(number, index)
    return [_received(x, t) for x, t in zip(outs, types, strict=True)]


def _lower_on_host(
    ctx: LoweringRuleContext, *operands: Any, **params: Any
) -> Sequence[Any]:
    call = lambda number, index: tuple(_on_host(number, index, **params))
    return _compat.call_host(ctx, call, operands)


def _abstract_eval(
    number: Aval, index: Aval, *, types: Iterable[jax.ShapeDtypeStruct], **_: int
) -> list[Aval]:
    return [_compat.ShapedArray(t.shape, t.dtype) for t in _types_of(index, types)]


def _abstract_on_host(
    number: Aval, index: Aval, *, types: Iterable[jax.ShapeDtypeStruct], **_: int
) -> list[Aval]:
    return _abstract_eval(number, index, types=map(_sent, types))


def _batch(
    args: Sequence[Array], dims: Sequence[int | None], **params: Any
) -> tuple[list[Array], Sequence[int | None]]:
    """Read the data of a batch of groups at once; their reader is the same."""
    (number, index), (of_number, of_index) = args, dims
    if of_number is not None:
        number = jax.lax.index_in_dim(number, 0, of_number, keepdims=False)
    if of_index is None:
        outs = read_groups_p.bind(number, index, **params)
        return outs, [None] * len(outs)
    outs = read_groups_p.bind(number, _compat.moveaxis(index, of_index, 0), **params)
    return outs, [0] * len(outs)


def _lower_raise(
    ctx: LoweringRuleContext, *operands: Any, **params: Any
) -> Sequence[Any]:
    call = lambda *operands: (_raise_on_host(*operands, **params),)
    return _compat.call_host(ctx, call, operands)


raise_unread_p.def_impl(
    lambda *args, **params: jnp.asarray(_raise_on_host(*args, **params))
)
raise_unread_p.def_abstract_eval(
    lambda *_, **__: _compat.ShapedArray((), jnp.dtype("int32"))
)
_compat.register_lowering_rule(raise_unread_p, _lower_raise)
on_host_p.def_impl(
    lambda *args, **params: [*map(jnp.asarray, _on_host(*args, **params))]
)
on_host_p.def_abstract_eval(_abstract_on_host)
_compat.register_lowering_rule(on_host_p, _lower_on_host)
registration.register_execution(read_groups_p, _read)
read_groups_p.def_abstract_eval(_abstract_eval)
batching.primitive_batchers[read_groups_p] = _batch
