"""The higher-order primitive `map_columns`: work on one coordinate of all groups.

`map_columns[jaxpr, kinds_in, kinds_out, coordinates, partition, mesh, name] x_1 ...`
applies `jaxpr`, which is written for one coordinate, to each coordinate c of an array
of the shape `coordinates`, `s` below. A column has the elements of all groups at one
coordinate of their slices. An operand or result has one of three kinds:

    kind           shape          for coordinate c, the jaxpr takes or returns
    "groups"       `[n, *s, *t]`  the column `[n, *t]`, partitioned
    "coordinates"  `[*s, *t]`     the element `[*t]`, global
    "whole"        `[*t]`         an operand: the same `[*t]`; a result: the sum over c

The rules transform the jaxpr of one coordinate and bind `map_columns` again. The kinds
are closed under AD: a linear operand's cotangent is a result of the operand's kind, as
an element that all coordinates share has the sum of their cotangents, and vice versa:

    JVP        y_c = f(x_c), and dy_c = Df(x_c) dx_c    two equations
    transpose  ct_x_c = Df(x_c)^T ct_y_c                one equation
    batching   f is batched behind the group axis       one equation
    DCE        f without dead equations                 at most one equation

No intermediate value of f is saved for the backward pass, which has x_c instead: a
residual would be as large as all groups' slices, and have a third layout.

On m devices, with k groups and d coordinates each, d padded to a multiple of m:

    "groups"       [k, d] -> all-to-all -> [n, d / m]      and back for a result
    "coordinates"  [d]    -> slice      -> [d / m]         an all-gather for a result
    "whole"        []     -> as it is                      an all-reduce for a result

Invariants: the jaxpr is closed, and has neither constants nor effects. It sees columns
of exactly n groups, as padding of the group axis is cut off before. Padding of the
coordinates consists of copies of the first one, and is left out of sums.
Sharp edges: the jaxpr was traced without VMA checking, so it runs without it; its
results then vary over all axes over which an operand varies. Where the work of groups
must be lowered by `vmap` (`map_fn.py`), each device gathers all columns. The caller
must not shard operands over other Explicit axes. Reverse mode inside a user's
`shard_map(check_vma=False)` is an error. Forward mode sends x twice, as values and
tangents are two equations.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias, Unpack

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad, batching

from drjax import _compat
from drjax._compat import UndefinedPrimal
from drjax._compat.types import (
    Array,
    Aval,
    ClosedJaxpr,
    Eqn,
    Flags,
    GlobalArray,
    Mesh,
    PartitionedArray,
)
from drjax._partition import Partition
from drjax._primitives import registration
from drjax._primitives.collectives import (
    check_transposable,
    execute_gather,
    execute_scatter,
)
from drjax._primitives.device_sums import accumulator, psum
from drjax._primitives.map_fn import (
    MapParams,
    group_context,
    lowers_by_vmap,
    prepare_for_shard_map,
)
from drjax._primitives.registration import AxisData, Tangent
from drjax._sharding.avals import column_aval, columns_aval
from drjax._sharding.execute import shard_map_over_devices, vary, with_sharding_of
from drjax._sharding.layout import Layout, Placement, make_layout

map_columns_p = registration.new_block("map_columns", multiple_results=True)

GROUPS, COORDINATES, WHOLE = "groups", "coordinates", "whole"
# One of these for each operand or result, in order. As a parameter of an equation, and
# in keys of caches, it is a tuple.
Kinds: TypeAlias = Sequence[str]


@contextlib.contextmanager
def column_context(layout: Layout) -> Iterator[None]:
    """Context manager in which the function of one coordinate is traced or transformed.

    It enters `group_context`, in which building blocks know that they are inside a map
    over the partition, and turns varying-manual-axes types off. With them, the
    transpose of what all coordinates share would be an all-reduce for each coordinate.
    """
    with group_context(layout), _compat.without_vma():
        yield


def trace_column(
    fn: Callable[..., Sequence[Array]],
    avals: Sequence[Aval],
    kinds: Kinds,
    coordinates: tuple[int, ...],
    layout: Layout,
    name: str,
) -> tuple[ClosedJaxpr, list[Array]]:
    """Trace a function of one coordinate, of flat sequences of arrays, to a jaxpr.

    `avals` are the types of the operands for all coordinates. Returns a closed jaxpr
    without constants, and the arrays and tracers that `fn` closes over: the jaxpr takes
    these as its first inputs.
    """
    with column_context(layout):
        skip = {GROUPS: len(coordinates), COORDINATES: len(coordinates), WHOLE: 0}
        avals = [
            column_aval(aval, layout, skip[kind], kind == GROUPS)
            for aval, kind in zip(avals, kinds, strict=True)
        ]
        return _compat.trace_to_jaxpr(fn, avals, name)


# ---------------------------------------------------------------------------------
# Types


def types_of_columns(
    *avals: Aval,
    jaxpr: ClosedJaxpr,
    kinds_out: Kinds,
    coordinates: tuple[int, ...],
    partition: Partition,
    mesh: Mesh | None,
    **_: Any,
) -> list[Aval]:
    """Abstract evaluation of `map_columns`: the types of its results."""
    layout = make_layout(partition, mesh)
    varying = frozenset[str]().union(*map(_compat.varying, avals))
    shapes = {
        GROUPS: (layout.group_axis_size, *coordinates),
        COORDINATES: coordinates,
        WHOLE: (),
    }
    return [
        columns_aval(aval, layout, shapes[kind], kind == GROUPS, varying)
        for aval, kind in zip(jaxpr.out_avals, kinds_out, strict=True)
    ]


# ---------------------------------------------------------------------------------
# Execution and lowering: by an all-to-all, or a gather


def execute_columns(
    *args: Array,
    jaxpr: ClosedJaxpr,
    kinds_in: Kinds,
    kinds_out: Kinds,
    coordinates: Sequence[int],
    partition: Partition,
    mesh: Mesh | None,
    name: str,
) -> list[Array]:
    """Apply a jaxpr to each coordinate; the header describes the kinds."""
    layout = make_layout(partition, mesh)
    shape, kinds = tuple(coordinates), (kinds_in, kinds_out)
    if lowers_by_vmap(layout, jaxpr):
        run = functools.partial(
            evaluate_columns,
            jaxpr=jaxpr,
            kinds_in=kinds_in,
            kinds_out=kinds_out,
            coordinates=shape,
            partition=partition,
        )
        params: Placement = {"partition": partition, "mesh": mesh}
        return by_gather_and_scatter(
            run, args, kinds, execute_gather, execute_scatter, params
        )
    fn = _compat.jaxpr_as_checked_fun(prepare_for_shard_map(layout, jaxpr))

    def body(*args) -> list[Array]:
        *args, first = args
        device = first[0] // layout.per_device
        return _run_device(layout, fn, kinds, shape, args, device)

    partitioned_in, partitioned_out = (
        [kind == GROUPS for kind in side] for side in kinds
    )
    # The surrounding check_vma: users' loops inside were traced under it.
    return shard_map_over_devices(
        layout,
        body,
        args,
        partitioned_in,
        partitioned_out,
        _compat.check_vma(),
        with_first_index=True,
    )


def evaluate_columns(
    *args: Array,
    jaxpr: ClosedJaxpr,
    kinds_in: Kinds,
    kinds_out: Kinds,
    coordinates: Sequence[int],
    partition: Partition,
    mesh: Mesh | None = None,
    name: str | None = None,
) -> list[Array]:
    """Apply the jaxpr of one coordinate to all coordinates, where all slices are.

    It does on one device what `execute_columns` does; the operands may be tracers.
    """
    del mesh, name
    fn, local = _compat.jaxpr_as_checked_fun(jaxpr), make_layout(partition, None)
    return _run_device(local, fn, (kinds_in, kinds_out), tuple(coordinates), args)


def by_gather_and_scatter(
    run: Callable[..., Sequence[Array]],
    args: Sequence[Array],
    kinds: tuple[Kinds, Kinds],
    gather: Callable[..., GlobalArray],
    scatter: Callable[..., PartitionedArray],
    params: Placement,
) -> list[Array]:
    """Run a function of all groups' slices, between a gather and a scatter.

    It is for work that needs the slices of all groups at once. `gather` decides which
    device gets them: usually each device gets all slices, and computes everything; in a
    plan the server does.

    `kinds` are those of the operands and those of the results. Operands of the kind
    `GROUPS` are gathered before `run`, which takes and returns flat sequences with `[n,
    *s]` for this kind; results of it are scattered after it. All others pass as they
    are. `params` are the keywords of `gather` and of `scatter`, its inverse:
    `partition` and `mesh`.
    """
    pairs = zip(args, kinds[0], strict=True)
    outs = run(*[gather(x, **params) if k == GROUPS else x for x, k in pairs])
    pairs = zip(outs, kinds[1], strict=True)
    return [scatter(y, **params) if k == GROUPS else y for y, k in pairs]


def _run_device(
    layout: Layout,
    fn: Callable[..., Sequence[Array]],
    kinds: tuple[Kinds, Kinds],
    coordinates: tuple[int, ...],
    args: Sequence[Array],
    device: Array | int = 0,
) -> list[Array]:
    """Run a function of one coordinate for a device's share of the coordinates.

    It is called in the code of one device: inside a `shard_map` over the partition's
    axes, or in a local program, where the device has all groups and all coordinates.
    Each device has its groups' slices at all d coordinates. An all-to-all gives it all
    groups' elements for d / m of the coordinates, the last ones perhaps padding. It
    runs the function on these, and collectives return the results for all coordinates.

    Operands and results are those of one device: `[k, *s, *t]` of the kind "groups",
    `[*s, *t]` of "coordinates", and `[*t]` of "whole", of a result the sum over all
    coordinates, not only those of the device. `kinds` are those of the operands and
    those of the results; `device` is the device's index along the partition's axes,
    int32 `[]`.
    """
    d = math.prod(coordinates)
    chunk = -(-d // layout.devices)
    args = [
        _own_columns(layout, x, kind, coordinates, chunk, device)
        for x, kind in zip(args, kinds[0], strict=True)
    ]
    varying = set(layout.axes).union(
        *(_compat.varying(_compat.typeof(x)) for x in args)
    )
    mapped = jax.vmap(
        lambda *xs: fn(*xs),
        in_axes=tuple({GROUPS: 1, COORDINATES: 0, WHOLE: None}[k] for k in kinds[0]),
        out_axes=[1 if kind == GROUPS else 0 for kind in kinds[1]],
        axis_size=chunk,
    )
    with _compat.without_vma():  # as the jaxpr was traced
        outs = mapped(*args)
    real = None
    if chunk * layout.devices != d:
        real = device * chunk + lax.iota(jnp.int32, chunk) < d
    outs = [vary(y, varying) for y in outs]
    sums = [
        _sum_coordinates(y, real)
        for y, kind in zip(outs, kinds[1], strict=True)
        if kind == WHOLE
    ]
    sums = iter(psum(layout, *sums) if sums else ())
    return [
        next(sums) if kind == WHOLE else _all_columns(layout, y, kind, coordinates)
        for y, kind in zip(outs, kinds[1], strict=True)
    ]


def _own_columns(
    layout: Layout,
    x: Array,
    kind: str,
    coordinates: tuple[int, ...],
    chunk: int,
    device: Array | int,
) -> Array:
    """Return the part of an operand for a device's share of the coordinates.

    It is called in the code of one device, with the operand that the device has. The d
    coordinates are in their flat order; device j gets the `chunk` ones (d / m, rounded
    up) from `j * chunk` on. Coordinates beyond d are padding, which holds copies of the
    first coordinate.

    The result is `[n, chunk, *t]` for "groups", the elements of all n groups, by an
    all-to-all; `[chunk, *t]` for "coordinates"; and `x` itself for "whole".
    """
    if kind == WHOLE:
        return x
    axis = 1 if kind == GROUPS else 0
    d, t = math.prod(coordinates), x.shape[axis + len(coordinates) :]
    x = lax.reshape(x, (*x.shape[:axis], d, *t))
    if not layout.axes:
        return x
    if d and (extra := chunk * layout.devices - d):
        # Copies of a real coordinate: loops there end, and nothing is divided by zero.
        first = lax.slice_in_dim(x, 0, 1, axis=axis)
        shape = (*x.shape[:axis], extra, *t)
        copies = lax.broadcast_in_dim(first, shape, range(x.ndim))
        x = lax.concatenate([x, copies], axis)
    if kind == COORDINATES:
        x = vary(x, layout.axes)
        return lax.dynamic_slice_in_dim(x, device * chunk, chunk)
    if x.size:
        x = lax.all_to_all(vary(x, layout.axes), layout.axes, 1, 0, tiled=True)
        return lax.slice_in_dim(x, 0, layout.partition.size)
    return jnp.zeros((layout.partition.size, chunk, *t), x.dtype)


def _sum_coordinates(x: Array, real: Array | None) -> Array:
    """Sum the results `[chunk, *t]` of a device's coordinates, in their dtype.

    16-bit floats are added in float32. `real`, bool `[chunk]`, is False for padding,
    which is left out; None if there is none.
    """
    if real is not None:
        mask = lax.broadcast_in_dim(real, x.shape, (0,))
        x = jnp.where(mask, x, jnp.zeros((), x.dtype))
    return jnp.sum(x, axis=0, dtype=accumulator(x.dtype)).astype(x.dtype)


def _all_columns(
    layout: Layout, y: Array, kind: str, coordinates: tuple[int, ...]
) -> Array:
    """Collect a result of the devices' shares of the coordinates into all coordinates.

    It is the inverse of `_own_columns`, for "groups" and "coordinates": an all-to-all
    to `[k, *s, *t]`, with zeros in padded slots; and an all-gather to `[*s, *t]`, the
    same on all devices. Padding of the coordinates is cut off.
    """
    axis, k = (1, layout.per_device) if kind == GROUPS else (0, 0)
    d, t = math.prod(coordinates), y.shape[axis + 1 :]
    lead = (k,) * axis
    if not y.size:
        y = jnp.zeros((*lead, d, *t), y.dtype)
        y = vary(y, layout.axes) if axis else y
    elif layout.axes and kind == GROUPS:
        extra = layout.num_slots - layout.partition.size
        config = [(0, extra, 0)] + [(0, 0, 0)] * (y.ndim - 1)
        y = lax.pad(y, jnp.zeros((), y.dtype), config)
        y = lax.all_to_all(vary(y, layout.axes), layout.axes, 0, 1, tiled=True)
    elif layout.axes:
        # All devices have the same result. With VMA checking its type must say so.
        to = "invarying" if _compat.check_vma() else "varying"
        y = lax.all_gather(y, layout.axes, tiled=True, to=to)
    y = lax.slice_in_dim(y, 0, d, axis=axis)
    return lax.reshape(y, (*lead, *coordinates, *t))


# ---------------------------------------------------------------------------------
# Derivatives


class ColumnParams(MapParams):
    """The parameters of `map_columns` but its jaxpr and the kinds of its operands."""

    coordinates: tuple[int, ...]


def _bind_live(
    jaxpr: ClosedJaxpr,
    used_outputs: Flags,
    args: Sequence[Array],
    kinds_in: Kinds,
    *,
    kinds_out: Kinds,
    **params: Unpack[ColumnParams],
) -> list[Array]:
    """Bind `map_columns` for a jaxpr without what its unused results need.

    It is for jaxprs of derivatives. Dead code of the jaxpr is eliminated, and operands
    that only dead code uses are left out. The jaxpr may have constants, as users'
    derivative rules close over arrays: they become operands of the kind "whole".

    `used_outputs` says for each result of the jaxpr whether to compute it; `kinds_out`
    are those of the used results, which are returned. If none is used, nothing is
    bound.
    """
    if not any(used_outputs):
        return []
    jaxpr, consts = _compat.without_consts(jaxpr)
    jaxpr, used = _compat.dce_jaxpr(jaxpr, used_outputs)
    args, kinds_in = [*consts, *args], [*[WHOLE] * len(consts), *kinds_in]
    select = lambda xs: [x for x, u in zip(xs, used, strict=True) if u]
    return map_columns_p.bind(
        *select(args),
        jaxpr=jaxpr,
        kinds_in=tuple(select(kinds_in)),
        kinds_out=kinds_out,
        **params,
    )


# y_c = f(x_c), dy_c = Df(x_c) dx_c. Two equations, so that the second is linear in dx,
# and a partial evaluation that knows x knows y.
def _jvp(
    primals: Sequence[Array],
    tangents: Sequence[Tangent],
    *,
    jaxpr: ClosedJaxpr,
    kinds_in: Kinds,
    kinds_out: Kinds,
    **params: Unpack[ColumnParams],
) -> tuple[Sequence[Array], Sequence[Tangent]]:
    outs = map_columns_p.bind(
        *primals, jaxpr=jaxpr, kinds_in=kinds_in, kinds_out=kinds_out, **params
    )
    avals = [_compat.typeof(y) for y in outs]
    kinds = {"kinds_in": kinds_in, "kinds_out": kinds_out}
    return outs, tangents_of_columns(
        primals, tangents, avals, jaxpr=jaxpr, **kinds, **params
    )


def tangents_of_columns(
    primals: Sequence[Array],
    tangents: Sequence[Tangent],
    avals: Sequence[Aval],
    *,
    jaxpr: ClosedJaxpr,
    kinds_in: Kinds,
    kinds_out: Kinds,
    **params: Unpack[ColumnParams],
) -> list[Tangent]:
    """Compute the tangents of a `map_columns` equation, without its results.

    It binds one `map_columns` equation for the derivative of the jaxpr of one
    coordinate; none if all tangents are symbolic zeros. `avals` are the types of the
    results of the equation, and `params` are its other parameters.
    """
    nonzeros = [type(t) is not _compat.Zero for t in tangents]
    layout = make_layout(params["partition"], params["mesh"])
    with column_context(layout):
        jvp_jaxpr, nonzeros_out = _compat.jvp_jaxpr(jaxpr, nonzeros)
    select = lambda xs, flags: [x for x, f in zip(xs, flags, strict=True) if f]
    # A jvp_jaxpr returns the primal results first, and only nonzero tangents.
    used = [False] * len(avals) + [True] * sum(nonzeros_out)
    dense = _bind_live(
        jvp_jaxpr,
        used,
        [*primals, *select(tangents, nonzeros)],
        [*kinds_in, *select(kinds_in, nonzeros)],
        kinds_out=tuple(select(kinds_out, nonzeros_out)),
        **params,
    )
    return registration.fill_zeros(avals, nonzeros_out, dense)


# sum_c <L_c dx_c, ct_c> = sum_c <dx_c, L_c^T ct_c>: each coordinate has its transpose.
# If dx is whole, this is <dx, sum_c L_c^T ct_c>; if a result is, ct_c = ct for all c.
def _transpose(
    cts: Sequence[Tangent],
    *args: Array | UndefinedPrimal,
    jaxpr: ClosedJaxpr,
    kinds_in: Kinds,
    kinds_out: Kinds,
    **params: Unpack[ColumnParams],
) -> list[Tangent | None]:
    """Transpose by one equation, for all linear operands."""
    layout = make_layout(params["partition"], params["mesh"])
    check_transposable(layout)
    linear = tuple(ad.is_undefined_primal(x) for x in args)
    nonzero = tuple(type(ct) is not _compat.Zero for ct in cts)
    operands = [
        *((x, k) for x, k, lin in zip(args, kinds_in, linear, strict=True) if not lin),
        *((ct, k) for ct, k, nz in zip(cts, kinds_out, nonzero, strict=True) if nz),
    ]
    values, kinds = [x for x, _ in operands], tuple(k for _, k in operands)
    avals = tuple(map(_compat.typeof, values))
    transposed, consts, nonzero_in = _transpose_jaxpr(
        jaxpr, linear, nonzero, avals, kinds, params["coordinates"], layout
    )
    of_linear = [k for k, lin in zip(kinds_in, linear, strict=True) if lin]
    outs = _bind_live(
        transposed,
        [True] * sum(nonzero_in),
        [*consts, *values],
        [*[WHOLE] * len(consts), *kinds],
        kinds_out=tuple(k for k, nz in zip(of_linear, nonzero_in, strict=True) if nz),
        **params,
    )
    avals = [x.aval for x, lin in zip(args, linear, strict=True) if lin]
    dense = iter(registration.fill_zeros(avals, nonzero_in, outs))
    pairs = zip(args, linear, strict=True)
    return [with_sharding_of(next(dense), x.aval) if lin else None for x, lin in pairs]


# Cached: an eager backward pass transposes the same jaxpr at each step of training.
@_compat.weakref_lru_cache
def _transpose_jaxpr(
    jaxpr: ClosedJaxpr,
    linear: tuple[bool, ...],
    nonzero: tuple[bool, ...],
    avals: tuple[Aval, ...],
    kinds: tuple[str, ...],
    coordinates: tuple[int, ...],
    layout: Layout,
) -> tuple[ClosedJaxpr, tuple[Array, ...], tuple[bool, ...]]:
    """Transpose the jaxpr of one coordinate in its `linear` inputs; cached.

    The other inputs are residuals. `nonzero` says for each result whether its cotangent
    is no symbolic zero; `avals` and `kinds` are those of the residuals and then of
    these cotangents, for all coordinates.

    Returns the closed jaxpr; the values that it closes over; and for each linear input
    whether its cotangent is no symbolic zero. The jaxpr takes these values, the
    residuals and the nonzero cotangents; it returns the nonzero cotangents of linear
    inputs.
    """
    # The jaxpr of a tangent computes what it needs of the primals, which is not linear.
    with column_context(layout):
        known, unknown, unknown_out, computed, forwarded = _compat.partial_eval_jaxpr(
            jaxpr, linear
        )
    backward, nonzero_in = registration.backward_function(
        unknown,
        [False] * len(forwarded) + [True] * sum(linear),
        [nz for nz, u in zip(nonzero, unknown_out, strict=True) if u],
    )
    # A result that depends on no linear input drops its cotangent.
    dropped = [not u for nz, u in zip(nonzero, unknown_out, strict=True) if nz]
    primal, n_known = _compat.jaxpr_as_fun(known), len(known.in_avals)

    def transposed(*values: Array) -> list[Array]:
        outs = primal(*values[:n_known])
        saved = iter(outs[len(outs) - len(computed) :])
        residuals = [next(saved) if i is None else values[i] for i in forwarded]
        pairs = zip(values[n_known:], dropped, strict=True)
        cts = [ct for ct, drop in pairs if not drop]
        return backward(*residuals, *cts)

    transposed_jaxpr, consts = trace_column(
        transposed, avals, kinds, coordinates, layout, "transposed"
    )
    return transposed_jaxpr, tuple(consts), tuple(nonzero_in)


# ---------------------------------------------------------------------------------
# Dead-code elimination and batching


def _dce(used_outputs: list[bool], eqn: Eqn) -> tuple[list[bool], Eqn | None]:
    """Eliminate dead code of the equation, and of its jaxpr."""
    if not any(used_outputs):
        return [False] * len(eqn.invars), None
    jaxpr, used_inputs = _compat.dce_jaxpr(eqn.params["jaxpr"], used_outputs)
    live = lambda xs, used: [x for x, u in zip(xs, used, strict=True) if u]
    kinds_in = tuple(live(eqn.params["kinds_in"], used_inputs))
    kinds_out = tuple(live(eqn.params["kinds_out"], used_outputs))
    changed = {"jaxpr": jaxpr, "kinds_in": kinds_in, "kinds_out": kinds_out}
    return used_inputs, _compat.new_eqn(
        eqn,
        live(eqn.invars, used_inputs),
        live(eqn.outvars, used_outputs),
        {**eqn.params, **changed},
        _compat.effects_of(jaxpr),
    )


def _batch(
    axis_data: AxisData,
    args: Sequence[Array],
    dims: Sequence[int | None],
    *,
    jaxpr: ClosedJaxpr,
    kinds_in: Kinds,
    kinds_out: Kinds,
    coordinates: tuple[int, ...],
    **params: Unpack[MapParams],
) -> tuple[Sequence[Array], list[int | None]]:
    """Batch the jaxpr of one coordinate.

    The batch dimension goes behind n and the coordinates, as the first one of `t`. An
    operand without a batch dimension stays without one: it is neither copied nor
    communicated for each element of the batch.
    """
    shift = {GROUPS: len(coordinates), COORDINATES: len(coordinates), WHOLE: 0}
    lead = {GROUPS: 1, COORDINATES: 0, WHOLE: 0}
    moved = [
        x if dim is None else _compat.moveaxis(x, dim, lead[kind] + shift[kind])
        for x, dim, kind in zip(args, dims, kinds_in, strict=True)
    ]
    in_axes = [
        None if dim is None else lead[kind]
        for dim, kind in zip(dims, kinds_in, strict=True)
    ]
    layout = make_layout(params["partition"], params["mesh"])
    with column_context(layout):
        batched, axes = _compat.batch_jaxpr(jaxpr, axis_data, in_axes)
        low = [
            axis is not None and axis < lead[kind]
            for axis, kind in zip(axes, kinds_out, strict=True)
        ]
        if any(low):
            batched = _groups_first(batched, tuple(low))
    axes = [1 if is_low else axis for axis, is_low in zip(axes, low, strict=True)]
    outs = map_columns_p.bind(
        *moved,
        jaxpr=batched,
        kinds_in=kinds_in,
        kinds_out=kinds_out,
        coordinates=coordinates,
        **params,
    )
    return outs, [
        None if axis is None else axis + shift[kind]
        for axis, kind in zip(axes, kinds_out, strict=True)
    ]


@_compat.weakref_lru_cache
def _groups_first(jaxpr: ClosedJaxpr, low: tuple[bool, ...]) -> ClosedJaxpr:
    """Move the batch dimension of some results behind their group axis; cached.

    Batching may put the batch dimension of a result at axis 0, but a column `[n, *t]`,
    the elements of all groups at one coordinate, needs its group axis there. `low` says
    for which results the two change places.
    """
    fn = _compat.jaxpr_as_fun(jaxpr)

    def moved(*args: Array) -> list[Array]:
        pairs = zip(fn(*args), low, strict=True)
        return [_compat.moveaxis(y, 0, 1) if is_low else y for y, is_low in pairs]

    return _compat.trace_to_jaxpr(moved, jaxpr.in_avals, "batched")[0]


registration.register_execution(map_columns_p, execute_columns)
map_columns_p.def_abstract_eval(types_of_columns)
ad.primitive_jvps[map_columns_p] = _jvp
ad.primitive_transposes[map_columns_p] = _transpose
_compat.register_dce(map_columns_p, _dce)
batching.fancy_primitive_batchers[map_columns_p] = _batch
