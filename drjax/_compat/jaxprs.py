"""Tracing, and transformations of jaxprs and equations.

Input: a function, a jaxpr or an equation. Output: a new jaxpr or equation, of the class
that the installed version has. Invariant: the input is unchanged. A closed jaxpr is
open to `open_jaxpr`, and has constants if `jaxpr_consts` says so.
"""

from collections.abc import Callable, Sequence
from typing import Any

from jax._src import api_util, core, source_info_util
from jax._src import linear_util as lu
from jax._src.interpreters import ad, batching
from jax._src.interpreters import partial_eval as pe

from drjax._compat.jax_types import (
    MERGED,
    Jaxpr,
    ShapedArray,
    flattree,
    jaxpr_as_fun,
    weakref_lru_cache,
)


def trace_to_jaxpr(fn: Callable, avals: Sequence[Any], name: str):
    """Trace a function of arrays to a closed jaxpr that has no constants.

    Args:
      fn: Takes and returns flat sequences of arrays.
      avals: The types of its arguments.
      name: Its name, for debug information.

    Returns:
      `(jaxpr, consts)`: `consts` holds the arrays and tracers that `fn` closed over,
      in the order of the first inputs of the jaxpr.
    """
    # Without the names of the arguments: finding them costs as much as a small trace.
    source = api_util.fun_sourceinfo(fn)
    debug_info = core.DebugInfo(name, source, None, core.initial_result_paths)
    fun = lu.wrap_init(fn, debug_info=debug_info)
    jaxpr, _, consts = pe.trace_to_jaxpr_dynamic(fun, avals)
    if not MERGED:
        jaxpr = Jaxpr(pe.convert_constvars_jaxpr(jaxpr), ())
    return jaxpr, consts


def open_jaxpr(jaxpr):
    """The open jaxpr in a closed one, with `.invars`, `.outvars` and `.eqns`.

    An open jaxpr is returned as it is, and so is any jaxpr from JAX 0.11 on.
    """
    return getattr(jaxpr, "jaxpr", jaxpr)


def jaxpr_consts(jaxpr) -> Sequence[Any]:
    """The constants of a closed jaxpr, arrays; () if it has none, or if it is open."""
    return getattr(jaxpr, "consts", ())


@weakref_lru_cache
def without_consts(jaxpr):
    """Make the constants of a closed jaxpr its first inputs.

    Returns `(jaxpr, tuple of constants)`; the same jaxpr and () if it has none.
    """
    consts = jaxpr_consts(jaxpr)
    if not consts:
        return jaxpr, ()
    lifted = pe.convert_constvars_jaxpr(open_jaxpr(jaxpr))
    return closed(lifted), tuple(consts)


def dce_jaxpr(jaxpr, used_outputs: Sequence[bool]):
    """Eliminate dead code, with the inputs that only dead code uses; cached.

    Args:
      jaxpr: A closed jaxpr without constants.
      used_outputs: For each result whether to keep it.

    Returns:
      `(smaller jaxpr, for each input whether the smaller jaxpr takes it)`.
    """
    new, used = pe.dce_jaxpr(jaxpr.jaxpr, list(used_outputs))
    return (new if MERGED else pe.close_jaxpr(new)), used


def without_dead_code(jaxpr):
    """Eliminate dead code of a closed jaxpr, and keep all of its inputs and results."""
    new, _ = pe.dce_jaxpr(jaxpr.jaxpr, [True] * len(jaxpr.out_avals), instantiate=True)
    return new if MERGED else Jaxpr(new, jaxpr.consts)


def backward_pass(jaxpr, args, cts):
    """Compute the cotangents of the inputs in which a jaxpr is linear.

    Args:
      jaxpr: A closed jaxpr.
      args: Its inputs: values, or `UndefinedPrimal` for the linear ones.
      cts: The cotangents of its results, arrays or symbolic zeros (`Zero`).

    Returns:
      A cotangent for each input, an array or a `Zero`; only those of the linear inputs
      have a meaning.
    """
    return ad.backward_pass(jaxpr.jaxpr, False, jaxpr.consts, args, cts)


def jvp_jaxpr(jaxpr, nonzeros: Sequence[bool]):
    """Derive the jaxpr that computes the results of a jaxpr and their tangents.

    Args:
      jaxpr: A closed jaxpr.
      nonzeros: For each input whether its tangent is not a symbolic zero.

    Returns:
      `(jaxpr, for each result whether its tangent is not a symbolic zero)`. The jaxpr
      takes the primals and the nonzero tangents; it returns the results and their
      nonzero tangents.
    """
    return ad.jvp_jaxpr(jaxpr, list(nonzeros), False)


def linearize_jaxpr(jaxpr, nonzeros: Sequence[bool], is_vjp: bool):
    """Split a jaxpr into a part that computes and a part that is linear.

    Args:
      jaxpr: A closed jaxpr.
      nonzeros: For each input whether its tangent is not a symbolic zero.
      is_vjp: Whether the linear part will be transposed.

    Returns:
      `(primal jaxpr, number of flat residuals that it returns, which output tangents
      are nonzero, for each flat residual of the tangent jaxpr the position of the input
      that it is or None, tangent jaxpr)`. The primal jaxpr returns its results, the
      flat residuals that are not inputs, and (from 0.11 on) the structured residuals.
      The tangent jaxpr takes all flat residuals, the nonzero tangents, and the
      structured residuals.
    """
    split: Any = ad.linearize_jaxpr(jaxpr, tuple(nonzeros), is_vjp=is_vjp)
    primal, out, nzs_out, forwarded, tangent = split
    n_flat = len(out.unpack()[1]) if MERGED else out
    return primal, n_flat, nzs_out, forwarded, tangent


