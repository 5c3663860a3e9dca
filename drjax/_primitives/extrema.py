"""The primitives `reduce_max` and `reduce_min` and all of their rules.

Input: one leaf `[n, *s]` of real numbers or bools. Output: its extremum over the
groups, `[*s]`, in the same dtype.

The JVP is a composition of the other primitives, so that a derivative is again a
MapReduce program. With y = max_i x_i and ties shared equally, as in `jnp.max`:

    dy = (sum_i [x_i = y] dx_i) / #{j : x_j = y}

It is linear in dx, so its transpose is that of the other primitives: a broadcast of
ct_y / #{j : x_j = y}, and a map that selects. A group saves bools, not numbers.

Invariants: NaN wins on each device and across devices; padding is neutral.
Sharp edges: the comparison x_i = y needs bitwise the x_i that the extremum was taken
of. An optimization barrier prevents that the compiler rematerializes x in between.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, Unpack

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad
from jax.interpreters.mlir import LoweringRuleContext
from jax.typing import DTypeLike

from drjax import _compat
from drjax._compat.jax_types import Primitive
from drjax._compat.types import (
    Array,
    Aval,
    DeviceArray,
    GlobalArray,
    Mesh,
    Params,
    PartitionedArray,
)
from drjax._partition import Partition
from drjax._primitives import partial_reduction, registration
from drjax._primitives.between_slices import divided_inside_slices
from drjax._primitives.collectives import broadcast_p, reduce_sum_p
from drjax._primitives.lowered_equations import MlirValue
from drjax._primitives.map_fn import map_slices
from drjax._primitives.registration import SlotIndices, Tangent
from drjax._primitives.segments import (
    InSegments,
    operand_of_device,
    placed_of,
    reduce_segments,
)
from drjax._sharding.avals import global_aval
from drjax._sharding.execute import shard_map_over_devices, vary
from drjax._sharding.layout import Layout, Placement, make_layout

reduce_max_p = registration.new_block("reduce_max")
reduce_min_p = registration.new_block("reduce_min")


# A reduction of the slices of a device to `[*s]`, without padding.
_Local: TypeAlias = Callable[[Layout, DeviceArray | InSegments, SlotIndices], Array]


def _executor(local: _Local, largest: bool) -> Callable:
    """Make the execution function of `reduce_max` (`largest`) or `reduce_min`.

    With `num`, it takes the segments and the slices of the groups.
    """

    def execute(
        *xs: PartitionedArray,
        partition: Partition,
        mesh: Mesh | None,
        num: int | None = None,
    ) -> GlobalArray:
        layout = make_layout(partition, mesh)

        def body(*xs: DeviceArray) -> list[Array]:
            x, indices = operand_of_device(layout, xs, num)
            y = local(layout, x, indices)
            return [across_devices(y, layout.axes, largest) if layout.axes else y]

        return shard_map_over_devices(
            layout, body, xs, [True] * len(xs), [False], with_indices=layout.uneven
        )[0]

    return execute


_UFUNCS = {jnp.max: np.maximum, jnp.min: np.minimum}


def _local_extremum(
    reduce: Callable[..., Array], identity: Callable[[DTypeLike], Any]
) -> _Local:
    """Make the reduction of a device's slices, which leaves out padding.

    `reduce` is `jnp.max` or `jnp.min`, and `identity` makes of a dtype the number that
    replaces padding before the reduction: the lowest one for a maximum, the highest one
    for a minimum.
    """

    def local(
        layout: Layout, x: DeviceArray | InSegments, indices: SlotIndices
    ) -> Array:
        fill = identity(x.dtype)
        if isinstance(x, InSegments):
            own = x.without_padding(layout, indices)
            return reduce_segments(_UFUNCS[reduce], own, fill, x.dtype)
        return reduce(layout.mask_padding(x, indices, fill), axis=0)

    return local


def across_devices(x: Array, axes: tuple[str, ...], largest: bool) -> Array:
    """Compute a value's maximum or minimum over the devices of mesh axes; NaN wins.

    It is called inside a `shard_map` over these axes, one or more, for `[*s]` of real
    numbers or bools. It is a `pmax` or `pmin`, but collectives on some platforms drop
    NaN. So the devices compare integers: the bits of floats in the order of the floats,
    with NaN beyond the infinities. For i >= 0 the bits of a float, read as an integer,
    are in its order; for i < 0 (sign bit set) they are in reverse, and i ^ max, which
    flips all bits but the sign, restores it.
    """
    run = lambda x: [_across_devices(vary(x, axes), axes, largest)]
    return divided_inside_slices(axes, run, [x])[0]


def _across_devices(x: Array, axes: tuple[str, ...], largest: bool) -> Array:
    """Do as `across_devices`, with the whole value."""
    collective = functools.partial(_extremum_of_integers, largest=largest)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return collective(x, axes)
    # 8-bit floats differ in their infinities and NaNs; float32 holds all their values.
    dtype = x.dtype
    if dtype.itemsize == 1:
        x = x.astype(jnp.float32)
    bits = jnp.dtype(f"int{8 * x.dtype.itemsize}")
    limits = jnp.iinfo(bits)
    flip = lambda i: jnp.where(i < 0, i ^ limits.max, i)  # its own inverse
    nan = limits.max if largest else limits.min
    order = flip(lax.bitcast_convert_type(x, bits))
    order = collective(jnp.where(jnp.isnan(x), jnp.asarray(nan, bits), order), axes)
    return lax.bitcast_convert_type(flip(order), x.dtype).astype(dtype)


def _extremum_of_integers(x: Array, axes: tuple[str, ...], largest: bool) -> Array:
    """Compute the maximum or minimum of integers or bools over mesh axes."""
    collective = lax.pmax if largest else lax.pmin
    whole = lambda x: collective(x, axes)
    if x.dtype.itemsize < 8:
        return whole(x)
    halves = lambda x: by_halves(x, axes, largest)
    return lax.platform_dependent(x, tpu=halves, default=whole)


def by_halves(x: Array, axes: tuple[str, ...], largest: bool) -> Array:
    """Compute the maximum or minimum of 64-bit integers by those of 32 bits.

    For TPUs, which compare no 64-bit numbers in an all-reduce: that of the high halves
    first, and then of the low halves where the high one is the extremum.
    """
    collective = lax.pmax if largest else lax.pmin
    high = (x >> 32).astype(jnp.dtype(x.dtype.name.replace("64", "32")))
    low = (x & 0xFFFFFFFF).astype(jnp.uint32)
    first = collective(high, axes)
    loses = jnp.uint32(0 if largest else 0xFFFFFFFF)
    second = collective(jnp.where(vary(first, axes) == high, low, loses), axes)
    return (first.astype(x.dtype) << 32) | second.astype(x.dtype)


def lowest(dtype: DTypeLike) -> Any:
    """Return the identity of a maximum: -inf if a dtype has it, else its lowest number.

    The dtype is of real numbers or of bools, of which False is the lowest.
    """
    return _limit(dtype, -jnp.inf, "min")


def highest(dtype: DTypeLike) -> Any:
    """Return the identity of a minimum: inf if a dtype has it, else its highest number.

    The dtype is of real numbers or of bools, of which True is the highest.
    """
    return _limit(dtype, jnp.inf, "max")


def _limit(dtype: DTypeLike, infinity: float, side: str) -> Any:
    """Return `infinity` if a dtype has it, else the dtype's lowest or highest number.

    `side` is the attribute of `jnp.finfo` or `jnp.iinfo` to read: "max" or "min".
    """
    if dtype == jnp.bool_:
        return side == "max"
    if not jnp.issubdtype(dtype, jnp.inexact):
        return getattr(jnp.iinfo(dtype), side)
    if np.isinf(np.asarray(infinity, dtype)):
        return infinity
    return getattr(jnp.finfo(dtype), side)  # some 8-bit floats have no infinities


# A slice attains the extremum unless it is less, or greater: NaN is attained by all.
def _ones_unless(away: Array, x: Array) -> Array:
    """Mark by 1, else 0, where a slice of `x` attains the extremum."""
    return jnp.where(away, jnp.zeros((), x.dtype), jnp.ones((), x.dtype))


def _unless(away: Array, dx: Array) -> Array:
    """Keep a tangent where a slice attains the extremum; it is 0 elsewhere."""
    return jnp.where(away, 0, dx)


def _jvp_rule(
    primitive: Primitive, compare: Callable[[Array, Array], Array]
) -> Callable:
    """Make the JVP rule of `reduce_max_p` or `reduce_min_p`.

    The tangent of the extremum is, elementwise, the mean of the tangents of the groups
    that attain the extremum.
    """

    def jvp(
        primals: tuple[PartitionedArray],
        tangents: tuple[PartitionedArray],
        *,
        partition: Partition,
        mesh: Mesh | None,
    ) -> tuple[GlobalArray, Tangent]:
        (x,), (dx,) = primals, tangents
        params: Params = {"partition": partition, "mesh": mesh}
        # The compiler may duplicate the computation of x, with other rounding, for the
        # comparison. Then x_i = y for no i. The barrier makes both uses read one x.
        x = lax.optimization_barrier(x)
        y = primitive.bind(x, **params)
        if not jnp.issubdtype(x.dtype, jnp.inexact):  # a loop's integers have tangents
            return y, _compat.Zero(_compat.typeof(y).to_tangent_aval())
        away = map_slices(compare, x, broadcast_p.bind(y, **params), **params)
        ones = map_slices(_ones_unless, away, x, **params)
        # At least 1: some group attains the extremum. Where it is NaN, so is `share`.
        share = lax.reciprocal(reduce_sum_p.bind(ones, **params))
        share = jnp.where(y == y, share, y)
        own = map_slices(_unless, away, dx, **params)
        return y, reduce_sum_p.bind(own, **params) * share

    return jvp


def _lowering_rule(
    primitive: Primitive, ufunc: np.ufunc, identity: Callable, execute: Callable
) -> Callable:
    """Make the lowering rule of an extremum: a `reduction_rule`.

    Where it does not merge, `execute`, the execution function, is lowered, for slices
    in segments of the slices.
    """

    def alone(
        ctx: LoweringRuleContext, x: MlirValue, **params: Unpack[Placement]
    ) -> Sequence[MlirValue]:
        aval: Aval = ctx.avals_in[0]
        placed = placed_of(ctx, x, params, ufunc, identity(aval.dtype))
        if placed is not None:
            return _compat.lower_function(
                ctx, execute, placed.operands, False, num=placed.num, **params
            )
        return _compat.lower_cached_function(ctx, execute, (x, aval), **params)

    return partial_reduction.reduction_rule(primitive, alone)


def _abstract_eval(x: Aval, *, partition: Partition, mesh: Mesh | None) -> Aval:
    # As `jnp.max`, the execution returns no weak type.
    return global_aval(x, make_layout(partition, mesh)).update(weak_type=False)


for _primitive, _reduce, _identity, _largest in (
    (reduce_max_p, jnp.max, lowest, True),
    (reduce_min_p, jnp.min, highest, False),
):
    _ufunc, _local = _UFUNCS[_reduce], _local_extremum(_reduce, _identity)
    _execute = _executor(_local, _largest)
    registration.register_execution(
        _primitive, _execute, _lowering_rule(_primitive, _ufunc, _identity, _execute)
    )
    _across = functools.partial(across_devices, largest=_largest)
    partial_reduction.register_merging(
        _primitive, partial_reduction.Merging(_local, _across, _ufunc, _identity)
    )
    _primitive.def_abstract_eval(_abstract_eval)
    ad.primitive_jvps[_primitive] = _jvp_rule(
        _primitive, lax.lt if _largest else lax.gt
    )
    registration.register_batching(_primitive, -1, group_axis_in=True)
