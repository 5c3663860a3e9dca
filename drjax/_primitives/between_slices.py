"""Collectives between TPU slices, divided over the mesh axes inside a slice.

Input: a collective over a partition's axes, and the values of one device, inside a
`shard_map` over these axes. Output: the results of the collective.

Slices are joined by a network that is slower than the one inside a slice (ICI) by an
order of magnitude. If the partition's axes go from slice to slice, and other axes lie
inside slices, a value that is replicated over the latter would be sent between slices
by each of their devices. Hand-written code divides it: of d devices inside, each sends
a d-th part, and an all-gather inside the slice completes the result (Cho et al. 2019,
"BlueConnect: decomposing all-reduce for deep learning on heterogeneous network
hierarchy").

Over which axes a value is replicated, types say of Explicit axes only. Over Auto axes,
the compiler decides, after drjax has lowered the program. So the value is multiplied
by a mask of ones, a `select`, whose sharding says for each dimension that all axes
inside a slice may divide it. That sharding comes to the product through a broadcast,
and the compiler propagates shardings through broadcasts only after those of pointwise
operations: axes that shard the value already stay, and those that are left divide it.
The mask costs nothing, as a `select` by a constant is simplified. What is divided so is
kept from the operations around the collective: their shardings are as without it.

Invariants: values, and without slices also the compiled code, are those of the plain
collective. Sharp edges: the devices are known if `jax.set_mesh` or `mesh=` names them;
under an abstract mesh nothing is divided.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters.mlir import LoweringRuleContext
from jax.sharding import AxisType, reshard
from jax.sharding import PartitionSpec as P

from drjax import _compat
from drjax._compat.types import Array, Aval, ClosedJaxpr, DeviceArray
from drjax._primitives import registration
from drjax._sharding.execute import (
    full_of_type,
    on_explicit_shards,
    types_of,
    vary,
    with_shardings_of,
)
from drjax._sharding.layout import Layout, axes_inside_slices

# To gather fewer bytes inside a slice takes longer than to send them to another one.
SMALL = 2**14

Collective = Callable[..., Sequence[Array]]


def divided_inside_slices(
    axes: tuple[str, ...],
    collective: Collective,
    xs: Sequence[Array],
    along: Sequence[int | None] = (),
) -> Sequence[Array]:
    """Run a collective over mesh axes; between slices, each device sends its part.

    `collective(*xs)` returns a value for each of `xs`. It has the same shape, but for
    the dimension in `along`, if that is given: along it, the collective communicates.
    """
    divided = lambda inside, *xs: divide(collective, inside, xs, along)
    return by_network(axes, collective, divided, xs)


def divide(
    collective: Collective,
    inside: tuple[str, ...],
    xs: Sequence[Array],
    along: Sequence[int | None] = (),
) -> Sequence[Array]:
    """Run a collective on the parts of values that idle axes inside slices divide.

    On Explicit axes it runs on a device's own shards.
    """
    pairs = itertools.zip_longest(xs, along)
    parts = [_part(x, inside, dim) for x, dim in pairs]
    run = lambda xs: list(collective(*xs))
    explicit = AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types
    ys = on_explicit_shards(run, parts) if explicit else run(parts)
    divided = [i for i, part in enumerate(parts) if part is not xs[i]]
    if divided:
        pairs = [(ys[i], xs[i]) for i in divided]
        for i, y in zip(divided, _completed(*zip(*pairs, strict=True)), strict=True):
            ys[i] = y
    return ys


def by_network(
    axes: tuple[str, ...],
    collective: Collective,
    divided: Collective,
    xs: Sequence[Array],
) -> Sequence[Array]:
    """Run `collective(*xs)`; if it goes between slices, `divided(inside, *xs)`.

    Both return the same, and close over no arrays. `inside` are the mesh axes inside
    slices, which are known when the code is lowered.
    """
    avals = [*map(_compat.typeof, xs)]
    if not (free_axes() and _large(avals)):
        return collective(*xs)
    run = lambda *xs: tuple(collective(*xs))
    jaxpr, consts = _compat.trace_to_jaxpr(run, avals, "collective")
    params = {"axes": axes, "collective": jaxpr, "divided": divided}
    return by_network_p.bind(*consts, *xs, consts=len(consts), **params)


def all_gather(layout: Layout, x: DeviceArray) -> Array:
    """Gather the slices of all devices, `[m * k, *s]`, from those of one, `[k, *s]`.

    Shards of Auto axes, too, are gathered before they are sent: XLA does not divide an
    all-gather in a `shard_map`. So between slices values are flattened, and divided.
    """
    axes = layout.axes
    gather = lambda x: [lax.all_gather(vary(x, axes), axes, tiled=True, to=same())]

    def columns(inside: tuple[str, ...], x: Array) -> Array:
        to_all = lambda y: [lax.all_gather(y, inside, axis=1, tiled=True, to=same())]
        return after_arrival(to_all, *gather(x[None]))[0]

    def divided(inside: tuple[str, ...], x: Array) -> Sequence[Array]:
        if layout.other_explicit_axes:
            return divide(gather, inside, [x], [0])
        flat = x.reshape(-1)
        flat = jnp.pad(flat, (0, -flat.size % count_of(inside)))
        y = on_parts(inside, functools.partial(columns, inside), flat, 0)
        return [y[:, : x.size].reshape(-1, *x.shape[1:])]

    return by_network(axes, gather, divided, [x])[0]


def same() -> str:
    """Return the argument `to` of an all-gather whose result is equal on all devices.

    With VMA checking, the type must say so; without it, JAX has one type only.
    """
    return "invarying" if _compat.check_vma() else "varying"


def on_parts(
    inside: tuple[str, ...],
    fn: Callable[[Array], Array],
    x: Array,
    axis: int,
    out: int | None = None,
) -> Array:
    """Run `fn` on the part of a value that a device inside a slice has along an axis.

    Auto mesh axes divide the axis evenly. They divide axis `out` of the result; with
    None, it is the same on their devices.
    """
    spec, vma = P(*[None] * axis, inside), _compat.check_vma()
    whole = P() if out is None else P(*[None] * out, inside)
    run = jax.shard_map(
        fn, in_specs=spec, out_specs=whole, axis_names=set(inside), check_vma=vma
    )
    return run(x)


def _large(avals: Sequence[Aval]) -> bool:
    """Return whether values have as many bytes as are worth to be divided."""
    shapes = [aval.shape for aval in avals]
    if not all(isinstance(size, int) for shape in shapes for size in shape):
        return False
    return sum(aval.size * aval.dtype.itemsize for aval in avals) >= SMALL


def count_of(axes: tuple[str, ...]) -> int:
    """Return the number of devices along free mesh axes."""
    return math.prod(free_axes()[axis] for axis in axes)


def free_axes() -> dict[str, int]:
    """Return the mesh axes in context, larger than one, that are not Manual."""
    mesh = jax.sharding.get_abstract_mesh()
    return {
        axis: size
        for axis, size in mesh.shape_tuple
        if size > 1 and axis not in mesh.manual_axes
    }


def _part(x: Array, inside: tuple[str, ...], along: int | None) -> Array:
    """Let the devices inside a slice divide a value that is replicated over them.

    `x` itself is returned if it is small, or if no dimension can be divided.
    """
    aval = _compat.typeof(x)
    if not _large([aval]):
        return x
    mesh, sizes = jax.sharding.get_abstract_mesh(), free_axes()
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    explicit = [axis for axis in inside if kinds[axis] == AxisType.Explicit]
    auto = [axis for axis in inside if kinds[axis] == AxisType.Auto]
    spec = _with_axes(aval, explicit, sizes, along)
    masked = _masks(x, auto, sizes, along)
    if spec is None and masked is None:
        return x
    if masked is not None:
        x = lax.select(masked, _compat.forward_only(x), jnp.zeros_like(x))
    return x if spec is None else reshard(x, spec)


def _masks(
    x: Array, axes: Sequence[str], sizes: dict[str, int], along: int | None
) -> Array | None:
    """Make a mask of ones that asks the compiler to divide a dimension by the axes.

    If there are several, the value may be sharded over some of them, in any dimension.
    Then each dimension has a mask. All of them come to the value as one, so that it
    gets one sharding, whatever of them the compiler heeds.
    """
    masks = []
    for dim, size in enumerate(x.shape):
        fitting = _fitting(axes, sizes, size)
        if dim != along and fitting:
            ones = lax.with_sharding_constraint(jnp.ones(size, bool), P(fitting))
            masks.append(lax.broadcast_in_dim(ones, x.shape, (dim,)))
    masks = masks[: None if len(axes) > 1 else 1]
    if not masks:
        return None
    return with_shardings_of([functools.reduce(jnp.logical_and, masks)], [x])[0]


def _with_axes(
    aval: Aval, axes: Sequence[str], sizes: dict[str, int], along: int | None
) -> P | None:
    """Return how a value lies if Explicit axes that it does not use divide it, too.

    The first dimensions that they fit divide it. None if there are none.
    """
    spec = [*aval.sharding.spec, *[None] * aval.ndim][: aval.ndim]
    used = {axis for entry in spec for axis in _axes_of(entry)}
    idle = [axis for axis in axes if axis not in used]
    for dim, size in enumerate(aval.shape):
        taken = _axes_of(spec[dim])
        left = size // math.prod(sizes.get(axis, 1) for axis in taken)
        fitting = _fitting(idle, sizes, left)
        if dim != along and fitting:
            spec[dim] = (*taken, *fitting)
            idle = [axis for axis in idle if axis not in fitting]
    return None if tuple(spec) == tuple(aval.sharding.spec) else P(*spec)


def _axes_of(entry: Any) -> tuple[str, ...]:
    """Return the mesh axes in an entry of a `PartitionSpec`."""
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


def _fitting(axes: Sequence[str], sizes: dict[str, int], size: int) -> tuple[str, ...]:
    """Return the first of these axes, as many as divide a dimension evenly."""
    count, product = 0, 1
    for axis in axes:
        product *= sizes[axis]
        if not size or size % product:
            break
        count += 1
    return tuple(axes[:count])


def _completed(ys: Sequence[Array], xs: Sequence[Array]) -> list[Array]:
    """Complete the results of a divided collective, which lie as its operands `xs`."""
    specs = [_compat.typeof(x).sharding.spec for x in xs]
    auto = AxisType.Auto in jax.sharding.get_abstract_mesh().axis_types

    def complete(*ys: Array) -> list[Array]:
        whole = [
            y if _compat.typeof(y).sharding.spec == spec else reshard(y, spec)
            for y, spec in zip(ys, specs, strict=True)
        ]
        return [*map(_compat.unrelated, whole)] if auto else whole

    completed = after_arrival(complete, *ys)
    return [*map(_lying_as, completed, xs)] if auto else completed


def _lying_as(y: Array, x: Array) -> Array:
    """Return `y`, which Auto axes shard as `x`; the size of a dimension may differ."""
    for dim, (a, b) in enumerate(zip(x.shape, y.shape, strict=True)):
        if a > b:
            x = lax.slice_in_dim(x, 0, b, axis=dim)
        elif a < b:
            edges = [(0, b - a if i == dim else 0, 0) for i in range(x.ndim)]
            x = lax.pad(x, jnp.zeros((), x.dtype), edges)
    # Operands and result of a pointwise operation have one sharding.
    x, ones = with_shardings_of([x, jnp.ones(y.shape, bool)], [y, y])
    return lax.select(ones, y, x)


def after_arrival(fn: Collective, *xs: Array) -> list[Array]:
    """Run `fn`, which gathers inside slices what has come from others, when it is used.

    The compiler for TPUs overlaps an all-gather with any loop that does not need it.
    Before that loop it would wait for what comes from other slices, which takes longer,
    and which the loop was to hide. It moves nothing out of a branch.
    """

    def in_branch(*xs: Array) -> list[Array]:
        types = types_of(lambda *xs: list(fn(*xs)), *xs)
        zeros = lambda *xs: [full_of_type(like, 0) for like in types]
        known_at_run_time = lax.optimization_barrier(jnp.int32(1)) > 0
        return lax.cond(known_at_run_time, lambda *xs: list(fn(*xs)), zeros, *xs)

    return lax.platform_dependent(*xs, tpu=in_branch, default=lambda *xs: list(fn(*xs)))


# ---------------------------------------------------------------------------------
# by_network: a collective whose code depends on the network

by_network_p = registration.new_primitive("by_network", multiple_results=True)


def _plain(*xs: Array, collective: ClosedJaxpr, **others: Any) -> list[Array]:
    return _compat.jaxpr_as_fun(collective)(*xs)


def _abstract_eval(
    *avals: Aval, collective: ClosedJaxpr, **others: Any
) -> tuple[list[Aval], Any]:
    return collective.out_avals, _compat.effects_of(collective)


def _lowering_rule(
    ctx: LoweringRuleContext,
    *values: Any,
    axes: tuple[str, ...],
    collective: ClosedJaxpr,
    divided: Collective,
    consts: int,
) -> Sequence[Any]:
    mesh = _compat.devices_of_shard_map(ctx)
    free = free_axes()
    inside = () if mesh is None else axes_inside_slices(mesh, axes)
    if not (inside := tuple(axis for axis in inside if axis in free)):
        return _compat.emit_jaxpr(ctx, collective, values)
    operands = [*zip(values, ctx.avals_in, strict=True)][consts:]
    avals = tuple(aval for _, aval in operands)
    jaxpr, own = _trace_divided(divided, inside, avals)
    run = lambda *xs: _compat.jaxpr_as_fun(jaxpr)(*own, *xs)
    if own:
        return _compat.lower_function(ctx, run, operands, True)
    return _compat.emit_jaxpr(ctx, jaxpr, values[consts:])


@_compat.cache()
def _trace_divided(
    divided: Collective, inside: tuple[str, ...], avals: tuple[Aval, ...]
) -> tuple[ClosedJaxpr, list[Array]]:
    run = lambda *xs: tuple(divided(inside, *xs))
    return _compat.trace_to_jaxpr(run, avals, "divided")


by_network_p.def_impl(_plain)
by_network_p.def_effectful_abstract_eval(_abstract_eval)
_compat.register_lowering_rule(by_network_p, _lowering_rule)