def batch_jaxpr(jaxpr, axis_data, in_axes):
    """Batch a jaxpr, as `vmap` does.

    Args:
      jaxpr: A closed jaxpr.
      axis_data: What JAX's batching rules get of the vmap: its size and name.
      in_axes: The batch dimension of each input, or None.

    Returns:
      `(batched jaxpr, the batch dimension of each result, or None if it has none)`.
    """
    return batching.batch_jaxpr2(jaxpr, axis_data, tuple(in_axes))


def effects_of(jaxpr) -> frozenset:
    """The effects of a jaxpr that a caller can observe.

    They leave out those on mutable arrays that the jaxpr itself creates.
    """
    return frozenset(jaxpr.effects) - {core.internal_mutable_array_effect}


def new_eqn(eqn, invars, outvars, params, effects):
    """Copy an equation with other operands, result variables, parameters and effects.

    Its primitive and its source line stay.
    """
    return eqn.replace(invars=invars, outvars=outvars, params=params, effects=effects)


def partial_eval_jaxpr(jaxpr, unknown_in: Sequence[bool]):
    """Split a jaxpr into what is computed from known inputs, and the rest.

    The known jaxpr returns the known results, and then the residuals. The unknown jaxpr
    takes the residuals, and then the unknown inputs.

    Args:
      jaxpr: A closed jaxpr.
      unknown_in: For each input whether it is unknown.

    Returns:
      `(known jaxpr, unknown jaxpr, for each result whether it is unknown, types of the
      residuals)`.
    """
    return pe.partial_eval_jaxpr_nounits(jaxpr, list(unknown_in), instantiate=False)


def jaxprs_in(params) -> list:
    """The jaxprs among an equation's parameters, `eqn.params`; [] if there is none."""
    return list(core.jaxprs_in_params(params))


@weakref_lru_cache
def is_bound_to_devices(jaxpr) -> bool:
    """Whether a jaxpr has a `shard_map` or a sharding constraint, at any depth."""
    return holds(jaxpr, ("sharding_constraint", "shard_map"))


def holds(jaxpr, names: tuple[str, ...]) -> bool:
    """Whether a jaxpr has an equation of a primitive with one of these names.

    Inner jaxprs, at any depth, count.
    """
    return any(
        eqn.primitive.name in names
        or any(holds(inner, names) for inner in jaxprs_in(eqn.params))
        for eqn in open_jaxpr(jaxpr).eqns
    )


def bind_equation(eqn, operands, **params) -> list:
    """Bind the primitive of an equation to `operands`; returns the list of results.

    `params` replace parameters of the equation. The source line is the equation's.
    """
    bind_params = eqn.primitive.get_bind_params({**eqn.params, **params})
    with source_info_util.user_context(eqn.source_info.traceback):
        outs = eqn.primitive.bind(*operands, **bind_params)
    return list(outs) if eqn.primitive.multiple_results else [outs]


def select_outputs(jaxpr, outvars: list):
    """Make a function that computes only some variables of a jaxpr.

    Args:
      jaxpr: A closed jaxpr.
      outvars: The variables, results of any of its equations or inputs.

    Returns:
      `(function, for each input of the jaxpr whether the function takes it)`; the
      function returns a list with the values of these variables.
    """
    raw = open_jaxpr(jaxpr)
    debug_info = raw.debug_info.with_unknown_names()
    changed = raw.replace(outvars=outvars, debug_info=debug_info)
    changed = changed if MERGED else pe.close_jaxpr(changed)
    live, used = dce_jaxpr(changed, [True] * len(outvars))
    return jaxpr_as_fun(live), used


def new_var(aval):
    """A new variable of the type `aval`, for a jaxpr."""
    return core.Var(aval)


def stacked_aval(aval, length: int):
    """The type of a stack of `length` values of the type `aval`, along a new axis 0."""
    return ShapedArray((length, *aval.shape), aval.dtype, aval.weak_type)


def user_frames(eqn):
    """The frames of users' code in the traceback of an equation, innermost first."""
    return source_info_util.user_frames(eqn.source_info.traceback)


def closed(jaxpr):
    """An open jaxpr without constants as a closed one; a closed jaxpr as it is."""
    return jaxpr if isinstance(jaxpr, Jaxpr) else Jaxpr(jaxpr, ())


def scan_sizes(eqn) -> tuple[int, int]:
    """`(number of constants, number of carried values)` of the operands of a scan."""
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = eqn.params["ft_in"].unpack()
    return len(consts), len(carry)


def scan_size_params(eqn, n_consts: int, n_carry: int, n_xs: int) -> dict[str, Any]:
    """The parameters that say how many operands a scan has of each sort.

    JAX's versions have different ones. The caller replaces them in a changed scan.

    Args:
      eqn: The equation of the scan.
      n_consts: The number of operands that are constants.
      n_carry: The number of carried values.
      n_xs: The number of operands over whose slices the scan runs.
    """
    if "num_consts" in eqn.params:
        return {"num_consts": n_consts, "num_carry": n_carry}
    sizes = n_consts, n_carry, n_xs
    return {"ft_in": flattree.pack(tuple(map(flattree.nones, sizes)))}


def with_equations(jaxpr, eqns: list):
    """Copy a jaxpr with `eqns` instead of its equations; open or closed, as it is."""
    raw = open_jaxpr(jaxpr)
    changed = raw.replace(eqns=eqns, debug_info=raw.debug_info)
    if MERGED:
        return changed.with_consts(consts) if (consts := jaxpr.consts) else changed
    return changed if jaxpr is raw else Jaxpr(changed, jaxpr.consts)
