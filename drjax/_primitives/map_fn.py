"""The higher-order primitive `map_fn` and all of its rules.

`map_fn[jaxpr, partition, mesh, name] x_1 ... x_k` applies `jaxpr`, which is written
for one group, to each group's slices. Input: k x `[n, *s_i]`. Output: l x `[n, *t_j]`.

The rules transform the per-group jaxpr and bind `map_fn` again, so a derivative of a
program is a program with the same primitives. For y_i = f(x_i):

    JVP        (y_i, dy_i) = f'(x_i, dx_i)                  one map
    linearize  (y_i, r_i)  = f_lin(x_i); dy_i = L(r_i, dx_i) two maps; r is partitioned
    transpose  ct_x_i      = L^T(r_i, ct_y_i)               one map
    batching   f is batched behind the group axis
    partial    known and unknown part of f                  two maps; r is partitioned
    DCE        f without dead equations, operands, results  at most one map

Each group's results depend on its own slices only. The Jacobian of a map is therefore
block-diagonal, diag(J_1, ..., J_n), and so is its transpose, diag(J_1^T, ..., J_n^T):
no rule communicates. Values that the function closed over are operands, through
`broadcast`, whose transpose sums their cotangents over the groups.

Invariants: the jaxpr is closed and has no constants; symbolic zeros (of tangents and
cotangents) are neither operands nor results of a derived map.

Sharp edges: a per-group jaxpr is bound to the mesh around it, so every rule that traces
or evaluates it enters `group_context` first. `map_lowering.py` runs it on the mesh:
the `shard_map` of a map inherits the surrounding `check_vma` (off at top level), as
users' scans and nested shard_maps would otherwise need casts, and AD never transposes
through it.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad, batching
from jax.interpreters.mlir import LoweringRuleContext
from jax.interpreters.partial_eval import JaxprTracer

from drjax import _compat
from drjax._compat import UndefinedPrimal, retype_mesh
from drjax._compat.types import (
    Array,
    Aval,
    ClosedJaxpr,
    Eqn,
    Flags,
    GlobalArray,
    Mesh,
    Params,
    PartitionedArray,
)
from drjax._context import enter_mapped, leaves_groups_out
from drjax._partition import Partition
from drjax._primitives import registration
from drjax._primitives.collectives import broadcast_p
from drjax._primitives.contract_groups import GroupSums, group_sums
from drjax._primitives.lowered_equations import (
    InnerReduction,
    LoweredMap,
    MlirValue,
    Operand,
    Placement,
    lowered_equations,
)
from drjax._primitives.map_lowering import (
    lowers_by_vmap,
    over_groups,
    prepare_for_shard_map,
    run_groups,
)
from drjax._primitives.partial_reduction import with_partial_reductions
from drjax._primitives.partition_index import GroupAxis
from drjax._primitives.registration import AxisData, Residuals, Tangent
from drjax._sharding.avals import group_aval, partitioned_aval, slices_aval
from drjax._sharding.execute import shard_map_over_devices, vary, with_sharding_of
from drjax._sharding.layout import Layout, axes_of_groups, make_layout

map_fn_p = registration.new_primitive("map_fn", multiple_results=True)


@contextlib.contextmanager
def group_context(layout: Layout) -> Iterator[None]:
    """Context manager in which the code of one group is traced or transformed.

    In it, building blocks know that they are inside a map over this partition, types
    are on the mesh of the layout, and the derivative of a `shard_map` inside the
    group's code does not sum over the partition's mesh axes.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(enter_mapped(layout.partition))
        if layout.sharded:
            stack.enter_context(jax.sharding.use_abstract_mesh(layout.abstract_mesh))
        stack.enter_context(retype_mesh.spmd_axes(axes_of_groups(layout)))
        yield


def trace_group(
    fn: Callable[..., Sequence[Array]], avals: Sequence[Aval], layout: Layout, name: str
) -> tuple[ClosedJaxpr, list[Array]]:
    """Trace a function of one group, of flat sequences of arrays `[*s]`, to a jaxpr.

    `avals` are the types of the partitioned operands, `[n, *s]`. Returns a closed jaxpr
    without constants, and the arrays and tracers that `fn` closes over: the jaxpr takes
    these as its first inputs.
    """
    with group_context(layout):
        avals = [group_aval(aval, layout) for aval in avals]
        return _compat.trace_to_jaxpr(fn, avals, name)


