"""Tracing, and transformations of jaxprs and equations.

Input: a function, a jaxpr or an equation. Output: a new jaxpr or equation, of the class
that the installed version has. Invariant: the input is unchanged. A closed jaxpr is
open to `open_jaxpr`, and has constants if `jaxpr_consts` says so.
"""

import dataclasses
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from jax._src import api_util, core, effects, source_info_util
from jax._src import linear_util as lu
from jax._src.interpreters import ad, batching
from jax._src.interpreters import partial_eval as pe

from drjax._compat.jax_types import (
    MERGED,
    Jaxpr,
    ShapedArray,
    flattree,
    weakref_lru_cache,
)


def trace_to_jaxpr(fn: Callable, avals: Sequence[Any], name: str):
    """Trace a function of arrays to a closed jaxpr that has no constants.

    Args:
      fn: Takes arrays as positional arguments, and returns a flat sequence of arrays.
      avals: The types of its arguments.
      name: Its name, for debug information.

    Returns:
      `(jaxpr, consts)`: the closed jaxpr, and the list of the arrays and tracers that
      `fn` closes over. The jaxpr takes `consts` first, and then the arguments of `fn`.
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
    """Return the open jaxpr in a closed one, with `.invars`, `.outvars` and `.eqns`.

    An open jaxpr is returned unchanged. From JAX 0.11 on there is one class for both,
    and any jaxpr is returned unchanged.
    """
    return getattr(jaxpr, "jaxpr", jaxpr)


def jaxpr_consts(jaxpr) -> Sequence[Any]:
    """Return the constants of a closed jaxpr, arrays; () if it has none or is open."""
    return getattr(jaxpr, "consts", ())


def jaxpr_as_checked_fun(jaxpr) -> Callable:
    """Return the function of a closed jaxpr, in which `jax_debug_nans` applies.

    JAX's `jaxpr_as_fun` switches it off. But when a jitted function has returned a NaN,
    JAX runs it again without `jit` to find the user's line, which is in the equations;
    JAX drops the traceback of an equation, so that the line goes into the message.
    """

    def run(*args):
        try:
            return core.eval_jaxpr(open_jaxpr(jaxpr), jaxpr_consts(jaxpr), *args)
        except FloatingPointError as error:
            cause = error.__cause__
            line = "" if cause is None else _innermost_line(cause)
            if not line or line in str(error):
                raise
            raise FloatingPointError(f"{str(error).rstrip('.')} at {line}") from None

    return run


def finds_nans(args) -> bool:
    """Whether JAX runs a function again, on arrays, as a jitted one returned a NaN."""
    debugged = jax.config.jax_debug_nans or jax.config.jax_debug_infs
    return debugged and not any(isinstance(x, core.Tracer) for x in args)


def _innermost_line(error: BaseException) -> str:
    """Return the innermost line of users' code in a traceback; empty if it has none."""
    package = str(Path(__file__).parents[1])
    frames = [
        f"{frame.f_code.co_filename}:{line} ({frame.f_code.co_name})"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if source_info_util.is_user_filename(frame.f_code.co_filename)
        and not frame.f_code.co_filename.startswith(package)
    ]
    return frames[-1] if frames else ""


@weakref_lru_cache
def without_consts(jaxpr):
    """Turn the constants of a closed jaxpr into its first inputs; cached.

    Args:
      jaxpr: The closed jaxpr.

    Returns:
      `(lifted, consts)`: a closed jaxpr without constants, which takes their values
      first and then the inputs of `jaxpr`; and the tuple of these values. `jaxpr`
      itself and () if there are none.
    """
    consts = jaxpr_consts(jaxpr)
    if not consts:
        return jaxpr, ()
    lifted = pe.convert_constvars_jaxpr(open_jaxpr(jaxpr))
    return closed(lifted), tuple(consts)


