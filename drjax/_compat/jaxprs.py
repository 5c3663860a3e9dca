"""Tracing, and transformations of jaxprs and equations.

Input: a function, a jaxpr or an equation. Output: a new jaxpr or equation, of the class
that the installed version has. Invariant: the input is unchanged. A closed jaxpr is
open to `open_jaxpr`, and has constants if `jaxpr_consts` says so.
"""

import contextlib
import dataclasses
import functools
import traceback
from collections.abc import Callable, Iterator, Sequence, Set
from pathlib import Path
from typing import Any, TypeAlias

import jax
from jax._src import api_util, config, core, effects, source_info_util
from jax._src import linear_util as lu
from jax._src.interpreters import ad, batching
from jax._src.interpreters import partial_eval as pe

from drjax._compat.jax_types import (
    JAXPR_TYPES,
    MERGED,
    Jaxpr,
    ShapedArray,
    UndefinedPrimal,
    Zero,
    cache,
    flattree,
    weakref_lru_cache,
)
from drjax._compat.types import (
    Array,
    Atom,
    Aval,
    ClosedJaxpr,
    Eqn,
    Flags,
    OpenJaxpr,
    Params,
    Var,
)


def trace_to_jaxpr(
    fn: Callable[..., Sequence[Array]], avals: Sequence[Aval], name: str
) -> tuple[Any, list[Array]]:
    """Trace a function of arrays to a closed jaxpr that has no constants.

    The jaxpr takes first the arrays and tracers that `fn` closes over, which are also
    returned; and then the arguments of `fn`. The name is for debug information.
    """
    # Without the names of the arguments: finding them costs as much as a small trace.
    source = api_util.fun_sourceinfo(fn)
    debug_info = core.DebugInfo(name, source, None, core.initial_result_paths)
    fun = lu.wrap_init(fn, debug_info=debug_info)
    jaxpr, _, consts = pe.trace_to_jaxpr_dynamic(fun, avals)
    if not MERGED:
        jaxpr = Jaxpr(pe.convert_constvars_jaxpr(jaxpr), ())
    return jaxpr, consts


def open_jaxpr(jaxpr: ClosedJaxpr | OpenJaxpr) -> Any:
    """Return the open jaxpr in a closed one, with `.invars`, `.outvars` and `.eqns`.

    An open jaxpr is returned unchanged. From JAX 0.11 on there is one class for both,
    and any jaxpr is returned unchanged.
    """
    # Any, as an `OpenJaxpr` is no `Jaxpr` of JAX to type checkers.
    return getattr(jaxpr, "jaxpr", jaxpr)


def jaxpr_consts(jaxpr: ClosedJaxpr | OpenJaxpr) -> Sequence[Array]:
    """Return the constants of a closed jaxpr, arrays; () if it has none or is open."""
    return getattr(jaxpr, "consts", ())


def jaxpr_as_fun(jaxpr: ClosedJaxpr) -> Callable[..., list[Array]]:
    """Return the function of a closed jaxpr, in which `jax_debug_nans` is off."""

    def run(*args: Array) -> list[Array]:
        with jax.debug_nans(False):
            return _evaluate(jaxpr, args)

    return run