def map_slices(
    fn: Callable[..., Array],
    *args: PartitionedArray,
    partition: Partition,
    mesh: Mesh | None,
) -> PartitionedArray:
    """Bind `map_fn` for a function of arrays with one result, for use in rules.

    `fn` is a function of one group, from arrays `[*s]` to one array `[*t]`. It closes
    over no arrays. Its trace is cached by the function object, so it must be defined in
    a module, not made at each call.
    """
    avals = tuple(_compat.typeof(x) for x in args)
    jaxpr = _trace_slices(fn, avals, make_layout(partition, mesh))
    (out,) = map_fn_p.bind(
        *args, jaxpr=jaxpr, partition=partition, mesh=mesh, name=_name(fn)
    )
    return out


@_compat.cache()
def _trace_slices(
    fn: Callable[..., Array], avals: tuple[Aval, ...], layout: Layout
) -> ClosedJaxpr:
    """Trace the function of one group of `map_slices` to a jaxpr; cached."""
    jaxpr, _ = trace_group(lambda *xs: [fn(*xs)], avals, layout, _name(fn))
    return jaxpr


def _name(fn: Callable) -> str:
    """Return the name of a function, or of its class, for printed equations.

    Underscores at its ends are left out.
    """
    return getattr(fn, "__name__", type(fn).__name__).strip("_")


# ---------------------------------------------------------------------------------
# Types and execution


def _abstract_eval(
    *avals: Aval, jaxpr: ClosedJaxpr, partition: Partition, mesh: Mesh | None, name: str
) -> tuple[list[Aval], frozenset]:
    """Return the types of the results, and the effects of the jaxpr."""
    layout = make_layout(partition, mesh)
    outs = [partitioned_aval(aval, layout) for aval in jaxpr.out_avals]
    return outs, _compat.effects_of(jaxpr)


def execute_map(
    *args: Array,
    jaxpr: ClosedJaxpr,
    partition: Partition,
    mesh: Mesh | None,
    name: str,
    shared: Flags | None = None,
) -> list[PartitionedArray]:
    """Apply a per-group jaxpr to each group's slices.

    `shared` says for each operand whether it is global, `[*s]`, the same for each
    group; None: no operand is.
    """
    partitioned_in = [True] * len(args) if shared is None else [not s for s in shared]
    return run_groups(make_layout(partition, mesh), jaxpr, args, partitioned_in)


# ---------------------------------------------------------------------------------
# Derivatives


def _outer_avals(jaxpr: ClosedJaxpr, params: Params) -> list[Aval]:
    """List the types of a map's results, `[n, *t]`, from its per-group jaxpr."""
    layout = make_layout(params["partition"], params["mesh"])
    return [partitioned_aval(aval, layout) for aval in jaxpr.out_avals]


def _bind(jaxpr: ClosedJaxpr, args: Sequence, **params: Any) -> list[PartitionedArray]:
    """Bind `map_fn` for the jaxpr of a derivative, which may have constants.

    Users' derivative rules close over arrays, which are constants of the jaxpr. They
    are broadcast to all groups, and become the first operands of the map.
    """
    jaxpr, consts = _compat.without_consts(jaxpr)
    return map_fn_p.bind(
        *broadcast_consts(consts, **params), *args, jaxpr=jaxpr, **params
    )


def broadcast_consts(
    consts: Sequence[GlobalArray], *, partition: Partition, mesh: Mesh | None, name: str
) -> list[PartitionedArray]:
    """Broadcast the global values that a function of one group closed over.

    They become operands of a map, as its jaxpr has no constants. The keywords are the
    parameters of the map.
    """
    return [broadcast_p.bind(c, partition=partition, mesh=mesh) for c in consts]


# (y_i, dy_i) = (f(x_i), Df(x_i) dx_i): one map, so that what y_i and dy_i share is
# computed once. Symbolic zeros stay outside.
def _jvp(
    primals: Sequence[Array],
    tangents: Sequence[Tangent],
    *,
    jaxpr: ClosedJaxpr,
    **params: Any,
) -> tuple[Sequence[Array], Sequence[Tangent]]:
    nonzeros = [type(t) is not _compat.Zero for t in tangents]
    with group_context(make_layout(params["partition"], params["mesh"])):
        jvp_jaxpr, nonzeros_out = _compat.jvp_jaxpr(jaxpr, nonzeros)
    dense = [t for t, nz in zip(tangents, nonzeros, strict=True) if nz]
    outs = _bind(jvp_jaxpr, [*primals, *dense], **params)
    n = len(jaxpr.out_avals)
    avals = _outer_avals(jaxpr, params)
    return outs[:n], registration.fill_zeros(avals, nonzeros_out, outs[n:])