def dce_jaxpr(jaxpr, used_outputs: Sequence[bool]):
    """Copy a jaxpr without dead code, and without the inputs that only dead code uses.

    JAX caches the copy.

    Args:
      jaxpr: A closed jaxpr without constants.
      used_outputs: For each result whether the copy returns it.

    Returns:
      `(copy, used_inputs)`: the closed jaxpr from the inputs that it needs to those
      results; and for each input of `jaxpr` whether the copy takes it, a list of bools.
    """
    new, used = pe.dce_jaxpr(jaxpr.jaxpr, list(used_outputs))
    return (new if MERGED else pe.close_jaxpr(new)), used


def without_dead_code(jaxpr):
    """Copy a closed jaxpr without dead code; it keeps all inputs and results."""
    new, _ = pe.dce_jaxpr(jaxpr.jaxpr, [True] * len(jaxpr.out_avals), instantiate=True)
    return new if MERGED else Jaxpr(new, jaxpr.consts)


def backward_pass(jaxpr, args, cts):
    """Compute the cotangents of the inputs in which a jaxpr is linear.

    Args:
      jaxpr: A closed jaxpr.
      args: For each input its value, or an `UndefinedPrimal` if the jaxpr is linear in
        it.
      cts: For each result its cotangent, an array or a symbolic zero (`Zero`).

    Returns:
      A list with an entry for each input: of an input with an `UndefinedPrimal`, its
      cotangent, an array or a `Zero`. The other entries have no meaning.
    """
    return ad.backward_pass(jaxpr.jaxpr, False, jaxpr.consts, args, cts)


def jvp_jaxpr(jaxpr, nonzeros: Sequence[bool]):
    """Derive the jaxpr that computes the results of a jaxpr and their tangents.

    Args:
      jaxpr: A closed jaxpr.
      nonzeros: For each input whether it has a tangent; if not, its tangent is a
        symbolic zero.

    Returns:
      `(new, nonzeros_out)`. The closed jaxpr `new` takes all inputs of `jaxpr`, and
      then the tangents of those inputs that have one; it returns all results, and then
      the tangents of those results that have one. `nonzeros_out`, a list of bools, says
      which results have one.
    """
    return ad.jvp_jaxpr(jaxpr, list(nonzeros), False)


def linearize_jaxpr(jaxpr, nonzeros: Sequence[bool], is_vjp: bool):
    """Linearize a jaxpr: split it into a primal jaxpr and a linear tangent jaxpr.

    The primal jaxpr runs first. It computes the results of `jaxpr`, and saves residuals
    for the tangent jaxpr, which then maps tangents of inputs to tangents of results. A
    result or an input has a tangent unless this is a symbolic zero.

    There are two sorts of residuals. Flat ones are arrays that the tangent jaxpr uses;
    some may be inputs of `jaxpr`, which the primal jaxpr need not return again.
    Structured ones, from JAX 0.11 on, are pytrees that the linearization rules of some
    primitives return separately; their leaves are always returned.

    Args:
      jaxpr: A closed jaxpr.
      nonzeros: For each input whether it has a tangent.
      is_vjp: Whether the tangent jaxpr will be transposed, for reverse mode.

    Returns:
      `(primal, n_flat, nonzeros_out, forwarded, tangent)`:

      * `primal`: A closed jaxpr of the inputs of `jaxpr`. It returns the results of
        `jaxpr`; then `n_flat` flat residuals, those that are not inputs; then the
        leaves of the structured residuals.
      * `n_flat`: The number of flat residuals among the results of `primal`.
      * `nonzeros_out`: For each result of `jaxpr` whether it has a tangent.
      * `forwarded`: An entry for each flat residual, in the order in which `tangent`
        takes them: None if it is the next one of the `n_flat` that `primal` returns; or
        the position of the input of `jaxpr` that it is.
      * `tangent`: A closed jaxpr. It takes all flat residuals; then the tangents of the
        inputs that have one; then the leaves of the structured residuals. It returns
        the tangents of the results that have one.
    """
    split: Any = ad.linearize_jaxpr(jaxpr, tuple(nonzeros), is_vjp=is_vjp)
    primal, out, nzs_out, forwarded, tangent = split
    n_flat = len(out.unpack()[1]) if MERGED else out
    return primal, n_flat, nzs_out, forwarded, tangent


