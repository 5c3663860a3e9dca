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

On a mesh, one of two lowerings computes the results for all groups, sharded over the
partition's axes, from the jaxpr of one group, traced under the mesh in context:

* A `shard_map` over the partition's axes, and a vmap over the groups of each device. A
  device then works on its own groups only: its loops end when its groups are done, and
  work that the compiler cannot partition (LAPACK, callbacks) stays on it. Where each
  device has one group, there is no vmap, so that kernels without a batching rule work,
  and a `cond` stays a branch. The jaxpr is retyped for the inside of the `shard_map`,
  so that a `jax.shard_map(mesh=mesh)` of the model's own means the mesh without these
  axes.
* `vmap(spmd_axis_name=axes)` over all groups. The compiler partitions the work, with
  each group constrained to its device. Loops go on until all groups are done.

Only `lowers_by_vmap` chooses between them. The first is the default. The second is for
cases in which the first is impossible:

* XLA's partitioner aborts the process for a gather or scatter in a table sharded over
  two other mesh axes, where the partition's axes are Manual
  (`spmd_partitioner_util.cc`: 6 of 10 placements, forward and gradient, on CPU and TPU;
  the same written with `jax.shard_map` alone). Every embedding of a model with FSDP and
  tensor parallelism is such a table. So: two other Auto axes larger than one, and a
  gather or scatter anywhere in the jaxpr.
* Inside a user's `shard_map(check_vma=True)` over another axis, types that vary over
  the partition's axes, too, would not fit the loops that were traced without. Nor may
  vmap name the axes there: JAX takes them for axes of that `shard_map`.

The lowering rule merges a map with the broadcasts before it and the sums after it
(`lowered_equations.py`).

Invariants: the jaxpr is closed and has no constants; symbolic zeros (of tangents and
cotangents) are neither operands nor results of a derived map. Both lowerings give each
group the same index and the same random bits, and no work communicates over the
partition's axes, but for the `while_loop` below.

Sharp edges: a per-group jaxpr is bound to the mesh around it, so every rule that traces
or evaluates it enters `group_context` first; a jaxpr that was retyped is not
differentiated any more. The `shard_map` of a map inherits the surrounding `check_vma`
(off at top level), as users' scans and nested shard_maps would otherwise need casts,
and AD never transposes through it. `vmap` costs an all-reduce per step of a
`while_loop` whose condition differs from group to group.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias, Unpack

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
    DeviceArray,
    Eqn,
    Flags,
    GlobalArray,
    Mesh,
    Params,
    PartitionedArray,
)
from drjax._context import enter_mapped, traits_of
from drjax._partition import Partition
from drjax._primitives import registration
from drjax._primitives.collectives import broadcast_p
from drjax._primitives.contract_groups import GroupSums, group_sums
from drjax._primitives.lowered_equations import (
    InnerReduction,
    LoweredMap,
    MlirValue,
    Operand,
    PlacedResult,
    lowered_equations,
)
from drjax._primitives.ordered_callbacks import rewrite_ordered_callbacks
from drjax._primitives.partial_reduction import with_partial_reductions
from drjax._primitives.partition_index import GroupAxis, with_index_of_device
from drjax._primitives.rbg_per_group import rewrite_draws
from drjax._primitives.registration import AxisData, Residuals, Tangent
from drjax._primitives.segments import placements, scatters, with_segments
from drjax._sharding.avals import group_aval, partitioned_aval, slices_aval
from drjax._sharding.execute import (
    auto_partition,
    computed_in_parts,
    first_group_indices,
    shard_map_over_devices,
    vary,
    with_sharding_of,
)
from drjax._sharding.layout import (
    Layout,
    Placement,
    axes_of_groups,
    make_layout,
    other_axes,
)
from drjax._sharding.padding import (
    copy_slice_to_padding,
    for_real_groups,
    tree_zeros_like,
    unless_empty,
)

map_fn_p = registration.new_block("map_fn", multiple_results=True)


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


class MapParams(Placement):
    """The parameters of a map but its jaxpr."""

    name: str