# f_lin computes y_i and the residuals r_i; L(r_i, .) = Df(x_i) is linear.
def _linearize(
    is_vjp: bool,
    nonzeros: Flags,
    *primals: PartitionedArray,
    jaxpr: ClosedJaxpr,
    **params: Any,
) -> tuple[Sequence[Array], Flags, Residuals, Callable[..., Sequence[Tangent]]]:
    """Linearize a map: one map for the results, bound now, and a linear one.

    The first map also returns residuals, the values of the forward computation that the
    linear map reads. The second map is bound when `linear` is called.
    """
    with group_context(make_layout(params["partition"], params["mesh"])):
        split = _compat.linearize_jaxpr(jaxpr, nonzeros, is_vjp)
    bind = functools.partial(_bind, **params)
    outs, nonzeros_out, residuals, tangent = registration.linearize_saving_residuals(
        bind, jaxpr, primals, split
    )
    avals = _outer_avals(jaxpr, params)

    def linear(residuals: Residuals, *tangents: Tangent) -> Sequence[Tangent]:
        dense = registration.instantiate_nonzeros(tangents, nonzeros)
        outs = bind(tangent, registration.linear_operands(residuals, dense))
        return registration.fill_zeros(avals, nonzeros_out, outs)

    return outs, nonzeros_out, residuals, linear


# sum_i <L_i dx_i, ct_i> = sum_i <dx_i, L_i^T ct_i>: each group has its own transpose,
# without communication.
def _transpose(
    cts: Sequence[Tangent],
    *args: Array | UndefinedPrimal,
    jaxpr: ClosedJaxpr,
    **params: Any,
) -> list[Tangent | None]:
    linear = tuple(ad.is_undefined_primal(x) for x in args)
    nonzero = tuple(type(ct) is not _compat.Zero for ct in cts)
    # What is not linear is a residual of L, or known in a partial evaluation.
    residuals = [x for x, lin in zip(args, linear, strict=True) if not lin]
    dense = [ct for ct, nz in zip(cts, nonzero, strict=True) if nz]
    avals = tuple(_compat.typeof(x) for x in (*residuals, *dense))
    layout = make_layout(params["partition"], params["mesh"])
    transposed, consts, nonzero_in = _transpose_jaxpr(
        jaxpr, linear, nonzero, avals, layout, leaves_groups_out(params["name"])
    )
    operands = [*broadcast_consts(consts, **params), *residuals, *dense]
    outs = map_fn_p.bind(*operands, jaxpr=transposed, **params)
    avals = [x.aval for x, lin in zip(args, linear, strict=True) if lin]
    dense = iter(registration.fill_zeros(avals, nonzero_in, outs))
    pairs = zip(args, linear, strict=True)
    return [with_sharding_of(next(dense), x.aval) if lin else None for x, lin in pairs]


# Cached: an eager backward pass transposes the same jaxpr at each step of training.
@_compat.weakref_lru_cache
def _transpose_jaxpr(
    jaxpr: Any,
    linear: tuple[bool, ...],
    nonzero: tuple[bool, ...],
    avals: tuple[Aval, ...],
    layout: Layout,
    leaves_out: bool,
) -> tuple[ClosedJaxpr, tuple[GlobalArray, ...], tuple[bool, ...]]:
    """Transpose a per-group jaxpr in its `linear` inputs; cached.

    The other inputs are residuals. `nonzero` says for each result whether its cotangent
    is no symbolic zero, and `avals` are the partitioned types, `[n, *s]`, of
    the residuals and then of these cotangents. `leaves_out` says whether the
    program leaves groups out of reductions.

    Returns the closed jaxpr; the values `[*s]` that it closes over; and for each linear
    input whether its cotangent is no symbolic zero. The jaxpr takes these values, the
    residuals and the nonzero cotangents of results; it returns the nonzero cotangents
    of linear inputs.
    """
    transposed, nonzero_in = registration.backward_function(jaxpr, linear, nonzero)
    if leaves_out:
        transposed = _zero_for_zeros(transposed, len(avals) - sum(nonzero))
    own = [a for a, lin in zip(jaxpr.in_avals, linear, strict=True) if not lin]
    own += [a for a, nz in zip(jaxpr.out_avals, nonzero, strict=True) if nz]
    with group_context(layout):
        # Where JAX itself makes Explicit axes Auto, as jax.random.gamma does, residuals
        # and cotangents are on that mesh.
        per_group = [
            aval if aval.sharding.mesh == of_jaxpr.sharding.mesh else of_jaxpr
            for x, of_jaxpr in zip(avals, own, strict=True)
            for aval in [group_aval(x, layout)]
        ]
        transposed_jaxpr, consts = _compat.trace_to_jaxpr(
            transposed, per_group, "transposed"
        )
    return transposed_jaxpr, tuple(consts), tuple(nonzero_in)


