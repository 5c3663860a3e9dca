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
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad, batching
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
from drjax._primitives import fused_lowering, registration
from drjax._primitives.collectives import broadcast_p
from drjax._primitives.map_lowering import run_groups
from drjax._primitives.partition_index import GroupAxis
from drjax._primitives.registration import AxisData, Residuals, Tangent
from drjax._sharding.avals import group_aval, partitioned_aval
from drjax._sharding.execute import with_sharding_of
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


registration.register_execution(
    map_fn_p, execute_map, fused_lowering.map_rule(execute_map)
)
map_fn_p.def_effectful_abstract_eval(_abstract_eval)
ad.primitive_jvps[map_fn_p] = _jvp
ad.primitive_transposes[map_fn_p] = _transpose
_compat.register_linearization(map_fn_p, _linearize)
_compat.register_partial_eval(map_fn_p, _partial_eval)
_compat.register_remat_policy(map_fn_p, "jaxpr", _residual_aval)
_compat.register_dce(map_fn_p, eliminate_dead_code)
batching.fancy_primitive_batchers[map_fn_p] = _batch
