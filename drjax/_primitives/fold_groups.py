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
Backwards, all devices have the cotangent of the root; each takes that of its own top,
and goes on to its own groups. Cotangents of c are a sum over the devices. The first
state stands once, in front: nothing here needs it to be neutral.

    JVP        fold_tree for the value, which saves what a device has received of the
               others' tops; fold_tree for the tangents
    transpose  of the tangents the cotangents, and the other way round
    batching   f is batched; x_i is batched behind the group axis

The tangents of tangents and cotangents, for second derivatives, are those of a function
of all groups' states, which evaluates the same tree, and which `map_columns` applies on
each device: an all-to-all of n states.

On m devices with k groups each, what `fold_tree` computes is lowered to

    value        a tree over k,  an exchange of m tops,  a tree over m
    tangents     both trees once more, with tangents;  an all-reduce of a state
    cotangents   the same trees backwards, from the root

with trees of depth log k and log m. `fold_devices.py` has the ways to exchange tops:
by columns, by swaps, or gathered; `fold_roots.py` has the root and its derivatives by
each way. By columns, tangents are exchanged as tops are, and an all-to-all returns
cotangents.

Invariants: the jaxpr has neither constants nor effects, and was traced for one group.
The tops have no tangent, as all that read them are functions of c, e and x. No state of
a padded slot is ever combined with another; the last devices, which have no group, are
left out. The way of a fold is chosen once, for its value and its derivatives, as what
is saved depends on it.
Sharp edges: f is not checked to be associative. Residuals are the operands and what was
received; a device evaluates its own tree once more in the backward pass. f was traced
for one group, but runs without VMA checking, as states of a device differ from those of
another. Results then vary over all axes over which an operand varies.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad, batching

from drjax import _compat
from drjax._compat import UndefinedPrimal
from drjax._compat.jax_types import Primitive
from drjax._compat.types import Array, Aval, ClosedJaxpr, Eqn, Flags, Mesh
from drjax._partition import Partition
from drjax._primitives import registration
from drjax._primitives.collectives import (
    check_transposable,
    execute_gather,
    execute_scatter,
    gather_p,
    scatter_p,
)
from drjax._primitives.fold_devices import (
    choose_way,
    fold_devices,
    levels,
    of_parts,
)
from drjax._primitives.fold_roots import root_of
from drjax._primitives.fold_trees import (
    COLUMNS,
    DEVICES,
    GATHERED,
    SWAPS,
    VALUE,
    FoldMode,
    Tree,
    added,
    first_of,
    fold_by_tree,
)
from drjax._primitives.map_columns import (
    GROUPS,
    WHOLE,
    Kinds,
    by_gather_and_scatter,
    tangents_of_columns,
    trace_column,
)
from drjax._primitives.map_fn import (
    MapParams,
    group_context,
    lowers_by_vmap,
    prepare_for_shard_map,
)
from drjax._primitives.registration import AxisData, Tangent
from drjax._sharding.avals import columns_aval, device_aval, global_aval
from drjax._sharding.execute import (
    as_operand,
    shard_map_over_devices,
    vary,
    with_sharding_of,
)
from drjax._sharding.layout import Layout, Placement, make_layout

reduce_fold_p = registration.new_block("reduce_fold", multiple_results=True)
fold_tree_p = registration.new_block("fold_tree", multiple_results=True)


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
    part: ClosedJaxpr | None = None,
    **_: Any,
) -> list[Aval]:
    layout = make_layout(partition, mesh)
    n_fold = mode.count(len(avals))
    fold = avals[:n_fold]
    params = {"n_states": n_states, "partition": partition, "mesh": mesh}
    totals = _abstract_eval(*fold, **params)
    if mode.what == "value":
        types = _types_of_saved(layout, mode, totals, part) if mode.saved else []
        return [*totals, *types]
    chosen, active = (
        (totals, mode.active_out) if mode.what == "tangents" else (fold, mode.active)
    )
    pairs = zip(chosen, active, strict=True)
    return [
        x.to_tangent_aval().update(weak_type=False) for x, is_one in pairs if is_one
    ]