# A group that a reduction leaves out has zero cotangents. If its work diverged, L_i has
# infinities or NaNs, and 0 * NaN is NaN, which the sums over groups would spread. As
# L_i^T is linear, L_i^T 0 = 0: so if all cotangents of a group are zero, and what is
# computed with them is not finite, the group's cotangents are zeros. Only then, as for
# a group that does take part zero may be a value like others, at which the function of
# the cotangent has a derivative. Of such a group all is constant: what enters, too, so
# that derivatives of the transpose stop there.
def _zero_for_zeros(
    transposed: Callable[..., list[Array]], n_residuals: int
) -> Callable[..., list[Array]]:
    """Let a transposed function return zeros for the zeros of a group that diverged."""

    def fn(*values: Array) -> list[Array]:
        inexact = [jnp.issubdtype(x.dtype, jnp.inexact) for x in values]
        if len(values) == n_residuals or not any(inexact[:n_residuals]):
            return transposed(*values)  # nothing to multiply zeros by
        varying = lambda x: _compat.varying(_compat.typeof(x))
        finite = lambda xs: [(varying(x), jnp.all(jnp.isfinite(x))) for x in xs]
        idle = [(varying(ct), jnp.all(ct == 0)) for ct in values[n_residuals:]]
        used = finite(x for x, f in zip(values, inexact, strict=True) if f)

        def where_dead(y: Array, of_dead: Array) -> Array:
            """Replace `y` where the group diverged, by what `y` may depend on."""
            own = varying(y)
            idle_, used_ = ([t for v, t in tests if v <= own] for tests in (idle, used))
            if not (idle_ and used_):
                return y
            every = lambda tests: functools.reduce(jnp.logical_and, tests)
            return jnp.where(every(idle_) & ~every(used_), of_dead, y)

        outs = transposed(
            *(
                where_dead(x, lax.stop_gradient(x)) if f else x
                for x, f in zip(values, inexact, strict=True)
            )
        )
        used += finite(outs)
        return [where_dead(y, jnp.zeros_like(y)) for y in outs]

    return fn


# ---------------------------------------------------------------------------------
# Partial evaluation, dead-code elimination, batching


def _partial_eval(
    trace: Any, *tracers: JaxprTracer, **params: Any
) -> Sequence[PartitionedArray | JaxprTracer]:
    """Split the map into a known and an unknown one.

    The per-group jaxpr is split into what known operands determine and the rest. The
    map of the first part is bound; it also returns residuals, `[n, *s]`, the values
    that the second part needs. The map of the second part becomes an equation of the
    trace. If no operand is known, and no result can be computed without them, the map
    is not split: all of it becomes one equation of the trace.
    """
    layout = make_layout(params["partition"], params["mesh"])
    # All groups are known or unknown together: known-ness belongs to the operand.
    unknown = [not t.pval.is_known() for t in tracers]
    with group_context(layout):
        split = _compat.partial_eval_jaxpr(params["jaxpr"], unknown)
    if all(unknown) and all(split[2]):
        # Known are constants and group indices alone: a map of their own would store
        # them for each group, and be in the way of transposing twice.
        split = _compat.unsplit_jaxpr(params["jaxpr"])
    return _compat.partial_eval_by_tracers(
        map_fn_p, trace, tracers, unknown, params, split,
        lambda aval: partitioned_aval(aval, layout),
    )  # fmt: skip


def _residual_aval(params: Params, aval: Aval) -> Aval:
    """Return the type `[n, *s]` of a residual of a map, from that of one group, `[*s]`.

    A residual is a value of the mapped function that the backward pass needs. JAX calls
    this function for those that a policy of `jax.checkpoint` saves.
    """
    return partitioned_aval(aval, make_layout(params["partition"], params["mesh"]))


