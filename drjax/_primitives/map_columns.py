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
Sharp edges: where the work of groups must be lowered by `vmap` (`map_lowering`), each
device gathers all columns. The caller must not shard operands over other Explicit axes.
Reverse mode inside a user's `shard_map(check_vma=False)` is an error. Forward mode
sends x twice, as values and tangents are two equations.
"""

import contextlib
from collections.abc import Sequence

from jax.interpreters import ad, batching

from drjax import _compat
from drjax._primitives import registration
from drjax._primitives.collectives import check_transposable
from drjax._primitives.columns_lowering import (
    COORDINATES,
    GROUPS,
    WHOLE,
    execute_columns,
)
from drjax._primitives.map_fn import group_context
from drjax._sharding.avals import column_aval, columns_aval
from drjax._sharding.execute import with_sharding_of
from drjax._sharding.layout import Layout, make_layout

map_columns_p = registration.new_primitive("map_columns", multiple_results=True)


@contextlib.contextmanager
def column_context(layout: Layout):
    """Context manager in which the function of one coordinate is traced or transformed.

    A coordinate is a position in a group's slice; its column is the n numbers that the
    groups have there. `map_columns` maps one function over all coordinates.

    It enters `group_context`, in which building blocks know that they are inside a map
    over the partition, and turns varying-manual-axes types off. With them, the
    transpose of what all coordinates share would be an all-reduce for each coordinate.
    The context manager yields None.

    Args:
      layout: The layout of the partition.
    """
    with group_context(layout), _compat.without_vma():
        yield


def trace_column(fn, avals, kinds, coordinates, layout: Layout, name: str):
    """Trace a function of one coordinate to a jaxpr.

    The kind of an operand is "groups" if it is partitioned, `[n, *s, *t]` for
    coordinates of the shape `s`; "coordinates" if it is a global value `[*s, *t]`;
    "whole" if all coordinates share it, `[*t]`.

    Args:
      fn: Takes and returns flat sequences of arrays: for an operand of the kind
        "groups" a column `[n, *t]`, the elements of all groups at the coordinate; else
        `[*t]`.
      avals: The types of the operands, for all coordinates.
      kinds: For each operand its kind.
      coordinates: The shape `s` of the coordinates, a tuple.
      layout: The layout of the partition.
      name: The name of the function, for debug information.

    Returns:
      `(jaxpr, consts)`: a closed jaxpr without constants, and the list of the arrays
      and tracers that `fn` closes over. The jaxpr takes `consts` as its first inputs.
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
    *avals, jaxpr, kinds_out, coordinates, partition, mesh, **_
) -> list:
    """Abstract evaluation of `map_columns`: the types of its results.

    Args:
      *avals: The types of the operands.
      jaxpr: The closed jaxpr of one coordinate.
      kinds_out: For each result its kind: "groups", "coordinates" or "whole".
      coordinates: The shape of the coordinates, a tuple.
      partition: The `Partition`, of n groups.
      mesh: The mesh, or None.
      **_: The further parameters, ignored.
    """
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


