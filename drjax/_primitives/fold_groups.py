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

On m devices with k groups each, what `fold_tree` computes is lowered to

    value        a tree over k,  an all-gather of m tops,  a tree over m
    tangents     both trees once more, with tangents;  an all-reduce of a state
    cotangents   the same trees backwards, from the root; nothing for x

with trees of depth log k and log m.

Invariants: the jaxpr has neither constants nor effects, and was traced for one group.
The tops have no tangent, as all that read them are functions of c, e and x. No state of
a padded slot is ever combined with another; the last devices, which have no group, are
left out. All leaves of one dtype go through one all-gather, unless other mesh axes may
shard them.
Sharp edges: f is not checked to be associative. Residuals are the operands and the
tops; a device evaluates its own tree once more in the backward pass. f was traced for
one group, but runs without VMA checking, as states of a device differ from those of
another. Results then vary over all axes over which an operand varies.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from drjax import _compat
from drjax._compat import UndefinedPrimal
from drjax._compat.types import Array, Aval, ClosedJaxpr, Eqn, Flags, Mesh
from drjax._jaxprs.prng_keys import on_raw
from drjax._partition import Partition
from drjax._primitives import registration
from drjax._primitives.collectives import (
    check_transposable,
    execute_gather,
    execute_scatter,
    gather_p,
    scatter_p,
)
from drjax._primitives.device_sums import psum
from drjax._primitives.fold_devices import fold_devices
from drjax._primitives.map_columns import (
    GROUPS,
    WHOLE,
    Kinds,
    by_gather_and_scatter,
    column_context,
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
from drjax._sharding.avals import columns_aval, global_aval
from drjax._sharding.eval_on_mesh import in_same_sharding
from drjax._sharding.execute import (
    as_operand,
    shard_map_over_devices,
    vary,
    with_sharding_of,
)
from drjax._sharding.layout import Layout, Placement, make_layout, other_axes

reduce_fold_p = registration.new_block("reduce_fold", multiple_results=True)
fold_tree_p = registration.new_block("fold_tree", multiple_results=True)

States = list[jax.Array]
Combine = Callable[[States, States], States]


@dataclass(frozen=True)
class FoldMode:
    """What an equation computes from the tree of a fold; a parameter of `fold_tree`.

    Its operands are those of the fold: what the function closes over, the first state,
    and the groups' states; then the tops if they are saved; then tangents of active
    operands, or cotangents of active leaves of the fold.

    Attributes:
      what: "value", "tangents" or "cotangents".
      saved: Whether the tops, the states of the devices, are further results of the
        value, and operands of the others, which else gather them again.
      closed: How many of the first operands only the function's derivative closes over.
      active: For each operand of the fold whether it has a tangent.
      active_out: For each leaf of a state whether it may have a tangent in the tree.
      pushed: For each leaf of a state whether the function's results have a tangent.
    """

    what: str = "value"
    saved: bool = False
    closed: int = 0
    active: tuple[bool, ...] = ()
    active_out: tuple[bool, ...] = ()
    pushed: tuple[bool, ...] = ()

    def kinds(self, n_fold: int, n_states: int) -> tuple[Kinds, Kinds]:
        """Return the kinds of all operands, `n_fold` of a fold, and of all results."""
        fold = (WHOLE,) * (n_fold - n_states) + (GROUPS,) * n_states
        tops = (WHOLE,) * (n_states * self.saved)
        moving = tuple(k for k, a in zip(fold, self.active, strict=False) if a)
        leaves = (WHOLE,) * sum(self.active_out)
        match self.what:
            case "value":
                return fold, (WHOLE,) * n_states + tops
            case "tangents":
                return (*fold, *tops, *moving), leaves
            case _:
                return (*fold, *tops, *leaves), moving

    def count(self, n_operands: int) -> int:
        """Return the number of operands of the fold itself, among all `n_operands`."""
        return n_operands if self.what == "value" else len(self.active)


VALUE = FoldMode()


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


class FoldParams(MapParams):
    """The parameters of `reduce_fold`, and of the value of `fold_tree`."""

    jaxpr: ClosedJaxpr
    n_states: int


class TreeParams(FoldParams):
    """The parameters of `fold_tree` but its mode."""

    derivative: Any  # a `ClosedJaxpr`; None in the mode of the value


def _jvp(
    primals: Sequence[Array],
    tangents: Sequence[Tangent],
    *,
    mode: FoldMode = VALUE,
    derivative: ClosedJaxpr | None = None,
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
    params = {k: v for k, v in eqn.params.items() if k != "mesh"}
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
) -> list[Array]:
    """Compute a fold, or derivatives of one: `reduce_fold` and `fold_tree`.

    `derivative` is the jaxpr of the function's results and their tangents.
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
    jaxprs = [prepare_for_shard_map(layout, x) for x in jaxprs]

    def body(*args) -> list[Array]:
        *args, first = args
        return _run_device(layout, jaxprs, n_states, mode, args, first[0])

    partitioned_in, partitioned_out = (
        [kind == GROUPS for kind in side] for side in kinds
    )
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
        tree = _Tree(jaxprs, n_states, mode, args)
        n, starts = layout.partition.size, range(0, layout.partition.size, k)
        each = [[y[i : min(i + k, n)] for y in tree.x] for i in starts]
        join = lambda states: [jnp.concatenate(ys) for ys in zip(*states, strict=True)]
        if mode.what == "value":
            tops = join([fold_by_tree(tree.combine, x) for x in each])
            total = _first(tree.root(tops))
            return [*total, *(tops if mode.saved else ())]
        if mode.what == "tangents":
            dconsts, dinit, dx = tree.tangents()
            each = [
                [*x, *(y[i : min(i + k, n)] for y in dx)]
                for i, x in zip(starts, each, strict=True)
            ]
            tops = join([fold_by_tree(tree.push(dconsts), x) for x in each])
            return _first(tree.push_root(tops, dconsts, dinit))
        levels = [tree.levels(x) for x in each]
        tops = tree.tops or join([of_block[-1] for of_block in levels])
        consts, init, of_tops = tree.pull_root(tops)
        parts = [
            tree.pull(of_block, [ct[i : i + 1] for ct in of_tops])
            for i, of_block in enumerate(levels)
        ]
        for part, _ in parts:
            consts = _add(consts, part)
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
    with column_context(layout):
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
    with column_context(layout):
        jaxpr, consts = _compat.trace_to_jaxpr(transposed, avals, "transposed")
    assert not consts, "the derivative's constants are operands"
    return jaxpr


def _tangents_in(mode: FoldMode, n_states: int) -> int:
    n_consts = len(mode.active) - 2 * n_states
    return sum(mode.active[:n_consts]) + 2 * sum(mode.active_out)


class _Tree:
    """The operands of an equation on a fold's tree, and the function on states.

    Lists of tangents and cotangents have an element for each active leaf.
    """

    def __init__(
        self,
        jaxprs: Sequence[ClosedJaxpr],
        n_states: int,
        mode: FoldMode,
        args: Sequence[Array],
    ) -> None:
        self.mode, self.n_states = mode, n_states
        self.fn, *others = map(_compat.jaxpr_as_checked_fun, jaxprs)
        # Of the value it is never called.
        self.derivative = others[0] if others else self.fn
        n = mode.count(len(args))
        operands, rest = args[:n], args[n:]
        self.n_consts = n - 2 * n_states
        saves = mode.saved and mode.what != "value"
        self.tops = list(rest[:n_states]) if saves else None
        self.extra = list(rest[n_states:] if saves else rest)
        self.consts, self.init, self.x = self.split(operands)
        self.active = self.split(mode.active)

    def split(self, values: Sequence) -> tuple[list, list, list]:
        """Split values for the fold's operands: consts, first state, groups' states."""
        c, s = self.n_consts, self.n_states
        return list(values[:c]), list(values[c : c + s]), list(values[c + s :])

    def tangents(self) -> tuple[list, list, list]:
        """Return tangents of active consts, of active leaves of first state and x."""
        dense = iter(self.extra)
        consts = [next(dense) for active in self.active[0] if active]
        states = []
        for values, active in ((self.init, self.active[1]), (self.x, self.active[2])):
            triples = zip(values, active, self.mode.active_out, strict=True)
            states.append(
                [next(dense) if a else jnp.zeros_like(y) for y, a, o in triples if o]
            )
        return consts, *states

    def active_cotangents(
        self, consts: list[Array], init: list[Array], x: list[Array]
    ) -> list[Array]:
        """List the cotangents of active operands, from those of active leaves."""
        outs = list(consts)
        for cts, active in ((init, self.active[1]), (x, self.active[2])):
            moving = [a for a, o in zip(active, self.mode.active_out, strict=True) if o]
            outs += [ct for ct, a in zip(cts, moving, strict=True) if a]
        return outs

    def combine(self, a: States, b: States) -> States:
        """Combine states pair by pair, leaves `[j, *s]`."""
        axes = (None,) * (self.n_consts - self.mode.closed) + (0,) * (2 * self.n_states)
        return list(jax.vmap(self.fn, axes)(*self.consts[self.mode.closed :], *a, *b))

    def push(self, dconsts: list[Array]) -> Combine:
        """Make `combine` for states with tangents, lists `[*state, *tangents]`."""
        mode, s = self.mode, self.n_states
        moves = sum(mode.active_out)
        axes = (
            *[None] * self.n_consts, *[0] * (2 * s),
            *[None] * len(dconsts), *[0] * (2 * moves),
        )  # fmt: skip

        def combine(a: States, b: States) -> States:
            (a, da), (b, db) = (a[:s], a[s:]), (b[:s], b[s:])
            outs = jax.vmap(self.derivative, axes)(
                *self.consts, *a, *b, *dconsts, *da, *db
            )
            dense = iter(outs[s:])
            triples = zip(outs[:s], mode.pushed, mode.active_out, strict=True)
            return [
                *outs[:s],
                *(next(dense) if p else jnp.zeros_like(y) for y, p, o in triples if o),
            ]

        return combine

    def pull_pairs(
        self, a: States, b: States, cts: list[Array]
    ) -> tuple[list[Array], list[Array], list[Array]]:
        """Return cotangents of active consts, `[j, *t]`, of both states of pairs."""
        mode, moves = self.mode, sum(self.mode.active_out)
        pairs = zip(mode.active_out, mode.pushed, strict=True)
        pushed = [p for o, p in pairs if o]
        cts = [ct for ct, p in zip(cts, pushed, strict=True) if p]
        n_consts = sum(self.active[0])
        axes = (
            *[None] * self.n_consts, *[0] * (2 * self.n_states), *[0] * len(cts)
        )  # fmt: skip
        outs = list(jax.vmap(self.derivative, axes)(*self.consts, *a, *b, *cts))
        return (
            outs[:n_consts],
            outs[n_consts : n_consts + moves],
            outs[n_consts + moves :],
        )

    def levels(self, x: States, real: Array | None = None) -> list[States]:
        """List all levels of the balanced tree over k states, these first."""
        levels = []
        fold_by_tree(self.combine, x, real, levels)
        return levels

    def pull(
        self, levels: list[States], cts: list[Array], real: Array | None = None
    ) -> tuple[list[Array], list[Array]]:
        """Go down a tree: cotangents of active consts, and of the leaves' states."""
        consts = [
            jnp.zeros_like(c)
            for c, a in zip(self.consts, self.active[0], strict=True)
            if a
        ]
        reals: list[Any] = [real]
        for _ in levels[1:]:
            reals.append(None if real is None else reals[-1][::2])
        for x, real in reversed(list(zip(levels[:-1], reals[:-1], strict=True))):
            even = 2 * (x[0].shape[0] // 2)
            left, right = [y[:even:2] for y in x], [y[1:even:2] for y in x]
            above = [ct[: even // 2] for ct in cts]
            of_consts, of_left, of_right = self.pull_pairs(left, right, above)
            if real is not None:
                both = real[1:even:2]
                zeros = lambda cts: [jnp.zeros_like(ct) for ct in cts]
                of_left = _unless_padding(both, of_left, above)
                of_right = _unless_padding(both, of_right, zeros(of_right))
                of_consts = _unless_padding(both, of_consts, zeros(of_consts))
            consts = _add(consts, [jnp.sum(c, 0, dtype=c.dtype) for c in of_consts])
            down = [
                jnp.stack([a, b], 1).reshape(even, *a.shape[1:])
                for a, b in zip(of_left, of_right, strict=True)
            ]
            rest = [ct[even // 2 :] for ct in cts]
            cts = _join(down, rest) if even < x[0].shape[0] else down
        return consts, cts

    def root(self, tops: States) -> States:
        """Fold the devices' states after the first state, leaves `[1, *s]`."""
        return self.combine(
            [y[None] for y in self.init], fold_by_tree(self.combine, tops)
        )

    def push_root(
        self, tops: States, dconsts: list[Array], dinit: list[Array]
    ) -> States:
        """Return the tangents of the root; `tops` has those of the tops after these."""
        combine = self.push(dconsts)
        first = [y[None] for y in (*self.init, *dinit)]
        return combine(first, fold_by_tree(combine, tops))[self.n_states :]

    def pull_root(self, tops: States) -> tuple[list[Array], list[Array], list[Array]]:
        """Return cotangents of active consts, of the first state, and of the tops."""
        levels = self.levels(tops)
        first = [y[None] for y in self.init]
        above = [ct[None] for ct in self.extra]
        consts, init, below = self.pull_pairs(first, levels[-1], above)
        others, of_tops = self.pull(levels, below)
        return _add(_first(consts), others), _first(init), of_tops


def _first(state: Sequence[Array]) -> list[Array]:
    return [y[0] for y in state]


def _add(xs: Sequence[Array], ys: Sequence[Array]) -> list[Array]:
    return [x + y for x, y in zip(xs, ys, strict=True)]


# ---------------------------------------------------------------------------------
# One device


def _run_device(
    layout: Layout,
    jaxprs: Sequence[ClosedJaxpr],
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
    tree = _Tree(jaxprs, n_states, mode, args)
    k, used = layout.per_device, -(-layout.partition.size // layout.per_device)
    real = None
    if layout.uneven:
        real = first + lax.iota(jnp.int32, k) < layout.partition.size
    device = first // k
    zeros_unless = lambda keep, xs: [jnp.where(keep, x, jnp.zeros_like(x)) for x in xs]
    # What all devices have enters the root once: on the first device.
    once = lambda xs: zeros_unless(device == 0, xs)
    is_mine = lambda x: (lax.iota(jnp.int32, used) == device).reshape(
        used, *[1] * (x.ndim - 1)
    )
    # Without VMA, as the states vary over the devices.
    with _compat.without_vma():
        levels = tree.levels(tree.x, real)
    if mode.what == "value" and not mode.saved:
        with _compat.without_vma():
            total = fold_devices(
                layout, jaxprs[0], tree.consts[mode.closed :], tree.combine,
                levels[-1], used, fold_by_tree,
            )  # fmt: skip
            if total is not None:
                total = tree.combine([y[None] for y in tree.init], total)
                return [vary(y, others) for y in _first(total)]
    tops = tree.tops or states_of_devices(layout, levels[-1], varying, used)
    if mode.what == "value":
        with _compat.without_vma():
            total = _first(tree.root(tops))
        return [vary(y, others) for y in (*total, *(tops if mode.saved else ()))]
    if mode.what == "tangents":
        with _compat.without_vma():
            dconsts, dinit, dx = tree.tangents()
            own = fold_by_tree(tree.push(dconsts), [*tree.x, *dx], real)[n_states:]
            placed = [jnp.where(is_mine(t), t, jnp.zeros_like(t)) for t in own]
            total = tree.push_root([*tops, *placed], once(dconsts), once(dinit))
        sums = _sum_devices(layout, _first(total), varying)
        return [vary(y, others) for y in sums]
    with _compat.without_vma():
        consts, init, of_tops = tree.pull_root(tops)
        own = [
            jnp.sum(jnp.where(is_mine(ct), ct, jnp.zeros_like(ct)), 0, keepdims=True)
            for ct in of_tops
        ]
        others_consts, of_x = tree.pull(levels, own, real)
        outs = tree.active_cotangents(
            _add(once(consts), others_consts), once(init), of_x
        )
    n_global = len(outs) - sum(tree.active[2])
    sums = _sum_devices(layout, outs[:n_global], varying)
    return [
        *(vary(y, others) for y in sums),
        *(vary(y, every) for y in outs[n_global:]),
    ]


def _sum_devices(
    layout: Layout, xs: Sequence[Array], varying: frozenset[str]
) -> Sequence[Array]:
    """Sum values over the devices, in one all-reduce."""
    if not (xs and layout.axes):
        return xs
    return psum(layout, *(vary(x, varying | set(layout.axes)) for x in xs))


def states_of_devices(
    layout: Layout, own: States, varying: frozenset[str], used: int
) -> States:
    """Collect one state of each device that has groups, by all-gathers.

    It is called in the code of one device. It runs one all-gather for each dtype; or
    one for each leaf, if the mesh has axes that are not the partition's and that may
    shard the leaves: Auto ones larger than one, or Explicit ones.

    `own` is this device's state, `[1, *s]`, and `used` the number of devices that have
    groups, the first ones. The result is `[used, *s]`, in the order of the devices, the
    same on all of them; `own` itself if the program runs locally. Before the
    all-gather, the leaves are cast to vary over the partition's axes and over
    `varying`, the Manual mesh axes over which some operand of the fold varies.
    """
    if not layout.axes:
        return own
    # All devices have the same result. With VMA checking its type must say so.
    to = "invarying" if _compat.check_vma() else "varying"
    axes = varying | set(layout.axes)

    def gathered(x: Array) -> Array:
        if not x.size:
            return jnp.zeros((used, *x.shape[1:]), x.dtype)
        x = lax.all_gather(vary(x, axes), layout.axes, tiled=True, to=to)
        return lax.slice_in_dim(x, 0, used)

    def together(*leaves: Array) -> list[Array]:
        ends = np.cumsum([x.size for x in leaves])[:-1]
        flat = lax.concatenate([lax.reshape(x, (1, x.size)) for x in leaves], 1)
        parts = jnp.split(gathered(flat), ends, axis=1)
        pairs = zip(parts, leaves, strict=True)
        return [lax.reshape(y, (used, *x.shape[1:])) for y, x in pairs]

    # Where other axes of the mesh shard a leaf, a reshape could cost a collective.
    others = other_axes(layout) or layout.other_explicit_axes
    pack = len(own) > 1 and not others
    each = lambda *leaves: [gathered(x) for x in leaves]
    return _by_dtype(together if pack else each, own)


def _by_dtype(
    fn: Callable[..., Sequence[Array]], leaves: Sequence[jax.Array]
) -> States:
    """Apply a function of arrays of one dtype to the leaves of each dtype.

    `fn(*leaves)` returns as many arrays; the results are in the order of the leaves. It
    is called once for each dtype; for typed random keys, once for each leaf, with the
    raw data of the keys.
    """
    outs: dict[int, jax.Array] = {}
    for dtype in dict.fromkeys(x.dtype for x in leaves):
        chosen = [i for i, x in enumerate(leaves) if x.dtype == dtype]
        if jnp.issubdtype(dtype, jax.dtypes.extended):
            one = lambda x: fn(x)[0]
            outs |= {i: on_raw(one, leaves[i]) for i in chosen}
        else:
            results = fn(*(leaves[i] for i in chosen))
            outs |= dict(zip(chosen, results, strict=True))
    return [outs[i] for i in range(len(leaves))]


# ---------------------------------------------------------------------------------
# Trees and scans. Padding has the last slots, so that a node of a tree has groups if
# the first of its slots has one; a node without groups is left out.


def _unless_padding(real: Array | None, new: States, old: States) -> States:
    """Select states by slot: new ones where the slot belongs to a group, else old ones.

    `real`, bool `[k]`, says so for each slot (a place for one group) on a device; if it
    is None, all do. Leaves are `[k, *s]`.
    """
    if real is None:
        return new
    select = lambda x, y: jnp.where(
        lax.broadcast_in_dim(real, (*real.shape, *(1,) * (x.ndim - 1)), (0,)), x, y
    )
    return [select(x, y) for x, y in zip(new, old, strict=True)]


def _join(x: States, y: States) -> States:
    """Concatenate two sequences of states, leaf by leaf: `[j, *s]` and `[k, *s]`."""
    pairs = zip(x, y, strict=True)
    return [jnp.concatenate(in_same_sharding(pair)) for pair in pairs]


def fold_by_tree(
    combine: Combine,
    x: States,
    real: Array | None = None,
    levels: list[States] | None = None,
) -> States:
    """Fold k states by a balanced tree, in their order: leaves `[k, *s]` to `[1, *s]`.

    `combine(a, b)` combines j pairs of states, for any j. `real`, bool `[k]`, is False
    for padding, which comes last and is left out; if no state is real, the result has
    no meaning. The states of each level, from `x` on, are appended to `levels`.
    """
    levels = [] if levels is None else levels
    levels.append(x)
    while (k := x[0].shape[0]) > 1:
        even = 2 * (k // 2)
        left, right = [y[:even:2] for y in x], [y[1:even:2] for y in x]
        pairs = combine(left, right)
        if real is not None:
            pairs = _unless_padding(real[1:even:2], pairs, left)
            real = real[::2]
        if even < k:
            pairs = _join(pairs, [y[even:] for y in x])
        x = pairs
        levels.append(x)
    return x


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