def _outer_avals(jaxpr: ClosedJaxpr, params: MapParams) -> list[Aval]:
    """List the types of a map's results, `[n, *t]`, from its per-group jaxpr."""
    layout = make_layout(params["partition"], params["mesh"])
    return [partitioned_aval(aval, layout) for aval in jaxpr.out_avals]


def _bind(
    jaxpr: ClosedJaxpr, args: Sequence, **params: Unpack[MapParams]
) -> list[PartitionedArray]:
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
    **params: Unpack[MapParams],
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
    **params: Unpack[MapParams],
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
    **params: Unpack[MapParams],
) -> list[Tangent | None]:
    linear = tuple(ad.is_undefined_primal(x) for x in args)
    nonzero = tuple(type(ct) is not _compat.Zero for ct in cts)
    # What is not linear is a residual of L, or known in a partial evaluation.
    residuals = [x for x, lin in zip(args, linear, strict=True) if not lin]
    dense = [ct for ct, nz in zip(cts, nonzero, strict=True) if nz]
    avals = tuple(_compat.typeof(x) for x in (*residuals, *dense))
    layout = make_layout(params["partition"], params["mesh"])
    transposed, consts, nonzero_in = _transpose_jaxpr(
        jaxpr, linear, nonzero, avals, layout, traits_of(params["name"]).leaves_out
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
    jaxpr: ClosedJaxpr,
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
        transposed = _with_zeros_for_zeros(transposed, len(avals) - sum(nonzero))
    own: list[Aval] = [
        a for a, lin in zip(jaxpr.in_avals, linear, strict=True) if not lin
    ]
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
def _with_zeros_for_zeros(
    transposed: Callable[..., list[Array]], n_residuals: int
) -> Callable[..., list[Array]]:
    """Let a transposed function return zeros for the zeros of a group that diverged."""

    def fn(*values: Array) -> list[Array]:
        inexact = [jnp.issubdtype(x.dtype, jnp.inexact) for x in values]
        cts = values[n_residuals:]
        if not cts or not any(inexact[:n_residuals]):
            return transposed(*values)  # nothing to multiply zeros by
        tested = [x for x, f in zip(values, inexact, strict=True) if f]
        guarded = iter(zero_for_zeros(cts, tested, tested, False))
        pairs = zip(values, inexact, strict=True)
        outs = transposed(*(next(guarded) if f else x for x, f in pairs))
        outs = zero_for_zeros(cts, outs, outs, True)
        # Again of what enters. Where there are no derivatives of it, the compiler drops
        # these tests.
        return zero_for_zeros(cts, tested, outs, False)

    return fn


def _zero_for_zeros(
    cts: Sequence[Array], tested: Sequence[Array], ys: Sequence[Array], zeros: bool
) -> list[Array]:
    """Let values be constant if cotangents are zeros, and not all of `tested` finite.

    Then they are zeros, or if not `zeros`, what they are.
    """
    varying = lambda x: _compat.varying(_compat.typeof(x))
    idle = [(varying(ct), jnp.all(ct == 0)) for ct in cts]
    finite = [(varying(x), jnp.all(jnp.isfinite(x))) for x in tested]

    def constant_if_dead(y: Array) -> Array:
        tests = [[t for v, t in ts if v <= varying(y)] for ts in (idle, finite)]
        if not all(tests):
            return y
        is_idle, is_finite = (functools.reduce(jnp.logical_and, ts) for ts in tests)
        constant = jnp.zeros_like(y) if zeros else lax.stop_gradient(y)
        return jnp.where(is_idle & ~is_finite, constant, y)

    return [*map(constant_if_dead, ys)]


# An equation, which the planner knows by its name: see `_planner/compared.py`.
zero_for_zeros = jax.jit(_zero_for_zeros, static_argnums=3)
ZERO_FOR_ZEROS = _zero_for_zeros.__name__


# ---------------------------------------------------------------------------------
# Partial evaluation, dead-code elimination, batching


def _partial_eval(
    trace: _compat.JaxprTrace, *tracers: JaxprTracer, **params: Any
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
    **params: Unpack[MapParams],
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
# The work of the groups on a mesh: by `shard_map`, or by `vmap`

_INDEXING = (
    "gather", "scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min",
    "scatter-max",
)  # fmt: skip


def lowers_by_vmap(layout: Layout, jaxpr: ClosedJaxpr | None) -> bool:
    """Decide whether a map is lowered by a `vmap` that the compiler partitions.

    The default is a `shard_map` over the partition's axes, in which each device runs
    its own groups. The `vmap` is for the two cases in which that is impossible: the map
    is in a user's `shard_map(check_vma=True)` over other mesh axes; or its jaxpr has a
    `lax.gather` or `lax.scatter` (array indexing), at any depth, and the mesh has two
    or more Auto axes larger than one that are not the partition's, for which XLA would
    abort the process. If the layout is not sharded, neither is needed, and the groups
    run on the current device. A stage from a plan file, whose jaxpr is None, is never
    lowered by a `vmap`.
    """
    if not layout.sharded or jaxpr is None:
        return False
    return _compat.check_vma() or (
        len(other_axes(layout)) > 1 and _compat.has_primitive(jaxpr, _INDEXING)
    )


def run_groups(
    layout: Layout, jaxpr: ClosedJaxpr, args: Sequence[Array], partitioned_in: Flags
) -> list[PartitionedArray]:
    """Run a per-group jaxpr for all groups of a partition, to results `[n, *t]`.

    It is a `vmap` over the groups of each device, if it has several, in a `shard_map`
    over the devices; or, where `lowers_by_vmap` says so, one `vmap` over all groups. An
    operand is `[n, *s]`, or `[*s]` if it is not `partitioned_in`.
    """
    if lowers_by_vmap(layout, jaxpr):
        fn = _compat.jaxpr_as_checked_fun(prepare_group_jaxpr(layout, jaxpr, True))
        mapped = _vmap_groups(
            layout, fn, partitioned_in, layout.num_slots, _spmd_axes(layout)
        )
        run = lambda *args: ([], mapped(*args))
        return auto_partition(layout, run, args, partitioned_in)[1]
    prepared = prepare_for_shard_map(layout, jaxpr)
    fn = _compat.jaxpr_as_checked_fun(prepared)
    if layout.other_explicit_axes:
        fn = _on_traced_meshes(fn, prepared.in_avals)

    def body(*operands: Array) -> list[DeviceArray]:
        outs = over_groups(layout, fn, partitioned_in)(*operands)
        return [vary(y, layout.axes) for y in outs]

    if layout.uneven:
        effects = bool(_compat.effects_of(jaxpr))
        body = functools.partial(_run_padded, layout, fn, partitioned_in, effects)
    # The surrounding check_vma: users' loops inside were traced under it.
    everywhere = [True] * len(jaxpr.out_avals)
    return shard_map_over_devices(
        layout,
        body,
        args,
        partitioned_in,
        everywhere,
        _compat.check_vma(),
        with_first_index=layout.uneven,
    )


def _on_traced_meshes(
    fn: Callable[..., Sequence[Array]], avals: Sequence[Any]
) -> Callable[..., list[Array]]:
    """Cast what a function takes to the meshes of its types, and its results back.

    Where JAX itself makes Explicit axes Auto, as `jax.random.gamma` does, residuals are
    on that mesh. A literal that JAX saves as a residual is on no mesh, and fits any.
    """

    def cast(x: Array, mesh: jax.sharding.AbstractMesh) -> Array:
        sharding = _compat.typeof(x).sharding
        if mesh.empty or sharding.mesh == mesh:
            return x
        with jax.sharding.use_abstract_mesh(mesh):
            return jax.sharding.reshard(x, sharding.update(mesh=mesh))

    def run(*xs: Array) -> list[Array]:
        around = jax.sharding.get_abstract_mesh()
        meshes = [aval.sharding.mesh for aval in avals]
        outs = fn(*map(cast, xs, meshes))
        return [cast(y, around) for y in outs]

    return run


def _run_padded(
    layout: Layout,
    fn: Callable[..., Sequence[Array]],
    partitioned_in: Flags,
    effects: bool,
    *args: Array,
) -> list[DeviceArray]:
    """Run a per-group function on a device's slots, of which some may be padding.

    A slot is a place for one group on a device. Without effects, padded slots of a
    device that has groups run copies of its first group, and a device without groups
    skips the work. With effects, exactly the groups run. Slices of results in padded
    slots have no meaning.

    The operands are those of the device, `[k, *s]` if `partitioned_in`, else `[*s]`;
    and last the group index of its first slot, int32 `[1]`.
    """
    *operands, first = args
    first = first[0]
    indices = first + lax.iota(jnp.int32, layout.per_device)
    # An effect on a padded slot would be visible: exactly the groups may run.
    if effects:
        run = lambda count: _groups_of_device(layout, fn, partitioned_in, count)
        return for_real_groups(
            layout,
            indices,
            layout.partial_count,
            run,
            operands,
            partitioned_in,
        )

    # Copies of a real group on padded slots: loops there end, and checks hold.
    def work() -> list[DeviceArray]:
        own = [
            copy_slice_to_padding(layout, indices, x, x[:1]) if p else x
            for x, p in zip(operands, partitioned_in, strict=True)
        ]
        return [
            vary(y, layout.axes) for y in over_groups(layout, fn, partitioned_in)(*own)
        ]

    def nothing() -> list[DeviceArray]:
        return [vary(y, layout.axes) for y in tree_zeros_like(jax.eval_shape(work))]

    return unless_empty(layout, first, work, nothing)


def prepare_for_shard_map(layout: Layout, jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """Rewrite a per-group jaxpr for a `shard_map` over the partition's axes.

    The types are put on the mesh with the partition's axes Manual. But if then all axes
    of the mesh are Manual, and the jaxpr has no `shard_map` or sharding constraint, the
    types get no mesh at all, as some libraries refuse other types at lowering than at
    tracing. Without a mesh, and inside a user's `shard_map` over the axes, the types
    stay. In each case, draws from random keys of `rbg` or `unsafe_rbg` become equations
    of `draw_per_key`, so that the bits of a group do not depend on the other groups in
    a batch; and ordered callbacks become equations that are called in order. If each
    device has one group, which no vmap will give its index, the index is computed from
    the position of the device.

    The result is for lowering only: it may have no derivatives.
    """
    if layout.sharded and (layout.partly_manual or _compat.is_bound_to_devices(jaxpr)):
        jaxpr = retype_mesh.with_manual_axes(jaxpr, layout.axes)
    elif layout.sharded:
        jaxpr = retype_mesh.without_mesh_types(jaxpr)
    jaxpr = rewrite_ordered_callbacks(rewrite_draws(jaxpr))
    return with_index_of_device(jaxpr, layout) if layout.per_device == 1 else jaxpr


def prepare_group_jaxpr(
    layout: Layout, jaxpr: ClosedJaxpr, by_vmap: bool
) -> ClosedJaxpr:
    """Rewrite a per-group jaxpr for the lowering that will run it.

    For a `shard_map`, `prepare_for_shard_map` puts its types on the mesh with the
    partition's axes Manual, and makes draws from `rbg` keys independent of the other
    groups in a batch. For a `vmap`, which `by_vmap` (the result of `lowers_by_vmap`)
    chooses, each `shard_map` in the jaxpr, which the user's mapped function has called,
    is made to map over the partition's axes, too; but the jaxpr stays as it is if these
    axes are Explicit, or if the map is in a user's `shard_map(check_vma=True)`.
    """
    if not by_vmap:
        return prepare_for_shard_map(layout, jaxpr)
    axes = _spmd_axes(layout)
    return jaxpr if axes is None else retype_mesh.with_whole_shard_maps(jaxpr, axes)


def vmap_over_devices(
    layout: Layout,
    fn: Callable[..., tuple[list[Array], list[DeviceArray]]],
    args: Sequence[Array],
    partitioned_in: Flags,
) -> tuple[list[Array], list[PartitionedArray]]:
    """Run a function of one device's slices for all devices, by a vmap over devices.

    The results are those of a `shard_map` of the function. A slot is a place for one
    group on a device; the last slots may be padding, which holds the slice of group 0.
    The layout is sharded, over Auto axes.

    `fn(*operands, first)` takes the operands of a device, `[k, *s]`, or `[*s]` if not
    `partitioned_in`, and the group index of its first slot, int32 `[]`. It returns a
    pair of lists: values of the device, `[*s]`, and results with a slice for each slot,
    `[k, *s]`. The pair here has stacks of the m devices' values, `[m, *s]`, and the
    partitioned results, `[n, *s]`, without padding.
    """
    m, k = layout.devices, layout.per_device

    def run(*args) -> tuple[list[Array], list[Array]]:
        split = lambda x: x.reshape(m, k, *x.shape[1:])
        args = [split(x) if p else x for x, p in zip(args, partitioned_in, strict=True)]
        args.append(first_group_indices(layout))
        # Traced first: the vmaps in `fn` must not see the axes of the surrounding vmap.
        split_in = (*partitioned_in, True)
        avals = [
            _aval_of_slice(x) if p else x for x, p in zip(args, split_in, strict=True)
        ]
        jaxpr, (own, stacks) = jax.make_jaxpr(fn, return_shape=True)(*avals)
        one = _compat.jaxpr_as_checked_fun(jaxpr)
        axes = tuple(0 if p else None for p in split_in)
        mapped = jax.vmap(one, axes, axis_size=m, spmd_axis_name=_spmd_axes(layout))
        outs = mapped(*args)
        own, stacks = outs[: len(own)], outs[len(own) :]
        return own, [x.reshape(m * k, *x.shape[2:]) for x in stacks]

    return auto_partition(layout, run, args, partitioned_in)


def _aval_of_slice(x: Array) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of one slice of the array `x` along its axis 0."""
    return jax.ShapeDtypeStruct(x.shape[1:], x.dtype)


def _spmd_axes(layout: Layout) -> tuple[str, ...] | None:
    """Return the `spmd_axis_name` for a vmap over all groups of a partition.

    It has the partition's mesh axes; () if the program runs locally. None if JAX takes
    no names: on Explicit axes, or inside a user's `shard_map(check_vma=True)`.
    """
    # In a user's shard_map(check_vma=True), JAX takes named axes for axes of that one.
    return None if _compat.check_vma() else layout.spmd_axes


def over_groups(
    layout: Layout, fn: Callable[..., Sequence[Array]], partitioned_in: Flags
) -> Callable[..., Sequence[DeviceArray]]:
    """Turn a function of one group into one of all groups of a device.

    The function of a device takes `[k, *s]` for operands that are `partitioned_in`,
    with a slice for each slot (a place for one group), and `[*s]` for those that the
    groups share. It returns `[k, *t]`. With VMA checking, it casts the operands to vary
    over the partition's mesh axes.
    """
    mapped = _groups_of_device(layout, fn, partitioned_in, layout.per_device)
    # In a user's shard_map over the partition's axes the types of one group, by which
    # `fn` was traced, do not vary over them: see `group_aval`.
    axes = () if layout.manual else layout.axes
    return lambda *operands: mapped(*(vary(x, axes) for x in operands))


def _groups_of_device(
    layout: Layout,
    fn: Callable[..., Sequence[Array]],
    partitioned_in: Flags,
    count: int,
) -> Callable[..., Sequence[DeviceArray]]:
    """Turn a function of one group into one of the first `count` groups of a device."""
    if layout.per_device > 1:
        return _vmap_groups(layout, fn, partitioned_in, count, None)

    def only(*operands: Array) -> list[DeviceArray]:
        pairs = zip(operands, partitioned_in, strict=True)
        own = [lax.squeeze(x, (0,)) if p else x for x, p in pairs]
        varying = frozenset().union(*(_compat.varying(_compat.typeof(x)) for x in own))
        # In a user's shard_map over the partition's axes the types of one group, by
        # which `fn` was traced, do not vary over them: see `group_aval`.
        with _compat.without_vma() if layout.manual else contextlib.nullcontext():
            outs = fn(*own)
        return [vary(lax.expand_dims(y, (0,)), varying) for y in outs]

    return only


def _vmap_groups(
    layout: Layout,
    fn: Callable[..., Sequence[Array]],
    partitioned_in: Flags,
    size: int,
    spmd_axes: tuple[str, ...] | None,
) -> Callable[..., Sequence[Array]]:
    """Turn a function of one group into one of `size` groups, by a vmap.

    The axis name of the vmap is a `GroupAxis`. By it, the batching rule of
    `partition_index` knows that the vmap is over groups, and gives each its index.
    `size` counts the groups of all devices, of one device, or fewer; operands and
    results are as in `over_groups`, for `size` in place of k.
    """
    return jax.vmap(
        lambda *xs: fn(*xs),
        in_axes=tuple(0 if p else None for p in partitioned_in),
        axis_name=GroupAxis(layout.partition, layout.mesh),
        axis_size=size,
        spmd_axis_name=spmd_axes,
    )


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
    placement: Placement = {"partition": params["partition"], "mesh": params["mesh"]}
    lowered = lowered_equations(ctx)
    operands, shared = list(zip(args, ctx.avals_in, strict=True)), []
    for i, arg in enumerate(args):
        # A broadcast over another partition or mesh has other copies: no match.
        of_broadcast, source = lowered.broadcasts.get(arg, (None, None))
        shared.append(of_broadcast == placement)
        if source is not None and shared[i]:
            operands[i] = source
    layout = make_layout(**placement)
    if traits_of(params["name"]).shards:
        in_parts = functools.partial(computed_in_parts, layout=layout)
        for i, is_shared in enumerate(shared):
            if is_shared and _compat.is_computed_from_results(operands[i][0]):
                (value,) = _compat.lower_function(ctx, in_parts, [operands[i]], False)
                operands[i] = value, operands[i][1]
    operands = [(x, slices_aval(aval, layout)) for x, aval in operands]
    run = functools.partial(execute_map, shared=tuple(shared))
    jaxpr, inner = params["jaxpr"], {}
    gathers = _compat.GATHERS_EXPLICIT_RESULTS and layout.other_explicit_axes
    if layout.sharded and not gathers:
        extended, inner = with_partial_reductions(jaxpr)
        params = {**params, "jaxpr": extended}
    placed = placements(jaxpr) if layout.per_device > 1 and scatters(layout) else {}
    first = len(params["jaxpr"].out_avals)
    if placed:
        params = {**params, "jaxpr": with_segments(params["jaxpr"])}
    contraction = None if inner or placed else _contraction(layout, jaxpr)
    stacks = []
    if contraction is None:
        outs = _compat.lower_function(ctx, run, operands, True, **params)
    else:
        outs, stacks = contraction.lower(ctx, operands, shared)
    partial = {
        i: (each, (outs[each.position], _partitioned_out(params, each.position)))
        for i, each in inner.items()
    }
    of_groups = (
        (outs[i], _partitioned_out(params, i)) for i in range(first, len(outs))
    )
    in_segments = {
        i: PlacedResult(next(of_groups), next(of_groups), each.num, each.fill)
        for i, each in placed.items()
    }
    outs = outs[: len(jaxpr.out_avals)]
    a_map = _MapWithSums(
        placement,
        operands,
        tuple(shared),
        jaxpr,
        partial,
        in_segments,
        contraction,
        stacks,
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
    if not simple or layout.explicit or layout.per_device == 1:
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
        placed: dict[int, PlacedResult],
        contraction: _Contraction | None,
        stacks: Sequence[Stack],
    ) -> None:
        self._contraction, self._stacks = contraction, stacks
        self.placement, self._operands, self.partial = placement, operands, partial
        self._shared, self._jaxpr, self.placed = shared, jaxpr, placed
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
