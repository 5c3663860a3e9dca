"""The primitives that fold states in the order of the groups, and all of their rules.

`f` is an associative function of two states, and e the first state. A state is a list
of arrays; group i has the state x_i. What f closes over, c below, are operands.

    reduce_fold(c, e, x) = e . x_1 . ... . x_n                    a . b = f(c, a, b)

As f is associative, every order of evaluation has the same value, but not the same
derivative: where f has none, as the maximum of two equal numbers, the rule of f takes
part of a (sub)gradient at each pair, and the parts add up to a derivative only along
one tree. (A formula for each group by itself, from the folds before and after it, takes
each group's part from another tree: for the maximum of n zeros the parts 1/4 add up to
n/4.) So derivatives are those of one tree, the one that is evaluated: each device folds
its groups, and then all devices' states, each by a balanced tree T:

    r_d = T(x of device d)             a leaf, from the device's own groups
    y   = e . T(r_1, ..., r_m)         the root, from the tops r, on all devices

    dy  = sum_d  D root (0, .., D leaf_d(dc, dx), .., 0)  +  D root (dc, de) once

A device evaluates the term of its own top, and one all-reduce adds up the terms.
Backwards, all devices have the cotangent of the root, so each has those of all tops,
takes its own, and goes on to its own groups: this needs no communication, but for the
cotangents of c and e, which are a sum over the devices. The first state stands once, in
front: nothing here needs it to be neutral.

    JVP        fold_tree for the value, which saves the tops; fold_tree for the tangents
    transpose  of the tangents the cotangents, and the other way round
    batching   f is batched; x_i is batched behind the group axis

The tangents of tangents and cotangents, for second derivatives, are those of a function
of all groups' states, which evaluates the same tree, and which `map_columns` applies on
each device: an all-to-all of n states.

Invariants: the jaxpr has neither constants nor effects, and was traced for one group.
The tops have no tangent, as all that read them are functions of c, e and x.
Sharp edges: f is not checked to be associative. Residuals are the operands and the
tops; a device evaluates its own tree once more in the backward pass.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from drjax import _compat
from drjax._compat import UndefinedPrimal
from drjax._compat.types import Array, Aval, ClosedJaxpr, Eqn, Flags, Mesh
from drjax._partition import Partition
from drjax._primitives import registration
from drjax._primitives.collectives import (
    check_transposable,
    gather_p,
    scatter_p,
)
from drjax._primitives.fold_lowering import (
    VALUE,
    FoldMode,
    execute_fold,
    fold_of_all,
)
from drjax._primitives.map_columns import (
    GROUPS,
    Kinds,
    by_gather_and_scatter,
    tangents_of_columns,
    trace_column,
)
from drjax._primitives.map_fn import group_context
from drjax._primitives.registration import AxisData, Tangent
from drjax._sharding.avals import columns_aval, global_aval
from drjax._sharding.execute import as_operand, vary, with_sharding_of
from drjax._sharding.layout import Layout, make_layout

reduce_fold_p = registration.new_primitive("reduce_fold", multiple_results=True)
fold_tree_p = registration.new_primitive("fold_tree", multiple_results=True)


# ---------------------------------------------------------------------------------
# Types


def _abstract_eval(
    *avals: Aval, n_states: int, partition: Partition, mesh: Mesh | None, **_: Any
) -> list[Aval]:
    layout = make_layout(partition, mesh)
    states = avals[len(avals) - n_states :]
    return [global_aval(aval, layout).update(weak_type=False) for aval in states]


def _tree_abstract_eval(
    *avals: Aval,
    n_states: int,
    partition: Partition,
    mesh: Mesh | None,
    mode: FoldMode,
    **_: Any,
) -> list[Aval]:
    layout = make_layout(partition, mesh)
    n_fold = mode.count(len(avals))
    fold = avals[:n_fold]
    params = {"n_states": n_states, "partition": partition, "mesh": mesh}
    totals = _abstract_eval(*fold, **params)
    if mode.what == "value":
        used = -(-layout.partition.size // layout.per_device)
        of_tops = lambda x: columns_aval(
            x, layout, (used,), False, frozenset(_compat.varying(x))
        )
        return [*totals, *(map(of_tops, totals) if mode.saved else ())]
    chosen, active = (
        (totals, mode.active_out) if mode.what == "tangents" else (fold, mode.active)
    )
    pairs = zip(chosen, active, strict=True)
    return [
        x.to_tangent_aval().update(weak_type=False) for x, is_one in pairs if is_one
    ]


# ---------------------------------------------------------------------------------
# Derivatives


def _jvp(
    primals: Sequence[Array],
    tangents: Sequence[Tangent],
    *,
    mode: FoldMode = VALUE,
    derivative: ClosedJaxpr | None = None,
    **params: Any,
) -> tuple[Sequence[Array], list[Tangent]]:
    """JVP rule of `reduce_fold`, and of the value of `fold_tree`."""
    n_states, jaxpr = params["n_states"], params["jaxpr"]
    layout = make_layout(params["partition"], params["mesh"])
    others = frozenset[str]().union(
        *(_compat.varying(_compat.typeof(x)) for x in primals)
    ) - set(layout.axes)
    primals = [vary(x, others) for x in primals]
    active = tuple(type(t) is not _compat.Zero for t in tangents)
    value = FoldMode("value", bool(layout.axes))
    outs = fold_tree_p.bind(*primals, mode=value, derivative=None, **params)
    tops = outs[n_states:]
    pairs = zip(tangents, active, strict=True)
    dense = [vary(t, others) for t, is_one in pairs if is_one]
    active_out, pushed, derivative = _derivative(jaxpr, active, n_states, layout)
    parts = []
    if any(active_out):
        # Constants of users' rules become operands, before what f closes over.
        derivative, closed = _compat.without_consts(derivative)
        moving = FoldMode(
            "tangents", value.saved, len(closed), (False,) * len(closed) + active,
            active_out, pushed,
        )  # fmt: skip
        closed = [vary(as_operand(c, layout, False), others) for c in closed]
        parts = fold_tree_p.bind(
            *closed, *primals, *tops, *dense, mode=moving, derivative=derivative,
            **params,
        )  # fmt: skip
    avals = [_compat.typeof(y) for y in outs[: len(outs) if mode.saved else n_states]]
    is_one = [*active_out, *[False] * (len(avals) - n_states)]
    return outs[: len(avals)], registration.fill_zeros(avals, is_one, parts)


def _derivative(
    jaxpr: ClosedJaxpr, active: Flags, n_states: int, layout: Layout
) -> tuple[tuple[bool, ...], tuple[bool, ...], ClosedJaxpr]:
    """Return which leaves of states have tangents, which of f's results, and Df.

    A leaf has one if it may have one anywhere in the tree: a fixed point. `active` says
    which operands of the fold have one.
    """
    n_consts = len(active) - 2 * n_states
    init, x = active[n_consts : n_consts + n_states], active[n_consts + n_states :]
    moving = [a or b for a, b in zip(init, x, strict=True)]
    while True:
        nonzeros = [*active[:n_consts], *moving, *moving]
        with group_context(layout):
            derivative, out = _compat.jvp_jaxpr(jaxpr, nonzeros)
        after = [a or b for a, b in zip(moving, out, strict=True)]
        if after == moving:
            return tuple(moving), tuple(out), derivative
        moving = after


def _tree_jvp(
    primals: Sequence[Array],
    tangents: Sequence[Tangent],
    *,
    mode: FoldMode,
    **params: Any,
) -> tuple[Sequence[Array], list[Tangent]]:
    """JVP rule of `fold_tree`; for second derivatives, if it is none of the value."""
    if mode.what == "value":
        return _jvp(primals, tangents, mode=mode, **params)
    outs = fold_tree_p.bind(*primals, mode=mode, **params)
    n_states, partition = params["n_states"], params["partition"]
    layout = make_layout(partition, params["mesh"])
    # The tops are a function of the operands before them.
    n_fold = len(mode.active)
    rest = n_fold + n_states * mode.saved
    without_tops = lambda xs: [*xs[:n_fold], *xs[rest:]]
    primals, tangents = without_tops(primals), without_tops(tangents)
    mode = replace(mode, saved=False)
    kinds_in, kinds_out = mode.kinds(n_fold, n_states)
    avals = tuple(map(_compat.typeof, primals))
    jaxpr = _tree_column(
        params["jaxpr"], params["derivative"], avals, kinds_in, n_states, mode, layout,
        params["name"],
    )  # fmt: skip
    return outs, tangents_of_columns(
        primals,
        tangents,
        [_compat.typeof(y) for y in outs],
        jaxpr=jaxpr,
        kinds_in=kinds_in,
        kinds_out=kinds_out,
        coordinates=(),
        partition=partition,
        mesh=params["mesh"],
        name=params["name"],
    )


@_compat.weakref_lru_cache
def _tree_column(
    jaxpr: ClosedJaxpr,
    derivative: ClosedJaxpr,
    avals: tuple[Aval, ...],
    kinds: Kinds,
    n_states: int,
    mode: FoldMode,
    layout: Layout,
    name: str,
) -> ClosedJaxpr:
    """Trace a derivative of a fold as a function of all groups' states; cached."""
    run = fold_of_all(layout, jaxpr, derivative, n_states, mode)
    return trace_column(run, avals, kinds, (), layout, name)[0]


