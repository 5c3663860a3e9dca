"""The primitives that fold states in the order of the groups, and all of their rules.

`f` is an associative function of two states, whose neutral state is e. A state is a
list of arrays; group i has the state x_i. What f closes over, c below, are operands.

    reduce_fold(c, e, x) = e . x_1 . ... . x_n                    a . b = f(c, a, b)
    fold_around(c, e, x) = that, and for each group i
                           p_i = e . x_1 . ... . x_{i-1}          the fold before i
                           s_i = x_{i+1} . ... . x_n . e          the fold after i

In the fold, x_i stands between p_i and s_i, whichever way it is computed. So, with the
derivative of f with respect to its second and first state, and to c,

    y  = (p_i . x_i) . s_i                                        for each i
    dy = sum_i D[(p_i . x_i) . s_i] (dx_i, dc), with p_i, s_i and the c of the outer f
         fixed, and de in p_1

which is a map over the groups, linear in the tangents, and a `reduce_sum`: forward mode
costs one all-reduce of a state, and reverse mode no communication but for the cotangent
of c. This holds as f is associative for all c near the given one.

    JVP        fold_around, which takes the place of reduce_fold, a map, and sums
    transpose  that of the map and the sums
    batching   f is batched; x_i is batched behind the group axis

The tangents of p_i and s_i, for second derivatives, are those of a function of all
groups' states, which `map_columns` applies on each device: an all-to-all of n states.

Invariants: the jaxpr has neither constants nor effects, and was traced for one group.
Sharp edges: f is not checked to be associative, nor e to be neutral. The prefixes and
suffixes are residuals, two states for each group.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.interpreters import ad, batching

from drjax import _compat
from drjax._primitives import registration
from drjax._primitives.collectives import (
    broadcast_p,
    gather_p,
    reduce_sum_p,
    scatter_p,
)
from drjax._primitives.columns_lowering import GROUPS, by_gather_and_scatter
from drjax._primitives.fold_lowering import (
    execute_fold,
    fold_of_all,
    kinds_of_fold,
)
from drjax._primitives.map_columns import tangents_of_columns, trace_column
from drjax._primitives.map_fn import (
    broadcast_consts,
    group_context,
    map_fn_p,
    map_slices,
    trace_group,
)
from drjax._primitives.partition_index import partition_index_p
from drjax._sharding.avals import global_aval
from drjax._sharding.layout import Layout, make_layout

reduce_fold_p = registration.new_primitive("reduce_fold", multiple_results=True)
fold_around_p = registration.new_primitive("fold_around", multiple_results=True)


def execute_reduce_fold(*args, **params):
    """Execution function of `reduce_fold`: fold the states of all groups, in order.

    f is an associative function of two states, and a state is a list of arrays. The
    fold is f(... f(f(e, x_1), x_2) ..., x_n), with the neutral state e.

    Args:
      *args: The arrays that f closes over, `[*t]`; then the leaves of the neutral
        state, `[*s]`; then those of the groups' states, partitioned, `[n, *s]`.
      **params: The parameters of the equation: `jaxpr`, the closed jaxpr of f, from
        what it closes over and the leaves of two states to those of one; `n_states`,
        the number of leaves of a state; `partition`; `mesh`; `name` and `commutative`,
        which are ignored.

    Returns:
      The list of the leaves of the fold, global, `[*s]`.
    """
    return execute_fold(*args, prefixes_and_suffixes=False, **params)


def execute_fold_around(*args, **params):
    """Execution function of `fold_around`: the fold of all groups, and around each.

    f is an associative function of two states, and a state is a list of arrays. The
    fold before a group is that of the neutral state and of all groups before it,
    without its own state; the fold after it is that of all groups after it, without its
    own state.

    Args:
      *args: The arrays that f closes over, `[*t]`; then the leaves of the neutral
        state, `[*s]`; then those of the groups' states, partitioned, `[n, *s]`.
      **params: The parameters of the equation: `jaxpr`, the closed jaxpr of f, from
        what it closes over and the leaves of two states to those of one; `n_states`,
        the number of leaves of a state; `partition`; `mesh`; `name` and `commutative`,
        which are ignored.

    Returns:
      One list: the leaves of the fold of all groups, global, `[*s]`; those of the folds
      before each group, partitioned, `[n, *s]`; and those of the folds after each
      group, partitioned, `[n, *s]`.
    """
    return execute_fold(*args, prefixes_and_suffixes=True, **params)


def _split(values: Sequence, n_states: int):
    """Split the operands of a fold into its three sorts.

    Args:
      values: The operands, or a sequence with one value for each operand.
      n_states: The number of leaves of a state.

    Returns:
      `(consts, init, states)`: the values for what f closes over, for the leaves of the
      neutral state, and for the leaves of the groups' states.
    """
    n = len(values) - 2 * n_states
    return values[:n], values[n : n + n_states], values[n + n_states :]


# ---------------------------------------------------------------------------------
# Types


def _abstract_eval(*avals, n_states, partition, mesh, **_):
    layout = make_layout(partition, mesh)
    states = avals[len(avals) - n_states :]
    return [global_aval(aval, layout).update(weak_type=False) for aval in states]


def _around_abstract_eval(*avals, n_states, partition, mesh, **_):
    totals = _abstract_eval(*avals, n_states=n_states, partition=partition, mesh=mesh)
    states = [x.update(weak_type=False) for x in avals[len(avals) - n_states :]]
    return [*totals, *states, *states]


# ---------------------------------------------------------------------------------
# Derivatives


def _jvp(primals, tangents, **params):
    """JVP rule of `reduce_fold`: `fold_around`, a map, and sums over the groups.

    `fold_around` gives the fold, and for each group the folds before and after it. With
    these, a map computes what each group's tangents add to the tangent of the fold, and
    a `reduce_sum` adds that up.

    Args:
      primals: The operands: what f closes over, the neutral state's leaves, `[*s]`, and
        the groups' states' leaves, `[n, *s]`.
      tangents: For each operand its tangent, or a symbolic zero.
      **params: The parameters `jaxpr`, `n_states`, `partition`, `mesh`, `name`, and
        perhaps `commutative` of the equation.

    Returns:
      `(leaves of the fold, their tangents)`, two lists of global arrays; a tangent may
      be a symbolic zero.
    """
    outs = fold_around_p.bind(*primals, **params)
    return outs[: params["n_states"]], _total_tangents(primals, tangents, outs, params)


def _around_jvp(primals, tangents, **params):
    """JVP rule of `fold_around`, for second derivatives of a fold.

    The tangent of the fold of all groups is a sum over the groups, as for
    `reduce_fold`. The tangents of the folds before and after each group are those of a
    function of all groups' states, which `map_columns` applies.

    Args:
      primals: The operands: what f closes over, the neutral state's leaves, `[*s]`, and
        the groups' states' leaves, `[n, *s]`.
      tangents: For each operand its tangent, or a symbolic zero.
      **params: The parameters `jaxpr`, `n_states`, `partition`, `mesh`, `name`, and
        perhaps `commutative` of the equation.

    Returns:
      `(results, tangents)`, two lists: of the leaves of the fold, `[*s]`, of the folds
      before each group, `[n, *s]`, and of the folds after it. A tangent may be a
      symbolic zero.
    """
    outs = fold_around_p.bind(*primals, **params)
    totals = _total_tangents(primals, tangents, outs, params)
    return outs, [*totals, *_around_tangents(primals, tangents, outs, params)]


def _total_tangents(primals, tangents, outs, params) -> list:
    """Compute the tangents of the fold of all groups: a map, and a sum over the groups.

    For the state x of a group, p the fold before it and s the fold after it, the fold
    of all groups is (p . x) . s. The map computes the derivative of that with respect
    to x, to what f closes over, and in the first group to the neutral state.

    Args:
      primals: The operands of `fold_around`: what f closes over, the neutral state's
        leaves, `[*s]`, and the groups' states' leaves, `[n, *s]`.
      tangents: For each operand its tangent, or a symbolic zero.
      outs: The results of `fold_around`: leaves of the fold, of the folds before each
        group, and of the folds after it.
      params: The parameters of the equation, a dict.

    Returns:
      The list of the tangents of the leaves of the fold of all groups: global arrays
      `[*s]`, or symbolic zeros.
    """
    n_states, jaxpr = params["n_states"], params["jaxpr"]
    placement = {"partition": params["partition"], "mesh": params["mesh"]}
    map_params = {**placement, "name": params["name"]}
    layout = make_layout(**placement)
    consts, _, x = _split(primals, n_states)
    dconsts, dinit, dx = _split(tangents, n_states)
    totals, before, after = (outs[i * n_states : (i + 1) * n_states] for i in range(3))
    copies = broadcast_consts(consts, **map_params)
    # Twice: only the inner f of (p . x) . s has a tangent for what f closes over.
    operands = [*copies, *copies, *before, *x, *after]
    dcopies = [_broadcast_tangent(t, placement) for t in dconsts]
    dbefore = [_in_first_group(t, placement) for t in dinit]
    none = lambda xs: [_compat.Zero(_compat.typeof(x).to_tangent_aval()) for x in xs]
    operand_tangents = [*dcopies, *none(copies), *dbefore, *dx, *none(after)]
    nonzeros = [type(t) is not _compat.Zero for t in operand_tangents]
    dense = [t for t, nz in zip(operand_tangents, nonzeros, strict=True) if nz]
    avals = tuple(map(_compat.typeof, operands))
    group_jaxpr = _trace_product_of_three(jaxpr, avals, len(consts), layout)
    with group_context(layout):
        jvp_jaxpr, nonzeros_out = _compat.jvp_jaxpr(group_jaxpr, nonzeros)
    jvp_jaxpr, closed = _compat.without_consts(jvp_jaxpr)
    used_out = [False] * n_states + [True] * sum(nonzeros_out)
    jvp_jaxpr, used = _compat.dce_jaxpr(jvp_jaxpr, used_out)
    closed = broadcast_consts(closed, **map_params)
    pairs = zip([*closed, *operands, *dense], used, strict=True)
    live = [y for y, is_used in pairs if is_used]
    parts = map_fn_p.bind(*live, jaxpr=jvp_jaxpr, **map_params)
    sums = [reduce_sum_p.bind(t, **placement) for t in parts]
    return registration.fill_zeros(map(_compat.typeof, totals), nonzeros_out, sums)


def _broadcast_tangent(t, placement):
    """Broadcast the tangent of a global operand, on which all groups' tangents depend.

    Args:
      t: The tangent, `[*s]`; a symbolic zero is returned as it is.
      placement: A dict with the parameters `partition` and `mesh`.

    Returns:
      The tangent, partitioned, `[n, *s]`, or the symbolic zero.
    """
    if type(t) is _compat.Zero:
        return t
    return broadcast_p.bind(t, **placement)


def _in_first_group(t, placement):
    """Give group 0 the tangent of the neutral state, and all other groups zeros.

    The neutral state occurs once in the fold, before group 0.

    Args:
      t: The tangent, `[*s]`; a symbolic zero is returned as it is.
      placement: A dict with the parameters `partition` and `mesh`.

    Returns:
      The tangent, partitioned, `[n, *s]`, or the symbolic zero.
    """
    if type(t) is _compat.Zero:
        return t
    index = partition_index_p.bind(per_group=False, **placement)
    copies = broadcast_p.bind(t, **placement)
    return map_slices(_unless_first_zero, index, copies, **placement)


def _unless_first_zero(index, t):
    """Return the tangent `t`, `[*s]`, in group 0, and zeros in all other groups.

    It is the mapped function of `_in_first_group`; `index` is the group index, int32
    `[]`.
    """
    return jnp.where(index == 0, t, jnp.zeros((), t.dtype))


@_compat.weakref_lru_cache
def _trace_product_of_three(jaxpr, avals, n_consts: int, layout: Layout):
    """Trace f(f(p, x), s), the fold as a function of one group's state x; cached.

    p is the fold before the group, and s that after it. The derivative of the fold is
    the sum over groups of the derivatives of this function.

    Args:
      jaxpr: The closed jaxpr of f: from `n_consts` values that f closes over, and the
        leaves of two states, to the leaves of one.
      avals: The types of the partitioned operands, a tuple: what f closes over, first
        for the inner f and once more for the outer one; then the leaves of p, x and s.
      n_consts: The number of values that f closes over.
      layout: The layout of the partition.

    Returns:
      The closed jaxpr of one group, from slices of these operands to the leaves of a
      state.
    """
    fn = _compat.jaxpr_as_fun(jaxpr)

    def between(*args):
        inner, outer = args[:n_consts], args[n_consts : 2 * n_consts]
        states = args[2 * n_consts :]
        n = len(states) // 3
        return fn(*outer, *fn(*inner, *states[: 2 * n]), *states[2 * n :])

    return trace_group(between, avals, layout, "between")[0]


def _around_tangents(primals, tangents, outs, params) -> list:
    """Compute the tangents of the folds before each group, and after it.

    Args:
      primals: The operands of `fold_around`: what f closes over, the neutral state's
        leaves, `[*s]`, and the groups' states' leaves, `[n, *s]`.
      tangents: For each operand its tangent, or a symbolic zero.
      outs: The results of `fold_around`: leaves of the fold, of the folds before each
        group, and of the folds after it.
      params: The parameters of the equation, a dict.

    Returns:
      The list of tangents of the leaves before each group, and then of those after it:
      partitioned, arrays `[n, *s]` or symbolic zeros.
    """
    n_states, partition = params["n_states"], params["partition"]
    layout = make_layout(partition, params["mesh"])
    kinds_in, _ = kinds_of_fold(len(primals), n_states, True)
    avals = tuple(map(_compat.typeof, primals))
    jaxpr = _around_column(
        params["jaxpr"], avals, kinds_in, n_states, layout, params["name"]
    )
    return tangents_of_columns(
        primals,
        tangents,
        [_compat.typeof(y) for y in outs[n_states:]],
        jaxpr=jaxpr,
        kinds_in=kinds_in,
        kinds_out=(GROUPS,) * (2 * n_states),
        coordinates=(),
        partition=partition,
        mesh=params["mesh"],
        name=params["name"],
    )


@_compat.weakref_lru_cache
def _around_column(jaxpr, avals, kinds, n_states: int, layout: Layout, name: str):
    """Trace the folds around all groups as a function of all groups' states; cached.

    `map_columns` applies its derivative, for second derivatives of a fold.

    Args:
      jaxpr: The closed jaxpr of f.
      avals: The types of the operands of `fold_around`, a tuple: what f closes over,
        and the leaves of the neutral state and of the groups' states, `[n, *s]`.
      kinds: For each operand "groups" if it has a slice for each group, else "whole".
      n_states: The number of leaves of a state.
      layout: The layout of the partition.
      name: The name of f.

    Returns:
      The closed jaxpr, from the operands, for all n groups, to the leaves of the folds
      before each group, `[n, *s]`, and then of those after it.
    """
    run = fold_of_all(layout.partition, jaxpr, n_states, True)
    fn = lambda *xs: run(*xs)[n_states:]
    return trace_column(fn, avals, kinds, (), layout, name)[0]


# ---------------------------------------------------------------------------------
# In plans, the folds around groups are work of the server, from all groups' states. It
# is one equation, so that the XLA backend finds it and leaves states on their devices.

fold_of_all_p = registration.new_primitive("fold_of_all", multiple_results=True)


def execute_fold_of_all(*args, jaxpr, n_states, partition, name, commutative=False):
    """Execution function of `fold_of_all`: `fold_around` of states in one process.

    Args:
      *args: The operands, all of them global: the arrays that f closes over, the leaves
        of the neutral state, `[*s]`, and those of the groups' states, `[n, *s]`.
      jaxpr: The closed jaxpr of f, the function of two states.
      n_states: The number of leaves of a state.
      partition: The `Partition`, of n groups.
      name: The name of f, ignored.
      commutative: Whether the groups may be combined in any order, ignored.

    Returns:
      One list of global arrays: the leaves of the fold of all groups, `[*s]`; those of
      the folds before each group, `[n, *s]`; and those of the folds after each group,
      `[n, *s]`.
    """
    return fold_of_all(partition, jaxpr, n_states, True)(*args)


def folds_by_gather(eqn):
    """Make the jaxpr that computes a `fold_around` equation on the server of a plan.

    The jaxpr gathers the states of all groups, folds them by one `fold_of_all`
    equation, and scatters the folds before and after each group.

    Args:
      eqn: The equation of `fold_around`, which is not changed.

    Returns:
      The closed jaxpr, from the operands of the equation to its results.
    """
    params = {k: v for k, v in eqn.params.items() if k != "mesh"}
    where = {"partition": eqn.params["partition"], "mesh": eqn.params["mesh"]}
    kinds = kinds_of_fold(len(eqn.invars), params["n_states"], True)
    run = lambda *xs: fold_of_all_p.bind(*xs, **params)
    whole = lambda *xs: by_gather_and_scatter(
        run, xs, kinds, gather_p.bind, scatter_p.bind, where
    )
    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
    return jax.make_jaxpr(whole)(*avals)


def _of_all_abstract_eval(*avals, n_states, **_):
    states = [x.update(weak_type=False) for x in avals[len(avals) - n_states :]]
    return [*(x.update(shape=x.shape[1:]) for x in states), *states, *states]


# Derivatives and batches of a compiled plan are those of the function.
def _of_all_jvp(primals, tangents, **params):
    tangents = map(ad.instantiate_zeros, tangents)
    run = lambda *xs: execute_fold_of_all(*xs, **params)
    return jax.jvp(run, primals, tuple(tangents))


def _of_all_batching(args, dims, **params):
    outs = jax.vmap(lambda *xs: execute_fold_of_all(*xs, **params), dims)(*args)
    return outs, [0] * len(outs)


registration.register_execution(fold_of_all_p, execute_fold_of_all)
fold_of_all_p.def_abstract_eval(_of_all_abstract_eval)
ad.primitive_jvps[fold_of_all_p] = _of_all_jvp
batching.primitive_batchers[fold_of_all_p] = _of_all_batching


# ---------------------------------------------------------------------------------
# Batching


def _batching_rule(primitive):
    """Make the batching rule of `reduce_fold_p` or `fold_around_p`.

    The rule batches f, and binds the primitive for the batched f. A result of f is a
    state again, so if any operand is batched, all leaves of all states have to be:
    leaves without a batch dimension are repeated along a new one. An array that f
    closes over stays without one. The leaves of the neutral state and of the fold of
    all groups have their batch dimension at 0; leaves with a group axis have it at 1,
    behind that axis.

    Args:
      primitive: `reduce_fold_p` or `fold_around_p`.

    Returns:
      `rule(axis_data, args, dims, **params)`, as `batching.fancy_primitive_batchers`
      takes it. It returns the list of results and the list of their batch dimensions.
    """

    def rule(axis_data, args, dims, *, jaxpr, n_states, **params):
        # JAX asks such a rule also if nothing is batched; f may still use the axis.
        if all(dim is None for dim in dims) and not jaxpr.effects:
            outs = primitive.bind(*args, jaxpr=jaxpr, n_states=n_states, **params)
            return outs, [None] * len(outs)
        consts, init, x = _split(list(zip(args, dims, strict=True)), n_states)
        operands = [
            *(c if d is None else _compat.moveaxis(c, d, 0) for c, d in consts),
            *(_batched(y, d, 0, axis_data) for y, d in init),
            *(_batched(y, d, 1, axis_data) for y, d in x),
        ]
        batched = [*(d is not None for _, d in consts), *[True] * (2 * n_states)]
        layout = make_layout(params["partition"], params["mesh"])
        with group_context(layout):
            jaxpr = _compat.batch_jaxpr_first(jaxpr, axis_data, batched)
        outs = primitive.bind(*operands, jaxpr=jaxpr, n_states=n_states, **params)
        return outs, [0] * n_states + [1] * (len(outs) - n_states)

    return rule


def _batched(x, dim, position: int, axis_data):
    """Move the batch dimension of an operand to the position that the batched f needs.

    Args:
      x: The array.
      dim: Its batch dimension; None: it has none, and is repeated along a new one.
      position: The position of the batch dimension in the result.
      axis_data: JAX's `AxisData` of the vmap, with its size.

    Returns:
      The array, with the batch dimension at `position`.
    """
    if dim is None:
        return _compat.add_batch_dimension(x, axis_data, position)
    return _compat.moveaxis(x, dim, position)


for _primitive, _execute, _rule, _types in (
    (reduce_fold_p, execute_reduce_fold, _jvp, _abstract_eval),
    (fold_around_p, execute_fold_around, _around_jvp, _around_abstract_eval),
):
    registration.register_execution(_primitive, _execute)
    _primitive.def_abstract_eval(_types)
    ad.primitive_jvps[_primitive] = _rule
    batching.fancy_primitive_batchers[_primitive] = _batching_rule(_primitive)