def batch_jaxpr(jaxpr, axis_data, in_axes):
    """Batch a jaxpr, as `vmap` does.

    Args:
      jaxpr: A closed jaxpr.
      axis_data: JAX's `AxisData` of the vmap, which has the name and the size of its
        axis; a batching rule receives it from JAX.
      in_axes: For each input its batch dimension; None: it is not batched.

    Returns:
      `(batched, out_axes)`: the batched closed jaxpr, and for each of its results the
      batch dimension, or None if the result is not batched.
    """
    return batching.batch_jaxpr2(jaxpr, axis_data, tuple(in_axes))


def batch_jaxpr_first(jaxpr, axis_data, batched: Sequence[bool]):
    """Batch a jaxpr along axis 0 of its inputs, so that every result is batched there.

    Args:
      jaxpr: A closed jaxpr.
      axis_data: JAX's `AxisData` of the vmap, which has the name and the size of its
        axis; a batching rule receives it from JAX.
      batched: For each input whether it is batched.

    Returns:
      The batched closed jaxpr. Each result has the batch as axis 0, also one that
      depends on no batched input.
    """
    return batching.batch_jaxpr(jaxpr, axis_data, tuple(batched), True)[0]


def without_name(axis_data):
    """Copy JAX's `AxisData` of a vmap over groups, without the name of its axis.

    It is for batching the jaxpr of an inner program, over another partition. A group
    index in that program belongs to its own groups; with the name, it would become the
    index in the surrounding vmap.

    Args:
      axis_data: The `AxisData`, which has the name and the size of the vmap's axis.
    """
    return dataclasses.replace(axis_data, name=core.no_axis_name)


def add_batch_dimension(x, axis_data, position: int):
    """Broadcast an array along a new batch dimension, as `vmap` does.

    Args:
      x: The array.
      axis_data: JAX's `AxisData` of the vmap, with the size of the new dimension. If
        the batch is sharded over an Explicit mesh axis, so is the new dimension.
      position: The position of the new dimension in the result.
    """
    axis = axis_data.explicit_mesh_axis
    return batching.broadcast(x, axis_data.size, position, axis)


def effects_of(jaxpr) -> frozenset:
    """Return the effects of a jaxpr, open or closed, that its caller can observe.

    An effect on mutable arrays that the jaxpr itself creates is left out.
    """
    return frozenset(jaxpr.effects) - {core.internal_mutable_array_effect}


def effects_but_axes(jaxpr) -> frozenset:
    """Return the effects of a jaxpr but its uses of axis names, as in a `psum`."""
    named = core.NamedAxisEffect
    return frozenset(e for e in effects_of(jaxpr) if not isinstance(e, named))


def has_ordered_effects(eqn) -> bool:
    """Whether an equation has effects that run in the order of the program."""
    return any(map(effects.ordered_effects.contains, eqn.effects))


def new_eqn(eqn, invars, outvars, params, effects):
    """Copy an equation with other variables, parameters and effects.

    Its primitive and its source line stay.

    Args:
      eqn: The equation.
      invars: The list of the new operands, variables or literals.
      outvars: The list of the new result variables.
      params: The dict of all new parameters.
      effects: The set of the new effects.
    """
    return eqn.replace(invars=invars, outvars=outvars, params=params, effects=effects)