def _tree_transpose(
    cts: Sequence[Tangent],
    *args: Array | UndefinedPrimal,
    mode: FoldMode,
    **params: Any,
) -> list[Tangent | None]:
    """Transpose rule: of tangents their cotangents, of cotangents their tangents."""
    check_transposable(make_layout(params["partition"], params["mesh"]))
    n_fold = len(mode.active)
    first = n_fold + params["n_states"] * mode.saved
    linear = [ad.is_undefined_primal(x) for x in args[first:]]
    dense: list = []
    if mode.what == "tangents":
        # Of operands whose tangents are known, no cotangents are asked for.
        marks = iter(linear)
        active = tuple(a and next(marks) for a in mode.active)
        new = replace(mode, what="cotangents", active=active)
        dense = [ad.instantiate_zeros(ct) for ct in cts]
    else:
        nonzero = iter([type(ct) is not _compat.Zero for ct in cts])
        active = tuple(a and next(nonzero) for a in mode.active)
        new = replace(mode, what="tangents", active=active)
        dense = [ct for ct in cts if type(ct) is not _compat.Zero]
    outs = iter(fold_tree_p.bind(*args[:first], *dense, mode=new, **params))
    if mode.what == "cotangents":
        every = list(outs)
        outs = iter([y for y, lin in zip(every, linear, strict=True) if lin])
    return [None] * first + [
        with_sharding_of(next(outs), x.aval) if lin else None
        for x, lin in zip(args[first:], linear, strict=True)
    ]


