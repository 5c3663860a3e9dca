"""The higher-order primitive `map_columns`: work on one coordinate of all groups.

`map_columns[jaxpr, kinds_in, kinds_out, coordinates, partition, mesh, name] x_1 ...`
applies `jaxpr`, which is written for one coordinate, to each coordinate c of an array
of the shape `coordinates`, `s` below. An operand or result has one of three kinds:

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

Invariants: the jaxpr is closed, and has neither constants nor effects. A column has
exactly n groups, without padding. `columns_lowering` distributes the work.
Sharp edges: where the work of groups must be lowered by `vmap` (`map_fn.py`), each
device gathers all columns. The caller must not shard operands over other Explicit axes.
Reverse mode inside a user's `shard_map(check_vma=False)` is an error. Forward mode
sends x twice, as values and tangents are two equations.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax.interpreters import ad, batching

from drjax import _compat
from drjax._compat import UndefinedPrimal
from drjax._compat.types import Array, Aval, ClosedJaxpr, Eqn, Flags, Mesh
from drjax._partition import Partition
from drjax._primitives import registration
from drjax._primitives.collectives import check_transposable
from drjax._primitives.columns_lowering import (
    COORDINATES,
    GROUPS,
    WHOLE,
    Kinds,
    execute_columns,
)
from drjax._primitives.map_fn import group_context
from drjax._primitives.registration import AxisData, Tangent
from drjax._sharding.avals import column_aval, columns_aval
from drjax._sharding.execute import with_sharding_of
from drjax._sharding.layout import Layout, make_layout

map_columns_p = registration.new_primitive("map_columns", multiple_results=True)


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
# Derivatives


def _bind_live(
    jaxpr: ClosedJaxpr,
    used_outputs: Flags,
    args: Sequence[Array],
    kinds_in: Kinds,
    **params: Any,
) -> list[Array]:
    """Bind `map_columns` for a jaxpr without what its unused results need.

    It is for jaxprs of derivatives. Dead code of the jaxpr is eliminated, and operands
    that only dead code uses are left out. The jaxpr may have constants, as users'
    derivative rules close over arrays: they become operands of the kind "whole".

    `used_outputs` says for each result of the jaxpr whether to compute it; the kinds in
    `params` are those of the used results, which are returned. If none is used, nothing
    is bound.
    """
    if not any(used_outputs):
        return []
    jaxpr, consts = _compat.without_consts(jaxpr)
    jaxpr, used = _compat.dce_jaxpr(jaxpr, used_outputs)
    args, kinds_in = [*consts, *args], [*[WHOLE] * len(consts), *kinds_in]
    select = lambda xs: [x for x, u in zip(xs, used, strict=True) if u]
    return map_columns_p.bind(
        *select(args), jaxpr=jaxpr, kinds_in=tuple(select(kinds_in)), **params
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
    **params: Any,
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
    **params: Any,
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
    **params: Any,
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
    **params: Any,
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
