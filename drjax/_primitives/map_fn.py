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

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad, batching

from drjax import _compat
from drjax._compat import retype_mesh
from drjax._context import enter_mapped, leaves_groups_out
from drjax._primitives import fused_lowering, registration
from drjax._primitives.collectives import broadcast_p
from drjax._primitives.map_lowering import run_groups
from drjax._primitives.partition_index import GroupAxis
from drjax._sharding.avals import group_aval, partitioned_aval
from drjax._sharding.execute import with_sharding_of
from drjax._sharding.layout import Layout, axes_of_groups, make_layout

map_fn_p = registration.new_primitive("map_fn", multiple_results=True)


@contextlib.contextmanager
def group_context(layout: Layout):
    """Context manager in which the code of one group is traced or transformed.

    In it, building blocks know that they are inside a map over this partition, types
    are on the mesh of the layout, and the derivative of a `shard_map` inside the
    group's code does not sum over the partition's mesh axes. The context manager yields
    None.

    Args:
      layout: The layout of the partition: how its groups lie on the devices of a mesh.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(enter_mapped(layout.partition))
        if layout.sharded:
            stack.enter_context(jax.sharding.use_abstract_mesh(layout.abstract_mesh))
        stack.enter_context(retype_mesh.spmd_axes(axes_of_groups(layout)))
        yield


def trace_group(fn, avals, layout: Layout, name: str):
    """Trace a function of one group to a jaxpr.

    Args:
      fn: Takes and returns flat sequences of per-group arrays, `[*s]`.
      avals: Types of the partitioned operands, `[n, *s]`; `fn` sees those of one group.
      layout: The layout of the partition.
      name: The name of the function, for debug information.

    Returns:
      `(jaxpr, consts)`: a closed jaxpr without constants, and the list of the arrays
      and tracers that `fn` closes over. The jaxpr takes `consts` as its first inputs.
    """
    with group_context(layout):
        avals = [group_aval(aval, layout) for aval in avals]
        return _compat.trace_to_jaxpr(fn, avals, name)


def map_slices(fn, *args, partition, mesh):
    """Bind `map_fn` for a function of arrays with one result, for use in rules.

    Args:
      fn: The function of one group, from arrays `[*s]` to one array `[*t]`. It closes
        over no arrays. Its trace is cached by the function object, so it must be
        defined in a module, not made at each call.
      *args: Partitioned values, `[n, *s]`, the operands of the map.
      partition: The `Partition`, of n groups.
      mesh: The mesh, or None: the program runs locally.

    Returns:
      The result, partitioned, `[n, *t]`.
    """
    avals = tuple(_compat.typeof(x) for x in args)
    jaxpr = _trace_slices(fn, avals, make_layout(partition, mesh))
    (out,) = map_fn_p.bind(
        *args, jaxpr=jaxpr, partition=partition, mesh=mesh, name=_name(fn)
    )
    return out


@_compat.cache()
def _trace_slices(fn, avals, layout):
    """Trace a function of one group to a jaxpr; cached by function, types and layout.

    Args:
      fn: From arrays `[*s]` to one array `[*t]`. It closes over no arrays, and is
        defined in a module: a lambda made in a rule would never hit the cache.
      avals: The types of the partitioned operands, `[n, *s]`, a tuple.
      layout: The layout of the partition.

    Returns:
      The closed jaxpr of one group, with one result.
    """
    jaxpr, _ = trace_group(lambda *xs: [fn(*xs)], avals, layout, _name(fn))
    return jaxpr


def _name(fn) -> str:
    """The name of a function for printed equations, without underscores at its ends.

    For a callable without `__name__` it is the name of its class.
    """
    return getattr(fn, "__name__", type(fn).__name__).strip("_")


# ---------------------------------------------------------------------------------
# Types and execution


def _abstract_eval(*avals, jaxpr, partition, mesh, name):
    """Abstract evaluation rule of `map_fn`: compute the types of its results.

    Args:
      *avals: The types of the operands, `[n, *s]`, ignored: the jaxpr has those of one
        group.
      jaxpr: The closed jaxpr of one group.
      partition: The `Partition`, of n groups.
      mesh: The mesh, or None.
      name: The name of the mapped function, ignored.

    Returns:
      `(types, effects)`: the list of the types of the results, `[n, *t]`, and the set
      of effects of the jaxpr, which the equation has, too.
    """
    layout = make_layout(partition, mesh)
    outs = [partitioned_aval(aval, layout) for aval in jaxpr.out_avals]
    return outs, _compat.effects_of(jaxpr)


def execute_map(*args, jaxpr, partition, mesh, name, shared=None):
    """Execution function of `map_fn`: apply a per-group jaxpr to each group's slices.

    Args:
      *args: The operands, `[n, *s]`.
      jaxpr: The closed jaxpr of one group.
      partition: The `Partition`, of n groups.
      mesh: The mesh, or None: the program runs locally.
      name: The name of the mapped function, ignored.
      shared: For each operand whether it is global, `[*s]`, the same for each group;
        None: no operand is.

    Returns:
      The list of results, `[n, *t]`.
    """
    partitioned_in = [True] * len(args) if shared is None else [not s for s in shared]
    return run_groups(make_layout(partition, mesh), jaxpr, args, partitioned_in)


# ---------------------------------------------------------------------------------
# Derivatives


def _outer_avals(jaxpr, params):
    """Compute the types of the results of a map, `[n, *t]`, from its per-group jaxpr.

    Args:
      jaxpr: The closed jaxpr of one group.
      params: A mapping with the parameters `partition` and `mesh` of the equation.

    Returns:
      The list of types.
    """
    layout = make_layout(params["partition"], params["mesh"])
    return [partitioned_aval(aval, layout) for aval in jaxpr.out_avals]


def _bind(jaxpr, args, **params):
    """Bind `map_fn` for the jaxpr of a derivative, which may have constants.

    Users' derivative rules close over arrays, which are constants of the jaxpr. They
    are broadcast to all groups, and become the first operands of the map.

    Args:
      jaxpr: The closed jaxpr of one group, perhaps with constants.
      args: Its operands, partitioned, `[n, *s]`, a sequence.
      **params: The parameters `partition`, `mesh` and `name` of the equation.

    Returns:
      The list of results, `[n, *t]`.
    """
    jaxpr, consts = _compat.without_consts(jaxpr)
    return map_fn_p.bind(
        *broadcast_consts(consts, **params), *args, jaxpr=jaxpr, **params
    )


def broadcast_consts(consts, *, partition, mesh, name):
    """Broadcast the global values that a function of one group closed over.

    They become operands of a map, as its jaxpr has no constants.

    Args:
      consts: The values, arrays or tracers `[*s]`.
      partition: The `Partition`, of n groups.
      mesh: The mesh, or None: the program runs locally.
      name: The name of the map, ignored: callers pass the map's parameters.

    Returns:
      The list of broadcast values, `[n, *s]`.
    """
    return [broadcast_p.bind(c, partition=partition, mesh=mesh) for c in consts]


# (y_i, dy_i) = (f(x_i), Df(x_i) dx_i): one map, so that what y_i and dy_i share is
# computed once. Symbolic zeros stay outside.
def _jvp(primals, tangents, *, jaxpr, **params):
    """JVP rule of `map_fn`: one map computes the results and their tangents.

    Args:
      primals: The operands, `[n, *s]`.
      tangents: For each operand its tangent, `[n, *s]`, or a symbolic zero.
      jaxpr: The closed jaxpr of one group.
      **params: The parameters `partition`, `mesh` and `name` of the equation.

    Returns:
      `(results, tangents)`, two lists: the results, `[n, *t]`, and for each its
      tangent, `[n, *t]`, or a symbolic zero.
    """
    nonzeros = [type(t) is not _compat.Zero for t in tangents]
    with group_context(make_layout(params["partition"], params["mesh"])):
        jvp_jaxpr, nonzeros_out = _compat.jvp_jaxpr(jaxpr, nonzeros)
    dense = [t for t, nz in zip(tangents, nonzeros, strict=True) if nz]
    outs = _bind(jvp_jaxpr, [*primals, *dense], **params)
    n = len(jaxpr.out_avals)
    avals = _outer_avals(jaxpr, params)
    return outs[:n], registration.fill_zeros(avals, nonzeros_out, outs[n:])


# f_lin computes y_i and the residuals r_i; L(r_i, .) = Df(x_i) is linear.
def _linearize(is_vjp, nonzeros, *primals, jaxpr, **params):
    """Linearization rule of `map_fn`: one map for the results, and a linear one.

    The first map is bound now; it also returns residuals, the values of the forward
    computation that the linear map reads. The second map is bound when `linear` is
    called.

    Args:
      is_vjp: Whether the linear map will be transposed.
      nonzeros: For each operand whether its tangent is not a symbolic zero.
      *primals: The operands, `[n, *s]`.
      jaxpr: The closed jaxpr of one group.
      **params: The parameters `partition`, `mesh` and `name` of the equation.

    Returns:
      `(results, nonzeros_out, residuals, linear)`: the results, `[n, *t]`; for each
      whether its tangent is not a symbolic zero; the residuals, partitioned, in a pair
      of lists (JAX's flat and structured ones); and `linear(residuals, *tangents)`,
      which takes these residuals and the tangents of all operands, and returns the list
      of the results' tangents. A tangent is an array or a symbolic zero.
    """
    with group_context(make_layout(params["partition"], params["mesh"])):
        split = _compat.linearize_jaxpr(jaxpr, nonzeros, is_vjp)
    bind = functools.partial(_bind, **params)
    outs, nonzeros_out, residuals, tangent = registration.linearize_saving_residuals(
        bind, jaxpr, primals, split
    )
    avals = _outer_avals(jaxpr, params)

    def linear(residuals, *tangents):
        dense = registration.instantiate_nonzeros(tangents, nonzeros)
        outs = bind(tangent, registration.linear_operands(residuals, dense))
        return registration.fill_zeros(avals, nonzeros_out, outs)

    return outs, nonzeros_out, residuals, linear


# sum_i <L_i dx_i, ct_i> = sum_i <dx_i, L_i^T ct_i>: each group has its own transpose.
def _transpose(cts, *args, jaxpr, **params):
    """Transpose rule of `map_fn`: one map computes the cotangents of linear operands.

    Each group's cotangents depend on that group's values only, so there is no
    communication. Values that the transposed function closes over are broadcast.

    Args:
      cts: For each result its cotangent, `[n, *t]`, or a symbolic zero.
      *args: The operands: an `UndefinedPrimal` for those in which the map is linear,
        else values `[n, *s]`.
      jaxpr: The closed jaxpr of one group.
      **params: The parameters `partition`, `mesh` and `name` of the equation.

    Returns:
      A list with an element for each operand: for a linear one its cotangent, `[n, *s]`
      or a symbolic zero; for any other one None.
    """
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
def _transpose_jaxpr(jaxpr, linear, nonzero, avals, layout, leaves_out: bool):
    """Transpose a per-group jaxpr in its linear inputs; cached.

    Args:
      jaxpr: The closed jaxpr of one group.
      linear: For each input whether the jaxpr is linear in it, a tuple of bools; the
        other inputs are residuals, which the transposed jaxpr takes, too.
      nonzero: For each result whether its cotangent is not a symbolic zero, a tuple of
        bools.
      avals: The types of the residuals and then of the nonzero cotangents of results,
        partitioned, `[n, *s]`, a tuple.
      layout: The layout of the partition.
      leaves_out: Whether the program leaves groups out of reductions.

    Returns:
      `(transposed, consts, nonzero_in)`: the transposed jaxpr of one group, closed; the
      tuple of values `[*s]` that it closes over; and for each linear input whether its
      cotangent is not a symbolic zero, a tuple of bools. The transposed jaxpr takes
      `consts`, the residuals and the nonzero cotangents of results; it returns the
      nonzero cotangents of linear inputs.
    """
    transposed, nonzero_in = registration.backward_function(jaxpr, linear, nonzero)
    if leaves_out:
        transposed = _zero_for_zeros(transposed, len(avals) - sum(nonzero))
    own = [a for a, lin in zip(jaxpr.in_avals, linear, strict=True) if not lin]
    own += [a for a, nz in zip(jaxpr.out_avals, nonzero, strict=True) if nz]
    with group_context(layout):
        # Where JAX itself makes Explicit axes Auto, as jax.random.gamma does, residuals
        # and cotangents are on that mesh.
        avals = [
            aval if aval.sharding.mesh == of_jaxpr.sharding.mesh else of_jaxpr
            for x, of_jaxpr in zip(avals, own, strict=True)
            for aval in [group_aval(x, layout)]
        ]
        transposed_jaxpr, consts = _compat.trace_to_jaxpr(
            transposed, avals, "transposed"
        )
    return transposed_jaxpr, tuple(consts), tuple(nonzero_in)


# A group that a reduction leaves out has zero cotangents. If its work diverged, L_i has
# infinities or NaNs, and 0 * NaN is NaN, which the sums over groups would spread. As
# L_i^T is linear, L_i^T 0 = 0: so if all cotangents of a group are zero, and what is
# computed with them is not finite, the group's cotangents are zeros. Only then, as for
# a group that does take part zero may be a value like others, at which the function of
# the cotangent has a derivative. Of such a group all is constant: what enters, too, so
# that derivatives of the transpose stop there.
def _zero_for_zeros(transposed, n_residuals: int):
    """Let a transposed function return zeros for the zeros of a group that diverged."""

    def fn(*values):
        inexact = [jnp.issubdtype(x.dtype, jnp.inexact) for x in values]
        if len(values) == n_residuals or not any(inexact[:n_residuals]):
            return transposed(*values)  # nothing to multiply zeros by
        varying = lambda x: _compat.varying(_compat.typeof(x))
        finite = lambda xs: [(varying(x), jnp.all(jnp.isfinite(x))) for x in xs]
        idle = [(varying(ct), jnp.all(ct == 0)) for ct in values[n_residuals:]]
        used = finite(x for x, f in zip(values, inexact, strict=True) if f)

        def where_dead(y, of_dead):
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


def _partial_eval(trace, *tracers, **params):
    """Partial evaluation rule of `map_fn`: split the map into a known and an unknown.

    The per-group jaxpr is split into what known operands determine and the rest. The
    map of the first part is bound; it also returns residuals, `[n, *s]`, the values
    that the second part needs. The map of the second part becomes an equation of the
    trace. If no operand is known, and no result can be computed without them, the map
    is not split: all of it becomes one equation of the trace.

    Args:
      trace: JAX's `JaxprTrace`.
      *tracers: The operands, `[n, *s]`: tracers of this trace, known or unknown.
      **params: The parameters `jaxpr`, `partition`, `mesh` and `name` of the equation.

    Returns:
      The list of results, `[n, *t]`: known values, or tracers of this trace.
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


def _residual_aval(params, aval):
    """Return the type `[n, *s]` of a residual of a map, from that of one group, `[*s]`.

    A residual is a value of the mapped function that the backward pass needs. JAX calls
    this function for those that a policy of `jax.checkpoint` saves.

    Args:
      params: The parameters of the map's equation, a dict; `partition` and `mesh` are
        read.
      aval: The type of the residual in one group.
    """
    return partitioned_aval(aval, make_layout(params["partition"], params["mesh"]))


def _dce(used_outputs, eqn):
    """Dead-code elimination rule of `map_fn`, also for dead code of its jaxpr.

    Args:
      used_outputs: For each result of the equation whether it is used.
      eqn: The equation of `map_fn`, which is not changed.

    Returns:
      `(used_inputs, new_eqn)`: for each operand of `eqn` whether the new equation takes
      it; and the new equation, with the used operands and results only. `new_eqn` is
      None if no result is used, and the equation has no effects.
    """
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


def _batch(axis_data, args, dims, *, jaxpr, **params):
    """Batching rule of `map_fn`: batch the per-group jaxpr, with the group axis first.

    Args:
      axis_data: JAX's `AxisData` of the vmap: its size and name.
      args: The operands; a batched one is `[n, *s]` with a batch dimension inserted
        anywhere, also before n.
      dims: For each operand its batch dimension, or None.
      jaxpr: The closed jaxpr of one group.
      **params: The parameters `partition`, `mesh` and `name` of the equation.

    Returns:
      `(results, dims)`: the list of results, and for each its batch dimension, which is
      at least 1, as axis 0 is the group axis; or None.
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
_compat.register_dce(map_fn_p, _dce)
batching.fancy_primitive_batchers[map_fn_p] = _batch