# ---------------------------------------------------------------------------------
# In plans, derivatives of folds are work of the server, from all groups' states. It is
# one equation, so that the XLA backend finds it and leaves states on their devices.

fold_of_all_p = registration.new_primitive("fold_of_all", multiple_results=True)


def execute_fold_of_all(
    *args: Array,
    jaxpr: ClosedJaxpr,
    n_states: int,
    partition: Partition,
    name: str,
    mode: FoldMode,
    commutative: bool = False,
    derivative: ClosedJaxpr | None = None,
) -> list[Array]:
    """Compute what `fold_tree` does, of states in one process."""
    layout = make_layout(partition, None)
    return fold_of_all(layout, jaxpr, derivative, n_states, mode)(*args)


def folds_by_gather(eqn: Any) -> ClosedJaxpr:
    """Make the jaxpr that computes a `fold_tree` equation on the server of a plan.

    The jaxpr gathers what all groups have, computes by one `fold_of_all` equation, and
    scatters what is for each group.
    """
    params = {k: v for k, v in eqn.params.items() if k != "mesh"}
    where = {"partition": eqn.params["partition"], "mesh": eqn.params["mesh"]}
    run = lambda *xs: fold_of_all_p.bind(*xs, **params)
    whole = lambda *xs: by_gather_and_scatter(
        run, xs, kinds_of(eqn), gather_p.bind, scatter_p.bind, where
    )
    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
    return jax.make_jaxpr(whole)(*avals)


def kinds_of(eqn: Eqn) -> tuple[Kinds, Kinds]:
    """Return the kinds of a `fold_tree` or `fold_of_all`: of operands, of results."""
    mode, n_states = eqn.params["mode"], eqn.params["n_states"]
    return mode.kinds(mode.count(len(eqn.invars)), n_states)


def _of_all_abstract_eval(*avals: Aval, **params: Any) -> list[Aval]:
    return _tree_abstract_eval(*avals, mesh=None, **params)


# Derivatives and batches of a compiled plan are those of the function.
def _of_all_jvp(
    primals: Sequence[Array], tangents: Iterable[Tangent], **params: Any
) -> tuple[Sequence[Array], Sequence[Array]]:
    tangents = map(ad.instantiate_zeros, tangents)
    run = lambda *xs: execute_fold_of_all(*xs, **params)
    return jax.jvp(run, primals, tuple(tangents))