def eliminate_dead_code(
    used_outputs: list[bool], eqn: Eqn
) -> tuple[list[bool], Eqn | None]:
    """Eliminate dead code of the equation, and of its jaxpr."""
    # An equation with effects (a callback, a print) is live without live results.
    if not any(used_outputs) and not eqn.effects:
        return [False] * len(eqn.invars), None
    jaxpr, used_inputs = _compat.dce_jaxpr(eqn.params["jaxpr"], used_outputs)
    # Operands of dead equations go, too, so that their own equations may be dead.
    invars = [v for v, used in zip(eqn.invars, used_inputs, strict=True) if used]
    outvars = [v for v, used in zip(eqn.outvars, used_outputs, strict=True) if used]
    params = {**eqn.params, "jaxpr": jaxpr}
    return used_inputs, _compat.new_eqn(
        eqn, invars, outvars, params, _compat.effects_of(jaxpr)
    )


def _batch(
    axis_data: AxisData,
    args: Sequence[Array],
    dims: Sequence[int | None],
    *,
    jaxpr: ClosedJaxpr,
    **params: Any,
) -> tuple[Sequence[Array], list[int | None]]:
    """Batch the per-group jaxpr, with the group axis first.

    Operands may have the batch dimension anywhere, also before n. Results have it at 1
    or later, as axis 0 is the group axis.
    """
    moved = [
        (x, d) if d is None else registration.group_axis_first(x, d)
        for x, d in zip(args, dims, strict=True)
    ]
    args = [x for x, _ in moved]
    # Axis d of `[n, *s]` is axis d - 1 of a group's `[*s]`, and the other way round.
    in_axes = [None if d is None else d - 1 for _, d in moved]
    axis = axis_data.name
    if isinstance(axis, GroupAxis) and axis.partition == params["partition"]:
        # An inner scope: its indices are not those of the groups of the vmap.
        axis_data = _compat.without_name(axis_data)
    with group_context(make_layout(params["partition"], params["mesh"])):
        batched, out_axes = _compat.batch_jaxpr(jaxpr, axis_data, in_axes)
    outs = map_fn_p.bind(*args, jaxpr=batched, **params)
    return outs, [None if axis is None else axis + 1 for axis in out_axes]


# ---------------------------------------------------------------------------------
# Lowering: operands are the sources of broadcasts, and sums are computed within the map

# An operand of sums: its MLIR value and type, and whether it is partitioned.
Stack: TypeAlias = tuple[MlirValue, Aval, bool]


def _lower_map(
    ctx: LoweringRuleContext, *args: MlirValue, **params: Any
) -> Sequence[MlirValue]:
    """Lowering rule of `map_fn`, which reads the sources of broadcasts.

    An operand that is the result of a `broadcast` with the same partition and mesh,
    lowered before in the same module, is replaced by the operand of the broadcast. The
    rule also records the map among the module's `lowered_equations`, so that sums of
    its results can be computed within it.

    A result of the mapped function may be a reduction over an inner level of groups
    (`with_partial_reductions`). If both levels are sharded, the map gets one more
    result for it: the part of the reduction on each device of the inner level. Before
    JAX 0.12, it does not if the mesh has Explicit axes that are not the partition's.
    """
    placement = {"partition": params["partition"], "mesh": params["mesh"]}
    lowered = lowered_equations(ctx)
    operands, shared = list(zip(args, ctx.avals_in, strict=True)), []
    for i, arg in enumerate(args):
        # A broadcast over another partition or mesh has other copies: no match.
        of_broadcast, source = lowered.broadcasts.get(arg, (None, None))
        shared.append(of_broadcast == placement)
        if source is not None and shared[i]:
            operands[i] = source
    layout = make_layout(**placement)
    operands = [(x, slices_aval(aval, layout)) for x, aval in operands]
    run = functools.partial(execute_map, shared=tuple(shared))
    jaxpr, inner = params["jaxpr"], {}
    gathers = _compat.GATHERS_EXPLICIT_RESULTS and layout.other_explicit_axes
    if layout.sharded and not gathers:
        extended, inner = with_partial_reductions(jaxpr)
        params = {**params, "jaxpr": extended}
    contraction = None if inner else _contraction(layout, jaxpr)
    stacks = []
    if contraction is None:
        outs = _compat.lower_function(ctx, run, operands, True, **params)
    else:
        outs, stacks = contraction.lower(ctx, operands, shared)
    partial = {
        i: (each, (outs[each.position], _partitioned_out(params, each.position)))
        for i, each in inner.items()
    }
    outs = outs[: len(jaxpr.out_avals)]
    a_map = _MapWithSums(
        placement, operands, tuple(shared), jaxpr, partial, contraction, stacks
    )
    lowered.maps.update({out: (a_map, i) for i, out in enumerate(outs)})
    return outs