def _evaluate(jaxpr: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
    """Evaluate a closed jaxpr; under a trace, equations are staged as they are."""
    raw, trace = open_jaxpr(jaxpr), core.trace_ctx.trace
    if isinstance(trace, pe.DynamicJaxprTrace):
        again: Callable[..., Any] = _staged_again
    elif isinstance(trace, batching.BatchTrace):
        again = _batched_again
    else:
        return core.eval_jaxpr(raw, jaxpr_consts(jaxpr), *args)
    env: dict[Any, Any] = dict(zip(raw.constvars, jaxpr_consts(jaxpr), strict=True))
    env.update(zip(raw.invars, args, strict=True))
    read = lambda x: x.val if isinstance(x, core.Literal) else env[x]
    for eqn in raw.eqns:
        operands = [*map(read, eqn.invars)]
        outs = again(trace, eqn, operands)
        if outs is None:
            with eqn.ctx.manager:
                outs = bind_equation(eqn, operands)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [*map(read, raw.outvars)]


def jaxpr_as_checked_fun(jaxpr: ClosedJaxpr) -> Callable[..., list[Array]]:
    """Return the function of a closed jaxpr, in which `jax_debug_nans` applies.

    JAX's `jaxpr_as_fun` switches it off. But when a jitted function has returned a NaN,
    JAX runs it again without `jit` to find the user's line, which is in the equations;
    JAX drops the traceback of an equation, so that the line goes into the message.
    """

    def run(*args: Array) -> list[Array]:
        try:
            return _evaluate(jaxpr, args)
        except FloatingPointError as error:
            cause = error.__cause__
            line = "" if cause is None else _innermost_line(cause)
            if not line or line in str(error):
                raise
            raise FloatingPointError(f"{str(error).rstrip('.')} at {line}") from None

    return run


def finds_nans(args: Sequence[Array]) -> bool:
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
def without_consts(jaxpr: ClosedJaxpr) -> tuple[ClosedJaxpr, tuple[Array, ...]]:
    """Turn the constants of a jaxpr into its first inputs; cached.

    They are returned, too. A jaxpr without constants is returned itself, with ().
    """
    consts = jaxpr_consts(jaxpr)
    if not consts:
        return jaxpr, ()
    lifted = pe.convert_constvars_jaxpr(open_jaxpr(jaxpr))
    return closed(lifted), tuple(consts)


def dce_jaxpr(
    jaxpr: ClosedJaxpr, used_outputs: Flags
) -> tuple[ClosedJaxpr, list[bool]]:
    """Copy a jaxpr without dead code, and without the inputs that only dead code uses.

    The jaxpr has no constants. The list says for each of its inputs whether the copy
    takes it. JAX caches the copy.
    """
    new, used = pe.dce_jaxpr(jaxpr.jaxpr, list(used_outputs))
    return (new if MERGED else pe.close_jaxpr(new)), used


def without_dead_code(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """Copy a jaxpr without dead code; it keeps all inputs and results.

    Without dead equations, or jaxprs inside of them, it is the same jaxpr.
    """
    raw = open_jaxpr(jaxpr)
    live: set[Any] = {v for v in raw.outvars if type(v) is not core.Literal}
    for eqn in reversed(raw.eqns):
        dead = not eqn.effects and live.isdisjoint(eqn.outvars)
        if dead or eqn.primitive in pe.dce_rules:
            break
        live.update([v for v in eqn.invars if type(v) is not core.Literal])
    else:
        return jaxpr
    new, _ = pe.dce_jaxpr(jaxpr.jaxpr, [True] * len(jaxpr.out_avals), instantiate=True)
    return new if MERGED else Jaxpr(new, jaxpr.consts)


def backward_pass(
    jaxpr: ClosedJaxpr,
    args: Sequence[Array | UndefinedPrimal],
    cts: Sequence[Array | Zero],
) -> Sequence[Any]:
    """Return the cotangents of the inputs in which a jaxpr is linear.

    These inputs have an `UndefinedPrimal` in `args`. The list has an entry for each
    input, an array or a `Zero`; those of the other inputs have no meaning.
    """
    return ad.backward_pass(jaxpr.jaxpr, False, jaxpr.consts, args, cts)


def jvp_jaxpr(jaxpr: ClosedJaxpr, nonzeros: Flags) -> tuple[ClosedJaxpr, list[bool]]:
    """Derive the jaxpr that computes the results of a jaxpr and their tangents.

    It takes all inputs, and then the tangents of those that have one, by `nonzeros`;
    the other tangents are symbolic zeros. It returns all results, and then the tangents
    of those that have one, as the list of bools says.
    """
    return ad.jvp_jaxpr(jaxpr, list(nonzeros), False)


def linearize_jaxpr(
    jaxpr: ClosedJaxpr, nonzeros: Flags, is_vjp: bool
) -> tuple[ClosedJaxpr, int, Flags, Sequence[int | None], ClosedJaxpr]:
    """Linearize a jaxpr: split it into a primal jaxpr and a linear tangent jaxpr.

    The primal jaxpr runs first. It computes the results of `jaxpr`, and saves residuals
    for the tangent jaxpr, which then maps tangents of inputs to tangents of results. A
    result or an input has a tangent unless this is a symbolic zero. `is_vjp` says
    whether the tangent jaxpr will be transposed.

    There are two sorts of residuals. Flat ones are arrays that the tangent jaxpr uses;
    some may be inputs of `jaxpr`, which the primal jaxpr need not return again.
    Structured ones, from JAX 0.11 on, are pytrees that the linearization rules of some
    primitives return separately; their leaves are always returned.

    The result is `(primal, n_flat, nonzeros_out, forwarded, tangent)`:

    * `primal` returns the results of `jaxpr`; then `n_flat` flat residuals, those that
      are not inputs; then the leaves of the structured residuals.
    * `nonzeros_out` says for each result of `jaxpr` whether it has a tangent.
    * `forwarded` has an entry for each flat residual, in the order in which `tangent`
      takes them: None if it is the next one of the `n_flat` that `primal` returns; or
      the position of the input of `jaxpr` that it is.
    * `tangent` takes all flat residuals; then the tangents of the inputs that have one;
      then the leaves of the structured residuals. It returns the tangents of the
      results that have one.
    """
    split: Any = ad.linearize_jaxpr(jaxpr, tuple(nonzeros), is_vjp=is_vjp)
    primal, out, nzs_out, forwarded, tangent = split
    n_flat = len(out.unpack()[1]) if MERGED else out
    return primal, n_flat, nzs_out, forwarded, tangent


def batch_jaxpr(
    jaxpr: ClosedJaxpr, axis_data: batching.AxisData, in_axes: Sequence[int | None]
) -> tuple[ClosedJaxpr, Sequence[int | None]]:
    """Batch a jaxpr, as `vmap` does.

    The batch dimensions of its results are returned, too; None: the value is not
    batched.
    """
    return batching.batch_jaxpr2(jaxpr, axis_data, tuple(in_axes))


def batch_jaxpr_first(
    jaxpr: ClosedJaxpr, axis_data: batching.AxisData, batched: Flags
) -> ClosedJaxpr:
    """Batch a jaxpr along axis 0 of its inputs, so that every result is batched there.

    That includes results that depend on no batched input.
    """
    return batching.batch_jaxpr(jaxpr, axis_data, tuple(batched), True)[0]


def without_name(axis_data: batching.AxisData) -> batching.AxisData:
    """Copy the `AxisData` of a vmap over groups, without the name of its axis.

    It is for batching the jaxpr of an inner program, over another partition. A group
    index in that program belongs to its own groups; with the name, it would become the
    index in the surrounding vmap.
    """
    return dataclasses.replace(axis_data, name=core.no_axis_name)


def add_batch_dimension(x: Array, axis_data: batching.AxisData, position: int) -> Array:
    """Broadcast an array along a new batch dimension at `position`, as `vmap` does.

    If the batch is sharded over an Explicit mesh axis, so is the new dimension.
    """
    axis = axis_data.explicit_mesh_axis
    return batching.broadcast(x, axis_data.size, position, axis)


def effects_of(jaxpr: ClosedJaxpr | OpenJaxpr) -> frozenset[effects.Effect]:
    """Return the effects of a jaxpr that its caller can observe.

    An effect on mutable arrays that the jaxpr itself creates is left out.
    """
    return frozenset(jaxpr.effects) - {core.internal_mutable_array_effect}


def effects_but_axes(jaxpr: ClosedJaxpr | OpenJaxpr) -> frozenset[effects.Effect]:
    """Return the effects of a jaxpr but its uses of axis names, as in a `psum`."""
    named = core.NamedAxisEffect
    return frozenset(e for e in effects_of(jaxpr) if not isinstance(e, named))


def has_ordered_effects(eqn: Eqn) -> bool:
    """Whether an equation has effects that run in the order of the program."""
    known = effects.ordered_effects
    return bool(eqn.effects) and any(map(known.contains, eqn.effects))


def new_eqn(
    eqn: Eqn,
    invars: list[Atom],
    outvars: list[Var],
    params: Params,
    effects: Set[effects.Effect],
) -> Eqn:
    """Copy an equation; its primitive and its source line stay."""
    return eqn.replace(invars=invars, outvars=outvars, params=params, effects=effects)


def partial_eval_jaxpr(
    jaxpr: ClosedJaxpr, unknown_in: Flags
) -> tuple[ClosedJaxpr, ClosedJaxpr, list[bool], list[Aval], list[int | None]]:
    """Split a jaxpr into what is computed from known inputs, and the rest.

    The known part runs first, and computes residuals for the unknown part. A residual
    that is itself a known input is not returned again. The result is
    `(known, unknown, unknown_out, res_avals, forwarded)`:

    * `known` takes the known inputs. It returns the known results, and then the
      residuals that are not known inputs.
    * `unknown` takes all residuals, and then the unknown inputs; it returns the unknown
      results.
    * `unknown_out` says for each result of `jaxpr` whether it is unknown.
    * `res_avals` are the types of the residuals that `known` returns.
    * `forwarded` has an entry for each residual, in the order in which `unknown` takes
      them: its position among the known inputs if it is one of them; None if it is the
      next one that `known` returns.
    """
    unknown_in = list(unknown_in)
    return pe.partial_eval_jaxpr_nounits_fwd(jaxpr, unknown_in, instantiate=False)


def unsplit_jaxpr(
    jaxpr: ClosedJaxpr,
) -> tuple[ClosedJaxpr, ClosedJaxpr, list[bool], list[Aval], list[int | None]]:
    """Split a jaxpr of which nothing is known: all of it is the unknown part.

    The parts are those of `partial_eval_jaxpr`. The known part has no inputs and no
    results, and there are no residuals.
    """
    nothing = jax.make_jaxpr(lambda: ())()
    return nothing, jaxpr, [True] * len(jaxpr.out_avals), [], []


def jaxprs_in(params: Params) -> list[ClosedJaxpr | OpenJaxpr]:
    """List the jaxprs, open or closed, among the parameters of an equation.

    Jaxprs in tuples and lists count; jaxprs inside these jaxprs do not.
    """
    result = []
    for value in params.values():
        for x in value if isinstance(value, tuple | list) else (value,):
            if isinstance(x, JAXPR_TYPES):
                result.append(open_jaxpr(x))
    return result


@weakref_lru_cache
def is_bound_to_devices(jaxpr: ClosedJaxpr | OpenJaxpr) -> bool:
    """Return whether a jaxpr has a `shard_map` or a sharding constraint, at any depth.

    Such a jaxpr cannot do without the mesh on which it was traced. Cached.
    """
    return has_primitive(jaxpr, ("sharding_constraint", "shard_map"))


def has_primitive(jaxpr: ClosedJaxpr | OpenJaxpr, names: tuple[str, ...]) -> bool:
    """Return whether a jaxpr has an equation of such a primitive, at any depth."""
    return any(
        eqn.primitive.name in names
        or any(has_primitive(inner, names) for inner in jaxprs_in(eqn.params))
        for eqn in open_jaxpr(jaxpr).eqns
    )


def bind_equation(eqn: Eqn, operands: Sequence[Any], **params: Any) -> list[Array]:
    """Bind the primitive of an equation to other operands, with its source line.

    So the equation is evaluated for arrays, or staged for tracers. The keywords replace
    parameters of the equation; the others stay.
    """
    trace = core.trace_ctx.trace
    if not params and isinstance(trace, pe.DynamicJaxprTrace):
        outs = _staged_again(trace, eqn, operands)
        if outs is not None:
            return outs
    bind_params = eqn.primitive.get_bind_params({**eqn.params, **params})
    source = eqn.source_info
    names = source_info_util.current_name_stack() + source.name_stack
    with source_info_util.user_context(source.traceback, name_stack=names):
        outs = eqn.primitive.bind(*operands, **bind_params)
    return list(outs) if eqn.primitive.multiple_results else [outs]


def bind_pointwise(
    eqn: Eqn, operands: Sequence[Any], shape: tuple[int, ...], params: Params
) -> list[Array]:
    """Bind a pointwise equation of one result to operands of a shape, or scalars.

    Dtypes are those of its operands; they decide that of the result.
    """
    trace = core.trace_ctx.trace
    if isinstance(trace, pe.DynamicJaxprTrace):
        outs = _staged_pointwise(trace, eqn, operands, shape, params)
        if outs is not None:
            return outs
    return bind_equation(eqn, operands, **params)


def _staged_pointwise(
    trace: pe.DynamicJaxprTrace,
    eqn: Eqn,
    operands: Sequence[Any],
    shape: tuple[int, ...],
    params: Params,
) -> list[Array] | None:
    """Stage a pointwise equation of one result, as `_staged_again` does."""
    avals = [x.aval if isinstance(x, pe.DynamicJaxprTracer) else None for x in operands]
    known = pointwise_result(eqn, avals, shape, is_plain)
    if known is None:
        return None
    return _staged_again(trace, eqn, operands, params, [known])


def pointwise_result(
    eqn: Eqn,
    avals: Sequence[Any],
    shape: tuple[int, ...],
    is_plain: Callable[[Aval], bool],
) -> Aval | None:
    """Return the type of the result of a pointwise equation for other operands.

    `avals` has a None for those that stay. None if JAX has to say it.
    """
    out: Any = eqn.outvars[0].aval
    known: Any = None
    for aval, v in zip(avals, eqn.invars, strict=True):
        if aval is not None:
            if not is_plain(aval) or aval.dtype != v.aval.dtype:
                return None
            if aval.shape == shape:
                known = aval
            elif aval.shape:
                return None
    if known is None or out.weak_type:
        return None
    return known if known.dtype == out.dtype else ShapedArray(shape, out.dtype)


def _batched_again(
    trace: batching.BatchTrace, eqn: Eqn, operands: Sequence[Any]
) -> list[Array] | None:
    """Stage a pointwise equation for a batch along axis 0, as JAX's rule does.

    None if the primitive has another rule, or operands are batched otherwise.
    """
    parent = trace.parent_trace
    rule = batching.fancy_primitive_batchers.get(eqn.primitive)
    broadcasts = getattr(rule, "func", None) is batching.broadcast_batcher
    vectorized = getattr(rule, "func", None) is batching.vectorized_batcher
    if not (broadcasts or vectorized) or len(eqn.outvars) != 1:
        return None
    if not isinstance(parent, pe.DynamicJaxprTrace):
        return None
    values, batched = [], False
    for x in operands:
        if isinstance(x, batching.BatchTracer) and x._trace.tag is trace.tag:
            if x.batch_dim != 0:
                return None
            x, batched = x.val, True
        elif vectorized:
            return None
        values.append(x)
    if not batched:
        return None
    shape = (trace.axis_data.size, *eqn.outvars[0].aval.shape)
    outs = _staged_pointwise(parent, eqn, values, shape, eqn.params)
    return outs and [batching.BatchTracer(trace, outs[0], 0, eqn.source_info)]


def is_plain(aval: Any) -> bool:
    """Whether a type says no more than a shape and a dtype."""
    return type(aval) is ShapedArray and not aval.weak_type and aval.sharding.mesh.empty


# Where JAX stages a primitive otherwise than by an equation of the same parameters.
_RULES_OF_STAGING = (pe.custom_staging_rules, pe.forwarding_rules, pe.const_fold_rules)


def _is_new_dtype(eqn: Eqn, operands: Sequence[Atom]) -> bool:
    # JAX folds constants, and leaves out what changes nothing.
    (x,) = operands
    return type(x) is not core.Literal and x.aval.dtype != eqn.outvars[0].aval.dtype


def _is_new_shape(eqn: Eqn, operands: Sequence[Atom]) -> bool:
    return eqn.params["shape"] != operands[0].aval.shape


def _is_call(eqn: Eqn, operands: Sequence[Atom]) -> bool:
    inline = getattr(eqn.params["inline"], "value", eqn.params["inline"])
    return inline in (False, "auto") and not jaxpr_consts(eqn.params["jaxpr"])


_Staging: TypeAlias = Callable[[Eqn, Sequence[Atom]], bool]
# Of primitives with such a rule, which equations it leaves as they are.
_LEFT: dict[str, _Staging] = {
    **dict.fromkeys("dynamic_slice iota reshape".split(), lambda eqn, operands: True),
    "broadcast_in_dim": _is_new_shape,
    "convert_element_type": _is_new_dtype,
    "jit": _is_call,
}


@functools.cache
def _staging_of(primitive: core.Primitive) -> _Staging | bool:
    kind: Any = type(primitive)
    # Primitives of the planner, and calls, bind others or trace.
    if kind.bind is not core.Primitive.bind:
        return False
    if kind.is_high is not core.Primitive.is_high:
        return False
    plain = not any(primitive in rules for rules in _RULES_OF_STAGING)
    return plain or _LEFT.get(primitive.name, False)


def is_staged_as_it_is(eqn: Eqn, operands: Sequence[Atom]) -> bool:
    """Whether JAX stages an equation again for other operands, of the same types."""
    staging = _staging_of(eqn.primitive)
    for value in eqn.params.values():
        if isinstance(value, JAXPR_TYPES) and value.is_high:
            return False
    return staging if isinstance(staging, bool) else staging(eqn, operands)


def _staged_again(
    trace: pe.DynamicJaxprTrace,
    eqn: Eqn,
    operands: Sequence[Any],
    params: Params | None = None,
    avals: Sequence[Aval] | None = None,
) -> list[Array] | None:
    """Stage an equation for other operands, of which the types of its results follow.

    Nothing is evaluated abstractly: the operands have the types of its operands, unless
    `avals` are the types of the results. None if JAX has to bind its primitive: the
    types differ, or its context is not the one that traces.
    """
    primitive = eqn.primitive
    if (
        eqn.effects
        or config.eager_constant_folding.value
        or eqn.ctx is not core.current_jaxpr_eqn_context()
    ):
        return None
    tracers = []
    for x, v in zip(operands, eqn.invars, strict=True):
        if not isinstance(x, pe.DynamicJaxprTracer):
            if type(v) is not core.Literal or x is not v.val:
                return None
            x = pe.DynamicJaxprTracer(trace, v.aval, v)
        elif x._trace is not trace:
            return None
        elif avals is None and x.aval is not v.aval and x.aval != v.aval:
            return None
        tracers.append(x)
    if not is_staged_as_it_is(eqn, [x.val for x in tracers]):
        return None
    if avals is None:
        avals = [v.aval for v in eqn.outvars]
    source, names = eqn.source_info, source_info_util.current_name_stack()
    if names.stack:
        source = source.replace(name_stack=names + source.name_stack)
    params = eqn.params if params is None else params
    outs: Any = trace.emit_eqn(tracers, avals, primitive, params, eqn.effects, source)
    return outs


def staged_by_type(fn: Callable[..., Array], x: Array, *static: Any) -> Array:
    """Return `fn(x, *static)`; while tracing, `fn` is traced once for each type of `x`.

    So many arrays of few types take less time. `fn` has no effects and closes over no
    arrays, and equal functions do the same.
    """
    trace: Any = core.trace_ctx.trace
    known: Any = x
    if not isinstance(trace, pe.DynamicJaxprTrace) or type(x) is not _TRACER:
        return fn(x, *static)
    if known._trace is not trace:
        return fn(x, *static)
    raw, source = _traced_for_type(fn, static, known.aval), source_info_util.current()
    env = {raw.invars[0]: known}
    for eqn in raw.eqns:
        operands = [
            _TRACER(trace, v.aval, v) if type(v) is core.Literal else env[v]
            for v in eqn.invars
        ]
        types = [v.aval for v in eqn.outvars]
        outs = trace.emit_eqn(
            operands, types, eqn.primitive, eqn.params, eqn.effects, source
        )
        env.update(zip(eqn.outvars, outs, strict=True))
    return env[raw.outvars[0]]


_TRACER: Any = pe.DynamicJaxprTracer


@cache()
def _traced_for_type(
    fn: Callable[..., Array], static: tuple[Any, ...], aval: Aval
) -> OpenJaxpr:
    """Trace a function of an array of a type, in the context of the caller."""
    closed, consts = trace_to_jaxpr(lambda x: [fn(x, *static)], [aval], "staged")
    assert not consts
    return open_jaxpr(closed)


# As JAX names what a `jax.checkpoint` rematerializes, in profiles and compiled code.
_REMATERIALIZED = "rematted_computation"


def rematerializing() -> contextlib.AbstractContextManager[Any, Any]:
    """Name what is traced in this context as rematerialized."""
    return jax.named_scope(_REMATERIALIZED)


def as_rematerialized(eqn: Eqn) -> Eqn:
    """Copy an equation, named as rematerialized."""
    if is_rematerialized(eqn):
        return eqn
    source = eqn.source_info
    names = source_info_util.new_name_stack(_REMATERIALIZED) + source.name_stack
    return eqn.replace(source_info=source.replace(name_stack=names))


def is_rematerialized(eqn: Eqn) -> bool:
    """Whether an equation is named as rematerialized, or was traced so."""
    names = eqn.source_info.name_stack
    return bool(names.stack) and _REMATERIALIZED in str(names)


def select_outputs(
    jaxpr: ClosedJaxpr, outvars: list[Atom]
) -> tuple[ClosedJaxpr, list[bool]]:
    """Copy a jaxpr so that it computes only some variables, without dead code.

    The jaxpr has no constants. The variables are inputs, or results of any of its
    equations. The list says for each input of `jaxpr` whether the copy takes it.
    """
    return dce_jaxpr(with_outputs(jaxpr, outvars), [True] * len(outvars))


def with_outputs(jaxpr: ClosedJaxpr, outvars: list[Atom]) -> ClosedJaxpr:
    """Copy a jaxpr without constants so that it returns other variables."""
    raw = open_jaxpr(jaxpr)
    debug_info = raw.debug_info.with_unknown_names()
    changed = raw.replace(outvars=outvars, debug_info=debug_info)
    return changed if MERGED else pe.close_jaxpr(changed)


def with_results(jaxpr: ClosedJaxpr, eqns: list[Eqn]) -> ClosedJaxpr:
    """Copy a jaxpr with more equations, whose results follow its own results.

    The jaxpr has no constants. Each equation has one result; its operands are variables
    of the jaxpr, or results of earlier equations in the list.
    """
    raw = open_jaxpr(jaxpr)
    outvars = [*raw.outvars, *(eqn.outvars[0] for eqn in eqns)]
    debug_info = raw.debug_info.with_unknown_names()
    changed = raw.replace(
        eqns=[*raw.eqns, *eqns], outvars=outvars, debug_info=debug_info
    )
    return changed if MERGED else pe.close_jaxpr(changed)


def new_var(aval: Aval) -> Var:
    """Make a new variable of this type, for a jaxpr."""
    return core.Var(aval)


def stacked_aval(aval: Aval, length: int) -> Aval:
    """Return the type of a stack of `length` values of type `aval`, along a new axis 0.

    It has no sharding.
    """
    return ShapedArray((length, *aval.shape), aval.dtype, aval.weak_type)


def user_frames(eqn: Eqn) -> Iterator[source_info_util.Frame]:
    """Iterate over the frames of users' code in the traceback of an equation.

    The innermost frame comes first. Frames of JAX and of the standard library are left
    out; those of drjax are not.
    """
    return source_info_util.user_frames(eqn.source_info.traceback)


def closed(jaxpr: ClosedJaxpr | OpenJaxpr) -> Any:
    """Close an open jaxpr that has no constants; return a closed jaxpr unchanged."""
    return jaxpr if isinstance(jaxpr, Jaxpr) else Jaxpr(jaxpr, ())


def scan_sizes(eqn: Eqn) -> tuple[int, int]:
    """Count the constants and the carried values among the operands of a scan.

    The operands are the constants, the carried values, and then the stacks over whose
    slices the scan runs.
    """
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = eqn.params["ft_in"].unpack()
    return len(consts), len(carry)


def scan_size_params(eqn: Eqn, n_consts: int, n_carry: int, n_xs: int) -> Params:
    """Make the parameters of a scan that say how many operands of each sort it has.

    They are for a copy of the scan `eqn` with other operands. Versions of JAX have
    different parameters for these numbers; the equation shows which.
    """
    if "num_consts" in eqn.params:
        return {"num_consts": n_consts, "num_carry": n_carry}
    sizes = n_consts, n_carry, n_xs
    return {"ft_in": flattree.pack(tuple(map(flattree.nones, sizes)))}


def with_equations(jaxpr: ClosedJaxpr | OpenJaxpr, eqns: list[Eqn]) -> Any:
    """Copy a jaxpr, open or closed, with other equations that compute its results.

    Its constants, inputs and results stay.
    """
    raw = open_jaxpr(jaxpr)
    changed = raw.replace(eqns=eqns, debug_info=raw.debug_info)
    if MERGED:
        return (
            changed.with_consts(consts) if (consts := jaxpr_consts(jaxpr)) else changed
        )
    return changed if jaxpr is raw else Jaxpr(changed, jaxpr_consts(jaxpr))