def partial_eval_jaxpr(jaxpr, unknown_in: Sequence[bool]):
    """Split a jaxpr into what is computed from known inputs, and the rest.

    The known part runs first, and computes residuals for the unknown part. A residual
    that is itself a known input is not returned again.

    Args:
      jaxpr: A closed jaxpr.
      unknown_in: For each input whether it is unknown.

    Returns:
      `(known, unknown, unknown_out, res_avals, forwarded)`:

      * `known`: A closed jaxpr of the known inputs. It returns the known results, and
        then the residuals that are not known inputs.
      * `unknown`: A closed jaxpr. It takes all residuals, and then the unknown inputs;
        it returns the unknown results.
      * `unknown_out`: For each result of `jaxpr` whether it is unknown.
      * `res_avals`: The types of the residuals that `known` returns.
      * `forwarded`: An entry for each residual, in the order in which `unknown` takes
        them: its position among the known inputs if it is one of them; None if it is
        the next one that `known` returns.
    """
    unknown_in = list(unknown_in)
    return pe.partial_eval_jaxpr_nounits_fwd(jaxpr, unknown_in, instantiate=False)


def unsplit_jaxpr(jaxpr):
    """Split a jaxpr of which nothing is known: all of it is the unknown part.

    The parts are those that `partial_eval_jaxpr` returns if something is known.

    Args:
      jaxpr: A closed jaxpr.

    Returns:
      `(known, unknown, unknown_out, res_avals, forwarded)`:

      * `known`: A closed jaxpr without inputs and results.
      * `unknown`: `jaxpr` itself.
      * `unknown_out`: A list of True for each result, as all are unknown.
      * `res_avals` and `forwarded`: Empty lists, the types and the origins of
        residuals, as there are none.
    """
    nothing = jax.make_jaxpr(lambda: ())()
    return nothing, jaxpr, [True] * len(jaxpr.out_avals), [], []


def jaxprs_in(params) -> list:
    """List the jaxprs, open or closed, among an equation's parameters `eqn.params`.

    Jaxprs in tuples and lists count; jaxprs inside these jaxprs do not. [] if there is
    none.
    """
    return list(core.jaxprs_in_params(params))


@weakref_lru_cache
def is_bound_to_devices(jaxpr) -> bool:
    """Return whether a jaxpr has a `shard_map` or a sharding constraint, at any depth.

    Such a jaxpr cannot do without the mesh on which it was traced. Cached.
    """
    return has_primitive(jaxpr, ("sharding_constraint", "shard_map"))


def has_primitive(jaxpr, names: tuple[str, ...]) -> bool:
    """Return whether a jaxpr has an equation of a primitive with one of these names.

    Args:
      jaxpr: The jaxpr, open or closed; its inner jaxprs at any depth are searched, too.
      names: The names of primitives, such as `("shard_map",)`.
    """
    return any(
        eqn.primitive.name in names
        or any(has_primitive(inner, names) for inner in jaxprs_in(eqn.params))
        for eqn in open_jaxpr(jaxpr).eqns
    )


def bind_equation(eqn, operands, **params) -> list:
    """Bind the primitive of an equation to other operands, with its source line.

    So the equation is evaluated for arrays, or staged for tracers.

    Args:
      eqn: The equation.
      operands: The operands, arrays or tracers.
      **params: Parameters that replace those of the equation; the others stay.

    Returns:
      The list of results, also if the primitive has a single one.
    """
    bind_params = eqn.primitive.get_bind_params({**eqn.params, **params})
    source = eqn.source_info
    names = source_info_util.current_name_stack() + source.name_stack
    with source_info_util.user_context(source.traceback, name_stack=names):
        outs = eqn.primitive.bind(*operands, **bind_params)
    return list(outs) if eqn.primitive.multiple_results else [outs]


def select_outputs(jaxpr, outvars: list):
    """Copy a jaxpr so that it computes only some variables, without dead code.

    Args:
      jaxpr: A closed jaxpr without constants.
      outvars: The variables to compute: inputs, or results of any of its equations.

    Returns:
      `(live, used)`: a closed jaxpr that returns `outvars`, and takes only the inputs
      of `jaxpr` that they depend on; and for each input of `jaxpr` whether `live` takes
      it, a list of bools.
    """
    raw = open_jaxpr(jaxpr)
    debug_info = raw.debug_info.with_unknown_names()
    changed = raw.replace(outvars=outvars, debug_info=debug_info)
    changed = changed if MERGED else pe.close_jaxpr(changed)
    live, used = dce_jaxpr(changed, [True] * len(outvars))
    return live, used