def _bind_live(jaxpr, used_outputs: Sequence[bool], args, kinds_in, **params) -> list:
    """Bind `map_columns` for a jaxpr without what its unused results need.

    It is for jaxprs of derivatives. Dead code of the jaxpr is eliminated, and operands
    that only dead code uses are left out.

    Args:
      jaxpr: The closed jaxpr of one coordinate, perhaps with constants: users'
        derivative rules close over arrays. These become operands of the kind "whole",
        which all coordinates share.
      used_outputs: For each result of the jaxpr whether to compute it.
      args: Its operands, for all coordinates.
      kinds_in: For each operand its kind: "groups", "coordinates" or "whole".
      **params: The parameters `kinds_out`, with the kinds of the used results only,
        `coordinates`, `partition`, `mesh` and `name` of the equation.

    Returns:
      The list of the used results. If none is used, nothing is bound, and it is [].
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
def _jvp(primals, tangents, *, jaxpr, kinds_in, kinds_out, **params):
    """JVP rule of `map_columns`: an equation for the results, and one for the tangents.

    The kind of an operand or result is "groups" if it is partitioned, `[n, *s, *t]` for
    coordinates of the shape `s`; "coordinates" if it is a global value `[*s, *t]`;
    "whole" if it is `[*t]` for all coordinates.

    Args:
      primals: The operands.
      tangents: For each operand its tangent, of the same kind, or a symbolic zero.
      jaxpr: The closed jaxpr of one coordinate.
      kinds_in: For each operand its kind, a tuple.
      kinds_out: For each result its kind, a tuple.
      **params: The parameters `coordinates`, `partition`, `mesh` and `name`.

    Returns:
      `(results, tangents)`, two lists; a tangent may be a symbolic zero.
    """
    outs = map_columns_p.bind(
        *primals, jaxpr=jaxpr, kinds_in=kinds_in, kinds_out=kinds_out, **params
    )
    avals = [_compat.typeof(y) for y in outs]
    kinds = {"kinds_in": kinds_in, "kinds_out": kinds_out}
    return outs, tangents_of_columns(
        primals, tangents, avals, jaxpr=jaxpr, **kinds, **params
    )


def tangents_of_columns(
    primals, tangents, avals, *, jaxpr, kinds_in, kinds_out, **params
) -> list:
    """Compute the tangents of a `map_columns` equation, without its results.

    It binds one `map_columns` equation for the derivative of the jaxpr of one
    coordinate; none if all tangents are symbolic zeros.

    Args:
      primals: The operands of the equation.
      tangents: For each operand its tangent, of the same kind, or a symbolic zero.
      avals: The types of the results of the equation.
      jaxpr: The closed jaxpr of one coordinate.
      kinds_in: For each operand its kind, a tuple: "groups" (partitioned, `[n, *s, *t]`
        for coordinates of the shape `s`), "coordinates" (global, `[*s, *t]`) or "whole"
        (`[*t]` for all coordinates).
      kinds_out: For each result its kind, a tuple.
      **params: The parameters `coordinates`, `partition`, `mesh` and `name`.

    Returns:
      The list of tangents, one for each result; a tangent may be a symbolic zero.
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
def _transpose(cts, *args, jaxpr, kinds_in, kinds_out, **params):
    """Transpose rule of `map_columns`: one equation, for all linear operands.

    A value and its cotangent have the same kind: "groups" (partitioned, `[n, *s, *t]`
    for coordinates of the shape `s`), "coordinates" (global, `[*s, *t]`) or "whole"
    (`[*t]` for all coordinates; the cotangent of such an operand is a sum over the
    coordinates).

    Args:
      cts: For each result its cotangent, or a symbolic zero.
      *args: The operands: an `UndefinedPrimal` for those in which the jaxpr is linear.
      jaxpr: The closed jaxpr of one coordinate.
      kinds_in: For each operand its kind, a tuple.
      kinds_out: For each result its kind, a tuple.
      **params: The parameters `coordinates`, `partition`, `mesh` and `name`.

    Returns:
      A list with an element for each operand: for a linear one its cotangent, or a
      symbolic zero; for any other one None.

    Raises:
      MeshError: It runs inside a user's `shard_map(check_vma=False)` over the
        partition's axes, where cotangents are ambiguous.
    """
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
def _transpose_jaxpr(jaxpr, linear, nonzero, avals, kinds, coordinates, layout):
    """Transpose the jaxpr of one coordinate in its linear inputs; cached.

    Args:
      jaxpr: The closed jaxpr of one coordinate.
      linear: For each input whether the jaxpr is linear in it, a tuple of bools. The
        other inputs are residuals, which the transposed jaxpr takes, too.
      nonzero: For each result whether its cotangent is not a symbolic zero, a tuple.
      avals: The types of the residuals, and then of the nonzero cotangents of results,
        for all coordinates; a tuple.
      kinds: For each of these its kind, a tuple: "groups", "coordinates" or "whole".
      coordinates: The shape of the coordinates, a tuple.
      layout: The layout of the partition.

    Returns:
      `(transposed, consts, nonzero_in)`: the transposed jaxpr, closed; the tuple of
      values that it closes over; and for each linear input whether its cotangent is not
      a symbolic zero, a tuple of bools. The transposed jaxpr takes `consts`, the
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

    def transposed(*values):
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


def _dce(used_outputs, eqn):
    """Dead-code elimination rule of `map_columns`, also for dead code of its jaxpr.

    Args:
      used_outputs: For each result of the equation whether it is used.
      eqn: The equation, which is not changed.

    Returns:
      `(used_inputs, new_eqn)`: for each operand of `eqn` whether the new equation takes
      it; and the new equation, with the used operands and results only. `new_eqn` is
      None if no result is used.
    """
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


def _batch(axis_data, args, dims, *, jaxpr, kinds_in, kinds_out, coordinates, **params):
    """Batching rule of `map_columns`: batch the jaxpr of one coordinate.

    The kind of an operand or result is "groups" if it is partitioned, `[n, *s, *t]` for
    coordinates of the shape `s`; "coordinates" if it is a global value `[*s, *t]`;
    "whole" if it is `[*t]` for all coordinates. The batch dimension goes behind `n` and
    `s`, as the first one of `t`. An operand without a batch dimension stays without
    one: it is neither copied nor communicated for each element of the batch.

    Args:
      axis_data: JAX's `AxisData` of the vmap: its size and name.
      args: The operands; a batched one has a batch dimension inserted.
      dims: For each operand its batch dimension, or None.
      jaxpr: The closed jaxpr of one coordinate.
      kinds_in: For each operand its kind, a tuple.
      kinds_out: For each result its kind, a tuple.
      coordinates: The shape `s` of the coordinates, a tuple.
      **params: The parameters `partition`, `mesh` and `name`.

    Returns:
      `(results, dims)`: the list of results, and for each its batch dimension, or None.
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
def _groups_first(jaxpr, low: tuple[bool, ...]):
    """Move the batch dimension of some results behind their group axis; cached.

    Batching may put the batch dimension of a result at axis 0, but a column `[n, *t]`,
    the elements of all groups at one coordinate, needs its group axis there.

    Args:
      jaxpr: The closed, batched jaxpr of one coordinate, without constants.
      low: For each result whether its batch dimension is at axis 0, before the group
        axis, so that the two change places.

    Returns:
      A closed jaxpr with the same inputs and results as `jaxpr`, but for the order of
      these axes.
    """
    fn = _compat.jaxpr_as_fun(jaxpr)

    def moved(*args):
        pairs = zip(fn(*args), low, strict=True)
        return [_compat.moveaxis(y, 0, 1) if is_low else y for y, is_low in pairs]

    return _compat.trace_to_jaxpr(moved, jaxpr.in_avals, "batched")[0]


registration.register_execution(map_columns_p, execute_columns)
map_columns_p.def_abstract_eval(types_of_columns)
ad.primitive_jvps[map_columns_p] = _jvp
ad.primitive_transposes[map_columns_p] = _transpose
_compat.register_dce(map_columns_p, _dce)
batching.fancy_primitive_batchers[map_columns_p] = _batch