def _of_all_batching(
    args: Sequence[Array], dims: Sequence[int | None], **params: Any
) -> tuple[Sequence[Array], list[int]]:
    outs = jax.vmap(lambda *xs: execute_fold_of_all(*xs, **params), dims)(*args)
    return outs, [0] * len(outs)


registration.register_execution(fold_of_all_p, execute_fold_of_all)
fold_of_all_p.def_abstract_eval(_of_all_abstract_eval)
ad.primitive_jvps[fold_of_all_p] = _of_all_jvp
batching.primitive_batchers[fold_of_all_p] = _of_all_batching


# ---------------------------------------------------------------------------------
# Batching


def _batching_rule(primitive: Primitive) -> Callable:
    """Make the batching rule of `reduce_fold_p` or `fold_tree_p`.

    The rule batches f, and binds the primitive for the batched f. A result of f is a
    state again, so if any operand is batched, all leaves of all states have to be:
    leaves without a batch dimension are repeated along a new one. An array that f
    closes over stays without one, unless it has a tangent, which may have one. Arrays
    with a group axis, and the tops, have their batch dimension at 1; all others at 0.
    """

    def rule(
        axis_data: AxisData,
        args: Sequence[Array],
        dims: Sequence[int | None],
        *,
        jaxpr: ClosedJaxpr,
        n_states: int,
        **params: Any,
    ) -> tuple[Sequence[Array], Sequence[int | None]]:
        # JAX asks such a rule also if nothing is batched; f may still use the axis.
        if all(dim is None for dim in dims) and not jaxpr.effects:
            outs = primitive.bind(*args, jaxpr=jaxpr, n_states=n_states, **params)
            return outs, [None] * len(outs)
        mode = params.get("mode", VALUE)
        n_fold = mode.count(len(args))
        active = mode.active if mode.what != "value" else (False,) * n_fold
        n_consts = n_fold - 2 * n_states
        batched = [
            i >= n_consts or d is not None or active[i]
            for i, d in enumerate(dims[:n_fold])
        ]
        kinds, kinds_out = mode.kinds(n_fold, n_states)
        tops = range(n_fold, n_fold + n_states * mode.saved)
        reads = mode.what != "value"
        operands = []
        for i, (x, d, kind) in enumerate(zip(args, dims, kinds, strict=True)):
            position = 1 if kind == GROUPS or (reads and i in tops) else 0
            if i >= n_fold or batched[i]:
                operands.append(_batched(x, d, position, axis_data))
            else:
                operands.append(x)
        layout = make_layout(params["partition"], params["mesh"])
        with group_context(layout):
            jaxpr = _compat.batch_jaxpr_first(
                jaxpr, axis_data, batched[mode.closed if reads else 0 :]
            )
            derivative = params.get("derivative")
            if derivative is not None:
                more = [True] * (len(derivative.in_avals) - len(batched))
                params["derivative"] = _compat.batch_jaxpr_first(
                    derivative, axis_data, [*batched, *more]
                )
        outs = primitive.bind(*operands, jaxpr=jaxpr, n_states=n_states, **params)
        dims_out = [1 if kind == GROUPS else 0 for kind in kinds_out]
        if not reads:
            dims_out[n_states:] = [1] * (len(dims_out) - n_states)
        return outs, dims_out

    return rule


def _batched(x: Array, dim: int | None, position: int, axis_data: AxisData) -> Array:
    """Move the batch dimension of an operand to the position that the batched f needs.

    An operand without one (`dim` is None) is repeated along a new one.
    """
    if dim is None:
        return _compat.add_batch_dimension(x, axis_data, position)
    return _compat.moveaxis(x, dim, position)


for _primitive, _execute, _rule, _types in (
    (reduce_fold_p, execute_fold, _jvp, _abstract_eval),
    (fold_tree_p, execute_fold, _tree_jvp, _tree_abstract_eval),
):
    registration.register_execution(_primitive, _execute)
    _primitive.def_abstract_eval(_types)
    ad.primitive_jvps[_primitive] = _rule
    batching.fancy_primitive_batchers[_primitive] = _batching_rule(_primitive)
ad.primitive_transposes[fold_tree_p] = _tree_transpose