def _types_of_saved(
    layout: Layout, mode: FoldMode, totals: list[Aval], part: ClosedJaxpr | None
) -> list[Aval]:
    """Return the types of what is saved of the devices' states, by the mode's way."""
    if mode.way == GATHERED:
        return [
            columns_aval(x, layout, (layout.used,), False, _compat.varying(x))
            for x in totals
        ]
    if mode.way == SWAPS:
        lead = (len(levels(layout.devices, layout.used)),)
        return [device_aval(x, layout, (*lead, *x.shape)) for x in totals]
    assert part is not None
    parts: list[Aval] = part.out_avals
    return [
        device_aval(x, layout, (layout.used, *y.shape))
        for x, y in zip(totals, parts, strict=True)
    ]


# ---------------------------------------------------------------------------------
# Derivatives


class FoldParams(MapParams):
    """The parameters of `reduce_fold`, and of the value of `fold_tree`."""

    jaxpr: ClosedJaxpr
    n_states: int


class TreeParams(FoldParams):
    """The parameters of `fold_tree` but its mode."""

    derivative: Any  # a `ClosedJaxpr`; None in the mode of the value
    part: Any  # by columns, the function of a part of the elements, else None
    part_derivative: Any


def _jvp(
    primals: Sequence[Array],
    tangents: Sequence[Tangent],
    *,
    mode: FoldMode = VALUE,
    derivative: ClosedJaxpr | None = None,
    part: ClosedJaxpr | None = None,
    part_derivative: ClosedJaxpr | None = None,
    **params: Unpack[FoldParams],
) -> tuple[Sequence[Array], list[Tangent]]:
    """JVP rule of `reduce_fold`, and of the value of `fold_tree`."""
    n_states, jaxpr = params["n_states"], params["jaxpr"]
    layout = make_layout(params["partition"], params["mesh"])
    others = frozenset[str]().union(
        *(_compat.varying(_compat.typeof(x)) for x in primals)
    ) - set(layout.axes)
    primals = [vary(x, others) for x in primals]
    active = tuple(type(t) is not _compat.Zero for t in tangents)
    active_out, pushed, derivative = _derivative(jaxpr, active, n_states, layout)
    # Constants of users' rules become operands, before what f closes over.
    derivative, closed = _compat.without_consts(derivative)
    moves, n_consts = any(active_out), len(primals) - 2 * n_states
    consts, init = primals[:n_consts], primals[n_consts : n_consts + n_states]
    jaxprs = [jaxpr, derivative] if moves else [jaxpr]
    way = choose_way(layout, jaxprs, [*closed, *consts], init)
    own_part = of_parts(jaxpr, layout) if way == COLUMNS else None
    value, of_value = mode, part
    if not mode.saved:
        value, of_value = FoldMode("value", way, bool(layout.axes)), own_part
    outs = fold_tree_p.bind(
        *primals, mode=value, derivative=None, part=of_value, part_derivative=None,
        **params,
    )  # fmt: skip
    parts = []
    if moves:
        # What is saved for another derivative may be of another way.
        same = value.way == way and of_value is own_part
        saved = outs[n_states:] if same else []
        pairs = zip(tangents, active, strict=True)
        dense = [vary(t, others) for t, is_one in pairs if is_one]
        moving = FoldMode(
            "tangents", way, bool(saved), len(closed),
            (False,) * len(closed) + active, active_out, pushed,
        )  # fmt: skip
        closed = [vary(as_operand(c, layout, False), others) for c in closed]
        parts = fold_tree_p.bind(
            *closed, *primals, *saved, *dense, mode=moving, derivative=derivative,
            part=own_part,
            part_derivative=own_part and of_parts(derivative, layout),
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
    **params: Unpack[TreeParams],
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
    mode = replace(mode, way=GATHERED, saved=False)
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
    **params: Unpack[TreeParams],
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
    of_tangents = (
        with_sharding_of(next(outs), x.aval) if lin else None
        for x, lin in zip(args[first:], linear, strict=True)
    )
    return [*[None] * first, *of_tangents]


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


def folds_by_gather(eqn: Eqn) -> ClosedJaxpr:
    """Make the jaxpr that computes a `fold_tree` equation on the server of a plan.

    The jaxpr gathers what all groups have, computes by one `fold_of_all` equation, and
    scatters what is for each group.
    """
    left_out = ("mesh", "part", "part_derivative")
    params = {k: v for k, v in eqn.params.items() if k not in left_out}
    params["mode"] = replace(eqn.params["mode"], way=GATHERED)
    where: Placement = {
        "partition": eqn.params["partition"],
        "mesh": eqn.params["mesh"],
    }
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
    with a group axis have their batch dimension at 1, and what is saved of the tops
    before the shape of a leaf; all others at 0.
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
        of_saved = 1 if mode.way == GATHERED else 2
        operands = []
        for i, (x, d, kind) in enumerate(zip(args, dims, kinds, strict=True)):
            position = 1 if kind == GROUPS else 0
            if reads and i in tops:
                position = of_saved
            if i >= n_fold or batched[i]:
                operands.append(_batched(x, d, position, axis_data))
            else:
                operands.append(x)
        layout = make_layout(params["partition"], params["mesh"])
        flags = batched[mode.closed if reads else 0 :]
        with group_context(layout):
            batch = lambda jaxpr, flags: _compat.batch_jaxpr_first(
                jaxpr, axis_data, flags
            )
            jaxpr = batch(jaxpr, flags)
            if params.get("part") is not None:
                params["part"] = batch(params["part"], flags)
            for name in ("derivative", "part_derivative"):
                if (derivative := params.get(name)) is not None:
                    more = [True] * (len(derivative.in_avals) - len(batched))
                    params[name] = batch(derivative, [*batched, *more])
        outs = primitive.bind(*operands, jaxpr=jaxpr, n_states=n_states, **params)
        dims_out = [1 if kind == GROUPS else 0 for kind in kinds_out]
        if not reads:
            dims_out[n_states:] = [of_saved] * (len(dims_out) - n_states)
        return outs, dims_out

    return rule


def _batched(x: Array, dim: int | None, position: int, axis_data: AxisData) -> Array:
    """Move the batch dimension of an operand to the position that the batched f needs.

    An operand without one (`dim` is None) is repeated along a new one.
    """
    if dim is None:
        return _compat.add_batch_dimension(x, axis_data, position)
    return _compat.moveaxis(x, dim, position)


# ---------------------------------------------------------------------------------
# Lowering: on each device, then over the devices


def execute_fold(
    *args: Array,
    jaxpr: ClosedJaxpr,
    n_states: int,
    partition: Partition,
    mesh: Mesh | None,
    name: str,
    commutative: bool = False,
    mode: FoldMode = VALUE,
    derivative: ClosedJaxpr | None = None,
    part: ClosedJaxpr | None = None,
    part_derivative: ClosedJaxpr | None = None,
) -> list[Array]:
    """Compute a fold, or derivatives of one: `reduce_fold` and `fold_tree`.

    `derivative` is the jaxpr of the function's results and their tangents. By columns,
    `part` and `part_derivative` are these of a part of the elements.
    """
    layout = make_layout(partition, mesh)
    kinds = mode.kinds(mode.count(len(args)), n_states)
    jaxprs = _jaxprs(jaxpr, derivative, n_states, mode, layout)
    if lowers_by_vmap(layout, jaxpr):
        run = fold_of_all(layout, jaxpr, derivative, n_states, mode)
        params: Placement = {"partition": partition, "mesh": mesh}
        return by_gather_and_scatter(
            run, args, kinds, execute_gather, execute_scatter, params
        )
    parts = []
    if part is not None:
        parts = _jaxprs(part, part_derivative, n_states, mode, layout)
    jaxprs, parts = (
        [prepare_for_shard_map(layout, x) for x in xs] for xs in (jaxprs, parts)
    )

    def body(*args) -> list[Array]:
        *args, first = args
        return _run_device(layout, jaxprs, parts, n_states, mode, args, first[0])

    divided = {GROUPS: True, WHOLE: False, DEVICES: None}
    partitioned_in, partitioned_out = ([divided[k] for k in side] for side in kinds)
    # The surrounding check_vma: users' loops inside were traced under it.
    return shard_map_over_devices(
        layout, body, args, partitioned_in, partitioned_out, _compat.check_vma(),
        with_first_index=True,
    )  # fmt: skip


def fold_of_all(
    layout: Layout,
    jaxpr: ClosedJaxpr,
    derivative: ClosedJaxpr | None,
    n_states: int,
    mode: FoldMode,
) -> Callable[..., list[Array]]:
    """Make the function that computes a fold from all groups' states, in one place.

    It evaluates the tree that the devices of the layout evaluate together.
    """
    jaxprs, k = _jaxprs(jaxpr, derivative, n_states, mode, layout), layout.per_device

    def run(*args: Array) -> list[Array]:
        tree = Tree(jaxprs, n_states, mode, args)
        n, starts = layout.partition.size, range(0, layout.partition.size, k)
        each = [[y[i : min(i + k, n)] for y in tree.x] for i in starts]
        join = lambda states: [jnp.concatenate(ys) for ys in zip(*states, strict=True)]
        if mode.what == "value":
            tops = join([fold_by_tree(tree.combine, x) for x in each])
            total = first_of(tree.root(tops))
            return [*total, *(tops if mode.saved else ())]
        if mode.what == "tangents":
            dconsts, dinit, dx = tree.tangents()
            each = [
                [*x, *(y[i : min(i + k, n)] for y in dx)]
                for i, x in zip(starts, each, strict=True)
            ]
            tops = join([fold_by_tree(tree.push(dconsts), x) for x in each])
            return first_of(tree.push_root(tops, dconsts, dinit))
        levels = [tree.levels(x) for x in each]
        tops = tree.saved or join([of_block[-1] for of_block in levels])
        consts, init, of_tops = tree.pull_root(tops)
        parts = [
            tree.pull(of_block, [ct[i : i + 1] for ct in of_tops])
            for i, of_block in enumerate(levels)
        ]
        for part, _ in parts:
            consts = added(consts, part)
        return tree.active_cotangents(consts, init, join([x for _, x in parts]))

    return run


# ---------------------------------------------------------------------------------
# The function, with its derivatives


def _jaxprs(
    jaxpr: ClosedJaxpr,
    derivative: ClosedJaxpr | None,
    n_states: int,
    mode: FoldMode,
    layout: Layout,
) -> list:
    """List the jaxprs that a mode evaluates: the function's, and a derivative's."""
    match mode.what:
        case "value":
            return [jaxpr]
        case "tangents":
            return [jaxpr, derivative]
        case _:
            return [jaxpr, _pullback(derivative, n_states, mode, layout)]


@_compat.weakref_lru_cache
def _pullback(
    derivative: Any, n_states: int, mode: FoldMode, layout: Layout
) -> ClosedJaxpr:
    """Transpose the tangents of the function: from cotangents of the pushed leaves.

    The jaxpr takes what `derivative` takes but the tangents, and these cotangents; it
    returns one for each of the tangents.
    """
    n = len(derivative.in_avals) - _tangents_in(mode, n_states)
    linear = [i >= n for i in range(len(derivative.in_avals))]
    with group_context(layout):
        known, unknown, unknown_out, computed, forwarded = _compat.partial_eval_jaxpr(
            derivative, linear
        )
    backward, nonzero_in = registration.backward_function(
        unknown,
        [False] * len(forwarded) + [True] * sum(linear),
        [True] * sum(unknown_out),
    )
    primal, n_known = _compat.jaxpr_as_fun(known), len(known.in_avals)
    of_tangents = derivative.out_avals[n_states:]
    moves = unknown_out[n_states:]

    def transposed(*values: Array) -> list[Array]:
        primals, cts = values[:n], values[n:]
        outs = primal(*primals[:n_known])
        saved = iter(outs[len(outs) - len(computed) :])
        residuals = [next(saved) if i is None else primals[i] for i in forwarded]
        cts = [ct for ct, moving in zip(cts, moves, strict=True) if moving]
        results = iter(backward(*residuals, *cts))
        avals = derivative.in_avals[n:]
        return [
            next(results) if nz else jnp.zeros(aval.shape, aval.dtype)
            for nz, aval in zip(nonzero_in, avals, strict=True)
        ]

    avals = [*derivative.in_avals[:n], *of_tangents]
    with group_context(layout):
        jaxpr, consts = _compat.trace_to_jaxpr(transposed, avals, "transposed")
    assert not consts, "the derivative's constants are operands"
    return jaxpr


def _tangents_in(mode: FoldMode, n_states: int) -> int:
    n_consts = len(mode.active) - 2 * n_states
    return sum(mode.active[:n_consts]) + 2 * sum(mode.active_out)


# ---------------------------------------------------------------------------------
# One device


def _run_device(
    layout: Layout,
    jaxprs: Sequence[ClosedJaxpr],
    parts: Sequence[ClosedJaxpr],
    n_states: int,
    mode: FoldMode,
    args: Sequence[Array],
    first: Array | int = 0,
) -> list[Array]:
    """Compute a device's share of a fold or of its derivatives; collectives inside.

    It is called inside a `shard_map` over the partition's axes, or, on one device,
    alone. `first` is the group index of the device's first slot, int32 `[]`.
    """
    varying = frozenset[str]().union(
        *(_compat.varying(_compat.typeof(x)) for x in args)
    )
    others, every = varying - set(layout.axes), varying | set(layout.axes)
    tree, k = Tree(jaxprs, n_states, mode, args), layout.per_device
    real = None
    if layout.uneven:
        real = first + lax.iota(jnp.int32, k) < layout.partition.size
    # Without VMA, as the states vary over the devices.
    with _compat.without_vma():
        levels = tree.levels(tree.x, real)
    own = levels[-1]
    if mode.what == "value" and not mode.saved:
        consts = tree.consts[mode.closed :]
        combine, init = tree.combine, tree.init
        total = fold_devices(layout, jaxprs[0], consts, combine, init, own, varying)
        return [vary(y, others) for y in total]
    root = root_of(layout, tree, parts, first // k, varying)
    of_devices = mode.way != GATHERED
    if tree.saved is None:
        saved = root.exchange(own)
    else:
        saved = first_of(tree.saved) if of_devices else tree.saved
    if mode.what == "value":
        with _compat.without_vma():
            total = root.value(saved, own)
        if of_devices:
            saved = [x[None] for x in saved]
        return [vary(y, others) for y in (*total, *(saved if mode.saved else ()))]
    if mode.what == "tangents":
        with _compat.without_vma():
            dconsts, _, dx = tree.tangents()
            moved = fold_by_tree(tree.push(dconsts), [*tree.x, *dx], real)[n_states:]
        return [vary(y, others) for y in root.tangents(saved, own, moved)]
    with _compat.without_vma():
        of_root, init, below = root.cotangents(saved, own)
        of_groups, of_x = tree.pull(levels, below, real)
        consts = added(of_root, of_groups)
        outs = tree.active_cotangents([], init, of_x)
    consts = root.sum(consts)
    n_init = len(outs) - sum(tree.active[2])
    return [
        *(vary(y, others) for y in (*consts, *outs[:n_init])),
        *(vary(y, every) for y in outs[n_init:]),
    ]


# ---------------------------------------------------------------------------------
# All registrations

for _primitive, _execute, _rule, _types in (
    (reduce_fold_p, execute_fold, _jvp, _abstract_eval),
    (fold_tree_p, execute_fold, _tree_jvp, _tree_abstract_eval),
):
    registration.register_execution(_primitive, _execute)
    _primitive.def_abstract_eval(_types)
    ad.primitive_jvps[_primitive] = _rule
    batching.fancy_primitive_batchers[_primitive] = _batching_rule(_primitive)
ad.primitive_transposes[fold_tree_p] = _tree_transpose