def _partitioned_out(params: Params, position: int) -> Aval:
    """Return the type `[n, *t]` of a map's result at `position`."""
    layout = make_layout(params["partition"], params["mesh"])
    return partitioned_aval(params["jaxpr"].out_avals[position], layout)


class _Contraction:
    """A map that also returns what sums of its results are computed from.

    So a sum needs the map's work once in the code, not once more for itself. It is for
    layouts whose types have no mesh axes: on others, the sums repeat the work, which
    the compiler merges.
    """

    def __init__(self, layout: Layout, jaxpr: ClosedJaxpr, sums: GroupSums) -> None:
        self._layout, self._sums = layout, sums
        raw = _compat.open_jaxpr(jaxpr)
        inputs = {v: i for i, v in enumerate(raw.invars)}
        # An input is not returned: for all groups, it may be one array.
        self._inputs = [inputs.get(v) for v in sums.per_group]
        computed = [v for v in sums.per_group if v not in inputs]
        self._stack_avals = [
            partitioned_aval(_compat.ShapedArray(v.aval.shape, v.aval.dtype), layout)
            for v in computed
        ]
        self._extended = _compat.with_outputs(jaxpr, [*raw.outvars, *computed])
        self._count = len(raw.outvars)
        self._out_avals = [
            partitioned_aval(_compat.ShapedArray(v.aval.shape, v.aval.dtype), layout)
            for v in raw.outvars
        ]

    def lower(
        self, ctx: LoweringRuleContext, operands: Sequence[Operand], shared: Flags
    ) -> tuple[list, list[Stack]]:
        """Lower the map; return its results, and the operands of `lower_sums`."""
        layout, partitioned_in = self._layout, [not x for x in shared]
        fn = _compat.jaxpr_as_fun(self._extended)

        def run(*args: Array) -> list[Array]:
            body = over_groups(layout, fn, partitioned_in)
            vary_all = lambda *xs: [vary(y, layout.axes) for y in body(*xs)]
            everywhere = [True] * len(self._extended.out_avals)
            return shard_map_over_devices(
                layout, vary_all, args, partitioned_in, everywhere, False
            )

        outs = _compat.lower_function(ctx, run, operands, True)
        stacks = iter(zip(outs[self._count :], self._stack_avals, strict=True))
        return outs[: self._count], [
            (*next(stacks), True) if i is None else (*operands[i], not shared[i])
            for i in self._inputs
        ]

    def lower_sums(
        self, ctx: LoweringRuleContext, stacks: Sequence[Stack], a_map: LoweredMap
    ) -> dict[int, Operand]:
        """Lower the devices' sums: see `LoweredMap.sums`."""
        layout, sums = self._layout, self._sums
        count, partitioned_in = layout.per_device, [p for _, _, p in stacks]

        def run(*args: Array) -> list[Array]:
            def body(*own: Array) -> list[Array]:
                values = [
                    x if p else jnp.broadcast_to(x, (count, *x.shape))
                    for x, p in zip(own, partitioned_in, strict=True)
                ]
                totals = sums.of_stacks(count, values)
                return [vary(y, layout.axes)[None] for y in totals]

            each_device = [None] * len(sums.indices)
            return shard_map_over_devices(
                layout, body, args, partitioned_in, each_device, False
            )

        operands = [(value, aval) for value, aval, _ in stacks]
        outs = _compat.lower_function(ctx, run, operands, True)
        of_devices = make_layout(**a_map.device_placement)
        avals = [
            partitioned_aval(_compat.ShapedArray(x.shape[1:], x.dtype), of_devices)
            for x in (self._out_avals[i] for i in sums.indices)
        ]
        return dict(zip(sums.indices, zip(outs, avals, strict=True), strict=True))