def with_outputs(jaxpr, outvars: list):
    """Copy a closed jaxpr without constants so that it returns other variables."""
    raw = open_jaxpr(jaxpr)
    debug_info = raw.debug_info.with_unknown_names()
    changed = raw.replace(outvars=outvars, debug_info=debug_info)
    return changed if MERGED else pe.close_jaxpr(changed)


def with_results(jaxpr, eqns: list):
    """Copy a closed jaxpr with more equations, and with their results as more results.

    Args:
      jaxpr: The closed jaxpr, without constants.
      eqns: The equations to append, with one result each. Their operands are variables
        of the jaxpr, or results of earlier equations in the list.

    Returns:
      The closed jaxpr: it returns the results of `jaxpr`, and then those of `eqns`.
    """
    raw = open_jaxpr(jaxpr)
    outvars = [*raw.outvars, *(eqn.outvars[0] for eqn in eqns)]
    debug_info = raw.debug_info.with_unknown_names()
    changed = raw.replace(
        eqns=[*raw.eqns, *eqns], outvars=outvars, debug_info=debug_info
    )
    return changed if MERGED else pe.close_jaxpr(changed)


def new_var(aval):
    """Make a new variable of the type `aval`, for a jaxpr."""
    return core.Var(aval)


def stacked_aval(aval, length: int):
    """Return the type of a stack of `length` values of type `aval`, along a new axis 0.

    It has no sharding.
    """
    return ShapedArray((length, *aval.shape), aval.dtype, aval.weak_type)


def user_frames(eqn):
    """Iterate over the frames of users' code in the traceback of an equation.

    The frames are JAX's `Frame`s, innermost first. Those of JAX and of the standard
    library are left out; those of drjax are not.
    """
    return source_info_util.user_frames(eqn.source_info.traceback)


def closed(jaxpr):
    """Close an open jaxpr that has no constants; return a closed jaxpr unchanged."""
    return jaxpr if isinstance(jaxpr, Jaxpr) else Jaxpr(jaxpr, ())


def scan_sizes(eqn) -> tuple[int, int]:
    """Count the constants and the carried values among the operands of a scan.

    Args:
      eqn: The equation of the scan. Its operands are the constants, the carried values,
        and then the stacks over whose slices the scan runs.

    Returns:
      `(number of constants, number of carried values)`.
    """
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = eqn.params["ft_in"].unpack()
    return len(consts), len(carry)


def scan_size_params(eqn, n_consts: int, n_carry: int, n_xs: int) -> dict[str, Any]:
    """Make the parameters of a scan that say how many operands of each sort it has.

    They are for a copy of the equation with other operands. Versions of JAX have
    different parameters for these numbers.

    Args:
      eqn: The equation of the scan, which shows what parameters this version of JAX
        has.
      n_consts: The new number of operands that are constants.
      n_carry: The new number of carried values.
      n_xs: The new number of stacks over whose slices the scan runs.

    Returns:
      A dict of parameters, to replace those of the same names in the equation.
    """
    if "num_consts" in eqn.params:
        return {"num_consts": n_consts, "num_carry": n_carry}
    sizes = n_consts, n_carry, n_xs
    return {"ft_in": flattree.pack(tuple(map(flattree.nones, sizes)))}


def with_equations(jaxpr, eqns: list):
    """Copy a jaxpr, open or closed, with other equations.

    Its constants, inputs and results stay.

    Args:
      jaxpr: The jaxpr.
      eqns: The list of equations that replace its own. They must compute its results.
    """
    raw = open_jaxpr(jaxpr)
    changed = raw.replace(eqns=eqns, debug_info=raw.debug_info)
    if MERGED:
        return changed.with_consts(consts) if (consts := jaxpr.consts) else changed
    return changed if jaxpr is raw else Jaxpr(changed, jaxpr.consts)