def _contraction(layout: Layout, jaxpr: ClosedJaxpr) -> _Contraction | None:
    """Return the `_Contraction` of a map, if it has one that saves memory."""
    simple = not layout.manual and not _compat.check_vma() and not layout.uneven
    explicit = layout.spec_entry is not None or layout.other_explicit_axes
    if not simple or explicit or layout.per_device == 1:
        return None
    if layout.partly_manual or lowers_by_vmap(layout, jaxpr):
        return None
    prepared = prepare_for_shard_map(layout, jaxpr)
    sums = group_sums(prepared)
    return _Contraction(layout, prepared, sums) if sums.indices else None


class _MapWithSums(LoweredMap):
    """A lowered map, with what its sums are lowered from.

    An operand that is `shared`, the source of a broadcast, is `[*s]`, others `[n, *s]`.
    `stacks` are the operands of the sums of the `contraction` that has lowered the map.
    """

    def __init__(
        self,
        placement: Placement,
        operands: Sequence[Operand],
        shared: Flags,
        jaxpr: ClosedJaxpr,
        partial: dict[int, tuple[InnerReduction, Operand]],
        contraction: _Contraction | None,
        stacks: Sequence[Stack],
    ) -> None:
        self._contraction, self._stacks = contraction, stacks
        self.placement, self._operands, self.partial = placement, operands, partial
        self._shared, self._jaxpr = shared, jaxpr
        p, self._layout = placement["partition"], make_layout(**placement)
        devices = Partition(p.name, self._layout.devices, p.mesh_axes)
        self.device_placement = {**placement, "partition": devices}
        self._sums: list[tuple[Any, dict[int, Operand]]] = []  # by block of code

    def sums(self, ctx: LoweringRuleContext) -> dict[int, Operand]:
        """Return the devices' sums, lowered once in each MLIR block."""
        # A use in another block needs sums of its own: see `lowered_equations.py`.
        block = _compat.current_block()
        for known, sums in self._sums:
            if known == block:
                return sums
        sums = self._lower_sums(ctx)
        self._sums.append((block, sums))
        return sums

    def _lower_sums(self, ctx: LoweringRuleContext) -> dict[int, Operand]:
        """Lower what `sums` returns into the current MLIR block."""
        layout = self._layout
        if self._contraction is not None:
            return self._contraction.lower_sums(ctx, self._stacks, self)
        # Padding would have to be masked in the operands of each contraction; a single
        # group has no sum; and by vmap, no code is of one device.
        if (
            layout.uneven
            or layout.per_device == 1
            or lowers_by_vmap(layout, self._jaxpr)
        ):
            return {}
        sums = group_sums(prepare_for_shard_map(layout, self._jaxpr))
        if not sums.indices:
            return {}
        # Only live operands: an unused broadcast would stay alive otherwise.
        used = [i for i, u in enumerate(sums.used) if u]
        partitioned_in = [not self._shared[i] for i in used]

        def run(*args: Array) -> list[Array]:
            def body(*operands: Array) -> list[Array]:
                run = lambda fn: over_groups(layout, fn, partitioned_in)
                totals = sums(layout.per_device, run, operands)
                return [vary(y, layout.axes)[None] for y in totals]

            # None: one slice a device, `[m, *s]`, to be reduced over the devices.
            each_device = [None] * len(sums.indices)
            vma = _compat.check_vma()
            return shard_map_over_devices(
                layout, body, args, partitioned_in, each_device, vma
            )

        operands = [self._operands[i] for i in used]
        outs = _compat.lower_function(ctx, run, operands, True)
        avals = [
            partitioned_aval(
                self._jaxpr.out_avals[i], make_layout(**self.device_placement)
            )
            for i in sums.indices
        ]
        operands = zip(outs, avals, strict=True)
        return dict(zip(sums.indices, operands, strict=True))


# ---------------------------------------------------------------------------------
# All registrations

registration.register_execution(map_fn_p, execute_map, _lower_map)
map_fn_p.def_effectful_abstract_eval(_abstract_eval)
ad.primitive_jvps[map_fn_p] = _jvp
ad.primitive_transposes[map_fn_p] = _transpose
_compat.register_linearization(map_fn_p, _linearize)
_compat.register_partial_eval(map_fn_p, _partial_eval)
_compat.register_remat_policy(map_fn_p, "jaxpr", _residual_aval)
_compat.register_dce(map_fn_p, eliminate_dead_code)
batching.fancy_primitive_batchers[map_fn_p] = _batch
